"""Tests with ranks.

plugin.py  `@pytest.mark.ranks(n)`
pool.py    the warm pool of processes behind it
worker.py  what runs in each
hosts.py   two hosts on one machine, with a cable that can be slow, or be pulled
"""
