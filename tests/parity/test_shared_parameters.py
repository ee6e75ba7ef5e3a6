"""Two wrappers may share parameters: a backward belongs to the wrapper whose forward made its graph."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import syncline as sl
from syncline import DistributedDataParallel as DDP
from syncline.transport import Transport, run_ranks

torch.manual_seed(0)
ENCODER, ACTOR, CRITIC = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 1)


class Net(nn.Module):
    def __init__(self, encoder: nn.Module, head: nn.Module, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.encoder, self.head, self.checkpointed = encoder, head, checkpointed

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointed:
            return self.head(checkpoint(self.encoder, x.requires_grad_(), use_reentrant=True))
        return self.head(self.encoder(x))


def nets(**options: Any) -> tuple[Net, Net]:
    encoder = copy.deepcopy(ENCODER)
    return Net(encoder, copy.deepcopy(ACTOR), **options), Net(encoder, copy.deepcopy(CRITIC), **options)


def batch(rank: int) -> Tensor:
    return torch.arange(6.0).view(2, 3) * 0.1 + rank


def gradients(*modules: nn.Module) -> list[Tensor | None]:
    return [p.grad for module in modules for p in module.parameters()]


def expected(*losses: Callable[[Net, Net, int], Tensor]) -> list[Tensor | None]:
    """What one process has that runs both ranks' batches, and averages."""
    actor, critic = nets()
    for loss in losses:
        (sum(loss(actor, critic, rank) for rank in range(2)) / 2).backward()  # type: ignore[union-attr]
    return gradients(actor, critic)


def actor_loss(actor: nn.Module, critic: nn.Module, rank: int) -> Tensor:
    return actor(batch(rank)).square().sum()


def critic_loss(actor: nn.Module, critic: nn.Module, rank: int) -> Tensor:
    return critic(batch(rank)).sum()


def combined_loss(actor: nn.Module, critic: nn.Module, rank: int) -> Tensor:
    return actor_loss(actor, critic, rank) + critic_loss(actor, critic, rank)


def swapped_loss(actor: nn.Module, critic: nn.Module, rank: int) -> Tensor:
    return critic_loss(actor, critic, rank) + actor_loss(actor, critic, rank)


def decayed_loss(actor: nn.Module, critic: nn.Module, rank: int) -> Tensor:
    """The backward belongs to the critic; weight decay gives the actor's head a gradient too, the same on all ranks."""
    decay = sum(p.square().sum() for p in actor.parameters())
    return critic_loss(actor, critic, rank) + decay


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}, {"static_graph": True}],
    ids=["plain", "view", "unused", "static"],
)
@pytest.mark.parametrize(
    "losses",
    [(actor_loss, critic_loss), (combined_loss,), (decayed_loss,)],
    ids=["apart", "combined", "decayed"],
)
def test_an_actor_and_a_critic_share_an_encoder(options: dict[str, Any], losses: Any) -> None:
    def rank(t: Transport) -> None:
        actor, critic = nets()
        wrapped = (
            DDP(actor, process_group=t, bucket_cap_mb=1e-5, **options),
            DDP(critic, process_group=t, bucket_cap_mb=1e-5, **options),
        )
        for _ in range(3):
            for module in wrapped:
                module.zero_grad()
            for loss in losses:
                loss(*wrapped, t.rank).backward()
            torch.testing.assert_close(gradients(actor, critic), expected(*losses))

    run_ranks(2, rank)


@pytest.mark.parametrize("is_late", [False, True], ids=["both", "late"])
def test_gradients_that_are_not_cleared_and_as_views_are_scaled_by_one_wrapper_at_a_time(
    is_late: bool,
) -> None:
    def rank(t: Transport) -> None:
        actor, critic = nets()
        options: dict[str, Any] = {"process_group": t, "gradient_as_bucket_view": True}
        first = DDP(actor, **options)
        if is_late:  # .grad has views of the first wrapper's buckets when the second one is made
            actor_loss(first, critic, t.rank).backward()
        wrapped = first, DDP(critic, **options)
        losses = [swapped_loss, critic_loss]
        if not is_late:
            actor_loss(*wrapped, t.rank).backward()
        for loss in losses:
            loss(*wrapped, t.rank).backward()
        torch.testing.assert_close(gradients(actor, critic), expected(actor_loss, *losses))

    run_ranks(2, rank)


def test_a_combined_loss_under_normalize_by_is_divided_once() -> None:
    def rank(t: Transport) -> None:
        actor, critic = nets()
        options: dict[str, Any] = {"process_group": t, "static_graph": True}
        wrapped = DDP(actor, **options), DDP(critic, **options)
        for _ in range(2):
            for module in wrapped:
                module.zero_grad()
            with wrapped[0].normalize_by(1 + 2 * t.rank), wrapped[1].normalize_by(1 + 2 * t.rank):
                combined_loss(*wrapped, t.rank).backward()
            means = [gradient / 2 for gradient in expected(combined_loss) if gradient is not None]
            torch.testing.assert_close(gradients(actor, critic), means)  # 4 items, not 2 ranks

    run_ranks(2, rank)


def test_a_wrapper_that_follows_a_change_still_owns_the_backward_through_its_output() -> None:
    def rank(t: Transport) -> None:
        actor, critic = nets()
        wrapped = DDP(actor, process_group=t), DDP(critic, process_group=t)
        combined_loss(*wrapped, t.rank).backward()
        actor.register_module("unused", nn.Identity())
        for module in wrapped:
            module.zero_grad()
        combined_loss(*wrapped, t.rank).backward()
        torch.testing.assert_close(gradients(actor, critic), expected(combined_loss))

    run_ranks(2, rank)


def test_a_head_that_was_frozen_is_no_obstacle_where_the_other_module_is_called_directly() -> None:
    def rank(t: Transport) -> None:
        actor, critic = nets()
        _wrapped = DDP(actor, process_group=t), DDP(critic, process_group=t)
        critic.head.requires_grad_(False)
        actor_loss(actor, critic, t.rank).backward()
        torch.testing.assert_close(gradients(actor, critic), expected(actor_loss))

    run_ranks(2, rank)


def test_a_module_that_is_called_directly_is_reduced_by_the_wrapper_it_belongs_to() -> None:
    def rank(t: Transport) -> None:
        actor, critic = nets()
        _wrapped = DDP(actor, process_group=t), DDP(critic, process_group=t)
        for loss in (actor_loss, critic_loss):
            loss(actor, critic, t.rank).backward()
        torch.testing.assert_close(gradients(actor, critic), expected(actor_loss, critic_loss))

    run_ranks(2, rank)


@pytest.mark.parametrize("call", ["first", "second", "module"])
def test_a_module_wrapped_twice_is_reduced_once(call: str) -> None:
    def rank(t: Transport) -> None:
        actor, critic = nets()
        first, second = DDP(actor, process_group=t), DDP(actor, process_group=t)
        called = {"first": first, "second": second, "module": actor}[call]
        for _ in range(2):
            first.zero_grad()
            actor_loss(called, critic, t.rank).backward()
            torch.testing.assert_close(gradients(actor, critic), expected(actor_loss))
        records = first.last_step, second.last_step
        assert [record is None for record in records] == [call != "first", call == "first"]

    run_ranks(2, rank)


def test_a_checkpointed_encoder_belongs_to_the_wrapper_around_it() -> None:
    def rank(t: Transport) -> None:
        actor, critic = nets(checkpointed=True)
        wrapped = DDP(actor, process_group=t), DDP(critic, process_group=t)
        for loss in (actor_loss, critic_loss):
            loss(*wrapped, t.rank).backward()
        torch.testing.assert_close(gradients(actor, critic), expected(actor_loss, critic_loss))

    run_ranks(2, rank)


def test_gradients_are_synchronized_outside_of_a_backward_by_wrapper() -> None:
    def rank(t: Transport) -> None:
        actor, critic = nets()
        wrapped = DDP(actor, process_group=t), DDP(critic, process_group=t)
        with wrapped[0].no_sync():
            actor_loss(*wrapped, t.rank).backward()
        sl.sync_gradients_(wrapped[0])
        torch.testing.assert_close(gradients(actor, critic), expected(actor_loss))

    run_ranks(2, rank)


def test_a_wrapper_that_is_gone_is_no_rival() -> None:
    def rank(t: Transport) -> None:
        actor, critic = nets()
        first, second = DDP(actor, process_group=t), DDP(critic, process_group=t)
        ownership = second._replica.gradients.ownership
        assert len(ownership.rivals) == 1
        del first
        gc.collect()
        assert not ownership.rivals
        critic_loss(actor, second, t.rank).backward()
        torch.testing.assert_close(gradients(actor, critic), expected(critic_loss))

    run_ranks(2, rank)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_on_processes(transport: Any) -> None:
    world = sl.init(transport=transport, timeout=60)
    actor, critic = nets()
    wrapped = DDP(actor), DDP(critic)
    for _ in range(2):
        for module in wrapped:
            module.zero_grad()
        for loss in (actor_loss, critic_loss):
            loss(*wrapped, world.rank).backward()
        torch.testing.assert_close(gradients(actor, critic), expected(actor_loss, critic_loss))
