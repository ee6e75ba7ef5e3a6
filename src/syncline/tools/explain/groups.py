"""The process groups that a script creates under `syncline explain`: their other ranks are imitated.

The script may name any backend, such as "nccl". `install` replaces torch's two public functions that create groups, so
that they use the backend whose ranks are imitated (`torch_backend/mirror.py`), and wait for no other process.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from syncline._torch.process_groups import HashStore
from syncline.torch_backend import register_mirror


def install(num_ranks: int) -> None:
    """Let all process groups that this process creates from now on imitate their other ranks.

    Args:
        num_ranks: the number of ranks of a default group, if the script gives none.
    """
    backend = register_mirror()
    init, new = dist.init_process_group, dist.new_group

    @functools.wraps(init)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        given = inspect.signature(init).bind(*args, **kwargs).arguments
        size, rank = given.get("world_size", -1), given.get("rank", -1)
        init(
            backend,
            store=HashStore(),
            world_size=size if size > 0 else num_ranks,
            rank=max(0, rank),
            timeout=given.get("timeout"),
            group_name=given.get("group_name", ""),
        )

    @functools.wraps(new)
    def new_group(*args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(new).bind(*args, **kwargs).arguments
        for name in ("backend", "pg_options", "device_id"):  # those of the default group
            given.pop(name, None)
        return new(**given)

    for module in (dist, c10d):
        for function in (init_process_group, new_group):
            setattr(module, function.__name__, function)
