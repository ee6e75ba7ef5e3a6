"""Encodings of what is averaged over ranks, so that fewer bytes travel (docs/compression.md).

Imports: errors, checks, _torch, transport, session.

averager.py   a compression at work on one flat tensor, with error feedback
base.py       what an encoding is: a description, an encoder, requests
cast.py       a narrower floating type
chain.py      one encoding after another; encodings that begin after some steps
comm_hook.py  a compression as a communication hook
exchange.py   answer what an encoder asks for, over a transport
power_sgd.py  low-rank approximation
quantize.py   8, 4 or 2 bits for each value
topk.py       only the largest values
"""

from __future__ import annotations

from syncline.compression.base import Compression
from syncline.compression.cast import Cast
from syncline.compression.chain import After, Chain
from syncline.compression.comm_hook import HookState, hook
from syncline.compression.exchange import MeanExchange
from syncline.compression.power_sgd import PowerSGD
from syncline.compression.quantize import Quantize
from syncline.compression.topk import TopK

__all__ = [
    "After",
    "Cast",
    "Chain",
    "Compression",
    "HookState",
    "MeanExchange",
    "PowerSGD",
    "Quantize",
    "TopK",
    "hook",
]
