"""Tests with ranks.

plugin.py   `@pytest.mark.ranks(n)`
pool.py     the warm pool of processes behind it
worker.py   what runs in each
meeting.py  where they meet: a port that stays free, and the variables of the environment
hosts.py    two hosts on one machine, with a cable that can be slow, or be pulled
"""
