"""Compressed averages on CUDA. Ranks are threads over one device; skipped where there is none."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from syncline.compression import Cast, Chain, Compression, MeanExchange, PowerSGD, Quantize, TopK
from syncline.transport import Transport, run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

KINDS: list[Compression] = [
    Cast(),
    Quantize(8),
    Quantize(4),
    TopK(0.1),
    PowerSGD(2),
    Chain(PowerSGD(2), Quantize(4)),
    Chain(TopK(0.1), Quantize(8)),
]


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("compression", KINDS, ids=str)
def test_means_are_equal_on_all_ranks_and_what_is_lost_comes_later(
    compression: Compression, num_ranks: int
) -> None:
    numel = 400 * 300 + 77

    def program(transport: Transport) -> tuple[Tensor, Tensor]:
        exchange = MeanExchange(
            compression,
            [(400, 300), (77,)],
            dtype=torch.float32,
            device=torch.device("cuda", 0),
            transport=transport,
        )
        g = torch.Generator().manual_seed(transport.rank)
        came_out, went_in = torch.zeros(numel, device="cuda"), torch.zeros(numel, device="cuda")
        for _ in range(3):
            values = torch.randn(numel, generator=g).cuda()
            went_in += values
            exchange.start(values)
            came_out += exchange.wait()
        kept = [tensors["residual"] for tensors in exchange.memory() if "residual" in tensors]
        return came_out, went_in - torch.cat(kept) if kept else went_in

    ranks = run_ranks(num_ranks, program)
    assert all(torch.equal(other[0], ranks[0][0]) for other in ranks[1:])
    expected = torch.stack([rest for _, rest in ranks]).mean(0)
    tolerance = 0.05 if isinstance(compression, Cast) else 1e-4
    torch.testing.assert_close(ranks[0][0], expected, rtol=0, atol=tolerance)
