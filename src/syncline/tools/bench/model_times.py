"""The program of each rank that measures a model for `syncline plan FILE.py:FUNCTION`.

    python -m syncline.tools.bench.model_times FILE.py:FUNCTION OUTPUT

FUNCTION returns the module and its inputs: `return model, (tokens, targets)`. Rank 0 writes a `Job` to OUTPUT as JSON.
The ranks measure how long the parts of a step take beside each other, without synchronization.

A mistake in the file fails on every rank. A rank that fails therefore prints nothing, and records its error for the
launcher, which shows the error of one rank. The traceback begins in the user's file.
"""

from __future__ import annotations

import json
import runpy
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from syncline import environment, tracebacks
from syncline.checks import did_you_mean
from syncline.session.process import record_failure
from syncline.session.world import init, shutdown, transport_of
from syncline.tools.plan.job import Gradient, Job
from syncline.transport.base import Transport
from syncline.trees import leaves

_NUM_WARM_UP = 3


def main(argv: Sequence[str]) -> None:
    """Measure a model, and let rank 0 write its times to a file.

    Args:
        argv: the arguments FILE.py:FUNCTION and OUTPUT.
    """
    try:
        _measure(*argv)
    except Exception as error:
        path = environment.error_file()
        if path is None:
            raise
        described = tracebacks.describe(error)
        record_failure(error, path, brief=described.brief, whole=described.whole)
        sys.exit(1)


def _measure(model: str, output: str) -> None:
    path, _, name = model.rpartition(":")
    world = init(device="cpu")
    module, inputs = _built(path, name)
    optimizer = torch.optim.AdamW(module.parameters())
    before = _peak_bytes()
    job = measure_job(f"{Path(path).name}:{name}", module.train(), inputs, optimizer, transport_of(None))
    if world.rank == 0:
        # Besides the gradients and the optimizer's state.
        activations = max(0, _peak_bytes() - before - 3 * job.num_bytes)
        Path(output).write_text(json.dumps(asdict(job) | {"activation_bytes": activations}))
    shutdown()


def measure_job(
    name: str,
    module: nn.Module,
    inputs: Sequence[Any],
    optimizer: torch.optim.Optimizer,
    transport: Transport,
    *,
    num_steps: int = 10,
) -> Job:
    """Run steps of a module, and return how long their parts take: medians on this rank.

    All ranks call this together, and begin each step together.

    Args:
        name: a name for the job.
        module: the module, not wrapped.
        inputs: the arguments of its forward.
        optimizer: the optimizer of its parameters.
        transport: the transport between the ranks.
        num_steps: the number of steps to measure.
    """
    times: list[tuple[float, float, float]] = []
    ready: dict[str, list[float]] = defaultdict(list)
    computed = 0.0
    trained = {key: one for key, one in module.named_parameters() if one.requires_grad}

    def note(key: str, _: Tensor) -> None:
        ready[key].append(time.perf_counter() - computed)

    handles = [one.register_post_accumulate_grad_hook(partial(note, key)) for key, one in trained.items()]
    for _ in range(_NUM_WARM_UP + num_steps):
        transport.barrier().wait()
        began = time.perf_counter()
        loss = _loss_of(module(*inputs))
        computed = time.perf_counter()
        loss.backward()
        ended = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        transport.barrier().wait()
        times.append((computed - began, ended - computed, time.perf_counter() - ended))
    for handle in handles:
        handle.remove()
    forward, backward, update = map(median, zip(*times[_NUM_WARM_UP:], strict=True))
    at = {key: min(1.0, median(found[_NUM_WARM_UP:] or found) / backward) for key, found in ready.items()}
    return Job(
        name=name,
        gradients=[
            Gradient(key, tuple(trained[key].shape), at[key], trained[key].element_size())
            for key in sorted(at, key=at.__getitem__)
        ],
        forward=forward,
        backward=backward,
        update=update,
        times=f"median of {num_steps} steps",
    )


def _built(path: str, name: str) -> tuple[nn.Module, Sequence[Any]]:
    """Return the module and the inputs that a function of a file makes.

    Raises:
        ValueError: there is no such function.
        TypeError: it returns something else.
    """
    sys.path.insert(0, str(Path(path).resolve().parent))
    found = {
        key: value for key, value in runpy.run_path(path, run_name="syncline_plan").items() if callable(value)
    }
    if name not in found:
        raise ValueError(f"syncline plan: {path} has no function {name}{did_you_mean(name, found)}")
    made = found[name]()
    if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[0], nn.Module):
        raise TypeError(
            f"syncline plan: expected {name}() of {path} to return a module and its inputs, as in "
            f"`return model, (tokens, targets)`, got a {type(made).__name__}"
        )
    return made[0], made[1] if isinstance(made[1], list | tuple) else (made[1],)


def _loss_of(output: Any) -> Tensor:
    """Return a scalar of which a backward can be made: the loss in an output, or the sum of its first tensor."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    for _, one in leaves(loss if isinstance(loss, Tensor) else output):
        if isinstance(one, Tensor):
            return one.sum()
    raise TypeError(f"syncline plan: expected the module to return a tensor, got {type(output).__name__}")


def _peak_bytes() -> int:
    """Return the largest memory of this process so far; 0 where the system does not say it."""
    if sys.platform == "win32":
        return 0
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


if __name__ == "__main__":
    main(sys.argv[1:])
