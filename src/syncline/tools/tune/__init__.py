"""Trials of `syncline plan --tune`: a program runs for a few steps with each of the best settings.

job.py      the process that starts the ranks of one trial
ranks.py    runs in each rank of a trial: records a trace, and ends the program after some steps
trials.py   which settings are tried, and which has won (pure functions)
"""

from __future__ import annotations
