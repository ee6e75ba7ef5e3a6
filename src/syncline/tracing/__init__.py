"""Traces: what has happened in each step of each rank, recorded in files that survive the process.

Imports: words, checks, contract, user_code, events, liveness, session.

file.py      the file of one rank, whose size is bounded
recorder.py  the observer that writes the events of a process
rows.py      the rows of a file, as they are written and read (pure functions)
trace.py     `sl.trace`
"""

from __future__ import annotations

from syncline.tracing.trace import Trace, trace

__all__ = ["Trace", "trace"]
