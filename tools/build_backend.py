"""The build backend: scikit-build-core, and pure Python where the native core cannot be compiled.

scikit-build-core has an override for a build that failed, but none for a machine without CMake, and it waits for a
compiler that hangs. So this module tries the compiler first, with a time limit. Where the core cannot be compiled, one
line says why, and the wheel is built without CMake.

There is no hook for metadata on purpose: whether the wheel is pure is known only when it has been built.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scikit_build_core import build
from scikit_build_core.build import build_sdist, get_requires_for_build_sdist
from scikit_build_core.errors import NotFoundError

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
]

Settings = dict[str, Any] | None

_COMPILER_SECONDS = 15
"""How long the compiler may take for an empty program, in seconds. A busy machine takes less than 5."""


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    return build.get_requires_for_build_wheel(_without_bad_compiler(config_settings)[0])


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    return build.get_requires_for_build_editable(_without_bad_compiler(config_settings)[0])


def build_wheel(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    return _with_or_without_core(build.build_wheel, wheel_directory, config_settings, metadata_directory)


def build_editable(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    return _with_or_without_core(build.build_editable, wheel_directory, config_settings, metadata_directory)


def _with_or_without_core(
    hook: Callable[..., str], wheel_directory: str, config_settings: Settings, metadata_directory: str | None
) -> str:
    settings, reason = _without_bad_compiler(config_settings)
    try:
        wheel = hook(wheel_directory, settings, metadata_directory)
        if wheel.endswith("-none-any.whl"):  # pyproject.toml, or the reason, left CMake switched off
            _say(reason or "that takes Linux and CMake, and wheel.cmake must not be false")
        return wheel
    except NotFoundError as error:  # no CMake, or nothing that it can drive
        _say(str(error))
    except SystemExit:  # CMake or the compiler failed and said why
        _say("it could not be compiled, see above")
    return hook(wheel_directory, _pure(settings), metadata_directory)


def _without_bad_compiler(config_settings: Settings) -> tuple[Settings, str | None]:
    """Return the settings, and None; if the compiler is of no use, settings that leave it out, and the reason."""
    reason = _fault_of_compiler()
    return (config_settings, None) if reason is None else (_pure(config_settings), reason)


def _pure(config_settings: Settings) -> dict[str, Any]:
    return {**(config_settings or {}), "wheel.cmake": "false"}


def _fault_of_compiler() -> str | None:
    """Return why CC, or else cc, cannot compile an empty program. Return None if it can, or if CMake takes another."""
    named = os.environ.get("CC")
    if not named and (
        shutil.which("cc") is None or {"CMAKE_ARGS", "CMAKE_TOOLCHAIN_FILE"} & os.environ.keys()
    ):
        return None  # CMake looks for another compiler, and fails at once if there is none
    text = f"the C compiler {named or 'cc'!r}{' (CC)' if named else ''}"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "empty.c")
        source.write_text("int syncline;\n")
        try:
            command = [*shlex.split(named or "cc"), "-c", str(source), "-o", str(source.with_suffix(".o"))]
            code = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, timeout=_COMPILER_SECONDS
            ).returncode
        except subprocess.TimeoutExpired:
            return f"{text} did not end within {_COMPILER_SECONDS} s"
        except (OSError, ValueError) as error:
            return f"{text} cannot be started: {error}"
        if code != 0 or not source.with_suffix(".o").exists():
            return f"{text} does not compile an empty program: exit code {code}"
    return None


def _say(reason: str) -> None:
    print(f"syncline is built as pure Python, without its native core: {reason}.", flush=True)
