"""How long one rank of a job computes, measured beside the other ranks of its host, without synchronization."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from statistics import median

from torch import Tensor, nn

from syncline.tools.plan import Gradient, Job
from syncline.transport.base import Transport

_NUM_WARM_UP = 3


def measure_job(
    name: str,
    module: nn.Module,
    backward: Callable[[], Tensor],
    update: Callable[[], object],
    *,
    transport: Transport,
    num_steps: int = 10,
    state_values: float = 2.0,
) -> Job:
    """Run steps of a module, and return how long their parts take: medians on this rank.

    All ranks call this together, and begin each step together.

    Args:
        name: a name for the job.
        module: the module, not wrapped.
        backward: a function that runs the forward, and returns the loss.
        update: a function that steps the optimizer, and sets gradients to zero.
        transport: the transport between the ranks.
        num_steps: the number of steps to measure.
        state_values: the number of values that the optimizer keeps for each parameter.
    """
    times: dict[str, list[float]] = defaultdict(list)
    ready: dict[str, list[float]] = defaultdict(list)
    found: dict[str, float] = {}
    trained = {key: one for key, one in module.named_parameters() if one.requires_grad}

    def note(key: str) -> Callable[[Tensor], None]:
        def hook(_: Tensor) -> None:
            found[key] = time.perf_counter()

        return hook

    handles = [one.register_post_accumulate_grad_hook(note(key)) for key, one in trained.items()]
    for number in range(-_NUM_WARM_UP, num_steps):
        transport.barrier().wait()
        began = time.perf_counter()
        loss = backward()
        computed = time.perf_counter()
        loss.backward()
        ended = time.perf_counter()
        update()
        transport.barrier().wait()
        if number >= 0:
            times["forward"].append(computed - began)
            times["backward"].append(ended - computed)
            times["update"].append(time.perf_counter() - ended)
            for key, at in found.items():
                ready[key].append((at - computed) / max(1e-9, ended - computed))
        found.clear()
    for handle in handles:
        handle.remove()
    order = sorted(ready, key=lambda key: median(ready[key]))
    return Job(
        name=name,
        gradients=[
            Gradient(key, tuple(trained[key].shape), median(ready[key]), trained[key].element_size())
            for key in order
        ],
        forward=median(times["forward"]),
        backward=median(times["backward"]),
        update=median(times["update"]),
        state_values=state_values,
        times=f"median of {num_steps} steps",
    )
