"""Benchmarks in which competitors take turns: ratios, tables, pictures.

mpi.py        MPIs as competitors, and facts about this machine
mpi_peer.py   one rank of an MPI (a script)
plot.py       loss against bytes: tables and pictures
ranks.py      the program of each rank of a benchmark
tables.py     figures as text: pure
timing.py     rounds in which competitors take turns, and their summary
workloads.py  reductions, models and training steps to time
"""

from __future__ import annotations
