"""Tools that check whether a step has the same results in each run and on each rank, and that locate differences.

Imports: errors, suggestions, words, checks, trees, user_code, _torch, transport, session, tensors, equality, gradients,
data, checkpoint, verbs, ddp.

compare.py           find the first difference between recordings (pure functions)
compare_replicas.py  `compare_replicas` and `assert_replicas_agree`
diagnosis.py         name the causes of differences, and merge the findings of all ranks (pure functions)
recording.py         record one run, module by module
repeated_runs.py     run a computation again from one state, and report what differs
report.py            the report, and facts about this rank's versions, hardware and settings
run_state.py         restore the state before each run; give all ranks rank 0's inputs; change torch's settings
values.py            fingerprints of the inputs and outputs of modules
"""

from __future__ import annotations

from syncline.debug.compare_replicas import assert_replicas_agree, compare_replicas
from syncline.debug.report import Disagreement, Finding, Report

__all__ = ["Disagreement", "Finding", "Report", "assert_replicas_agree", "compare_replicas"]
