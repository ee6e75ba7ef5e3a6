"""`syncline watch` and `syncline run --live`: the present state of each rank of a running job, from its trace.

follow.py    reads new rows of a trace, and keeps the present states of the ranks
live.py      the display of `syncline run --live`, at the lower end of a terminal
ranks.py     the present state of each rank, and a diagnosis of the run (pure functions)
"""
