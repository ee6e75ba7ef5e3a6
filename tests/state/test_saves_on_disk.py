"""Saves on a shelf: whatever crashes, tears, flips or runs full, what was committed comes back, and nothing else."""

from __future__ import annotations

import itertools
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from faulty_files import Crash, FaultyFiles, Meanwhile
from hypothesis import given, settings
from hypothesis import strategies as st

from support.cases import case
from support.values import exact
from syncline import CheckpointCorrupt
from syncline.checkpoint.directory import (
    VERSION,
    Manifest,
    Save,
    SaveDirectory,
    parse_name,
    read_manifest,
    write_manifest,
)
from syncline.checkpoint.encoding import decode, encode
from syncline.checkpoint.files import Files, memory_of, read_files, read_tensors, write_tensors

KEEP = 2


def state_at(step: int) -> dict[str, Any]:
    g = torch.Generator().manual_seed(step)
    return {
        "weight": torch.randn(3, 5, generator=g),
        "flag": torch.tensor([True, False, True]),
        "half": torch.randn(3, generator=g).bfloat16(),
        "nothing": torch.empty(0, 4),
        "step": step,
        "betas": (0.9, float("inf")),
        "groups": {0: [step, None, "text"]},
    }


def write(files: Files, path: str, step: int) -> Manifest:
    """Write all but the manifest."""
    tree, tensors = encode(state_at(step), "state")
    stored = write_tensors(files, f"{path}/shared.safetensors", tensors)
    return Manifest(step=step, num_ranks=1, shared=tree, ranks=[{}], files={"shared.safetensors": stored})


def save(files: Files, shelf: SaveDirectory, step: int) -> Save:
    path = shelf.begin(step)
    try:
        one = shelf.commit(path, write(files, path, step))
    except OSError:
        files.remove(path)
        raise
    shelf.prune()
    return one


def load(files: Files, path: str) -> tuple[int, Any]:
    manifest = read_manifest(files, path)
    wanted = {name: stored.tensors for name, stored in manifest.files.items()}
    (tensors,) = read_files(files, path, manifest.files, wanted).values()
    return manifest.step, decode(manifest.shared, tensors)


def assert_holds(found: tuple[int, Any], step: int) -> None:
    """It is the save of that step, and complete."""
    assert found[0] == step
    assert exact(found[1]) == exact(state_at(step))


@settings(max_examples=250, deadline=None)
@given(st.data())
@pytest.mark.real
def test_whenever_it_crashes_the_last_committed_save_is_there_and_nothing_is_half(
    data: st.DataObject,
) -> None:
    files = FaultyFiles()
    committed: list[int] = []
    step = 0
    for _ in range(data.draw(st.integers(1, 3))):  # lives of the machine
        shelf = SaveDirectory(files, "runs/one", KEEP)
        files.crash_at = files.num_done + data.draw(st.integers(0, 80))
        begun = step
        try:
            while True:
                begun = step + 1
                save(files, shelf, begun)
                step = begun
                committed.append(step)
        except Crash:
            files = files.after_crash(data.draw(st.integers(0, 10**6)))
        shelf = SaveDirectory(files, "runs/one", KEEP)
        for one in shelf.saves():
            assert_holds(load(files, shelf.path_of(one)), one.step)  # what bears a name is complete
        steps = [one.step for one in shelf.saves()]
        assert steps == sorted(steps, reverse=True)
        if begun in steps and begun not in committed:
            committed.append(begun)  # it was, but nobody was told
        assert set(committed[-KEEP:]) <= set(steps) <= set(committed)
        step = max([step, *steps])


@settings(max_examples=1500, deadline=None)
@given(st.data())
def test_no_damage_is_taken_for_what_was_saved(data: st.DataObject) -> None:
    files = FaultyFiles()
    shelf = SaveDirectory(files, "runs", KEEP)
    for step in (1, 2):
        save(files, shelf, step)
    newest, older = shelf.saves()
    path = data.draw(st.sampled_from(files.paths(shelf.path_of(newest))))
    length = len(files.read(path))
    if data.draw(st.booleans()):
        files.damage(path, data.draw(st.integers(0, length - 1)), data.draw(st.integers(1, 255)))
    elif data.draw(st.booleans()):
        files.cut(path, data.draw(st.integers(0, length - 1)))
    else:
        files.remove(path)
    with pytest.raises((CheckpointCorrupt, FileNotFoundError), match=path):
        load(files, shelf.path_of(newest))
    assert_holds(load(files, shelf.path_of(older)), 1)


def test_a_full_disk_keeps_what_there_is() -> None:
    for room in range(61):
        files = FaultyFiles()
        shelf = SaveDirectory(files, "runs", KEEP)
        save(files, shelf, 1)
        files.full_at = files.num_done + room
        last = 1
        with case("room for", room):
            with pytest.raises(OSError, match="No space"):
                while True:
                    save(files, shelf, last + 1)
                    last += 1
            assert_holds(load(files, shelf.path_of(shelf.saves()[0])), last)
            assert [name for name in files.names("runs") if parse_name(name) is None] == []
            files.full_at = None
            save(files, shelf, last + 1)
            assert [one.step for one in shelf.saves()] == [last + 1, last]


def test_saves_are_in_the_order_of_saving_whatever_their_steps_are() -> None:
    files = FaultyFiles()
    shelf = SaveDirectory(files, "runs", 3)
    for step in (5, 20, 10):
        save(files, shelf, step)
    assert [one.step for one in shelf.saves()] == [10, 20, 5]
    assert shelf.saves()[0].name == "save-000003-step-10"
    save(files, shelf, 11)
    assert [one.step for one in shelf.saves()] == [11, 10, 20]


def test_what_is_damaged_or_incomplete_does_not_count_as_kept() -> None:
    files = FaultyFiles()
    shelf = SaveDirectory(files, "runs", 2)
    for step in range(4):
        path = shelf.begin(step)
        shelf.commit(path, write(files, path, step))
    newest, second, third, oldest = shelf.saves()
    assert shelf.prune(damaged=[second]) == [oldest]
    assert shelf.saves() == [newest, second, third]
    assert shelf.prune() == [third]
    shelf = SaveDirectory(files, "others", 1)
    sound = save(files, shelf, 1)
    for step, lost in ((2, "manifest.json"), (3, "shared.safetensors")):  # as other programs may leave them
        path = shelf.path_of(Save(step, step))
        files.make_directory(path)
        write_manifest(files, path, write(files, path, step))
        files.remove(f"{path}/{lost}")
    assert shelf.prune() == []
    assert_holds(load(files, shelf.path_of(sound)), 1)


def test_two_runs_in_one_directory_leave_only_complete_saves() -> None:
    """Whatever one run is doing when the other saves, nothing that counts as a save is incomplete."""

    def beside(at: int, keep: int, *, takes_over: bool) -> bool:
        """Save while the other does at this operation of ours; return whether there was such an operation.

        `takes_over`: the other run begins meanwhile, and takes what it finds for what a crash has left.
        """
        files = FaultyFiles()
        other = SaveDirectory(files, "runs", keep)
        save(files, other, 1)

        def other_saves() -> None:
            if takes_over:
                other.look_for_leftovers()
            save(files, other, 2)

        ours = Meanwhile(files, at, other_saves)
        shelf = SaveDirectory(ours, "runs", keep)
        is_refused = False
        try:
            save(ours, shelf, 2)
        except (OSError, CheckpointCorrupt):
            is_refused = True
        saves = other.saves()
        assert 1 <= len(saves) <= keep + 1
        for one in saves:
            assert_holds(load(files, other.path_of(one)), one.step)
        assert takes_over or not is_refused
        assert saves[0].step == 2
        has_happened = ours.has_happened
        save(files, shelf, 3)
        assert [one.step for one in shelf.saves()] == [3, 2][:keep]
        return has_happened

    for keep, takes_over in itertools.product((1, 2), (False, True)):
        at = 0
        with case(keep, takes_over):
            while beside(at, keep, takes_over=takes_over):
                at += 1
        assert at > 14


def test_a_save_that_lost_a_file_is_not_committed() -> None:
    files = FaultyFiles()
    shelf = SaveDirectory(files, "runs", KEEP)
    for lost in ("cut", "remove"):
        path = shelf.begin(1)
        manifest = write(files, path, 1)
        if lost == "cut":
            files.cut(f"{path}/shared.safetensors", 9)
        else:
            files.remove(f"{path}/shared.safetensors")
        with pytest.raises(CheckpointCorrupt, match=r"shared\.safetensors is"):
            shelf.commit(path, manifest)
    assert shelf.saves() == []


def test_leftovers_of_a_crash_are_removed_and_what_another_run_writes_is_not() -> None:
    files = FaultyFiles()
    before = SaveDirectory(files, "runs", KEEP).begin(1)
    shelf = SaveDirectory(files, "runs", KEEP)
    shelf.look_for_leftovers()
    beside = SaveDirectory(files, "runs", KEEP).begin(1)
    own = shelf.begin(1)
    names = files.names("runs")
    assert before.rpartition("/")[2] not in names
    assert {beside.rpartition("/")[2], own.rpartition("/")[2]} == set(names)


def test_a_directory_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "save-1").write_text("")
    shelf = SaveDirectory(Files(), str(tmp_path), 1)
    for step in (1, 2):
        save(Files(), shelf, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", "save-000002-step-2", "save-1"]


def test_files_are_those_that_safetensors_reads(tmp_path: Path) -> None:
    tensors = {
        "flags": torch.tensor([True, False, True]),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "half": torch.randn(3).bfloat16(),
        "empty": torch.empty(0, 3),
        "wide": torch.arange(6, dtype=torch.int64).view(2, 3),
        'ünïcode "name"': torch.randn(2, 2),
        "tiny": torch.randn(4).to(torch.float8_e4m3fn),
    }
    stored = write_tensors(Files(), str(tmp_path / "x.safetensors"), tensors)
    theirs = safetensors.torch.load_file(tmp_path / "x.safetensors")
    ours = read_tensors(Files().map(str(tmp_path / "x.safetensors")), "x.safetensors", stored, tensors)
    assert theirs.keys() == ours.keys() == tensors.keys()
    for name, tensor in tensors.items():
        for other in (theirs[name], ours[name]):
            assert other.dtype == tensor.dtype
            assert torch.equal(other.float(), tensor.float())


def test_a_later_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("syncline.checkpoint.directory.VERSION", VERSION + 1)
    write_manifest(Files(), str(tmp_path), write(Files(), str(tmp_path), 1))
    monkeypatch.undo()
    text = rf"has format version {VERSION + 1} .* reads only versions up to {VERSION}"
    with pytest.raises(CheckpointCorrupt, match=text):
        load(Files(), str(tmp_path))


def test_the_manifest_is_there_to_be_read(tmp_path: Path) -> None:
    write_manifest(Files(), str(tmp_path), write(Files(), str(tmp_path), 3))
    text, _, checksum = (tmp_path / "manifest.json").read_text().rstrip("\n").rpartition("\n")
    body = json.loads(text)
    assert (body["format"], body["version"], body["step"]) == ("syncline checkpoint", VERSION, 3)
    assert body["shared"]["weight"] == {"$tensor": "state.weight"}
    assert len(checksum) == 32


def test_the_bytes_of_a_tensor_keep_it_where_it_is() -> None:
    # A copy that nobody else has, such as that of a channels_last weight: its memory was given back, and then read.
    copy = torch.ones(2, 3).t().contiguous()
    seen = weakref.ref(copy)
    memory = memory_of(copy)
    del copy
    assert seen() is not None
    del memory
    assert seen() is None
