"""The store at which a job's launchers and ranks meet. It listens at one address.

[Note: why not torch's rendezvous]

Torch's own rendezvous opens two stores that listen on every interface of the host. A store has no password: every
process that can connect can read and write. A job on one host needs one store, on the loopback interface. With several
hosts, the user may set the address (`--host`). A restart on one host creates a new store, so that ranks never find
addresses of ranks that have ended.
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
    """Make the store of the first host listen at `address` only.

    Args:
        config: configuration of a static rendezvous. Other hosts connect to its endpoint; port 0 means any free port.
        address: an address of this host.
    """
    config.rdzv_backend = _BACKEND
    config.rdzv_configs[_ADDRESS] = address
    rendezvous_handler_registry.register(_BACKEND, _Meeting)


def config_for_this_host(num_processes: int, **others: Any) -> LaunchConfig:
    """Return torch's configuration of a job on this host that other hosts cannot reach."""
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
    """Return the variables that make Gloo and NCCL use the same network interface as the store."""
    address = config.rdzv_configs.get(_ADDRESS)
    interface = interface_of(address) if address else None
    return {} if interface is None else {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}


class _Meeting(RendezvousHandler):
    """A rendezvous of hosts whose numbers, from 0, are set on the command line. The first host opens the store."""

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
