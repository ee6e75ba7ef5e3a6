"""What is published: built by one command, installed into empty environments, and used there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import hangs
from syncline.testing import held_port, variables_of_rank

ROOT = Path(__file__).parents[2]
CORE = "syncline/native/libsyncline_core.so"
EM_X86_64, EM_AARCH64 = 62, 183
"""The processor in the header of an ELF file."""

TOOLS = ("scikit_build_core", "cmake", "ziglang", "auditwheel")
MISSING = [name for name in TOOLS if find_spec(name) is None and shutil.which(name) is None]
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        bool(MISSING) or not sys.platform.startswith("linux"), reason=f"needs Linux and {MISSING}"
    ),
]

STEP = """
import torch, syncline as sl
world = sl.init(device="cpu", timeout=60)
ddp = sl.DistributedDataParallel(torch.nn.Linear(3, 1))
ddp(torch.full((1, 3), 1.0 + world.rank)).sum().backward()
assert ddp.module.weight.grad.tolist() == [[1.5] * 3], ddp.module.weight.grad
print(sl.__version__, sl.__file__, world.size, "ranks:", str(ddp.contract).splitlines()[0])
sl.shutdown()
"""

USE_CORE = """
#include <dlfcn.h>
#include <stdio.h>
#include <stdint.h>
int main(int count, char **arguments) {
    void *core = dlopen(arguments[count - 1], RTLD_NOW);
    if (!core) return fprintf(stderr, "%s\\n", dlerror()), 1;
    const char *(*isa)(int) = (const char *(*)(int))dlsym(core, "syncline_isa");
    int (*reduce)(int, void *, const void *const *, int, size_t, int, int) =
        (int (*)(int, void *, const void *const *, int, size_t, int, int))dlsym(core, "syncline_reduce");
    float a[5000], b[5000], sum[5000];
    for (int i = 0; i < 5000; i++) a[i] = i, b[i] = 2 * i;
    const void *sources[] = {a, b};
    if (reduce(0, sum, sources, 2, 5000, 0, 0)) return 2;
    for (int i = 0; i < 5000; i++) if (sum[i] != 3.0f * i) return 3;
    return puts(isa(0)) < 0;
}
"""


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, str(ROOT / "tools/wheels.py"), str(folder)]
    result = hangs.run(command, timeout_seconds=600)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


def only(dist: Path, pattern: str) -> Path:
    [found] = dist.glob(pattern)
    return found


def core_of(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if name.endswith((".c", ".h"))]
        return Path(archive.extract(CORE, folder))


def run_installed(wheel: Path, folder: Path) -> list[str]:
    """Install a wheel into an empty environment, which sees this one's torch. Return what two ranks print there."""
    venv.create(folder, symlinks=True)
    base = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    pip = [sys.executable, "-m", "pip", "--quiet", "install", "--no-index", "--no-deps", "--target", base]
    subprocess.run([*pip, wheel], check=True, timeout=120)
    (base / "torch.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    with held_port() as port:
        ranks = [
            subprocess.Popen(
                [str(folder / "bin/python"), "-c", STEP],
                env={**os.environ, **variables_of_rank(rank, 2, port)},
                cwd=folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(2)
        ]
        outputs = [output for output, _ in hangs.communicate_with_all(ranks)]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    assert all(str(base) in output for output in outputs), outputs
    return outputs


def test_the_x86_64_wheel_trains_over_shared_memory(dist: Path, tmp_path: Path) -> None:
    wheel = only(dist, "*-py3-none-manylinux_2_28_x86_64.whl")
    assert core_of(wheel, tmp_path).read_bytes()[18] == EM_X86_64
    if os.uname().machine != "x86_64":
        pytest.skip("needs an x86-64 processor")
    assert all("transport: shared memory" in output for output in run_installed(wheel, tmp_path / "venv"))


def test_the_pure_wheel_trains_over_gloo(dist: Path, tmp_path: Path) -> None:
    wheel = only(dist, "*-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert CORE not in archive.namelist()
    assert all("transport: gloo" in output for output in run_installed(wheel, tmp_path / "venv"))


def test_the_aarch64_core_adds_in_an_emulator(dist: Path, tmp_path: Path) -> None:
    core = core_of(only(dist, "*-py3-none-manylinux_2_28_aarch64.whl"), tmp_path)
    assert core.read_bytes()[18] == EM_AARCH64
    emulator = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    if emulator is None or not Path("/usr/aarch64-linux-gnu/lib").is_dir():
        pytest.skip("needs qemu-user and the C library of aarch64")
    source, program = tmp_path / "use.c", tmp_path / "use"
    source.write_text(USE_CORE)
    zig = [sys.executable, "-m", "ziglang", "cc", "-target", "aarch64-linux-gnu.2.28"]
    subprocess.run([*zig, str(source), "-o", str(program)], check=True, timeout=300)
    command = [emulator, "-L", "/usr/aarch64-linux-gnu", str(program), str(core)]
    result = hangs.run(command)
    assert (result.returncode, result.stdout) == (0, "baseline\n"), result.stderr


def test_the_sdist_holds_what_a_build_and_a_reader_need(dist: Path) -> None:
    with tarfile.open(only(dist, "*.tar.gz")) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert names >= {"LICENSE", "README.md", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "SECURITY.md"}
    assert names >= {"CMakeLists.txt", "tools/build_backend.py", "src/syncline/native/core.c"}
