"""The launchers behind `syncline run` and `sl.launch`, which run each rank as a process.

`syncline run` is based on torch's elastic agent.

display.py        displays of the ranks' output
failures.py       finds the rank that failed first, and describes its failure
function.py       runs a function on several ranks, from a notebook or a plain script
function_rank.py  the process of a rank that runs a function
guardian.py       a process that cleans up if the launcher is killed
losses.py         the ranks of this host that are lost in `sl.steps`, and the launchers of other hosts
output.py         prints the ranks' output, with the rank before each line, and the launcher's messages
stopping.py       handles signals to the launcher, and ends the ranks
supervise.py      runs one job from start to exit code, with a store for this job only
worker.py         the wrapper that runs the user's program in a rank (a script), and the command line that starts it
"""

from __future__ import annotations
