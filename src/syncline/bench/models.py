"""The models that are trained: small GPTs, by size."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["GPT", "SIZES", "Block", "GPTConfig", "random_batch"]


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """A GPT and the batch it is trained on."""

    vocabulary: int
    width: int
    num_layers: int
    num_heads: int
    context: int
    batch_size: int


SIZES: dict[str, GPTConfig] = {
    "0.3M": GPTConfig(vocabulary=84, width=96, num_layers=3, num_heads=4, context=64, batch_size=4),
    "5M": GPTConfig(vocabulary=1000, width=256, num_layers=6, num_heads=8, context=64, batch_size=2),
    "19M": GPTConfig(vocabulary=1000, width=512, num_layers=6, num_heads=8, context=64, batch_size=1),
}


class Block(nn.Module):
    """Pre-norm attention and feed-forward."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.width
        self.num_heads = config.num_heads
        self.norm_attention = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.norm_feed_forward = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # (batch, time, width) -> the same
        batch, time, width = x.shape
        heads = self.query_key_value(self.norm_attention(x)).view(batch, time, 3, self.num_heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each (batch, heads, time, width / heads)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(batch, time, width))
        feed_forward: Tensor = self.down(F.gelu(self.up(self.norm_feed_forward(x))))
        return x + feed_forward


class GPT(nn.Module):
    """A decoder that returns the mean cross entropy of its predictions."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:  # (batch, time) twice -> ()
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def random_batch(config: GPTConfig, *, seed: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets, each (batch, context)."""
    generator = torch.Generator().manual_seed(seed)
    shape = (config.batch_size, config.context)
    tokens = torch.randint(config.vocabulary, shape, generator=generator)
    return tokens, torch.randint(config.vocabulary, shape, generator=generator)
