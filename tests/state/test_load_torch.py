"""Checkpoints of plain torch are taken over, all of them or with an error that says what is left. Ranks are threads."""

from __future__ import annotations

import argparse
import io
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


def first_weight(module: Any) -> torch.Tensor:
    weight: torch.Tensor = module[0].weight
    return weight.detach()


def assert_is(state: TrainState, plain: Plain) -> None:
    module = state.named["model"]
    module = getattr(module, "module", module)
    for key, value in plain.module.state_dict().items():
        assert torch.equal(module.state_dict()[key], value), key
    theirs, ours = plain.optimizer.state_dict(), state.named["optimizer"].state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    for index, one in theirs["state"].items():
        for key, value in one.items():
            assert torch.equal(ours["state"][index][key], value), (index, key)


@pytest.mark.parametrize("as_zip", [True, False])
@pytest.mark.parametrize("sharded", [None, False, True])
def test_what_torch_has_saved_is_taken_over(path: Path, sharded: bool | None, *, as_zip: bool) -> None:
    plain = Plain()
    torch.save(plain.states(), path, _use_new_zipfile_serialization=as_zip)

    def load(t: Transport) -> None:
        state = fresh()
        if sharded is not None:
            ddp = sl.DistributedDataParallel(network(2), process_group=t, sharded=sharded)
            optimizer = ddp.attach(AdamW(ddp.parameters(), foreach=False))
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
            state = TrainState(model=ddp, optimizer=optimizer, scheduler=scheduler)
        assert state.load_torch(path, group=t) == {}
        assert state.step == 1200
        assert state.named["scheduler"].last_epoch == 2
        assert_is(state, plain)

    run_ranks(2, load)


@pytest.mark.parametrize("sharded", [False, True])
def test_nobody_keeps_the_file(path: Path, *, sharded: bool) -> None:
    plain = Plain()
    torch.save(plain.states(), path)

    def load(t: Transport) -> None:
        ddp = sl.DistributedDataParallel(network(2), process_group=t, sharded=sharded)
        optimizer = ddp.attach(AdamW(ddp.parameters(), foreach=False))
        state = TrainState(model=ddp, optimizer=optimizer)
        state.load_torch(path, names={"step": None}, besides=["step", "scheduler"], group=t)
        t.barrier().wait()
        if t.rank == 0:
            with open(path, "r+b") as file:  # in its place, which who has mapped it would see
                file.write(bytes(path.stat().st_size))
        t.barrier().wait()
        assert_is(state, plain)

    run_ranks(2, load)


def test_under_other_names_and_inside_of_others(path: Path) -> None:
    plain = Plain()
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
    state = fresh()
    rest = state.load_torch(
        path,
        names={
            "model": "state_dict",
            "optimizer": ("optimizer_states", 0),
            "scheduler": ("lr_schedulers", 0),
            "step": "global_step",
        },
        besides=("epoch", "hyper"),
    )
    assert rest == {"epoch": 3, "hyper": {"lr": 0.1}}
    assert state.step == 7
    assert_is(state, plain)


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod."])
def test_a_module_alone_with_any_prefix(path: Path, prefix: str) -> None:
    plain = Plain()
    saved = OrderedDict((prefix + key, value) for key, value in plain.module.state_dict().items())
    torch.save(saved, path)
    wrapped = sl.DistributedDataParallel(network(5))
    for target in (network(5), nn.ModuleDict({"module": network(5)}), wrapped):
        assert TrainState(model=target).load_torch(path) == {}
        found = {key.removeprefix("module."): value for key, value in target.state_dict().items()}
        for key, value in plain.module.state_dict().items():
            assert torch.equal(found[key], value), key
    with_optimizer = fresh()
    with pytest.raises(ValueError, match="not in the file: optimizer, scheduler"):
        with_optimizer.load_torch(path)
    with_optimizer.load_torch(path, names={"optimizer": None, "scheduler": None})
    assert torch.equal(first_weight(with_optimizer.named["model"]), first_weight(plain.module))


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
    texts = []

    def load(t: Transport) -> None:
        state = fresh()
        with pytest.raises(ValueError, match="does not match the named objects") as caught:
            state.load_torch(path, group=t)
        texts.append(str(caught.value))
        assert torch.equal(first_weight(state.named["model"]), first_weight(network(2)))

    run_ranks(2, load)
    assert texts[0] == texts[1]
    assert "not in the file: step, optimizer, scheduler" in texts[0]
    assert "in the file, and not used: optim, epoch" in texts[0]
    assert 'names={"optimizer": "optim"}, or leave optimizer unchanged, names={"optimizer": None}' in texts[0]


def test_what_there_is_can_be_taken(path: Path) -> None:
    plain = Plain()
    model = plain.module.state_dict()
    del model["2.bias"]
    torch.save({"model": {**model, "3.bias": torch.zeros(1)}, "epoch": 3}, path)
    with pytest.raises(
        ValueError, match=r'(?s)Missing key\(s\) in state_dict: "2.bias".*Unexpected.*"3.bias"'
    ):
        fresh().load_torch(path, names=dict.fromkeys(("step", "optimizer", "scheduler")), besides=["epoch"])
    state = fresh()
    with pytest.warns(RuntimeWarning) as warned:
        assert state.load_torch(path, strict=False) == {"epoch": 3}
    assert "not in the file: step, optimizer, scheduler, model.2.bias" in str(warned[0].message)
    assert "not used: epoch, model.3.bias" in str(warned[0].message)
    assert torch.equal(first_weight(state.named["model"]), first_weight(plain.module))


def test_a_module_that_has_nothing_in_common_is_refused_all_the_same(path: Path) -> None:
    torch.save({"model": {f"backbone.{k}": v for k, v in network(1).state_dict().items()}}, path)
    with pytest.raises(
        ValueError,
        match=r"no entry of this Sequential: expected keys such as 0\.weight, .*, got backbone\.0\.w",
    ):
        fresh().load_torch(path, strict=False)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([1, 2], r"expected the file to hold a dict of .*; got a list"),
        (
            {"model": 3, "step": 1},
            r"expected model of .* to be a dict from module\.state_dict\(\), got a int",
        ),
        (
            {"model": network(1).state_dict(), "step": 1.5},
            r"expected step in .* to be an integer of at least 0, got 1\.5",
        ),
        (
            {"model": network(1).state_dict(), "step": True},
            r"expected step in .* to be an integer of at least 0, got True",
        ),
        ({"model": nn.LSTM(2, 2).state_dict(), "step": 1}, r"has no entry of this Sequential"),
    ],
)
def test_what_makes_no_sense_is_refused(path: Path, content: Any, text: str) -> None:
    torch.save(content, path)
    with pytest.raises(ValueError, match=text):
        TrainState(model=network(1)).load_torch(path)


def test_names_that_nobody_has_are_refused(path: Path) -> None:
    torch.save(network(1).state_dict(), path)
    with pytest.raises(ValueError, match=r"names of this state \(step, model\), got optimiser"):
        TrainState(model=network(1)).load_torch(path, names={"optimiser": "o"})


def test_the_state_of_something_else_is_refused(path: Path) -> None:
    other = SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    torch.save({**Plain().states(), "optimizer": other.state_dict()}, path)
    with pytest.raises(ValueError, match="doesn't match the size of optimizer's group"):
        fresh().load_torch(path)
    torch.save({**Plain().states(), "optimizer": {"lr": 1}}, path)
    with pytest.raises(
        ValueError, match=r"optimizer of .* is not the state of a AdamW: KeyError: 'param_groups'"
    ):
        fresh().load_torch(path)


# ---------------------------------------------------------------------- what would run code


class Harmful:
    """Leaves a trace where it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.trace),)


def test_what_would_run_code_is_refused_by_type(path: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    torch.save(
        {
            "model": network(1).state_dict(),
            "args": argparse.Namespace(lr=1),
            "extra": [0, {"net": nn.Linear(1, 1)}],
            "harm": Harmful(trace),
            "step": 1,
        },
        path,
    )
    with pytest.raises(ValueError, match="has objects other than tensors and plain values") as caught:
        TrainState(model=network(1)).load_torch(path)
    text = str(caught.value)
    assert "Their types: argparse.Namespace, posix.mkdir, torch.nn.modules.linear.Linear." in text
    assert "torch.serialization.add_safe_globals" in text
    assert not trace.exists(), "nothing was run, to say so neither"


def test_a_file_that_was_packed_again_compressed_has_the_same_values(path: Path) -> None:
    torch.save({"model": network(1).state_dict(), "step": 1}, path)
    with (
        zipfile.ZipFile(io.BytesIO(path.read_bytes())) as old,
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for name in old.namelist():
            new.writestr(name, old.read(name))
    state = TrainState(model=network(2))
    state.load_torch(path)
    for name, value in network(1).state_dict().items():
        assert torch.equal(state.named["model"].state_dict()[name], value)


def test_what_a_user_trusts_is_let_through(path: Path) -> None:
    torch.save({"model": network(1).state_dict(), "step": 1, "args": argparse.Namespace(lr=3)}, path)
    state = TrainState(model=network(2))
    with torch.serialization.safe_globals([argparse.Namespace]):
        assert state.load_torch(path, besides=["args"])["args"].lr == 3


@pytest.mark.parametrize("how", ["text", "cut", "pickle", "old"])
def test_what_cannot_be_read_is_refused(path: Path, how: str) -> None:
    torch.save({"args": argparse.Namespace()}, path, _use_new_zipfile_serialization=how != "old")
    if how == "text":
        path.write_text("hello")
    elif how == "cut":
        path.write_bytes(path.read_bytes()[:-40])
    elif how == "pickle":
        path.write_bytes(pickle.dumps(Harmful(path.with_name("trace"))))
    with pytest.raises(
        ValueError, match=r"checkpoint\.pt cannot be read as a file that torch\.save wrote"
    ) as caught:
        TrainState(model=network(1)).load_torch(path)
    if how == "old":
        assert "argparse.Namespace" in str(caught.value)
    assert not path.with_name("trace").exists()


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
    for rank in range(2):
        torch.save(network(rank).state_dict(), tmp_path / f"of-{rank}")
    modules = [network(5), network(5)]
    with pytest.raises(ContractMismatch, match=r"(?s)file.*a path that all hosts see"):
        run_ranks(
            2, lambda t: TrainState(model=modules[t.rank]).load_torch(tmp_path / f"of-{t.rank}", group=t)
        )
    for module in modules:
        assert torch.equal(first_weight(module), first_weight(network(5))), "nothing was loaded"
