"""The exporter for TensorBoard, on torch's SummaryWriter."""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syncline import events
from syncline.checks import checked_count, checked_flag, suggests_arguments, what_it_is
from syncline.exporters.base import Exporter, import_client

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


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
        self._client = import_client("torch.utils.tensorboard", exporter="TensorBoard")
        given: Any = writer_or_dir
        self._given: SummaryWriter | None = (
            None if isinstance(given, type) or not hasattr(given, "add_scalar") else given
        )
        if self._given is None and not (isinstance(given, str | os.PathLike) and given):
            raise TypeError(
                f"expected writer_or_dir to be a SummaryWriter or a path, got {what_it_is(given)}"
            )
        self._directory = given
        self._opened: dict[int, SummaryWriter] = {}
        """The writers that this exporter has opened, by rank."""
        self._modules: dict[int, str] = {}
        """The first wrapped module of each rank."""
        self._last: dict[int, int] = {}
        """The last step of each rank."""
        self._num_discarded: Counter[events.Source] = Counter()
        self._synced: dict[events.Source, int] = {}
        """The last step whose parameter sync was written."""

    def stop(self) -> None:
        """Stop receiving events, and write what the writer still holds."""
        super().stop()
        if self._given is not None:
            self._given.flush()
        while self._opened:
            self._opened.popitem()[1].close()

    def backward_ended(self, event: events.BackwardEnded) -> None:
        if not event.ends_step:
            return
        self._last[event.source.rank] = event.step
        seconds = self._step_seconds(event)
        if self._writes(event.source.rank) and (event.step - 1) % self._every == 0:
            duration = {} if seconds is None else {"step/duration_seconds": seconds}
            self._write(event.source, event.step, event.record().scalars() | duration)

    def optimizer_stepped(self, event: events.OptimizerStepped) -> None:
        if event.is_discarded:
            self._num_discarded[event.source] += 1
            scalars = {"step/num_discarded": self._num_discarded[event.source]}
            self._write(event.source, self._last.get(event.source.rank, 0), scalars)

    def parameters_synced(self, event: events.ParametersSynced) -> None:
        record = event.record
        if record.step - self._synced.get(event.source, -self._every) >= self._every:
            self._synced[event.source] = record.step
            scalars = {
                "parameter_sync/duration_seconds": record.duration_seconds,
                "parameter_sync/payload_bytes": record.payload_bytes,
            }
            self._write(event.source, record.step, scalars)

    def ranks_changed(self, event: events.RanksChanged) -> None:
        seconds = event.ended_at - event.began_at
        words = f"{event.reason}; the ranks, now {event.num_ranks}, continued after {seconds:.3g} s"
        self._say(event.rank, event.step, words)

    def rank_found_slow(self, event: events.RankFoundSlow) -> None:
        self._say(event.source.rank, event.record.from_step, str(event.record))

    def replicas_diverged(self, event: events.ReplicasDiverged) -> None:
        step = self._last.get(event.rank, 0) if event.step is None else event.step
        self._say(event.rank, step, event.words)

    def _writes(self, rank: int) -> bool:
        return self._all_ranks or rank == 0

    def _write(self, source: events.Source, step: int, scalars: Mapping[str, float]) -> None:
        if not self._writes(source.rank):
            return
        first = self._modules.setdefault(source.rank, source.module)
        prefix = "" if first == source.module else f"{source.module}/"
        for name, value in scalars.items():
            self._writer(source.rank).add_scalar(prefix + name, value, step)

    def _say(self, rank: int, step: int, words: str) -> None:
        if self._writes(rank):
            self._writer(rank).add_text("syncline/events", words, step)

    def _writer(self, rank: int) -> SummaryWriter:
        if self._given is not None:
            return self._given
        if rank not in self._opened:
            directory = Path(self._directory, f"rank-{rank}" if self._all_ranks else "")
            writer = self._opened[rank] = self._client.SummaryWriter(str(directory))
            # Also at the end of a program that does not call `stop`: up to two minutes of it would be lost.
            weakref.finalize(self, writer.close)
        return self._opened[rank]
