"""The checks of `syncline doctor`.

host.py   checks whether this host is fit for parallel training
watch.py  in each rank of a script: examine the module at a forward of its wrapper
"""
