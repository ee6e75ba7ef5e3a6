"""The launcher behind `syncline run`. It runs ranks as processes, on torch's elastic agent.

failures.py   finds the rank that failed first, and the reason
guardian.py   a process that cleans up after a launcher that was killed
output.py     copies the ranks' output, and puts the rank before each line
stopping.py   signals, and the end of workers
supervise.py  runs one job from start to exit code, with a store of its own
worker.py     runs in a rank before the user's program (a script; it is never imported)
"""

from __future__ import annotations
