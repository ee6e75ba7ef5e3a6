"""A function of the user's fails inside of an agreement: every rank says whose it was. Ranks are threads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import syncline as sl
from support.cases import case
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


def text_of_all(call: Callable[[Transport], Any], error: type[BaseException] = sl.SynclineError) -> str:
    """What a call raises on both ranks, with exactly this class and the same text."""

    def program(t: Transport) -> str:
        with pytest.raises(error) as caught:
            call(t)
        assert type(caught.value) is error
        if t.rank and "rank 1: state_dict() of mine (Fails)" in str(caught.value):
            assert type(caught.value.__cause__) is KeyError
        return str(caught.value)

    (text,) = set(run_ranks(2, program))
    return text


def state(place: str = "") -> TrainState:
    return TrainState(model=nn.Linear(2, 1), mine=Fails(place))


def test_a_state_dict_that_fails_is_named_and_told_from_what_is_refused(tmp_path: Path) -> None:
    def save(t: Transport, other: Any) -> None:
        with sl.Checkpointer(tmp_path, group=t) as checkpointer:
            checkpointer.save(state("state_dict") if t.rank else other)

    heading, line = text_of_all(lambda t: save(t, state())).splitlines()
    assert heading == "sl.Checkpointer.save: failed"
    assert line.startswith("rank 1: state_dict() of mine (Fails), at test_their_code_fails.py:")
    assert line.endswith(" in _do, raised KeyError: 'lost'")
    heading, refused, failed = text_of_all(lambda t: save(t, "text")).splitlines()
    assert heading == "sl.Checkpointer.save: failed"
    assert refused.startswith("rank 0: expected state to be a TrainState, got a str")
    assert failed == line
    assert list(tmp_path.iterdir()) == []


def loading(
    directory: Path, saved: TrainState, other: Callable[[Transport], TrainState]
) -> Callable[[Transport], None]:
    """A call that saves a state and loads it into another one."""

    def call(t: Transport) -> None:
        with sl.Checkpointer(directory, group=t) as checkpointer:
            checkpointer.save(saved)
            checkpointer.load(other(t))

    return call


def test_what_an_object_does_not_load_is_named(tmp_path: Path) -> None:
    heading = "sl.Checkpointer.load of save-000001-step-0: could not be loaded\n"
    fails = loading(tmp_path / "fails", state(), lambda t: state("load_state_dict" if t.rank else ""))
    assert text_of_all(fails).startswith(f"{heading}rank 1: load_state_dict() of mine (Fails), at ")
    net = TrainState(net=nn.Linear(2, 1))
    refuses = loading(tmp_path / "refuses", net, lambda t: TrainState(net=nn.Linear(3, 1)))
    text = text_of_all(refuses)
    assert text.startswith(f"{heading}ranks 0, 1: load_state_dict() of net (Linear) raised RuntimeError: ")
    assert "size mismatch for weight" in text
    # Other names are no failure of anybody's.
    text = text_of_all(
        loading(tmp_path / "names", net, lambda t: TrainState(model=nn.Linear(2, 1))), ValueError
    )
    assert text.startswith(f"{heading}ranks 0, 1: expected a saved state with the names step, model: ")
    assert "model was not saved; net was saved, but is not named here" in text


def test_the_state_of_another_optimizer_is_refused_before_it_fails_at_a_step(tmp_path: Path) -> None:
    def of(kind: Any) -> TrainState:
        model = nn.Linear(2, 1)
        return TrainState(model=model, optimizer=kind(model.parameters(), lr=0.1))

    optim = torch.optim
    for saved, wanted, lacks in (
        (optim.AdamW, optim.SGD, "it lacks dampening, momentum, which SGD needs"),
        (optim.SGD, optim.RMSprop, "it lacks alpha, eps, which RMSprop needs"),
    ):
        with case(lacks):
            call = loading(tmp_path / saved.__name__, of(saved), lambda t, w=wanted: of(w))  # type: ignore[misc]
            assert lacks in text_of_all(call, ValueError)


def test_a_file_of_plain_torch_that_an_object_does_not_take(tmp_path: Path) -> None:
    class Odd(Fails):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise TypeError("not this")

    path = tmp_path / "saved.pt"
    torch.save({"step": 1, "mine": {"value": 1}}, path)
    text = text_of_all(lambda t: TrainState(mine=Odd()).load_torch(path, group=t), TypeError)
    assert text.startswith(
        "sl.TrainState.load_torch: could not be loaded\nranks 0, 1: load_state_dict() of mine (Odd)"
    )


def test_a_state_that_is_asked_for_by_the_user_fails_as_it_does() -> None:
    with pytest.raises(KeyError, match="lost") as caught:
        state("state_dict").state_dict()
    assert caught.value.__notes__ == ["in state_dict() of mine (Fails)"]


def test_a_scheduler_that_fails_while_replicas_are_compared() -> None:
    text = text_of_all(
        lambda t: sl.check_replicas(TrainState(scheduler=Fails("state_dict" if t.rank else "")), group=t)
    )
    assert text.startswith("sl.check_replicas: failed\nrank 1: state_dict() of scheduler (Fails), at ")


def test_a_step_that_fails_while_it_is_examined() -> None:
    def call(t: Transport) -> None:
        net = nn.Linear(2, 1)

        def step(x: torch.Tensor) -> None:
            net(x)
            if t.rank:
                raise ValueError("no such batch")

        sl.debug.compare_replicas(step, net, inputs=(torch.ones(1, 2),), group=t)

    text = text_of_all(call, ValueError)
    assert text.startswith(
        "sl.debug.compare_replicas: failed\nrank 1: the function, at test_their_code_fails.py:"
    )
    assert text.endswith(" in step, raised ValueError: no such batch")


def test_an_optimizer_that_cannot_be_made() -> None:
    def fails(*_: Any, **__: Any) -> torch.optim.Optimizer:
        raise RuntimeError("no optimizer")

    def wrap(t: Transport) -> Any:
        strategy = sl.DiLoCo(2, outer=fails)
        return sl.DistributedDataParallel(nn.Linear(2, 1), process_group=t, strategy=strategy)

    evolved = text_of_all(
        lambda t: sl.EvolutionStrategy(nn.Linear(2, 1), 0.1, 0.1, 4, 0, optimizer=fails, group=t)
    )
    assert evolved.startswith("sl.EvolutionStrategy: failed\nranks 0, 1: optimizer(parameters, lr=lr), at ")
    wrapped = text_of_all(wrap)
    assert ": failed\nranks 0, 1: outer(parameters), at " in wrapped
    assert wrapped.endswith(" in fails, raised RuntimeError: no optimizer")


def test_a_strategy_of_the_users_own() -> None:
    class OfMine(sl.LocalSGD):
        def init(self, spec: Any) -> Any:
            raise KeyError("nothing to begin with")

    text = text_of_all(
        lambda t: sl.DistributedDataParallel(nn.Linear(2, 1), process_group=t, strategy=OfMine(2))
    )
    assert ": failed\nranks 0, 1: init() or mechanism() of OfMine, at " in text


def test_a_module_that_cannot_be_backed_up_before_load_torch_is_an_error_on_every_rank(
    tmp_path: Path,
) -> None:
    class ExtraStateFails(nn.Linear):
        def get_extra_state(self) -> Any:
            raise KeyError("lost")

    path = tmp_path / "weights.pt"
    torch.save(nn.Linear(2, 1).state_dict(), path)

    def load(t: Transport) -> None:
        model = (ExtraStateFails if t.rank else nn.Linear)(2, 1)
        TrainState(model=model).load_torch(path, strict=False, group=t)

    assert "rank 1: KeyError" in text_of_all(load)
