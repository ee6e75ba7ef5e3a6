"""EvolutionStrategy: training without a backward pass. Ranks send only losses, and compute the same update.

No parameter is sent after construction. All ranks receive all losses, and regenerate all noise from its seeds. So all
ranks take the same step, by the same operations on the same values in the same order. Syncline checks that this is
true. At construction, ranks compare the noise that they generate from a seed, because another type of CPU or another
version of torch can generate other noise. In each step, ranks compare digests of the parameters, and the settings of
the optimizer, in the same message as the losses.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from syncline import tracebacks
from syncline.checks import checked_count, checked_function, checked_number, checked_state, suggests_arguments
from syncline.contract import Contract, Row
from syncline.equality.fingerprint import fingerprints
from syncline.errors import PeerFailed, SynclineError
from syncline.evolution.members import (
    Members,
    Settings,
    in_order,
    noise_,
    pair_weights,
    pairs_of,
    trained_parameters,
)
from syncline.optimizers.attached import settings_of
from syncline.optimizers.contents import made_optimizer
from syncline.records import EvolutionRecord
from syncline.session.world import transport_of
from syncline.tensors.broadcasting import TensorBroadcaster
from syncline.tensors.targets import named_tensors
from syncline.transport.agreement import PAYLOAD_BYTES, describe_tensors, exchange, gather_rows
from syncline.transport.base import Transport
from syncline.transport.statistics import Statistics
from syncline.words import describe_ranks, format_bytes, format_count

_TITLE = "sl.EvolutionStrategy"

_REMEDY = (
    "Build the same module with the same arguments on every rank. If only the noise differs, the machines differ: use "
    "the same version of torch and the same type of CPU on every rank, or set ATEN_CPU_CAPABILITY=default."
)

_REMEDY_STEP = (
    "Between steps, change parameters, learning rate or state in the same way on all ranks. To make the ranks equal "
    "again, call sl.broadcast_(module) and sl.broadcast_(strategy.optimizer)."
)

_OPENING_BYTES = 105
"""The number of bytes that a rank sends in each step to compare settings; see `syncline.transport.agreement.agree`."""

_NUM_INLINE = PAYLOAD_BYTES // 8 - 1
"""The number of losses that fit into the message by which ranks compare settings in each step."""

_HEAD = struct.Struct(f"<{1 + _NUM_INLINE}d")  # 1.0 if loss_fn failed, then the first losses

_PROBE_NUMEL = 4096
"""The number of random values that each rank generates at construction, to compare its noise with the other ranks."""


@suggests_arguments
class EvolutionStrategy:
    """An evolution strategy, which trains a module by random changes of its parameters, without a backward pass.

    In each step, the ranks together evaluate `population` members. The two members of a pair have the module's
    parameters plus and minus sigma times the same noise. Only the losses are sent, 8 bytes per member, so
    the number of bytes does not depend on the size of the module. Every rank regenerates the noise of all members from
    (seed, step, pair), estimates the same gradient of the expected loss, and takes the same step.

    Evaluations are divided among the ranks, but each rank generates all the noise for the update. So more ranks make
    training faster as long as a rank's evaluations take longer than drawing `population / 2` random values per
    parameter.

    Parameters with `requires_grad` are trained, and tied parameters count as one. Noise is float32. Buffers are
    restored after each evaluation, so running statistics of a BatchNorm do not change. The loss need not be
    differentiable. The constructor is a collective call, and copies rank 0's parameters and buffers to all ranks.

    Args:
        module: the module to train. It must be the same on all ranks, but its device can differ.
        sigma: the standard deviation of the changes of each parameter.
        lr: the learning rate of the optimizer.
        population: the number of members per step over all ranks; an even number. If there are more ranks than pairs,
            the last ranks evaluate no member.
        seed: the seed of all noise; the same on all ranks.
        optimizer: a function that is called as `optimizer(parameters, lr=lr)` and returns an optimizer, for example
            torch.optim.Adam or a `functools.partial` of it. The optimizer gets the estimated gradient in `.grad`.
        group: the ranks that divide the evaluations: a `torch.distributed` process group, a Syncline transport, or
            None for the default group (or a world of one, if torch.distributed is not initialized).

    Raises:
        ContractMismatch: the modules or the arguments differ between ranks, or the machines of the ranks generate
            different noise from the same seed. Every rank raises the same text.
        TypeError, ValueError: an argument is invalid on at least one rank. All ranks raise the error.

    Source: Salimans et al., "Evolution Strategies as a Scalable Alternative to Reinforcement Learning", 2017,
    https://arxiv.org/abs/1703.03864.

    Examples:
        >>> import torch, syncline as sl
        >>> model = torch.nn.Linear(2, 1)
        >>> strategy = sl.EvolutionStrategy(model, sigma=0.1, lr=0.05, population=20, seed=0)
        >>> x = torch.tensor([[1.0, 2.0], [3.0, -1.0]])
        >>> first = strategy.step(lambda model: (model(x) - 5).square().mean())
        >>> for _ in range(99):
        ...     last = strategy.step(lambda model: (model(x) - 5).square().mean())
        >>> last.step, last.mean_loss < 0.1 * first.mean_loss
        (100, True)
    """

    def __init__(
        self,
        module: nn.Module,
        sigma: float,
        lr: float,
        population: int,
        seed: int,
        *,
        optimizer: Callable[..., Optimizer] = torch.optim.SGD,
        group: dist.ProcessGroup | Transport | None = None,
    ) -> None:
        self._transport = transport_of(group)
        self.module = module
        self.num_steps = 0
        """The number of completed steps."""
        lines: list[str] = []
        fault = None
        try:
            self._settings = Settings(sigma=sigma, population=population, seed=seed)
            self._trained = trained_parameters(module)
            self._members = Members(module, [p for _, p in self._trained])
            parameters = [p for _, p in self._trained]
            lr = checked_number("lr", lr, at_least=0)
            checked_function(
                "optimizer", optimizer, "a function that makes an optimizer, for example torch.optim.Adam"
            )
            self.optimizer = made_optimizer(
                "optimizer(parameters, lr=lr)", lambda: optimizer(parameters, lr=lr), parameters
            )
            """The optimizer that the argument `optimizer` returned. A scheduler can change its learning rate."""
            lines = self._description()
        except Exception as error:
            fault = error
        exchange(self._transport, _TITLE, lines, fault=fault, remedy=_REMEDY)
        TensorBroadcaster([t for _, t in named_tensors(module)], self._transport).run(0)

    @torch.no_grad()
    def step(self, loss_fn: Callable[[nn.Module], float | Tensor]) -> EvolutionRecord:
        """Evaluate the population, and move the parameters towards lower losses. A collective call.

        Args:
            loss_fn: a function of the module that returns the loss, as a number or as a tensor of one element. Lower is
                better. Each rank calls it under torch.no_grad for each of its members. Use the same data for all
                members, because their losses are compared. `loss_fn` must not make collective calls, because ranks can
                have different numbers of members. A loss that is not finite counts as the worst.

        Returns:
            A record with the losses of all members. It is the same on every rank.

        Raises:
            ValueError: no member has a finite loss. Every rank raises this error.
            PeerFailed: `loss_fn` raised an exception on another rank. That rank raises the exception itself.
            ContractMismatch: parameters or optimizer settings are no longer the same on all ranks. As after the other
                two errors, parameters and buffers have the values from before the step.
        """
        self._transport.board.step = self.num_steps + 1
        mine: list[float] = []
        fault = None
        try:
            checked_function("loss_fn", loss_fn)
            pairs = pairs_of(self._transport.rank, self._transport.size, self._settings.num_pairs)
            mine = self._members.evaluate(loss_fn, pairs, self._settings, step=self.num_steps + 1)
        except Exception as error:
            fault = error
        losses = self._losses_of_all(mine, fault)
        record = _record(self.num_steps + 1, losses)
        self._update(pair_weights(losses, self._settings.sigma))
        self.num_steps += 1
        return record

    def statistics(self) -> Statistics:
        """Return this rank's statistics of the transport: collectives, bytes and waiting time.

        They also count the collectives of other users of the same transport.
        """
        return self._transport.statistics()

    @property
    def contract(self) -> Contract:
        """A table that shows for losses, noise, parameters and buffers when and how they are synchronized."""
        settings, transport = self._settings, self._transport
        named = named_tensors(self.module)
        num_buffers = sum(not isinstance(t, nn.Parameter) for _, t in named)
        num_bytes = sum(t.numel() * t.element_size() for _, t in self._trained)
        floats = f"{settings.population} floats, {format_bytes(self._num_bytes_a_step())} a step"
        tensors = f"{format_count(len(self._trained), 'tensor')}, {format_bytes(num_bytes)}"
        pairs = format_count(settings.num_pairs, "pair")
        buffers = format_count(num_buffers, "tensor") if num_buffers else "none"
        once, alone, is_alone = "once, at construction", ("never: alone", "-", "none"), transport.size == 1
        gathered = ("in step, when all are evaluated", "all_gather", "none")
        copied = (once, "rank 0's; then the same update everywhere", "none: compared in each step")
        kept = ("put back after each evaluation", "none") if num_buffers else ("-", "-")
        rows = [
            ("losses", floats, *(alone if is_alone else gathered)),
            ("noise", pairs, "never", "made again from seed, step, pair", "none"),
            ("parameters", tensors, *(alone if is_alone else copied)),
            ("buffers", buffers, once if num_buffers and not is_alone else "never", *kept),
        ]
        ranks = format_count(transport.size, "rank")
        title = f"EvolutionStrategy({type(self.module).__name__}), {ranks}, transport: {transport.name}"
        return Contract(
            title=title,
            rows=tuple(
                Row(what=what, size=size, when=when, how=how, drift_allowed=drift)
                for what, size, when, how, drift in rows
            ),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this object, for a save.

        From this state and `module.state_dict()`, a run on any number of ranks continues bit for bit.
        """
        return {
            "num_steps": self.num_steps,
            **asdict(self._settings),
            "optimizer": self.optimizer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that `state_dict` returned. Call this on all ranks with the same state.

        The settings sigma, population and seed in the state replace the constructor's arguments.

        Raises:
            TypeError, ValueError: a part of the state is missing or invalid.
        """
        expected = {"num_steps", "sigma", "population", "seed", "optimizer"}
        if set(checked_state(state)) != expected:
            raise ValueError(
                f"expected a state of EvolutionStrategy with the keys {', '.join(sorted(expected))}; got the keys "
                f"{', '.join(sorted(map(str, state)))}. Load a state that strategy.state_dict() returned"
            )
        settings = Settings(sigma=state["sigma"], population=state["population"], seed=state["seed"])
        num_steps = checked_count("num_steps", state["num_steps"], at_least=0)
        self.optimizer.load_state_dict(state["optimizer"])
        self._settings, self.num_steps = settings, num_steps

    # ------------------------------------------------------------------ exchange of losses

    def _losses_of_all(self, mine: Sequence[float], fault: Exception | None) -> list[float]:
        """Exchange the losses of all ranks, and return them in the order of the pairs.

        Args:
            mine: the losses of this rank's members.
            fault: the exception that loss_fn raised on this rank, or None.

        Raises:
            PeerFailed: loss_fn raised an exception on another rank. If `fault` is not None, it is raised instead.
            ContractMismatch: parameters or optimizer settings differ between ranks.
        """
        inline = [*mine[:_NUM_INLINE], *([0.0] * (_NUM_INLINE - len(mine)))]
        head = _HEAD.pack(fault is not None, *inline)
        lines = self._state_lines() if self._transport.size > 1 else []
        try:
            heads = exchange(self._transport, f"{_TITLE}.step", lines, payload=head, remedy=_REMEDY_STEP)
        except SynclineError:
            if fault is not None:
                raise fault  # noqa: B904  (the other error stays in its context)
            raise
        rows = [list(_HEAD.unpack(head)) for head in heads]
        failed = [rank for rank, row in enumerate(rows) if row[0]]
        if failed:
            self._raise_failure(failed, fault)
        if self._most_losses <= _NUM_INLINE:
            return in_order([row[1:] for row in rows], self._settings.num_pairs)
        padded = [*mine, *([0.0] * (self._most_losses - len(mine)))]
        own = torch.tensor(padded, dtype=torch.float64, device="cpu")
        gathered = gather_rows(self._transport, own)
        return in_order([row.tolist() for row in gathered], self._settings.num_pairs)

    @property
    def _most_losses(self) -> int:
        """The largest number of losses on any rank, which is the number on rank 0."""
        return 2 * len(pairs_of(0, self._transport.size, self._settings.num_pairs))

    def _num_bytes_a_step(self) -> int:
        """Return the number of bytes that all ranks together send in a step."""
        if self._transport.size == 1:
            return 0
        own = _OPENING_BYTES + (8 * self._most_losses if self._most_losses > _NUM_INLINE else 0)
        return own * self._transport.size

    def _raise_failure(self, failed: Sequence[int], fault: Exception | None) -> NoReturn:
        """Raise an error on all ranks, because loss_fn has raised an exception on some. A collective call.

        Args:
            failed: the ranks on which loss_fn has raised an exception.
            fault: the exception that loss_fn raised on this rank, or None. An exception is raised again. With None, a
                PeerFailed with the traceback of the first failed rank is raised.
        """
        text = ("", "") if fault is None else (tracebacks.summary(fault), tracebacks.describe(fault).whole)
        reports = self._transport.all_gather_bytes("\n".join(text).encode(errors="replace"))
        if fault is not None:
            raise fault
        summary, _, trace = reports[failed[0]].decode().partition("\n")
        error = PeerFailed(
            f"{_TITLE}.step, step {self.num_steps + 1}: loss_fn raised an exception on {describe_ranks(failed)}, so no "
            f"parameter was changed: {summary}"
        )
        error.add_note(f"The traceback of rank {failed[0]}:\n{trace}")
        raise error

    # ------------------------------------------------------------------ agreement between ranks

    def _description(self) -> list[str]:
        """Return the module, the settings and a digest of the noise as lines of text. Ranks compare the lines."""
        probe = torch.empty(_PROBE_NUMEL, dtype=torch.float32, device="cpu")
        noise_(probe, seed=self._settings.seed, step=0, pair=0)
        named = named_tensors(self.module)
        return [
            f"module  {type(self.module).__name__}",
            *self._settings_lines(),
            f"noise  made from the seed, digest {fingerprints([probe])[0]:016x}",
            *describe_tensors([(n, t) for n, t in named if isinstance(t, nn.Parameter)], kind="parameter"),
            *describe_tensors([(n, t) for n, t in named if not isinstance(t, nn.Parameter)], kind="buffer"),
        ]

    def _state_lines(self) -> list[str]:
        """Return the step, the settings and the digests of the parameters as lines of text.

        Ranks compare the lines in each step.
        """
        digests = fingerprints([p.detach() for _, p in self._trained])
        return [
            f"step  {self.num_steps + 1}",
            *self._settings_lines(),
            *(
                f"parameter {name}  digest {digest:016x}"
                for (name, _), digest in zip(self._trained, digests, strict=True)
            ),
        ]

    def _settings_lines(self) -> list[str]:
        """Return the settings of this strategy and of its optimizer as one line of text each."""
        lines = [f"{name}  {value!r}" for name, value in asdict(self._settings).items()]
        lines.append(f"optimizer  {type(self.optimizer).__qualname__}")
        for index, group in enumerate(settings_of(self.optimizer)):
            lines += [f"optimizer.param_groups[{index}].{key}  {value!r}" for key, value in sorted(group)]
        return lines

    # ------------------------------------------------------------------ the update

    def _update(self, weights: Sequence[float]) -> None:
        """Take one optimizer step with the estimated gradient, and restore the former `.grad` of the parameters.

        Args:
            weights: the weight of each pair in the estimated gradient.
        """
        grads = self._members.gradients(weights, self._settings, step=self.num_steps + 1)
        parameters = [p for _, p in self._trained]
        grads_before = [p.grad for p in parameters]
        try:
            for p, grad in zip(parameters, grads, strict=True):
                p.grad = torch.empty_like(p).copy_(grad)
            self.optimizer.step()
        finally:
            for p, before in zip(parameters, grads_before, strict=True):
                p.grad = before


def _record(step: int, losses: Sequence[float]) -> EvolutionRecord:
    finite = [loss for loss in losses if math.isfinite(loss)]
    if not finite:
        raise ValueError(
            f"{_TITLE}.step, step {step}: expected a finite loss of at least one of {len(losses)} members, got none. "
            f"The first loss is {losses[0]}. No parameter was changed. Check the data of this step, or lower sigma or "
            "the learning rate"
        )
    return EvolutionRecord(
        step=step,
        losses=tuple(losses),
        mean_loss=math.fsum(finite) / len(finite),
        best_loss=min(finite),
        num_nonfinite=len(losses) - len(finite),
    )
