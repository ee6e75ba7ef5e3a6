"""Tests that run on several ranks.

Imports: environment, _torch, session.

hosts.py   two hosts on one machine: network namespaces
plugin.py  the pytest plugin: `@pytest.mark.ranks(n)`
pool.py    a warm pool of rank processes
ports.py   a port that stays free for a store
worker.py  what runs in each of them
"""

from __future__ import annotations
