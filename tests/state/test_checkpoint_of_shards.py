"""Each rank writes its share of a sharded optimizer; whoever loads gets the whole, or a share of its own."""

from __future__ import annotations

import copy
import itertools
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty_files import FaultyFiles, WrittenBefore
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adagrad, AdamW, Muon, Optimizer
from write_fixture import VERSION_2, VERSION_3, network, ordinary_state, scheduler_of

import syncline as sl
from support.cases import case
from support.values import exact
from syncline import CheckpointCorrupt, Checkpointer, TrainState
from syncline.checkpoint.directory import VERSION, read_manifest
from syncline.sharded import AttachedShards
from syncline.transport import Transport, run_ranks

Make = Callable[[nn.Module], Optimizer]


class Net(nn.Module):
    """Weights whose memory has another order than their dimensions, a scalar, and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3).to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.zeros(7, 6).t())
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.ones(6), requires_grad=False)
        self.last = nn.Linear(7, 50)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.conv(x).mean((2, 3)) * self.frozen
        return self.last(torch.tanh(hidden @ self.turned) * self.scale)  # type: ignore[no-any-return]


with torch.random.fork_rng():
    torch.manual_seed(3)
    NET = Net()
    NET.turned.data.normal_()


def groups(module: nn.Module) -> list[dict[str, Any]]:
    """Two that lie in turns in a bucket."""
    parameters = list(module.parameters())
    return [{"params": parameters[::2], "weight_decay": 0.1}, {"params": parameters[1::2], "lr": 0.03}]


OPTIMIZERS: dict[str, tuple[Make, bool | None]] = {
    "AdamW": (lambda m: AdamW(m.parameters(), lr=0.01, foreach=False), None),
    "AdamW, groups": (lambda m: AdamW(groups(m), lr=0.01, foreach=False), None),
    "AdamW, whole": (lambda m: AdamW(m.parameters(), lr=0.01, foreach=False), False),
    "AdamW, tensor lr": (lambda m: AdamW(m.parameters(), lr=torch.tensor(0.01), foreach=False), None),
    "SGD": (lambda m: SGD(m.parameters(), lr=0.1, momentum=0.9, foreach=False), None),
    "Adagrad": (lambda m: Adagrad(m.parameters(), lr=0.05, foreach=False), None),  # of frozen ones, too
    "Adafactor": (lambda m: Adafactor(m.parameters(), lr=0.01, foreach=False), None),
}


class Run:
    """A training run of one rank, whose gradients are the same whatever the number of ranks."""

    def __init__(self, t: Transport, name: str, *, sharded: bool = True, cap: float = 0.0015) -> None:
        make, elementwise = OPTIMIZERS[name]
        self.module = copy.deepcopy(NET)
        self.ddp = sl.DistributedDataParallel(
            self.module, process_group=t, sharded=sharded, bucket_cap_mb=cap
        )
        how = {"elementwise": elementwise} if sharded else {}
        self.optimizer = self.ddp.attach(make(self.module), **how)
        self.state = TrainState(model=self.ddp, optimizer=self.optimizer)

    def step(self) -> None:
        x = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(self.state.step))
        self.optimizer.zero_grad()
        self.ddp(x).square().mean().backward()
        self.optimizer.step()
        self.state.commit()

    def found(self) -> Any:
        return exact((list(self.module.parameters()), self.optimizer.state_dict()))


def saved_by(size: int, name: str, *, sharded: bool = True, blocking: bool = True) -> tuple[FaultyFiles, Any]:
    """What was saved, and what it is."""
    files = FaultyFiles()

    def program(t: Transport) -> Any:
        made = Run(t, name, sharded=sharded)
        checkpointer = Checkpointer("/runs/one", group=t, files=files)
        for _ in range(3):
            made.step()
        saving = checkpointer.save(made.state, blocking=blocking)
        expected = made.found()
        if not blocking:
            made.step()  # what is saved is a copy
            assert made.found() != expected
            saving = saving.result()
        assert saving == "/runs/one/save-000001-step-3"
        return expected

    return files, run_ranks(size, program)[0]


def assert_loads(files: FaultyFiles, expected: Any, size: int, name: str, **how: Any) -> None:
    def load(t: Transport) -> None:
        run = Run(t, name, **how)
        assert Checkpointer("/runs/one", group=t, files=files).load(run.state) == 3
        assert run.found() == expected
        run.step()

    with case(name, f"loaded by {size} ranks", how):
        run_ranks(size, load)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_shards_have_saved_is_loaded_by_any_number_of_ranks(name: str) -> None:
    files, expected = saved_by(3, name)
    assert expected[1]["state"], "there is something to lose"
    # In other buckets, too: spans begin and end elsewhere.
    for size, cap in ((1, 25), (2, 25), (3, 0.0015), (4, 25)):
        assert_loads(files, expected, size, name, cap=cap)
    for size in (1, 2):
        assert_loads(files, expected, size, name, sharded=False)


def test_what_replicas_have_saved_is_loaded_by_shards() -> None:
    for name in ("AdamW, groups", "AdamW, whole", "Adafactor"):
        assert_loads(*saved_by(2, name, sharded=False), 3, name)


def test_flat_spans_become_whole_parameters_and_the_reverse() -> None:
    for saver, loader in (("AdamW", "AdamW, whole"), ("AdamW, whole", "AdamW")):
        assert_loads(*saved_by(3, saver), 2, loader)


def test_a_save_that_does_not_block_copies_this_ranks_share_alone() -> None:
    files, expected = saved_by(3, "AdamW", blocking=False)

    def load(t: Transport) -> None:
        run = Run(t, "AdamW")
        checkpointer = Checkpointer("/runs/one", group=t, files=files)
        checkpointer.load(run.state)
        assert run.found() == expected
        whole = numel_of(run.optimizer.state_dict())
        checkpointer.save(run.state, blocking=False)
        checkpointer.wait()
        copies = checkpointer._copies.items()
        copied = sum(one.numel() for key, one in copies if key.startswith("optimizer.state"))
        assert copied < 0.6 * whole

    run_ranks(3, load)


def numel_of(state: dict[str, Any]) -> int:
    return sum(value.numel() for one in state["state"].values() for value in one.values())


def test_each_rank_writes_its_share_and_together_they_are_one_state(tmp_path: Path) -> None:
    def program(t: Transport) -> tuple[int, dict[str, Any]]:
        run = Run(t, "SGD")
        run.step()
        Checkpointer(tmp_path, group=t).save(run.state)
        own = [one["momentum_buffer"].numel() for one in run.optimizer.state.values()]
        return sum(own), run.optimizer.state_dict()

    told = run_ranks(3, program)
    (saved,) = tmp_path.iterdir()
    manifest = _manifest_of(saved)
    assert manifest["sharded"] == ["optimizer"]
    numels = []
    for rank in range(3):
        tensors = manifest["files"][f"rank-{rank}.safetensors"]["tensors"]
        mine = [name for name in tensors if name.startswith("optimizer.state")]
        assert mine, f"rank {rank} has a share"
        numels.append(sum(numel_in_name(name) for name in mine))
        assert numels[-1] <= told[rank][0], "no more than it steps"
    shared = manifest["files"]["shared.safetensors"]["tensors"]
    assert not any(name.startswith("optimizer.state") for name in shared)
    assert sum(numels) == numel_of(told[0][1]), "each element once"
    assert max(numels) < 0.6 * sum(numels)


def numel_in_name(name: str) -> int:
    start, stop = name.rpartition("[")[2].removesuffix("]").split(":")
    return int(stop) - int(start)


def test_nothing_is_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    def gathered(self: AttachedShards) -> dict[str, Any]:
        raise AssertionError("the state of all ranks was asked for")

    def program(t: Transport) -> None:
        run = Run(t, "AdamW")
        run.step()
        checkpointer = Checkpointer("/runs/one", group=t, files=files)
        checkpointer.save(run.state)
        checkpointer.save(run.state, blocking=False)
        checkpointer.load(run.state)

    files = FaultyFiles()
    monkeypatch.setattr(AttachedShards, "_state_dict", gathered)
    run_ranks(2, program)


def test_hooks_that_change_what_is_saved_see_the_ordinary_form() -> None:
    files = FaultyFiles()

    def program(t: Transport) -> None:
        run = Run(t, "SGD")
        run.step()
        shapes: list[Any] = []

        def hook(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
            shapes.append(state["state"][0]["momentum_buffer"].shape)
            return {**state, "state": {}}

        run.optimizer.register_state_dict_post_hook(hook)
        checkpointer = Checkpointer("/runs/one", group=t, files=files)
        checkpointer.save(run.state)
        assert shapes == [NET.turned.shape]
        checkpointer.load(run.state)
        assert not run.optimizer.state

    run_ranks(2, program)
    assert read_manifest(files, "/runs/one/save-000001-step-1").shared["optimizer"]["state"] == {}


def test_two_optimizers_of_one_module() -> None:
    files = FaultyFiles()

    def program(t: Transport, *, loads: bool) -> Any:
        module = copy.deepcopy(NET)
        ddp = sl.DistributedDataParallel(module, process_group=t, sharded=True, bucket_cap_mb=0.0015)
        trained = [p for p in module.parameters() if p.requires_grad]
        muon: Optimizer = Muon([p for p in trained if p.dim() == 2], lr=0.02)
        adamw: Optimizer = AdamW([p for p in trained if p.dim() != 2], lr=0.01)
        for optimizer in (muon, adamw):
            ddp.attach(optimizer)
        state = TrainState(model=ddp, muon=muon, adamw=adamw)
        checkpointer = Checkpointer("/runs/one", group=t, files=files)
        if loads:
            assert checkpointer.load(state) == 1
        else:
            x = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(1))
            ddp(x).square().mean().backward()
            for optimizer in (muon, adamw):
                optimizer.step()
            checkpointer.save(state, step=1)
        return exact((list(module.parameters()), muon.state_dict(), adamw.state_dict()))

    expected = run_ranks(2, lambda t: program(t, loads=False))[0]
    for found in run_ranks(3, lambda t: program(t, loads=True)):
        assert found == expected


def test_a_damaged_share_is_noticed_by_who_needs_it() -> None:
    saved, expected = saved_by(3, "AdamW")
    for rank in range(3):
        files = saved.copy()
        files.damage(f"runs/one/save-000001-step-3/rank-{rank}.safetensors", -1, 1)
        text = rf"rank-{rank}\.safetensors: optimizer\.\S+ is damaged"
        with pytest.raises(CheckpointCorrupt, match=text):
            assert_loads(files, expected, 2, "AdamW")


def test_before_the_first_step_there_is_nothing_to_share() -> None:
    files = FaultyFiles()

    def program(t: Transport) -> None:
        run = Run(t, "AdamW")
        checkpointer = Checkpointer("/runs/one", group=t, files=files)
        checkpointer.save(run.state)
        run.step()
        checkpointer.load(run.state)
        assert run.optimizer.state_dict()["state"] == {}

    run_ranks(2, program)


def test_what_versions_2_and_3_have_written_is_read() -> None:
    def load(t: Transport, written: Path, sharded: bool, files: FaultyFiles) -> None:
        module = network()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.zero_()
        ddp = sl.DistributedDataParallel(module, process_group=t, sharded=sharded)
        optimizer = ddp.attach(SGD(ddp.parameters(), lr=0.1, momentum=0.1))
        state = TrainState(model=ddp, optimizer=optimizer)
        if written == VERSION_3:
            state.named["scheduler"] = scheduler = scheduler_of(optimizer)
        assert Checkpointer("/runs/one", group=t, files=files).load(state) == 12
        if written == VERSION_3:
            assert (scheduler.milestones, scheduler.last_epoch) == (Counter([10, 20, 20]), 12)
            assert isinstance(scheduler.milestones, Counter)
            for group in optimizer.param_groups:
                assert group.pop("initial_lr") == 0.25
        assert exact(list(module.parameters())) == exact(list(network().parameters()))
        assert exact(optimizer.state_dict()) == exact(ordinary_state(network()))

    for written, sharded, size in itertools.product((VERSION_2, VERSION_3), (True, False), (1, 2, 3)):
        how = (written, sharded, WrittenBefore(written))
        with case(written.name, sharded, size):
            run_ranks(size, lambda t, how=how: load(t, *how))  # type: ignore[misc]
    assert VERSION_3.name == f"version-{VERSION}", (
        "a new version: write_fixture.py, and a test that it is read"
    )
    assert _manifest_of(VERSION_3)["version"] == VERSION


def _manifest_of(saved: Path) -> dict[str, Any]:
    text = (saved / "manifest.json").read_text().rstrip("\n").rpartition("\n")[0]
    manifest: dict[str, Any] = json.loads(text)
    return manifest
