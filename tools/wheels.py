"""Build what is published: an sdist, wheels for Linux on x86-64 and aarch64, and a pure wheel for other systems.

    python tools/wheels.py [FOLDER]

The wheels are built from the sdist, without a network. zig's C compiler builds the native core for both processors and
for the C library of manylinux_2_28, whatever the machine has. auditwheel checks the result.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from build_backend import build_sdist

ROOT = Path(__file__).parents[1]
PROCESSORS = ("x86_64", "aarch64")
GLIBC = "2.28"
"""The oldest C library on which torch runs, too."""


def main(folder: Path) -> None:
    """Build everything into `folder`."""
    os.chdir(ROOT)
    folder.mkdir(parents=True, exist_ok=True)
    sdist = folder / build_sdist(str(folder))
    made = [
        sdist,
        pure_wheel(sdist, folder),
        *(wheel_for(processor, sdist, folder) for processor in PROCESSORS),
    ]
    print("built:", *(f"  {path.name}  {path.stat().st_size / 1000:.0f} kB" for path in made), sep="\n")


def pure_wheel(sdist: Path, folder: Path) -> Path:
    """Build the wheel without the native core."""
    return pip_wheel(sdist, folder, {}, "wheel.cmake=false")


def wheel_for(processor: str, sdist: Path, folder: Path) -> Path:
    """Build the wheel for Linux on one processor. Check that manylinux_2_28 has all that it asks for."""
    platform = f"manylinux_{GLIBC.replace('.', '_')}_{processor}"
    variables = {
        "CC": f"{sys.executable} -m ziglang cc -target {processor}-linux-gnu.{GLIBC}",
        "LDFLAGS": "-s",  # not CMake's `strip`, which knows this machine's processor only
    }
    wheel = pip_wheel(sdist, folder, variables, f"wheel.tags=py3-none-{platform}", "install.strip=false")
    # Not `auditwheel repair`, which knows the tags of this machine's processor only, and would have nothing to repair.
    shown = run([sys.executable, "-m", "auditwheel", "show", str(wheel)], {})
    found = re.search(rf'"manylinux_2_(\d+)_{processor}"', shown)
    if found is None or int(found[1]) > int(GLIBC.split(".")[1]):
        raise SystemExit(f"expected a wheel for {platform}, but auditwheel found:\n{shown}")
    return wheel


def pip_wheel(sdist: Path, folder: Path, variables: dict[str, str], *settings: str) -> Path:
    """Build a wheel from the sdist with pip."""
    # Without pip's cache, in which a wheel for one processor could be taken for the other's.
    options = ["--verbose", "--no-index", "--no-cache-dir", "--no-deps", "--no-build-isolation"]
    options += [f"--config-settings={setting}" for setting in settings]
    before = set(folder.glob("*.whl"))
    run([sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", str(folder), str(sdist)], variables)
    made = set(folder.glob("*.whl"))
    return (made - before or made).pop()


def run(command: list[str], variables: dict[str, str]) -> str:
    """Run a command, and return its output."""
    environment = {**os.environ, **variables}
    result = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if result.returncode != 0:
        raise SystemExit(f"{result.stdout}\n{command} failed with exit code {result.returncode}")
    return result.stdout


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "dist").absolute())
