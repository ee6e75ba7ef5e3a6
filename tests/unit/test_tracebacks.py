"""Tracebacks as users read them: brief, and once for all ranks of a host."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import syncline as sl
from syncline.tracebacks import Described, describe, print_once, printing_hook


def caught(program: object) -> Described:
    try:
        program()  # type: ignore[operator]
    except Exception as error:
        return describe(error)
    raise AssertionError("no error")


def recurse(depth: int) -> None:
    if depth:
        return recurse_too(depth - 1)
    raise ValueError("deep")


def recurse_too(depth: int) -> None:
    recurse(depth)


def test_lines_of_torch_and_syncline_are_left_out() -> None:
    ddp = sl.DistributedDataParallel(torch.nn.Linear(2, 1))
    described = caught(lambda: ddp(torch.ones(3, 5)))
    assert "nn/modules/linear.py" not in described.brief
    assert "ddp/wrapper.py" not in described.brief
    assert "nn/modules/linear.py" in described.whole
    assert "ddp/wrapper.py" in described.whole
    assert described.brief.splitlines()[-1] == described.whole.splitlines()[-1]


def test_of_a_deep_stack_the_ends_are_shown() -> None:
    described = caught(lambda: recurse(20))
    assert len(described.brief.splitlines()) <= 12
    assert "more calls" in described.brief
    assert described.brief.endswith("ValueError: deep")


def test_a_long_text_of_syncline_keeps_its_first_lines_and_its_remedy() -> None:
    names = [f"layer{i}" for i in range(60)]

    def program() -> None:
        sl.UnreducedGradients({0: [names[0]]}, step=1, num_parameters=60, num_ranks=1)
        from syncline.words import refusal_of

        raise refusal_of("sl.mean", {rank: ("ValueError", f"bad {rank}", None) for rank in range(60)})

    assert "bad 59" in caught(program).brief  # a text that the program raises is not cut

    with pytest.raises(sl.ContractMismatch) as mismatch:
        from syncline.transport.agreement import agree
        from syncline.transport.threads import run_ranks

        run_ranks(2, lambda t: agree(t, "Net", [f"{name}  {t.rank}" for name in names]))
    described = describe(mismatch.value)
    assert "more lines" in described.brief
    assert len(described.brief.splitlines()) <= 13
    assert described.brief.splitlines()[-1] == described.whole.splitlines()[-1]
    assert len(str(mismatch.value).splitlines()) > 13


def printed(errors: list[BaseException], folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    for rank, error in enumerate(errors):
        print_once(describe(error), error_file=str(folder / str(rank) / "error.json"), is_whole=False)
    return capsys.readouterr().err


def test_errors_that_differ_in_numbers_are_printed_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    errors: list[BaseException] = [
        IndexError(f"index {rank} of <Net at {hex(99 * rank)}>") for rank in range(4)
    ]
    assert printed(errors, tmp_path, capsys) == "IndexError: index 0 of <Net at 0x0>\n"


def test_different_errors_are_all_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert printed([KeyError("a"), KeyError("b")], tmp_path, capsys) == "KeyError: 'a'\nKeyError: 'b'\n"


def test_what_follows_from_an_error_of_a_peer_is_not_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    follows = sl.PeerFailed("rank 0 failed: KeyError: 'a'")
    assert printed([KeyError("a"), follows, follows], tmp_path, capsys) == "KeyError: 'a'\n"


def test_the_error_of_a_peer_on_another_host_is_printed_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    follows = sl.PeerFailed("rank 4 failed: KeyError: 'a'")
    assert printed([follows, follows], tmp_path, capsys).count("KeyError") == 1


def test_of_errors_about_the_group_one_is_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    errors: list[BaseException] = [sl.PeerLost("rank 0: lost"), sl.CollectiveTimeout("rank 1: late")]
    assert printed(errors, tmp_path, capsys).count("\n") == 1


def test_a_hook_of_the_program_gets_the_exception(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[object] = []
    hook = printing_hook(lambda kind, error, tb: seen.append(error), error_file=None, is_whole=False)
    error = ValueError("x")
    hook(ValueError, error, None)
    assert seen == [error]
    assert capsys.readouterr().err == ""
    assert printing_hook(sys.__excepthook__, error_file=None, is_whole=False) is not sys.__excepthook__
