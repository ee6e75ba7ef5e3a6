"""Which of torch's own DistributedDataParallel tests pass, with which class.

    python tests/torch_suite/torch_suite_survey.py torch                 write torch_passes.json: what torch's passes
    python tests/torch_suite/torch_suite_survey.py syncline [-k PART]    print what ours fails of it, and the errors

About two minutes each on 2 cores.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import torch

from syncline.testing import Outcome, RankPool, Task

HERE = Path(__file__).parent
PASSES = HERE / "torch_passes.json"

TIMEOUT_SECONDS = float(os.environ.get("TS", 60))
FOUR_RANKS = ("test_post_localSGD_optimizer_parity_with_hierarchical",)
"""How the names of tests begin that need four ranks; all others run with two."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("class_name", choices=("torch", "syncline"), metavar="torch|syncline")
    parser.add_argument("-k", default="", metavar="PART", help="only tests whose name contains it")
    options = parser.parse_args()
    sys.path.insert(0, str(HERE))
    pool = RankPool()
    try:
        if options.class_name == "torch":
            _survey_torch(pool, options.k)
        else:
            _survey_ours(pool, options.k)
    finally:
        pool.close()


def _survey_torch(pool: RankPool, part: str) -> None:
    """As they are first; what is skipped for want of GPUs once more with "cuda" meaning "cpu"."""
    import torch_suite_rank

    passed: dict[str, str] = {}
    rest: dict[str, str] = {}
    for name in torch_suite_rank.names():
        if part not in name:
            continue
        for how in ("as it is", "moved to CPU"):
            kind, text = attempt(pool, name, "torch", moved_to_cpu=how == "moved to CPU")
            if kind == "passed":
                passed[name] = how
                break
            if kind != "skipped":
                break
        else:
            text = f"skipped: {text}"
        if name not in passed:
            rest[name] = text
    table = {"torch": torch.__version__, "passed": passed, "not passed": rest}
    print(f"{len(passed)} passed, {len(rest)} did not")
    if not part:
        PASSES.write_text(json.dumps(table, indent=2) + "\n")
        print(f"written: {PASSES}")


def _survey_ours(pool: RankPool, part: str) -> None:
    table = json.loads(PASSES.read_text())["passed"]
    failed = {}
    chosen = {name: how for name, how in table.items() if part in name}
    for name, how in chosen.items():
        kind, text = attempt(pool, name, "syncline", moved_to_cpu=how == "moved to CPU")
        if kind != "passed":
            failed[name] = f"{kind}: {text}"
    print(f"\n{len(chosen)} tests, {len(chosen) - len(failed)} pass, {len(failed)} do not:")
    for name, text in failed.items():
        print(f"\n{name} ({table[name]})\n    " + text.replace("\n", "\n    "))


def num_ranks(name: str) -> int:
    return 4 if name.startswith(FOUR_RANKS) else 2


def attempt(pool: RankPool, name: str, class_name: str, *, moved_to_cpu: bool) -> tuple[str, str]:
    """Run one test; "passed", "skipped", "failed" or "stuck", and why."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        arguments = {
            "name": name,
            "class_name": class_name,
            "folder": folder,
            "moved_to_cpu": moved_to_cpu,
            "expected": "survey",
        }
        outcomes = pool.run(
            num_ranks(name),
            Task(
                module="torch_suite_rank",
                qualname="run",
                arguments=arguments,
                timeout_seconds=TIMEOUT_SECONDS,
                warning_filters=("ignore",),
            ),
        )
    kind, text = _judge(outcomes)
    text = text.replace("survey | ", "")
    how = "cuda=cpu" if moved_to_cpu else ""
    print(f"{time.monotonic() - started:6.1f} s  {kind:8} {name} {how}  {text[:150]!r}", flush=True)
    return kind, text


def _judge(outcomes: list[Outcome]) -> tuple[str, str]:
    kinds = {outcome.kind for outcome in outcomes}
    if kinds == {"passed"}:
        return "passed", ""
    if kinds <= {"skipped", "passed"}:
        return "skipped", next(outcome.text for outcome in outcomes if outcome.kind == "skipped")
    lines = [
        f"rank {rank}: {outcome.text[-1500:] if outcome.kind != 'passed' else 'passed'}"
        for rank, outcome in enumerate(outcomes)
    ]
    if len({line.partition(": ")[2] for line in lines}) == 1:
        lines = [f"all ranks: {outcomes[0].text[-1500:]}"]
    return "stuck" if "stuck" in kinds else "failed", "\n".join(lines)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
