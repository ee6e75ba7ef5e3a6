"""A trace in the format of Chrome, which Perfetto, chrome://tracing and Holistic Trace Analysis read (pure functions).

There is one file for each rank. Each has the rank in `distributedInfo`, as the traces of torch.profiler have it, and a
range "ProfilerStep#N" around each step, by which analyses find the steps. The format is described in "Trace Event
Format" (Google, 2016).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from syncline.tools.report.run import Run
from syncline.tools.report.steps import RankStep

_STEPS, _WORK, _BUCKETS = range(3)
"""The rows of a rank: its steps, what it does, and its buckets."""

_NAMES = {_STEPS: "steps", _WORK: "work and waits", _BUCKETS: "buckets"}


def chrome_trace(run: Run, rank: int) -> dict[str, Any]:
    """Return the trace of one rank, to be written as JSON.

    Args:
        run: the run.
        rank: the rank.
    """
    steps = [ranks[rank] for ranks in run.steps.values() if rank in ranks]
    events = [*_names(rank), *(event for step in steps for event in _step(step))]
    return {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "distributedInfo": {"backend": "syncline", "rank": rank, "world_size": run.num_ranks},
        "traceEvents": events,
    }


def _names(rank: int) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}}
    for row, name in _NAMES.items():
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": row, "args": {"name": name}}


def _step(step: RankStep) -> Iterator[dict[str, Any]]:
    def event(row: int, category: str, name: str, **more: Any) -> dict[str, Any]:
        return {"cat": category, "name": name, "pid": step.rank, "tid": row, **more}

    metrics = {name: value for name, value in step.metrics.items() if math.isfinite(value)}
    yield event(
        _STEPS,
        "user_annotation",
        f"ProfilerStep#{step.step}",
        ph="X",
        ts=step.began,
        dur=step.length,
        args=metrics,
    )
    for span in step.spans:
        name = f"syncline::{span.kind} {span.label}".strip()
        yield event(_WORK, "cpu_op", name, ph="X", ts=span.began, dur=span.length, args={})
    for sent in step.buckets:
        more = {"bytes": sent.payload_bytes, "parameters": list(sent.parameters)} if sent.parameters else {}
        # Buckets overlap, so each is an asynchronous event with an id.
        key = f"{sent.step}/{sent.module}/{sent.bucket}"
        of_bucket = event(_BUCKETS, "bucket", f"bucket {sent.bucket}", id=key)
        yield {**of_bucket, "ph": "b", "ts": sent.sent, "args": more}
        yield {**of_bucket, "ph": "e", "ts": sent.reduced}
