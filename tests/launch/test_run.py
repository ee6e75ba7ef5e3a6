"""`syncline run` with real processes. The programs import no torch unless they need it, to stay fast."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

import hangs
from forks import Forks
from syncline.tools.cli import main
from syncline.tools.cli.options import parse_run

Run = Callable[..., subprocess.CompletedProcess[str]]
COMMAND = [sys.executable, "-m", "syncline", "run"]


@pytest.fixture
def run(tmp_path: Path, forks: Forks) -> Run:
    """Writes a program and runs it on two processes; returns what came out."""

    def run_program(
        code: str, *arguments: str, options: tuple[str, ...] = ("-n", "2")
    ) -> subprocess.CompletedProcess[str]:
        (tmp_path / "program.py").write_text(code)
        # Programs that do not use torch are as fast in interpreters of their own.
        warm_ranks = "import syncline" in code
        return forks.launch(tmp_path, *options, "program.py", *arguments, warm_ranks=warm_ranks).wait()

    return run_program


RANK_1_ENDS_LAST = """
import atexit, os, time
def wait_for_rank_0():
    while os.environ["RANK"] == "1" and not os.path.exists("said"):
        time.sleep(0.01)
    open("said", "w").close()
atexit.register(wait_for_rank_0)  # before Syncline's function, which therefore runs first
"""
"""The launcher ends rank 0 soon after rank 1. In a program that begins with this, rank 0 has said all by then."""

RANK_1_FAILS_FIRST = """
import atexit, os, time
def wait_for_error_of(rank):
    path = os.path.join(os.path.dirname(os.path.dirname(os.environ["TORCHELASTIC_ERROR_FILE"])), rank, "error.json")
    while not os.path.exists(path) or "time_ns" not in open(path).read():
        time.sleep(0.001)
if os.environ["RANK"] == "1":
    atexit.register(wait_for_error_of, "0")
"""
"""In a program that begins with this, rank 0 can wait for the recorded error of rank 1, whose process does not end
before rank 0 has recorded its own error. So both are known, whichever process ends first."""


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}


# ---------------------------------------------------------------------- refused before anything starts


@pytest.mark.parametrize(
    "option", ["--nproc", "--nproc-per", "--nproc_per", "--nproc-per-node", "--nproc_per_node"]
)
def test_an_option_may_be_abbreviated(option: str) -> None:
    for words in ([option, "3"], [f"{option}=3"]):
        assert parse_run([*words, "train.py"]).nproc_per_node == "3"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-n", "2", "missing.py"], "there is no script missing.py"),
        (["-n", "2", "progam.py"], "did you mean program.py"),
        (["-n", "2", "."], "is a directory"),
        (["-n", "0", "program.py"], "-n 0: expected at least 1 process"),
        (["-n", "-3", "program.py"], "-n -3: expected at least 1 process"),
        (["-n", "many", "program.py"], "-n many: expected a number of processes of at least 1"),
        (["-n", "2"], "expected a script: syncline run"),
        (["--nod-rank", "1", "program.py"], "did you mean --node-rank"),
        (
            ["--log", "x", "program.py"],
            "ambiguous option: --log could match --log-dir, --log-line-prefix-template, --logs-specs;",
        ),
        (["--nnodes", "0", "program.py"], "--nnodes 0"),
        (["--host", "192.0.2.1", "program.py"], "--host 192.0.2.1: expected an address of this host"),
        (
            [
                *("--nnodes", "2", "--host", "127.0.0.1"),
                *("--rdzv-backend", "c10d", "--rdzv-endpoint", "h:29400", "program.py"),
            ],
            "--host 127.0.0.1: --rdzv-backend c10d cannot use --host",
        ),
        (["--live", "--no-python", "sh"], "--live needs a program in Python"),
        (["--live", "--tee", "3", "program.py"], "--live cannot be combined with --tee"),
        (
            ["--log-line-prefix-template", "", "--tee", "3", "program.py"],
            "--log-line-prefix-template '': with --tee, torch prints the lines",
        ),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "program.py").write_text("")
    monkeypatch.chdir(tmp_path)
    assert main(["run", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert len(error.splitlines()) == 1


def test_a_port_in_use_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "program.py").write_text("")
    monkeypatch.chdir(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["run", "-n", "2", "--master-port", str(port), "program.py"]) == 2
    assert f"port {port} (--master-port) is in use" in capsys.readouterr().err


def test_help_and_unknown_commands(capsys: pytest.CaptureFixture[str]) -> None:
    for unknown in (["rum"], ["help", "rum"]):
        assert main(unknown) == 2
        assert "did you mean run?" in capsys.readouterr().err
    for asked in (["--help"], ["help"]):
        assert main(asked) == 0
        assert "syncline COMMAND" in capsys.readouterr().out


@pytest.mark.parametrize(
    "command", ["run", "explain", "report", "compare", "watch", "plan", "plan --tune", "bench", "doctor"]
)
def test_help_of_a_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command.split(), "--help"]) == 0
    text = capsys.readouterr().out
    assert f"usage: syncline {command.split()[0]}" in text
    assert main(["help", *command.split()]) == 0
    assert capsys.readouterr().out == text
    assert "docs/" not in text, "an installed user does not have the files of the repository"


@pytest.fixture(scope="module")
def without_torch(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which torch cannot be imported."""
    folder = tmp_path_factory.mktemp("without_torch")
    (folder / "torch.py").write_text("raise RuntimeError('torch was imported')")
    return {**clean_environment(), "PYTHONPATH": str(folder)}


@pytest.mark.parametrize(
    ("line", "exit_code", "words"),
    [
        ("--help", 0, "syncline COMMAND"),
        ("--version", 0, "syncline 0.2.0 (torch 2."),
        ("", 2, "syncline COMMAND"),
        ("rum", 2, "did you mean run?"),
        ("run --help", 0, "--monitor-interval, --start-method, --event-log-handler"),
        ("run --nod-rank 1 program.py", 2, "did you mean --node-rank?"),
        ("run -n 2 progam.py", 2, "did you mean program.py?"),
        ("run -n 0 program.py", 2, "-n 0: expected at least 1 process"),
        ("run --max-restarts two program.py", 2, "invalid int value: 'two'"),
        ("bench --help", 0, "usage: syncline bench"),
        ("bench --jsn file", 2, "did you mean --json?"),
        ("bench --sizes big", 2, "--sizes: expected a size such as"),
        ("doctor --help", 0, "usage: syncline doctor"),
        ("doctor --stop 3 program.py", 2, "did you mean --step?"),
        ("doctor progam.py", 2, "did you mean program.py?"),
    ],
)
def test_help_and_mistakes_do_not_wait_for_torch(
    line: str, exit_code: int, words: str, tmp_path: Path, without_torch: dict[str, str]
) -> None:
    (tmp_path / "program.py").touch()
    command = [sys.executable, "-m", "syncline", *line.split()]
    done = hangs.run(command, cwd=tmp_path, env=without_torch)
    assert done.returncode == exit_code, done.stderr
    assert words in (done.stderr if exit_code else done.stdout)
    assert "Traceback" not in done.stderr


def test_the_console_script_needs_no_torch_to_answer(without_torch: dict[str, str]) -> None:
    (script,) = metadata.entry_points(group="console_scripts", name="syncline")
    code = (
        f"import sys; from {script.module} import {script.attr}; sys.exit({script.attr}(['run', '--help']))"
    )
    done = hangs.run([sys.executable, "-c", code], env=without_torch)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_help_names_each_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--help"]) == 0
    shown = set(re.split(r"[\s,]+", capsys.readouterr().out))
    for action in get_args_parser()._actions:
        if action.option_strings and action.dest not in ("help", "print_completion"):
            assert shown & set(action.option_strings), action.option_strings


def test_the_options_are_torchruns() -> None:
    theirs = vars(get_args_parser().parse_args(["program.py", "--epochs", "2"]))
    ours = vars(parse_run(["program.py", "--epochs", "2"]))
    theirs.pop("print_completion", None)  # torch 2.15: it completes the command `torchrun`
    # torch 2.11 has another default of the port, and no --shutdown-timeout; torch 2.15 has prefixes of lines.
    later = {"master_port": None, "shutdown_timeout": None, "log_line_prefix_template": None}
    assert ours == {
        **theirs,
        **later,
        "host": None,
        "verbose": False,
        "resilient": False,
        "trace": None,
        "live": False,
    }
    for action in get_args_parser()._actions:
        value = {float: "0.5", int: "7"}.get(action.type, "spawn")
        for name in action.option_strings:
            if name in ("-h", "--help") or (action.dest in ("numa_binding", "print_completion")):
                continue
            arguments = [name, *([value] if action.nargs is None else []), "program.py"]
            found, expected = parse_run(arguments), get_args_parser().parse_args(arguments)
            assert getattr(found, action.dest) == getattr(expected, action.dest), name


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("PET_NPROC_PER_NODE", "3", "3"),
        ("PET_MAX_RESTARTS", "2", 2),
        ("PET_DUPLICATE_STDOUT_FILTERS", "a,b,,c", ["a", "b,c"]),
        ("PET_STANDALONE", "1", True),
        ("PET_STANDALONE", "0", False),
    ],
)
def test_the_environment_has_defaults_of_torchruns_options(
    name: str, value: str, expected: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    dest = name.removeprefix("PET_").lower()
    assert getattr(parse_run(["program.py"]), dest) == expected
    assert getattr(get_args_parser().parse_args(["program.py"]), dest) == expected


def test_a_default_that_is_neither_yes_nor_no_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PET_STANDALONE", "yes")
    assert main(["run", __file__]) == 2
    assert "PET_STANDALONE='yes': expected 0 or 1" in capsys.readouterr().err


# ---------------------------------------------------------------------- what the program sees


def test_arguments_variables_and_prefixes(run: Run) -> None:
    done = run(
        "import os, sys\n"
        "print(os.environ['RANK'], os.environ['WORLD_SIZE'], sys.argv[1:], __name__, sys.path[0])\n",
        "--",
        "--epochs",
        "2",
    )
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    assert [line.split("] ")[0] for line in lines] == ["[rank 0", "[rank 1"]
    for rank, line in enumerate(lines):
        assert line.startswith(f"[rank {rank}] {rank} 2 ['--epochs', '2'] __main__ /")
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("template", "prefix"), [("${hostname}:${rank}: ", f"{socket.gethostname()}:RANK: "), ("", "")]
)
def test_the_prefix_of_lines_is_chosen(run: Run, template: str, prefix: str) -> None:
    done = run("print('line')", options=("-n", "2", "--log-line-prefix-template", template))
    assert sorted(done.stdout.splitlines()) == [
        f"{prefix.replace('RANK', str(rank))}line" for rank in range(2)
    ]


@pytest.mark.parametrize("late", [("-n", "2"), ("-n2",), ("--nproc-per-node=2",), ("--name", "2")])
def test_a_number_of_processes_after_the_script_is_said_to_be_the_scripts(
    run: Run, late: tuple[str, ...]
) -> None:
    done = run("import sys; print(sys.argv[1:])", *late, options=())
    assert done.stdout == f"[rank 0] {list(late)}\n"
    assert (f"1 process, because {late[0]} stands after program.py" in done.stderr) == (late[0] != "--name")


def test_two_jobs_at_once_do_not_collide(forks: Forks, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import os, time\n"
        "print(os.environ['MASTER_PORT'], os.environ['TORCHELASTIC_RUN_ID'], flush=True)\n"
        "while not os.path.exists('end'):\n"
        "    time.sleep(0.01)\n"
    )
    jobs = [forks.launch(tmp_path, "-n", "2", "program.py") for _ in range(2)]
    places = [{line.split("] ")[1] for line in job.wait_for_lines(2)} for job in jobs]
    assert len(places[0]) == len(places[1]) == 1
    assert places[0] != places[1]
    (tmp_path / "end").touch()
    assert [job.wait().returncode for job in jobs] == [0, 0]


JOINED = (
    "import sys\n"
    "import syncline as sl\n"
    "world = sl.init(timeout=60)\n"
    # One write a line: without a launcher that puts them apart, two ranks share one pipe.
    "sys.stdout.write(f'mean {sl.mean(float(world.rank))} of {world.size}\\n')\n"
)


@pytest.mark.real
def test_one_program_starts_three_ways(forks: Forks, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(JOINED)
    launcher = forks.launch(tmp_path, "-n", "2", "program.py")
    torchrun = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(program)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environment(),
    )
    output, error = hangs.communicate(torchrun)
    done = launcher.wait()
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == ["[rank 0] mean 0.5 of 2", "[rank 1] mean 0.5 of 2"]
    assert torchrun.returncode == 0, error
    assert output.count("mean 0.5 of 2") == 2
    alone = hangs.run(
        [sys.executable, str(program)],
        env=clean_environment(),
    )
    assert (alone.returncode, alone.stdout, alone.stderr) == (0, "mean 0.0 of 1\n", "")


# ---------------------------------------------------------------------- failures


def test_the_last_thing_shown_is_the_rank_that_failed_first_whose_traceback_is_shown_once(run: Run) -> None:
    """Rank 0 fails because rank 1 did; it is rank 1's error that helps."""
    done = run(
        f"{RANK_1_FAILS_FIRST}"
        "if os.environ['RANK'] == '1':\n"
        "    raise ValueError('the cause')\n"
        "wait_for_error_of('1')\n"
        "raise ConnectionError('the consequence')\n"
    )
    assert done.returncode == 1
    last = done.stderr[done.stderr.rindex("syncline run:") :]
    assert re.fullmatch(
        r"syncline run: rank 1 \(.*\) failed with exit code 1; failed later: rank 0 .*\n", last
    )
    assert done.stderr.count("ValueError: the cause\n") == 1
    assert "[rank 1] ValueError: the cause\n" in done.stderr
    assert "ChildFailedError" not in done.stderr


@pytest.mark.parametrize(("leave", "code", "words"), [("3", 3, "exit code 3"), ("'no data'", 1, "no data")])
def test_sys_exit_in_a_worker_keeps_its_code_and_message(run: Run, leave: str, code: int, words: str) -> None:
    done = run(f"import sys\nsys.exit({leave})\n")
    assert done.returncode == code
    assert words in done.stderr


def test_a_worker_that_is_killed_is_named_with_its_signal(run: Run) -> None:
    done = run(
        "import os, signal, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "time.sleep(60)\n"
    )
    assert done.returncode == 128 + signal.SIGKILL
    assert "rank 1" in done.stderr
    assert "SIGKILL" in done.stderr


def test_who_loses_a_peer_in_training_shows_one_traceback_that_says_where(run: Run) -> None:
    done = run(
        "import os, signal\n"
        "import syncline as sl, torch\n"
        "world = sl.init(timeout=60)\n"
        "ddp = sl.DistributedDataParallel(torch.nn.Linear(3, 2))\n"
        "for step in (1, 2, 3):\n"
        "    if step == 3 and world.rank == 1:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    ddp(torch.ones(1, 3)).sum().backward()\n"
    )
    assert done.returncode == 128 + signal.SIGKILL
    assert done.stderr.count("Traceback (most recent call last)") == 1, done.stderr
    assert 'program.py", line 8, in <module>' in done.stderr
    first = "PeerLost: rank 0, step 3, backward, bucket 0 (bias, weight): rank 1: its process has ended"
    assert first in done.stderr
    assert re.search(r"\n\[rank 0\]   rank 1: at its last report, \d+\.\d s ago: ", done.stderr)
    assert "network" not in done.stderr, "all ranks are on one host"


def test_only_the_rank_that_failed_shows_its_error_and_the_log_folder_has_all(
    run: Run, tmp_path: Path
) -> None:
    done = run(
        f"{RANK_1_ENDS_LAST}"
        "import syncline as sl, torch\n"
        "world = sl.init(timeout=60)\n"
        "ddp = sl.DistributedDataParallel(torch.nn.Linear(3, 2))\n"
        "if world.rank == 1:\n"
        "    raise ValueError('the cause')\n"
        "ddp(torch.ones(1, 3)).sum().backward()\n",
        options=("-n", "2", "--log-dir", str(tmp_path / "logs")),
    )
    assert done.returncode == 1
    assert "[rank 0]" not in done.stderr
    assert done.stderr.count("ValueError: the cause\n") == 1
    (record,) = tmp_path.glob("logs/*/attempt_0/0/error.json")
    assert "_run_backward" in record.read_text()
    assert "_run_backward" not in done.stderr


@pytest.mark.parametrize(("rank", "transport"), [(0, "c10d"), (1, "shm")])
def test_a_rank_that_exits_with_0_has_left_in_good_order(rank: int, transport: str, run: Run) -> None:
    done = run(
        "import sys\n"
        "import syncline as sl, torch\n"
        f"world = sl.init({transport!r}, timeout=60)\n"
        "ddp = sl.DistributedDataParallel(torch.nn.Linear(3, 2))\n"
        "for step in (1, 2, 3):\n"
        f"    if step == 3 and world.rank == {rank}:\n"
        "        sys.exit(0)\n"
        "    ddp(torch.ones(1, 3)).sum().backward()\n"
    )
    assert done.returncode == 1
    assert f"UnevenInputs: rank {1 - rank}, step 3, backward, bucket 0" in done.stderr
    assert f"rank {rank} has shut down normally" in done.stderr


@pytest.mark.parametrize("transport", ["c10d", "shm"])
@pytest.mark.parametrize(
    ("end", "words", "error"),
    [
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            r"was killed by SIGKILL \(signal 9\), exit code 137",
            r"\[rank 0\] .*PeerLost: ",
        ),
        ("raise ValueError('the cause')", "failed with exit code 1", r"\[rank 1\] ValueError: the cause\n"),
    ],
    ids=["killed", "failed"],
)
def test_who_loses_a_peer_has_the_time_to_say_so(
    end: str, words: str, error: str, transport: str, forks: Forks, tmp_path: Path
) -> None:
    """However slow it is to find words: it says them when the launcher has long seen the end of the other rank.

    The launcher gives it more time than usual, because the machine may be busy.
    """
    (tmp_path / "program.py").write_text(
        "import contextlib, os, signal, time\n"
        "from pathlib import Path\n"
        "import syncline as sl\n"
        f"world = sl.init({transport!r}, timeout=300)\n"
        "if world.rank == 1:\n"
        "    Path('pid').write_text(str(os.getpid()))\n"
        "sl.barrier()\n"
        "if world.rank == 1:\n"
        f"    {end}\n"
        "try:\n"
        "    sl.barrier()\n"
        "except sl.SynclineError:\n"
        "    with contextlib.suppress(ProcessLookupError):\n"
        "        while True:\n"
        "            os.kill(int(Path('pid').read_text()), 0)  # until the launcher has waited for it\n"
        "            time.sleep(0.001)\n"
        "    raise\n"
    )
    launcher = tmp_path / "launcher.py"
    launcher.write_text(
        "import sys\n"
        "from syncline.tools.cli import main\n"
        "from syncline.tools.launch import stopping\n"
        "stopping.REPORT_SECONDS = 300\n"
        "sys.exit(main(['run', '-n', '2', 'program.py']))\n"
    )
    done = forks.start(tmp_path, launcher, warm_ranks=True).wait()
    last = done.stderr[done.stderr.rindex("syncline run:") :]
    assert re.match(rf"syncline run: rank 1 \(.*\) {words}; failed later: rank 0 \(exit code 1\)", last)
    assert re.search(error, done.stderr)


def test_a_syntax_error_is_shown(run: Run) -> None:
    done = run("def f(:\n")
    assert done.returncode == 1
    *shown, last = done.stderr.splitlines()
    assert sum("SyntaxError" in line for line in shown) == 1
    assert re.match("syncline run: rank", last)  # of one, if the other was ended before it had printed


def test_a_rank_that_fails_with_a_collective_under_way_does_not_hold_up_its_peers(run: Run) -> None:
    """Rank 1's process group still has an operation that rank 0 will not join for a minute."""
    done = run(
        "import time\n"
        "import syncline as sl, torch, torch.distributed as dist\n"
        "world = sl.init(timeout=60)\n"
        "if world.rank == 1:\n"
        "    work = dist.all_reduce(torch.ones(8), async_op=True)\n"
        "    raise ValueError('the cause')\n"
        "time.sleep(60)\n"
    )
    assert done.returncode == 1
    assert done.stderr.count("ValueError: the cause\n") == 1
    assert "syncline run: rank 1 " in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("join", ["sl.init(timeout=60)", "dist.init_process_group('gloo')"])
def test_the_traceback_of_a_failing_rank_reaches_its_waiting_peer(run: Run, join: str) -> None:
    done = run(
        f"{RANK_1_ENDS_LAST}"
        "import syncline as sl, sys, torch, torch.distributed as dist\n"
        f"{join}\n"
        "ddp = sl.DistributedDataParallel(torch.nn.Linear(2, 2))\n"
        "for step in range(3):\n"
        "    if step == 2 and dist.get_rank() == 1:\n"
        "        raise KeyError('the data of step 3')\n"
        "    try:\n"
        "        ddp(torch.ones(1, 2)).sum().backward()\n"
        "    except sl.PeerFailed as error:\n"
        "        text = ' | '.join(str(error).splitlines())\n"
        "        sys.stdout.write(f'told: {text}\\n')\n"
        "        raise\n"
    )
    assert done.returncode == 1
    told = next(line for line in done.stdout.splitlines() if "told: " in line)
    assert "told: rank 0, step 3, backward, bucket 0 (bias, weight): rank 1 failed: KeyError" in told
    assert told.endswith("KeyError: 'the data of step 3'")
    assert done.stderr.count("KeyError: 'the data of step 3'\n") == 1  # only its own rank prints it


@pytest.mark.real
def test_torchs_record_decorator_does_not_blur_which_rank_was_first(run: Run) -> None:
    done = run(
        f"{RANK_1_FAILS_FIRST}"
        "from torch.distributed.elastic.multiprocessing.errors import record\n"
        "@record\n"
        "def main():\n"
        "    if os.environ['RANK'] == '1':\n"
        "        raise ValueError('the cause')\n"
        "    wait_for_error_of('1')\n"
        "    raise KeyError('the consequence')\n"
        "main()\n"
    )
    assert done.stderr.count("ValueError: the cause\n") == 1
    last = done.stderr[done.stderr.rindex("syncline run:") :]
    assert last.startswith("syncline run: rank 1 ")
    assert "failed later: rank 0" in last


def test_restarts_say_why_and_count(run: Run) -> None:
    done = run(
        "import os, sys\n"
        "count = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "print('attempt', count)\n"
        "if count == '0' and os.environ['RANK'] == '1':\n"
        "    raise ValueError('once')\n",
        options=("-n", "2", "--max-restarts", "2"),
    )
    assert done.returncode == 0
    assert done.stdout.count("attempt 1") == 2
    assert (
        "starting all ranks again (rank 1 failed with exit code 1: ValueError: once); restart 1 of at most 2"
        in done.stderr
    )


# ---------------------------------------------------------------------- where the output goes


def test_no_temporary_folder_is_left(run: Run, tmp_path: Path) -> None:
    done = run(
        "import os\n"
        "print(os.path.dirname(os.environ['TORCHELASTIC_ERROR_FILE']))\n"
        "print(os.path.isdir(os.path.dirname(os.environ['TORCHELASTIC_ERROR_FILE'])))\n"
    )
    lines = [line.split("] ")[1] for line in done.stdout.splitlines()]
    assert lines.count("True") == 2
    scratch = Path(next(line for line in lines if line != "True")).parents[1]
    assert scratch.name.startswith("syncline_")
    assert not scratch.exists()


@pytest.mark.parametrize("options", [(), ("--tee", "3")], ids=["our pipes", "torch's files"])
def test_a_log_folder_is_kept_and_named(run: Run, tmp_path: Path, options: tuple[str, ...]) -> None:
    logs = tmp_path / "logs"
    done = run(
        "import os, sys\nprint('to stdout')\nprint('to stderr', file=sys.stderr)\n",
        options=("-n", "2", "--log-dir", str(logs), *options),
    )
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == ["[rank 0] to stdout", "[rank 1] to stdout"]
    assert str(logs) in done.stderr.splitlines()[-1]
    for name in ("stdout", "stderr"):
        files = sorted(logs.glob(f"*/attempt_0/*/{name}.log"))
        assert [file.read_text() for file in files] == [f"to {name}\n"] * 2


def test_redirected_output_is_shown_as_torchrun_does(run: Run, tmp_path: Path) -> None:
    done = run("print('hidden')\nraise ValueError('x')\n", options=("-n", "2", "--redirects", "3"))
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.endswith("ValueError: x\n")


def test_on_a_terminal_rank_0_keeps_it(forks: Forks, tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    (tmp_path / "program.py").write_text(
        "import os, sys\n"
        # One write a line, also under PYTHONUNBUFFERED: the ranks share the terminal.
        "sys.stdout.write(f'{os.environ[\"RANK\"]} {sys.stdout.isatty()} {sys.stderr.isatty()}\\n')\n"
    )
    launcher = forks.launch(tmp_path, "-n", "2", "program.py", terminal=os.ttyname(theirs))
    assert launcher.wait().returncode == 0
    shown = b""
    while shown.count(b"\n") < 2:  # the kernel may hand them over one by one
        shown += os.read(ours, 10_000)
    os.close(theirs)
    os.close(ours)
    assert sorted(shown.decode().splitlines()) == ["0 True True", "[rank 1] 1 False False"]


def test_modules_and_commands_are_run_as_well(forks: Forks, tmp_path: Path) -> None:
    (tmp_path / "tool.py").write_text("import sys; print(sys.argv[1:], __spec__.name)")
    done = forks.launch(tmp_path, "-n", "1", "-m", "tool", "--", "-x").wait()
    assert done.stdout == "[rank 0] ['-x'] tool\n"
    done = forks.launch(tmp_path, "-n", "1", "--no-python", "sh", "-c", "echo $RANK of $WORLD_SIZE").wait()
    assert done.stdout == "[rank 0] 0 of 1\n"


def test_threads_are_shared_out_unless_the_user_did(run: Run) -> None:
    done = run("import os; print(os.environ['OMP_NUM_THREADS'])", options=("-n", "1", "--verbose"))
    threads = str(max(1, len(os.sched_getaffinity(0))))
    assert done.stdout == f"[rank 0] {os.environ.get('OMP_NUM_THREADS', threads)}\n"
