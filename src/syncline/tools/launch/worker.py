"""The wrapper with which `syncline run` starts each rank. It prepares the process, and then runs the user's program.

[Note: why a wrapper around the user's program]

A rank must end when its launcher is killed, and it must record its exception with an exact time. Both must work for
every program, whether or not the program uses torch or calls `sl.init`. The alternatives were worse:

- Code in `sl.init` does not cover programs that never call `sl.init`, or failures before the call.
- A launcher that watches from outside cannot determine which of two ranks failed first if they fail 20 ms apart.
- A `sitecustomize` module on PYTHONPATH would hide a `sitecustomize` module of the user.

The launcher therefore starts `python .../worker.py LAUNCHER_PID [-m] PROGRAM ARGUMENTS`. The file is run by path, not
with -m, because an import of the package would import torch before the program could set an environment variable that
torch reads at import. The program runs in a new `__main__` module that exists until the interpreter ends. `sys.argv`
and `sys.path[0]` are set as `python PROGRAM` sets them. Pickling, `multiprocessing` and `-m` therefore behave as
without the wrapper, and tracebacks do not show this file. With `--exec`, PROGRAM is a command that is not Python. It
replaces this process by exec, and the parent-death signal stays set.

With `--before MODULE ARGUMENT`, the wrapper first calls `MODULE.main(ARGUMENT)` in the same process. `syncline doctor`
uses this to watch a program.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import importlib.machinery
import importlib.util
import io
import os
import sys
from collections.abc import Sequence
from types import CodeType, ModuleType
from typing import Any

_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def worker_command(
    program: Sequence[str],
    *,
    is_module: bool = False,
    is_python: bool = True,
    before: tuple[str, str] | None = None,
) -> list[str]:
    """Return the arguments with which Python runs a program as a rank. This process is the launcher of the rank.

    Args:
        program: a script, a module or a command, followed by its arguments.
        is_module: whether the program is a module, as in python -m.
        is_python: whether the program is a script or a module. False means that it is a command.
        before: the name of a module and a text. The module's `main` is called with the text in the same process, before
            the program runs. None means no call.
    """
    kind = ["-m"] if is_module else [] if is_python else ["--exec"]
    first = ["--before", *before] if before is not None else []
    return [os.path.abspath(__file__), str(os.getpid()), *first, *kind, *program]


# ---------------------------------------------------------------------- in the process of the rank


def _sibling(name: str) -> Any:
    """Load one module of the package `syncline`. An import of the whole package would import torch."""
    spec = importlib.util.spec_from_file_location(
        f"_syncline_{os.path.basename(name)}", os.path.join(_PACKAGE, f"{name}.py")
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module there
    spec.loader.exec_module(module)
    return module


def main(argv: list[str]) -> None:
    """Run the user's program in this process.

    Args:
        argv: the arguments LAUNCHER_PID [--before MODULE ARGUMENT] [-m | --exec] PROGRAM [ARGUMENTS].
    """
    process, environment, tracebacks = map(_sibling, ("session/process", "environment", "tracebacks"))
    process.end_with_parent(int(argv[0]))
    before, program = (argv[2:4], argv[4:]) if argv[1] == "--before" else ([], argv[1:])
    is_module = program[0] == "-m"
    if program[0] == "--exec":
        os.execvp(program[1], program[1:])
    program = program[is_module:]
    for stream in (sys.stdout, sys.stderr):
        # Line buffering sends complete lines to the launcher. `python -u` would write "text" and "\n" separately.
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    with contextlib.suppress(OSError, ValueError):
        faulthandler.enable()  # a crash in native code then prints the Python stack

    own_pid = os.getpid()
    error_file = environment.error_file()
    try:
        code, module = _as_module(program[0]) if is_module else _as_script(program[0])
        sys.argv[:] = [module.__file__ or program[0] if is_module else program[0], *program[1:]]
        sys.modules["__main__"] = module
        if before:
            importlib.import_module(before[0]).main(before[1])
        exec(code, module.__dict__)
    except BaseException as error:
        described = tracebacks.describe(error)
        if error_file and os.getpid() == own_pid:  # a fork of the program must not write the error file
            process.record_failure(error, error_file, brief=described.brief, whole=described.whole)
        is_whole = environment.wants_whole_tracebacks()
        if isinstance(error, KeyboardInterrupt):
            sys.excepthook = lambda *_: None  # the launcher reports Ctrl-C once for all ranks
        else:
            sys.excepthook = tracebacks.printing_hook(
                sys.excepthook, error_file=error_file, is_whole=is_whole
            )
        raise
    finally:
        if error_file and os.getpid() == own_pid:
            process.record_program_end(error_file)


def _as_script(path: str) -> tuple[CodeType, ModuleType]:
    """Prepare a script. Return its code, and the new `__main__` module in which to run the code."""
    full = os.path.abspath(path)
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(full))
    loader = importlib.machinery.SourceFileLoader("__main__", full)
    module = _main_module(__file__=full, __loader__=loader, __package__=None, __cached__=None)
    with io.open_code(full) as file:
        source = file.read()
    return compile(source, full, "exec", dont_inherit=True), module


def _as_module(name: str) -> tuple[CodeType, ModuleType]:
    """Prepare a module, as `python -m` does. Return its code, and the new `__main__` module in which to run the code.

    For a package, this is the code of the package's `__main__` submodule.
    """
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd()
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        name = f"{name}.__main__"
        spec = importlib.util.find_spec(name)
    get_code = getattr(spec.loader, "get_code", None) if spec is not None else None
    code: CodeType | None = get_code(name) if get_code is not None else None
    if spec is None or code is None:
        raise SystemExit(f"there is no module {name} that -m can run: check the name after -m")
    return code, _main_module(
        __spec__=spec,
        __loader__=spec.loader,
        __package__=spec.parent,
        __file__=spec.origin,
        __cached__=spec.cached,
    )


def _main_module(**attributes: Any) -> ModuleType:
    module = ModuleType("__main__")
    module.__dict__.update(attributes, __builtins__=__builtins__, __annotations__={})
    return module


if __name__ == "__main__":
    main(sys.argv[1:])
