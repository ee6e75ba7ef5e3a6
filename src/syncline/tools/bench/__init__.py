"""Competitors that take turns: ratios, tables, pictures.

machine.py    what this machine is; needs no torch
mpi.py        the MPIs of this machine
mpi_peer.py   one rank of an MPI (a script)
plot.py       loss against bytes: tables and pictures
ranks.py       what runs in each rank of a benchmark
tables.py     figures as text: pure
timing.py     rounds in which competitors take turns, and their summary
workloads.py  reductions, models and training steps that are timed
"""

from __future__ import annotations
