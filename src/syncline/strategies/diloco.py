"""DiLoCo: the ranks take many local steps, and then one step of an outer optimizer by the mean of their changes.

In streaming DiLoCo, the parameters are divided into fragments (`plan_fragments`), which sync after different steps.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from syncline.checks import checked_count, checked_function, checked_number, store, suggests_arguments
from syncline.contract import Rule, Rules
from syncline.strategies.actions import (
    Action,
    AdvanceOuter,
    Average,
    AverageBuffers,
    Mechanism,
    Message,
    OuterCopies,
    ReceiveOuter,
    RestartOuter,
    SendOuter,
)
from syncline.strategies.base import Decision, Progress, Spec, every_words, value_in_words
from syncline.strategies.local_sgd import EverythingWithin, LocalSteps
from syncline.words import format_count


def plan_fragments(sizes_numel: Sequence[int], num_fragments: int) -> tuple[tuple[int, ...], ...]:
    """Divide parameters into fragments of consecutive parameters. The largest fragment is as small as possible.

    Args:
        sizes_numel: the number of elements of each parameter, in the module's order.
        num_fragments: the number of fragments.

    Returns:
        For each fragment, the indices of its parameters. Each index occurs once, and no fragment is empty.

    Raises:
        ValueError: there are fewer parameters than fragments.

    Examples:
        >>> plan_fragments([100, 1, 1, 50, 60], 2)
        ((0, 1, 2), (3, 4))
    """
    if not 1 <= num_fragments <= len(sizes_numel):
        raise ValueError(
            f"DiLoCo: expected between 1 and {len(sizes_numel)} fragments, got {num_fragments}. The module has "
            f"{len(sizes_numel)} trained parameters, and each fragment needs at least one"
        )
    caps = range(max(sizes_numel), sum(sizes_numel) + 1)
    # The smallest cap on a fragment's number of elements under which `num_fragments` fragments are enough.
    smallest = bisect_left(caps, True, key=lambda cap: len(_filled(sizes_numel, cap)) <= num_fragments)
    fragments = _filled(sizes_numel, caps[smallest])

    def numel_of(indices: Sequence[int]) -> int:
        return sum(sizes_numel[index] for index in indices)

    while len(fragments) < num_fragments:  # too few: split the largest one that has several parameters
        whole = max((fragment for fragment in fragments if len(fragment) > 1), key=numel_of)
        cut = min(range(1, len(whole)), key=lambda k: max(numel_of(whole[:k]), numel_of(whole[k:])))
        at = fragments.index(whole)
        fragments[at : at + 1] = [whole[:cut], whole[cut:]]
    return tuple(map(tuple, fragments))


def _filled(sizes_numel: Sequence[int], cap_numel: int) -> list[list[int]]:
    """Divide parameters into fragments of consecutive parameters. Fill each fragment up to `cap_numel` elements."""
    fragments: list[list[int]] = []
    filled = cap_numel + 1
    for index, size in enumerate(sizes_numel):
        if filled + size > cap_numel:
            fragments.append([])
            filled = 0
        fragments[-1].append(index)
        filled += size
    return fragments


OuterFactory = Callable[[Iterable[Tensor]], torch.optim.Optimizer]
"""The type of a function that takes parameters, and returns an optimizer of these parameters."""

_NESTEROV = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


class _State(NamedTuple):
    num_ranks: int
    under_way: tuple[tuple[int, int], ...]
    """The fragments whose average is in flight, in sending order: pairs (fragment, step of the send)."""
    equal_at: int
    """The last step after which the parameters were equal on all ranks, because all fragments were synced."""


@suggests_arguments
@dataclass(frozen=True, repr=False)
class DiLoCo(LocalSteps[_State]):
    """A strategy under which ranks step alone, and every `every` steps an outer optimizer combines the ranks' changes.

    The outer gradient of a parameter is its value after the last outer step minus its value now, averaged over ranks.
    With plain SGD(lr=1) as `outer`, DiLoCo is local SGD. Nesterov momentum gives far better results (Douillard et al.
    2023, arXiv 2311.08105). The optimizer has to be attached.

    Streaming DiLoCo (Douillard et al. 2025, arXiv 2501.18512): with `fragments`, parts of the module sync after
    different steps, which lowers the peak load of the network. With `delay`, the ranks compute further steps while the
    average of a fragment is in flight. With `compression`, outer gradients are sent in fewer bytes, for example by
    `sl.compression.Quantize(4)`.

    Args:
        every: the number of steps between two syncs of a fragment.
        outer: a function that takes copies of the module's parameters, and returns an optimizer of them. Any optimizer
            of torch is possible.
        fragments: the number of parts into which the parameters are divided. Each part syncs every `every` steps, and
            the parts take turns.
        delay: the number of steps between the send of an outer gradient and its outer step; less than `every`.
        mixing: the weight, from 0 to below 1, of a rank's own values when they are mixed with the result of an outer
            step. With None, a rank instead adds its own changes during the delay to the result.
        compression: the compression of outer gradients; None to send them without compression.
        warmup: the number of synchronous steps at the start.
        every_step_within: "host" to average gradients in every step among the ranks of each host; a number n to do so
            in groups of n consecutive ranks; None for no such groups.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of bounds.

    Examples:
        >>> strategy = DiLoCo(every=4, fragments=2, delay=1)
        >>> state = strategy.init(Spec(rank=0, num_ranks=2, hosts=(0, 0), sizes_numel=(10, 10)))
        >>> for step in (1, 2, 3, 4, 5):
        ...     state, actions = strategy.at_step(state, Progress(step=step))
        ...     print(step, [type(action).__name__ for action in actions])
        1 []
        2 ['SendOuter']
        3 ['ReceiveOuter']
        4 ['AverageBuffers', 'SendOuter']
        5 ['ReceiveOuter']
    """

    situation_fields: ClassVar[frozenset[str]] = frozenset({"num_ranks"})

    every: int
    outer: OuterFactory = _NESTEROV
    fragments: int = 1
    delay: int = 0
    mixing: float | None = None
    compression: Any = None
    warmup: int = 0
    every_step_within: EverythingWithin = None

    def __post_init__(self) -> None:
        super().__post_init__()
        store(
            self,
            fragments=checked_count("fragments", self.fragments, at_least=1),
            delay=checked_count("delay", self.delay, at_least=0),
        )
        if self.mixing is not None:
            store(self, mixing=checked_number("mixing", self.mixing, at_least=0, below=1))
        checked_function(
            "outer",
            self.outer,
            "a function that makes an optimizer of the parameters that it gets as its argument, for example "
            "lambda parameters: torch.optim.SGD(parameters, lr=0.7)",
        )
        if self.compression is not None and (
            isinstance(self.compression, type) or not hasattr(self.compression, "encoder")
        ):
            raise TypeError(
                f"DiLoCo: expected compression to be None or a compression such as sl.compression.Quantize(4), got "
                f"{self.compression!r}"
            )
        if self.fragments > self.every:
            raise ValueError(
                f"DiLoCo: expected fragments to be at most every={self.every}, got fragments={self.fragments}. At most "
                f"one fragment can sync after a step. Lower fragments, or raise every"
            )
        if self.delay >= self.every:
            raise ValueError(
                f"DiLoCo: expected delay to be below every={self.every}, got delay={self.delay}. The average of a "
                "fragment must arrive before the fragment is sent again. Lower delay, or raise every"
            )

    @property
    def _mixing(self) -> float | None:
        """The argument `mixing`, or 0 if `mixing` is None and there is no delay."""
        return 0.0 if self.mixing is None and not self.delay else self.mixing

    def init(self, spec: Spec) -> _State:
        plan_fragments(spec.sizes_numel, self.fragments)  # raises if there are too many
        self.workers(spec)  # raises if the ranks cannot be divided
        return _State(num_ranks=spec.num_ranks, under_way=(), equal_at=0)

    def mechanism(self, spec: Spec) -> Mechanism:
        fragments = plan_fragments(spec.sizes_numel, self.fragments)
        return OuterCopies(
            fragments,
            self.outer,
            self.compression,
            keeps_sent=self._mixing is None,
            replaces=not self.delay and not self._mixing,
        )

    def at_step(self, state: _State, progress: Progress, inbox: Sequence[Message] = ()) -> Decision[_State]:
        step = progress.step
        if step <= self.warmup:
            return self._at_warmup_step(state, step)
        actions: list[Action] = []
        under_way: list[tuple[int, int]] = []
        for fragment, sent_at in state.under_way:
            if step - sent_at == self.delay:
                actions.append(ReceiveOuter(fragment, self._mixing))
                continue
            under_way.append((fragment, sent_at))
            if step - sent_at == (self.delay + 1) // 2:  # half-way: an encoding may have a second phase
                actions.append(AdvanceOuter(fragment))
        equal_at = state.equal_at
        for fragment in self._due(step - self.warmup):
            if fragment == self.fragments - 1:
                actions.append(AverageBuffers())
            actions.append(SendOuter(fragment))
            if self.delay:
                under_way.append((fragment, step))
            else:
                actions.append(ReceiveOuter(fragment, self._mixing))
                if self.fragments == 1 and not self._mixing:
                    equal_at = step
        return state._replace(under_way=tuple(under_way), equal_at=equal_at), tuple(actions)

    def _at_warmup_step(self, state: _State, step: int) -> Decision[_State]:
        state = state._replace(equal_at=step)
        if self.every_step_within is not None:  # see LocalSGD: the groups sync with each other at every step
            return state, (Average(), RestartOuter())
        return state, (AverageBuffers(), RestartOuter()) if step == self.warmup else (AverageBuffers(),)

    def _due(self, since: int) -> list[int]:
        """Return the fragments that have to be sent after a step.

        Each fragment is sent once in `every` steps. The sends of all fragments are evenly spread over these steps.

        Args:
            since: the number of steps since the end of the warm-up.
        """
        return [
            fragment
            for fragment in range(self.fragments)
            if since >= (first := (fragment + 1) * self.every // self.fragments)
            and (since - first) % self.every == 0
        ]

    def at_sync(self, state: _State, progress: Progress) -> Decision[_State]:
        if state.equal_at == progress.step:
            # The ranks have not stepped since the last sync. An outer step would only follow its momentum.
            return state, (Average(), RestartOuter()) if state.num_ranks > 1 else ()
        actions: list[Action] = [ReceiveOuter(fragment, self._mixing) for fragment, _ in state.under_way]
        actions.append(AverageBuffers())
        for fragment in range(self.fragments):
            actions += [SendOuter(fragment), ReceiveOuter(fragment, 0.0)]
        return state._replace(under_way=(), equal_at=progress.step), tuple(actions)

    def at_change(self, state: _State, progress: Progress, spec: Spec) -> Decision[_State]:
        return super().at_change(state._replace(under_way=()), progress, spec)

    def rules(self, spec: Spec) -> Rules:
        often = every_words(self.every)
        buffers_when = f"{self._during_warmup}{often}, with the parameters"
        if self.fragments > 1:
            buffers_when = f"{self._during_warmup}{often}, with the last fragment"
            often += f", in {self.fragments} fragments by turns"
        often += self._after_warmup
        encoded = "" if self.compression is None else f" by {self.compression}"
        how = f"mean of outer gradients{encoded}, then {value_in_words(self.outer)}"
        if self.delay:
            kept = (
                "added to the changes made in between"
                if self.mixing is None
                else f"{1 - self.mixing:g} of it mixed in"
            )
            how += f" {format_count(self.delay, 'step')} later, {kept}"
        drift = "unbounded: mixing" if self._mixing else format_count(self.every + self.delay, "step")
        return Rules(
            equal_after_sync=self.fragments == 1 and not self.delay and not self._mixing,
            strategy=str(self),
            gradients=self._gradients_rule,
            parameters=Rule(often, how, drift),
            buffers_when=buffers_when,
            buffers_drift=format_count(self.every, "step"),
            at_step=f"{often}: {how}; else nothing sent",
            acts_alone=True,
        )
