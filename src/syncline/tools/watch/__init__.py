"""`syncline watch` and `syncline run --live`: what each rank of a run that still runs is doing, from its trace.

follow.py    reads what has been added to the files of a trace, and knows the present states of the ranks
live.py      the display of `syncline run --live`, at the lower end of a terminal
ranks.py     the present state of each rank, and what it means (pure functions)
"""
