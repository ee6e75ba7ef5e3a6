"""The measurements of `syncline bench` and `syncline plan`, on ranks of this machine.

calibrate.py   the program of each rank of `syncline bench --calibrate`: what synchronization costs
measured.py    runs the ranks of a program, and reads what they have found
model_times.py the program of each rank that measures a model for `syncline plan`, without synchronization
ranks.py       the program of each rank of `syncline bench`: all_reduce by size, and a training step
results.py     medians, ratios and intervals, as a text and as a picture; this machine in words (imports no torch)
timing.py      runs rounds in which competitors take turns
"""

from __future__ import annotations
