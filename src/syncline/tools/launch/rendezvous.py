"""The meeting point of a job's launchers and ranks: a store that listens at one address.

[Note: why not torch's rendezvous]

Torch's own rendezvous opens two stores that listen on every interface of the host, and a store asks nobody for a
password: who can connect can read and write. A job on one host needs one store, on the loopback. Several hosts may
name the address (`--host`). A restart on one host gets a new store, so that ranks never find addresses of ended ones.
"""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import Any

from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher.api import LaunchConfig

from syncline._torch.process_groups import PrefixStore, Store, TCPStore
from syncline.session.listening import LOOPBACK, bound_socket, interface_of

__all__ = ["config_for_this_host", "listen_at", "socket_variables"]


_BACKEND = "syncline"

_ADDRESS = "listen_at"

_TIMEOUT_SECONDS = 600.0


def listen_at(config: LaunchConfig, address: str) -> None:
    """Have the store of the first host listen at `address` only.

    Args:
        config: of a static rendezvous: its endpoint is where the others connect to, port 0 means any free one.
        address: of this host.
    """
    config.rdzv_backend = _BACKEND
    config.rdzv_configs[_ADDRESS] = address
    rendezvous_handler_registry.register(_BACKEND, _Meeting)


def config_for_this_host(num_processes: int, **others: Any) -> LaunchConfig:
    """Torch's description of a job on this host, reachable from nowhere else."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes,
        run_id=uuid.uuid4().hex,
        rdzv_endpoint=f"{LOOPBACK}:0",
        max_restarts=0,
        **others,
    )
    listen_at(config, LOOPBACK)
    return config


def socket_variables(config: LaunchConfig) -> dict[str, str]:
    """The variables that make Gloo and NCCL listen where the store does."""
    address = config.rdzv_configs.get(_ADDRESS)
    interface = interface_of(address) if address else None
    return {} if interface is None else {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}


class _Meeting(RendezvousHandler):
    """The hosts of a job, counted from 0 by their launchers' command lines; the first one opens the store."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id
        self._host_rank = int(parameters.config.get("rank", 0))
        self._num_hosts = parameters.max_nodes
        self._listen_at = str(parameters.config[_ADDRESS])
        self._timeout = timedelta(seconds=float(parameters.config.get("timeout", _TIMEOUT_SECONDS)))
        self._host, self._port = parse_rendezvous_endpoint(parameters.endpoint, default_port=0)
        self._store: TCPStore | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        if self._store is None or self._port == 0:
            self._store = self._open()
        store: Store = PrefixStore(self._run_id, self._store)
        return RendezvousInfo(
            store, self._host_rank, self._num_hosts, RendezvousStoreInfo(self._host, self._store.port)
        )

    def _open(self) -> TCPStore:
        is_first = self._host_rank == 0
        bound = bound_socket(self._listen_at, self._port) if is_first else None
        port = self._port if bound is None else bound.getsockname()[1]
        return TCPStore(
            self._host,
            port,
            self._num_hosts,
            is_first,
            self._timeout,
            multi_tenant=True,
            master_listen_fd=None if bound is None else bound.detach(),
        )

    def get_backend(self) -> str:
        return _BACKEND

    def get_run_id(self) -> str:
        return self._run_id

    @property
    def use_agent_store(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True
