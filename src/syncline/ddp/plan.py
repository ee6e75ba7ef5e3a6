"""The plan of a wrapped module: plain facts, and what follows from them for gradients, parameters and buffers.

The ranks compare these facts. `report.py` puts them into words, as the contract and as the timeline,
and nothing decides by those words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from torch import Tensor

from syncline.contract import Rules
from syncline.ddp.config import Config
from syncline.ddp.selection import Selection
from syncline.records import BackwardRecord, BufferRecord, RoundRecord


class Reduction(Enum):
    """How gradients are reduced."""

    NOTHING = auto()
    """They are not: there is one rank, or the strategy keeps gradients local."""
    ALL_REDUCE = auto()
    SHARDS = auto()
    """Each rank gets its shard of the mean."""
    ENCODED = auto()
    """By the compression."""
    HOOK = auto()
    """By the user's communication hook."""


class Parameters(Enum):
    """How parameters are kept equal."""

    ALONE = auto()
    """There is one rank."""
    BROADCAST = auto()
    """Rank 0's were broadcast once; equal gradients keep them equal."""
    AS_GIVEN = auto()
    """The caller guarantees that they were equal at construction."""
    ONE_COPY = auto()
    """All ranks of a host use one copy, of which each rank writes its shard."""
    GATHERED = auto()
    """Each rank steps its shard, then all gather the shards."""
    BY_STRATEGY = auto()


class Buffers(Enum):
    """When buffers are synchronized."""

    ABSENT = auto()
    """The module has none."""
    ALONE = auto()
    """There is one rank."""
    OFF = auto()
    WITH_PARAMETERS = auto()
    """When the strategy syncs parameters."""
    BEFORE_FORWARD = auto()


class Comparison(Enum):
    """When replicas are compared."""

    IN_BACKWARD = auto()
    """In backwards that average gradients."""
    AFTER_SYNC = auto()
    """After parameter syncs that make parameters equal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """The numbers and sizes of parameters, gradients and buffers."""

    num_parameters: int
    parameter_bytes: int
    num_gradients: int
    gradient_bytes: int
    num_buffers: int
    buffer_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The facts about a wrapped module on one rank."""

    config: Config
    module: str
    transport: str
    num_ranks: int
    num_hosts: int
    sizes: Sizes
    rules: Rules | None = None
    """The rules of a strategy under which replicas drift."""
    num_reducing: int | None = None
    """Number of ranks that average gradients with each other, if that is not all of them."""
    num_copies: int = 0
    """Number of copies of sharded parameters, one in each host's memory for its ranks; 0 if each rank has its own."""
    comm_hook: str | None = None
    has_buffer_hook: bool = False
    optimizers: tuple[str, ...] = ()
    """The attached optimizers."""
    metrics: tuple[str, ...] = ()
    """The metrics that `ddp.report` was given."""

    @property
    def acting_rules(self) -> Rules | None:
        """The strategy's rules; None if there is no strategy, or if it does nothing on a single rank."""
        acts = self.rules is not None and (self.num_ranks > 1 or self.rules.acts_alone)
        return self.rules if acts else None

    @property
    def reduction(self) -> Reduction:
        """How gradients are reduced."""
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
        """Whether any backward averages gradients."""
        return self.reduction is not Reduction.NOTHING and (self.rules is None or self.rules.reduces)

    @property
    def parameters(self) -> Parameters:
        """How parameters are kept equal."""
        if self.acting_rules is not None:
            return Parameters.BY_STRATEGY
        if self.num_ranks == 1:
            return Parameters.ALONE
        if self.config.gradients.sharded:
            return Parameters.ONE_COPY if self.num_copies else Parameters.GATHERED
        return Parameters.BROADCAST if self.config.init_sync else Parameters.AS_GIVEN

    @property
    def buffers(self) -> Buffers:
        """When buffers are synchronized."""
        if not self.sizes.num_buffers:
            return Buffers.ABSENT
        if self.num_ranks == 1:
            return Buffers.ALONE
        if self.config.buffers == "none":
            return Buffers.OFF
        return Buffers.BEFORE_FORWARD if self.rules is None else Buffers.WITH_PARAMETERS

    @property
    def has_one_copy(self) -> bool:
        """Whether all ranks use one copy of the parameters, so that there is nothing to compare."""
        return self.config.gradients.sharded and self.num_copies == 1

    @property
    def compared_parts(self) -> list[str]:
        """The parts of a replica that are compared."""
        parts = [] if self.has_one_copy else ["parameters"]
        if self.rules is None:
            has_buffers = self.sizes.num_buffers and self.config.buffers != "none"
            parts += ["buffers"] if has_buffers and not self.has_buffer_hook else []
            parts += ["optimizer state"] if self.optimizers and not self.config.gradients.sharded else []
        return parts

    @property
    def comparisons(self) -> list[Comparison]:
        """When replicas are compared; empty if never."""
        if self.num_ranks == 1 or not self.compared_parts:
            return []
        found = [Comparison.IN_BACKWARD] if self.averages_in_backward else []
        if self.rules is not None and self.rules.equal_after_sync:
            found.append(Comparison.AFTER_SYNC)
        return found

    def compared(self) -> list[str]:
        """Return a line `name: value` for each fact that must be the same on all ranks."""
        facts: dict[str, object] = {
            "module": self.module,
            "transport": self.transport,
            "strategy": "EveryStep()" if self.rules is None else self.rules.strategy,
            "communication hook": self.comm_hook,
        }
        if self.sizes.num_buffers:
            facts["buffers"] = self.config.buffers
            facts["buffers are broadcast at construction"] = self.config.init_buffers
        return [f"{name}: {value}" for name, value in (facts | self.config.compared()).items()]


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """The records of one rank."""

    rank: int
    backward: BackwardRecord | None
    buffers: BufferRecord | None
    round: RoundRecord | None = None
    """The last parameter sync, under a strategy that has them."""
    next_round: int | None = None
    """The step after which the next parameter sync takes place, if known."""
    synced_at: Mapping[str, int] = field(default_factory=dict)
    """The steps after which parameters, buffers and optimizers were last synchronized."""
    replicas_compared: tuple[int, bool] | None = None
    """The step of the last comparison of replicas, and whether they were equal."""
    num_repairs: int = 0
    """Number of times that replicas were made equal because they differed."""


def sizes_of(chosen: Selection) -> Sizes:
    """Return the numbers and sizes of the tensors that take part."""
    reduced = [*chosen.trained, *chosen.delayed]
    return Sizes(
        num_parameters=len(chosen.parameters),
        parameter_bytes=_num_bytes(chosen.parameters),
        num_gradients=len(reduced),
        gradient_bytes=_num_bytes(reduced),
        num_buffers=len(chosen.buffers),
        buffer_bytes=_num_bytes(chosen.buffers),
    )


def _num_bytes(named: Sequence[tuple[str, Tensor]]) -> int:
    return sum(tensor.numel() * tensor.element_size() for _, tensor in named)
