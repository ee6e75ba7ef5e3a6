"""sync_gradients_: what `.grad` becomes, and what the wrapper makes of it. Ranks are threads."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tests.support.verbs import error_of_all
from torch import Tensor, nn

import syncline as sl
from syncline import ContractMismatch, SynclineError
from syncline.gradients.reducer import reducers_of
from syncline.transport import Transport, run_ranks


def small(num_layers: int = 2) -> nn.Sequential:
    module = nn.Sequential(*(nn.Linear(3, 3) for _ in range(num_layers)))
    for at, parameter in enumerate(module.parameters()):
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(at))
    return module


def batch(seed: int, size: int = 4) -> Tensor:
    return torch.randn(size, 3, generator=torch.Generator().manual_seed(seed))


def grads(module: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def close(ours: list[Tensor | None], expected: list[Tensor | None]) -> bool:
    return all(
        (a is None) == (b is None) and (a is None or b is None or torch.allclose(a, b, atol=1e-6))
        for a, b in zip(ours, expected, strict=True)
    )


def mean_of(batches: list[Tensor], divisor: float = 2) -> list[Tensor | None]:
    """The gradients of `small` in one process, added up over batches and divided."""
    module = small()
    for x in batches:
        module(x).square().sum().backward()
    return [None if p.grad is None else p.grad / divisor for p in module.parameters()]


@pytest.mark.parametrize(
    ("as_view", "pass_wrapper", "asynchronous"),
    [(False, False, False), (True, True, False), (False, True, True), (True, False, True)],
)
def test_gradients_under_no_sync_become_those_of_a_synchronized_backward(
    as_view: bool, pass_wrapper: bool, asynchronous: bool
) -> None:
    def program(t: Transport) -> None:
        ddp, other = (
            sl.DistributedDataParallel(small(), process_group=t, gradient_as_bucket_view=as_view)
            for _ in range(2)
        )
        optimizer = ddp.attach(torch.optim.SGD(ddp.parameters(), lr=1e-4))
        for step in range(2):  # the second has bucket views from the start
            with ddp.no_sync(), other.no_sync():
                for micro_batch in range(2):
                    x = batch(100 * step + 10 * t.rank + micro_batch)
                    ddp(x).square().sum().backward()
                    if micro_batch == 0:
                        other(x).square().sum().backward()
            other(x).square().sum().backward()
            with pytest.raises(SynclineError, match="expected reduced gradients"):
                optimizer.step()
            target = ddp if pass_wrapper else ddp.module
            if asynchronous:
                sl.sync_gradients_(target, async_op=True, group=None if t.rank else t).wait()
            else:
                assert sl.sync_gradients_(target) is target
            assert close(grads(ddp), grads(other))
            assert ddp.last_step is not None
            assert ddp.last_step.reduced_afterwards
            assert ".grad now holds the mean over 2 ranks" in ddp.explain()
            assert "sl.sync_gradients_" in str(ddp.contract)
            optimizer.step()
            ddp.clip_grad_norm_(1.0)
            optimizer.zero_grad()
            other.zero_grad()
            other.load_state_dict(ddp.state_dict())
        with ddp.no_sync(), other.no_sync():
            for wrapper in (ddp, other):
                wrapper(batch(t.rank)).square().sum().backward()
        sl.sync_gradients_(ddp)
        for wrapper in (ddp, other):
            wrapper(batch(5 + t.rank)).square().sum().backward()
        assert close(grads(ddp), grads(other))  # the mean is added to, and its mean is itself

    run_ranks(2, program)


@pytest.mark.parametrize(("num_layers", "num_gathers"), [(3, 1), (150, 2)])
def test_a_gradient_that_some_ranks_lack_counts_as_zero_and_one_that_all_lack_stays_none(
    num_layers: int, num_gathers: int
) -> None:
    def program(t: Transport) -> None:
        module = small(num_layers)
        x = batch(t.rank)
        (module[0](x) if t.rank == 0 else module[1](module[0](x))).sum().backward()
        alone = grads(module)
        sl.sync_gradients_(module, group=t)
        assert module[2].weight.grad is None
        assert module[1].weight.grad is not None
        if t.rank == 1:
            assert alone[2] is not None
            assert torch.equal(module[1].weight.grad, alone[2] / 2)
        assert t.statistics().num_calls == {"all_gather": num_gathers, "all_reduce": 1}

    run_ranks(2, program)


@pytest.mark.parametrize("num_items", [(3, 5), (0, 4), (7, None)])
def test_counted_gradients_are_divided_by_the_items_of_all_ranks(num_items: tuple[int, int | None]) -> None:
    def program(t: Transport) -> None:
        ddp = sl.DistributedDataParallel(small(), process_group=t)
        here = num_items[t.rank]
        seen: list[Tensor] = []

        def check(*more: Tensor) -> None:
            seen.extend(more)
            assert close(grads(ddp), mean_of(seen, sum(map(len, seen))))

        with ddp.no_sync():
            for micro_batch in range(2):
                if here is not None:
                    with ddp.normalize_by(here):
                        ddp(batch(10 * t.rank + micro_batch, here)).square().sum().backward()
        sl.sync_gradients_(ddp)
        counts = [(rank, items) for rank, items in enumerate(num_items) if items is not None]
        check(*(batch(10 * rank + micro, items) for rank, items in counts for micro in range(2)))
        if here is not None:
            assert ddp.last_step is not None
            assert (ddp.last_step.divisor, ddp.last_step.counted_items) == (sum(map(len, seen)), True)
        # More is added to what was reduced, in a block of its own: divided by the items of all.
        with ddp.normalize_by(2):
            ddp(batch(90 + t.rank, 2)).square().sum().backward()
        check(batch(90, 2), batch(91, 2))
        # And the same by the verb: the mean is turned into shares of the sum, also on a rank without a batch.
        if t.rank == 0:
            with ddp.no_sync(), ddp.normalize_by(6):
                ddp(batch(7, 6)).square().sum().backward()
        sl.sync_gradients_(ddp)
        check(batch(7, 6))

    run_ranks(2, program)


def test_counts_of_gradients_that_were_cleared_do_not_count() -> None:
    def program(t: Transport) -> None:
        ddp = sl.DistributedDataParallel(nn.Linear(1, 1), process_group=t)
        bias = ddp.module.bias
        with ddp.no_sync(), ddp.normalize_by(100):
            ddp(torch.ones(1, 1)).sum().backward()
        ddp.zero_grad(set_to_none=t.rank == 0)
        sl.sync_gradients_(ddp)  # nothing stands behind the zeros
        ddp.zero_grad()
        with ddp.no_sync():
            ddp(torch.ones(1, 1)).sum().backward()
        sl.sync_gradients_(ddp)
        assert bias.grad.item() == 1.0
        ddp.zero_grad()
        with ddp.no_sync(), ddp.normalize_by(4):
            ddp(torch.ones(4, 1)).sum().backward()
        sl.sync_gradients_(ddp)
        assert bias.grad.item() == 1.0

    for size in (1, 2):
        run_ranks(size, program)


def counted_and_uncounted(ddp: Any, rank: int) -> None:
    with ddp.no_sync():
        if rank:
            with ddp.normalize_by(3):
                ddp(batch(0)).sum().backward()
        else:
            ddp(batch(0)).sum().backward()


def cleared_on_one_rank(ddp: Any, rank: int) -> None:
    with ddp.normalize_by(3):
        ddp(batch(0)).sum().backward()
    if rank:
        ddp.zero_grad()
    with ddp.no_sync(), ddp.normalize_by(3):
        ddp(batch(0)).sum().backward()


def changed_on_a_rank_without_a_batch(ddp: Any, rank: int) -> None:
    with ddp.normalize_by(3):
        ddp(batch(0)).sum().backward()
    if rank:
        ddp.clip_grad_norm_(0.01)
    else:
        with ddp.no_sync(), ddp.normalize_by(3):
            ddp(batch(0)).sum().backward()


@pytest.mark.parametrize(
    ("accumulate", "words"),
    [
        (counted_and_uncounted, ["inside on rank 1", "outside on rank 0"]),
        (cleared_on_one_rank, ["cleared only on rank 1"]),
        (changed_on_a_rank_without_a_batch, ["gradients on rank 1 that were changed"]),
    ],
)
def test_items_without_a_common_divisor_are_refused_alike(accumulate: Any, words: list[str]) -> None:
    def program(t: Transport) -> None:
        ddp = sl.DistributedDataParallel(small(), process_group=t)
        accumulate(ddp, t.rank)
        before = grads(ddp)
        try:
            sl.sync_gradients_(ddp)
        finally:
            assert close(grads(ddp), before)

    text = str(error_of_all(ValueError, program))
    assert all(one in text for one in words), text


def test_reduced_gradients_stay_as_they_are() -> None:
    def program(t: Transport) -> None:
        ddp = sl.DistributedDataParallel(small(), process_group=t)
        ddp(batch(t.rank)).square().sum().backward()
        before = grads(ddp)
        sl.sync_gradients_(ddp)
        assert all(torch.equal(a, b) for a, b in zip(before, grads(ddp), strict=True))  # type: ignore[arg-type]
        with ddp.no_sync():
            ddp(batch(2 + t.rank)).square().sum().backward()
        sl.sync_gradients_(ddp)  # mean + mean of what was added
        assert close(grads(ddp), mean_of([batch(seed) for seed in range(4)]))

    run_ranks(2, program)


def test_ignored_parameters_are_left_out_with_the_wrapper_and_taken_with_the_bare_module() -> None:
    def program(t: Transport) -> None:
        ddp = sl.DistributedDataParallel(small(), process_group=t, ignore=["1.*"])
        with ddp.no_sync():
            ddp(batch(t.rank)).square().sum().backward()
        before = grads(ddp)
        sl.sync_gradients_(ddp)
        after = grads(ddp)
        assert torch.equal(before[2], after[2])  # type: ignore[arg-type]
        assert not torch.equal(before[0], after[0])  # type: ignore[arg-type]
        sl.sync_gradients_(ddp.module)
        assert not torch.equal(before[2], ddp.module[1].weight.grad)  # type: ignore[arg-type]

    run_ranks(2, program)


def test_a_part_of_a_wrapped_module_counts_as_reduced_for_itself_alone() -> None:
    def program(t: Transport) -> None:
        ddp = sl.DistributedDataParallel(small(), process_group=t)
        with ddp.no_sync():
            ddp(batch(t.rank)).square().sum().backward()
        sl.sync_gradients_(ddp.module[0])
        with pytest.raises(SynclineError, match="expected reduced"):
            ddp.clip_grad_norm_(1.0)
        sl.sync_gradients_(ddp.module[1])
        ddp.clip_grad_norm_(1.0)
        ddp.zero_grad()
        with ddp.no_sync(), ddp.normalize_by(2):
            ddp(batch(t.rank)).square().sum().backward()
        with pytest.raises(ValueError, match=r"only a part of the module: .* so pass the whole module"):
            sl.sync_gradients_(ddp.module[0])

    run_ranks(2, program)


def test_sparse_gradients_are_summed_by_rows() -> None:
    def program(t: Transport) -> None:
        module = nn.Embedding(6, 2, sparse=True)
        if t.rank:
            module(torch.tensor([t.rank, 5])).sum().backward()
        sl.sync_gradients_(module, group=t)
        gradient = module.weight.grad
        assert gradient is not None
        assert gradient.is_sparse
        expected = torch.zeros(6, 2)
        expected[1] = expected[2] = 1 / 3
        expected[5] = 2 / 3
        assert torch.allclose(gradient.to_dense(), expected)

    run_ranks(3, program)


def test_half_precision_is_added_up_in_single() -> None:
    def program(t: Transport) -> list[float]:
        module = nn.Linear(1, 2, bias=False, dtype=torch.float16)
        module.weight.grad = torch.tensor([[60000.0], [1.0 + t.rank * 2.0**-10]], dtype=torch.float16)
        sl.sync_gradients_(module, group=t)
        return module.weight.grad.flatten().tolist()

    assert run_ranks(2, program) == [[60000.0, 1.0]] * 2


@pytest.mark.parametrize("size", [1, 2])
def test_what_is_refused(size: int) -> None:
    def program(t: Transport) -> None:
        with pytest.raises(TypeError, match=r"expected module to be a torch\.nn\.Module, got a Tensor"):
            sl.sync_gradients_(torch.zeros(1), group=t)  # type: ignore[call-overload]
        ddp = sl.DistributedDataParallel(small(), process_group=t)
        with pytest.raises(ValueError, match="inside of a normalize_by block"), ddp.normalize_by(1):
            sl.sync_gradients_(ddp)
        if size == 1:
            return
        other = sl.DistributedDataParallel(small(), process_group=t)
        with pytest.raises(ValueError, match="whose parts have 2 wrappers"):
            sl.sync_gradients_(nn.ModuleList([ddp.module, other.module]), group=t)
        with pytest.raises(ValueError, match="got another group"):
            sl.sync_gradients_(ddp, group=t.lane("another"))
        with pytest.raises(ContractMismatch) as caught:
            sl.sync_gradients_(small(1 + t.rank), group=t)
        assert "parameter 1.weight" in str(caught.value)

        sharded = sl.DistributedDataParallel(small(), process_group=t, sharded=True)
        with pytest.raises(
            ValueError, match="got a module with sharded=True, in which each rank has only its shard"
        ):
            sl.sync_gradients_(sharded)
        block = ddp.normalize_by(1) if t.rank else nullcontext()
        with pytest.raises(ValueError, match=r"\nrank 1: .*inside of a normalize_by block"), block:
            sl.sync_gradients_(ddp)

        def inside(gradient: Tensor) -> None:
            with pytest.raises(SynclineError, match="inside of a backward"):
                sl.sync_gradients_(ddp)

        loss = ddp(batch(0)).square().sum()
        ddp.module[0].weight.register_hook(inside)
        loss.backward()

    run_ranks(size, program)


@pytest.mark.parametrize("freed_on", [(0, 1), (1,)])
def test_a_freed_wrapper_takes_care_of_nothing_also_where_it_is_not_freed_yet(
    freed_on: tuple[int, ...],
) -> None:
    def program(t: Transport) -> None:
        module = small()
        ddp: Any = sl.DistributedDataParallel(module, process_group=t)
        with ddp.no_sync(), ddp.normalize_by(2):
            ddp(batch(t.rank)).square().sum().backward()
        if t.rank in freed_on:
            ddp._remove_autograd_hooks()  # as when it is freed, whenever that is
            assert reducers_of(module.parameters()) == []
        sl.sync_gradients_(module, group=t)
        assert close(grads(module), mean_of([batch(0), batch(1)]))

    run_ranks(2, program)
