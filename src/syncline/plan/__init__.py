"""Pure functions of plain data: what to do, before anything is done.

buckets.py     which gradients travel together, and in which order
packing.py     which tensors travel alone and which are packed into chunks
cost.py        bytes on the wire
difference.py  what ranks do not agree on, in words
trees.py       nested containers, their leaves, and the same container back
"""
