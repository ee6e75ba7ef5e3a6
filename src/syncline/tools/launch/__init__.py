"""`syncline run`: ranks as processes, on torch's elastic agent.

failures.py    which rank failed first, and why: pure, but for reading error files
guardian.py    a process that cleans up after a launcher that was killed
output.py      what ranks print, each line with its rank
rendezvous.py  the store of a job
stopping.py    signals, and the last moments of a worker
supervise.py   one job from start to exit code
worker.py      what runs in a rank before the user's program (a script, never imported)
"""

from __future__ import annotations
