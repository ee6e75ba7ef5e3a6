"""`syncline bench` without its ranks: turns, tables, options. The programs of benchmarks/: goals, and a made-up MPI."""

from __future__ import annotations

import doctest
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from support.goldens import assert_golden
from syncline.tools.bench.results import can_plot, parse_size, plot, ratio, report
from syncline.tools.bench.timing import alternate, calls_for, timer
from syncline.tools.cli import bench, main
from syncline.transport import ThreadGroup, Transport, run_ranks

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import checkpoint
import collectives
import memory
import mpi
import rounds
import scale
import tables
from goals import Figure, from_json, goals_table, to_json

ALL_REDUCE = {"syncline": [2.0, 3.0, 4.0], "gloo": [20.0, 60.0, 40.0], "copy": [1.0, 1.5, 2.0]}
"""The times of three rounds of 1 KiB in us, and of 100 MiB in ms."""

STEPS = {
    "not synchronized": [0.010, 0.020, 0.010],
    "syncline": [0.011, 0.022, 0.011],
    "sharded": [0.009, 0.021, 0.008],
}

MACHINE = {"cpu": "CPU", "architecture": "x86_64", "num_cores": 2, "load": 0.1}
MACHINE |= {"torch": "2.13.0", "syncline": "0.1.0"}


def scaled(times: dict[str, list[float]], scale: float) -> dict[str, list[float]]:
    return {name: [scale * one for one in seconds] for name, seconds in times.items()}


def measured(*, num_ranks: int = 2, **changes: Any) -> dict[str, Any]:
    """What the ranks of `syncline bench` have measured: 1 KiB and 100 MiB in three rounds, and a step."""
    found = {"machine": MACHINE, "num_rounds": 3, "num_ranks": num_ranks, "transport": "shared memory"}
    found |= {"all_reduce_seconds": {"1K": scaled(ALL_REDUCE, 1e-6), "100M": scaled(ALL_REDUCE, 1e-3)}}
    return {**found, "step_seconds": {"5M": STEPS}, **changes}


def compared_with_mpi(*, num_ranks: int = 2) -> dict[str, Any]:
    """What the ranks of benchmarks/collectives.py have measured, with an MPI."""
    times = ALL_REDUCE | {"Open MPI 5": [1.0, 2.0, 3.0]}
    rows = [
        {"payload_bytes": size_bytes, "seconds": scaled(times, scale)}
        for size_bytes, scale in ((1024, 1e-6), (100 << 20, 1e-3))
    ]
    found = {"machine": MACHINE, "num_ranks": num_ranks, "transport": "gloo", "all_reduce": rows}
    return {**found, "mpis": ["Open MPI 5"], "notes": ["MPICH: a reason"]}


# ---------------------------------------------------------------------- turns


def test_each_competitor_has_its_turn_in_each_round_and_the_first_two_do_not_count() -> None:
    turns: list[tuple[str, int]] = []

    def competitor(name: str) -> Callable[[int], float]:
        def seconds_for(num_calls: int) -> float:
            turns.append((name, num_calls))
            return 6.0

        return seconds_for

    both = {name: competitor(name) for name in "ab"}
    alone = ThreadGroup(1).transport(0)
    seconds = alternate(both, num_rounds=8, num_calls={"a": 2, "b": 3}, transport=alone)
    assert seconds == {"a": [3.0] * 8, "b": [2.0] * 8}
    rounds = [turns[i : i + 2] for i in range(0, len(turns), 2)]
    assert len(rounds) == 10
    assert {tuple(one) for one in rounds} == {(("a", 2), ("b", 3)), (("b", 3), ("a", 2))}


def test_a_round_takes_what_its_slowest_rank_takes() -> None:
    def measure(transport: Transport) -> dict[str, list[float]]:
        rounds = iter([9.0, 9.0, 1.0 + transport.rank, 4.0 - transport.rank])
        return alternate({"a": lambda _: next(rounds)}, num_rounds=2, num_calls={"a": 1}, transport=transport)

    assert run_ranks(2, measure) == [{"a": [2.0, 4.0]}] * 2


def test_slow_calls_are_made_once_and_fast_ones_not_without_limit() -> None:
    alone = ThreadGroup(1).transport(0)
    speeds = {"slow": 5.0, "right": 0.1, "fast": 1e-9}
    timers = {name: (lambda calls, one=one: calls * one) for name, one in speeds.items()}
    found = calls_for(timers, seconds=1.0, most=100, transport=alone)
    assert found == {"slow": 1, "right": 10, "fast": 100}
    calls: list[int] = []
    assert timer(lambda: calls.append(1), alone)(5) > 0
    assert len(calls) == 5


def test_an_engine_that_reduces_wrong_is_found() -> None:
    tensor = torch.ones(4)
    mean = {"mean": (lambda: tensor.fill_(1.5), tensor)}
    assert list(collectives.checked(mean, rank=0, size=2)) == ["mean"]
    assert tensor.tolist() == [0.0] * 4
    with pytest.raises(RuntimeError, match=r"mean: expected 2 from all_reduce, got \[1.5"):
        collectives.checked(mean, rank=0, size=3)


# ---------------------------------------------------------------------- figures and tables


def test_the_report_shows_the_machine_each_table_and_what_disturbs() -> None:
    assert ratio([1.0, 20.0, 3.0], [1.0, 10.0, 1.0])[0] == 2.0  # of the two times of a round
    assert_golden("bench", report(measured()))
    text = report(measured(num_ranks=4, machine={**MACHINE, "load": 1.5}, step_seconds={}))
    for words in ("more ranks than cores: 4 ranks share 2", "not idle"):
        assert words in text
    assert "parameters" not in text


def test_a_size_is_read_as_it_is_written() -> None:
    for size_bytes in (4, 1024, 1536, 25 << 20, 3 << 30):
        assert parse_size(tables.size_text(size_bytes)) == size_bytes
    for text in ("", "K", "1Q", "-4", "3", "0", "1.3K"):
        with pytest.raises(ValueError, match="expected a"):
            pytest.fail(f"{text!r} is {parse_size(text)}")


@pytest.mark.skipif(not can_plot(), reason="matplotlib is not installed")
def test_a_picture_is_drawn(tmp_path: Path) -> None:
    plot(measured(), tmp_path / "figure.svg")
    assert "5M parameters" in (tmp_path / "figure.svg").read_text()


# ---------------------------------------------------------------------- options


def test_a_mistake_is_one_line_before_anything_starts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    excluded = "exclude each other"
    for arguments, words in (
        ("-n 1", "argument -n: expected a number of ranks from 2 to 1,024, got '1'"),
        ("-n two", "expected a number of ranks from 2 to 1,024, got 'two'"),
        ("--sizes 1K,big", "--sizes: expected sizes such as"),
        ("--sizes 6", "multiple of 4 bytes"),
        ("--sizes 900000G", "would need about"),
        ("--rounds 1", "argument --rounds: expected a number of rounds from 2 to 100,000"),
        ("--jsn file", "did you mean --json?"),
        ("extra", "unknown argument extra"),
        ("--json no/such/folder/file.json", "expected the path of a file in a folder that exists"),
        ("--plot figure.pdf", "ends in .png or .svg"),
        ("--plot figure.svg --json figure.svg", "expected a file of its own"),
        ("--calibrate -n 2 --no-steps", f"--calibrate and -n, --no-steps {excluded}"),
        ("--calibrate --steps --sizes 1K", f"--calibrate and --steps, --sizes {excluded}"),
        ("--calibrate --quick --rounds 3", f"--calibrate and --quick, --rounds {excluded}"),
        ("--calibrate --plot figure.svg", f"--calibrate and --plot {excluded}"),
    ):
        assert main(["bench", *arguments.split()]) == 2, arguments
        (line,) = capsys.readouterr().err.splitlines()
        assert words in line, arguments
    monkeypatch.setattr(bench, "can_plot", lambda: False)
    assert main(["bench", "--plot", "figure.png"]) == 2
    assert "pip install 'syncline[bench]'" in capsys.readouterr().err


# ---------------------------------------------------------------------- MPI

_FAKE_MPI = """
IN_PLACE, SUM = object(), object()
class Ranks:
    rank, size = 0, 1
    def Allreduce(self, place, buffer, op): assert place is IN_PLACE and op is SUM
    def Barrier(self): pass
COMM_WORLD = Ranks()
def Get_library_version(): return "MPICH Version:      9.9"
"""


@pytest.fixture
def fake_mpi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The mpiexec of an MPI of one rank, which is called with -n 1 PROGRAM. Its mpi4py is in the same folder."""
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").touch()
    (tmp_path / "mpi4py" / "MPI.py").write_text(_FAKE_MPI)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    mpiexec = tmp_path / "mpiexec"
    mpiexec.write_text('#!/bin/sh\nshift 2\nexec "$@"\n')
    mpiexec.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return mpiexec


def test_an_mpi_is_found_by_its_mpi4py_and_has_its_turn_when_told(fake_mpi: Path) -> None:
    found = mpi.find_mpi(sys.executable)
    assert (found.name, found.mpiexec) == ("MPICH 9.9", str(fake_mpi))
    with mpi.MPIPeer(found, num_ranks=1) as peer:
        peer.prepare(100)
        assert 0 < peer.seconds_for(10, "mean") < 10
        assert 0 < peer.timer("sum", ThreadGroup(1).transport(0))(3) < 10
        process = peer._process
    assert process.returncode == 0


def test_an_mpi_that_does_not_work_is_named_with_its_last_words(fake_mpi: Path) -> None:
    broken = mpi.MPI(name="MPICH 9.9", python=sys.executable, mpiexec=str(fake_mpi))
    (fake_mpi.parent / "mpi4py" / "MPI.py").write_text("raise SystemExit('no fabric found')")
    with pytest.raises(RuntimeError, match=r"MPICH 9.9: its ranks did not start.*: no fabric found"):
        mpi.MPIPeer(broken, num_ranks=1)
    (fake_mpi.parent / "mpi4py" / "MPI.py").write_text("raise ImportError('no MPI here')")
    with pytest.raises(ValueError, match=r"does not work with .*: ImportError: no MPI here"):
        mpi.find_mpi(sys.executable)


def test_open_mpi_is_not_bound_to_cores() -> None:
    command = mpi.MPI(name="Open MPI 5", python="python", mpiexec="mpiexec").command(4, "socket")
    assert command[:3] == ["mpiexec", "--bind-to", "none"]
    assert command[-4::3] == ["python", "socket"]


# ---------------------------------------------------------------------- the programs in benchmarks/


def test_what_a_program_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = rounds.RoundsParser("What it costs.\n\n    more of it", rounds=40, quick=3)
    parser.add_argument("--every", type=int, default=100)
    told = parser.parse_figures(["--rounds", "7", "--every", "5", "--json", str(tmp_path)])
    assert (told.rounds, told.every, told.quick, told.json) == (7, 5, False, tmp_path)
    told = parser.parse_figures(["--quick"])
    assert (told.rounds, told.every, told.quick, told.json) == (3, 100, True, None)
    assert parser.parse_figures(["--quick", "--rounds", "7"]).rounds == 7
    with pytest.raises(SystemExit):
        parser.parse_figures(["--help"])
    shown = capsys.readouterr().out
    assert "What it costs." in shown
    assert "more of it" not in shown
    assert "3 short rounds: figures without meaning" in shown


def test_the_examples_of_the_programs() -> None:
    for name, num_examples in (
        ("goals", 5),
        ("baseline", 1),
        ("mpi", 3),
        ("rounds", 3),
        ("tables", 3),
        ("tensors", 1),
    ):
        assert doctest.testmod(importlib.import_module(name)) == (0, num_examples), name


# ---------------------------------------------------------------------- goals


def cells(text: str) -> list[str]:
    """The rows of a table without its heading, each with one space between words."""
    return [" ".join(row.split()) for row in text.splitlines()[1:]]


def test_figures_survive_a_file() -> None:
    figures = collectives.figures_of(compared_with_mpi())
    assert figures[0].name == "all_reduce of 1 KiB: syncline / Gloo"
    assert from_json(json.loads(json.dumps({"figures": to_json(figures)}))) == figures


def test_goals_are_judged_with_their_figures_and_are_those_of_two_ranks() -> None:
    found = compared_with_mpi()
    text = collectives.report(found)
    assert "1 KiB syncline 3.00 us 0.34 10.00 [10.00, 20.00] 50%" in " ".join(text.split())
    assert "MPICH: a reason" in text
    rows = {row[0]: row[1:] for row in collectives.goals(found)}
    assert rows["1 KiB: at least 100x Gloo"] == ["10.0x [10.0x, 20.0x] not met", "-", "-"]
    assert rows["1 KiB: within 2 us of Open MPI 5"][0] == "-1.0 us [-1.0 us, -1.0 us] met"
    assert rows["100 MiB: at least 12x Gloo"][0] == "10.0x [10.0x, 20.0x] not met, within noise"
    assert rows["100 MiB: at least 2x Open MPI 5"][0] == "0.67x [0.50x, 0.75x] not met"
    assert rows["100 MiB: at least 80% of a copy's speed"][0] == "50% [50%, 50%] not met"
    crowded = compared_with_mpi(num_ranks=4)
    assert goals_table(collectives.figures_of(crowded)) == ""
    of_crowd = collectives.goals(crowded)
    assert [row[0] for row in of_crowd] == ["1 KiB: at least 5x Gloo", "100 MiB: at least 5x Gloo"]
    assert all(row[1].endswith(" met") and "not" not in row[1] for row in of_crowd)


def test_goals_of_saving_say_what_is_within_noise() -> None:
    seconds = {name: [1.0] * 5 for name in (checkpoint.SAVE, checkpoint.DCP_STALL, checkpoint.TORCH_LOAD)}
    seconds |= {checkpoint.STALL: [0.2] * 5, checkpoint.LOAD: [1.0, 1.1, 1.2, 2.0, 2.1]}
    assert checkpoint.goals(seconds) == [
        ["goal", "ratio"],
        ["a stall: at most 0.25 of torch.save", "0.20 [0.20, 0.20] met"],
        ["a stall: no longer than that of async_save", "0.20 [0.20, 0.20] met"],
        ["a verified load: at most 1.3 of torch.load", "1.20 [1.00, 2.10] met, within noise"],
    ]


def test_goals_of_many_ranks() -> None:
    names = (scale.FILES, scale.OTHERS_FILES, scale.CPU_OF_INIT, scale.REQUESTS)
    rounds = {
        size: [dict(zip(names, (size + 3.0, 24.0, cpu, 26.0 * size), strict=True)) for cpu in (1.9, 2.1, 2.3)]
        for size in (2, 32)
    }
    figures: list[Figure] = scale.figures_of_ranks(rounds)
    figures += scale.figures_of_simulation({10: {"ms": 1.0, "none": 0.0}, 100: {"ms": 20.0, "none": 0.0}})
    rows = [row.split("  ") for row in goals_table(figures).splitlines()[1:]]
    assert {row[0]: "not met" not in row[-1] for row in rows} == {
        "2 ranks: init: CPU / Gloo's": False,
        "32 ranks: files, rank 0": True,
        "32 ranks: files, most of others": True,
        "32 ranks: init: CPU / Gloo's": False,
        "store requests of all ranks: exponent": True,
        "control plane: ms: exponent": False,
    }


def test_memory_reads_the_kernels_figure_and_counts_like_people() -> None:
    assert memory.pss_bytes("Rss: 9 kB\nPss:     12 kB\nPss_Anon: 3 kB\n") == 12 * 1024
    assert memory.pss_of("0") == 0, "a process that has ended"
    assert memory.parse_count("1.5M") == 1_500_000
    count, before = 100 << 20, 1 << 30

    def figures(peak: float) -> list[dict[str, int]]:
        """Of three rounds, in which the peak of two ranks is 1 byte a parameter less, as given, and 3 more."""
        usual = {"num_parameters": count, "before_bytes": before, "held_bytes": before + 2 * count * 10}
        return [{**usual, "peak_bytes": before + round(2 * count * (peak + more))} for more in (-1, 0, 3)]

    peaks = dict.fromkeys(memory.WAYS, 20.5)
    peaks |= {"syncline, Gloo": 20.7, "syncline, sharded": 9.2, "syncline, DiLoCo": 26.0}
    rounds = {name: figures(peak) for name, peak in peaks.items()}
    assert cells(memory.report(rounds, 2)) == [
        "torch's class, Gloo 2.002 GiB 20.50 20.00 10.00 1.000 1.00",
        "syncline, Gloo 2.021 GiB 20.70 20.00 10.00 1.010 1.01",
        "syncline, shared memory 2.002 GiB 20.50 20.00 10.00 1.000 1.00",
        "syncline, sharded 920 MiB 9.20 8.96 10.00 0.449 0.56",
        "syncline, DiLoCo 2.539 GiB 26.00 24.00 10.00 1.268 1.21",
    ]
    goals = cells(goals_table(memory.figures_of(rounds, 2)))
    assert [(row.partition(" at most")[0], " not met" not in row and " met" in row) for row in goals] == [
        ("memory at the peak: syncline, Gloo / torch's class", False),
        ("memory at the peak: syncline, shared memory / torch's class", True),
        ("memory at the peak: syncline, sharded / computed", True),
        ("memory at the peak: syncline, DiLoCo / computed", False),
    ]
