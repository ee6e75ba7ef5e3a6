"""Checkpoints of plain torch are taken over, all of them or with an error that says what is left. Ranks are threads."""

from __future__ import annotations

import argparse
import io
import itertools
import os
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

import syncline as sl
from support.cases import case
from support.values import exact
from syncline import ContractMismatch, TrainState
from syncline.transport import Transport, run_ranks


def network(seed: int) -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    g = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.data.normal_(generator=g)
    return module


class Plain:
    """A run of plain torch that has made two steps."""

    def __init__(self) -> None:
        self.module = network(1)
        self.optimizer = AdamW(self.module.parameters(), lr=0.1, foreach=False)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        for step in range(2):
            self.optimizer.zero_grad()
            g = torch.Generator().manual_seed(step)
            self.module(torch.randn(6, 4, generator=g)).square().mean().backward()
            self.optimizer.step()
            self.scheduler.step()

    def states(self) -> dict[str, Any]:
        return {
            "model": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "step": 1200,
        }


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint.pt"


def fresh() -> TrainState:
    module = network(2)
    optimizer = AdamW(module.parameters(), lr=0.5, foreach=False)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return TrainState(model=module, optimizer=optimizer, scheduler=scheduler)


def of_ddp(t: Transport, *, sharded: bool) -> TrainState:
    ddp = sl.DistributedDataParallel(network(2), process_group=t, sharded=sharded)
    optimizer = ddp.attach(AdamW(ddp.parameters(), foreach=False))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return TrainState(model=ddp, optimizer=optimizer, scheduler=scheduler)


def values(module: Any) -> dict[str, Any]:
    """Its state, by the names that it has without a wrapper."""
    return {name.removeprefix("module."): exact(one) for name, one in module.state_dict().items()}


def is_as_made(state: TrainState) -> bool:
    return values(state.named["model"]) == values(network(2))


def assert_is(state: TrainState, plain: Plain) -> None:
    assert values(state.named["model"]) == values(plain.module)
    assert exact(state.named["optimizer"].state_dict()) == exact(plain.optimizer.state_dict())


def test_what_torch_has_saved_is_taken_over_and_nobody_keeps_the_file(tmp_path: Path) -> None:
    plain = Plain()

    def load(t: Transport, path: Path, sharded: bool | None) -> None:
        state = fresh() if sharded is None else of_ddp(t, sharded=sharded)
        assert state.load_torch(path, group=t) == {}
        assert state.step == 1200
        assert state.named["scheduler"].last_epoch == 2
        t.barrier().wait()
        if t.rank == 0:
            with open(path, "r+b") as file:  # in its place, which who has mapped it would see
                file.write(bytes(path.stat().st_size))
        t.barrier().wait()
        assert_is(state, plain)

    for as_zip, sharded in itertools.product((True, False), (None, False, True)):
        path = tmp_path / f"{as_zip} {sharded}.pt"
        torch.save(plain.states(), path, _use_new_zipfile_serialization=as_zip)
        with case(as_zip, sharded):
            run_ranks(2, lambda t, p=path, s=sharded: load(t, p, s))  # type: ignore[misc]


def test_under_other_names_and_inside_of_others(path: Path) -> None:
    plain, state = Plain(), fresh()
    states = plain.states()
    lightning = {
        "state_dict": {f"module._orig_mod.{key}": value for key, value in states["model"].items()},
        "optimizer_states": [states["optimizer"]],
        "lr_schedulers": [states["scheduler"]],
        "global_step": torch.tensor(7),
        "epoch": 3,
        "hyper": {"lr": 0.1},
    }
    torch.save(lightning, path)
    names: dict[str, Any] = {
        "model": "state_dict",
        "optimizer": ("optimizer_states", 0),
        "scheduler": ("lr_schedulers", 0),
        "step": "global_step",
    }
    rest = state.load_torch(path, names=names, besides=("epoch", "hyper"))
    assert rest == {"epoch": 3, "hyper": {"lr": 0.1}}
    assert state.step == 7
    assert_is(state, plain)


def test_a_module_alone_with_any_prefix(path: Path) -> None:
    plain = Plain()
    for prefix in ("", "module.", "_orig_mod.", "module._orig_mod."):
        torch.save(OrderedDict((prefix + key, one) for key, one in plain.module.state_dict().items()), path)
        wrapped = sl.DistributedDataParallel(network(5))
        for target in (network(5), nn.ModuleDict({"module": network(5)}), wrapped):
            assert TrainState(model=target).load_torch(path) == {}
            assert values(target) == values(plain.module), prefix
        with_optimizer = fresh()
        with case(prefix), pytest.raises(ValueError, match="not in the file: optimizer, scheduler"):
            with_optimizer.load_torch(path)
        with_optimizer.load_torch(path, names={"optimizer": None, "scheduler": None})
        assert values(with_optimizer.named["model"]) == values(plain.module), prefix


def test_how_old_a_state_is_goes_with_it(path: Path) -> None:
    """Batch norm of version 1 had no count of batches; who has version 2 without it is incomplete."""
    saved: Any = nn.DataParallel(nn.BatchNorm1d(3)).state_dict()
    del saved["module.num_batches_tracked"]
    torch.save(saved, path)
    with pytest.raises(ValueError, match=r"Missing key.*num_batches_tracked"):
        TrainState(model=nn.BatchNorm1d(3)).load_torch(path)
    saved._metadata["module"]["version"] = 1
    torch.save(saved, path)
    TrainState(model=nn.BatchNorm1d(3)).load_torch(path)


def test_what_is_missing_or_left_over_is_named_and_nothing_is_loaded(path: Path) -> None:
    plain = Plain()
    torch.save({"model": plain.module.state_dict(), "optim": plain.optimizer.state_dict(), "epoch": 3}, path)

    def load(t: Transport) -> str:
        state = fresh()
        with pytest.raises(ValueError, match="does not match the named objects") as caught:
            state.load_torch(path, group=t)
        assert is_as_made(state)
        return str(caught.value)

    (text,) = set(run_ranks(2, load))
    assert "not in the file: step, optimizer, scheduler" in text
    assert "in the file, and not used: optim, epoch" in text
    assert 'names={"optimizer": "optim"}, or leave optimizer unchanged, names={"optimizer": None}' in text


def test_what_there_is_can_be_taken(path: Path) -> None:
    model = Plain().module.state_dict()
    del model["2.bias"]
    torch.save({"model": {**model, "3.bias": torch.zeros(1)}, "epoch": 3}, path)
    said = r'(?s)Missing key\(s\) in state_dict: "2.bias".*Unexpected.*"3.bias"'
    with pytest.raises(ValueError, match=said):
        fresh().load_torch(path, names=dict.fromkeys(("step", "optimizer", "scheduler")), besides=["epoch"])
    state = fresh()
    with pytest.warns(RuntimeWarning) as warned:
        assert state.load_torch(path, strict=False) == {"epoch": 3}
    assert "not in the file: step, optimizer, scheduler, model.2.bias" in str(warned[0].message)
    assert "not used: epoch, model.3.bias" in str(warned[0].message)
    found = values(state.named["model"])
    assert {name: found[name] for name in model} == exact(model)


def test_what_makes_no_sense_is_refused(path: Path) -> None:
    model = network(1).state_dict()
    contents: list[tuple[Any, str]] = [
        ([1, 2], r"expected the file to hold a dict of .*; got a list"),
        ({"model": 3, "step": 1}, r"model of .* to be a dict from module\.state_dict\(\), got a int"),
        ({"model": model, "step": 1.5}, r"step in .* to be an integer of at least 0, got 1\.5"),
        ({"model": model, "step": True}, r"step in .* to be an integer of at least 0, got True"),
        ({"model": nn.LSTM(2, 2).state_dict(), "step": 1}, "has no entry of this Sequential"),
        (
            {"model": {f"backbone.{key}": one for key, one in model.items()}},
            r"no entry of this Sequential: expected keys such as 0\.weight, .*, got backbone\.0\.w",
        ),
    ]
    for content, text in contents:
        torch.save(content, path)
        with case(text), pytest.raises(ValueError, match=text):
            TrainState(model=network(1)).load_torch(path, strict="step" in content)
    with pytest.raises(ValueError, match=r"names of this state \(step, model\), got optimiser"):
        TrainState(model=network(1)).load_torch(path, names={"optimiser": "o"})


def test_the_state_of_something_else_is_refused(path: Path) -> None:
    other = SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    others: list[tuple[dict[str, Any], str]] = [
        (other.state_dict(), "doesn't match the size of optimizer's group"),
        ({"lr": 1}, r"optimizer of .* is not the state of a AdamW: KeyError: 'param_groups'"),
    ]
    for state, text in others:
        torch.save({**Plain().states(), "optimizer": state}, path)
        with case(text), pytest.raises(ValueError, match=text):
            fresh().load_torch(path)


# ---------------------------------------------------------------------- what would run code


class Harmful:
    """Leaves a trace where it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.trace),)


def test_what_would_run_code_is_refused_by_type(path: Path, tmp_path: Path) -> None:
    content = {
        "model": network(1).state_dict(),
        "args": argparse.Namespace(lr=1),
        "extra": [0, {"net": nn.Linear(1, 1)}],
        "harm": Harmful(tmp_path / "trace"),
        "step": 1,
    }
    torch.save(content, path)
    with pytest.raises(ValueError, match="has objects other than tensors and plain values") as caught:
        TrainState(model=network(1)).load_torch(path)
    text = str(caught.value)
    assert "Their types: argparse.Namespace, posix.mkdir, torch.nn.modules.linear.Linear." in text
    assert "torch.serialization.add_safe_globals" in text
    assert not (tmp_path / "trace").exists(), "nothing was run, to say so neither"


def test_a_file_that_was_packed_again_compressed_has_the_same_values(path: Path) -> None:
    torch.save({"model": network(1).state_dict(), "step": 1}, path)
    with (
        zipfile.ZipFile(io.BytesIO(path.read_bytes())) as old,
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for name in old.namelist():
            new.writestr(name, old.read(name))
    module = network(2)
    TrainState(model=module).load_torch(path)
    assert values(module) == values(network(1))


def test_what_a_user_trusts_is_let_through(path: Path) -> None:
    torch.save({"model": network(1).state_dict(), "step": 1, "args": argparse.Namespace(lr=3)}, path)
    state = TrainState(model=network(2))
    with torch.serialization.safe_globals([argparse.Namespace]):
        assert state.load_torch(path, besides=["args"])["args"].lr == 3


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    torch.save({"args": argparse.Namespace()}, tmp_path / "whole.pt")
    torch.save({"args": argparse.Namespace()}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "text.pt").write_text("hello")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "whole.pt").read_bytes()[:-40])
    (tmp_path / "pickle.pt").write_bytes(pickle.dumps(Harmful(trace)))
    for name in ("text", "cut", "pickle", "old"):
        said = rf"(?s){name}\.pt cannot be read as a file that torch\.save wrote"
        with case(name), pytest.raises(ValueError, match=said) as caught:
            TrainState(model=network(1)).load_torch(tmp_path / f"{name}.pt")
        assert name != "old" or "argparse.Namespace" in str(caught.value)
        assert not trace.exists()


def test_a_file_that_one_rank_has_not_is_an_error_on_all(tmp_path: Path) -> None:
    torch.save(network(1).state_dict(), tmp_path / "of-0")
    with pytest.raises(sl.SynclineError, match=r"rank 1: FileNotFoundError: .*of-1"):
        run_ranks(2, lambda t: TrainState(model=network(2)).load_torch(tmp_path / f"of-{t.rank}", group=t))


def test_ranks_that_want_different_things_are_told_so(path: Path) -> None:
    torch.save({"model": network(1).state_dict(), "ema": network(2).state_dict(), "step": 1}, path)
    wanted: list[dict[str, Any]] = [{"besides": "ema"}, {"besides": "model", "names": {"model": "ema"}}]
    with pytest.raises(ContractMismatch, match=r"under another name  model: 'ema'"):
        run_ranks(2, lambda t: TrainState(model=network(2)).load_torch(path, group=t, **wanted[t.rank]))


def test_ranks_with_different_files_are_told_so(tmp_path: Path) -> None:
    def load(t: Transport) -> None:
        state = TrainState(model=network(2))
        with pytest.raises(ContractMismatch, match=r"(?s)file.*a path that all hosts see"):
            state.load_torch(tmp_path / f"of-{t.rank}", group=t)
        assert is_as_made(state), "nothing was loaded"

    for rank in range(2):
        torch.save(network(rank).state_dict(), tmp_path / f"of-{rank}")
    run_ranks(2, load)
