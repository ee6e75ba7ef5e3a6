"""The native library under the sanitizers, by the stress programs; and compiled with nothing to warn of."""

from __future__ import annotations

import os
import shutil
import subprocess
from itertools import product
from pathlib import Path

import pytest

import hangs

pytestmark = pytest.mark.real

HERE = Path(__file__).parent
CORE = HERE.parents[1] / "src/syncline/native/core.c"
CODEC = CORE.with_name("codec.c")
FACTORS = CORE.with_name("factors.c")
COMPILERS = ("gcc", "clang")
MAX_RANKS = 5
COMMON = ("-std=c11", "-g", "-O1", "-ffp-contract=off", "-pthread")
THREADS = ("-fsanitize=thread",)
MEMORY = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
CROSS, EMULATOR, CROSS_ROOT = "aarch64-linux-gnu-gcc", "qemu-aarch64", "/usr/aarch64-linux-gnu"


def compiler_with(flags: tuple[str, ...], folder: Path) -> str:
    """A compiler whose programs run with these flags; skips where there is none."""
    source, program = folder / "empty.c", folder / "empty"
    source.write_text("int main(void) { return 0; }\n")
    for compiler in COMPILERS:
        if shutil.which(compiler) is None:
            continue
        command = [compiler, *COMMON, *flags, str(source), "-o", str(program)]
        if any(subprocess.run(each, capture_output=True).returncode for each in (command, [str(program)])):
            continue
        return compiler
    pytest.skip(f"no compiler here runs programs with {' '.join(flags) or 'no flags'}")


def built(compiler: str, flags: tuple[str, ...], folder: Path, core: Path = CORE) -> Path:
    """The stress program: the core, compiled once and copied for each rank, and the driver."""
    objcopy = CROSS.replace("gcc", "objcopy") if compiler == CROSS else "objcopy"
    if shutil.which(objcopy) is None:
        pytest.skip(f"no {objcopy}")
    rank, driver, program = folder / "rank0.o", folder / "driver.o", folder / "stress"
    compile_with = [compiler, *COMMON, *flags, "-c", str(HERE / "stress.c")]
    must_run([*compile_with, "-DSTRESS_RANK=0", f'-DCORE="{core}"', "-o", str(rank)])
    must_run([*compile_with, "-o", str(driver)])
    copies = [folder / f"copy{r}.o" for r in range(MAX_RANKS)]
    for r, copy in enumerate(copies):
        rename = [f"--keep-global-symbol=core_of_{r}", f"--redefine-sym=core_of_0=core_of_{r}"]
        must_run([objcopy, *rename, str(rank), str(copy)])
    must_run([compiler, *COMMON, *flags, str(driver), *map(str, copies), "-o", str(program)])
    return program


def must_run(command: list[str]) -> None:
    result = hangs.run(command)
    assert result.returncode == 0, f"{command}: {result.stderr}"


def run(program: Path, num_ranks: int, num_rounds: int, seed: int, *before: str) -> tuple[int, str]:
    command = [*before, str(program), str(num_ranks), str(num_rounds), str(seed)]
    environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1"}
    result = hangs.run(command, env=environment)
    return result.returncode, result.stdout + result.stderr


def assert_all_right(program: Path, num_rounds: int, *before: str) -> None:
    for num_ranks in (2, 3, 5):
        code, output = run(program, num_ranks, num_rounds, num_ranks, *before)
        assert (code, output) == (0, "all right\n"), f"{num_ranks} ranks, seed {num_ranks}:\n{output[:5000]}"


def test_no_data_race(tmp_path: Path) -> None:
    compiler = compiler_with(THREADS, tmp_path)
    # GCC warns that the thread sanitizer knows no fences; none of ours orders plain data.
    assert_all_right(built(compiler, (*THREADS, *quiet(compiler)), tmp_path), 40)


def test_no_memory_error_leak_or_undefined_behaviour(tmp_path: Path) -> None:
    assert_all_right(built(compiler_with(MEMORY, tmp_path), MEMORY, tmp_path), 60)


@pytest.mark.parametrize("flags", [THREADS, MEMORY], ids=["threads", "memory"])
def test_the_codec_has_no_race_memory_error_or_undefined_behaviour(
    flags: tuple[str, ...], tmp_path: Path
) -> None:
    compiler = compiler_with(flags, tmp_path)
    assert_codec_all_right(built_codec(compiler, flags, tmp_path), 40)


def test_a_codec_that_writes_behind_its_end_would_be_found(tmp_path: Path) -> None:
    for header in CODEC.parent.glob("*.h"):
        shutil.copy(header, tmp_path)
    kernels, before, after = (
        tmp_path / "encode.h",
        "if (n < size) memcpy(q->lost + start, lost, n *",
        "size *",
    )
    text = kernels.read_text()
    assert text.count(before) == 1
    kernels.write_text(text.replace(before, before.replace("n *", after)))
    mutant = shutil.copy(CODEC, tmp_path)
    program = built_codec(compiler_with(MEMORY, tmp_path), MEMORY, tmp_path, mutant)
    result = hangs.run([str(program), "1", "9"])
    assert "heap-buffer-overflow" in result.stderr


def built_codec(compiler: str, flags: tuple[str, ...], folder: Path, codec: Path = CODEC) -> Path:
    """The program that calls every function of the codec."""
    program, source = folder / "codec_stress", str(HERE / "codec_stress.c")
    must_run([compiler, *COMMON, *flags, f'-DCODEC="{codec}"', source, "-lm", "-o", str(program)])
    return program


def assert_codec_all_right(program: Path, num_rounds: int, *before: str) -> None:
    for seed in ("1", "2"):
        command = [*before, str(program), seed, str(num_rounds)]
        result = hangs.run(command)
        assert (result.returncode, result.stdout) == (0, "all right\n"), result.stdout + result.stderr


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(
            "atomic_fetch_add(count, 1) + 1 == all",
            "atomic_fetch_add_explicit(count, 1, memory_order_relaxed) + 1 == all",
            id="what a rank has filled is not released",
        ),
        pytest.param(
            "atomic_fetch_add(&slot->done, 1)",
            "atomic_fetch_add_explicit(&slot->done, 1, memory_order_relaxed)",
            id="reduced pieces are not released",
        ),
        pytest.param(
            "atomic_store(&channel->sent, at + 1)",
            "atomic_store_explicit(&channel->sent, at + 1, memory_order_relaxed)",
            id="messages are not released",
        ),
    ],
)
def test_a_missing_release_would_be_found(tmp_path: Path, before: str, after: str) -> None:
    compiler = compiler_with(THREADS, tmp_path)
    text = CORE.read_text()
    assert text.count(before) == 1
    mutant = tmp_path / "core.c"
    mutant.write_text(text.replace(before, after))
    for header in CORE.parent.glob("*.h"):
        shutil.copy(header, tmp_path)
    program = built(compiler, (*THREADS, *quiet(compiler)), tmp_path, mutant)
    for seed in range(1, 9):  # a race is found where the threads happen to meet in it
        code, output = run(program, 3, 100, seed)
        if code != 0:
            break
    assert code != 0
    assert "data race" in output


def quiet(compiler: str) -> tuple[str, ...]:
    return ("-Wno-tsan",) if compiler == "gcc" else ()


def test_on_another_processor(tmp_path: Path) -> None:
    """Compiled for aarch64 and emulated: the code, not the processor's memory order, is what this shows."""
    if shutil.which(CROSS) is None or shutil.which(EMULATOR) is None:
        pytest.skip(f"no {CROSS}, or no {EMULATOR}")
    assert_all_right(built(CROSS, (), tmp_path), 20, EMULATOR, "-L", CROSS_ROOT)
    assert_codec_all_right(built_codec(CROSS, (), tmp_path), 9, EMULATOR, "-L", CROSS_ROOT)


def test_nothing_to_warn_of(tmp_path: Path) -> None:
    warnings = ["-Wall", "-Wextra", "-Wpedantic", "-Werror"]
    compilers = [compiler for compiler in (*COMPILERS, CROSS) if shutil.which(compiler)]
    assert compilers, "no compiler is here"
    for compiler, optimization, source in product(compilers, ("-O0", "-O3"), (CORE, CODEC, FACTORS)):
        flags = ["-std=c11", optimization, *warnings, "-ffp-contract=off", "-fPIC"]
        must_run([compiler, *flags, "-c", str(source), "-o", str(tmp_path / "object.o")])
