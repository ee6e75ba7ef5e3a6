"""The build backend: scikit-build-core, and pure Python where the native core cannot be compiled.

scikit-build-core has an override for a build that failed, but none for a machine without CMake. This module treats
both alike: one line says what is missing, and the wheel is built again without CMake.

There is no hook for metadata on purpose: whether the wheel is pure is known only when it has been built.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from scikit_build_core import build
from scikit_build_core.build import (
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
)
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
    try:
        wheel = hook(wheel_directory, config_settings, metadata_directory)
        if wheel.endswith("-none-any.whl"):  # pyproject.toml left CMake switched off
            _say("that takes Linux and CMake")
        return wheel
    except NotFoundError as error:  # no CMake, or nothing that it can drive
        _say(str(error))
    except SystemExit:  # CMake or the compiler failed and said why
        _say("it could not be compiled, see above")
    pure = {**(config_settings or {}), "wheel.cmake": "false"}
    return hook(wheel_directory, pure, metadata_directory)


def _say(reason: str) -> None:
    print(f"syncline is built as pure Python, without its native core: {reason}.", flush=True)
