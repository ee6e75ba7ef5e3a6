"""What an installation holds: wheels built with a compiler from this tree, and without one from the sdist; and where
the core is found."""

from __future__ import annotations

import ctypes
import importlib
import os
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType

import pytest

import hangs
import syncline as sl
from syncline.native import find_library, loading

ROOT = Path(__file__).parents[2]
LIBRARY = "syncline/native/libsyncline_core.so"


def is_installed(name: str) -> bool:
    # Not find_spec("pip"): setuptools, where it is installed, warns of that.
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def has_tool(name: str) -> bool:
    return shutil.which(name) is not None or is_installed(name)


MISSING = [
    *(name for name in ("pip", "scikit-build-core") if not is_installed(name)),
    *(name for name in ("cmake", "ninja", "cc") if not has_tool(name)),
]
builds = pytest.mark.skipif(
    not sys.platform.startswith("linux") or bool(MISSING), reason=f"needs Linux and {', '.join(MISSING)}"
)


def build_wheel(folder: Path, compiler: str, source: Path = ROOT) -> tuple[Path, str]:
    """The wheel of this tree, and everything that was printed while it was built; nothing is downloaded."""
    options = ("--verbose", "--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check")
    result = hangs.run(
        [sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", str(folder), str(source)],
        env={**os.environ, "CC": compiler},
        stderr=subprocess.STDOUT,
    )
    assert result.returncode == 0, result.stdout
    [wheel] = folder.glob("*.whl")
    return wheel, result.stdout


def lines_about_pure_python(output: str) -> int:
    return sum("pure Python, without its native core" in line for line in output.splitlines())


@pytest.mark.real
@builds
def test_a_wheel_built_with_a_compiler_holds_the_core(tmp_path: Path) -> None:
    wheel, output = build_wheel(tmp_path, "cc")
    assert lines_about_pure_python(output) == 0, output
    assert "-py3-none-linux_" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if name.endswith((".c", ".h"))]
        ctypes.CDLL(archive.extract(LIBRARY, tmp_path))


@pytest.mark.real
@builds
@pytest.mark.parametrize("compiler", ["false", "no-such-compiler"])
def test_an_sdist_built_with_a_broken_compiler_is_pure_python_and_says_so(
    compiler: str, backend: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    sdist = tmp_path / backend.build_sdist(str(tmp_path))
    wheel, output = build_wheel(tmp_path, compiler, sdist)
    assert lines_about_pure_python(output) == 1, output
    assert f"the C compiler {compiler!r} (CC)" in output
    assert "CMake" not in output, "a compiler that fails is not even shown to CMake"
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert LIBRARY not in archive.namelist()


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("scikit_build_core")
    monkeypatch.syspath_prepend(ROOT / "tools")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return importlib.import_module("build_backend")


@pytest.mark.parametrize(
    ("compiler", "seconds", "expected"),
    [
        ("false", 30, "does not compile an empty program: exit code 1"),
        ("true", 30, "does not compile an empty program: exit code 0"),
        ("no-such-compiler", 30, "cannot be started: "),
        ("an 'open quote", 30, "cannot be started: No closing quotation"),
        ("sh -c 'exec sleep 600'", 0.1, "did not end within 0.1 s"),
    ],
)
def test_a_bad_compiler_is_found_at_once(
    compiler: str, seconds: float, expected: str, backend: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setattr(backend, "_COMPILER_SECONDS", seconds)
    assert expected in backend._fault_of_compiler()
    monkeypatch.chdir(ROOT)
    assert not [need for need in backend.get_requires_for_build_wheel() if "cmake" in need or "ninja" in need]


@pytest.mark.skipif(not has_tool("cc"), reason="needs a C compiler")
def test_a_good_compiler_is_left_to_cmake(backend: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    for compiler in ("cc", ""):
        monkeypatch.setenv("CC", compiler)
        assert backend._fault_of_compiler() is None


# ---------------------------------------------------------------------- the version and what names it


def test_the_version_is_the_same_everywhere() -> None:
    assert f"\nversion: {sl.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## [{sl.__version__}] - " in (ROOT / "CHANGELOG.md").read_text()


# ---------------------------------------------------------------------- where the library is found


@pytest.fixture
def source_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in which loading.py believes to lie."""
    folder = tmp_path / "source"
    folder.mkdir()
    monkeypatch.setattr(loading, "__file__", str(folder / "loading.py"))
    return folder


@pytest.fixture
def site_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder into which syncline is installed, with the library in its list of files."""
    site = tmp_path / "site-packages"
    metadata = site / "syncline-9.9.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: syncline\nVersion: 9.9\n")
    (metadata / "RECORD").write_text(f"syncline-9.9.dist-info/METADATA,,\n{LIBRARY},,\n")
    monkeypatch.syspath_prepend(site)
    return site


def test_the_library_beside_the_module_comes_first(source_folder: Path, site_packages: Path) -> None:
    for path in (source_folder / Path(LIBRARY).name, site_packages / LIBRARY):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert find_library() == source_folder / Path(LIBRARY).name


def test_an_editable_install_finds_the_library_in_site_packages(
    source_folder: Path, site_packages: Path
) -> None:
    (site_packages / LIBRARY).parent.mkdir(parents=True)
    (site_packages / LIBRARY).touch()
    assert find_library() == site_packages / LIBRARY


def test_a_library_that_is_listed_but_gone_is_not_found(source_folder: Path, site_packages: Path) -> None:
    assert find_library() is None


def test_a_pure_install_has_no_library(source_folder: Path, site_packages: Path) -> None:
    (site_packages / "syncline-9.9.dist-info" / "RECORD").write_text("syncline-9.9.dist-info/METADATA,,\n")
    assert find_library() is None
