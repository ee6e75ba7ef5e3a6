"""Checkpoints that others have written so that they cost much: each is refused before the work, and by name."""

from __future__ import annotations

import json
import os
import pickle
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_malformed import (
    HEADER,
    NEWEST,
    SAVED,
    assert_falls_back,
    header_of,
    loaded,
    made,
    manifest_of,
    stepped,
    with_header,
    with_manifest,
)

from support.cases import case
from syncline import Checkpointer, SynclineError, TrainState
from syncline.checkpoint.encoding import decode
from syncline.checkpoint.files import MAX_READ_BYTES
from syncline.tools.cli import main


def dumped(value: Any) -> bytes:
    return json.dumps(value).encode()


def test_a_shape_of_many_factors_is_not_multiplied() -> None:
    files = SAVED.copy()
    header = header_of(files)
    header[next(iter(header))]["shape"] = [2**62] * 400_000
    with_header(files, dumped(header))
    assert "list of at most 64 sizes" in assert_falls_back(files, HEADER)


def test_a_part_of_a_tensor_of_many_factors_is_not_multiplied() -> None:
    part = {"values": {"$tensor": "x"}, "start": 0, "shape": [2**62] * 400_000, "order": [0]}
    with pytest.raises(ValueError, match="describe a part of one tensor"):
        decode({"$part": part}, {"x": torch.ones(1)})


def test_many_ranks_with_many_objects_are_not_combined() -> None:
    files = SAVED.copy()
    manifest = manifest_of(files)
    manifest["shared"] |= {f"object {number}": 0 for number in range(200)}
    manifest["ranks"], manifest["num_ranks"] = [manifest["ranks"][0]] * 50_000, 50_000
    with_manifest(files, dumped(manifest))
    assert "objects of all ranks" in assert_falls_back(files, "manifest")


def test_a_name_that_comes_twice_among_many_is_found_at_once() -> None:
    files = SAVED.copy()
    text = b"{" + b",".join(b'"%d":0' % number for number in range(300_000)) + b',"299999":1}'
    with_manifest(files, text)
    assert "to be unique, found '299999' twice" in assert_falls_back(files, "manifest")


def test_a_manifest_that_is_a_hole_is_not_read(tmp_path: Path) -> None:
    _, newest = stepped(tmp_path, 1, 2)
    os.truncate(newest / "manifest.json", 4 * MAX_READ_BYTES)
    step, warned = loaded(tmp_path)
    assert step == 1
    assert "expected a file of at most" in warned[0]


def test_a_file_of_the_kernel_is_read_no_further_than_its_size(tmp_path: Path) -> None:
    for name in ("manifest.json", HEADER):
        _, newest = stepped(tmp_path / name, 1, 2)
        (newest / name).unlink()
        (newest / name).symlink_to("/proc/kmsg" if os.access("/proc/kmsg", os.R_OK) else "/proc/self/status")
        assert loaded(tmp_path / name)[0] == 1, name


def test_what_a_terminal_could_obey_is_shown_as_text() -> None:
    files = SAVED.copy()
    first, *_ = header = header_of(files)
    with_header(files, dumped({name + "\x1b[2J\r" * (name == first): one for name, one in header.items()}))
    shown = assert_falls_back(files, HEADER)
    assert "\x1b" not in shown
    assert "\\x1b[2J" in shown
    manifest = manifest_of(files := SAVED.copy())
    manifest["classes"]["optimizer"] = "Adam\x1b[2JW"
    with_manifest(files, dumped(manifest))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Checkpointer("/runs", files=files).load(made())
    assert [str(one.message) for one in caught if "state of a Adam\\x1b[2JW" in str(one.message)]


HARMFUL = [b"1" * 5000, b"[" * 5000, b"\x1b[2J", b'"', b"-", b"1e999", b"\x00", b"NaN"]


def mutated(rng: random.Random, content: bytes) -> bytes:
    """Change some bytes, cut, or repeat a part."""
    found = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(found) + 1)
        how = rng.random()
        if how < 0.4 and at < len(found):
            found[at] = rng.randrange(256)
        elif how < 0.6:
            found[at:at] = rng.choice(HARMFUL)
        elif how < 0.8:
            del found[at : at + rng.randrange(40)]
        else:
            found[at:at] = found[at : at + rng.randrange(200)]
    return bytes(found)


def load_mutated(seed: int) -> None:
    rng, files = random.Random(seed), SAVED.copy()
    text = files.read(f"{NEWEST}/manifest.json").removesuffix(b"\n").rpartition(b"\n")[0]
    if rng.random() < 0.5:
        with_manifest(files, mutated(rng, text))
    else:
        with_header(files, mutated(rng, dumped(header_of(files))))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            assert Checkpointer("/runs", files=files).load(made(5)) in (1, 2)
        except (ValueError, TypeError, SynclineError) as error:
            said = str(error)
            assert "load_state_dict() of" in said or "Use the same names" in said
            assert "all are damaged" not in said
    for one in caught:
        assert all(letter.isprintable() or letter == "\n" for letter in str(one.message))


def test_whatever_bytes_a_save_has_the_one_before_is_loaded_or_the_object_refuses_it() -> None:
    for seed in range(60):
        with case("seed", seed):
            load_mutated(seed)


# ---------------------------------------------------------------------- files of torch


TORCH_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "of the kernel": (lambda path: path.symlink_to("/proc/self/status"), "it is empty"),
    "a FIFO": (lambda path: os.mkfifo(path), "expected a regular file, found a FIFO"),
    "deep": (
        lambda path: path.write_bytes(b"\x80\x02" + b"]" * 10**6 + b"a" * (10**6 - 1) + b"."),
        "cannot be read",
    ),
}


def test_a_file_that_torch_has_not_written_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    for kind, (make, words) in TORCH_FILES.items():
        make(tmp_path / kind)
        with case(kind), pytest.raises((ValueError, SynclineError), match=words):
            TrainState(model=torch.nn.Linear(1, 1)).load_torch(tmp_path / kind, strict=False)


# ---------------------------------------------------------------------- figures


def test_a_file_of_figures_that_makes_no_sense_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "machine.json"
    one = b'{"syncline machine": 1}'
    for content in (b"", b"[" * 100_000, b"NaN", b"{}", one, pickle.dumps({}), b"5", b"\xff\xfe"):
        path.write_bytes(content)
        with case(content[:30]):
            assert main(["plan", "--parameters", "1e6", "--hosts", "2", "--machine", str(path)]) == 2
            assert len(capsys.readouterr().err.splitlines()) <= 3
