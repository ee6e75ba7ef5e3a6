"""Pure functions of plain data: what to do, before anything is done.

buckets.py     which gradients travel together, and in which order
packing.py     which tensors travel alone and which are packed into chunks
cost.py        bytes on the wire
difference.py  what ranks do not agree on, in words
population.py  evolution strategies: who evaluates what, by which noise, and what the losses say
trees.py       nested containers, their leaves, and the same container back
"""
