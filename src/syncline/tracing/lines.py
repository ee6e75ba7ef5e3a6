"""The lines of a trace file, made of events.

Every step has the same few events, and after a step the caches are cold: each object and each call that is saved
counts. So the text of such an event is made once, without its numbers. The numbers of all events of a line follow in
one text, which functions in C make (`rows.numbers_text`). All other events are encoded as rows.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from itertools import chain

from syncline.events import (
    BackwardEnded,
    CallEnded,
    ForwardEnded,
    OptimizerStepped,
    ParametersSynced,
    PlaceSeen,
    RankFoundSlow,
    RanksChanged,
    ReplicasDiverged,
)
from syncline.tracing import rows

Event = (
    ForwardEnded
    | BackwardEnded
    | OptimizerStepped
    | ParametersSynced
    | CallEnded
    | RanksChanged
    | RankFoundSlow
    | ReplicasDiverged
    | PlaceSeen
)
"""An event that is recorded."""

_MAX_TEXTS = 256


class Lines:
    r"""The lines of events.

    Examples:
        >>> Lines().of([CallEnded(0, "mean", 0.000005, 0.0000091)])
        b'[["call","mean",5,9]]\n'
    """

    def __init__(self) -> None:
        self._texts: dict[Hashable, str] = {}

    def of(self, events: Iterable[Event]) -> bytes:
        """Return the line of some events of one rank."""
        texts: list[str] = []
        numbers: list[float] = []
        for event in events:
            match event:
                case ForwardEnded():
                    texts.append(self._forward(event, numbers))
                case BackwardEnded() if not event.unused:
                    texts.append(self._backward(event, numbers))
                case OptimizerStepped():
                    texts.append(self._optimizer(event, numbers))
                case _:
                    texts.append(rows.text_of(row_of(event)))
        if numbers:
            texts.append(rows.numbers_text(numbers))
        return rows.line_of(texts)

    def _forward(self, event: ForwardEnded, numbers: list[float]) -> str:
        (_, module), step, began_at, computed_from, ended_at, is_training, buffers, *_ = event
        buffer_bytes = 0 if buffers is None else buffers.payload_bytes
        numbers += (step, began_at, computed_from, ended_at, buffer_bytes)
        key = (module, is_training)
        return self._texts.get(key) or self._new_text(key, rows.forward_text(module, is_training))

    def _backward(self, event: BackwardEnded, numbers: list[float]) -> str:
        (_, module), step, began_at, ended_at, is_synchronized, buckets, layout, metrics, *_ = event
        flat = [*chain.from_iterable(buckets)]
        indices = tuple(flat[::4])
        del flat[::4]
        numbers += (step, began_at, ended_at)
        numbers += flat
        numbers += metrics.values()
        key = (module, layout, is_synchronized, indices, *metrics)
        return self._texts.get(key) or self._new_text(
            key, rows.backward_text(module, layout, is_synchronized, [*map(int, indices)], [*metrics])
        )

    def _optimizer(self, event: OptimizerStepped, numbers: list[float]) -> str:
        (_, module), optimizer, step, began_at, ended_at, is_discarded = event
        numbers += (step, began_at, ended_at)
        key = (module, optimizer, is_discarded)
        return self._texts.get(key) or self._new_text(
            key, rows.optimizer_text(module, optimizer, is_discarded)
        )

    def _new_text(self, key: Hashable, text: str) -> str:
        if len(self._texts) >= _MAX_TEXTS:
            self._texts.clear()
        self._texts[key] = text
        return text


def row_of(event: Event) -> rows.Row:
    """Return the row of an event."""
    match event:
        case ForwardEnded():
            return rows.ForwardRow(
                module=event.source.module,
                step=event.step,
                began=rows.micros(event.began_at),
                computed_from=rows.micros(event.computed_from),
                ended=rows.micros(event.ended_at),
                is_training=event.is_training,
                buffer_bytes=0 if event.buffers is None else event.buffers.payload_bytes,
            )
        case BackwardEnded():
            return rows.BackwardRow(
                module=event.source.module,
                step=event.step,
                began=rows.micros(event.began_at),
                ended=rows.micros(event.ended_at),
                layout=event.layout,
                is_synchronized=event.is_synchronized,
                buckets=[
                    (index, rows.micros(sent), rows.micros(began), rows.micros(ended))
                    for index, sent, began, ended in event.buckets
                ],
                metrics=event.metrics,
                unused=event.unused,
            )
        case OptimizerStepped():
            return rows.OptimizerRow(
                module=event.source.module,
                optimizer=event.optimizer,
                step=event.step,
                began=rows.micros(event.began_at),
                ended=rows.micros(event.ended_at),
                is_discarded=event.is_discarded,
            )
        case ParametersSynced(source, began_at, ended_at, record):
            return rows.SyncRow(
                module=source.module,
                step=record.step,
                began=rows.micros(began_at),
                ended=rows.micros(ended_at),
                what=record.what,
                payload_bytes=record.payload_bytes,
            )
        case CallEnded():
            return rows.CallRow(event.name, rows.micros(event.began_at), rows.micros(event.ended_at))
        case RanksChanged(rank, num_ranks, step, reason, began_at, ended_at, num_lost):
            times = rows.micros(began_at), rows.micros(ended_at)
            return rows.RanksRow(rank, num_ranks, step, reason, *times, num_lost)
        case RankFoundSlow(source, record):
            return rows.SlowRow(source.module, record.from_step, record.rank, str(record))
        case ReplicasDiverged():
            return rows.DivergenceRow(
                check=event.check,
                step=event.step,
                tensor=event.tensor,
                num_differing=event.num_differing,
                minority_ranks=event.minority_ranks,
                agreed_at_step=event.agreed_at_step,
                outcome=event.outcome,
                at=rows.micros(event.at),
            )
        case PlaceSeen():
            return rows.PlaceRow(rows.micros(event.at), event.step, event.words)
