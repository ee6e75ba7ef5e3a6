"""Events: what has happened in a training step, and the observers that receive it.

Imports: records, contract, user_code.

kinds.py     one class for each kind of event
observer.py  `Observer`, which users subclass; the observers of this process, and `emit`
"""

from __future__ import annotations

from syncline.events.kinds import (
    BackwardEnded,
    BucketReduced,
    BucketSent,
    CallEnded,
    ForwardEnded,
    GradientReady,
    OptimizerStepped,
    ParametersSynced,
    PlaceSeen,
    RankFoundSlow,
    RanksChanged,
    ReplicasDiverged,
    Source,
)
from syncline.events.observer import OBSERVERS, Observer, called, emit

__all__ = [
    "OBSERVERS",
    "BackwardEnded",
    "BucketReduced",
    "BucketSent",
    "CallEnded",
    "ForwardEnded",
    "GradientReady",
    "Observer",
    "OptimizerStepped",
    "ParametersSynced",
    "PlaceSeen",
    "RankFoundSlow",
    "RanksChanged",
    "ReplicasDiverged",
    "Source",
    "called",
    "emit",
]
