"""Checkpointer: a state of all ranks, on disk and back."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import uuid
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, Literal, TypeVar, cast, overload

import torch
from torch import Tensor

from syncline.errors import CheckpointCorrupt, SynclineError
from syncline.plan.difference import describe_ranks
from syncline.state.encoding import decode, encode
from syncline.state.files import Files, LocalFiles
from syncline.state.shelf import Save, Shelf
from syncline.state.snapshot import Manifest, read_manifest, write_manifest
from syncline.state.stopping import JointStop
from syncline.state.tensor_file import StoredFile, checksum, memory_of, read_tensors, write_tensors
from syncline.state.train_state import TrainState, copies
from syncline.stopping import STOP_SIGNALS
from syncline.sync.agreement import exchange
from syncline.world import before_shutdown, transport_of

__all__ = ["Checkpointer"]

T = TypeVar("T")

_SHARED = "shared.safetensors"


def _own(rank: int) -> str:
    return f"rank-{rank}.safetensors"


class Checkpointer:
    """Saves a `TrainState` into a directory and loads it: what was saved is there, all of it, or is said not to be.

    What is the same on all ranks is written once, by rank 0; what is not (random numbers, residuals, replicas that have
    drifted apart) by each rank. A save counts once it bears its name, after all of it was synced to the disk; loading
    checks every byte, and takes the newest save that is sound. Nothing is pickled: tensors are in safetensors files,
    the rest is JSON.

    A collective call: each rank makes one, and makes the same calls. Ranks of several hosts need a directory that all
    see, which is tried here.

    Args:
        directory: where saves stand beside each other; of one training run.
        keep: how many stay, at least 1.
        group: see `broadcast_`.
        files: the file system; None for that of this host.
        stop_signals: what asks this process to stop, see `stop_if_asked`; names, the same on all ranks. Nobody listens
            before that is called; () for never.
        stop_every: where `stop_if_asked` needs a collective of its own, one in so many calls makes it.

    Raises:
        TypeError, ValueError: `keep` or `stop_every` is below 1, there is no such signal.
        SynclineError: the directory cannot be written, or is not the same one on all ranks.

    Example:
        >>> import tempfile, torch, syncline as sl
        >>> model = torch.nn.Linear(2, 1)
        >>> state = sl.TrainState(model=model)
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     checkpointer = sl.Checkpointer(directory, keep=2)
        ...     saved = checkpointer.save(state, step=10)
        ...     checkpointer.load(state)
        10
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        keep: int = 3,
        *,
        group: Any = None,
        files: Files | None = None,
        stop_signals: Sequence[str | int] = STOP_SIGNALS,
        stop_every: int = 1,
    ) -> None:
        self._transport = transport_of(group)
        self._files = files or LocalFiles()
        self._path = os.path.abspath(os.fspath(directory))
        fault: Exception | None = None
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            fault = ValueError(f"expected keep to be an integer of at least 1, got {keep!r}")
        lines = [f"keep  {keep}"]
        try:
            self._stop = JointStop(self._transport, stop_signals, stop_every)
            lines += self._stop.describe()
        except (TypeError, ValueError) as error:
            fault = error
        exchange(self._transport, "sl.Checkpointer", lines, fault=fault)
        self._lane = self._transport.lane("checkpoints")
        self._shelf = Shelf(self._files, self._path, keep)
        self._damaged: set[Save] = set()
        self._writer = ThreadPoolExecutor(1, "syncline checkpoints")
        self._under_way: Future[str | None] | None = None
        self._newest: tuple[int, str] | None = None
        """Step and directory of what was saved or loaded last."""
        self._copies: dict[str, Tensor] = {}
        """What saves that do not block write from; kept for the next one."""
        self._check_directory()
        before_shutdown(self.wait)

    # ------------------------------------------------------------------ saving

    @overload
    def save(
        self, state: TrainState, step: int | None = None, blocking: Literal[True] = True
    ) -> str | None: ...
    @overload
    def save(
        self, state: TrainState, step: int | None = None, *, blocking: Literal[False]
    ) -> Future[str | None]: ...
    @overload
    def save(
        self, state: TrainState, step: int | None = None, blocking: bool = True
    ) -> str | Future[str | None] | None: ...
    def save(self, state: TrainState, step: int | None = None, blocking: bool = True) -> Any:
        """Save `state`; a collective call, between two steps.

        Args:
            state: what.
            step: sets `state.step` before; None leaves it as it is.
            blocking: wait until it is on the disk. Otherwise a thread writes a copy in this process's memory (which it
                keeps for the next save), and training goes on; a save that comes before the last one is done waits for
                it, so that they do not pile up.

        Returns:
            The directory of the save; None if it could not be written (a full disk): then a warning says why, what was
            saved before is there as it was, and training may go on. Without `blocking` the future of that, whose
            `result()` waits.

        Raises:
            ContractMismatch: ranks save different things, or at different steps.
            TypeError, ValueError: something in the state cannot be stored; its place is named; on every rank.
        """
        self.wait()
        if step is not None:
            state.step = step
        parts, fault = None, None
        try:
            parts = _Parts(state, None if blocking else self._copies)
        except Exception as error:
            fault = error
        lines = [f"step  {state.step}", *(f"named  {name}" for name in state.named)]
        exchange(self._transport, "sl.Checkpointer.save", lines, fault=fault)
        assert parts is not None
        self._under_way = self._writer.submit(self._saved, state.step, parts)
        return self.wait() if blocking else self._under_way

    def wait(self) -> str | None:
        """Wait for the save that is under way, if any; what it returns."""
        under_way, self._under_way = self._under_way, None
        return under_way.result() if under_way else None

    def _saved(self, step: int, parts: _Parts) -> str | None:
        try:
            path = self._write(step, parts)
        except _Refused as refused:
            self._warn(step, f"{refused}. What was saved before is as it was, and training goes on")
            return None
        except SynclineError as error:
            # Nobody may ever ask for the future's result.
            self._warn(step, f"{type(error).__name__}: {error}")
            raise
        self._newest = (step, path)
        return path

    def _warn(self, step: int, why: str) -> None:
        if self._lane.rank == 0:
            text = f"the state at step {step} could not be saved: {why}"
            warnings.warn(text, RuntimeWarning, stacklevel=3)

    def _write(self, step: int, parts: _Parts) -> str:
        number, path = self._on_rank_0(lambda: self._begin(step))
        save = Save(number, step)
        try:
            shared = self._shared(parts)
            told = self._everywhere(lambda: self._write_files(path, parts, shared))
            self._on_rank_0(lambda: self._commit(save, path, parts, shared, told))
        except _Refused:
            if self._lane.rank == 0:
                with contextlib.suppress(OSError):
                    self._shelf.abandon(save)
            raise
        return self._shelf.path_of(save)

    def _begin(self, step: int) -> tuple[int, str]:
        save, path = self._shelf.begin(step)
        return save.number, path

    def _shared(self, parts: _Parts) -> set[str]:
        """What is the same on all ranks."""
        told = self._everywhere(lambda: parts.digests)
        return {
            name for name, digest in parts.digests.items() if all(one.get(name) == digest for one in told)
        }

    def _write_files(self, path: str, parts: _Parts, shared: set[str]) -> dict[str, Any]:
        """Write this rank's files, and tell what they are; and what else this rank has of its own."""
        rank = self._lane.rank
        wanted = {_own(rank): parts.tensors.keys() - shared}
        if rank == 0:
            wanted[_SHARED] = parts.tensors.keys() & shared
        written = {
            name: asdict(write_tensors(self._files, f"{path}/{name}", parts.chosen(keys), parts.checksums))
            for name, keys in wanted.items()
            if keys
        }
        own = {name: tree for name, tree in parts.trees.items() if _entry(name) not in shared}
        return {"files": written, "trees": own}

    def _commit(
        self, save: Save, path: str, parts: _Parts, shared: set[str], told: Sequence[Mapping[str, Any]]
    ) -> None:
        manifest = Manifest(
            step=save.step,
            num_ranks=self._lane.size,
            shared={name: tree for name, tree in parts.trees.items() if _entry(name) in shared},
            ranks=[one["trees"] for one in told],
            files={name: StoredFile(**file) for one in told for name, file in one["files"].items()},
            about={
                "torch": torch.__version__,
                "host": socket.gethostname(),
                "saved_at": datetime.now(UTC).isoformat(timespec="seconds"),
            },
        )
        write_manifest(self._files, path, manifest)
        self._shelf.commit(save)
        with contextlib.suppress(OSError):  # it is saved; what could not be removed goes next time
            self._shelf.prune(self._damaged)

    # ------------------------------------------------------------------ stopping

    def stop_if_asked(self, state: TrainState) -> None:
        """End all ranks here if any was asked to stop; a collective call, after each step (`state.commit`).

        A rank is asked by a signal or by `ask_to_stop`. It tells the others with the control data of its next backward,
        which costs nothing; where none was reduced since the last call, or replicas drift, by a small collective here.
        Then all ranks, after the same step, wait for the save under way, save `state` (unless this step was saved
        already), say so on stderr, and exit with `sl.EXIT_STOPPED`.

        It listens from its first call on: call it once before the first step as well. A second signal, more than two
        seconds after the first, does what it would do without: SIGTERM ends the process at once.

        Args:
            state: to be saved.

        Raises:
            SystemExit: of `sl.EXIT_STOPPED`: all ranks stop here, and `state` is saved.
            SynclineError: all ranks stop here, but `state` could not be saved; or ranks must not wait for each other
                here (`ParameterServer`: between two meetings).

        Example:
            >>> import tempfile, torch, syncline as sl
            >>> state = sl.TrainState(model=torch.nn.Linear(2, 1))
            >>> with tempfile.TemporaryDirectory() as directory:
            ...     checkpointer = sl.Checkpointer(directory, stop_signals=())
            ...     state.commit()
            ...     checkpointer.stop_if_asked(state)  # nobody has asked
            ...     checkpointer.ask_to_stop("met its deadline")
            ...     try:
            ...         checkpointer.stop_if_asked(state)
            ...     except SystemExit as stopped:
            ...         print(stopped.code == sl.EXIT_STOPPED)
            True
        """
        if not self._stop.is_agreed(state):
            return
        with contextlib.suppress(SynclineError):  # it was said where it happened
            self.wait()
        is_saved = self._newest is not None and self._newest[0] == state.step
        last = self._newest and self._newest[1]
        self._stop.end(self._lane, state.step, last if is_saved else self.save(state), last)

    def ask_to_stop(self, why: str = "asked to stop") -> None:
        """As a signal does: this rank asks all to stop. From any thread, also on one rank only.

        Args:
            why: what this rank did or met, which follows its name in what is printed.
        """
        self._stop.request.ask(why)

    # ------------------------------------------------------------------ loading

    def load(self, state: TrainState) -> int | None:
        """Load the newest save that is sound into `state`; a collective call.

        Every byte is checked before anything is changed. What is damaged is named in a warning.

        Args:
            state: of the same names as the one that was saved.

        Returns:
            The step at which it was saved; None if nothing was saved yet.

        Raises:
            CheckpointCorrupt: there are saves, but none that is sound; on every rank.
            ValueError: it is the state of something else; on every rank.
        """
        self.wait()
        saves = [Save(*one) for one in self._on_rank_0(self._shelf.saves)]
        exchange(self._transport, "sl.Checkpointer.load", [f"named  {name}" for name in state.named])
        damaged: list[str] = []
        for save in saves:
            try:
                read = self._read(save)
            except _Refused as refused:
                self._damaged.add(save)
                damaged.append(f"{save.name}: {refused}")
                continue
            if damaged and self._transport.rank == 0:
                warnings.warn(
                    "\n  ".join(["of what was saved, this cannot be loaded:", *damaged])
                    + f"\nLoaded instead: {save.name}",
                    RuntimeWarning,
                    stacklevel=2,
                )
            self._apply(state, *read)
            self._newest = (save.step, self._shelf.path_of(save))
            return save.step
        if damaged:
            raise CheckpointCorrupt(
                "\n  ".join([f"no save in {self._path} is sound:", *damaged])
                + "\nNothing was loaded. Begin anew with another directory, or bring a sound copy back"
            )
        return None

    def _read(self, save: Save) -> tuple[Manifest, dict[str, Tensor]]:
        """What this rank needs of a save, checked on all ranks.

        Raises:
            _Refused: it is damaged, on any rank.
        """
        path = self._shelf.path_of(save)
        found: list[tuple[Manifest, dict[str, Tensor]]] = []

        def read() -> None:
            manifest = read_manifest(self._files, path)
            tensors: dict[str, Tensor] = {}
            for name in (_SHARED, _own(self._place(manifest))):
                if name in manifest.files:
                    tensors |= read_tensors(self._files, path, name, manifest.files[name])
            found.append((manifest, tensors))

        self._everywhere(read)
        return found[0]

    def _place(self, manifest: Manifest) -> int:
        """Whose own things this rank gets: those of the rank that it was, or of rank 0 if there was none."""
        return self._transport.rank if self._transport.rank < manifest.num_ranks else 0

    def _apply(self, state: TrainState, manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
        fault = None
        try:
            trees = manifest.shared | manifest.ranks[self._place(manifest)]
            kept = _Kept(tensors)
            decoded = {
                name: decode(tree, tensors if copies(state.named.get(name)) else kept)
                for name, tree in trees.items()
            }
            if self._transport.rank >= manifest.num_ranks:
                del decoded["rng"]  # nobody else's numbers
            state.load_state_dict(decoded)
        except Exception as error:
            fault = error
        exchange(self._transport, "sl.Checkpointer.load", [], fault=fault)

    # ------------------------------------------------------------------ the directory

    def _check_directory(self) -> None:
        """Raise unless all ranks see the same directory, and rank 0 can write there."""
        rank = self._transport.rank

        def write() -> str:
            self._files.make_directory(self._path)
            probe = self._shelf.probe_path(uuid.uuid4().hex)
            self._files.write(probe, [b"seen by all ranks?"])
            return probe

        try:
            probe = self._on_rank_0(write)
        except _Refused as refused:
            raise SynclineError(f"sl.Checkpointer: {self._path} cannot be written: {refused}") from None
        name = probe.rpartition("/")[2]
        seen = self._everywhere(
            lambda: (socket.gethostname(), self._path, name in self._files.names(self._path))
        )
        if rank == 0:
            with contextlib.suppress(OSError):
                self._files.remove(probe)
        blind = {
            other: f"{path} on {host}" for other, (host, path, is_seen) in enumerate(seen) if not is_seen
        }
        if blind:
            host, path, _ = seen[0]
            raise SynclineError(
                f"sl.Checkpointer: what rank 0 wrote into {path} on {host} is not in "
                + "; ".join(f"{where} ({ranks})" for where, ranks in _with_ranks(blind).items())
                + ". Give the same directory on all ranks, on a file system that all hosts have mounted at the same "
                "place"
            )

    # ------------------------------------------------------------------ together

    def _everywhere(self, fn: Callable[[], T]) -> list[T]:
        """What `fn` returns on each rank, as JSON holds it.

        Raises:
            _Refused: it failed somewhere, by what happens to files; on every rank.
        """
        told: dict[str, Any] = {}
        fault = None
        try:
            told["found"] = fn()
        except (OSError, CheckpointCorrupt) as error:
            told["refused"] = str(error)
        except Exception as error:
            fault = error
            told["failed"] = f"{type(error).__name__}: {error}"
        everyone = [json.loads(one) for one in self._lane.all_gather_bytes(json.dumps(told).encode())]
        if fault is not None:
            raise fault
        for what in ("failed", "refused"):
            texts = {rank: one[what] for rank, one in enumerate(everyone) if what in one}
            if texts:
                error_class = _Refused if what == "refused" else SynclineError
                raise error_class(_by_ranks(texts, self._lane.size))
        return [one["found"] for one in everyone]

    def _on_rank_0(self, fn: Callable[[], T]) -> T:
        """What `fn` returns on rank 0, which alone calls it; as JSON holds it."""
        return cast(T, self._everywhere(lambda: fn() if self._lane.rank == 0 else None)[0])


class _Refused(Exception):
    """A disk that is full, a file that is damaged: on every rank."""


def _by_ranks(texts: Mapping[int, str], num_ranks: int) -> str:
    """Each text with the ranks that gave it; without, where all did."""
    if len(texts) == num_ranks and len(set(texts.values())) == 1:
        return texts[0]
    return "; ".join(f"{ranks}: {text}" for text, ranks in _with_ranks(texts).items())


def _with_ranks(texts: Mapping[int, str]) -> dict[str, str]:
    """The ranks that gave a text, by text."""
    found: dict[str, list[int]] = {}
    for rank, text in texts.items():
        found.setdefault(text, []).append(rank)
    return {text: describe_ranks(ranks) for text, ranks in found.items()}


def _entry(name: str) -> str:
    """By which something named is told from a tensor."""
    return f"entry {name}"


class _Parts:
    """A state of this rank, taken apart.

    Args:
        state: whose.
        copies: memory to copy tensors to, by name, which is filled up as needed; None: they are only read while nobody
            writes them.

    Raises:
        TypeError, ValueError: something cannot be stored; its place is named.
    """

    def __init__(self, state: TrainState, copies: dict[str, Tensor] | None) -> None:
        self.trees: dict[str, Any] = {}
        """What is not a tensor, by what it was named."""
        self.tensors: dict[str, Tensor] = {}
        """Those of all, on the CPU."""
        for name, one in state.state_dict().items():
            self.trees[name], tensors = encode(one, name)
            for key, tensor in tensors.items():
                self.tensors[key] = (
                    tensor.cpu().contiguous() if copies is None else _copied(tensor, key, copies)
                )
        if copies is not None:
            for gone in copies.keys() - self.tensors.keys():
                del copies[gone]

    @cached_property
    def checksums(self) -> dict[str, str]:
        """Of the tensors."""
        return {name: checksum(memory_of(tensor)) for name, tensor in self.tensors.items()}

    @cached_property
    def digests(self) -> dict[str, str]:
        """Of tensors and of what was named: equal where these are."""
        found = {
            name: f"{tensor.dtype} {tuple(tensor.shape)} {self.checksums[name]}"
            for name, tensor in self.tensors.items()
        }
        return found | {
            _entry(name): checksum(json.dumps(tree).encode()) for name, tree in self.trees.items()
        }

    def chosen(self, names: Collection[str]) -> dict[str, Tensor]:
        """Some of the tensors, in their order."""
        return {name: tensor for name, tensor in self.tensors.items() if name in names}


def _copied(tensor: Tensor, name: str, copies: dict[str, Tensor]) -> Tensor:
    copy = copies.get(name)
    if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
        copy = copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
    return copy.copy_(tensor)


class _Kept(Mapping[str, Tensor]):
    """Tensors in memory of their own, for those who keep what they get."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._copies: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._copies:
            self._copies[name] = self._tensors[name].clone()
        return self._copies[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
