"""The measurement of `syncline bench`. Competitors take turns, and their times are shown in tables and pictures.

baseline.py    reads the file of a measurement, and compares its settings with those of another one
calibrate.py   the program of each rank of `syncline bench --calibrate`
goals.py       figures with goals, and the comparison of two measurements (pure functions)
job_times.py   how long the parts of a step take on one rank, without synchronization
machine.py     describes this machine (imports no torch)
measured.py    runs the ranks of `calibrate.py` and `model_times.py`, and reads what they have found
model_times.py the program of each rank that measures a model for `syncline plan`
plot.py        draws the pictures of `syncline bench --plot`
ranks.py       the program of each of Syncline's ranks
tables.py      formats sizes and results as text (pure functions)
timing.py      runs rounds in which competitors take turns, and summarizes the rounds
workloads.py   the all_reduce calls and the training steps that are measured
"""

from __future__ import annotations
