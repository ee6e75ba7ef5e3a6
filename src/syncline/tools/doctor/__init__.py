"""The parts of `syncline doctor` that run in the ranks of a program.

host.py   checks of this host for parallel training
watch.py  wait for a forward of a wrapped module, and examine it
"""
