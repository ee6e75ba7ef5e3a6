"""Starting ranks: `syncline run` on torch's elastic launcher.

supervise.py   runs one job from start to exit code
output.py      brings what the ranks print to the terminal, named by rank
signals.py     Ctrl-C and its kin: pass the first on, kill at the second
stops.py       ranks that stop because they were asked to are no failures
report.py      which rank failed first, in words (pure)
worker.py      what runs in a rank before the user's program (a script, never imported)
"""
