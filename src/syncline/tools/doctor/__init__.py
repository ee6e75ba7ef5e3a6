"""What `syncline doctor` runs in the ranks of a program.

host.py   is this host fit for training in parallel?
watch.py  wait for a forward of a wrapped module, and examine it
"""
