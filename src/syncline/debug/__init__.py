"""Is a step the same, bit for bit, computed twice, and on every rank? If not: which module, and why?

replicas.py     compare_replicas and assert_replicas_agree
report.py       what was found, as data and as a text
own.py          pure: what several ranks have found alike, said once
examine.py      the runs, within a rank and between ranks
subject.py      what a run changes, put back
recording.py    what a run did, module by module
values.py       fingerprints of what a module is given and returns
chance.py       where the random number generators are
compare.py      pure: the first place at which recordings part
diagnosis.py    pure: why, in words
wrappers.py     what DistributedDataParallel says has to be equal
aligning.py     rank 0's inputs and random numbers, for a while
facts.py        what a rank computes with
watch.py        `syncline doctor SCRIPT`, inside of each rank
host.py         what training in parallel needs of a host
"""

from __future__ import annotations

from syncline.debug.replicas import assert_replicas_agree, compare_replicas
from syncline.debug.report import Disagreement, Finding, Report

__all__ = ["Disagreement", "Finding", "Report", "assert_replicas_agree", "compare_replicas"]
