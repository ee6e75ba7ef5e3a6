"""Trials of `syncline plan --tune`: a program runs for a few steps with each of the best settings.

ranks.py    starts the ranks of a trial; runs in each: records a trace, and ends the program after some steps
trials.py   which settings are tried, and which has won (pure functions)
"""
