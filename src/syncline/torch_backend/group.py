"""The process group of the backend "syncline", which uses a transport for CPU tensors.

The group is a Python subclass of torch's `ProcessGroup`. `torch.distributed` calls its methods directly. C++ code (the
reducer, functional collectives) calls them through torch's trampolines. torch 2.15 also supports Python subclasses of
`Backend`. A call through such a subclass takes 5 us longer, and its work is wrapped in an object that never reports
completion. The group therefore uses no such subclass for its collectives. With torch 2.15, the group nevertheless has a
backend of this kind, because torch calls a group's backend to split or record the group.

Torch uses this one group for all devices, even if the program requested backends for other devices as well. This group
therefore creates a separate group for each other device, when the first tensor on that device arrives.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from syncline._torch.lookup import is_there
from syncline._torch.process_groups import (
    C10dBackend,
    PrefixStore,
    backend_on,
    forget_group,
    has_record_of,
    new_group_of,
    serve_cpu_by,
    timeout_of,
)
from syncline.torch_backend.collectives import BACKEND, Collectives
from syncline.transport.base import Transport

_CAN_SUBCLASS_BACKEND = is_there(C10dBackend) and hasattr(C10dBackend, "split")  # torch 2.15


class _Backend(Collectives, C10dBackend):
    """A backend with the collectives of its process group. It serves code that calls the group's backend directly."""

    def __init__(self, transport: Transport, name: str, global_ranks: list[int]) -> None:
        C10dBackend.__init__(self, transport.rank, transport.size)
        Collectives.__init__(self, transport, name, global_ranks)


class SynclineProcessGroup(Collectives, dist.ProcessGroup):  # type: ignore[misc]
    """A process group that uses a transport for CPU tensors, and groups of torch for tensors on other devices.

    Args:
        transport: the transport of the group. The group closes it.
        store: the store of the group.
        name: the name of the group.
        global_ranks: the members of the group, as ranks of the default group. The list is empty for the default group.
        config: the backend of each device, such as "cpu:syncline,cuda:nccl". None means the configuration that torch
            has recorded for this group.
    """

    def __init__(
        self, transport: Transport, store: Any, name: str, global_ranks: list[int], config: str | None = None
    ) -> None:
        dist.ProcessGroup.__init__(self, transport.rank, transport.size)  # type: ignore[call-arg]
        Collectives.__init__(self, transport, name, global_ranks)
        self.setGroupName(name)
        self._store = store
        self._description = "undefined"
        self._config = config
        self._others: dict[str, dist.ProcessGroup] = {}
        self._backend: Any = self
        if _CAN_SUBCLASS_BACKEND:
            self._backend = _Backend(transport, name, global_ranks)
            self._backend._finisher, self._backend._exchanges = self._finisher, self._exchanges
            serve_cpu_by(self, self._backend)

    # ------------------------------------------------------------------ names

    # A slot, because the compiler of torch 2.11 reads one, but calls no property of this package (`NotTraced`).
    __slots__ = ("group_name",)

    def size(self) -> int:
        return self.transport.size

    def rank(self) -> int:
        return self.transport.rank

    def name(self) -> str:
        return BACKEND

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = self.group_name = name  # type: ignore[misc, assignment]

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        self._description = description

    getSize = size  # noqa: N815
    getRank = rank  # noqa: N815
    group_desc = property(getGroupDesc)

    # ------------------------------------------------------------------ devices

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(device) for device in self._backends()]

    def _get_backend(self, device: torch.device) -> Any:
        return self._backend if device.type == "cpu" else backend_on(self.group_for(device), device)

    def group_for(self, device: torch.device) -> dist.ProcessGroup:
        """Return the group for tensors on `device`, which is not the CPU. Create the group at the first call.

        Its backend is the one in the configuration of this group. If torch has no record of this group, the backend is
        torch's default for the device.
        """
        other = self._others.get(device.type)
        if other is None:
            name = self._backends().get(device.type)
            if name is None and not has_record_of(self):
                name = dist.Backend.default_device_backend_map.get(device.type)
            if name is None or name == BACKEND:
                return super().group_for(device)  # raises
            other = self._others[device.type] = new_group_of(
                self._global_ranks,
                self.transport.rank,
                f"{device.type}:{name}",
                self._store,
                f"{self._name}/{device.type}",
                timeout_of(self._options),
                size=self.transport.size,
            )
            # Torch keeps no record of it, so `shutdown` of this group closes it.
            forget_group(other, f"{self._name}/{device.type}")
        return other

    def _backends(self) -> dict[str, str]:
        config = self._config
        if config is None and has_record_of(self):
            config = self._config = str(dist.get_backend_config(self))
        return dict(pair.split(":") for pair in config.split(",")) if config else {"cpu": BACKEND}

    # ------------------------------------------------------------------ lifetime

    def split_group(
        self,
        new_ranks: list[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: Any = None,
        group_desc: str | None = None,
        device_types: list[torch.device] | None = None,
    ) -> dist.ProcessGroup | None:
        """Create a group of the ranks in `new_ranks`. All ranks of this group must make the call.

        Returns:
            The new group. On ranks that are not in `new_ranks`, None.
        """
        if sorted(new_ranks) != list(new_ranks):
            raise ValueError(
                f"split_group: expected the ranks of the new group in rising order, got {new_ranks}"
            )
        transport = self.transport.split(min(new_ranks) if self.transport.rank in new_ranks else None)
        if transport is None:
            return None
        if timeout is not None:
            transport.timeout_seconds = timeout.total_seconds()
        name = f"{self._name}:split:{new_ranks}" if group_name is None else str(group_name)
        backends = self._backends()
        kept = [device.type for device in device_types] if device_types else list(backends)
        config = ",".join(f"{device}:{backend}" for device, backend in backends.items() if device in kept)
        store = PrefixStore(f"{name}/", self._store)
        global_ranks = [self._global_ranks[rank] if self._global_ranks else rank for rank in new_ranks]
        child = SynclineProcessGroup(transport, store, name, global_ranks, config)
        child.setGroupDesc(f"{self._description}:split" if group_desc is None else group_desc)
        return child

    def abort(self) -> None:
        self.transport.abort(f"rank {self.transport.rank} aborted process group {self._name}")
        for other in self._others.values():
            other.abort()

    def shutdown(self) -> None:
        self._finisher.close()
        self.transport.close()
        for other in self._others.values():
            other.shutdown()
        self._others.clear()

    def get_group_store(self) -> Any:
        return self._store

    def _has_hooks(self) -> bool:
        return False
