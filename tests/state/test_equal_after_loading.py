"""After a load all ranks have the same where the same was saved; if not, what differs is named. Ranks are threads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from faulty_files import FaultyFiles
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import syncline as sl
from support.cases import case
from syncline import Checkpointer, ReplicaDivergence, TrainState
from syncline.checkpoint.rollback import Before, load_together
from syncline.transport import Transport, run_ranks


class Net(nn.Module):
    """With statistics of its own on each rank."""

    def __init__(self, rank: int = 0) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 2)
        self.register_buffer("mean", torch.full((2,), float(rank)))


def make(rank: int) -> TrainState:
    module = Net(rank)
    for parameter in module.parameters():
        parameter.data.fill_(0.5)
    optimizer = SGD(module.parameters(), lr=0.1, momentum=0.9)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return TrainState(model=module, optimizer=optimizer)


def saved() -> FaultyFiles:
    files = FaultyFiles()
    run_ranks(3, lambda t: Checkpointer("/runs/one", group=t, files=files).save(make(t.rank), step=4))
    return files


def test_what_a_rank_has_of_its_own_is_not_compared_nor_the_order_of_memory() -> None:
    files = saved()

    def load(t: Transport) -> list[float]:
        state = make(9)
        if t.rank == 1:
            state.named["model"].to(memory_format=torch.channels_last)
        assert Checkpointer("/runs/one", group=t, files=files).load(state) == 4
        buffer: Tensor = state.named["model"].mean
        return buffer.tolist()

    assert run_ranks(3, load) == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]


def bias(state: TrainState) -> None:
    state.named["model"].conv.bias.data[2] += 1e-7


def lr(state: TrainState) -> None:
    state.named["optimizer"].param_groups[0]["lr"] *= 2


def momentum(state: TrainState) -> None:
    next(iter(state.named["optimizer"].state.values()))["momentum_buffer"].mul_(2)


def test_what_one_rank_loads_otherwise_is_named() -> None:
    files = saved()

    def load(t: Transport, name: str, spoil: Callable[[TrainState], None]) -> str:
        state = make(t.rank)

        def hook(*_: Any) -> None:
            if t.rank == 1:
                spoil(state)

        state.named["model" if spoil is bias else "optimizer"].register_load_state_dict_post_hook(hook)
        with pytest.raises(ReplicaDivergence) as caught:
            Checkpointer("/runs/one", group=t, files=files).load(state)
        assert (caught.value.tensor, caught.value.minority_ranks) == (name, (1,))
        assert caught.value.num_differing == 1
        return str(caught.value)

    for name, spoil in (
        ("model.conv.bias", bias),
        ("optimizer, values other than tensors", lr),
        ("optimizer.state.0.momentum_buffer", momentum),
    ):
        with case(name):
            (text,) = set(run_ranks(3, partial(load, name=name, spoil=spoil)))
            assert f"{name}  ranks 0, 2 | rank 1" in text


def test_what_was_sharded_and_is_not_any_more_is_compared() -> None:
    files = FaultyFiles()

    def program(t: Transport, *, sharded: bool) -> None:
        module = Net()
        del module.mean
        ddp = sl.DistributedDataParallel(module, process_group=t, sharded=sharded)
        optimizer = ddp.attach(SGD(ddp.parameters(), lr=0.1, momentum=0.9))
        state = TrainState(model=ddp, optimizer=optimizer)
        checkpointer = Checkpointer("/runs/one", group=t, files=files)
        if sharded:
            module.conv(torch.ones(1, 3, 2, 2)).sum().backward()
            optimizer.step()
            checkpointer.save(state)
            return

        def spoil(optimizer: Optimizer) -> None:
            if t.rank == 1:
                next(iter(optimizer.state.values()))["momentum_buffer"].zero_()

        optimizer.register_load_state_dict_post_hook(spoil)
        checkpointer.load(state)

    run_ranks(2, lambda t: program(t, sharded=True))
    with pytest.raises(ReplicaDivergence, match=r"optimizer\.state\.\d\.momentum_buffer  rank 0 \| rank 1"):
        run_ranks(2, lambda t: program(t, sharded=False))


def test_another_shape_or_type_or_name_is_a_difference() -> None:
    own = {"x": torch.zeros(2, 2)}

    def load(t: Transport, other: dict[str, Tensor]) -> None:
        load_together(t, "loading", Before(TrainState()), lambda: {"z": other if t.rank else own})

    others: dict[str, dict[str, Tensor]] = {
        "x": {"x": torch.zeros(4)},
        "x (type)": {"x": torch.zeros(2, 2, dtype=torch.int32)},
        "x (smaller)": {"x": torch.zeros(2, 1)},
        "y": own | {"y": torch.ones(2)},
    }
    for kind, other in others.items():
        text = rf"z\.{kind[0]}  rank 0 \| rank 1"
        with case(kind), pytest.raises(ReplicaDivergence, match=text):
            run_ranks(2, partial(load, other=other))
