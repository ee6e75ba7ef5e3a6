"""Saves of another version, with another name, or that are no files: what is refused is named, and the one before is
loaded.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import pickle
import socket
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty_files import FaultyFiles
from torch import nn

import syncline as sl
from support.cases import case
from syncline import Checkpointer
from syncline.checkpoint.files import checksum
from syncline.tools.cli import main
from syncline.transport import Transport, run_ranks

HEADER = "shared.safetensors"


def made(seed: int = 0) -> sl.TrainState:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, betas=(0.9, 0.99))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0 + seed)
            optimizer.state[parameter] = {
                "step": torch.tensor(1.0),
                "exp_avg": torch.full_like(parameter, seed),
                "exp_avg_sq": torch.full_like(parameter, seed),
            }
    sampler = sl.DistributedSampler(range(20), 1, 0)
    return sl.TrainState(model=model, optimizer=optimizer, sampler=sampler)


def saved_twice() -> FaultyFiles:
    """Steps 1 and 2, each of a state of its own."""
    files = FaultyFiles()
    checkpointer = Checkpointer("/runs", files=files)
    for step in (1, 2):
        checkpointer.save(made(step), step=step)
    return files


SAVED = saved_twice()
NEWEST = "/runs/save-000002-step-2"


def replaced(files: FaultyFiles, name: str, content: bytes) -> None:
    files.remove(f"{NEWEST}/{name}")
    files.write(f"{NEWEST}/{name}", [content])


def manifest_of(files: FaultyFiles) -> dict[str, Any]:
    text = files.read(f"{NEWEST}/manifest.json").removesuffix(b"\n").rpartition(b"\n")[0]
    found: dict[str, Any] = json.loads(text)
    return found


def with_manifest(files: FaultyFiles, text: bytes) -> None:
    """Put it there with its checksum."""
    replaced(files, "manifest.json", text + b"\n" + checksum(text).encode() + b"\n")


def with_header(files: FaultyFiles, text: bytes) -> None:
    """Put it there with its checksum, and that into the manifest."""
    content = files.read(f"{NEWEST}/{HEADER}")
    tensors = content[8 + int.from_bytes(content[:8], "little") :]
    head = len(text).to_bytes(8, "little") + text
    replaced(files, HEADER, head + tensors)
    manifest = manifest_of(files)
    manifest["files"][HEADER] |= {"header": checksum(head), "num_bytes": len(head) + len(tensors)}
    with_manifest(files, json.dumps(manifest).encode())


def header_of(files: FaultyFiles) -> dict[str, Any]:
    content = files.read(f"{NEWEST}/{HEADER}")
    found: dict[str, Any] = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return found


def assert_falls_back(files: FaultyFiles, name: str) -> str:
    state = made()
    with pytest.warns(RuntimeWarning, match=f"(?s)damaged saves were skipped.*{name}") as warned:
        assert Checkpointer("/runs", files=files).load(state) == 1
    assert_is_of(1, state)
    return str(warned[0].message)


def assert_is_of(seed: int, state: sl.TrainState) -> None:
    for parameter in state.named["model"].parameters():
        assert (parameter == 1.0 + seed).all()
        assert (state.named["optimizer"].state[parameter]["exp_avg"] == seed).all()


MANIFESTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "another format": lambda body: body.update(format="notes"),
    "no step": lambda body: body.pop("step"),
    "no random state": lambda body: (body["shared"].pop("rng", 0), body["ranks"][0].pop("rng", 0)),
    "of another Python": lambda body: body["shared"]["rng"]["python"]["$tuple"].__setitem__(0, 4),
    "a tag of later": lambda body: body["shared"]["model"].update(weight={"$later": 1}),
    "a device of later": lambda body: body["shared"]["model"].update(weight={"$device": "x:y"}),
    "a file with more": lambda body: body["files"][HEADER].update(more=1),
}


def test_a_save_of_another_version_is_named_and_the_one_before_is_loaded() -> None:
    for kind, edit in MANIFESTS.items():
        files = SAVED.copy()
        manifest = manifest_of(files)
        edit(manifest)
        with_manifest(files, json.dumps(manifest).encode())
        with case(kind):
            assert "is malformed" in assert_falls_back(files, "manifest.json")
    files = SAVED.copy()
    header = header_of(files)
    header["model.bias"]["dtype"] = "F128"
    with_header(files, json.dumps(header).encode())
    assert "is malformed: KeyError: 'F128'" in assert_falls_back(files, HEADER)


# ---------------------------------------------------------------------- other names


def stepped(directory: Path, *steps: int) -> list[Path]:
    checkpointer = sl.Checkpointer(directory)
    return [Path(checkpointer.save(made(step), step=step) or "") for step in steps]


def loaded(directory: Path) -> tuple[int | None, list[str]]:
    state = made()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        step = sl.Checkpointer(directory).load(state)
    assert step == state.step
    assert_is_of(step or 0, state)
    return step, [str(one.message) for one in warned]


def test_a_save_is_of_the_step_that_its_manifest_says(tmp_path: Path) -> None:
    (save,) = stepped(tmp_path, 20)
    save.rename(tmp_path / "save-000001-step-99")
    step, warned = loaded(tmp_path)
    assert step == 20
    assert "save-000001-step-99" in warned[0]
    assert "was save-000001-step-20" in warned[0]


def test_saves_that_were_swapped_are_told_apart_and_the_newest_stays(tmp_path: Path) -> None:
    first, second = stepped(tmp_path, 10, 20)
    first.rename(tmp_path / "aside")
    second.rename(first)
    (tmp_path / "aside").rename(second)
    step, warned = loaded(tmp_path)
    assert (step, len(warned)) == (20, 2)
    newest = sl.Checkpointer(tmp_path, keep=2).save(made(30), step=30)
    Path(newest or "", "manifest.json").write_text("broken")
    assert loaded(tmp_path)[0] == 20


def test_an_old_save_under_a_newer_name_is_no_newer(tmp_path: Path) -> None:
    first, second = stepped(tmp_path, 10, 20)
    first.rename(tmp_path / "save-000007-step-70")
    assert loaded(tmp_path)[0] == 20
    # Nor does one that goes on take a number that was there already.
    second.rename(tmp_path / "save-000001-step-20")
    state = made()
    checkpointer = sl.Checkpointer(tmp_path)
    with pytest.warns(RuntimeWarning, match="was renamed"):
        checkpointer.load(state)
    checkpointer.save(made(30), step=30)
    assert loaded(tmp_path)[0] == 30


def test_a_newest_save_under_an_older_name_is_not_overtaken_by_the_next(tmp_path: Path) -> None:
    *_, newest = stepped(tmp_path, 10, 20, 30)
    for name in os.listdir(tmp_path):
        if name != newest.name:
            (tmp_path / name).rename(tmp_path / f"gone-{name}")
    newest.rename(tmp_path / "save-000001-step-30")
    assert Path(sl.Checkpointer(tmp_path).save(made(40), step=40) or "").name == "save-000004-step-40"
    assert loaded(tmp_path)[0] == 40


# ---------------------------------------------------------------------- no files


def fifo(path: Path) -> None:
    os.mkfifo(path)


def bound_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # its path may be too long for a socket's
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(path.name)
    finally:
        os.chdir(here)


THINGS: dict[str, Callable[[Path], object]] = {
    "a FIFO": fifo,
    "a FIFO behind a link": lambda path: (os.mkfifo(f"{path}-x"), path.symlink_to(f"{path}-x")),
    "a socket": bound_socket,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a directory": lambda path: path.mkdir(),
}


def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    for name, kind in itertools.product(("manifest.json", HEADER), THINGS):
        directory = tmp_path / f"{name} {kind}"
        _, newest = stepped(directory, 1, 2)
        (newest / name).unlink()
        THINGS[kind](newest / name)
        with case(name, kind):
            step, warned = loaded(directory)
            assert step == 1
            found = kind.partition(" behind")[0]
            assert f"expected a regular file, found {found}: '{newest / name}'" in warned[0]
    os.mkfifo(directory / "save-000009-step-9")  # in the place of a save
    assert loaded(directory)[0] == 1


def test_a_file_of_the_kernel_is_read_no_further_than_its_size(tmp_path: Path) -> None:
    for name in ("manifest.json", HEADER):
        _, newest = stepped(tmp_path / name, 1, 2)
        (newest / name).unlink()
        (newest / name).symlink_to("/proc/kmsg" if os.access("/proc/kmsg", os.R_OK) else "/proc/self/status")
        assert loaded(tmp_path / name)[0] == 1, name


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
        with case(kind), pytest.raises((ValueError, sl.SynclineError), match=words):
            sl.TrainState(model=nn.Linear(1, 1)).load_torch(tmp_path / kind, strict=False)


def test_a_file_of_figures_that_makes_no_sense_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "machine.json"
    for content in (b"", b"NaN", b"{}", b'{"syncline machine": 1}', pickle.dumps({}), b"5", b"\xff\xfe"):
        path.write_bytes(content)
        with case(content[:30]):
            assert main(["plan", "--parameters", "1e6", "--hosts", "2", "--machine", str(path)]) == 2
            assert len(capsys.readouterr().err.splitlines()) <= 3


def test_a_file_may_be_linked(tmp_path: Path) -> None:
    (save,) = stepped(tmp_path, 1)
    (save / HEADER).rename(tmp_path / "elsewhere")
    (save / HEADER).symlink_to(tmp_path / "elsewhere")
    assert loaded(tmp_path)[0] == 1


# ---------------------------------------------------------------------- models that are not the same


def test_models_that_differ_are_refused_on_every_rank_and_nothing_is_left(tmp_path: Path) -> None:
    others: dict[str, Callable[[], nn.Module]] = {
        "shape": lambda: nn.Linear(2, 3),
        "type": lambda: nn.Linear(2, 2).double(),
        "name": lambda: nn.Sequential(nn.Linear(2, 2)),
    }

    def program(t: Transport, make: Callable[[], nn.Module]) -> str:
        checkpointer = sl.Checkpointer(tmp_path, group=t)
        state = sl.TrainState(model=make() if t.rank else nn.Linear(2, 2))
        with pytest.raises(sl.errors.ContractMismatch, match=r"weight") as error:
            checkpointer.save(state, step=1)
        with pytest.raises(sl.errors.ContractMismatch):
            checkpointer.save(state, step=1, blocking=False)
        return str(error.value)

    for kind, make in others.items():
        with case(kind):
            assert len(set(run_ranks(2, functools.partial(program, make=make)))) == 1
    assert os.listdir(tmp_path) == []
