"""After a load all ranks have the same where the same was saved; if not, what differs is named. Ranks are threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from faulty_files import FaultyFiles
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import syncline as sl
from syncline import Checkpointer, ReplicaDivergence, TrainState
from syncline.checkpoint.rollback import agree_on_loaded
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


def test_what_a_rank_has_of_its_own_is_not_compared() -> None:
    files = saved()

    def load(t: Transport) -> list[float]:
        state = make(9)
        assert Checkpointer("/runs/one", group=t, files=files).load(state) == 4
        buffer: Tensor = state.named["model"].mean
        return buffer.tolist()

    assert run_ranks(3, load) == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]


def test_a_tensor_that_one_rank_loads_otherwise_is_named() -> None:
    files = saved()
    texts = []

    def load(t: Transport) -> None:
        state = make(t.rank)

        def spoil(module: nn.Module, keys: Any) -> None:
            if t.rank == 1:
                module.conv.bias.data[2] += 1e-7  # type: ignore[union-attr,operator]

        state.named["model"].register_load_state_dict_post_hook(spoil)
        with pytest.raises(ReplicaDivergence) as caught:
            Checkpointer("/runs/one", group=t, files=files).load(state)
        assert (caught.value.tensor, caught.value.num_differing) == ("model.conv.bias", 1)
        assert caught.value.minority_ranks == (1,)
        texts.append(str(caught.value))

    run_ranks(3, load)
    assert len(set(texts)) == 1
    assert "model.conv.bias  ranks 0, 2 | rank 1" in texts[0]


@pytest.mark.parametrize("what", ["momentum", "lr"])
def test_an_optimizer_that_one_rank_loads_otherwise_is_named(what: str) -> None:
    files = saved()

    def load(t: Transport) -> None:
        state = make(t.rank)

        def spoil(optimizer: Optimizer) -> None:
            if t.rank == 2 and what == "lr":
                optimizer.param_groups[0]["lr"] *= 2
            elif t.rank == 2:
                next(iter(optimizer.state.values()))["momentum_buffer"].mul_(2)

        state.named["optimizer"].register_load_state_dict_post_hook(spoil)
        Checkpointer("/runs/one", group=t, files=files).load(state)

    name = "optimizer, values other than tensors" if what == "lr" else "optimizer.state.0.momentum_buffer"
    with pytest.raises(ReplicaDivergence, match=rf"{name}  ranks 0, 1 \| rank 2"):
        run_ranks(3, load)


def test_the_memory_in_which_it_is_does_not_matter() -> None:
    files = saved()

    def load(t: Transport) -> None:
        state = make(t.rank)
        if t.rank == 1:
            state.named["model"].to(memory_format=torch.channels_last)
        Checkpointer("/runs/one", group=t, files=files).load(state)

    run_ranks(3, load)


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


@pytest.mark.parametrize("other", [torch.zeros(4), torch.zeros(2, 2, dtype=torch.int32), torch.zeros(2, 1)])
def test_another_shape_or_type_is_a_difference(other: Tensor) -> None:
    with pytest.raises(ReplicaDivergence, match=r"x  rank 0 \| rank 1"):
        run_ranks(2, lambda t: agree_on_loaded(t, "loading", {"x": other if t.rank else torch.zeros(2, 2)}))


def test_names_that_one_rank_has_alone_are_a_difference() -> None:
    def program(t: Transport) -> None:
        agree_on_loaded(t, "loading", {"x": {key: torch.ones(2) for key in "ab"[: 2 - t.rank]}})

    with pytest.raises(ReplicaDivergence, match=r"x\.b  rank 0 \| rank 1"):
        run_ranks(2, program)
