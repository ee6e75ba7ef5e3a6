"""Training without a backward pass: `EvolutionStrategy`. Only losses travel; every rank computes the same update.

[Note: same update] No parameter is sent after construction. All ranks know all losses and regenerate all noise from
its seeds, so all take the same step, by the same operations on the same numbers in the same order. The assumptions are
checked. At construction ranks compare the numbers that they make from a seed, because another CPU type or another
version of torch may make others. In each step ranks compare, together with the losses, digests of the parameters and
the optimizer's settings.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import struct
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from syncline.checks import checked_count, checked_function, checked_number, checked_state
from syncline.contract import Contract, Row
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
from syncline.optimizers.contents import parameters_of
from syncline.records import EvolutionRecord
from syncline.session.world import transport_of
from syncline.tensors.broadcasting import TensorBroadcaster
from syncline.tensors.targets import named_tensors
from syncline.transport.agreement import PAYLOAD_BYTES, describe_tensors, exchange
from syncline.transport.base import Transport
from syncline.transport.statistics import Statistics
from syncline.user_code import calling
from syncline.words import describe_ranks, format_bytes, format_count

_TITLE = "sl.EvolutionStrategy"

_REMEDY = (
    "Build the same module with the same arguments on every rank. (Where only the noise differs, the machines do: use "
    "the same version of torch and the same type of CPU, or ATEN_CPU_CAPABILITY=default, on every rank.)"
)

_REMEDY_STEP = (
    "Between steps, change parameters, learning rate or state on all ranks in the same way, or make them equal again: "
    "sl.broadcast_(module), sl.broadcast_(strategy.optimizer)."
)

_OPENING_BYTES = 105
"""Bytes that a rank sends to agree on a step; see `syncline.transport.agreement.agree`."""

_HEAD = struct.Struct(f"<{PAYLOAD_BYTES // 8}d")  # whether loss_fn failed, then the first losses

_NUM_INLINE = PAYLOAD_BYTES // 8 - 1

_PROBE_NUMEL = 4096


class EvolutionStrategy:
    """An optimization of a module by small random changes of its parameters, without backward, for any loss.

    In each step `population` members are evaluated, distributed over the ranks. A pair of members is the parameters
    plus and minus sigma times the same noise. Only the losses travel, 8 bytes per member. Every rank regenerates the
    noise of all members from (seed, step, pair), estimates the same gradient of the expected loss, and takes the same
    step. The bytes do not depend on the size of the module. Evaluations are divided among ranks, but each rank makes
    all the noise for the update. So more ranks help as long as a rank's evaluations take longer than drawing
    `population / 2` random numbers per parameter.

    Parameters with `requires_grad` are trained, tied ones as one; noise is float32. Buffers are restored after each
    evaluation, so running statistics of a BatchNorm do not change. Construction is a collective call; after it every
    rank has rank 0's parameters and buffers.

    Args:
        module: the same on all ranks, on any devices.
        sigma: standard deviation of the noise, in units of the parameters.
        lr: learning rate of the optimizer.
        population: evaluations per step over all ranks; an even number. Ranks beyond half of it evaluate nothing.
        seed: seed of all noise; the same on all ranks.
        optimizer: called as `optimizer(parameters, lr=lr)`, for example torch.optim.Adam or a `functools.partial`. The
            optimizer finds the estimated gradient in `.grad`.
        group: the ranks that divide the evaluations: a `torch.distributed` process group, a Syncline transport, or
            None for the default group (or a world of one, if torch.distributed is not initialized).

    Raises:
        ContractMismatch: the ranks' modules or arguments differ, or their machines make different noise from the same
            seed; the same text on every rank.
        TypeError, ValueError: an argument is invalid on any rank. All ranks raise it.

    Source: Salimans et al., "Evolution Strategies as a Scalable Alternative to Reinforcement Learning", 2017,
    https://arxiv.org/abs/1703.03864.

    Example:
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
        """Number of steps taken."""
        lines: list[str] = []
        fault = None
        try:
            self._settings = Settings.checked(sigma, population, seed)
            self._trained = trained_parameters(module)
            self._members = Members(module, [p for _, p in self._trained])
            self.optimizer = _made_optimizer(optimizer, [p for _, p in self._trained], lr)
            """The optimizer that the argument `optimizer` made, for example to schedule its learning rate."""
            lines = self._description()
        except Exception as error:
            fault = error
        exchange(self._transport, _TITLE, lines, fault=fault, remedy=_REMEDY)
        TensorBroadcaster([t for _, t in named_tensors(module)], self._transport).run(0)

    @torch.no_grad()
    def step(self, loss_fn: Callable[[nn.Module], float | Tensor]) -> EvolutionRecord:
        """Evaluate the population, and move the parameters towards lower losses. A collective call.

        Args:
            loss_fn: `loss_fn(module)` returns a number or a tensor of one element; lower is better. It is called
                without gradients, on each rank for that rank's members. Use the same data for all members, because
                their losses are compared. It must not make collective calls, because ranks may have different numbers
                of members. A loss that is not finite counts as the worst.

        Returns:
            The losses of all members; the same on every rank.

        Raises:
            ValueError: no loss is finite; on every rank.
            PeerFailed: `loss_fn` raised on another rank. A rank on which it raised raises its exception.
            ContractMismatch: parameters or optimizer settings are no longer the same on all ranks.

            After each of these errors, parameters and buffers are what they were before the step.
        """
        board = self._transport.board
        board.step, board.phase = self.num_steps + 1, "EvolutionStrategy.step, evaluating members"
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
        board.phase = "after step"
        return record

    def statistics(self) -> Statistics:
        """Return the collectives, bytes and waiting time of this rank, summed over all users of the transport."""
        return self._transport.statistics()

    @property
    def contract(self) -> Contract:
        """Which tensors are synchronized, when and how."""
        settings, transport = self._settings, self._transport
        named = named_tensors(self.module)
        num_buffers = sum(not isinstance(t, nn.Parameter) for _, t in named)
        num_bytes = sum(t.numel() * t.element_size() for _, t in self._trained)
        alone = transport.size == 1
        ranks = format_count(transport.size, "rank")
        scores = Row(
            what="losses",
            size=f"{settings.population} floats, {format_bytes(self._num_bytes_a_step())} a step",
            when="never: alone" if alone else "in step, when all are evaluated",
            how="-" if alone else "all_gather",
            drift_allowed="none",
        )
        parameters = Row(
            what="parameters",
            size=f"{format_count(len(self._trained), 'tensor')}, {format_bytes(num_bytes)}",
            when="never: alone" if alone else "once, at construction",
            how="-" if alone else "rank 0's; then the same update everywhere",
            drift_allowed="none" if alone else "none: compared in each step",
        )
        noise = Row(
            what="noise",
            size=f"{format_count(settings.num_pairs, 'pair')}",
            when="never",
            how="made again from seed, step, pair",
            drift_allowed="none",
        )
        buffers = Row(
            what="buffers",
            size=format_count(num_buffers, "tensor") if num_buffers else "none",
            when="never" if alone or not num_buffers else "once, at construction",
            how="put back after each evaluation" if num_buffers else "-",
            drift_allowed="none" if num_buffers else "-",
        )
        title = f"EvolutionStrategy({type(self.module).__name__}), {ranks}, transport: {transport.name}"
        return Contract(title=title, rows=(scores, noise, parameters, buffers))

    def state_dict(self) -> dict[str, Any]:
        """Return the state that, with `module.state_dict()`, resumes the run bit for bit on any number of ranks."""
        return {
            "num_steps": self.num_steps,
            **asdict(self._settings),
            "optimizer": self.optimizer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that `state_dict` returned; call it on all ranks. Its settings replace the arguments.

        Raises:
            ValueError: a part of the state is missing or invalid.
        """
        expected = {"num_steps", "sigma", "population", "seed", "optimizer"}
        if set(checked_state(state)) != expected:
            raise ValueError(
                f"expected a state of EvolutionStrategy with {', '.join(sorted(expected))}; got "
                f"{', '.join(sorted(map(str, state)))}: load what strategy.state_dict() has returned"
            )
        settings = Settings.checked(state["sigma"], state["population"], state["seed"])
        num_steps = checked_count("num_steps", state["num_steps"], at_least=0)
        self.optimizer.load_state_dict(state["optimizer"])
        self._settings, self.num_steps = settings, num_steps

    # ------------------------------------------------------------------ exchange of losses

    def _losses_of_all(self, mine: Sequence[float], fault: Exception | None) -> list[float]:
        """Return the losses of all members, pair by pair."""
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
            self._tell_failure(failed, fault)
        rows = [row[1:] for row in rows] if self._fits_inline() else self._gathered(mine)
        return in_order(rows, self._settings.num_pairs)

    def _most_losses(self) -> int:
        """Return the largest number of losses on a rank, which is that of rank 0."""
        return 2 * len(pairs_of(0, self._transport.size, self._settings.num_pairs))

    def _fits_inline(self) -> bool:
        return self._most_losses() <= _NUM_INLINE

    def _num_bytes_a_step(self) -> int:
        """Return the bytes that all ranks together send per step."""
        if self._transport.size == 1:
            return 0
        own = _OPENING_BYTES + (0 if self._fits_inline() else 8 * self._most_losses())
        return own * self._transport.size

    def _gathered(self, mine: Sequence[float]) -> list[list[float]]:
        if self._transport.size == 1:
            return [list(mine)]
        width = self._most_losses()
        device = self._transport.control_device
        own = torch.zeros(width, dtype=torch.float64, device="cpu")
        own[: len(mine)] = torch.tensor(mine, dtype=torch.float64, device="cpu")
        everyone = torch.empty(self._transport.size * width, dtype=torch.float64, device=device)
        self._transport.all_gather(everyone, own.to(device)).wait()
        return cast(list[list[float]], everyone.view(self._transport.size, width).tolist())

    def _tell_failure(self, failed: Sequence[int], fault: Exception | None) -> None:
        """Raise on all ranks: this rank's `fault` if there is one, otherwise the report of the first failed rank."""
        text = "" if fault is None else "".join(traceback.format_exception(fault)).rstrip()
        told = self._transport.all_gather_bytes(text.encode(errors="replace"))
        if fault is not None:
            raise fault
        raise PeerFailed(
            f"{_TITLE}.step, step {self.num_steps + 1}: loss_fn raised on {describe_ranks(failed)}; no parameter was "
            f"changed. The first of them, rank {failed[0]}:\n{told[failed[0]].decode()}"
        )

    # ------------------------------------------------------------------ agreement between ranks

    def _description(self) -> list[str]:
        probe = torch.empty(_PROBE_NUMEL, dtype=torch.float32, device="cpu")
        noise_(probe, seed=self._settings.seed, step=0, pair=0)
        named = named_tensors(self.module)
        return [
            f"module  {type(self.module).__name__}",
            *self._settings_lines(),
            f"noise  made from the seed, digest {_digest(probe)}",
            *describe_tensors([(n, t) for n, t in named if isinstance(t, nn.Parameter)], kind="parameter"),
            *describe_tensors([(n, t) for n, t in named if not isinstance(t, nn.Parameter)], kind="buffer"),
        ]

    def _state_lines(self) -> list[str]:
        """Return lines that must be equal on all ranks for the update to be equal."""
        return [
            f"step  {self.num_steps + 1}",
            *self._settings_lines(),
            *(f"parameter {name}  digest {_digest(p)}" for name, p in self._trained),
        ]

    def _settings_lines(self) -> list[str]:
        lines = [f"{name}  {value!r}" for name, value in asdict(self._settings).items()]
        lines.append(f"optimizer  {type(self.optimizer).__qualname__}")
        for index, group in enumerate(settings_of(self.optimizer)):
            lines += [f"optimizer.param_groups[{index}].{key}  {value!r}" for key, value in sorted(group)]
        return lines

    # ------------------------------------------------------------------ the update

    def _update(self, weights: Sequence[float]) -> None:
        """Take one optimizer step by the estimated gradient; restore `.grad` afterwards."""
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


def _made_optimizer(
    factory: Callable[..., Optimizer], parameters: list[nn.Parameter], lr: float
) -> Optimizer:
    lr = checked_number("lr", lr, at_least=0)
    checked_function("optimizer", factory, "a function that makes one, torch.optim.Adam, say")
    with calling("optimizer(parameters, lr=lr)"):
        optimizer = factory(parameters, lr=lr)
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"expected optimizer(parameters, lr=lr) to return a torch.optim.Optimizer, got {type(optimizer).__name__}"
        )
    stepped = {id(p) for p in parameters_of(optimizer)}
    if stepped != {id(p) for p in parameters}:
        raise ValueError("expected an optimizer of the parameters it was given, got one of others")
    return optimizer


def _record(step: int, losses: Sequence[float]) -> EvolutionRecord:
    finite = [loss for loss in losses if math.isfinite(loss)]
    if not finite:
        raise ValueError(
            f"{_TITLE}.step, step {step}: expected a finite loss of at least one of {len(losses)} members, got none "
            f"(the first is {losses[0]}); no parameter was changed. Look at the data of this step, or lower sigma or lr"
        )
    return EvolutionRecord(
        step=step,
        losses=tuple(losses),
        mean_loss=math.fsum(finite) / len(finite),
        best_loss=min(finite),
        num_nonfinite=len(losses) - len(finite),
    )


def _digest(tensor: Tensor) -> str:
    """Return a digest of the tensor's bits."""
    flat = tensor.detach().cpu().contiguous()
    num_bytes = flat.numel() * flat.element_size()
    if not num_bytes:
        return ""
    memory = (ctypes.c_char * num_bytes).from_address(flat.data_ptr())
    return hashlib.blake2b(memory, digest_size=8).hexdigest()
