"""Saves whose checksums are right and which make no sense, have another name, or are no files: refused by name.

Somebody, or a program, has edited them and summed them anew. Whatever they say, the one before is loaded.
"""

from __future__ import annotations

import copy
import functools
import itertools
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
from support.cases import case
from syncline import CheckpointCorrupt, Checkpointer
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


def edited(change: Callable[[Any], object]) -> Callable[[dict[str, Any]], bytes]:
    def edit(body: dict[str, Any]) -> bytes:
        change(body)
        return json.dumps(body).encode()

    return edit


def replaced_text(old: bytes, new: bytes) -> Callable[[dict[str, Any]], bytes]:
    return lambda body: json.dumps(body).encode().replace(old, new, 1)


def with_weight(value: Any) -> Callable[[dict[str, Any]], bytes]:
    """The manifest with another weight of the model."""
    return edited(lambda body: body["shared"]["model"].update(weight=value))


def with_bias(**values: Any) -> Callable[[dict[str, Any]], bytes]:
    """The header with other words about the bias."""
    return edited(lambda body: body["model.bias"].update(values))


PART = {"values": {"$tensor": "model.bias"}, "start": 9, "shape": [2], "order": [0]}
MANIFESTS: dict[str, Callable[[dict[str, Any]], bytes]] = {
    "no json": lambda body: b"step 3",
    "no object": lambda body: b"[1]",
    "no text": lambda body: b"\xff\xfe{}",
    "empty": lambda body: b"{}",
    "too deep": lambda body: DEEP,
    "too deep a tree": replaced_text(b'"step": 2', b'"step": ' + NESTED),
    "nan": replaced_text(b'"num_ranks": 1', b'"num_ranks": NaN'),
    "infinite": replaced_text(b'"lr": 0.1', b'"lr": 1e999'),
    "digits": replaced_text(b'"step": 2', b'"step": ' + b"9" * 5000),
    "twice": replaced_text(b'"step": 2', b'"step": 2, "step": 2'),
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
    "a tensor that is not there": with_weight({"$tensor": "model.w"}),
    "a tag of nothing": with_weight({"$later": 1}),
    "a tag beside others": edited(lambda body: body["shared"]["model"]["weight"].update({"$tuple": []})),
    "a key that cannot be one": edited(lambda body: body["shared"].update(model={"$dict": [[[], 1]]})),
    "pairs of three": edited(lambda body: body["shared"].update(model={"$dict": [[1, 2, 3]]})),
    "a part of nothing": with_weight({"$part": PART}),
    "a size below zero": with_weight({"$size": [-1]}),
    "a device of no kind": with_weight({"$device": "x:y"}),
    "complex of ones": with_weight({"$complex": "model.weight"}),
}


HEADERS: dict[str, Callable[[dict[str, Any]], bytes]] = {
    "no json": lambda body: b"{",
    "too deep": lambda body: DEEP,
    "twice": replaced_text(b"{", b'{"model.bias":{},'),
    "less": edited(lambda body: body.pop("model.bias")),
    "more": edited(lambda body: body.update(x={"dtype": "U8", "shape": [0], "data_offsets": [0, 0]})),
    "no type": edited(lambda body: body["model.bias"].pop("dtype")),
    "another type": with_bias(dtype="F128"),
    "a type of another size": with_bias(dtype="U8"),
    "a type of no kind": with_bias(dtype=["F32"]),
    "another shape": with_bias(shape=[3]),
    "a shape below zero": with_bias(shape=[-1, -2]),
    "a huge shape": with_bias(shape=[2**62, 4]),
    "a huge shape of nothing": with_bias(shape=[0, 2**62, 2**62]),
    "fractions": with_bias(shape=[2.0]),
    "overlapping": edited(
        lambda body: body["model.bias"].update(data_offsets=body["model.weight"]["data_offsets"][:])
    ),
    "beyond the end": with_bias(data_offsets=[10**6, 10**6 + 8]),
    "one offset": with_bias(data_offsets=[0]),
    "no object": edited(lambda body: body.update({"model.bias": 3})),
}


def test_what_makes_no_sense_is_named_and_the_one_before_is_loaded() -> None:
    for kind, edit in MANIFESTS.items():
        files = SAVED.copy()
        with_manifest(files, edit(manifest_of(files)))
        with case("manifest", kind):
            assert "is malformed" in assert_falls_back(files, "manifest.json")
    for kind, edit in HEADERS.items():
        files = SAVED.copy()
        with_header(files, edit(header_of(files)))
        with case("header", kind):
            assert "is malformed" in assert_falls_back(files, HEADER)


TAGS = ["$tensor", "$part", "$tuple", "$dict", "$size", "$float", "module", "synchronization"]
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
            st.lists(one, max_size=2), st.dictionaries(st.sampled_from(TAGS), one, max_size=2)
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
