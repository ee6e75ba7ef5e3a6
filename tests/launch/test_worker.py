"""A program in a worker runs as `python PROGRAM` runs it; its last words reach the launcher's file."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import hangs
from syncline.tools.launch.command import worker_command


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(folder / "error.json")}
    return hangs.run(command, cwd=folder, env=variables)


def both_ways(
    folder: Path, *program: str, is_module: bool = False
) -> tuple[subprocess.CompletedProcess[str], subprocess.CompletedProcess[str]]:
    """What comes of a program in plain Python, and in a worker."""
    plain = run(folder, sys.executable, *(["-m"] if is_module else []), *program)
    return plain, run(folder, sys.executable, *worker_command(program, is_module=is_module))


def last_words(folder: Path) -> dict[str, object]:
    message = json.loads((folder / "error.json").read_text())["message"]
    return {"summary": message["message"], **message["extraInfo"]}


PROGRAMS = {
    "arguments and path": "import sys; print(sys.argv, sys.path)",
    "its own module": (
        "import sys\n"
        "main = sys.modules['__main__']\n"
        "print(main.__dict__ is globals(), __name__, __file__, __package__, __spec__, __doc__, __cached__)\n"
        "print(sorted(name for name in globals()), type(__loader__), __builtins__)\n"
    ),
    "future statements are its own": "def f(x: int): ...\nprint(f.__annotations__)",
    "a class of __main__ is pickled": (
        "import pickle\nclass A:\n    x = 1\nprint(pickle.loads(pickle.dumps(A())).x, A.__module__)"
    ),
    "at exit __main__ is still there": (
        "import atexit, pickle, threading, time\n"
        "class A: ...\n"
        "atexit.register(lambda: print(pickle.dumps(A)))\n"
        "threading.Thread(target=lambda: (time.sleep(0.1), print(pickle.dumps(A)))).start()\n"
    ),
    "spawned processes find it": (
        "import multiprocessing\n"
        "def double(x): return 2 * x\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(pool.map(double, [21]))\n"
    ),
    "source of a function": "import inspect\ndef f():\n    return 1\nprint(inspect.getsource(f))",
    "encoding": "# -*- coding: latin-1 -*-\nprint(ascii('\xe9'))",
    "exit code": "import sys; sys.exit(7)",
    "exit message": "import sys; sys.exit('no data')",
    "traceback": "def f():\n    1 / 0\ntry:\n    f()\nexcept ZeroDivisionError as e:\n    raise KeyError(2) from e\n",
    "syntax error": "x = = 1\n",
    "own excepthook": (
        "import sys, traceback\n"
        "sys.excepthook = lambda kind, error, tb: print(kind, len(traceback.extract_tb(tb)))\n"
        "raise ValueError(1)\n"
    ),
}


@pytest.mark.parametrize("code", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_a_script_runs_as_in_plain_python(code: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(code, encoding="latin-1")
    plain, worker = both_ways(tmp_path, "program.py", "-x", "--", "y")
    assert (worker.returncode, worker.stdout) == (plain.returncode, plain.stdout)
    assert without_marks(worker.stderr) == without_marks(plain.stderr)


def without_marks(traceback: str) -> str:
    """Without the marks below a line of code (`~~^^`): a rank has them in the last frame only."""
    return re.sub(r"\n[ ~^]+(?=\n)", "", traceback)


def test_a_script_in_another_folder_imports_its_neighbours_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "neighbour.py").write_text("x = 1")
    (tmp_path / "real" / "program.py").write_text("import sys, neighbour; print(sys.argv[0], __file__)")
    (tmp_path / "link.py").symlink_to("real/program.py")
    plain, worker = both_ways(tmp_path, "link.py")
    assert plain.returncode == 0
    assert (worker.stdout, worker.stderr) == (plain.stdout, plain.stderr)


@pytest.mark.parametrize("name", ["package.tool", "package"])
def test_a_module_runs_as_with_python_m(name: str, tmp_path: Path) -> None:
    code = (
        "import multiprocessing, pickle, sys\n"
        "from . import value\n"
        "class A: ...\n"
        "def double(x): return 2 * x\n"
        "if __name__ == '__main__':\n"
        "    print(value, sys.argv, sys.path[0], __file__, __package__, __spec__.name, pickle.dumps(A))\n"
        "    if not __spec__.name.endswith('__main__'):  # multiprocessing cannot import such a module again\n"
        "        with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "            print(pool.map(double, [21]))\n"
    )
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("value = 42")
    for file in ("tool.py", "__main__.py"):
        (tmp_path / "package" / file).write_text(code)
    plain, worker = both_ways(tmp_path, name, "-x", is_module=True)
    assert plain.returncode == 0, plain.stderr
    assert (worker.returncode, worker.stdout, worker.stderr) == (0, plain.stdout, plain.stderr)


def test_an_exception_is_recorded_with_its_traceback_and_exact_time(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("def f():\n    raise ValueError('boom')\nf()\n")
    worker = run(tmp_path, sys.executable, *worker_command(["program.py"]))
    words = last_words(tmp_path)
    assert words["summary"] == "ValueError: boom"
    assert f"{words['py_callstack']}\n" == worker.stderr
    assert words["exit_code"] == worker.returncode == 1
    assert int(str(words["time_ns"])) // 10**9 == int(str(words["timestamp"]))


@pytest.mark.parametrize(
    ("argument", "code", "summary"), [("3", 3, "SystemExit: 3"), ("'no'", 1, "SystemExit: no")]
)
def test_sys_exit_is_recorded_without_a_traceback(
    argument: str, code: int, summary: str, tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(f"import sys; sys.exit({argument})")
    run(tmp_path, sys.executable, *worker_command(["program.py"]))
    words = last_words(tmp_path)
    assert (words["summary"], words["exit_code"], words["py_callstack"]) == (summary, code, "")


@pytest.mark.parametrize(
    "code",
    [
        "import sys; sys.exit()",
        "import sys; sys.exit(0)",
        "import os\nif os.fork():\n    os.wait()\nelse:\n    raise ValueError('only in a fork')",
    ],
)
def test_what_is_no_failure_of_the_rank_is_not_recorded(code: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(code)
    assert run(tmp_path, sys.executable, *worker_command(["program.py"])).returncode == 0
    assert not (tmp_path / "error.json").exists()


def test_a_record_of_torchs_own_is_replaced_by_one_with_an_exact_time(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import json, os\n"
        "record = {'message': {'message': 'E', 'extraInfo': {'timestamp': '1'}}}\n"
        "json.dump(record, open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w'))\n"
        "raise ValueError('boom')\n"
    )
    run(tmp_path, sys.executable, *worker_command(["program.py"]))
    assert last_words(tmp_path)["summary"] == "ValueError: boom"


def test_an_interrupt_ends_the_process_as_always_but_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import os, signal\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
    )
    worker = run(tmp_path, sys.executable, *worker_command(["program.py"]))
    assert (worker.returncode, worker.stderr) == (-signal.SIGINT, "")
    assert not (tmp_path / "error.json").exists()


def test_a_command_that_is_not_python_takes_the_workers_place(tmp_path: Path) -> None:
    worker = run(tmp_path, sys.executable, *worker_command(["sh", "-c", "echo $PPID $0"], is_python=False))
    assert worker.stdout.split() == [str(os.getpid()), "sh"]


def test_a_worker_whose_launcher_is_gone_does_not_start(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("print('ran')")
    script, _, *rest = worker_command(["program.py"])
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    worker = run(tmp_path, sys.executable, script, str(ended.pid), *rest)
    assert (worker.returncode, worker.stdout) == (128 + signal.SIGKILL, "")


def test_torch_is_not_imported_before_the_program(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import sys; print('torch' in sys.modules, 'syncline' in sys.modules)"
    )
    worker = run(tmp_path, sys.executable, *worker_command(["program.py"]))
    assert worker.stdout == "False False\n"
