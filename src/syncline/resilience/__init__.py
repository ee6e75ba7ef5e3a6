"""Training that goes on when ranks are lost or join.

Imports: nothing of ours.

membership.py   which processes train together: a state machine of one process, without a clock, a store or a transport
"""

from __future__ import annotations
