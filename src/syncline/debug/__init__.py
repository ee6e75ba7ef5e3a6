"""Tools that check whether a step is the same bit for bit, run twice and on every rank, and that locate differences.

Imports: errors, differences, checks, trees, user_code, _torch, transport, session, tensors, equality, gradients,
sharded, data, checkpoint, verbs, ddp.

alignment.py         the same inputs, random numbers and buffers on all ranks
compare.py           the first difference between recordings: pure
compare_replicas.py  `compare_replicas` and `assert_replicas_agree`
diagnosis.py         the causes of differences, and the findings of all ranks combined: pure
recording.py         the recording of one run, module by module
repeated_runs.py     run a computation again from one state, and report differences
report.py            the report, and facts about this rank's machine
run_state.py         the state from which a computation is run again
values.py            fingerprints of inputs and outputs of modules
"""

from __future__ import annotations

from syncline.debug.compare_replicas import assert_replicas_agree, compare_replicas
from syncline.debug.report import Disagreement, Finding, Report

__all__ = ["Disagreement", "Finding", "Report", "assert_replicas_agree", "compare_replicas"]
