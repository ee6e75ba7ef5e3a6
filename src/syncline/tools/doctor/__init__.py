"""The checks of `syncline doctor`.

host.py   checks whether this host is fit for parallel training
watch.py  runs in each rank of a script, and examines a module at a forward of its DistributedDataParallel
"""
