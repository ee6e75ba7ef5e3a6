"""Encodings of what is averaged over ranks, so that fewer bytes travel (docs/compression.md).

base.py        what an encoding is; the requests by which it talks to its peers
cast.py        Cast: a narrower floating type
quantize.py    Quantize: 8, 4 or 2 bits, a scale a block
topk.py        TopK: the largest values and their places
power_sgd.py   PowerSGD: two thin factors of each weight matrix
chain.py       Chain: one behind the other
after.py       After: one to begin with, another for the rest
orthogonal.py  orthonormal rows, the same bits on every rank
averager.py    error feedback, and what is kept between two averagings
exchange.py    MeanExchange: an averaging over a transport
comm_hook.py   the same as a communication hook, torch's or ours
"""

from __future__ import annotations

from syncline.compression.after import After
from syncline.compression.base import Compression
from syncline.compression.cast import Cast
from syncline.compression.chain import Chain
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
