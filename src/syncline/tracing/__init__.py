"""Traces: what has happened in each step of each rank, recorded in files that survive the process.

Imports: faces, words, checks, environment, contract, user_code, events, launchers, liveness, session.

file.py      the file of one rank, whose size is bounded
launched.py  starts the trace in a rank of `syncline run --trace`
lines.py     the lines of a file, made of events (pure functions)
recorder.py  the observer that writes the events of a process
rows.py      the rows of a file, as they are written and read (pure functions)
trace.py     `sl.trace`
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncline.faces import hand_out

if TYPE_CHECKING:
    from syncline.tracing.trace import Trace as Trace

hand_out(__name__)  # a reader of traces needs no torch
