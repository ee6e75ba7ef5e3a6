"""Tools that check whether a step has the same results in each run and on each rank, and that locate differences.

Imports: words, checks, trees, user_code, _torch, transport, session, tensors, equality, gradients,
checkpoint, verbs.

diagnosis.py    the first difference between recordings, and its causes (pure functions)
examination.py  `compare_replicas`: run a computation again from one state, and report what differs
recording.py    record one run, module by module
report.py       the report, and facts about this rank's versions, hardware and settings
"""

from __future__ import annotations

from syncline.debug.examination import compare_replicas
from syncline.debug.report import Finding, Report

__all__ = ["Finding", "Report", "compare_replicas"]
