"""Safeguards of the product, taken out one at a time: do the tests notice?

    python tests/mutants.py                                            # all, with the tests of `make test`: for hours
    python tests/mutants.py --only gradients                           # those whose name has this text
    python tests/mutants.py --tests tests/unit/test_gradient_sync.py   # with these tests and no others
    python tests/mutants.py --list
    python tests/mutants.py --check                                    # only whether each mutant still applies
    python tests/mutants.py --json before.json                         # write what is found
    python tests/mutants.py --compare before.json                      # exit status 1 if less is found than there

A mutant is the product with one plausible mistake. It is found if a test fails, or if the tests hang. The tests that
are about its room run first, so most are found in seconds. If they pass, those of `make test` run. A flaky test finds
any mutant, so look at which test it was. The working tree stays as it is: mistakes are made in a copy of the project.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import hangs

__all__ = ["MUTANTS", "Mutant"]

ROOT, PRODUCT = Path(__file__).parents[1], "src/syncline"

LIMIT_SECONDS = 900.0
"""A run of tests that takes longer hangs. `make test` takes a few minutes."""

_PYTEST = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
_IN_WORKERS = ["--numprocesses", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
_ALL_FAST = ["--ignore", "tests/frameworks", "--ignore", "tests/architecture"]

_FAILED = re.compile(r"^(?:FAILED|ERROR) ((?:tests|src)/.+?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Mutant:
    """A mistake in one place of the product."""

    name: str
    path: str
    """The file, from src/syncline on."""
    why: str
    """What is wrong then."""
    old: str
    """A text that the file has exactly once."""
    new: str
    tests: tuple[str, ...] = ()
    """Test files, from tests on, that run first. Those that no longer exist are left out."""


MUTANTS: tuple[Mutant, ...] = (
    # ---------------------------------------------------------------- gradients
    Mutant("gradients-last-bucket", "gradients/reduction.py",
        "gradients of the last bucket are handed out before they arrive",
        "if in_turn:", "if in_turn and bucket is not backward.sent[-1]:", ("unit/test_gradient_sync.py",)),
    Mutant("gradients-join-divisor", "gradients/reducer.py", "ranks without inputs count in the divisor",
        "1.0 if is_sum else 1.0 / num_ranks", "1.0 if is_sum else 1.0 / reduction.transport.size",
        ("parity/test_drop_in.py",)),
    Mutant("gradients-unused-no-sync", "gradients/usage.py", "a parameter that was used under no_sync counts as unused",
        "int(index in now or (index in unreduced and parameter.grad is not None))", "int(index in now)",
        ("unit/test_gradient_sync.py",)),
    Mutant("gradients-lost-hook", "gradients/reducer.py", "gradients of swapped parameters are not looked for",
        "if self.parameters[i].grad is not None]", "if self.parameters[i].grad is None]",
        ("unit/test_ends_of_backwards.py",)),
    Mutant("gradients-own-order", "gradients/layout.py", "each rank lays out buckets in its own order",
        "order = _of_rank_0([*ready, *(i for i in order if i not in seen)], self._transport)",
        "order = [*ready, *(i for i in order if i not in seen)]",
        ("unit/test_bucket_memory.py", "parity/test_drop_in.py")),
    Mutant("gradients-step-guard", "gradients/step_guard.py", "an optimizer steps after an interrupted backward",
        "self._finish(what, True)", "self._finish(what, False)", ("unit/test_ends_of_backwards.py",)),
    # ---------------------------------------------------------------- riders
    Mutant("riders-look", "gradients/riders/replica_look.py",
        "parameters that differ for a part of a step count as drift", "[one for one in now if one.name in at_both]",
        "list(now)", ("unit/test_replica_look.py",)),
    Mutant("riders-mean-not-finite", "gradients/riders/replica_watch.py",
        "a mean that becomes NaN is no reason to compare",
        "if was_finite and not finite:", "if finite and not was_finite:", ("unit/test_replica_check.py",)),
    Mutant("riders-metrics-kept", "gradients/riders/metrics.py", "metrics of earlier steps stay in the mean",
        "        self._reports.clear()\n\n    def _own(self", "        pass\n\n    def _own(self",
        ("unit/test_reported_metrics.py",)),
    Mutant("riders-stop-in-join", "gradients/riders/requests.py", "ranks stop although one of them is without inputs",
        "if words.any_set and not words.any_joined and not self.asked_ranks:",
        "if words.any_set and not self.asked_ranks:", ("state/test_stopping.py",)),
    Mutant("riders-sum-overflows", "gradients/riders/finite.py", "gradients whose sum overflows count as infinite",
        "            return True\n        dtype = values.dtype", "            return True\n        return False",
        ("unit/test_nonfinite.py",)),
    Mutant("riders-nan-to-hook", "gradients/riders/nonfinite.py", "NaN gets into what a compression keeps",
        'self._replaces = self._policy == "zero" or has_hook', 'self._replaces = self._policy == "zero"',
        ("unit/test_nonfinite.py",)),
    Mutant("riders-same-data", "gradients/riders/differences.py", "gradients that are zero are a sign of equal data",
        "elif found and 0 not in found:", "elif found:", ("unit/test_same_data.py",)),
    Mutant("riders-optimizer-steps", "optimizers/attached.py", "the word of optimizers lacks their steps",
        "return (self.num_steps, *settings_of(self.optimizer))", "return tuple(settings_of(self.optimizer))",
        ("unit/test_module_changes.py", "parity/test_silent_failures.py", "unit/test_attach.py")),
    # ---------------------------------------------------------------- ddp, buffers
    Mutant("ddp-no-sync-restored", "gradients/options.py", "no_sync stays on after an exception in its block",
        "        try:\n            yield\n        finally:\n            self.enabled = before\n",
        "        yield\n        self.enabled = before\n", ("unit/test_gradient_sync.py",)),
    Mutant("ddp-join-last", "ddp/join.py", "after join, all get the model of a rank that has ended early",
        "transport.rank if is_last_joiner else -1", "-1 if is_last_joiner else transport.rank",
        ("parity/test_drop_in.py",)),
    Mutant("ddp-new-values", "ddp/wrapping.py", "values of parameters that are new in a module are not compared",
        "for name, p in chosen.parameters if id(p) not in known]",
        "for name, p in chosen.parameters if id(p) in known]", ("parity/test_silent_failures.py",)),
    Mutant("ddp-compared-in-loss", "ddp/replica.py", "a change of the module before a loss counts as compared",
        "self._replace_parts(self.selection, self._inventory)", "self._replace_parts(self.selection)",
        ("unit/test_wrapper.py",)),
    Mutant("ddp-unreduced-step", "ddp/registrations.py", "an attached optimizer steps with gradients of no_sync",
        "if gradients.has_unreduced and gradients.controls.decide():",
        "if gradients.has_unreduced and not gradients.controls.decide():",
        ("unit/test_attach.py", "unit/test_gradient_sync.py")),
    Mutant("ddp-diverge-buffers", "ddp/drift.py", "buffers are not synchronized any more after sl.diverge",
        'self._buffers.pause("sl.diverge lets the replicas drift apart" if is_open else "")',
        'self._buffers.pause("sl.diverge lets the replicas drift apart")',
        ("unit/test_diverge.py", "unit/test_buffers.py")),
    Mutant("buffers-joined", "buffers/pooling.py", "the buffers of a rank without inputs count in the mean",
        "    if not fraction:\n        wire.zero_()\n    elif fraction != 1:",
        "    if fraction != 1 and fraction:", ("parity/test_drop_in.py",)),
    Mutant("buffers-due", "buffers/policies.py", "the forward after sync_buffers_ sends once more",
        "self.due, self.are_equal = False, True", "self.due, self.are_equal = True, True", ("unit/test_buffers.py",)),
    # ---------------------------------------------------------------- transport, liveness, backend
    Mutant("transport-gloo-part", "transport/c10d.py", "each rank gets the part of rank 0",
        "whole.view(self.size, -1)[self.rank]", "whole.view(self.size, -1)[0]",
        ("transport/test_conformance.py", "transport/test_gloo.py")),
    Mutant("transport-gloo-timeout", "transport/c10d_work.py", "the timeout of a wait is ignored",
        "self._wait_in_slices(self.timeout_seconds if timeout_seconds is None else timeout_seconds)",
        "self._wait_in_slices(self.timeout_seconds)", ("transport/test_gloo.py",)),
    Mutant("transport-host-order", "transport/hierarchy.py", "what interleaved hosts gather is not in rank order",
        "self._across is not None and not hosts.is_even", "self._across is not None and not hosts.are_alike",
        ("parity/test_sharded.py",)),
    Mutant("transport-middle-ranks", "transport/agreement.py", "only the first and the last rank compare their calls",
        "len({r[:_DIGEST_BYTES] for r in records}) > 1", "records[0][:_DIGEST_BYTES] != records[-1][:_DIGEST_BYTES]",
        ("unit/test_agreement.py",)),
    Mutant("transport-turn", "verbs/common.py", "two threads of a rank are in one verb at a time",
        "with transport.turn, profiled(name),", "with profiled(name),", ("parity/test_collectives.py",)),
    Mutant("transport-descriptor", "transport/shared_memory/hub.py", "the descriptors of shared memory stay open",
        "        memory.release_file()\n        return memory\n", "        return memory\n",
        ("fault/test_open_files.py",)),
    Mutant("liveness-steady", "liveness/deadlock.py", "a wait that was seen once counts",
        "rank in earlier and earlier[rank].wait == place.wait", "rank in earlier", ("transport/test_deadlock.py",)),
    Mutant("liveness-store-key", "liveness/store.py", "a signed message counts under any key",
        'signed = b"%d %b%b" % (len(name), name, text)', "signed = text", ("unit/test_store_messages.py",)),
    Mutant("liveness-exit", "liveness/at_exit.py", "threads go back into C++ code while Python shuts down",
        "if self._ending not in (None, thread):", "if False:", ("unit/test_at_exit.py",)),
    Mutant("liveness-leave", "liveness/health.py", "a rank that shuts down does not say so, and seems lost",
        "        self.leave()\n        if self.failure is None:", "        if self.failure is None:",
        ("fault/test_loud_failures.py",)),
    Mutant("backend-reduce", "torch_backend/collectives.py",
        "a reduce overwrites the inputs of ranks that are not its root",
        "reduced = tensor if is_root else tensor.detach().clone(memory_format=torch.contiguous_format)",
        "reduced = tensor", ("transport/test_backend.py",)),
    # ---------------------------------------------------------------- compression, tensors, sharded
    Mutant("compression-new-buckets", "compression/comm_hook.py", "residuals are lost when buckets are laid out anew",
        "                return known.exchange\n            self._carry()\n", "                return known.exchange\n",
        ("unit/test_compression_exchange.py",)),
    Mutant("compression-mean-error", "compression/quantize.py", "most of the error of an encoded mean is lost",
        "lost=own_lost, factor=num_ranks", "lost=own_lost", ("unit/test_compression.py",)),
    Mutant("compression-after-count", "compression/chain.py", "the state lacks the number of averagings",
        '            | {"num_averagings": self._count}\n', "",
        ("unit/test_compression.py", "unit/test_compression_exchange.py")),
    Mutant("tensors-moved", "tensors/broadcasting.py",
        "the plan for former memory is used after tensor.data was replaced",
        "if [tensor.data_ptr() for tensor in self._tensors] != self._addresses:", "if False:",
        ("unit/test_tensors.py",)),
    Mutant("tensors-half-sums", "tensors/reduction.py", "16-bit values are scaled and added up in 16 bits",
        "return sent_from, torch.float32 if is_widened else dtype", "return sent_from, dtype",
        ("unit/test_verbs_average.py",)),
    Mutant("sharded-part-offset", "sharded/state.py", "the saved part of a parameter begins where its whole would",
        "bucket_shard.plan.offsets[position] + from_ - piece.start",
        "bucket_shard.plan.offsets[position] - piece.start", ("state/test_checkpoint_of_shards.py",)),
    Mutant("sharded-wait-to-write", "sharded/optimizer.py",
        "a rank writes its shard while others still compute with it",
        "        self.copy.wait_to_write()\n", "", ("parity/test_sharded.py",)),
    # ---------------------------------------------------------------- strategies, verbs, evolution
    Mutant("strategies-rounding", "strategies/execution/outer_step.py",
        "what rounding to bfloat16 has changed counts as learnt",
        "torch.sub(common.to(local.dtype).to(common.dtype), local, out=moved)", "torch.sub(common, local, out=moved)",
        ("unit/test_strategies_on_threads.py",)),
    Mutant("strategies-mixing", "strategies/execution/outer_step.py",
        "the weights of own and common values are swapped",
        "lerp_(common.detach(), 1 - mixing)", "lerp_(common.detach(), mixing)", ("parity/test_strategies.py",)),
    Mutant("strategies-push-sum", "strategies/execution/push_sum.py",
        "the weight of gossip does not move with the values",
        "        self.weight = total\n", "", ("parity/test_strategies.py",)),
    Mutant("strategies-uncompared", "strategies/execution/driver.py",
        "ranks do not compare their settings before a sync",
        "        if are_blocking(actions):", "        if False:", ("unit/test_strategies_on_threads.py",)),
    Mutant("verbs-nan-score", "verbs/broadcast.py", "the rank with a score of NaN can be the best",
        "[rank for rank, number in enumerate(scores) if not math.isnan(number)]", "list(range(len(scores)))",
        ("unit/test_verbs_replicas.py", "parity/test_verbs_processes.py")),
    Mutant("evolution-buffers", "evolution/members.py", "a member is evaluated with the buffers of another",
        "loss_fn(self._module)))\n                    restore_buffers()\n", "loss_fn(self._module)))\n",
        ("unit/test_evolution.py",)),
    # ---------------------------------------------------------------- checkpoint, data
    Mutant("checkpoint-manifest", "checkpoint/directory.py", "the checksum of the manifest is not looked at",
        'if content[-1:] != b"\\n" or found != checksum(text).encode():', 'if content[-1:] != b"\\n":',
        ("state/test_saves_on_disk.py",)),
    Mutant("checkpoint-rename", "checkpoint/directory.py", "a save gets its name before its files are durable",
        "            self._files.sync_directory(path)\n            try:", "            try:",
        ("state/test_saves_on_disk.py",)),
    Mutant("checkpoint-undo", "checkpoint/rollback.py", "a load that fails leaves a part of what it has loaded",
        "                        restore()\n", "                        pass\n", ("state/test_failed_load.py",)),
    Mutant("checkpoint-background", "checkpoint/contents.py", "a save in the background has values of later steps",
        "return copy.copy_(tensor)", "return tensor.detach().cpu().contiguous()", ("state/test_checkpoint.py",)),
    Mutant("checkpoint-swallowed", "checkpoint/checkpointer.py",
        "the future of a save does not have the error of the save",
        '            why = f"{type(error).__name__}: {error}"\n            raise\n',
        '            why = f"{type(error).__name__}: {error}"\n', ("state/test_checkpoint.py",)),
    Mutant("data-resume", "data.py", "a rank with fewer samples resumes in the old epoch",
        'return first if is_over and own["epoch"] < first["epoch"] else own', "return own",
        ("unit/test_sampler_state.py", "state/test_another_number_of_ranks.py")),
    # ---------------------------------------------------------------- resilience, launcher, session
    Mutant("resilience-majority", "resilience/membership.py", "half of the ranks train on, and so may the other half",
        "2 * len(stayed) <= len(stayed) + len(missing)", "2 * len(stayed) < len(stayed) + len(missing)",
        ("unit/test_membership.py",)),
    Mutant("resilience-sources", "resilience/membership.py", "a rank that is a step behind hands its state on",
        "sources = tuple(name for name in stayed if observed.reports[name].step == step)", "sources = tuple(stayed)",
        ("unit/test_membership.py",)),
    Mutant("resilience-lost-at-meeting", "resilience/register.py",
        "a member that is killed before the others connect to it counts as late",
        "            gone = self.ended(missing)\n", "            gone = self._left(missing)\n",
        ("unit/test_membership.py",)),
    Mutant("resilience-watch", "resilience/watch.py", "a lost host is noticed only when a collective has timed out",
        "elif now - watched.seen > SILENT_SECONDS and", "elif False and", ("unit/test_membership.py",)),
    Mutant("resilience-step-again", "resilience/steps.py", "a rank that has loaded the end of a step makes it again",
        "if self.training.state.step >= step.number:", "if self.training.state.step > step.number:",
        ("unit/test_membership.py",)),
    Mutant("resilience-made-before", "resilience/training.py", "a step that an optimizer has made is made again",
        "attached.num_made_before = attached.num_steps - made", "attached.num_made_before = 0",
        ("unit/test_membership.py",)),
    Mutant("launch-exit-code", "tools/launch/failures.py", "the exit code of a killed rank is the number of the signal",
        "128 - self.return_code if self.return_code < 0", "-self.return_code if self.return_code < 0",
        ("launch/test_first_failure.py",)),
    Mutant("launch-stopped", "tools/launch/failures.py", "a rank that stopped as requested failed first",
        "[failure for failure in _without_ended(failures) if not failure.has_stopped] or failures",
        "_without_ended(failures)", ("launch/test_first_failure.py",)),
    Mutant("session-hook", "session/session.py", "sl.shutdown leaves its excepthook behind",
        "                joined.hook.remove()\n", "                pass\n", ("unit/test_world.py",)),
    # ---------------------------------------------------------------- native core, tools
    Mutant("native-gone", "native/loading.py", "a library that is not there any more is said to be found",
        "return found if found.is_file() else None", "return found", ("unit/test_build.py",)),
    Mutant("plan-queue", "tools/plan/predict.py", "buckets do not wait for each other on the link",
        "free = max(free, one.ready + late) + one.on_link", "free = one.ready + late + one.on_link",
        ("unit/test_plan.py",)),
    Mutant("explain-no-sync", "tools/explain/rows.py", "a micro-batch under no_sync ends the step that is shown",
        "any(one.is_synchronized for one in ended) or any(", "bool(ended) or any(", ("unit/test_explain.py",)),
)  # fmt: skip


# ---------------------------------------------------------------------- the copy


def problem_of(mutant: Mutant, project: Path) -> str:
    """Return why a mutant does not apply, perhaps because the product was rearranged; "" if it applies."""
    file = project / PRODUCT / mutant.path
    text = file.read_text() if file.is_file() else ""
    if (number := text.count(mutant.old)) != 1:
        return f"{mutant.name}: expected the old text once in {mutant.path}, found it {number} times"
    try:
        compile(text.replace(mutant.old, mutant.new), mutant.path, "exec", dont_inherit=True)
    except SyntaxError as error:
        return f"{mutant.name}: {mutant.path} does not compile any more: {error}"
    return ""


def check(mutants: Sequence[Mutant], project: Path) -> None:
    """End this program if a mutant does not apply."""
    if problems := [problem for mutant in mutants if (problem := problem_of(mutant, project))]:
        raise SystemExit("\n".join(problems))


def copy_project(project: Path) -> None:
    """Copy what git lists of the project, as it is now, and give the copy a virtual environment."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(listing, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
    for name in filter(None, os.fsdecode(listed).split("\0")):
        if os.path.lexists(ROOT / name):  # git also lists files that were deleted just now
            (project / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, project / name, follow_symlinks=False)
    link_environment(project)


def link_environment(project: Path) -> None:
    """Give the copy a virtual environment that imports it: links to all that is installed in .venv.

    PYTHONPATH would not do. The editable install has an import hook, which finds the package in the working tree before
    Python looks at any path, and some tests set PYTHONPATH themselves. So files that name the folder of the project,
    which are that hook and the commands in bin, are copied with the folder of the copy instead. The native library is
    in site-packages, and is linked as all else.
    """
    packages = next(ROOT.glob(".venv/lib/python*/site-packages"))
    folders = [ROOT / ".venv", ROOT / ".venv" / "bin", *(packages, *packages.parents[:2])]
    for folder in folders:
        twin = project / folder.relative_to(ROOT)
        twin.mkdir(parents=True, exist_ok=True)
        for entry in folder.iterdir():
            if entry in folders or entry.name == "__pycache__":  # byte code of the hook must not be shared
                continue
            content = entry.read_bytes() if entry.is_file() and not entry.is_symlink() else b""
            if os.fsencode(ROOT) in content and b"\0" not in content:
                (twin / entry.name).write_bytes(content.replace(os.fsencode(ROOT), os.fsencode(project)))
                shutil.copymode(entry, twin / entry.name)
            else:
                (twin / entry.name).symlink_to(os.readlink(entry) if entry.is_symlink() else entry)


@contextlib.contextmanager
def planted(mutant: Mutant, project: Path) -> Iterator[None]:
    """Make the mistake in the copy for the time of a block."""
    file = project / PRODUCT / mutant.path
    text, when = file.read_text(), file.stat()
    file.write_text(text.replace(mutant.old, mutant.new))
    try:
        yield
    finally:
        file.write_text(text)
        os.utime(file, ns=(when.st_atime_ns, when.st_mtime_ns))  # byte code of the mutant does not fit it


# ---------------------------------------------------------------------- the tests


def run(project: Path, tests: Sequence[str], limit_seconds: float) -> str:
    """Run tests in the copy; all of `make test` if none is given. Return the first that fails, or "" if all pass."""
    left_out = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "PYTEST_ADDOPTS")
    variables = {name: value for name, value in os.environ.items() if name not in left_out}
    variables["PATH"] = variables["PATH"].replace(str(ROOT / ".venv"), str(project / ".venv"))
    tier = "not timing" if tests else "not real and not timing and not nightly"
    command = [f"{project}/.venv/bin/python", *_PYTEST, "-m", tier, *_IN_WORKERS, *(tests or _ALL_FAST)]
    try:
        done = hangs.run(command, timeout_seconds=limit_seconds, cwd=project, env=variables)
    except TimeoutError:
        return f"hung: no end after {limit_seconds:g} s"
    output, status = done.stdout + done.stderr, done.returncode
    if status in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        return ""
    if status == pytest.ExitCode.USAGE_ERROR:
        raise SystemExit(f"pytest could not run the tests:\n{output[-3000:]}")
    failed = _FAILED.search(output)
    return failed[1] if failed is not None else f"pytest ended with status {status}"


def search(project: Path, mutant: Mutant, tests: Sequence[str], limit_seconds: float) -> str:
    """Run the tests about a mutant, and then those of `make test`, until one fails; with `tests` only these.

    Returns:
        The first failing test, or what else was wrong; "" if nothing was.
    """
    own = [f"tests/{name}" for name in mutant.tests if (project / "tests" / name).exists()]
    runs: list[Sequence[str]] = [tests] if tests else [own, []] if own else [[]]
    with planted(mutant, project):
        return next(filter(None, (run(project, each, limit_seconds) for each in runs)), "")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="a part of the names of the mutants")
    parser.add_argument("--tests", nargs="+", default=[], metavar="PATH", help="run these tests only")
    parser.add_argument("--list", action="store_true", help="show the mutants, and run nothing")
    parser.add_argument(
        "--check", action="store_true", help="show which mutants do not apply, and run nothing"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what is found, after each mutant")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="what --json has written before")
    parser.add_argument(
        "--limit", type=float, default=LIMIT_SECONDS, metavar="SECONDS", help="for a run of tests"
    )
    args = parser.parse_args(arguments)
    mutants = [mutant for mutant in MUTANTS if args.only in mutant.name]
    if not mutants:
        parser.error(f"expected --only to be a part of a name that --list shows, got {args.only!r}")
    if missing := [test for test in args.tests if not (ROOT / test.partition("::")[0]).exists()]:
        parser.error(f"expected --tests to be files or folders of the project, got {', '.join(missing)}")
    if args.list:
        for mutant in mutants:
            print(f"{mutant.name:26} {mutant.path:42} {mutant.why}")
        return 0
    check(mutants, ROOT)
    if args.check:
        print(f"{len(mutants)} mutants apply")
        return 0
    before = {} if args.compare is None else json.loads(args.compare.read_text())
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as folder:
        project = Path(folder).resolve() / "project"
        copy_project(project)
        check(mutants, project)  # the working tree may have changed
        for mutant in mutants:
            begun = time.monotonic()
            test = search(project, mutant, args.tests, args.limit)
            seconds = round(time.monotonic() - begun, 1)
            results[mutant.name] = {"found": bool(test), "test": test, "seconds": seconds}
            said = "found" if test else "NOT FOUND"
            print(f"{mutant.name:26} {said:9} {seconds:7.1f} s  {test or mutant.why}", flush=True)
            if args.json is not None:
                args.json.write_text(json.dumps(results, indent=1) + "\n")
    found = {name for name, result in results.items() if result["found"]}
    print(f"{len(found)} of {len(results)} found")
    lost = [name for name in results.keys() - found if before.get(name, {}).get("found")]
    for name in sorted(lost):
        print(f"found in {args.compare}, but not now: {name}, by {before[name]['test']}")
    return int(bool(lost))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
