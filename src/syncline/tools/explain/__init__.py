"""One step of a script, in words and as a picture: `syncline explain SCRIPT`.

The script runs as a job of a few ranks on this host, and is ended after the step. Rank 0 passes what happened in the
step to the command as plain data, which it prints.

ranks.py     runs in each rank: observes its steps, and ends the script after one of them
report.py    what rank 0 reports, its text, and the picture of a step in characters (pure functions)
rows.py      from the events of a step to the rows of the picture (pure functions)
"""
