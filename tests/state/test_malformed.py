"""Saves whose checksums are right and which make no sense, have another name, or are no files: refused by name.

Somebody, or a program, has edited them and summed them anew. Whatever they say, the one before is loaded.
"""

from __future__ import annotations

import copy
import json
import os
import socket
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty_files import FaultyFiles
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import syncline as sl
from syncline import CheckpointCorrupt, Checkpointer, SynclineError
from syncline.checkpoint.files import checksum
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


DEEP = b'{"a":' * 100_000 + b"1" + b"}" * 100_000
NESTED = b"[" * 400 + b"]" * 400


def edited(change: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any]], bytes]:
    def edit(body: dict[str, Any]) -> bytes:
        change(body)
        return json.dumps(body).encode()

    return edit


MANIFESTS: dict[str, Callable[[dict[str, Any]], bytes]] = {
    "no json": lambda body: b"step 3",
    "no object": lambda body: b"[1]",
    "no text": lambda body: b"\xff\xfe{}",
    "empty": lambda body: b"{}",
    "too deep": lambda body: DEEP,
    "too deep a tree": lambda body: json.dumps(body).encode().replace(b'"step": 2', b'"step": ' + NESTED, 1),
    "nan": lambda body: json.dumps(body).encode().replace(b'"num_ranks": 1', b'"num_ranks": NaN'),
    "infinite": lambda body: json.dumps(body).encode().replace(b'"lr": 0.1', b'"lr": 1e999'),
    "digits": lambda body: json.dumps(body).encode().replace(b'"step": 2', b'"step": ' + b"9" * 5000, 1),
    "twice": lambda body: json.dumps(body).encode().replace(b'"step": 2', b'"step": 2, "step": 2', 1),
    "no step": edited(lambda body: body.pop("step")),
    "another step": edited(lambda body: body.update(step=7)),
    "a huge step": edited(lambda body: (body.update(step=2**70), body["shared"].update(step=2**70))),
    "step of another type": edited(lambda body: body.update(step=True)),
    "a version of another type": edited(lambda body: body.update(version="3")),
    "no ranks": edited(lambda body: body.update(ranks=[], num_ranks=0)),
    "a billion ranks": edited(lambda body: body.update(num_ranks=10**9)),
    "ranks of another type": edited(lambda body: body.update(ranks={"0": {}})),
    "a file outside": edited(lambda body: body["files"].update({"../x": body["files"][HEADER]})),
    "a file of more": edited(lambda body: body["files"][HEADER].update(more=1)),
    "a file of another type": edited(lambda body: body["files"].update({HEADER: 3})),
    "bytes of another type": edited(lambda body: body["files"][HEADER].update(num_bytes="1")),
    "tensors of another type": edited(lambda body: body["files"][HEADER].update(tensors=[1])),
    "sharded of nothing": edited(lambda body: body.update(sharded=["else"])),
    "sharded of another type": edited(lambda body: body.update(sharded=[["model"]])),
    "classes of another type": edited(lambda body: body.update(classes=3)),
    "no step in the state": edited(lambda body: body["shared"].pop("step")),
    "no chance": edited(lambda body: (body["shared"].pop("rng", 0), body["ranks"][0].pop("rng", 0))),
    "a tensor that is not there": edited(
        lambda body: body["shared"]["model"].update(weight={"$tensor": "model.w"})
    ),
    "a tag of nothing": edited(lambda body: body["shared"]["model"].update(weight={"$later": 1})),
    "a tag beside others": edited(
        lambda body: body["shared"]["model"]["weight"].update({"x": 1, "$tuple": []})
    ),
    "a key that cannot be one": edited(lambda body: body["shared"].update(model={"$dict": [[[], 1]]})),
    "pairs of three": edited(lambda body: body["shared"].update(model={"$dict": [[1, 2, 3]]})),
    "a part of nothing": edited(
        lambda body: body["shared"]["model"].update(
            weight={"$part": {"values": {"$tensor": "model.bias"}, "start": 9, "shape": [2], "order": [0]}}
        )
    ),
    "a size below zero": edited(lambda body: body["shared"]["model"].update(weight={"$size": [-1]})),
    "a device of no kind": edited(lambda body: body["shared"]["model"].update(weight={"$device": "x:y"})),
    "complex of ones": edited(
        lambda body: body["shared"]["model"].update(weight={"$complex": "model.weight"})
    ),
}


@pytest.mark.parametrize("kind", MANIFESTS)
def test_a_manifest_that_makes_no_sense_is_named_and_the_one_before_is_loaded(kind: str) -> None:
    files = SAVED.copy()
    with_manifest(files, MANIFESTS[kind](manifest_of(files)))
    text = assert_falls_back(files, "manifest.json")
    assert "is malformed" in text


HEADERS: dict[str, Callable[[dict[str, Any]], bytes]] = {
    "no json": lambda body: b"{",
    "too deep": lambda body: DEEP,
    "twice": lambda body: json.dumps(body).encode().replace(b"{", b'{"model.bias":{},', 1),
    "less": edited(lambda body: body.pop("model.bias")),
    "more": edited(lambda body: body.update(x={"dtype": "U8", "shape": [0], "data_offsets": [0, 0]})),
    "no type": edited(lambda body: body["model.bias"].pop("dtype")),
    "another type": edited(lambda body: body["model.bias"].update(dtype="F128")),
    "a type of another size": edited(lambda body: body["model.bias"].update(dtype="U8")),
    "a type of no kind": edited(lambda body: body["model.bias"].update(dtype=["F32"])),
    "another shape": edited(lambda body: body["model.bias"].update(shape=[3])),
    "a shape below zero": edited(lambda body: body["model.bias"].update(shape=[-1, -2])),
    "a huge shape": edited(lambda body: body["model.bias"].update(shape=[2**62, 4])),
    "a huge shape of nothing": edited(lambda body: body["model.bias"].update(shape=[0, 2**62, 2**62])),
    "fractions": edited(lambda body: body["model.bias"].update(shape=[2.0])),
    "overlapping": edited(
        lambda body: body["model.bias"].update(data_offsets=body["model.weight"]["data_offsets"][:])
    ),
    "beyond the end": edited(lambda body: body["model.bias"].update(data_offsets=[10**6, 10**6 + 8])),
    "one offset": edited(lambda body: body["model.bias"].update(data_offsets=[0])),
    "no object": edited(lambda body: body.update({"model.bias": 3})),
}


@pytest.mark.parametrize("kind", HEADERS)
def test_a_header_that_makes_no_sense_is_named_and_the_one_before_is_loaded(kind: str) -> None:
    files = SAVED.copy()
    with_header(files, HEADERS[kind](header_of(files)))
    text = assert_falls_back(files, HEADER)
    assert "is malformed" in text


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.just(2**80),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=4),
    st.sampled_from(["model.weight", "F32", "$tensor", "nan", "torch.float32", "../x"]),
    st.recursive(
        st.just(None),
        lambda one: st.one_of(
            st.lists(one, max_size=2),
            st.dictionaries(
                st.sampled_from(
                    ["$tensor", "$part", "$tuple", "$dict", "$size", "$float", "module", "synchronization"]
                ),
                one,
                max_size=2,
            ),
        ),
        max_leaves=4,
    ),
)


def mutate(data: st.DataObject, body: Any) -> None:
    """Change something in it, anywhere: another value, a name less, more, or moved."""
    at = body
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        if not keys:
            return
        key = data.draw(st.sampled_from(keys))
        if isinstance(at[key], dict | list) and at[key] and data.draw(st.integers(0, 3)):
            at = at[key]
            continue
        how = data.draw(st.sampled_from(["value", "gone", "copied", "wrapped"]))
        if how == "value":
            at[key] = data.draw(VALUES)
        elif how == "gone":
            del at[key]
        elif how == "copied" and isinstance(at, dict):
            at[data.draw(st.text(max_size=3))] = copy.deepcopy(at[key])
        elif how == "copied":
            at.append(copy.deepcopy(at[key]))
        else:
            at[key] = [at[key]] if data.draw(st.booleans()) else {"x": at[key]}
        return


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_whatever_a_save_says_a_load_is_right_or_an_error_and_nothing_is_half_changed(
    data: st.DataObject,
) -> None:
    files = SAVED.copy()
    for _ in range(data.draw(st.integers(1, 2))):
        if data.draw(st.booleans()):
            body = manifest_of(files)
            mutate(data, body)
            with_manifest(files, json.dumps(body).encode())
        elif "files" in manifest_of(files):
            body = header_of(files)
            mutate(data, body)
            try:
                with_header(files, json.dumps(body).encode())
            except (KeyError, TypeError, AttributeError):
                return  # the manifest that this one's checksum belongs into makes no sense any more
    state = made(5)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            step = Checkpointer("/runs", files=files).load(state)
    except CheckpointCorrupt:
        pytest.fail("the save before was sound")
    except Exception as error:
        # An object has refused a state that is well-formed and not its own, by name and with an error of its own type;
        # nothing has changed.
        if not any(words in str(error) for words in ("load_state_dict() of", "Use the same names")):
            raise
        assert state.step == 0
        assert_is_of(5, state)
    else:
        assert step in (1, 2)
        assert step == state.step


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


def test_saves_that_were_swapped_are_told_apart(tmp_path: Path) -> None:
    first, second = stepped(tmp_path, 10, 20)
    first.rename(tmp_path / "aside")
    second.rename(first)
    (tmp_path / "aside").rename(second)
    step, warned = loaded(tmp_path)
    assert step == 20
    assert len(warned) == 2


def test_of_saves_that_were_swapped_the_newest_stays(tmp_path: Path) -> None:
    first, second = stepped(tmp_path, 10, 20)
    first.rename(tmp_path / "aside")
    second.rename(first)
    (tmp_path / "aside").rename(second)
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


@pytest.mark.parametrize("name", ["manifest.json", HEADER])
@pytest.mark.parametrize("kind", THINGS)
def test_what_is_no_file_is_refused_and_not_waited_for(kind: str, name: str, tmp_path: Path) -> None:
    _, newest = stepped(tmp_path, 1, 2)
    (newest / name).unlink()
    THINGS[kind](newest / name)
    step, warned = loaded(tmp_path)
    assert step == 1
    assert f"expected a regular file, found {kind.partition(' behind')[0]}: '{newest / name}'" in warned[0]


def test_a_fifo_in_the_place_of_a_save(tmp_path: Path) -> None:
    stepped(tmp_path, 1)
    os.mkfifo(tmp_path / "save-000009-step-9")
    assert loaded(tmp_path)[0] == 1


def test_a_checkpoint_of_torch_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "old.pt")
    with pytest.raises(SynclineError, match="expected a regular file, found a FIFO"):
        made().load_torch(tmp_path / "old.pt")


def test_a_file_may_be_linked(tmp_path: Path) -> None:
    (save,) = stepped(tmp_path, 1)
    (save / HEADER).rename(tmp_path / "elsewhere")
    (save / HEADER).symlink_to(tmp_path / "elsewhere")
    assert loaded(tmp_path)[0] == 1


# ---------------------------------------------------------------------- models that are not the same


@pytest.mark.parametrize("is_other", ["shape", "type", "name"])
def test_models_that_differ_are_refused_on_every_rank_and_nothing_is_left(
    is_other: str, tmp_path: Path
) -> None:
    def program(t: Transport) -> str:
        checkpointer = sl.Checkpointer(tmp_path, group=t)
        model: nn.Module = nn.Linear(2, 2 + (t.rank if is_other == "shape" else 0))
        if t.rank and is_other == "type":
            model = model.double()
        if t.rank and is_other == "name":
            model = nn.Sequential(model)
        with pytest.raises(sl.errors.ContractMismatch, match=r"weight") as error:
            checkpointer.save(sl.TrainState(model=model), step=1)
        with pytest.raises(sl.errors.ContractMismatch):
            checkpointer.save(sl.TrainState(model=model), step=1, blocking=False)
        return str(error.value)

    first, second = run_ranks(2, program)
    assert first == second
    assert os.listdir(tmp_path) == []
