"""The exporter for TensorBoard, on torch's SummaryWriter."""

from __future__ import annotations

import atexit
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syncline.checks import checked_count, checked_flag, checked_path, what_it_is
from syncline.events import (
    BackwardEnded,
    OptimizerStepped,
    ParametersSynced,
    RankFoundSlow,
    RanksChanged,
    ReplicasDiverged,
    Source,
)
from syncline.exporters.base import Exporter, StepClock, exports, import_client
from syncline.suggestions import suggests_arguments

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_EVENTS = "syncline/events"
"""The tag of the texts."""


class TensorBoard(Exporter):
    """An observer that writes the numbers of steps to TensorBoard: metrics of `ddp.report`, times and bytes.

    Start it on all ranks, as each observer: by `start()` or in a `with` block. Rank 0 writes, because metrics are equal
    on all ranks; the times are those of rank 0. The scalars are those of `BackwardRecord.scalars`, and
    "step/duration_seconds". Changes of the ranks, slow ranks and replicas that differ are texts. If several modules are
    wrapped, the names of all but the first begin with the name of the module.

    Each scalar takes time of the step, so by default only each 10th step is written.

    If the writer raises an error, for example because the disk is full, the exporter warns once and stops. Training
    continues.

    Args:
        writer_or_dir: a directory, or a `torch.utils.tensorboard.SummaryWriter`, which you close yourself.
        every: write step 1, and each step that is so many steps later.
        all_ranks: whether all ranks write. The directory then has a directory "rank-N" for each rank. Into a writer,
            all ranks of the process write.

    Raises:
        ImportError: tensorboard is not installed.
        TypeError, ValueError: an argument has a wrong type or value.

    Examples:
        >>> import tempfile, torch, syncline as sl
        >>> ddp = sl.DistributedDataParallel(torch.nn.Linear(2, 1))
        >>> with sl.exporters.TensorBoard(tempfile.mkdtemp()):
        ...     loss = ddp(torch.ones(1, 2)).sum()
        ...     ddp.report(loss=loss)
        ...     loss.backward()
    """

    @suggests_arguments
    def __init__(
        self,
        writer_or_dir: str | os.PathLike[str] | SummaryWriter,
        *,
        every: int = 10,
        all_ranks: bool = False,
    ) -> None:
        super().__init__()
        self._every = checked_count("every", every, at_least=1)
        self._all_ranks = checked_flag("all_ranks", all_ranks)
        client = import_client(
            "torch.utils.tensorboard", exporter="TensorBoard", package="tensorboard", extra="tensorboard"
        )
        self._writers = _Writers(client, writer_or_dir, has_directories=self._all_ranks)
        self._clock = StepClock()
        self._modules: dict[int, str] = {}
        """The first wrapped module of each rank."""
        self._last: dict[int, int] = {}
        """The last step of each rank."""
        self._num_discarded: dict[Source, int] = {}
        self._synced: dict[Source, int] = {}
        """The last step whose parameter sync was written."""

    def stop(self) -> None:
        """Stop receiving events, and write what the writer still holds."""
        super().stop()
        try:
            self._writers.close()
        except Exception as error:
            self._give_up(error)

    def _writes(self, rank: int) -> bool:
        return self._all_ranks or rank == 0

    def _prefix(self, source: Source) -> str:
        first = self._modules.setdefault(source.rank, source.module)
        return "" if first == source.module else f"{source.module}/"

    @exports
    def backward_ended(self, event: BackwardEnded) -> None:
        source = event.source
        if not event.ends_step or not self._writes(source.rank):
            return
        self._last[source.rank] = event.step
        length = self._clock.length(event)
        if (event.step - 1) % self._every:
            return
        scalars = event.record().scalars()
        if length is not None:
            scalars["step/duration_seconds"] = length
        self._write(source, scalars, event.step)

    @exports
    def optimizer_stepped(self, event: OptimizerStepped) -> None:
        source = event.source
        if event.is_discarded and self._writes(source.rank):
            count = self._num_discarded[source] = self._num_discarded.get(source, 0) + 1
            self._write(source, {"step/num_discarded": count}, self._last.get(source.rank, 0))

    @exports
    def parameters_synced(self, event: ParametersSynced) -> None:
        source, record = event.source, event.record
        last = self._synced.get(source)
        if self._writes(source.rank) and (last is None or record.step - last >= self._every):
            self._synced[source] = record.step
            scalars = {
                "parameter_sync/duration_seconds": record.duration_seconds,
                "parameter_sync/payload_bytes": record.payload_bytes,
            }
            self._write(source, scalars, record.step)

    @exports
    def ranks_changed(self, event: RanksChanged) -> None:
        if self._writes(event.rank):
            seconds = event.ended_at - event.began_at
            words = f"{event.reason}; the ranks, now {event.num_ranks}, continued after {seconds:.3g} s"
            self._say(event.rank, words, event.step)

    @exports
    def rank_found_slow(self, event: RankFoundSlow) -> None:
        if self._writes(event.source.rank):
            self._say(event.source.rank, str(event.record), event.record.from_step)

    @exports
    def replicas_diverged(self, event: ReplicasDiverged) -> None:
        if self._writes(event.rank):
            step = self._last.get(event.rank, 0) if event.step is None else event.step
            self._say(event.rank, event.words, step)

    def _write(self, source: Source, scalars: dict[str, float], step: int) -> None:
        writer, prefix = self._writers.of(source.rank), self._prefix(source)
        for name, value in scalars.items():
            writer.add_scalar(prefix + name, value, step)

    def _say(self, rank: int, words: str, step: int) -> None:
        self._writers.of(rank).add_text(_EVENTS, words, step)


class _Writers:
    """The writer of each rank of this process. Writers for a directory are opened at their first use.

    Args:
        client: the module `torch.utils.tensorboard`.
        given: the user's writer, or a directory.
        has_directories: whether each rank has a directory of its own.

    Raises:
        TypeError, ValueError: `given` is neither a writer nor a path.
    """

    def __init__(self, client: Any, given: Any, *, has_directories: bool) -> None:
        self._client, self._has_directories = client, has_directories
        self._lock = threading.Lock()
        self._opened: dict[int, SummaryWriter] = {}
        self._given: SummaryWriter | None = None
        self._directory = Path()
        if callable(getattr(given, "add_scalar", None)) and not isinstance(given, type):
            self._given = given
            return
        if not isinstance(given, str | os.PathLike) or not given:
            raise TypeError(
                f"expected writer_or_dir to be a SummaryWriter or a path, got {what_it_is(given)}"
            )
        self._directory = Path(checked_path("writer_or_dir", given))

    def of(self, rank: int) -> SummaryWriter:
        """Return the writer of a rank."""
        if self._given is not None:
            return self._given
        with self._lock:  # ranks can be threads
            if rank not in self._opened:
                directory = self._directory / f"rank-{rank}" if self._has_directories else self._directory
                if not self._opened:
                    atexit.register(self.close)  # otherwise, up to two minutes of a program would be lost
                self._opened[rank] = self._client.SummaryWriter(str(directory))
            return self._opened[rank]

    def close(self) -> None:
        """Close the writers that this object has opened, and flush the user's."""
        if self._given is not None:
            self._given.flush()
        with self._lock:
            opened, self._opened = self._opened, {}
        atexit.unregister(self.close)
        for writer in opened.values():
            writer.close()
