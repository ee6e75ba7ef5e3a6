"""Compression of values that are averaged over ranks, so that fewer bytes are sent. See docs/guides/compression.md.

Imports: errors, words, checks, native, trees, _torch, transport, session, tensors.

base.py       the interface: the compression, its encoder, and the requests of the encoder
cast.py       Cast: a narrower floating-point type
chain.py      Chain: several compressions in sequence; After: a compression that starts after some averagings
comm_hook.py  a communication hook that averages gradients by a compression
exchange.py   averaging of one flat tensor, with error feedback: as requests, and over a transport
kernels.py    what the native forms of encodings have in common
power_sgd.py  PowerSGD: low-rank approximation
quantize.py   Quantize: 8, 4 or 2 bits per value
topk.py       TopK: only the largest values
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
