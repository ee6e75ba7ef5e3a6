"""Arguments that make no sense: one clear error, the same on every rank, whoever gave them. Ranks are threads."""

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


def state() -> TrainState:
    return TrainState(model=nn.Linear(2, 1))


def error_of(call: Callable[[], Any]) -> tuple[type[BaseException], str]:
    with pytest.raises((TypeError, ValueError)) as caught:
        call()
    return caught.type, str(caught.value)


def raised_everywhere(
    call: Callable[[Transport, bool], Any], error: type[Exception], words: str, nonsense_on: tuple[int, ...]
) -> None:
    """Every rank has the same error, which says who gave the nonsense."""
    told = run_ranks(2, lambda t: error_of(lambda: call(t, t.rank in nonsense_on)), timeout_seconds=20)
    assert told[0] == told[1]
    assert told[0][0] is error
    assert words in told[0][1]
    if len(nonsense_on) == 2:
        assert told[0][1].endswith(" (all ranks)")
    else:
        assert "rank 1: " in told[0][1]


who = pytest.mark.parametrize("nonsense_on", [(1,), (0, 1)], ids=["one rank", "all ranks"])


@who
@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (
            {"directory": 3},
            TypeError,
            "expected directory to be a path, a str or an os.PathLike of a str, got 3",
        ),
        ({"directory": b"x"}, TypeError, "expected directory to be a path"),
        ({"directory": ""}, ValueError, "expected directory to be a path, got ''"),
        ({"keep": "3"}, TypeError, "expected keep to be an integer of at least 1, got '3'"),
        (
            {"files": "x"},
            TypeError,
            "expected files to be a file system with the methods names, make_directory",
        ),
        ({"stop_signals": None}, TypeError, "expected stop_signals to be a tuple of signals, got None"),
        ({"stop_signals": ("sigtem",)}, ValueError, "got 'sigtem': did you mean 'SIGTERM'?"),
        ({"stop_every": True}, TypeError, "expected stop_every to be an integer of at least 1, got True"),
    ],
)
def test_a_checkpointer(
    arguments: dict[str, Any],
    error: type[Exception],
    words: str,
    nonsense_on: tuple[int, ...],
    tmp_path: Path,
) -> None:
    def call(t: Transport, is_nonsense: bool) -> Any:
        return sl.Checkpointer(**({"directory": tmp_path, "group": t} | (arguments if is_nonsense else {})))

    raised_everywhere(call, error, words, nonsense_on)


@who
@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (
            ("text",),
            TypeError,
            "expected state to be a TrainState, got a str: put the objects of the run into a TrainState",
        ),
        ((nn.Linear(1, 1),), TypeError, "expected state to be a TrainState, got a Linear"),
        ((TrainState,), TypeError, "expected state to be a TrainState, got the class TrainState"),
        ((state(), "3"), TypeError, "expected step to be an integer of at least 0, got '3'"),
        ((state(), -1), ValueError, "expected step to be an integer of at least 0, got -1"),
        ((state(), True), TypeError, "expected step to be an integer of at least 0, got True"),
        ((state(), 1, "no"), TypeError, "expected blocking to be True or False, got 'no'"),
    ],
)
def test_what_is_saved(
    arguments: tuple[Any, ...],
    error: type[Exception],
    words: str,
    nonsense_on: tuple[int, ...],
    tmp_path: Path,
) -> None:
    def call(t: Transport, is_nonsense: bool) -> Any:
        with sl.Checkpointer(tmp_path, group=t) as checkpointer:
            return checkpointer.save(*(arguments if is_nonsense else (state(), 1)))

    raised_everywhere(call, error, words, nonsense_on)
    assert list(tmp_path.iterdir()) == []


def test_a_step_that_is_refused_is_not_taken_over(tmp_path: Path) -> None:
    mine = state()
    with sl.Checkpointer(tmp_path) as checkpointer, pytest.raises(ValueError, match="got -1"):
        checkpointer.save(mine, -1)
    assert mine.step == 0
    mine.step = 2.5  # type: ignore[assignment]
    with (
        sl.Checkpointer(tmp_path) as checkpointer,
        pytest.raises(TypeError, match=r"state\.step .* got 2\.5"),
    ):
        checkpointer.save(mine)


def test_ranks_of_which_one_waits_for_its_save_and_one_does_not(tmp_path: Path) -> None:
    def program(t: Transport) -> None:
        with (
            sl.Checkpointer(tmp_path, group=t) as checkpointer,
            pytest.raises(sl.ContractMismatch, match=r"blocking\n    expected True \(rank 0\)"),
        ):
            checkpointer.save(state(), 1, blocking=t.rank == 0)

    run_ranks(2, program)


@who
def test_what_is_loaded(nonsense_on: tuple[int, ...], tmp_path: Path) -> None:
    def call(t: Transport, is_nonsense: bool) -> Any:
        with sl.Checkpointer(tmp_path, group=t) as checkpointer:
            return checkpointer.load("text" if is_nonsense else state())  # type: ignore[arg-type]

    raised_everywhere(call, TypeError, "expected state to be a TrainState, got a str", nonsense_on)


def test_what_is_told_on_one_rank_alone(tmp_path: Path) -> None:
    with sl.Checkpointer(tmp_path, stop_signals=()) as checkpointer:
        with pytest.raises(TypeError, match="expected state to be a TrainState, got a Linear"):
            checkpointer.stop_if_asked(nn.Linear(1, 1))  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="expected why to be a str with the reason in words, got a int"):
            checkpointer.ask_to_stop(3)  # type: ignore[arg-type]
        checkpointer.stop_if_asked(state())  # nobody has asked
    for num_samples, error in (("3", TypeError), (True, TypeError), (-1, ValueError)):
        with pytest.raises(error, match="expected num_samples to be an integer of at least 0, got"):
            state().commit(num_samples)  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"expected state to be a dict, as returned by state_dict\(\), got a list"
    ):
        state().load_state_dict(["step"])  # type: ignore[arg-type]


@who
@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"path": None}, TypeError, "expected path to be a path, a str or an os.PathLike"),
        (
            {"names": "model"},
            TypeError,
            'expected names to be a dict from names of this state to keys of the file, such as {"model"',
        ),
        ({"names": {"model": "model", 3: "x"}}, TypeError, "expected names to be a dict"),
        ({"names": {"model": 3.5}}, TypeError, "expected names['model'] to be a key of the file"),
        ({"names": {"modle": "net"}}, ValueError, "got modle: did you mean 'model'?"),
        ({"besides": 3}, TypeError, "expected besides to be a list of keys of the file"),
        ({"besides": [3]}, TypeError, "expected besides to be a list of keys of the file"),
        ({"strict": "no"}, TypeError, "expected strict to be True or False, got 'no'"),
    ],
)
def test_what_torch_has_saved(
    arguments: dict[str, Any],
    error: type[Exception],
    words: str,
    nonsense_on: tuple[int, ...],
    tmp_path: Path,
) -> None:
    path = tmp_path / "saved.pt"
    torch.save({"model": state().named["model"].state_dict(), "step": 3}, path)

    def call(t: Transport, is_nonsense: bool) -> Any:
        return state().load_torch(**({"path": path, "group": t} | (arguments if is_nonsense else {})))

    raised_everywhere(call, error, words, nonsense_on)


@who
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"on_nonfinite": "rasie"}, "got 'rasie': did you mean 'raise'?"),
        (
            {"on_nonfinite": ["raise"]},
            "expected on_nonfinite to be one of 'ignore', 'warn', 'raise', 'skip', 'zero'",
        ),
        ({"replica_check": True}, "expected replica_check to be None or an sl.ReplicaCheck; got True"),
        ({"buffers": "broadcst"}, "got 'broadcst': did you mean 'broadcast'?"),
        (
            {"strategy": "LocalSGD"},
            "expected strategy to be None or a strategy such as sl.LocalSGD(every=8); got 'LocalSGD'",
        ),
    ],
)
def test_a_wrapper(arguments: dict[str, Any], words: str, nonsense_on: tuple[int, ...]) -> None:
    def call(t: Transport, is_nonsense: bool) -> Any:
        given = arguments if is_nonsense else {}
        return sl.DistributedDataParallel(nn.Linear(2, 1), process_group=t, **given)

    error = ValueError if "did you mean" in words else TypeError
    raised_everywhere(call, error, words, nonsense_on)


def test_alone_a_wrapper_says_only_what_is_wrong() -> None:
    with pytest.raises(
        ValueError, match=r"^expected on_nonfinite to be one of .* got 'Skip': did you mean 'skip'\?$"
    ):
        sl.DistributedDataParallel(nn.Linear(2, 1), on_nonfinite="Skip")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="got 'repiar': did you mean 'repair'"):
        sl.ReplicaCheck(on_divergence="repiar")  # type: ignore[arg-type]


@who
@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"fn": "step"}, TypeError, "expected fn to be a function that computes a step, got 'step'"),
        ({"repeats": "2"}, TypeError, "expected repeats to be an integer of at least 2, got '2'"),
        ({"repeats": 2.5}, TypeError, "expected repeats to be an integer of at least 2, got 2.5"),
        ({"repeats": -1}, ValueError, "expected repeats to be an integer of at least 2, got -1"),
        ({"same_inputs": "yes"}, TypeError, "expected same_inputs to be True or False, got 'yes'"),
        ({"align_rng": None}, TypeError, "expected align_rng to be True or False, got None"),
        ({"module": nn.Linear}, TypeError, "a Module or a TrainState, got the class Linear"),
    ],
)
def test_what_is_compared(
    arguments: dict[str, Any], error: type[Exception], words: str, nonsense_on: tuple[int, ...]
) -> None:
    def call(t: Transport, is_nonsense: bool) -> Any:
        net = nn.Linear(2, 1)
        given: dict[str, Any] = {"fn": net, "module": net, "inputs": (torch.ones(1, 2),), "group": t}
        return sl.debug.compare_replicas(**(given | (arguments if is_nonsense else {})))

    raised_everywhere(call, error, words, nonsense_on)


@who
@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("net", "got a str: remove this value"),
        (nn.Linear, "got the class Linear: remove"),
        ([1], "got a int at [0]"),
    ],
)
def test_what_is_checked(target: Any, words: str, nonsense_on: tuple[int, ...]) -> None:
    def call(t: Transport, is_nonsense: bool) -> Any:
        return sl.check_replicas(target if is_nonsense else torch.ones(1), group=t)

    raised_everywhere(call, TypeError, words, nonsense_on)
