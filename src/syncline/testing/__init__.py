"""Tests that run on several ranks.

Imports: faces, environment, _torch, transport, session.

hosts.py   two hosts on one machine: network namespaces
plugin.py  the pytest plugin: `@pytest.mark.ranks(n)`
pool.py    a warm pool of rank processes
ports.py   a port that stays free for a store, and the variables of a rank
worker.py  the program of a rank process
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncline.faces import hand_out

if TYPE_CHECKING:
    from syncline.testing.hosts import HostsUnavailable, TwoHosts, two_hosts
    from syncline.testing.pool import Outcome, RankPool, Task
    from syncline.testing.ports import held_port, variables_of_rank
    from syncline.transport.threads import run_ranks

__all__ = [
    "HostsUnavailable",
    "Outcome",
    "RankPool",
    "Task",
    "TwoHosts",
    "held_port",
    "run_ranks",
    "two_hosts",
    "variables_of_rank",
]

_NAMES = {  # not imported at once, because pytest imports the plugin in every project, also in those without torch
    "syncline.testing.hosts": ("HostsUnavailable", "TwoHosts", "two_hosts"),
    "syncline.testing.pool": ("Outcome", "RankPool", "Task"),
    "syncline.testing.ports": ("held_port", "variables_of_rank"),
    "syncline.transport.threads": ("run_ranks",),
}
hand_out(__name__, _NAMES)
