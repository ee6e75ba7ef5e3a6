"""Compression of values that are averaged over ranks, so that fewer bytes are sent. See docs/guides/compression.md.

Imports: errors, suggestions, words, checks, native, trees, _torch, transport, session, tensors.

averager.py   averaging of one flat tensor by a compression, with error feedback
base.py       the interface: the compression, its encoder, and the requests of the encoder
blocks.py     codes of 8, 4 or 2 bits for blocks of values, in PyTorch
cast.py       Cast: a narrower floating-point type
chain.py      Chain: several compressions in sequence; After: a compression that starts after some averagings
comm_hook.py  a communication hook that averages gradients by a compression
exchange.py   averaging over a transport, which answers an encoder's requests
factors.py    thin factors of matrices, in PyTorch
kernels.py    the native form of encodings
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
