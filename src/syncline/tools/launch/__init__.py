"""The launcher behind `syncline run`. It runs ranks as processes, on torch's elastic agent.

failures.py   the rank that failed first, and the text of its failure
guardian.py   a process that cleans up after a launcher that was killed
output.py     the ranks' output, with the rank before each line, and the launcher's messages
stopping.py   signals to the launcher, and the end of the ranks
supervise.py  one job from start to exit code, with a store of its own
worker.py     the wrapper that runs the user's program in a rank (a script; it is never imported)
"""

from __future__ import annotations
