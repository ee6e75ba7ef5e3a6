"""Checkpointer and TrainState: what was saved comes back, on as many ranks or others. Ranks are threads."""

from __future__ import annotations

import copy
import gc
import random
import threading
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty_files import FaultyFiles, Meanwhile, WrittenBefore
from torch import nn
from torch.optim import lr_scheduler as lr
from torch.utils.data import DataLoader

import syncline as sl
from support.cases import case
from support.values import exact
from syncline import CheckpointCorrupt, Checkpointer, ContractMismatch, SynclineError, TrainState
from syncline.checkpoint.directory import read_manifest
from syncline.checkpoint.files import Files
from syncline.transport import Transport, run_ranks


class Mine:
    """Something with a state of its own on each rank."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return {"value": self.value}

    def load_state_dict(self, state: Any) -> None:
        self.value = state["value"]


class Plain(Mine):
    """Whose state is its value."""

    def state_dict(self) -> Any:
        return self.value


class Run:
    """A small training run of one rank."""

    def __init__(self, rank: int, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        for parameter in self.model.parameters():
            parameter.data.normal_(generator=g)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.mine = Mine(torch.tensor([rank]))
        self.state = TrainState(
            model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, mine=self.mine
        )

    def step(self) -> float:
        g = torch.Generator().manual_seed(self.state.step)
        loss = self.model(torch.randn(16, 4, generator=g)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.state.step += 1
        return loss.item()


def in_files(files: Any, fn: Callable[[Transport, Checkpointer], Any], size: int = 2) -> list[Any]:
    return run_ranks(size, lambda t: fn(t, Checkpointer("/runs/one", group=t, files=files)))


def test_a_run_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    def program(t: Transport) -> None:
        run, directory = Run(t.rank), tmp_path / str(t.size)
        checkpointer = Checkpointer(directory, group=t)
        assert checkpointer.load(run.state) is None
        for _ in range(3):
            run.step()
        assert checkpointer.save(run.state) == str(directory / "save-000001-step-3")
        losses = [run.step() for _ in range(4)]
        other = Run(10 + t.rank, seed=1)
        assert Checkpointer(directory, group=t).load(other.state) == 3
        assert (other.state.step, other.mine.value.tolist()) == (3, [t.rank])
        assert [other.step() for _ in range(4)] == losses
        assert exact(other.state.state_dict()) == exact(run.state.state_dict())

    for size in (1, 2, 3):
        with case(size):
            run_ranks(size, program)


def test_what_is_the_same_on_all_ranks_is_written_once(tmp_path: Path) -> None:
    def save(t: Transport) -> None:
        named = {"model": Run(t.rank).model, "mine": Mine((f"of {t.rank}", torch.tensor(t.rank)))}
        Checkpointer(tmp_path, group=t).save(TrainState(**named, ours=Mine("all")), step=5)

    run_ranks(2, save)
    (saved,) = tmp_path.iterdir()
    files = {f"{name}.safetensors" for name in ("rank-0", "rank-1", "shared")}
    assert {path.name for path in saved.iterdir()} == {"manifest.json", *files}
    manifest = read_manifest(Files(), str(saved))
    own = manifest.files["rank-1.safetensors"].tensors.keys()
    assert {"mine.value.1"} <= own <= {"mine.value.1", "rng.torch"}
    assert "model.0.weight" in manifest.files["shared.safetensors"].tensors
    for rank in range(2):
        value = {"$tuple": [f"of {rank}", {"$tensor": "mine.value.1"}]}
        assert manifest.ranks[rank]["mine"] == {"value": value}
    assert (manifest.step, manifest.shared["ours"]) == (5, {"value": "all"})


def test_another_number_of_ranks_loads_it() -> None:
    def load(t: Transport, checkpointer: Checkpointer) -> Any:
        run = Run(99, seed=5)
        assert checkpointer.load(run.state) == 7
        assert exact(run.model.state_dict()) == exact(Run(0).model.state_dict())
        return run.mine.value.item()

    for before, after, told in (
        (2, 3, "rank 2 loaded the state of rank 0"),
        (3, 1, "the state of ranks 1, 2 was not loaded"),
        (1, 2, ""),  # a save by one rank does not record what is that rank's own
    ):
        files = FaultyFiles()
        in_files(files, lambda t, c: c.save(Run(t.rank).state, step=7), size=before)
        text = rf"each with its own mine \(1 tensor, mine.value\),.*{told}"
        with case(before, after), pytest.warns(RuntimeWarning, match=text) if told else nullcontext():
            found = in_files(files, load, size=after)
            assert found == [rank if rank < before else 0 for rank in range(after)]


def test_chance_goes_on_where_it_was() -> None:
    files = FaultyFiles()
    import numpy as np

    def draw() -> Any:
        return random.random(), torch.rand(2).tolist(), np.random.rand()

    def program(t: Transport, checkpointer: Checkpointer) -> None:
        checkpointer.save(Run(0).state)
        drawn = draw()
        assert draw() != drawn
        checkpointer.load(Run(0).state)
        assert draw() == drawn

    in_files(files, program, size=1)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda optimizer: lr.StepLR(optimizer, 2),
    "MultiStepLR": lambda optimizer: lr.MultiStepLR(optimizer, [2, 4, 4, 6]),
    "LambdaLR": lambda optimizer: lr.LambdaLR(optimizer, lambda step: 0.9**step),
    "SequentialLR": lambda optimizer: lr.SequentialLR(
        optimizer, [lr.LinearLR(optimizer), lr.MultiStepLR(optimizer, [1, 2])], [4]
    ),
    "ChainedScheduler": lambda optimizer: lr.ChainedScheduler(
        [lr.LinearLR(optimizer), lr.CosineAnnealingLR(optimizer, 9)]
    ),
    "CyclicLR": lambda optimizer: lr.CyclicLR(optimizer, 0.1, 0.2, 3),
    "OneCycleLR": lambda optimizer: lr.OneCycleLR(optimizer, 0.1, 9),
    "CosineAnnealingWarmRestarts": lambda optimizer: lr.CosineAnnealingWarmRestarts(optimizer, 3),
    "ReduceLROnPlateau": lambda optimizer: lr.ReduceLROnPlateau(optimizer, patience=1),
}


def test_a_schedule_goes_on(tmp_path: Path) -> None:
    def made(kind: str) -> TrainState:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
        return TrainState(optimizer=optimizer, scheduler=SCHEDULERS[kind](optimizer))

    def rates(state: TrainState, num_steps: int) -> list[float]:
        found = []
        scheduler = state.named["scheduler"]
        for _ in range(num_steps):
            state.named["optimizer"].step()
            scheduler.step(*[1.0] * isinstance(scheduler, lr.ReduceLROnPlateau))
            found.append(state.named["optimizer"].param_groups[0]["lr"])
        return found

    for kind in SCHEDULERS:
        first, second = made(kind), made(kind)
        rates(first, 3)
        checkpointer = Checkpointer(tmp_path / kind)
        checkpointer.save(first)
        checkpointer.load(second)
        assert rates(first, 5) == rates(second, 5), kind


def test_a_damaged_save_is_named_and_the_one_before_is_loaded() -> None:
    files = FaultyFiles()

    def save(t: Transport, checkpointer: Checkpointer) -> None:
        run = Run(t.rank)
        for _ in range(2):
            run.step()
            checkpointer.save(run.state)

    in_files(files, save)
    files.damage("runs/one/save-000002-step-2/rank-1.safetensors", -1, 1)

    def load(t: Transport, checkpointer: Checkpointer) -> int | None:
        return checkpointer.load(Run(t.rank).state)

    with pytest.warns(RuntimeWarning, match="rank 1: .*rank-1.safetensors: mine.value is damaged") as warned:
        assert in_files(files, load) == [1, 1]
    assert str(warned[0].message).endswith("Loaded instead: save-000001-step-1")
    files.cut("runs/one/save-000001-step-1/manifest.json", 20)
    with pytest.raises(
        CheckpointCorrupt, match=r"(?s)expected an intact save in /runs/one.*manifest\.json is damaged"
    ):
        in_files(files, load)


def test_a_full_disk_is_a_warning_and_nothing_is_lost() -> None:
    files = FaultyFiles()

    def program(t: Transport, checkpointer: Checkpointer) -> tuple[Any, Any]:
        run = Run(t.rank)
        run.step()
        first = checkpointer.save(run.state)
        run.step()
        if t.rank == 0:
            files.full_at = files.num_done + 3
        t.barrier().wait()
        return first, checkpointer.save(run.state)

    said = r"step 2 could not be saved: .*No space left on device.*training continues"
    with pytest.warns(RuntimeWarning, match=said) as warned:
        found = in_files(files, program)
    assert warned[0].filename == __file__, "where it was asked for, not the thread that writes"
    assert found == [("/runs/one/save-000001-step-1", None)] * 2
    files.full_at = None
    assert files.names("runs/one") == ["save-000001-step-1"]
    assert in_files(files, lambda t, c: c.load(Run(t.rank).state)) == [1, 1]
    assert in_files(files, lambda t, c: c.save(Run(t.rank).state, 9)) == ["/runs/one/save-000002-step-9"] * 2


def test_as_many_saves_stay_as_were_asked_for(tmp_path: Path) -> None:
    def program(t: Transport) -> None:
        checkpointer = Checkpointer(tmp_path, keep=2, group=t)
        for step in range(4):
            checkpointer.save(Run(t.rank).state, step=step)

    run_ranks(2, program)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["save-000003-step-2", "save-000004-step-3"]


def test_another_run_that_saves_into_the_same_directory_is_noticed(tmp_path: Path) -> None:
    state = TrainState(model=nn.Linear(2, 1))
    ours, theirs = Checkpointer(tmp_path, keep=2), Checkpointer(tmp_path, keep=2)
    ours.save(state, step=1)
    ours.save(state, step=2)  # nobody else has saved meanwhile
    with pytest.warns(RuntimeWarning, match=r"save there was number 2, but .* was number 0\."):
        theirs.save(state, step=7)
    theirs.save(state, step=8)
    with pytest.warns(RuntimeWarning, match=r"another process saves into .* was number 4, .* was number 2"):
        ours.save(state, step=3)
    ours.save(state, step=4)


def test_a_save_that_its_run_removes_while_it_is_read_is_no_damage() -> None:
    def load(at: int, size: int) -> bool:
        """Load while a run saves at this operation of rank 0; return whether there was such an operation."""
        files, state = FaultyFiles(), TrainState(model=nn.Linear(2, 1))
        run = Checkpointer("/runs", keep=1, files=files)
        run.save(state, step=1)
        beside = Meanwhile(files, at, lambda: run.save(state, step=2))

        def program(t: Transport) -> int | None:
            reader = Checkpointer("/runs", files=files if t.rank else beside, read_only=True, group=t)
            return reader.load(TrainState(model=nn.Linear(2, 1)))

        with case(f"operation {at} of {size} ranks"):
            assert run_ranks(size, program)[0] in (1, 2)  # and no warning
        return beside.has_happened

    for size in (1, 2):
        at = 0
        while load(at, size):
            at += 1
        assert at > 2


def test_a_run_whose_saves_vanish_faster_than_they_are_read_is_named() -> None:
    files = FaultyFiles()
    state = TrainState(model=nn.Linear(2, 1))
    run = Checkpointer("/runs", keep=1, files=files)
    run.save(state, step=1)

    class Vanishing(FaultyFiles):
        def __init__(self) -> None:
            super().__init__()
            self._root = files._root

        def map(self, path: str) -> memoryview:
            run.save(state, step=state.step + 1)
            return super().map(path)

    reader = Checkpointer("/runs", files=Vanishing(), read_only=True)
    with pytest.raises(SynclineError, match="removed 20 saves while they were read: let it keep more"):
        reader.load(TrainState(model=nn.Linear(2, 1)))


def test_a_run_that_goes_on_takes_what_was_there_for_its_own(tmp_path: Path) -> None:
    state = TrainState(model=nn.Linear(2, 1))
    before = Checkpointer(tmp_path)
    waiting = Checkpointer(tmp_path)
    before.save(state, step=1)
    waiting.load(state)
    waiting.save(state, step=2)
    Checkpointer(tmp_path).save(state, step=3)
    (tmp_path / "save-000003-step-3").rename(tmp_path / "elsewhere")
    waiting.save(state, step=3)  # that somebody removes saves is none of our business


def test_ranks_that_save_different_things_are_told_so() -> None:
    files = FaultyFiles()
    with pytest.raises(ContractMismatch, match="step"):
        in_files(files, lambda t, c: c.save(Run(t.rank).state, step=t.rank))
    with pytest.raises(ContractMismatch, match="more"):
        in_files(files, lambda t, c: c.save(TrainState(**({"more": Mine(1)} if t.rank else {}))))


def test_what_cannot_be_stored_is_named_on_every_rank() -> None:
    with pytest.raises(TypeError, match=r"rank 1: mine\.value is a builtins\.set"):
        in_files(FaultyFiles(), lambda t, c: c.save(TrainState(mine=Mine({1} if t.rank else 1))))


def test_a_directory_that_is_not_everybodys_is_refused(tmp_path: Path) -> None:
    said = r"rank 0 wrote into /runs/one on \S+, but it is not in /runs/one on \S+ \(ranks 1, 2\)\. Give"
    with pytest.raises(SynclineError, match=said):
        run_ranks(3, lambda t: Checkpointer("/runs/one", group=t, files=FaultyFiles()))
    said = r"wrote into /\S+/of-0 on \S+, but it is not in /\S+/of-1 on \S+ \(rank 1\)"
    with pytest.raises(SynclineError, match=said):
        run_ranks(2, lambda t: Checkpointer(tmp_path / f"of-{t.rank}", group=t))


def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SynclineError, match=r"file/runs cannot be written: .*Not a directory"):
        run_ranks(2, lambda t: Checkpointer(tmp_path / "file" / "runs", group=t))


def test_a_directory_that_cannot_be_read_is_said_on_every_rank() -> None:
    files = FaultyFiles()

    def hidden(directory: str) -> list[str]:
        raise PermissionError(13, "Permission denied", directory)

    def program(t: Transport) -> None:
        checkpointer = Checkpointer("/runs/one", group=t, files=files)
        t.barrier().wait()
        files.names = hidden  # type: ignore[method-assign]
        with pytest.raises(SynclineError, match=r"/runs/one cannot be read: rank 0: .*Permission denied"):
            checkpointer.load(Run(t.rank).state)

    run_ranks(2, program)


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    named: Any = {"a": Mine({"x.y": torch.zeros(1)}), "a.value": Mine(torch.zeros(1))}
    Checkpointer(tmp_path).save(TrainState(**named))
    named = {"a": Mine({"b": torch.zeros(1)}), "a.value": Plain({"b": torch.ones(1)})}
    with pytest.raises(ValueError, match=r"two tensors .* saved as a\.value\.b, one of them in a\.value"):
        Checkpointer(tmp_path).save(TrainState(**named))


def test_only_what_has_a_state_is_named() -> None:
    refused: list[tuple[str, Any, str]] = [
        ("x", 3, r"expected x to have state_dict\(\) and load_state_dict\(\), got a int"),
        ("model", nn.Linear, "got the class Linear"),
        (
            "data",
            DataLoader([1]),
            r"got a DataLoader\. .* does not save its position .*DistributedSampler.*Stateful",
        ),
        ("step", Mine(1), "step is a reserved name"),
    ]
    for name, value, text in refused:
        with case(name), pytest.raises(TypeError, match=text):
            TrainState(**{name: value})


def test_wrapped_or_not_a_model_is_saved_as_the_same() -> None:
    files = FaultyFiles()

    def program(t: Transport, checkpointer: Checkpointer) -> None:
        ddp = sl.DistributedDataParallel(nn.Linear(2, 1), process_group=t)
        checkpointer.save(TrainState(model=ddp), step=1)
        bare = nn.Linear(2, 1)
        checkpointer.load(TrainState(model=bare))
        assert torch.equal(bare.weight, ddp.module.weight)
        checkpointer.save(TrainState(model=bare), step=2)
        other = sl.DistributedDataParallel(nn.Linear(2, 1), process_group=t)
        other.module.weight.data.zero_()
        assert checkpointer.load(TrainState(model=other)) == 2
        assert torch.equal(other.module.weight, ddp.module.weight)

    in_files(files, program)


def test_a_save_that_does_not_block_is_of_that_moment() -> None:
    files = SlowFiles()

    def program(t: Transport, checkpointer: Checkpointer) -> None:
        run = Run(t.rank)
        run.step()
        at_1 = copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict()))
        saving = checkpointer.save(run.state, blocking=False)
        run.step()
        assert not saving.done()
        t.barrier().wait()
        files.may_write.set()
        assert saving.result() == "/runs/one/save-000001-step-1"
        other = Run(9, seed=3)
        assert checkpointer.load(other.state) == 1
        assert exact((other.model.state_dict(), other.optimizer.state_dict())) == exact(at_1)

    in_files(files, program)


def test_saves_do_not_pile_up() -> None:
    files = SlowFiles()
    seen: list[bool] = []

    def program(t: Transport, checkpointer: Checkpointer) -> None:
        run = Run(t.rank)
        first = checkpointer.save(run.state, 1, blocking=False)
        threading.Timer(0.2, files.may_write.set).start()
        checkpointer.save(run.state, 2, blocking=False)
        seen.append(first.done())
        assert checkpointer.wait() == "/runs/one/save-000002-step-2"
        assert checkpointer.wait() is None

    in_files(files, program)
    assert seen == [True, True]


def test_shutdown_waits_for_a_save() -> None:
    files = SlowFiles()
    sl.init(device="cpu")
    try:
        saving = Checkpointer("/runs/one", files=files).save(Run(0).state, 3, blocking=False)
        threading.Timer(0.2, files.may_write.set).start()
    finally:
        sl.shutdown()
    assert saving.done()
    assert files.names("runs/one") == ["save-000001-step-3"]


class SlowFiles(FaultyFiles):
    """That write tensors when they are told to."""

    def __init__(self) -> None:
        super().__init__()
        self.may_write = threading.Event()

    def write(self, path: str, parts: Iterable[bytes | memoryview]) -> None:
        if path.endswith(".safetensors"):
            assert self.may_write.wait(60)
        super().write(path, parts)


def test_what_is_closed_gives_back_its_thread_and_its_connection() -> None:
    files = SlowFiles()

    def program(t: Transport) -> None:
        with Checkpointer("/runs/one", group=t, files=files) as checkpointer:
            saving = checkpointer.save(Run(t.rank).state, 1, blocking=False)
            (writer,) = checkpointer._writer._threads
            files.may_write.set()
        assert saving.result(timeout=0) == "/runs/one/save-000001-step-1", "it was waited for"
        writer.join(60)
        assert not writer.is_alive()
        with pytest.raises(SynclineError, match="closed"):
            checkpointer._lane.barrier()
        checkpointer.close()
        assert checkpointer.wait() is None
        for call in (checkpointer.save, checkpointer.load):
            with pytest.raises(ValueError, match="is closed: create another"):
                call(Run(t.rank).state)
        t.barrier().wait()  # what is between the ranks besides goes on
        with Checkpointer("/runs/one", group=t, files=files) as again:
            assert again.load(Run(t.rank).state) == 1

    run_ranks(2, program)


def test_what_nobody_refers_to_is_closed_once_its_save_is_done() -> None:
    files = SlowFiles()

    def program(t: Transport) -> None:
        checkpointer = Checkpointer("/runs/one", group=t, files=files)
        lane, end = checkpointer._lane, checkpointer._end
        saving = checkpointer.save(Run(t.rank).state, 1, blocking=False)
        (writer,) = checkpointer._writer._threads
        del checkpointer
        gc.collect()
        assert end.alive, "the save goes on"
        t.barrier().wait()  # on all ranks
        files.may_write.set()
        assert saving.result() == "/runs/one/save-000001-step-1"
        del saving
        writer.join(60)
        gc.collect()
        assert not end.alive
        assert not writer.is_alive()
        with pytest.raises(SynclineError, match="closed"):
            lane.barrier()

    run_ranks(2, program)


def test_an_exception_in_its_block_is_what_comes_out_and_a_rank_alone_keeps_its_transport() -> None:
    files = SlowFiles()

    def program(t: Transport) -> None:
        with (
            pytest.raises(KeyError, match="of the training"),
            Checkpointer("/runs/one", group=t, files=files) as checkpointer,
        ):
            assert checkpointer._lane is t  # alone there is no other connection to close
            checkpointer.save(Run(t.rank).state, 1, blocking=False)
            files.may_write.set()
            raise KeyError("of the training")
        t.barrier().wait()

    run_ranks(1, program)
    assert files.names("runs/one") == ["save-000001-step-1"]


def test_a_save_that_nobody_asks_after_fails_aloud() -> None:
    files = SlowFiles()
    failed: list[Any] = []

    def program(t: Transport) -> None:
        checkpointer = Checkpointer("/runs/one", group=t, files=files)
        saving = checkpointer.save(Run(t.rank).state, 1, blocking=False)
        if t.rank == 1:
            t.close()  # as sl.shutdown() does
            files.may_write.set()
        failed.append(saving.exception())

    with pytest.warns(RuntimeWarning, match="the state at step 1 could not be saved: "):
        run_ranks(2, program)
    assert all(isinstance(error, SynclineError) for error in failed)


class BrokenFiles(FaultyFiles):
    """Of which writing a tensor fails otherwise than by the disk."""

    is_broken = True

    def write(self, path: str, parts: Iterable[bytes | memoryview]) -> None:
        if self.is_broken and path.endswith("rank-1.safetensors"):
            raise MemoryError("no room for a copy")
        super().write(path, parts)


def test_what_fails_on_one_rank_alone_is_said_and_all_go_on_alike() -> None:
    files = BrokenFiles()

    def program(t: Transport) -> None:
        checkpointer = Checkpointer("/runs/one", group=t, files=files, stop_signals=())
        run = Run(t.rank)
        checkpointer.save(run.state, 1, blocking=False)
        with pytest.raises(MemoryError if t.rank == 1 else SynclineError, match="no room for a copy"):
            checkpointer.wait()
        checkpointer.save(run.state, 2, blocking=False)
        if t.rank == 0:
            assert checkpointer._under_way is not None
            checkpointer._under_way.exception()
            files.is_broken = False
            checkpointer.ask_to_stop()
        checkpointer.stop_if_asked(run.state)

    with (
        pytest.warns(RuntimeWarning, match=r"at step \d could not be saved: .*no room") as warned,
        pytest.raises(SystemExit),
    ):
        run_ranks(2, program)
    assert len(warned) == 2
    assert files.names("runs/one") == ["save-000001-step-2"]


def test_what_version_1_has_written_is_read() -> None:
    # Written by two ranks, see fixtures/README.md. It has to be readable for ever.
    files = WrittenBefore(Path(__file__).with_name("fixtures") / "version-1")

    def program(t: Transport, checkpointer: Checkpointer) -> None:
        state = TrainState(model=nn.Linear(2, 1), mine=Mine(None))
        assert checkpointer.load(state) == 12
        assert state.named["model"].weight.tolist() == [[0.5, -0.25]]
        expected = {
            "rank": t.rank,
            "pair": (1, float("inf")),
            1: [torch.float16, b"bytes", None],
            "z": torch.tensor([1 + 2j]),
            "table": torch.arange(3) + t.rank,
        }
        assert exact(state.named["mine"].value) == exact(expected)

    in_files(files, program)


def test_nobody_keeps_the_files(tmp_path: Path) -> None:
    """They are mapped: what is written into them in place, or cut off, must not reach what was loaded."""
    compressed = sl.compression.TopK(0.1)
    kinds: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # as it is saved, and loaded
        "bare": ({}, {}),
        "DiLoCo": ({"strategy": sl.DiLoCo(2, compression=compressed)},) * 2,
        "compressed": ({"compression": compressed},) * 2,
        "sharded": ({"sharded": True},) * 2,
        "sharded before": ({"sharded": True}, {}),
    }

    def make(t: Transport, options: dict[str, Any]) -> TrainState:
        module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        ddp = sl.DistributedDataParallel(module, process_group=t, **options)
        optimizer = ddp.attach(torch.optim.AdamW(ddp.parameters(), foreach=False))
        return TrainState(model=ddp, optimizer=optimizer, mine=Mine(torch.ones(3)))

    def program(t: Transport, kind: str) -> None:
        saved, loaded = (make(t, options) for options in kinds[kind])
        for step in range(3):
            saved.named["optimizer"].zero_grad()
            g = torch.Generator().manual_seed(10 * t.rank + step)
            saved.named["model"](torch.randn(6, 4, generator=g)).square().mean().backward()
            saved.named["optimizer"].step()
        checkpointer = Checkpointer(tmp_path / kind, group=t)
        checkpointer.save(saved)
        checkpointer.load(loaded)
        before = exact(loaded.state_dict())
        t.barrier().wait()
        if t.rank == 0:
            for path in next((tmp_path / kind).iterdir()).glob("*.safetensors"):
                with open(path, "r+b") as file:
                    file.write(b"\xff" * path.stat().st_size)
        t.barrier().wait()
        assert exact(loaded.state_dict()) == before

    for kind in kinds:
        with case(kind):
            run_ranks(2, partial(program, kind=kind))


def test_state_that_another_class_takes_over_is_said(tmp_path: Path) -> None:
    def run_of(optimizer: Any, schedule: Any) -> sl.TrainState:
        made = optimizer(nn.Linear(2, 1).parameters(), lr=0.1)
        return sl.TrainState(optimizer=made, scheduler=schedule(made))

    adam, cosine = torch.optim.Adam, partial(lr.CosineAnnealingLR, T_max=5)
    checkpointer = sl.Checkpointer(tmp_path)
    checkpointer.save(run_of(adam, cosine), step=3)
    assert checkpointer.load(run_of(adam, cosine)) == 3
    other: list[tuple[Any, str]] = [
        (run_of(torch.optim.AdamW, cosine), "optimizer of save-000001-step-3 .* a Adam, .* into a AdamW"),
        (run_of(adam, lr.LinearLR), "scheduler of .* a CosineAnnealingLR, .* into a LinearLR"),
    ]
    for state, text in other:
        with pytest.warns(RuntimeWarning, match=text):
            assert checkpointer.load(state) == 3


# ---------------------------------------------------------------------- a part of it, and without writing


def test_a_part_of_what_was_saved_can_be_loaded() -> None:
    def load(t: Transport, checkpointer: Checkpointer) -> None:
        run = Run(t.rank, seed=1)
        state = sl.TrainState(model=run.model, ema=Mine(3))
        text = r"ema was not saved; .* or load only the names in both, with strict=False"
        with pytest.raises(ValueError, match=text):
            checkpointer.load(state)
        assert (checkpointer.load(state, strict=False), state.step) == (5, 5)
        assert exact(run.model.state_dict()) == exact(Run(0).model.state_dict())

    for size in (1, 2):
        files = FaultyFiles()
        in_files(files, lambda t, c: c.save(Run(t.rank).state, step=5), size=size)
        text = "ema is unchanged: save-000001-step-5 has only model, optimizer, scheduler, mine"
        with case(size), pytest.warns(RuntimeWarning, match=text) as told:
            in_files(files, load, size=size)
        assert len(told) == 1, "on rank 0"


def test_one_that_only_reads_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("it writes")

    files = FaultyFiles()
    in_files(files, lambda t, c: c.save(Run(t.rank).state, step=7))
    for writes in ("make_directory", "write", "rename", "sync_directory", "remove"):
        monkeypatch.setattr(files, writes, refuse)

    def read(t: Transport) -> int | None:
        checkpointer = Checkpointer("/runs/one", group=t, files=files, read_only=True)
        run = Run(t.rank, seed=5)
        for refused in (checkpointer.save, checkpointer.stop_if_asked):
            with pytest.raises(ValueError, match="created with read_only=True"):
                refused(run.state)
        return checkpointer.load(run.state)

    assert run_ranks(2, read) == [7, 7]


def test_a_directory_to_read_has_to_be_there(tmp_path: Path) -> None:
    with pytest.raises(SynclineError, match=r"saves to load in .*nowhere, found none on .* \(rank 0\)"):
        sl.Checkpointer(tmp_path / "nowhere", read_only=True)
    assert list(tmp_path.iterdir()) == []
