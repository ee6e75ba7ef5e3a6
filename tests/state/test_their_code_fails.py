"""A function of the user's fails inside of an agreement: every rank says whose it was. Ranks are threads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import syncline as sl
from syncline import TrainState
from syncline.transport import Transport, run_ranks


class Fails:
    """Has a state, and fails where it is told to."""

    def __init__(self, place: str = "") -> None:
        self.place = place

    def _do(self, place: str) -> None:
        if place == self.place:
            raise KeyError("lost")

    def state_dict(self) -> dict[str, Any]:
        self._do("state_dict")
        return {"value": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._do("load_state_dict")


def text_of(
    error: type[BaseException], call: Callable[[], Any], *, cause: type[BaseException] | None = None
) -> str:
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error
    assert cause is None or type(caught.value.__cause__) is cause
    return str(caught.value)


def state(place: str = "") -> TrainState:
    return TrainState(model=nn.Linear(2, 1), mine=Fails(place))


def test_a_state_dict_that_fails_is_named(tmp_path: Path) -> None:
    def program(t: Transport) -> str:
        with sl.Checkpointer(tmp_path, group=t) as checkpointer:
            cause = KeyError if t.rank else None
            mine = state("state_dict" if t.rank else "")
            return text_of(sl.SynclineError, lambda: checkpointer.save(mine), cause=cause)

    first, second = run_ranks(2, program)
    assert first == second
    heading, line = first.splitlines()
    assert heading == "sl.Checkpointer.save: failed"
    assert line.startswith("rank 1: state_dict() of mine (Fails), at test_their_code_fails.py:")
    assert line.endswith(" in _do, raised KeyError: 'lost'")
    assert list(tmp_path.iterdir()) == []


def test_what_is_refused_and_what_fails_are_told_apart(tmp_path: Path) -> None:
    def program(t: Transport) -> str:
        with sl.Checkpointer(tmp_path, group=t) as checkpointer:
            mine: Any = state("state_dict") if t.rank else "text"
            return text_of(sl.SynclineError, lambda: checkpointer.save(mine))

    first, second = run_ranks(2, program)
    assert first == second
    assert first.startswith(
        "sl.Checkpointer.save: failed\nrank 0: expected state to be a TrainState, got a str"
    )
    assert "\nrank 1: state_dict() of mine (Fails), at " in first


def test_a_load_state_dict_that_fails_is_named(tmp_path: Path) -> None:
    def program(t: Transport) -> str:
        with sl.Checkpointer(tmp_path, group=t) as checkpointer:
            checkpointer.save(state())
            mine = state("load_state_dict" if t.rank else "")
            return text_of(sl.SynclineError, lambda: checkpointer.load(mine))

    first, second = run_ranks(2, program)
    assert first == second
    assert first.startswith(
        "sl.Checkpointer.load of save-000001-step-0: could not be loaded\n"
        "rank 1: load_state_dict() of mine (Fails), at "
    )


def test_a_module_that_takes_another_state_is_named(tmp_path: Path) -> None:
    def program(t: Transport) -> str:
        with sl.Checkpointer(tmp_path, group=t) as checkpointer:
            checkpointer.save(TrainState(net=nn.Linear(2, 1)))
            other = TrainState(net=nn.Linear(3, 1))
            return text_of(sl.SynclineError, lambda: checkpointer.load(other))

    (text,) = set(run_ranks(2, program))
    assert text.startswith(
        "sl.Checkpointer.load of save-000001-step-0: could not be loaded\n"
        "ranks 0, 1: load_state_dict() of net (Linear) raised RuntimeError: "
    )
    assert "size mismatch for weight" in text


def test_other_names_than_those_that_were_saved_are_no_failure_of_anybodys(tmp_path: Path) -> None:
    def program(t: Transport) -> str:
        with sl.Checkpointer(tmp_path, group=t) as checkpointer:
            checkpointer.save(TrainState(net=nn.Linear(2, 1)))
            other = TrainState(model=nn.Linear(2, 1))
            return text_of(ValueError, lambda: checkpointer.load(other))

    (text,) = set(run_ranks(2, program))
    assert text.startswith(
        "sl.Checkpointer.load of save-000001-step-0: could not be loaded\nranks 0, 1: expected a saved state with "
        "the names step, model: "
    )


@pytest.mark.parametrize(
    ("saved", "wanted", "lacks"),
    [
        (torch.optim.AdamW, torch.optim.SGD, "it lacks dampening, momentum, which SGD needs"),
        (torch.optim.SGD, torch.optim.RMSprop, "it lacks alpha, eps, which RMSprop needs"),
    ],
)
def test_the_state_of_another_optimizer_is_refused_before_it_fails_at_a_step(
    saved: type[torch.optim.Optimizer], wanted: type[torch.optim.Optimizer], lacks: str, tmp_path: Path
) -> None:
    def of(kind: Any) -> TrainState:
        model = nn.Linear(2, 1)
        return TrainState(model=model, optimizer=kind(model.parameters(), lr=0.1))

    def program(t: Transport) -> str:
        with sl.Checkpointer(tmp_path, group=t) as checkpointer:
            checkpointer.save(of(saved))
            return text_of(ValueError, lambda: checkpointer.load(of(wanted)))

    (text,) = set(run_ranks(2, program))
    assert lacks in text


def test_a_file_of_plain_torch_that_an_object_does_not_take(tmp_path: Path) -> None:
    path = tmp_path / "saved.pt"
    torch.save({"step": 1, "mine": {"value": 1}}, path)

    def program(t: Transport) -> str:
        class Odd(Fails):
            def load_state_dict(self, state: dict[str, Any]) -> None:
                raise TypeError("not this")

        mine = TrainState(mine=Odd())
        return text_of(TypeError, lambda: mine.load_torch(path, group=t))

    (text,) = set(run_ranks(2, program))
    assert text.startswith(
        "sl.TrainState.load_torch: could not be loaded\nranks 0, 1: load_state_dict() of mine (Odd)"
    )


def test_a_state_that_is_asked_for_by_the_user_fails_as_it_does() -> None:
    with pytest.raises(KeyError, match="lost") as caught:
        state("state_dict").state_dict()
    assert caught.value.__notes__ == ["in state_dict() of mine (Fails)"]


def test_a_scheduler_that_fails_while_replicas_are_compared() -> None:
    def program(t: Transport) -> str:
        mine = TrainState(scheduler=Fails("state_dict" if t.rank else ""))
        return text_of(sl.SynclineError, lambda: sl.check_replicas(mine, group=t))

    (text,) = set(run_ranks(2, program))
    assert text.startswith("sl.check_replicas: failed\nrank 1: state_dict() of scheduler (Fails), at ")


def test_a_step_that_fails_while_it_is_examined() -> None:
    def program(t: Transport) -> str:
        net = nn.Linear(2, 1)

        def step(x: torch.Tensor) -> None:
            net(x)
            if t.rank:
                raise ValueError("no such batch")

        x = torch.ones(1, 2)
        return text_of(ValueError, lambda: sl.debug.compare_replicas(step, net, inputs=(x,), group=t))

    (text,) = set(run_ranks(2, program))
    assert text.startswith(
        "sl.debug.compare_replicas: failed\nrank 1: the function, at test_their_code_fails.py:"
    )
    assert text.endswith(" in step, raised ValueError: no such batch")


def test_an_optimizer_that_cannot_be_made() -> None:
    def program(t: Transport) -> tuple[str, str]:
        def fails(*_: Any, **__: Any) -> torch.optim.Optimizer:
            raise RuntimeError("no optimizer")

        evolved = text_of(
            sl.SynclineError,
            lambda: sl.EvolutionStrategy(nn.Linear(2, 1), 0.1, 0.1, 4, 0, optimizer=fails, group=t),
        )
        wrapped = text_of(
            sl.SynclineError,
            lambda: sl.DistributedDataParallel(
                nn.Linear(2, 1),
                process_group=t,
                strategy=sl.DiLoCo(2, outer=fails),
            ),
        )
        return evolved, wrapped

    ((evolved, wrapped),) = set(run_ranks(2, program))
    assert evolved.startswith("sl.EvolutionStrategy: failed\nranks 0, 1: optimizer(parameters, lr=lr), at ")
    assert ": failed\nranks 0, 1: outer(parameters), at " in wrapped
    assert wrapped.endswith(" in fails, raised RuntimeError: no optimizer")


class OfMine(sl.LocalSGD):
    def init(self, spec: Any) -> Any:
        raise KeyError("nothing to begin with")


def test_a_strategy_of_the_users_own() -> None:
    def program(t: Transport) -> str:
        return text_of(
            sl.SynclineError,
            lambda: sl.DistributedDataParallel(nn.Linear(2, 1), process_group=t, strategy=OfMine(2)),
        )

    (text,) = set(run_ranks(2, program))
    assert ": failed\nranks 0, 1: init() or mechanism() of OfMine, at " in text


class ExtraStateFails(nn.Linear):
    def get_extra_state(self) -> Any:
        raise KeyError("lost")


def test_a_module_that_cannot_be_backed_up_before_load_torch_is_an_error_on_every_rank(
    tmp_path: Path,
) -> None:
    path = tmp_path / "weights.pt"
    torch.save(nn.Linear(2, 1).state_dict(), path)

    def program(t: Transport) -> str:
        model = (ExtraStateFails if t.rank else nn.Linear)(2, 1)
        mine = TrainState(model=model)
        return text_of(sl.SynclineError, lambda: mine.load_torch(path, strict=False, group=t))

    first, second = run_ranks(2, program)
    assert first == second
    assert "rank 1: KeyError" in first
