"""Tools that check whether a step has the same results in each run and on each rank, and that locate differences.

Imports: suggestions, words, checks, trees, user_code, _torch, transport, session, tensors, equality, gradients,
checkpoint, verbs.

compare_replicas.py  `compare_replicas`
diagnosis.py         the first difference between recordings, and its causes (pure functions)
examination.py       run a computation again from one state, and report what differs
recording.py         record one run, module by module
report.py            the report, and facts about this rank's versions, hardware and settings
run_state.py         restore the state before each run; give all ranks rank 0's inputs; change torch's settings
"""

from __future__ import annotations

from syncline.debug.compare_replicas import compare_replicas
from syncline.debug.report import Finding, Report

__all__ = ["Finding", "Report", "compare_replicas"]
