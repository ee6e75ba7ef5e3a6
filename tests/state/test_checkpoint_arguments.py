"""Arguments that make no sense: one clear error, the same on every rank, whoever gave them. Ranks are threads.

tests/unit/test_nonsense_arguments.py gives each parameter many such values; here are the words that help.
"""

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

Call = Callable[[Transport, dict[str, Any]], Any]
Case = tuple[dict[str, Any], type[Exception], str]
NO_STATE = "expected state to be a TrainState, got"


def state() -> TrainState:
    return TrainState(model=nn.Linear(2, 1))


def assert_raised_everywhere(call: Call, cases: list[Case]) -> None:
    """Whether one rank or each gives nonsense, every rank has the same error, which says who gave it."""

    def error_of(t: Transport, given: dict[str, Any]) -> tuple[type[BaseException], str]:
        with pytest.raises((TypeError, ValueError)) as caught:
            call(t, given)
        return caught.type, str(caught.value)

    for given, error, words in cases:
        for ranks, who in (((1,), "rank 1: "), ((0, 1), " (all ranks)")):
            with case(given, ranks):
                told = run_ranks(
                    2,
                    lambda t, given=given, ranks=ranks: error_of(t, given if t.rank in ranks else {}),  # type: ignore[misc]
                    timeout_seconds=20,
                )
                assert told[0] == told[1]
                assert told[0][0] is error
                assert words in told[0][1]
                assert who in told[0][1]
                assert len(ranks) == 1 or told[0][1].endswith(who)


def test_a_checkpointer(tmp_path: Path) -> None:
    path, count = "expected directory to be a path", "to be an integer of at least 1, got"
    cases: list[Case] = [
        ({"directory": 3}, TypeError, f"{path}, a str or an os.PathLike of a str, got 3"),
        ({"directory": b"x"}, TypeError, path),
        ({"directory": ""}, ValueError, f"{path}, got ''"),
        ({"keep": True}, TypeError, f"expected keep {count} True"),
        ({"keep": 0}, ValueError, f"expected keep {count} 0"),
        ({"files": "x"}, TypeError, "expected files to be a file system with the methods names, make_dir"),
        ({"stop_signals": ("sigtem",)}, ValueError, "got 'sigtem': did you mean 'SIGTERM'?"),
        ({"stop_every": 0}, ValueError, f"expected stop_every {count} 0"),
    ]
    right = {"directory": tmp_path}
    assert_raised_everywhere(lambda t, given: sl.Checkpointer(**right | given, group=t), cases)


def test_what_is_saved_or_loaded(tmp_path: Path) -> None:
    def save(t: Transport, given: dict[str, Any]) -> None:
        with sl.Checkpointer(tmp_path, group=t) as checkpointer:
            checkpointer.save(**{"state": state(), "step": 1} | given)

    def load(t: Transport, given: dict[str, Any]) -> None:
        with sl.Checkpointer(tmp_path, group=t) as checkpointer:
            checkpointer.load(**{"state": state()} | given)

    no_step = "expected step to be an integer of at least 0, got"
    cases: list[Case] = [
        ({"state": "text"}, TypeError, f"{NO_STATE} a str: put the objects of the run into a TrainState"),
        ({"state": TrainState}, TypeError, f"{NO_STATE} the class TrainState"),
        ({"step": "3"}, TypeError, f"{no_step} '3'"),
        ({"step": -1}, ValueError, f"{no_step} -1"),
        ({"step": True}, TypeError, f"{no_step} True"),
        ({"blocking": "no"}, TypeError, "expected blocking to be True or False, got 'no'"),
    ]
    assert_raised_everywhere(save, cases)
    assert_raised_everywhere(load, [({"state": "text"}, TypeError, f"{NO_STATE} a str")])
    assert list(tmp_path.iterdir()) == []


def test_a_step_that_is_refused_is_not_taken_over(tmp_path: Path) -> None:
    mine = state()
    with sl.Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(ValueError, match="got -1"):
            checkpointer.save(mine, -1)
        assert mine.step == 0
        mine.step = 2.5  # type: ignore[assignment]
        with pytest.raises(TypeError, match=r"state\.step .* got 2\.5"):
            checkpointer.save(mine)


def test_ranks_of_which_one_waits_for_its_save_and_one_does_not(tmp_path: Path) -> None:
    def program(t: Transport) -> None:
        with (
            sl.Checkpointer(tmp_path, group=t) as checkpointer,
            pytest.raises(sl.ContractMismatch, match=r"blocking\n    expected True \(rank 0\)"),
        ):
            checkpointer.save(state(), 1, blocking=t.rank == 0)

    run_ranks(2, program)


def test_what_is_told_on_one_rank_alone(tmp_path: Path) -> None:
    with sl.Checkpointer(tmp_path, stop_signals=()) as checkpointer:
        with pytest.raises(TypeError, match=f"{NO_STATE} a Linear"):
            checkpointer.stop_if_asked(nn.Linear(1, 1))  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="expected why to be a str with the reason in words, got a int"):
            checkpointer.ask_to_stop(3)  # type: ignore[arg-type]
        checkpointer.stop_if_asked(state())  # nobody has asked
    with pytest.raises(ValueError, match="expected num_samples to be an integer of at least 0, got -1"):
        state().commit(-1)
    with pytest.raises(TypeError, match=r"state to be a dict, as returned by state_dict\(\), got a list"):
        state().load_state_dict(["step"])  # type: ignore[arg-type]
    said = r"^expected on_nonfinite to be one of .* got 'Skip': did you mean 'skip'\?$"
    with pytest.raises(ValueError, match=said):
        sl.DistributedDataParallel(nn.Linear(2, 1), on_nonfinite="Skip")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="got 'repiar': did you mean 'repair'"):
        sl.ReplicaCheck(on_divergence="repiar")  # type: ignore[arg-type]


def test_what_torch_has_saved(tmp_path: Path) -> None:
    path = tmp_path / "saved.pt"
    torch.save({"model": state().named["model"].state_dict(), "step": 3}, path)
    like = 'expected names to map names of this state to keys of the file, such as {"model"'
    cases: list[Case] = [
        ({"names": "model"}, TypeError, like),
        ({"names": {"model": 3.5}}, TypeError, "expected names['model'] to be a key of the file"),
        ({"names": {"modle": "net"}}, ValueError, "got modle: did you mean 'model'?"),
        ({"besides": [3]}, TypeError, "expected besides to be a list of keys of the file"),
    ]
    assert_raised_everywhere(lambda t, given: state().load_torch(**{"path": path} | given, group=t), cases)


def test_a_wrapper() -> None:
    def wrap(t: Transport, given: dict[str, Any]) -> Any:
        return sl.DistributedDataParallel(nn.Linear(2, 1), process_group=t, **given)

    one_of = "expected on_nonfinite to be one of 'ignore', 'warn', 'raise', 'skip', 'zero'"
    such_as = "expected strategy to be None or a strategy such as sl.LocalSGD(every=8); got 'LocalSGD'"
    cases: list[Case] = [
        ({"on_nonfinite": "rasie"}, ValueError, "got 'rasie': did you mean 'raise'?"),
        ({"on_nonfinite": ["raise"]}, TypeError, one_of),
        (
            {"replica_check": True},
            TypeError,
            "expected replica_check to be None or an sl.ReplicaCheck; got True",
        ),
        ({"buffers": "broadcst"}, ValueError, "got 'broadcst': did you mean 'broadcast'?"),
        ({"strategy": "LocalSGD"}, TypeError, such_as),
    ]
    assert_raised_everywhere(wrap, cases)


def test_what_is_compared() -> None:
    def compare(t: Transport, given: dict[str, Any]) -> Any:
        net = nn.Linear(2, 1)
        right = {"fn": net, "module": net, "inputs": (torch.ones(1, 2),)}
        return sl.debug.compare_replicas(**right | given, group=t)

    cases: list[Case] = [
        ({"fn": "step"}, TypeError, "expected fn to be a function that computes a step, got 'step'"),
        ({"inputs": [1]}, TypeError, "expected inputs to be a tuple of the arguments of fn, got a list"),
        ({"module": nn.Linear}, TypeError, "a Module or a TrainState, got the class Linear"),
    ]
    assert_raised_everywhere(compare, cases)
    targets: list[Case] = [
        ({"target": "net"}, TypeError, "got a str: remove this value"),
        ({"target": nn.Linear}, TypeError, "got the class Linear: remove"),
        ({"target": [1]}, TypeError, "got a int at [0]"),
    ]
    right = {"target": torch.ones(1)}
    assert_raised_everywhere(lambda t, given: sl.check_replicas(**right | given, group=t), targets)
