"""The measurement of `syncline bench`: competitors take turns, and their figures become tables and pictures.

machine.py    the description of this machine; needs no torch
mpi.py        the ranks of an MPI, started and asked to measure
mpi_peer.py   the program of one rank of an MPI (a script)
plot.py       the pictures of `syncline bench --plot`
ranks.py      the program of each rank
tables.py     sizes and figures as text; pure
timing.py     rounds in which competitors take turns, and the summary of the rounds
workloads.py  the all_reduce calls and the training steps that are measured
"""

from __future__ import annotations
