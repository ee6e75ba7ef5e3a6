"""One dry step of a script, in words and as a picture: `syncline explain SCRIPT`.

The script runs in one process, as one rank of a job whose other ranks are imitated (`transport/mirror.py`). It is
stopped after one step. What happened in the step is passed to the command as plain data, which it prints.

dry_run.py   runs in the process of the script: observes its steps, and ends the script after one of them
groups.py    the process groups that the script creates: their other ranks are imitated, too
picture.py   the picture of a step, in characters (pure functions)
report.py    what the process of the script reports, and its text (pure functions)
rows.py      from the events of a step to the rows of the picture (pure functions)
"""
