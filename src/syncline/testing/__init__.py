"""Support for tests that run on several ranks at once.

Imports: faces, tracebacks, words, environment, launchers, _torch, transport, session.

hosts.py   two hosts on one machine: network namespaces
plugin.py  the pytest plugin: `@pytest.mark.ranks(n)`
pool.py    a pool of rank processes that have already imported torch; a port that stays free for their store
worker.py  the program of a rank process
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncline.faces import hand_out

if TYPE_CHECKING:
    from syncline.testing.hosts import HostsUnavailable as HostsUnavailable
    from syncline.testing.hosts import SimulatedHosts as SimulatedHosts
    from syncline.testing.hosts import simulated_hosts as simulated_hosts
    from syncline.testing.pool import Outcome as Outcome
    from syncline.testing.pool import RankPool as RankPool
    from syncline.testing.pool import Task as Task
    from syncline.testing.pool import held_port as held_port
    from syncline.testing.pool import variables_of_rank as variables_of_rank
    from syncline.transport.threads import run_ranks as run_ranks

hand_out(__name__)
