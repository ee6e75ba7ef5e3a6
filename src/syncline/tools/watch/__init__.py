"""`syncline watch`: what each rank of a run that still runs is doing, from its trace.

follow.py  reads what has been added to the files of a trace
ranks.py   the present state of each rank, and what it means (pure functions)
"""
