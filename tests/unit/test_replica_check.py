"""sl.ReplicaCheck: what differs is found, named, repaired; what may differ is left alone. Ranks are threads."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import syncline as sl
from support.cases import case
from support.inside import as_if_on_a_device, replica_of
from support.threads import on_threads
from syncline import ContractMismatch, ReplicaCheck, ReplicaDivergence
from syncline.equality import SliceHash
from syncline.gradients.riders import coverage
from syncline.transport import Transport, run_ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(6, 40)
        self.norm = nn.BatchNorm1d(40)
        self.two = nn.Linear(40, 3)
        self.two.bias.requires_grad = False

    def forward(self, x: Tensor) -> Any:
        return self.two(self.norm(self.one(x)).relu())


torch.manual_seed(0)
NET = Net()
PLAIN = nn.Sequential(NET.one, nn.ReLU(), NET.two)
"""Without buffers."""


@pytest.fixture(autouse=True, scope="module")
def small_slices() -> Iterator[None]:
    """So that a net of a few kilobytes is dealt out to many slices, as a large one is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coverage, "_LEAST_BYTES", 1 << 10)
        yield


def wrapped(t: Transport, module: nn.Module = NET, **kwargs: Any) -> sl.DistributedDataParallel:
    return sl.DistributedDataParallel(copy.deepcopy(module), process_group=t, **kwargs)


def adam(ddp: sl.DistributedDataParallel) -> torch.optim.Optimizer:
    return ddp.attach(torch.optim.AdamW(ddp.parameters(), lr=1e-3))


def train(
    t: Transport,
    ddp: sl.DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    *,
    num_steps: int,
    before: Callable[[int], None] = lambda step: None,
    seed: int = 0,
) -> None:
    """Each rank with batches of its own; `before` is called before each step."""
    for step in range(1, num_steps + 1):
        before(step)
        generator = torch.Generator().manual_seed(1000 * seed + 10 * step + t.rank)
        optimizer.zero_grad()
        ddp(torch.randn(5, 6, generator=generator)).square().sum().backward()
        optimizer.step()


def flip(tensor: Tensor, element: int, bit: int) -> None:
    """One bit of one element, as memory does it: no version counter sees it."""
    words = tensor.detach().view(-1).view(torch.uint8)
    at = element * tensor.element_size() + bit // 8
    words[at : at + 1] ^= 1 << (bit % 8)


Change = Callable[[Any, Any], object]
"""Changes a wrapper or its optimizer."""


def of_frozen(element: int = 1) -> Change:
    """A bit of a parameter that nothing else writes."""
    return lambda ddp, optimizer: flip(ddp.module.two.bias, element, 5)


def trained(
    t: Transport,
    change: Change = lambda *_: None,
    *,
    at: int = 0,
    by: int = -1,
    num_steps: int,
    module: nn.Module = NET,
    attach: Callable[[Any], torch.optim.Optimizer] = adam,
    **kwargs: Any,
) -> tuple[sl.DistributedDataParallel, torch.optim.Optimizer]:
    """Train. Before step `at`, rank `by` makes a change."""
    ddp = wrapped(t, module, **kwargs)
    optimizer = attach(ddp)

    def before(step: int) -> None:
        if step == at and t.rank == by:
            change(ddp, optimizer)

    train(t, ddp, optimizer, num_steps=num_steps, before=before)
    return ddp, optimizer


def found_by(ddp: sl.DistributedDataParallel) -> ReplicaDivergence:
    """The error of a backward."""
    with pytest.raises(ReplicaDivergence) as caught:
        ddp(torch.ones(5, 6)).sum().backward()
    return caught.value


def divergence(
    size: int, change: Change, *, every: int = 1, at: int = 1, by: int = 1, num_steps: int = 0, **kwargs: Any
) -> ReplicaDivergence:
    """What all ranks raise after a change on one rank, in the words of each the same."""
    kwargs.setdefault("replica_check", ReplicaCheck(every=every))

    def program(t: Transport) -> ReplicaDivergence:
        with pytest.raises(ReplicaDivergence) as caught:
            trained(t, change, at=at, by=by, num_steps=num_steps or at + every - 1, **kwargs)
        return caught.value

    errors = run_ranks(size, program)
    assert len({str(error) for error in errors}) == 1
    return errors[0]


# ---------------------------------------------------------------------- what is found


def test_equal_replicas_are_said_to_be_equal() -> None:
    def program(t: Transport, **kwargs: Any) -> None:
        ddp = wrapped(t, replica_check=ReplicaCheck(every=4), **kwargs)
        train(t, ddp, adam(ddp), num_steps=12)
        row = ddp.contract["replica check"]
        assert row.size == "parameters, buffers, optimizer state"
        assert row.when == "in synchronized backwards, slice by slice, all slices within 4 steps"
        assert row.how == "fingerprints, with the gradients; if they differ: raise"
        assert row.last_done == "step 12: equal"

    for size, kwargs in (
        (2, {}),
        (3, {"gradient_as_bucket_view": True}),
        (3, {"find_unused_parameters": True}),
    ):
        with case(size, kwargs):
            run_ranks(size, partial(program, **kwargs))


@settings(max_examples=40, deadline=None)
@given(
    every=st.integers(1, 9),
    flipped_at=st.integers(2, 12),
    rank=st.integers(0, 2),
    bit=st.integers(0, 31),
    where=st.sampled_from(["one.weight", "one.bias", "two.weight", "two.bias", "norm.weight"]),
    data=st.data(),
)
@pytest.mark.real
def test_any_flipped_bit_of_a_parameter_is_found_in_time(
    every: int, flipped_at: int, rank: int, bit: int, where: str, data: st.DataObject
) -> None:
    element = data.draw(st.integers(0, NET.get_parameter(where).numel() - 1))

    def program(t: Transport) -> ReplicaDivergence | None:
        try:
            ddp, optimizer = trained(
                t,
                lambda ddp, _: flip(ddp.module.get_parameter(where), element, bit),
                at=flipped_at,
                by=rank,
                num_steps=flipped_at + every,
                replica_check=ReplicaCheck(every=every),
            )
        except ReplicaDivergence as error:
            return error
        sl.check_replicas(sl.TrainState(model=ddp, optimizer=optimizer), group=t)
        return None

    errors = run_ranks(3, program)
    assert len({str(error) for error in errors}) == 1, "the same text everywhere"
    error = errors[0]
    if error is None:
        # The last places of a number may be rounded away by the optimizer's step; what is equal again is not found.
        assert bit <= 8
        return
    assert error.minority_ranks == (rank,)
    assert error.agreed_at_step < flipped_at <= error.found_at_step < flipped_at + every
    # AdamW's state appears after the first step, and all is dealt out anew.
    assert error.found_at_step - error.agreed_at_step <= 2 * every
    if error.found_at_step == flipped_at or where == "two.bias":  # nothing has spread
        assert (error.tensor, error.elements) == (where, (element, element))
        assert error.num_differing == 1


def test_a_bit_that_turns_the_mean_into_nan_is_found_before_all_replicas_are_nan() -> None:
    def program(t: Transport) -> ReplicaDivergence:
        ddp, optimizer = trained(t, num_steps=2, module=PLAIN, replica_check=ReplicaCheck(every=1000))
        if t.rank == 1:
            flip(ddp.module[2].weight, 77, 30)  # a small number times 2**128
        with pytest.raises(ReplicaDivergence) as caught:
            train(t, ddp, optimizer, num_steps=1)
        assert all(p.isfinite().all() for p in ddp.parameters())
        return caught.value

    error = run_ranks(3, program)[0]
    assert (error.tensor, error.elements, error.minority_ranks) == ("2.weight", (77, 77), (1,))


@on_threads(2)
def test_a_mean_that_is_nan_on_all_ranks_is_nobodys_divergence(t: Transport) -> None:
    ddp = wrapped(t, replica_check=ReplicaCheck(every=3), on_nonfinite="ignore")
    for _ in range(3):
        (ddp(torch.ones(5, 6)).sum() * torch.nan).backward()


def test_the_error_says_all_there_is_to_say() -> None:
    @torch.no_grad()
    def change(ddp: Any, optimizer: Any) -> None:
        ddp.module.two.bias[1:] += 1  # frozen, so that nothing but this changes
        ddp.module.one.weight[30, 2] += 1

    text = str(divergence(3, change, every=2, at=6))
    assert re.match(r"Net, step [67], replica check: expected the same bits on all 3 ranks, but ", text)
    assert "\n  one.weight, element [30, 2] of 240  ranks 0, 2 | rank 1\n" in text
    assert "\n  two.bias, elements 1 to 2 of 3  ranks 0, 2 | rank 1\n" in text
    assert re.search(
        r"last agreed on one.weight at step [45], [12] steps? before\..*minority: rank 1\.", text
    )
    assert re.search(r"checkpoint of step [45] or earlier, or .* sl.broadcast_\(ddp, src=\.\.\.\)\.", text)


def test_of_two_ranks_it_does_not_guess() -> None:
    check = ReplicaCheck(every=2, on_divergence="repair")
    error = divergence(2, lambda ddp, _: flip(ddp.module.one.bias, 3, 7), num_steps=2, replica_check=check)
    assert "With two ranks there is no majority" in str(error)
    assert (error.minority_ranks, error.tensor, error.agreed_at_step) == ((), "one.bias", 0)


def test_state_of_an_optimizer_is_compared_and_the_remedy_names_the_optimizer() -> None:
    def change(ddp: Any, optimizer: Any) -> None:
        flip(optimizer.state[ddp.module.one.weight]["exp_avg"], 17, 30)

    error = divergence(3, change, at=5, by=2)
    assert error.tensor == "optimizer 0 (AdamW), state[0].exp_avg"
    assert (error.elements, error.found_at_step, error.minority_ranks) == ((17, 17), 5, (2,))
    assert str(error).endswith("make the replicas equal by sl.broadcast_(optimizer, src=...).")


def test_state_that_a_rank_lacks_is_named() -> None:
    error = divergence(2, lambda ddp, opt: opt.state[ddp.module.one.weight].pop("exp_avg_sq"), at=5)
    assert "same names and shapes" in str(error)
    assert error.tensor == "optimizer 0 (AdamW), state[0].exp_avg_sq"


def test_a_rank_that_writes_while_its_backward_runs_is_noticed() -> None:
    def change(ddp: Any, optimizer: Any) -> None:
        flip(ddp.module.two.bias, 0, 3)
        ddp.module.one.weight.register_hook(lambda _: flip(ddp.module.two.bias, 0, 3))

    error = divergence(2, change)
    assert "all values were equal when the backward had ended" in str(error)


# ---------------------------------------------------------------------- what is done about it


def test_repair_gives_all_the_majoritys_values() -> None:
    def change(ddp: Any, optimizer: Any) -> None:  # not rank 0's are taken because they are rank 0's
        ddp.module.two.bias.data[0] = 7.0
        flip(optimizer.state[ddp.module.one.weight]["exp_avg"], 3, 22)

    def program(t: Transport) -> tuple[str, Tensor]:
        check = ReplicaCheck(every=3, on_divergence="repair")
        ddp, optimizer = trained(t, change, at=4, by=0, num_steps=10, replica_check=check)
        sl.check_replicas(sl.TrainState(model=ddp, optimizer=optimizer), group=t)
        return ddp.contract["replica check"].last_done, ddp.module.two.bias

    with pytest.warns(RuntimeWarning, match=r"(?s)two.bias.*Repaired: the values of rank 1 were broadcast"):
        told = run_ranks(3, program)
    assert {done for done, _ in told} == {"step 10: equal, repaired 1 time"}
    assert all(torch.equal(bias, NET.two.bias) for _, bias in told), "not the 7"


def test_warn_lets_training_go_on_and_says_it_once() -> None:
    @on_threads(2)
    def program(t: Transport) -> None:
        check = ReplicaCheck(every=1, on_divergence="warn")
        ddp, _ = trained(t, of_frozen(1), at=1, by=1, num_steps=4, replica_check=check)
        assert ddp.last_step.step == 4
        assert ddp.contract["replica check"].last_done == "step 4: different"

    with pytest.warns(RuntimeWarning) as caught:
        program()
    assert len([one for one in caught if "two.bias, element 1 of 3" in str(one.message)]) == 1


@on_threads(3)
def test_after_an_error_nothing_was_stepped_and_training_can_go_on(t: Transport) -> None:
    ddp, optimizer = trained(t, num_steps=3, replica_check=ReplicaCheck(every=1))
    before = [p.clone() for p in ddp.parameters()]
    if t.rank == 0:
        flip(ddp.module.one.weight, 5, 31)
    with pytest.raises(ReplicaDivergence):
        train(t, ddp, optimizer, num_steps=1)
    if t.rank != 0:
        assert all(map(torch.equal, before, ddp.parameters()))
    sl.broadcast_(ddp, src=1, group=t)
    train(t, ddp, optimizer, num_steps=3)
    sl.check_replicas(sl.TrainState(model=ddp, optimizer=optimizer), group=t)


# ---------------------------------------------------------------------- what may differ


@on_threads(2)
def test_buffers_that_are_a_ranks_own_are_left_alone(t: Transport) -> None:
    ddp = wrapped(t, buffers="none", replica_check=ReplicaCheck(every=1))
    train(t, ddp, adam(ddp), num_steps=3)
    with pytest.raises(ReplicaDivergence):
        sl.check_replicas([ddp.module.norm.running_mean.clone()], group=t)
    assert ddp.contract["replica check"].size == "parameters, optimizer state"
    ddp = wrapped(t, replica_check=ReplicaCheck())
    ddp._register_buffer_comm_hook(None, lambda state, buffers: None)
    assert ddp.contract["replica check"].size == "parameters"


def test_buffers_that_a_synchronization_left_different_are_found() -> None:
    """As memory that flips between the broadcast and a forward would: the broadcast is taken out by hand."""

    class Buffers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))
            for number in range(8):
                self.register_buffer(f"b{number}", torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            return (self.weight * x).sum()

    def program(t: Transport) -> None:
        for number, flipped_in in product(range(8), (1, 2)):
            ddp = wrapped(t, Buffers(), replica_check=ReplicaCheck(every=4))
            replica_of(ddp).buffers._synchronize = lambda *args, **kwargs: 0
            buffer = ddp.module.get_buffer(f"b{number}")
            with case(number, flipped_in):
                with pytest.raises(ReplicaDivergence) as caught:
                    for _ in range(5):
                        total = torch.zeros(())
                        for forward in (1, 2):
                            buffer[1] = int(t.rank == 2 and forward == flipped_in)
                            total = total + ddp(torch.ones(2))
                        total.backward()
                assert (caught.value.tensor, caught.value.minority_ranks) == (f"b{number}", (2,))

    run_ranks(3, program)


AFTER_SYNCS = "after each parameter sync, all slices within 2 steps and one parameter sync"
IN_BACKWARDS = "in backwards that average gradients, slice by slice, all slices within 2 steps"
OF_WORKERS = IN_BACKWARDS.replace("gradients,", "gradients among the 2 ranks of a worker,")
NEVER = "never: replicas are not equal between or after parameter syncs"


@on_threads(4)
def test_replicas_that_drift_are_compared_when_they_are_equal(t: Transport) -> None:
    cases: list[tuple[Any, int, str, str]] = [
        (sl.LocalSGD(3), 9, AFTER_SYNCS, "step 9: equal"),
        (sl.DiLoCo(3), 9, AFTER_SYNCS, "step 9: equal"),
        (sl.DiLoCo(4, fragments=2), 9, NEVER, "not yet"),
        (sl.Gossip("ring"), 9, NEVER, "not yet"),
        (sl.Manual(), 9, NEVER, "not yet"),
        (sl.LocalSGD(4, warmup=3), 2, f"{IN_BACKWARDS}; {AFTER_SYNCS}", "step 2: equal"),
        (sl.DiLoCo(4, fragments=2, warmup=3), 2, IN_BACKWARDS, "step 2: equal"),
        (sl.LocalSGD(4, every_step_within=2), 2, f"{OF_WORKERS}; {AFTER_SYNCS}", "step 2: equal"),
    ]
    for strategy, num_steps, when, last_done in cases:
        ddp = wrapped(t, strategy=strategy, replica_check=ReplicaCheck(every=2))
        train(t, ddp, adam(ddp), num_steps=num_steps)
        row = ddp.contract["replica check"]
        with case(strategy):
            assert (row.when, row.last_done) == (when, last_done)


def test_what_a_meeting_does_not_mend_is_found_after_it() -> None:
    for strategy in (sl.LocalSGD(2), sl.DiLoCo(2)):
        # No meeting writes it.
        error = divergence(3, of_frozen(2), every=2, at=4, num_steps=9, strategy=strategy)
        with case(strategy):
            assert (error.tensor, error.elements, error.minority_ranks) == ("two.bias", (2, 2), (1,))
            assert (error.agreed_at_step, error.found_at_step) == (2, 4)


@on_threads(1, 2)
def test_where_there_is_one_copy_or_one_rank_there_is_nothing_to_compare(t: Transport) -> None:
    if t.size == 1:
        alone = wrapped(t, replica_check=ReplicaCheck())
        alone(torch.ones(5, 6)).sum().backward()
        assert alone.contract["replica check"].when == "never: there is one rank"
        return
    ddp = wrapped(t, sharded=True, replica_check=ReplicaCheck(every=2))
    train(t, ddp, adam(ddp), num_steps=5)
    assert ddp.contract["replica check"].size == "buffers (there is one copy of the parameters)"
    row = wrapped(t, nn.Linear(2, 1), sharded=True, replica_check=ReplicaCheck()).contract["replica check"]
    assert row.size == "nothing"
    assert row.when.startswith("never: there is one copy of the parameters")


def test_it_goes_with_whatever_carries_the_gradients() -> None:
    for kwargs in (
        {"compression": sl.compression.Quantize(8)},
        {"static_graph": True},
        {"skip_all_reduce_unused_params": True, "find_unused_parameters": True},
        {"reduce_dtype": torch.float64},
        {"bucket_cap_mb": 1e-4},
    ):
        with case(kwargs):
            assert divergence(2, of_frozen(0), every=2, at=5, **kwargs).found_at_step in (5, 6)


@on_threads(2)
def test_under_no_sync_nothing_is_compared_and_then_all_is(t: Transport) -> None:
    ddp = wrapped(t, replica_check=ReplicaCheck(every=1))
    if t.rank == 1:
        flip(ddp.module.two.bias, 0, 0)
    with ddp.no_sync():
        ddp(torch.ones(5, 6)).sum().backward()
    assert found_by(ddp).found_at_step == 1


@on_threads(2)
def test_what_diverges_on_purpose_is_not_compared(t: Transport) -> None:
    ddp, optimizer = trained(t, num_steps=2, replica_check=ReplicaCheck(every=1))
    with sl.diverge(ddp):
        train(t, ddp, optimizer, num_steps=3)
        sl.check_replicas(sl.TrainState(model=ddp), group=t)
    assert replica_of(ddp).equal_tensors() == []
    sl.average_(ddp, group=t)
    sl.average_(optimizer, group=t)
    train(t, ddp, optimizer, num_steps=2)


# ---------------------------------------------------------------------- no alarm without a difference


@on_threads(2)
def test_a_backward_that_fails_on_one_rank_and_is_tried_again_is_no_alarm(t: Transport) -> None:
    ddp, optimizer = trained(t, num_steps=3, module=PLAIN, replica_check=ReplicaCheck(every=4))
    failing = iter([True, False])

    def fail_once(_: Tensor) -> None:
        if t.rank == 1 and next(failing, False):
            raise MemoryError

    handle = ddp.module[0].register_forward_hook(lambda *args: args[-1].register_hook(fail_once) and None)
    loss = ddp(torch.ones(5, 6)).sum()
    handle.remove()
    if t.rank == 1:
        with pytest.raises(MemoryError):  # when some gradients are ready, and nothing was sent
            loss.backward(retain_graph=True)
        ddp.zero_grad()
    loss.backward()
    optimizer.step()
    train(t, ddp, optimizer, num_steps=6)


@on_threads(2)
def test_what_one_rank_loads_or_looks_up_by_itself_is_no_alarm_if_it_is_equal(t: Transport) -> None:
    ddp, optimizer = trained(t, num_steps=3, replica_check=ReplicaCheck(every=4))
    if t.rank == 0:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        _ = optimizer.state[ddp.module.two.bias]  # frozen: a defaultdict makes an entry
    train(t, ddp, optimizer, num_steps=3)
    if t.rank == 0:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    sl.broadcast_(optimizer, group=t)
    train(t, ddp, optimizer, num_steps=6)


@on_threads(2)
def test_state_of_other_strides_is_the_same_state(t: Transport) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 6 * 6, 2))
    ddp = wrapped(t, net.to(memory_format=torch.channels_last), replica_check=ReplicaCheck(every=1))
    optimizer = adam(ddp)
    for step in range(4):
        if step == 2 and t.rank == 1:
            state = optimizer.state[ddp.module[0].weight]
            state["exp_avg"] = state["exp_avg"].contiguous()
        optimizer.zero_grad()
        ddp(torch.ones(2, 3, 8, 8) * (t.rank + step)).sum().backward()
        optimizer.step()


# ---------------------------------------------------------------------- state of any kind


class Remembering(torch.optim.SGD):
    """Keeps state of every kind: nested, of no parameter, a rank's own floats, and some that comes later."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        self.state["of nobody"] = {"count": self.state.get("of nobody", {}).get("count", 0) + 1}
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                state = self.state[parameter]
                state["seconds"] = torch.rand(()).item()
                state.setdefault("factors", [torch.zeros(3), {"rank": torch.ones(2, 2)}])
                state.setdefault("flag", True)
                state.setdefault("big", 3)
                state.setdefault("pair", (1, (2, 3, 4)))
                state.setdefault(1, torch.zeros(2))
                state.setdefault("1", torch.zeros(2))
                if self.state["of nobody"]["count"] >= 3:
                    state.setdefault("late", torch.zeros(5))
        return None


def remembering(ddp: sl.DistributedDataParallel) -> torch.optim.Optimizer:
    return ddp.attach(Remembering(ddp.parameters(), lr=0.01))


def in_state(change: Callable[[Any], object]) -> Change:
    """A change of the state of one parameter."""
    return lambda ddp, optimizer: change(optimizer.state[ddp.module.one.weight])


def of_nobody(change: Callable[[Any], object]) -> Change:
    return lambda ddp, optimizer: change(optimizer.state["of nobody"])


def test_state_of_any_kind_is_compared() -> None:
    for change, tensor in (
        (in_state(lambda state: flip(state["factors"][0], 1, 3)), "state[0].factors[0]"),
        (in_state(lambda state: flip(state["factors"][1]["rank"], 2, 3)), "state[0].factors[1].rank"),
        (in_state(lambda state: flip(state["late"], 4, 30)), "state[0].late"),
        (of_nobody(lambda state: state.update(count=77)), "state['of nobody'].count"),
    ):
        error = divergence(3, change, every=2, at=8, num_steps=10, attach=remembering)
        assert error.tensor == f"optimizer 0 (Remembering), {tensor}"


def test_state_of_any_kind_is_repaired() -> None:
    check = ReplicaCheck(every=1, on_divergence="repair")

    def program(t: Transport, by: int, change: Change) -> str:
        ddp, optimizer = trained(t, change, at=5, by=by, num_steps=6, replica_check=check, attach=remembering)
        states = (optimizer.state[ddp.module.one.weight], optimizer.state["of nobody"])
        return repr([{**state, "seconds": None, "momentum_buffer": None} for state in states])

    expected = run_ranks(3, partial(program, by=-1, change=of_frozen()))
    for by, change in (
        (1, in_state(lambda state: state.update(flag=False))),
        (1, in_state(lambda state: state.update(big=1 << 70))),
        (1, in_state(lambda state: state.update(pair=(1, (2, 9, 4))))),
        (1, in_state(lambda state: state[1].add_(1))),  # whose key is written as that of another one
        (0, of_nobody(lambda state: state.update(count=77))),
    ):
        with pytest.warns(RuntimeWarning, match=f"Repaired: the values of rank {1 - by} were broadcast"):
            found = run_ranks(3, partial(program, by=by, change=change))
        assert found == expected, "as without the change"


class Named(Tensor):
    """A subclass that has values of its own, as any tensor."""


class Special(nn.Parameter):
    """The same of a parameter."""


@on_threads(3)
def test_a_subclass_of_a_tensor_is_compared_as_a_tensor(t: Transport) -> None:
    weight = NET.one.weight.detach().clone()
    for changed in (nn.Parameter(weight.as_subclass(Named)), Special(weight.clone())):
        module = copy.deepcopy(NET)
        module.one.weight = changed
        ddp = sl.DistributedDataParallel(module, process_group=t, replica_check=ReplicaCheck(every=2))
        optimizer = adam(ddp)
        train(t, ddp, optimizer, num_steps=3)
        if t.rank == 1:
            flip(changed.detach().as_subclass(Tensor), 5, 3)
        with pytest.raises(ReplicaDivergence) as caught:
            train(t, ddp, optimizer, num_steps=2)
        assert caught.value.tensor == "one.weight"


def test_tensors_made_of_others_are_compared_by_those() -> None:
    class Scaled(Tensor):
        """A made-up 8-bit tensor, as optimizers keep them."""

        @staticmethod
        def __new__(cls, codes: Tensor, scale: Tensor) -> Any:
            return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

        def __init__(self, codes: Tensor, scale: Tensor) -> None:
            self.codes, self.scale = codes, scale

        def __tensor_flatten__(self) -> Any:
            return ["codes", "scale"], None

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise NotImplementedError

    def attach(ddp: sl.DistributedDataParallel) -> torch.optim.Optimizer:
        optimizer = ddp.attach(torch.optim.SGD(ddp.parameters(), lr=0.01))
        state = optimizer.state[ddp.module.one.weight]
        state["moment"] = Scaled(torch.zeros(8, dtype=torch.uint8), torch.ones(1))
        state["sparse"] = torch.eye(2).to_sparse()
        return optimizer

    change = in_state(lambda state: flip(state["moment"].codes, 5, 0))
    error = divergence(3, change, at=3, by=2, attach=attach)
    assert error.tensor == "optimizer 0 (SGD), state[0].moment.codes"


# ---------------------------------------------------------------------- all of it has its turn


@on_threads(2)
def test_state_that_is_loaded_in_each_step_does_not_begin_anew(t: Transport) -> None:
    ddp = wrapped(t, replica_check=ReplicaCheck(every=4))
    optimizer = adam(ddp)

    def before(step: int) -> None:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        if step == 6 and t.rank == 1:
            flip(ddp.module.two.bias, 1, 5)

    with pytest.raises(ReplicaDivergence) as caught:
        train(t, ddp, optimizer, num_steps=20, before=before)
    assert caught.value.found_at_step in range(6, 10)


@on_threads(3)
def test_what_is_known_goes_on_when_the_module_changes(t: Transport) -> None:
    ddp = wrapped(t, replica_check=ReplicaCheck(every=2))
    train(t, ddp, torch.optim.SGD(ddp.parameters(), lr=0.01), num_steps=4)
    ddp.module.two.bias.requires_grad = True
    ddp.module.register_buffer("late", torch.zeros(2))
    if t.rank == 1:
        flip(ddp.module.one.weight, 3, 9)
    with pytest.raises(ReplicaDivergence) as caught:
        train(t, ddp, torch.optim.SGD(ddp.parameters(), lr=0.01), num_steps=2)
    assert caught.value.agreed_at_step in (3, 4)


@on_threads(2)
def test_a_group_that_grows_begins_to_compare(t: Transport) -> None:
    alone = t.split(t.rank)
    ddp = wrapped(alone, replica_check=ReplicaCheck(every=1))
    train(alone, ddp, torch.optim.SGD(ddp.parameters(), lr=0.01), num_steps=1)
    ddp._update_process_group(t)
    if t.rank == 1:
        flip(ddp.module.two.bias, 1, 5)
    assert "two.bias, element 1 of 3" in str(found_by(ddp))


@on_threads(6)
def test_ranks_of_a_worker_are_named_by_their_own_numbers(t: Transport) -> None:
    ddp = wrapped(t, strategy=sl.LocalSGD(4, every_step_within=3), replica_check=ReplicaCheck(every=1))
    adam(ddp)
    if t.rank == 4:
        flip(ddp.module.two.bias, 1, 5)
    if t.rank < 3:
        ddp(torch.ones(5, 6)).sum().backward()
        return
    error = found_by(ddp)
    assert error.minority_ranks == (4,)
    assert "on ranks 3-5, but" in str(error)
    assert "two.bias, element 1 of 3  ranks 3, 5 | rank 4" in str(error)


@on_threads(2)
def test_without_a_common_start_it_does_not_claim_one(t: Transport) -> None:
    net = copy.deepcopy(NET)
    if t.rank == 1:
        flip(net.two.bias, 1, 5)
    error = found_by(wrapped(t, net, init_sync=False, replica_check=ReplicaCheck(every=1)))
    assert error.agreed_at_step is None
    assert "agreed on" not in str(error)


# ---------------------------------------------------------------------- arguments


def test_what_does_not_go_together_is_refused() -> None:
    repairs = ReplicaCheck(on_divergence="repair")
    with pytest.raises(ValueError, match="sharded=True"):
        sl.DistributedDataParallel(nn.Linear(1, 1), sharded=True, replica_check=repairs)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        ReplicaCheck(every=0)
    with pytest.raises(TypeError, match="Create an object of this class"):
        sl.DistributedDataParallel(nn.Linear(1, 1), replica_check=ReplicaCheck)


@on_threads(2)
def test_ranks_have_to_check_alike(t: Transport) -> None:
    with pytest.raises(ContractMismatch, match="replica_check"):
        wrapped(t, replica_check=ReplicaCheck(every=1 + t.rank))


# ---------------------------------------------------------------------- sl.check_replicas of a TrainState


def check_fails(t: Transport, state: sl.TrainState, change: Callable[[], object]) -> ReplicaDivergence:
    """The error after a change on rank 1. Before it, all is equal."""
    sl.check_replicas(state, group=t)
    if t.rank == 1:
        change()
    with pytest.raises(ReplicaDivergence) as caught:
        sl.check_replicas(state, group=t)
    return caught.value


@on_threads(3)
def test_a_train_state_is_compared_but_for_what_is_a_rank_s_own(t: Transport) -> None:
    for ignore in ([], ["one.*"]):
        ddp = wrapped(t, ignore=ignore)
        optimizer = adam(ddp)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        state = sl.TrainState(model=ddp, optimizer=optimizer, scheduler=scheduler)
        train(t, ddp, optimizer, num_steps=3)  # now buffers differ, and the state of what is ignored
        moment = optimizer.state[ddp.module.two.weight]["exp_avg_sq"]
        with case(ignore):
            error = check_fails(t, state, partial(flip, moment, 100, 4))
            assert (error.tensor, error.elements) == ("optimizer.state[4].exp_avg_sq", (100, 100))
            assert error.num_differing == 1
            assert "exp_avg_sq, element [2, 20] of 120  ranks 0, 2 | rank 1" in str(error)


@on_threads(2)
def test_a_train_state_is_compared_only_where_it_has_to_be_equal(t: Transport) -> None:
    for strategy in (sl.Manual(), sl.LocalSGD(3)):
        ddp = wrapped(t, strategy=strategy)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        if strategy.needs_attach:
            optimizer = ddp.attach(optimizer)
        counts = [len(replica_of(ddp).equal_tensors())]
        train(t, ddp, optimizer, num_steps=2)
        counts.append(len(replica_of(ddp).equal_tensors()))
        sl.check_replicas(sl.TrainState(model=ddp), group=t)
        if strategy.needs_attach:
            train(t, ddp, optimizer, num_steps=1)  # they meet
        else:
            sl.average_(ddp, group=t)
        counts.append(
            len([name for name, _ in replica_of(ddp).equal_tensors() if not name.startswith("norm.")])
        )
        sl.check_replicas(sl.TrainState(model=ddp), group=t)
        with case(strategy):
            assert counts == [6, 0, 4]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # the compiler's own
@on_threads(2)
def test_a_wrapper_inside_of_what_is_named_has_its_contract(t: Transport) -> None:
    for compiles in (False, True):
        ddp, optimizer = trained(t, num_steps=2)
        assert len({*map(repr, t.all_gather_bytes(repr(ddp.module.norm.running_mean).encode()))}) == t.size
        model: Any = torch.compile(ddp) if compiles else nn.ModuleDict({"g": ddp})
        state = sl.TrainState(model=model, optimizer=optimizer)
        error = check_fails(t, state, partial(flip, ddp.module.two.weight, 7, 3))
        assert error.num_differing == 1
        assert error.tensor.endswith("two.weight")


@on_threads(2)
def test_the_last_loss_that_an_optimizer_remembers_is_a_rank_s_own(t: Transport) -> None:
    ddp = wrapped(t, nn.Linear(6, 3))
    optimizer = ddp.attach(torch.optim.LBFGS(ddp.parameters(), lr=0.1, max_iter=2))
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(t.rank))

    def loss() -> Tensor:
        optimizer.zero_grad()
        result: Tensor = ddp(x).square().sum()
        result.backward()
        return result

    optimizer.step(loss)
    state = sl.TrainState(model=ddp, optimizer=optimizer)
    error = check_fails(t, state, lambda: optimizer.param_groups[0].update(lr=0.2))
    assert error.num_differing == 1
    assert error.tensor.endswith("param_groups[0].lr")


@on_threads(2)
def test_of_a_train_state_a_step_and_a_schedule_are_compared(t: Transport) -> None:
    model = copy.deepcopy(NET)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    state = sl.TrainState(model=model, scheduler=scheduler)
    state.step = 3
    assert check_fails(t, state, lambda: setattr(state, "step", 4)).tensor == "step"
    state.step = 3
    assert check_fails(t, state, lambda: [optimizer.step(), scheduler.step()]).tensor == "scheduler"


# ---------------------------------------------------------------------- the hash of a slice


def hashed(*parts: tuple[Any, ...]) -> int:
    """The hash of (leaf, value, start, stop), of which the last two may be left out."""
    found = SliceHash()
    for leaf, value, *part in parts:
        found.add(leaf, value, *(part or (0, value.numel() if isinstance(value, Tensor) else 0)))
    return found.value()


@given(st.integers(1, 300), st.integers(0, 299), st.integers(0, 15))
def test_one_flipped_bit_changes_the_hash(numel: int, element: int, bit: int) -> None:
    for dtype in (torch.bfloat16, torch.int16):
        x = torch.arange(numel, dtype=dtype)
        before = hashed((0, x))
        flip(x, element % numel, bit)
        assert hashed((0, x)) != before


@as_if_on_a_device()
def test_what_is_hashed_on_a_device_tells_as_much() -> None:
    """Where there is no such device: its way is taken on the CPU."""

    def value(tensor: Tensor, stop: int) -> int:
        return hashed((0, tensor, 64, stop), (1, tensor, 0, 64))

    for dtype in (torch.float32, torch.bfloat16, torch.uint8, torch.complex64):
        x = torch.arange(1000).to(dtype).view(10, 100)
        y = x.clone()
        flip(y, 999, 0)
        with case(dtype):
            assert value(x, 1000) == value(x.clone(), 1000) == value(x.t(), 1000), "in the order of memory"
            assert value(x, 1000) != value(y, 1000)
            assert value(x, 960) == value(y, 960)


def test_leaves_are_told_apart_and_so_is_their_order() -> None:
    a, b = torch.ones(2), torch.zeros(2)
    rows = [[(0, a), (1, b)], [(0, b), (1, a)], [(0, a), (2, b)], [(0, a)], [(0, 1), (1, b)]]
    assert len({hashed(*row) for row in rows}) == len(rows)
