"""A program in a worker runs as `python PROGRAM` runs it; its last words reach the launcher's file."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import hangs
from syncline.tools.launch.worker import worker_command


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(folder / "error.json")}
    return hangs.run(command, cwd=folder, env=variables)


def run_in_worker(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    (folder / "error.json").unlink(missing_ok=True)
    (folder / "program.py").write_text(code)
    return run(folder, sys.executable, *worker_command(["program.py"]))


def both_ways(
    folder: Path, *program: str, is_module: bool = False
) -> tuple[subprocess.CompletedProcess[str], subprocess.CompletedProcess[str]]:
    """What comes of a program in plain Python, and in a worker."""
    plain = run(folder, sys.executable, *(["-m"] if is_module else []), *program)
    return plain, run(folder, sys.executable, *worker_command(program, is_module=is_module))


def last_words(folder: Path) -> dict[str, object]:
    message = json.loads((folder / "error.json").read_text())["message"]
    return {"summary": message["message"], **message["extraInfo"]}


LOOKS_AROUND = """# -*- coding: latin-1 -*-
import atexit, inspect, multiprocessing, pickle, sys, threading
class A:
    x = 1
def double(x: int):
    return 2 * x
def print_at_the_end():
    threading.main_thread().join()
    print(pickle.dumps(A))
if __name__ == '__main__':
    print(sys.argv, sys.path, ascii('\xe9'))
    print(sys.modules['__main__'].__dict__ is globals())
    print(__name__, __file__, __package__, __spec__, __doc__, __cached__)
    print(sorted(name for name in globals()), type(__loader__), __builtins__)
    print('future statements are its own:', double.__annotations__)
    print('a class of __main__ is pickled:', pickle.loads(pickle.dumps(A())).x, A.__module__)
    print(inspect.getsource(double))
    atexit.register(lambda: print(pickle.dumps(A)))
    threading.Thread(target=print_at_the_end).start()
    with multiprocessing.get_context('spawn').Pool(1) as pool:
        print('spawned processes find it:', pool.map(double, [21]))
    sys.exit(7)
"""

PROGRAMS = {
    "looks around": LOOKS_AROUND,
    "exit message": "import sys; sys.exit('no data')",
    "traceback": "def f():\n    1 / 0\ntry:\n    f()\nexcept ZeroDivisionError as e:\n    raise KeyError(2) from e\n",
    "syntax error": "x = = 1\n",
    "own excepthook": (
        "import sys, traceback\n"
        "sys.excepthook = lambda kind, error, tb: print(kind, len(traceback.extract_tb(tb)))\n"
        "raise ValueError(1)\n"
    ),
}


def test_a_script_runs_as_in_plain_python(tmp_path: Path) -> None:
    for name, code in PROGRAMS.items():
        (tmp_path / "program.py").write_text(code, encoding="latin-1")
        plain, worker = both_ways(tmp_path, "program.py", "-x", "--", "y")
        assert plain.returncode == (7 if name == "looks around" else 1), plain.stderr
        assert (worker.returncode, worker.stdout) == (plain.returncode, plain.stdout), name
        assert without_marks(worker.stderr) == without_marks(plain.stderr), name


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


def test_a_module_runs_as_with_python_m(tmp_path: Path) -> None:
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
    for name in ("package.tool", "package"):
        plain, worker = both_ways(tmp_path, name, "-x", is_module=True)
        assert plain.returncode == 0, plain.stderr
        assert (worker.returncode, worker.stdout, worker.stderr) == (0, plain.stdout, plain.stderr), name


def test_an_exception_is_recorded_with_its_traceback_and_exact_time(tmp_path: Path) -> None:
    """It replaces a record of torch's own, which has whole seconds."""
    worker = run_in_worker(
        tmp_path,
        "import json, os\n"
        "record = {'message': {'message': 'E', 'extraInfo': {'timestamp': '1'}}}\n"
        "json.dump(record, open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w'))\n"
        "raise ValueError('boom')\n",
    )
    words = last_words(tmp_path)
    assert words["summary"] == "ValueError: boom"
    assert f"{words['py_callstack']}\n" == worker.stderr
    assert words["exit_code"] == worker.returncode == 1
    assert int(str(words["time_ns"])) // 10**9 == int(str(words["timestamp"]))


def test_sys_exit_is_recorded_without_a_traceback(tmp_path: Path) -> None:
    for argument, code, summary in (("3", 3, "SystemExit: 3"), ("'no'", 1, "SystemExit: no")):
        assert run_in_worker(tmp_path, f"import sys; sys.exit({argument})").returncode == code
        words = last_words(tmp_path)
        assert (words["summary"], words["exit_code"], words["py_callstack"]) == (summary, code, "")


NO_FAILURES = {
    "import sys; sys.exit()": 0,
    "import sys; sys.exit(0)": 0,
    "import os\nif os.fork():\n    os.wait()\nelse:\n    raise ValueError('only in a fork')": 0,
    # An interrupt ends the process as always, but without a traceback.
    "import os, signal\n"
    "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "os.kill(os.getpid(), signal.SIGINT)\n": -signal.SIGINT,
}


def test_what_is_no_failure_of_the_rank_is_not_recorded(tmp_path: Path) -> None:
    for code, return_code in NO_FAILURES.items():
        worker = run_in_worker(tmp_path, code)
        assert worker.returncode == return_code, code
        assert worker.stderr.count("Traceback") == ("fork" in code), code
        assert not (tmp_path / "error.json").exists(), code


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
    worker = run_in_worker(tmp_path, "import sys; print('torch' in sys.modules, 'syncline' in sys.modules)")
    assert worker.stdout == "False False\n"
