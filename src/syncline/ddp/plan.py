"""The plan of a wrapped module: facts in plain values, which determine how gradients, parameters and buffers sync.

The ranks compare most of these facts. `report.py` describes the plan in words, as the contract and as the timeline. No
code reads these words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from typing import NamedTuple

from torch import Tensor

from syncline.contract import Rules
from syncline.ddp.config import Config
from syncline.ddp.selection import Selection
from syncline.records import BackwardRecord, BufferRecord, RoundRecord
from syncline.words import format_bytes, format_count


class Reduction(StrEnum):
    """The possible ways in which gradients are reduced."""

    NOTHING = auto()
    """Gradients are not reduced, because there is only one rank, or because the strategy keeps gradients local."""
    ALL_REDUCE = auto()
    SHARDS = auto()
    """A reduce_scatter reduces gradients. Each rank receives its shard of the mean."""
    ENCODED = auto()
    """A compression encodes gradients and averages them."""
    HOOK = auto()
    """A communication hook of the user reduces gradients."""


class Parameters(Enum):
    """The possible ways in which parameters are kept equal."""

    ALONE = auto()
    """There is only one rank, so nothing is done."""
    BROADCAST = auto()
    """Rank 0 broadcast its parameters at construction. Since then, equal gradients keep the replicas equal."""
    AS_GIVEN = auto()
    """The user guarantees that the parameters were equal at construction (`init_sync=False`)."""
    ONE_COPY = auto()
    """All ranks of a host use one copy of the parameters, and each rank writes its shard of this copy."""
    GATHERED = auto()
    """Each rank has its own copy of the parameters. It steps its shard, then receives the shards of the other ranks."""
    BY_STRATEGY = auto()
    """The strategy synchronizes parameters from time to time."""


class Buffers(Enum):
    """The possible times at which buffers are synchronized."""

    ABSENT = auto()
    """The module has no buffers."""
    ALONE = auto()
    """There is only one rank, so nothing is done."""
    LOCAL = auto()
    """The module has got its buffers after it was wrapped. As in torch's class, each rank keeps its own."""
    OFF = auto()
    """Buffers are not synchronized after construction."""
    WITH_PARAMETERS = auto()
    """Buffers are synchronized in the parameter syncs of the strategy."""
    BEFORE_FORWARD = auto()


class Size(NamedTuple):
    """The number and total size of some tensors. Its text reads like `8 tensors, 421 kB`."""

    num_tensors: int
    num_bytes: int

    def __str__(self) -> str:
        if not self.num_tensors:
            return "none"
        return f"{format_count(self.num_tensors, 'tensor')}, {format_bytes(self.num_bytes)}"


class Sizes(NamedTuple):
    """The sizes of the gradients, parameters and buffers that are synchronized."""

    gradients: Size
    parameters: Size
    buffers: Size


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The facts about a wrapped module on one rank.

    The properties of a plan derive from these facts how the module is synchronized.
    """

    config: Config
    module: str
    transport: str
    shares_memory: bool
    """Whether ranks on one host reduce in memory that they share."""
    rank: int
    num_ranks: int
    num_hosts: int
    sizes: Sizes
    rules: Rules | None
    """The rules of a strategy under which replicas drift; None under `EveryStep`."""
    workers: tuple[int, ...] | None
    """For each rank, the index of its worker. A worker is a group of ranks that average their gradients together.
    None if all ranks average their gradients together."""
    num_copies: int = 0
    """Number of copies of sharded parameters, if the ranks of a host use one copy; 0 if each rank has its own copy."""
    comm_hook: str | None = None
    """The name of the user's communication hook; None if there is none."""
    has_buffer_hook: bool = False
    has_local_buffers: bool = False
    """Whether no buffer is ever synchronized, because the module had none when it was wrapped."""
    optimizers: tuple[str, ...] = ()
    """The class names of the attached optimizers, with a description of their shards if they are sharded."""
    metrics: tuple[str, ...] = ()
    """The names of the metrics that `ddp.report` averages."""
    reports: tuple[str, ...] = ()
    """The subjects of the safety checks: what each rank reports with its gradients, in words."""
    num_report_bytes: int = 0
    """The size of all reports of one rank, in bytes."""

    @property
    def reducing_ranks(self) -> list[int]:
        """The ranks with which this rank averages its gradients, including this rank."""
        workers = self.workers or (0,) * self.num_ranks
        return [rank for rank, worker in enumerate(workers) if worker == workers[self.rank]]

    @property
    def acting_rules(self) -> Rules | None:
        """The rules of a strategy under which replicas drift, if the strategy acts in this world.

        None under `EveryStep`. In a world of one rank, None if the strategy does nothing there.
        """
        acts = self.rules is not None and (self.num_ranks > 1 or self.rules.acts_alone)
        return self.rules if acts else None

    @property
    def reduction(self) -> Reduction:
        """The way in which gradients are reduced."""
        rule = None if self.rules is None else self.rules.gradients
        if (self.num_ranks == 1 and self.comm_hook is None) or (rule is not None and rule.how is None):
            return Reduction.NOTHING
        if self.comm_hook is not None:
            return Reduction.HOOK
        if self.config.compression is not None:
            return Reduction.ENCODED
        return Reduction.SHARDS if self.config.gradients.sharded else Reduction.ALL_REDUCE

    @property
    def averages_in_backward(self) -> bool:
        """True if at least some backwards average gradients."""
        return self.reduction is not Reduction.NOTHING and (self.rules is None or self.rules.reduces)

    @property
    def parameters(self) -> Parameters:
        """The way in which parameters are kept equal."""
        if self.acting_rules is not None:
            return Parameters.BY_STRATEGY
        if self.num_ranks == 1:
            return Parameters.ALONE
        if self.config.gradients.sharded:
            return Parameters.ONE_COPY if self.num_copies else Parameters.GATHERED
        return Parameters.BROADCAST if self.config.init_sync else Parameters.AS_GIVEN

    @property
    def buffers(self) -> Buffers:
        """The time at which buffers are synchronized."""
        if not self.sizes.buffers.num_tensors:
            return Buffers.ABSENT
        if self.num_ranks == 1:
            return Buffers.ALONE
        if self.has_local_buffers:
            return Buffers.LOCAL
        if self.config.buffers == "none":
            return Buffers.OFF
        return Buffers.BEFORE_FORWARD if self.rules is None else Buffers.WITH_PARAMETERS

    @property
    def has_one_copy(self) -> bool:
        """True if all ranks use one copy of the parameters."""
        return self.config.gradients.sharded and self.num_copies == 1

    @property
    def compared_parts(self) -> list[str]:
        """The names of the parts of a replica that `replica_check` compares."""
        parts = [] if self.has_one_copy else ["parameters"]
        if self.rules is None:
            are_sent = self.config.buffers != "none" and not self.has_local_buffers
            has_buffers = self.sizes.buffers.num_tensors and are_sent
            parts += ["buffers"] if has_buffers and not self.has_buffer_hook else []
            parts += ["optimizer state"] if self.optimizers and not self.config.gradients.sharded else []
        return parts

    def compared(self) -> list[str]:
        """Return a line `name: value` for each fact that must be equal on all ranks."""
        facts: dict[str, object] = {
            "module": self.module,
            "transport": self.transport,
            "strategy": "EveryStep()" if self.rules is None else self.rules.strategy,
            "communication hook": self.comm_hook,
        }
        if self.sizes.buffers.num_tensors and self.config.sends_buffers:
            facts["buffers"] = self.config.buffers
            facts["buffers are broadcast at construction"] = self.config.init_buffers
        return [f"{name}: {value}" for name, value in (facts | self.config.compared()).items()]


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """The last records of one rank, which the contract and the timeline show. Before the first step they are None."""

    backward: BackwardRecord | None
    buffers: BufferRecord | None
    round: RoundRecord | None = None
    """The last parameter sync; None if there was none."""
    next_round: int | None = None
    """The step after which the next parameter sync runs; None if that is unknown."""
    synced_at: Mapping[str, int] = field(default_factory=dict)
    """The step after which a group of tensors was last synchronized. The keys are the names of rows of the contract."""
    replicas_compared: tuple[int, bool] | None = None
    """The step of the last comparison of replicas, and whether the replicas were equal; None before the first
    comparison."""
    num_repairs: int = 0
    """Number of comparisons that found different replicas and made them equal."""
    device: str = "cpu"
    """The type of the device on which the gradients are."""


def sizes_of(chosen: Selection) -> Sizes:
    """Return the sizes of the gradients, parameters and buffers in a selection."""
    return Sizes(*map(_size, (chosen.reduced, chosen.parameters, chosen.buffers)))


def _size(named: Sequence[tuple[str, Tensor]]) -> Size:
    return Size(len(named), sum([tensor.nbytes for _, tensor in named]))
