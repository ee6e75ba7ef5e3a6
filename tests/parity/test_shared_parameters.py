"""Two wrappers may share parameters: a backward belongs to the wrapper whose forward made its graph."""

from __future__ import annotations

import copy
import gc
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import syncline as sl
from support.cases import case
from support.inside import replica_of
from support.threads import on_threads
from syncline import DistributedDataParallel as DDP
from syncline.transport import Transport

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


def wrapped(t: Transport, *modules: nn.Module, **options: Any) -> Any:
    return tuple(DDP(module, process_group=t, **options) for module in modules)


@on_threads(2)
def test_an_actor_and_a_critic_share_an_encoder(t: Transport) -> None:
    for losses, options in itertools.product(
        [(actor_loss, critic_loss), (combined_loss,), (decayed_loss,)],
        [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}, {"static_graph": True}],
    ):
        actor, critic = nets()
        both = wrapped(t, actor, critic, bucket_cap_mb=1e-5, **options)
        for _ in range(3):
            for module in both:
                module.zero_grad()
            for loss in losses:
                loss(*both, t.rank).backward()
            with case(options, *losses):
                torch.testing.assert_close(gradients(actor, critic), expected(*losses))


@on_threads(2)
def test_gradients_that_are_not_cleared_and_as_views_are_scaled_by_one_wrapper_at_a_time(
    t: Transport,
) -> None:
    for is_late in (False, True):
        actor, critic = nets()
        (first,) = wrapped(t, actor, gradient_as_bucket_view=True)
        if is_late:  # .grad has views of the first wrapper's buckets when the second one is made
            actor_loss(first, critic, t.rank).backward()
        both = first, *wrapped(t, critic, gradient_as_bucket_view=True)
        if not is_late:
            actor_loss(*both, t.rank).backward()
        for loss in (swapped_loss, critic_loss):
            loss(*both, t.rank).backward()
        with case(is_late):
            torch.testing.assert_close(
                gradients(actor, critic), expected(actor_loss, swapped_loss, critic_loss)
            )


@on_threads(2)
def test_a_combined_loss_under_normalize_by_is_divided_once(t: Transport) -> None:
    actor, critic = nets()
    both = wrapped(t, actor, critic, static_graph=True)
    for _ in range(2):
        for module in both:
            module.zero_grad()
        with both[0].normalize_by(1 + 2 * t.rank), both[1].normalize_by(1 + 2 * t.rank):
            combined_loss(*both, t.rank).backward()
        means = [gradient / 2 for gradient in expected(combined_loss) if gradient is not None]
        torch.testing.assert_close(gradients(actor, critic), means)  # 4 items, not 2 ranks


@on_threads(2)
def test_a_wrapper_that_follows_a_change_still_owns_the_backward_through_its_output(t: Transport) -> None:
    actor, critic = nets()
    both = wrapped(t, actor, critic)
    combined_loss(*both, t.rank).backward()
    actor.register_module("unused", nn.Identity())
    for module in both:
        module.zero_grad()
    combined_loss(*both, t.rank).backward()
    torch.testing.assert_close(gradients(actor, critic), expected(combined_loss))


@on_threads(2)
def test_a_head_that_was_frozen_is_no_obstacle_where_the_other_module_is_called_directly(
    t: Transport,
) -> None:
    actor, critic = nets()
    _both = wrapped(t, actor, critic)
    critic.head.requires_grad_(False)
    actor_loss(actor, critic, t.rank).backward()
    torch.testing.assert_close(gradients(actor, critic), expected(actor_loss))


@on_threads(2)
def test_a_module_that_is_called_directly_is_reduced_by_the_wrapper_it_belongs_to(t: Transport) -> None:
    actor, critic = nets()
    _both = wrapped(t, actor, critic)
    for loss in (actor_loss, critic_loss):
        loss(actor, critic, t.rank).backward()
    torch.testing.assert_close(gradients(actor, critic), expected(actor_loss, critic_loss))


@on_threads(2)
def test_a_module_wrapped_twice_is_reduced_once(t: Transport) -> None:
    for call in ("first", "second", "module"):
        actor, critic = nets()
        first, second = wrapped(t, actor, actor)
        called = {"first": first, "second": second, "module": actor}[call]
        for _ in range(2):
            first.zero_grad()
            actor_loss(called, critic, t.rank).backward()
            torch.testing.assert_close(gradients(actor, critic), expected(actor_loss))
        records = first.last_step, second.last_step
        with case(call):
            assert [record is None for record in records] == [call != "first", call == "first"]


@on_threads(2)
def test_a_checkpointed_encoder_belongs_to_the_wrapper_around_it(t: Transport) -> None:
    actor, critic = nets(checkpointed=True)
    both = wrapped(t, actor, critic)
    for loss in (actor_loss, critic_loss):
        loss(*both, t.rank).backward()
    torch.testing.assert_close(gradients(actor, critic), expected(actor_loss, critic_loss))


@on_threads(2)
def test_gradients_are_synchronized_outside_of_a_backward_by_wrapper(t: Transport) -> None:
    actor, critic = nets()
    both = wrapped(t, actor, critic)
    with both[0].no_sync():
        actor_loss(*both, t.rank).backward()
    sl.sync_gradients_(both[0])
    torch.testing.assert_close(gradients(actor, critic), expected(actor_loss))


@on_threads(2)
def test_a_wrapper_that_is_gone_is_no_rival(t: Transport) -> None:
    actor, critic = nets()
    first, second = wrapped(t, actor, critic)
    ownership = replica_of(second).gradients.ownership
    assert len(ownership.rivals) == 1
    del first
    gc.collect()
    assert not ownership.rivals
    critic_loss(actor, second, t.rank).backward()
    torch.testing.assert_close(gradients(actor, critic), expected(critic_loss))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_on_processes(transport: Any) -> None:
    world = sl.init(transport=transport, timeout=60)
    actor, critic = nets()
    both = DDP(actor), DDP(critic)
    for _ in range(2):
        for module in both:
            module.zero_grad()
        for loss in (actor_loss, critic_loss):
            loss(*both, world.rank).backward()
        torch.testing.assert_close(gradients(actor, critic), expected(actor_loss, critic_loss))
