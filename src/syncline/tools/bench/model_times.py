"""The program of each rank that measures a model for `syncline plan FILE.py:FUNCTION`.

    python -m syncline.tools.bench.model_times FILE.py:FUNCTION OUTPUT

FUNCTION returns the module and its inputs: `return model, (tokens, targets)`. Rank 0 writes a `Job` to OUTPUT as JSON.

A mistake in the file fails on every rank. A rank that fails therefore prints nothing, and records its error for the
launcher, which shows the error of one rank. The traceback begins in the user's file.
"""

from __future__ import annotations

import inspect
import json
import runpy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from syncline import environment, tracebacks
from syncline.session.process import record_failure
from syncline.session.world import init, shutdown, transport_of
from syncline.suggestions import did_you_mean
from syncline.tools.bench.job_times import measure_job


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
    module, inputs = built(path, name)
    module.train()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(module.parameters())
    before = _peak_bytes()

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    job = measure_job(
        f"{Path(path).name}:{name}",
        module,
        lambda: loss_of(module(*inputs)),
        update,
        transport=transport_of(None),
    )
    if world.rank == 0:
        # Besides the gradients and the optimizer's state.
        activations = max(0, _peak_bytes() - before - 3 * job.num_bytes)
        Path(output).write_text(json.dumps(asdict(job) | {"activation_bytes": activations}))
    shutdown()


def built(path: str, name: str) -> tuple[nn.Module, tuple[Any, ...]]:
    """Return the module and the inputs that a function of a file makes.

    Raises:
        ValueError: there is no such function.
        TypeError: it returns something else.
    """
    sys.path.insert(0, str(Path(path).resolve().parent))
    found = runpy.run_path(path, run_name="syncline_plan")
    function = found.get(name)
    if function is not None and not callable(function):
        raise ValueError(f"syncline plan: expected a function {name} in {path}, got {function!r}")
    if function is None:
        functions = [one for one, value in found.items() if callable(value) and not one.startswith("__")]
        raise ValueError(f"syncline plan: {path} has no function {name}{did_you_mean(name, functions)}")
    made = function()
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module):
        inputs = made[1] if isinstance(made[1], list | tuple) else (made[1],)
        return made[0], tuple(inputs)
    raise TypeError(
        f"syncline plan: expected {name}() to return a module and its inputs, as in "
        f"`return model, (tokens, targets)`, got {_shown(made)}. The file is {inspect.getsourcefile(function)}"
    )


def loss_of(output: Any) -> Tensor:
    """Return a scalar of which a backward can be made: the loss in an output, or the sum of its first tensor."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    if isinstance(output, Mapping):
        output = list(output.values())
    while isinstance(output, list | tuple) and output:
        output = output[0]
    if not isinstance(output, Tensor):
        raise TypeError(
            f"syncline plan: expected the module to return a tensor, or something with a tensor, got {_shown(output)}"
        )
    return output if output.dim() == 0 else output.sum()


def _shown(found: Any) -> str:
    if isinstance(found, tuple):
        return f"({', '.join(type(one).__name__ for one in found)})"
    return type(found).__name__


def _peak_bytes() -> int:
    """Return the largest memory of this process so far; 0 where the system does not say it."""
    if sys.platform == "win32":
        return 0
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


if __name__ == "__main__":
    main(sys.argv[1:])
