"""What is known of synchronization after a state was loaded: which step it is, who is equal. Ranks are threads."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import syncline as sl
from support.cases import case
from syncline import ReplicaDivergence
from syncline.transport import Transport, run_ranks

torch.manual_seed(0)
NET = nn.Linear(6, 3)


def training(t: Transport, **kwargs: Any) -> tuple[sl.DistributedDataParallel, Any, sl.TrainState]:
    ddp = sl.DistributedDataParallel(copy.deepcopy(NET), process_group=t, **kwargs)
    optimizer = ddp.attach(torch.optim.Adam(ddp.parameters()))
    return ddp, optimizer, sl.TrainState(model=ddp, optimizer=optimizer)


def train(t: Transport, ddp: Any, optimizer: Any, state: sl.TrainState, *, num_steps: int) -> None:
    for _ in range(num_steps):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(10 * state.step + t.rank)
        ddp(torch.randn(5, 6, generator=generator)).square().sum().backward()
        optimizer.step()
        state.commit()


def resumed(
    t: Transport, directory: Path, num_steps: int, **kwargs: Any
) -> tuple[sl.DistributedDataParallel, Any, sl.TrainState]:
    """A training that goes on where another one was saved after so many steps."""
    former = training(t, strategy=kwargs.get("strategy", sl.EveryStep()))
    train(t, *former, num_steps=num_steps)
    again = training(t, **kwargs)
    with sl.Checkpointer(directory, group=t) as checkpointer:
        checkpointer.save(former[2])
        checkpointer.load(again[2])
    return again


def write_one_weight(ddp: Any) -> None:
    ddp.module.weight.data[1, 2] += 1


def test_messages_and_records_count_on_from_a_loaded_step(tmp_path: Path) -> None:
    def program(t: Transport) -> tuple[ReplicaDivergence, str]:
        ddp, optimizer, state = resumed(t, tmp_path, 40, replica_check=sl.ReplicaCheck(every=1))
        train(t, ddp, optimizer, state, num_steps=2)
        assert ddp.last_step.step == 42
        assert ddp.contract["replica check"].last_done == "step 42: equal"
        assert ddp._get_ddp_logging_data()["iteration"] == 42
        if t.rank == 1:
            write_one_weight(ddp)
        with pytest.raises(ReplicaDivergence) as caught:
            train(t, ddp, optimizer, state, num_steps=1)
        return caught.value, str(t.board.step)

    for error, step in run_ranks(3, program):
        assert "Linear, step 43, replica check" in str(error)
        assert (error.found_at_step, error.agreed_at_step, error.minority_ranks) == (43, 42, (1,))
        assert step == "43"


def test_what_a_checkpointer_has_loaded_is_known_to_be_equal_since_and_nothing_else(tmp_path: Path) -> None:
    def agreed_at(run: Any, t: Transport) -> tuple[str, int | None]:
        if t.rank == 0:
            write_one_weight(run[0])
        with pytest.raises(ReplicaDivergence) as caught:
            train(t, *run, num_steps=1)
        return str(caught.value), caught.value.agreed_at_step

    def by_checkpointer(t: Transport) -> tuple[str, int | None]:
        return agreed_at(resumed(t, tmp_path, 7, replica_check=sl.ReplicaCheck(every=1)), t)

    def otherwise(t: Transport) -> tuple[str, int | None]:
        run = training(t, replica_check=sl.ReplicaCheck(every=1))
        train(t, *run, num_steps=3)
        before = copy.deepcopy(run[2].state_dict())
        train(t, *run, num_steps=2)
        run[2].load_state_dict(before)
        return agreed_at(run, t)

    ((text, step),) = set(run_ranks(2, by_checkpointer))
    assert step == 7
    assert "at step 7, 1 step before" in text
    ((text, none),) = set(run_ranks(2, otherwise))
    assert none is None
    assert "step 4, replica check" in text


def test_one_rank_may_load_and_give_it_to_the_others() -> None:
    def program(t: Transport) -> tuple[int, list[torch.Tensor]]:
        ddp, optimizer, state = training(t, replica_check=sl.ReplicaCheck(every=2))
        if t.rank == 0:
            other = sl.TrainState(model=copy.deepcopy(NET), optimizer=optimizer)
            other.step = 100
            saved = other.state_dict()
            saved["model"]["weight"].fill_(0.5)
            state.load_state_dict(saved)
        sl.broadcast_(ddp, src=0, group=t)
        train(t, ddp, optimizer, sl.TrainState(), num_steps=5)
        return ddp.last_step.step, list(ddp.parameters())

    (step_0, weights), (step_1, others) = run_ranks(2, program)
    assert (step_0, step_1) == (105, 5)
    assert all(map(torch.equal, weights, others))


def test_a_hook_can_be_registered_after_loading_and_after_a_backward() -> None:
    def hook(_: Any, bucket: Any) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    def program(t: Transport) -> None:
        _, _, former = training(t)
        former.step = 12
        for num_steps in (0, 1):
            ddp, optimizer, state = training(t)
            state.load_state_dict(former.state_dict())
            train(t, ddp, optimizer, state, num_steps=num_steps)
            ddp.register_comm_hook(None, hook)
            train(t, ddp, optimizer, state, num_steps=1)

    run_ranks(2, program)


def test_between_meetings_a_resumed_replica_is_not_taken_for_an_equal_one(tmp_path: Path) -> None:
    """Nor are moments, which ranks have of their own all the time."""

    def program(t: Transport, num_steps: int) -> list[str]:
        ddp, optimizer, state = resumed(t, tmp_path / str(num_steps), num_steps, strategy=sl.LocalSGD(4))
        found = []
        sl.check_replicas(state, group=t)
        for _ in range(2):
            if t.rank == 0:
                write_one_weight(ddp)
            try:
                sl.check_replicas(state, group=t)
                found.append("not compared")
            except ReplicaDivergence as error:
                found.append(error.tensor)
            train(t, ddp, optimizer, state, num_steps=2)
        return found

    between = run_ranks(2, lambda t: program(t, 6))
    assert between == [["not compared", "model.weight"]] * 2
    right_after_one = run_ranks(2, lambda t: program(t, 8))
    assert right_after_one == [["model.weight", "not compared"]] * 2


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # the compiler's own
@pytest.mark.real
def test_a_compiled_wrapper_is_saved_as_the_wrapper() -> None:
    def program(t: Transport) -> None:
        ddp, optimizer, state = training(t, strategy=sl.LocalSGD(4))
        train(t, ddp, optimizer, state, num_steps=6)
        compiled = sl.TrainState(model=torch.compile(ddp), optimizer=optimizer)  # type: ignore[arg-type]
        saved = compiled.state_dict()["model"]
        assert saved["synchronization"] == ddp.sync_state_dict()
        assert saved["synchronization"]["rounds"]["step"] == 6
        assert {*saved["module"]} == {"weight", "bias"}
        plain = sl.TrainState(model=torch.compile(copy.deepcopy(NET)))  # type: ignore[arg-type]
        assert {*plain.state_dict()["model"]} == {"weight", "bias"}

    run_ranks(2, program)


def test_a_wrapper_whose_state_would_be_lost_inside_of_another_module_is_refused() -> None:
    def program(t: Transport) -> None:
        for kwargs in ({"strategy": sl.LocalSGD(4)}, {"compression": sl.compression.TopK(0.5)}):
            ddp, _, _ = training(t, **kwargs)
            both = nn.ModuleDict({"generator": ddp})
            text = "model contains a wrapped module, generator, whose strategy or compr"
            with case(kwargs), pytest.raises(ValueError, match=text):
                sl.TrainState(model=both)
            sl.TrainState(model=both, generator=ddp)
        sl.TrainState(model=nn.ModuleDict({"generator": training(t)[0]}))

    run_ranks(2, program)
    run_ranks(1, program)
