"""The kinds of events. One event is one thing that has happened on one rank in a training step.

`docs/inside/architecture.md` has a picture of one step; each arrow in it is one kind of event. An event is passed to
the method of the same name of each `Observer` (`observer.py`).

All times are in seconds of `time.perf_counter()`. On Linux this clock is the same for all processes of a host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

from syncline.contract import Contract
from syncline.records import BackwardRecord, BufferRecord, RoundRecord, StragglerRecord


class Source(NamedTuple):
    """The wrapped module to which an event belongs, on one rank."""

    rank: int
    module: str
    """The name of the module's class. If several modules of this class are wrapped, a number follows: "Linear 2"."""


class ForwardEnded(NamedTuple):
    """The forward of a wrapped module has ended."""

    source: Source
    step: int
    """The number of the synchronized backward that comes next."""
    began_at: float
    """When the wrapper was called."""
    computed_from: float
    """When the module's own forward began, because the buffers were synchronized."""
    ended_at: float
    is_training: bool
    buffers: BufferRecord | None
    """The record of the buffers that were sent; None if nothing was sent."""
    contract: Callable[[], Contract]
    """A function that returns the contract of the module, as `ddp.contract`."""
    explain: Callable[[], str]
    """A function that returns the timeline of the module's last step, as `ddp.explain()`."""


class GradientReady(NamedTuple):
    """The gradient of one parameter is ready."""

    source: Source
    step: int
    parameter: str
    at: float


class BucketSent(NamedTuple):
    """The reduction of a bucket has started."""

    source: Source
    step: int
    bucket: int
    payload_bytes: int
    trigger: str | None
    """The parameter whose gradient completed the bucket; None if the bucket was sent when backward ended."""
    at: float


class BucketReduced(NamedTuple):
    """This rank has waited for a bucket, and has its result."""

    source: Source
    step: int
    bucket: int
    began_at: float
    """When the wait began. The reduction may have ended before that."""
    ended_at: float


class BackwardEnded(NamedTuple):
    """A backward has ended. If it was synchronized, `.grad` holds the mean, and all ranks know all reports."""

    source: Source
    step: int
    began_at: float
    """When the first gradient was ready."""
    ended_at: float
    is_synchronized: bool
    buckets: tuple[tuple[int, float, float, float], ...]
    """For each bucket its index, when it was sent, when this rank began to wait for it, and when the wait ended."""
    layout: int
    """A number that is another one as soon as the buckets hold other parameters."""
    metrics: Mapping[str, float]
    """The means over ranks of the values that were given to `ddp.report`; see `BackwardRecord.metrics`."""
    looks_for_unused: bool
    """Whether `find_unused_parameters=True` is set."""
    unused: tuple[str, ...]
    """Names of the parameters that got no gradient on this rank."""
    record: Callable[[], BackwardRecord]
    """A function that returns the whole record, as `ddp.last_step`. It is valid until the next backward."""
    num_ranks: int
    """The number of ranks that train together."""
    ends_step: bool
    """Whether a step ends with this backward. Under `no_sync`, it does not."""


class OptimizerStepped(NamedTuple):
    """An attached optimizer has stepped, or has discarded its step."""

    source: Source
    optimizer: str
    """The name of the optimizer's class."""
    step: int
    """The number of steps of this optimizer so far."""
    began_at: float
    ended_at: float
    is_discarded: bool
    """Whether the step was not made, for example because gradients were not finite (`on_nonfinite="skip"`)."""


class ParametersSynced(NamedTuple):
    """The actions of a strategy have been carried out, such as an average of the parameters."""

    source: Source
    began_at: float
    ended_at: float
    record: RoundRecord


class CallEnded(NamedTuple):
    """A function of Syncline that synchronizes without a backward has ended, such as `sl.mean` or a save."""

    rank: int
    name: str
    began_at: float
    ended_at: float


class RanksChanged(NamedTuple):
    """The ranks of a `sl.steps` loop have changed: some were lost, or a process has joined."""

    rank: int
    """The number of this rank from now on."""
    num_ranks: int
    step: int
    """The step that is made again, or the next one."""
    reason: str
    began_at: float
    """The time at which this rank detected the change."""
    ended_at: float
    num_lost: int = 0
    """The number of ranks that no longer take part, because they were lost or left behind."""


class RankFoundSlow(NamedTuple):
    """A rank is slow in many steps, so that the others wait for it."""

    source: Source
    record: StragglerRecord


class ReplicasDiverged(NamedTuple):
    """A check has found values that differ between ranks although they must be equal.

    All ranks that took part in the check receive this event. Those that raise the error receive it before that.
    """

    rank: int
    check: str
    """The check: "replica check of Linear" for `replica_check=`, or a call such as "sl.check_replicas"."""
    step: int | None
    """The step in which the values were compared; None if the check does not belong to a step."""
    tensor: str
    """The name of the first value that differs; empty if the check compares all values together."""
    num_differing: int
    """The number of values that differ; 0 if the check compares all values together."""
    minority_ranks: tuple[int, ...]
    """The ranks whose values differ from those of most ranks; empty if no value has a majority."""
    agreed_at_step: int | None
    """The last step at which `tensor` was equal on all ranks; None if unknown. Step 0 is the time of the wrapping."""
    outcome: Literal["raised", "repaired", "warned"]
    """The reaction: the error is raised, the values are made equal, or training continues with values that differ."""
    words: str
    """The text of the error or the warning."""
    at: float


class PlaceSeen(NamedTuple):
    """The place of this rank, seen by a thread of Syncline: every half second, or less often while it does not change.

    In a world of one rank, there are no such events.
    """

    rank: int
    step: int | None
    words: str
    """The step, the phase, the bucket, the call in which the rank waits, and the line of the program, if known."""
    at: float
