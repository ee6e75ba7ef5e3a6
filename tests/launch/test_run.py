"""`syncline run` with real processes. The programs import no torch unless they need it, to stay fast."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

import hangs
from forks import Forks
from syncline.tools.cli import main
from syncline.tools.cli.options import parse_run
from syncline.tools.launch.supervise import Job

Run = Callable[..., subprocess.CompletedProcess[str]]


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


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}


# ---------------------------------------------------------------------- refused before anything starts


def test_an_option_may_be_abbreviated() -> None:
    for option in ("--nproc", "--nproc-per", "--nproc_per", "--nproc-per-node", "--nproc_per_node"):
        for words in ([option, "3"], [f"{option}=3"]):
            assert parse_run([*words, "train.py"]).nproc_per_node == "3", option


MISTAKES = {
    "-n 2 missing.py": "there is no script missing.py",
    "-n 2 .": "expected a regular file, found a directory",
    "-n -3 program.py": "argument -n/--nproc-per-node: expected a number of",
    "-n many program.py": "-n many: expected a number, auto, cpu, or gpu",
    "-n 2": "expected a script: syncline run",
    "--log x program.py": (
        "ambiguous option: --log could match --log-dir, --log-line-prefix-template, --logs-specs;"
    ),
    "--nnodes 0 program.py": "argument --nnodes: expected a number of hosts from 1 to 1,000,000, or MIN:MAX, got '0'",
    "--host 192.0.2.1 program.py": "--host 192.0.2.1: expected an address of this host",
    "--nnodes 2 --host 127.0.0.1 --rdzv-backend c10d --rdzv-endpoint h:29400 program.py": (
        "--host 127.0.0.1: --rdzv-backend c10d cannot use --host"
    ),
    "--live --no-python sh": "--live needs a program in Python",
    "--live --tee 3 program.py": "--live cannot be combined with --tee",
    "--log-line-prefix-template= --tee 3 program.py": (
        "--log-line-prefix-template '': with --tee, torch prints the lines"
    ),
}


def test_a_mistake_is_one_line_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "program.py").write_text("")
    monkeypatch.chdir(tmp_path)
    for line, words in MISTAKES.items():
        assert main(["run", *line.split()]) == 2, line
        (message,) = capsys.readouterr().err.splitlines()
        assert words in message, line


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


def test_help_of_each_command(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("run", "explain", "report", "compare", "watch", "plan", "plan --tune", "bench", "doctor"):
        assert main([*command.split(), "--help"]) == 0
        text = capsys.readouterr().out
        assert f"usage: syncline {command.split()[0]}" in text
        assert max(map(len, text.splitlines())) <= (92 if "--tune" in command else 88), command
        assert main(["help", *command.split()]) == 0
        assert capsys.readouterr().out == text
        assert "docs/" not in text, "an installed user does not have the files of the repository"


WITHOUT_TORCH = {
    "--help": (0, "syncline COMMAND"),
    "--version": (0, "syncline 0.2.0 (torch 2."),
    "": (2, "syncline COMMAND"),
    "rum": (2, "did you mean run?"),
    "run --help": (0, "--monitor-interval, --start-method, --event-log-handler"),
    "run --nod-rank 1 program.py": (2, "did you mean --node-rank?"),
    "run -n 2 progam.py": (2, "did you mean program.py?"),
    "run -n 0 program.py": (2, "from 1 to 1,024, or auto, cpu or gpu, got '0'"),
    "run --max-restarts two program.py": (2, "expected a number of restarts from 0 to 1,000,000, got 'two'"),
    "bench --help": (0, "usage: syncline bench"),
    "bench --jsn file": (2, "did you mean --json?"),
    "bench --sizes big": (2, "--sizes: expected sizes such as"),
    "doctor --help": (0, "usage: syncline doctor"),
    "doctor --stop 3 program.py": (2, "did you mean --step?"),
    "doctor progam.py": (2, "did you mean program.py?"),
}

RUNS_ALL = """
import contextlib, io, json, sys
from importlib import metadata

(script,) = metadata.entry_points(group="console_scripts", name="syncline")
main = script.load()
for line in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(line.split())
    print(json.dumps([code, out.getvalue(), err.getvalue()]))
"""


def test_help_and_mistakes_do_not_wait_for_torch(tmp_path: Path) -> None:
    """Neither in the console script nor in `python -m syncline`."""
    (tmp_path / "torch.py").write_text("raise RuntimeError('torch was imported')")
    (tmp_path / "program.py").touch()
    variables = {**clean_environment(), "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", RUNS_ALL, json.dumps([*WITHOUT_TORCH])]
    done = hangs.run(command, cwd=tmp_path, env=variables)
    assert (done.returncode, done.stderr) == (0, "")
    for (line, (code, words)), found in zip(WITHOUT_TORCH.items(), done.stdout.splitlines(), strict=True):
        found_code, out, err = json.loads(found)
        assert found_code == code, line
        assert words in (err if code else out), line
        assert not (out if code else err), line
        assert not code or not line or err.count("\n") == 1, line
    done = hangs.run([sys.executable, "-m", "syncline", "rum"], cwd=tmp_path, env=variables)
    assert (done.returncode, done.stdout) == (2, "")
    assert "did you mean run?" in done.stderr


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
        value = {float: "0.5", int: "7"}.get(action.type) or ("spawn" if action.choices else "3")
        for name in action.option_strings:
            if name in ("-h", "--help") or (action.dest in ("numa_binding", "print_completion")):
                continue
            arguments = [name, *([value] if action.nargs is None else []), "program.py"]
            found, expected = parse_run(arguments), get_args_parser().parse_args(arguments)
            assert getattr(found, action.dest) == getattr(expected, action.dest), name


def test_the_environment_has_defaults_of_torchruns_options(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value, expected in (
        ("nproc_per_node", "3", "3"),
        ("max_restarts", "2", 2),
        ("duplicate_stdout_filters", "a,b,,c", ["a", "b,c"]),
        ("standalone", "1", True),
        ("standalone", "0", False),
    ):
        monkeypatch.setenv(f"PET_{name.upper()}", value)
        assert getattr(parse_run(["program.py"]), name) == expected
        assert getattr(get_args_parser().parse_args(["program.py"]), name) == expected


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
        "scratch = os.path.dirname(os.path.dirname(os.path.dirname(os.environ['TORCHELASTIC_ERROR_FILE'])))\n"
        "print(os.environ['RANK'], os.environ['WORLD_SIZE'], os.environ['OMP_NUM_THREADS'], os.path.isdir(scratch),\n"
        "      scratch, sys.argv[1:], __name__, sys.path[0])\n",
        "--",
        "--epochs",
        "2",
    )
    assert (done.returncode, done.stderr) == (0, "")
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // 2)))
    for rank, line in enumerate(sorted(done.stdout.splitlines())):
        assert line.startswith(f"[rank {rank}] {rank} 2 {threads} True /")
        scratch, rest = line.partition(" True ")[2].split(" ", 1)
        assert rest.startswith("['--epochs', '2'] __main__ /")
        assert Path(scratch).name.startswith("syncline_")
        assert not Path(scratch).exists()


def test_the_prefix_of_lines_is_chosen(run: Run) -> None:
    for template, prefix in (("${hostname}:${rank}: ", f"{socket.gethostname()}:RANK: "), ("", "")):
        done = run("print('line')", options=("-n", "2", "--log-line-prefix-template", template))
        shown = [f"{prefix.replace('RANK', str(rank))}line" for rank in range(2)]
        assert sorted(done.stdout.splitlines()) == shown


def test_a_number_of_processes_after_the_script_is_said_to_be_the_scripts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs: list[Job] = []
    monkeypatch.setattr("syncline.tools.launch.supervise.supervise", lambda job: jobs.append(job) or 0)
    (tmp_path / "program.py").touch()
    monkeypatch.chdir(tmp_path)
    for late in (["-n", "2"], ["-n2"], ["--nproc-per-node=2"], ["--name", "2"]):
        assert main(["run", "program.py", *late]) == 0
        job = jobs.pop()
        assert (job.config.nproc_per_node, job.arguments[-1 - len(late) :]) == (1, ["program.py", *late])
        said = f"1 process, because {late[0]} stands after program.py" in capsys.readouterr().err
        assert said == (late[0] != "--name"), late


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
    alone = hangs.run([sys.executable, str(program)], env=clean_environment())
    assert (alone.returncode, alone.stdout, alone.stderr) == (0, "mean 0.0 of 1\n", "")


# ---------------------------------------------------------------------- failures


def test_sys_exit_in_a_worker_keeps_its_code_and_message(run: Run) -> None:
    for leave, code, words in (("3", 3, "exit code 3"), ("'no data'", 1, "no data")):
        done = run(f"import sys\nsys.exit({leave})\n")
        assert done.returncode == code
        assert words in done.stderr


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


def test_a_rank_that_exits_with_0_has_left_in_good_order(run: Run) -> None:
    code = (
        "import sys\n"
        "import syncline as sl, torch\n"
        "rank, transport = int(sys.argv[1]), sys.argv[2]\n"
        "world = sl.init(transport, timeout=60)\n"
        "ddp = sl.DistributedDataParallel(torch.nn.Linear(3, 2))\n"
        "for step in (1, 2, 3):\n"
        "    if step == 3 and world.rank == rank:\n"
        "        sys.exit(0)\n"
        "    ddp(torch.ones(1, 3)).sum().backward()\n"
    )
    for rank, transport in ((0, "c10d"), (1, "shm")):
        done = run(code, str(rank), transport)
        assert done.returncode == 1
        assert f"UnevenInputs: rank {1 - rank}, step 3, backward, bucket 0" in done.stderr
        assert f"rank {rank} has shut down normally" in done.stderr


LOSES_A_PEER = """
import contextlib, os, signal, sys, time
from pathlib import Path
import syncline as sl

transport, end = sys.argv[1:]
world = sl.init(transport, timeout=300)
if world.rank == 1:
    Path("pid").write_text(str(os.getpid()))
sl.barrier()
if world.rank == 1:
    if end == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError("the cause")
try:
    sl.barrier()
except sl.SynclineError:
    with contextlib.suppress(ProcessLookupError):
        while True:
            os.kill(int(Path("pid").read_text()), 0)  # until the launcher has waited for it
            time.sleep(0.001)
    raise
"""

PATIENT_LAUNCHER = """
import sys
from syncline.tools.cli import main
from syncline.tools.launch import stopping

stopping.REPORT_SECONDS = 300
sys.exit(main(["run", "-n", "2", "program.py", *sys.argv[1:]]))
"""


def test_who_loses_a_peer_has_the_time_to_say_so(forks: Forks, tmp_path: Path) -> None:
    """However slow it is to find words: it says them when the launcher has long seen the end of the other rank.

    The launcher gives it more time than usual, because the machine may be busy.
    """
    (tmp_path / "program.py").write_text(LOSES_A_PEER)
    (tmp_path / "launcher.py").write_text(PATIENT_LAUNCHER)
    for transport, end, words, error in (
        ("shm", "killed", r"was killed by SIGKILL \(signal 9\), exit code 137", r"\[rank 0\] .*PeerLost: "),
        ("c10d", "failed", "failed with exit code 1", r"\[rank 1\] ValueError: the cause\n"),
    ):
        done = forks.start(tmp_path, tmp_path / "launcher.py", transport, end, warm_ranks=True).wait()
        last = done.stderr[done.stderr.rindex("syncline run:") :]
        pattern = rf"syncline run: rank 1 \(.*\) {words}; failed later: rank 0 \(exit code 1\)"
        assert re.match(pattern, last), done.stderr
        assert re.search(error, done.stderr), done.stderr
        assert "ChildFailedError" not in done.stderr


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


def test_the_traceback_of_a_failing_rank_reaches_its_waiting_peer_and_is_shown_once(
    run: Run, tmp_path: Path
) -> None:
    code = (
        f"{RANK_1_ENDS_LAST}"
        "import syncline as sl, sys, torch, torch.distributed as dist\n"
        "sl.init(timeout=60) if sys.argv[1] == 'sl' else dist.init_process_group('gloo')\n"
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
    for joined_by in ("sl", "torch"):
        logs = tmp_path / joined_by
        (tmp_path / "said").unlink(missing_ok=True)
        done = run(code, joined_by, options=("-n", "2", "--log-dir", str(logs)))
        assert done.returncode == 1
        told = next(line for line in done.stdout.splitlines() if "told: " in line)
        assert "told: rank 0, step 3, backward, bucket 0 (bias, weight): rank 1 failed: KeyError" in told
        assert told.endswith("KeyError: 'the data of step 3'")
        # Only its own rank prints it. The folder of logs has what the other one could have said.
        assert done.stderr.count("KeyError: 'the data of step 3'\n") == 1
        assert "[rank 0]" not in done.stderr
        assert "_run_backward" not in done.stderr
        (record,) = logs.glob("*/attempt_0/0/error.json")
        assert "_run_backward" in record.read_text()


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


def test_a_log_folder_is_kept_and_named(run: Run, tmp_path: Path) -> None:
    for writer, options in (("our pipes", ()), ("torch's files", ("--tee", "3"))):
        logs = tmp_path / writer
        done = run(
            "import os, sys\nprint('to stdout')\nprint('to stderr', file=sys.stderr)\n",
            options=("-n", "2", "--log-dir", str(logs), *options),
        )
        assert done.returncode == 0
        assert sorted(done.stdout.splitlines()) == ["[rank 0] to stdout", "[rank 1] to stdout"], writer
        assert str(logs) in done.stderr.splitlines()[-1], writer
        for name in ("stdout", "stderr"):
            files = sorted(logs.glob(f"*/attempt_0/*/{name}.log"))
            assert [file.read_text() for file in files] == [f"to {name}\n"] * 2, writer


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
