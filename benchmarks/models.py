"""The models that benchmarks train: small GPTs, by size; a CNN with BatchNorm; a chain of many small layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = [
    "CNN",
    "GPT",
    "SIZES",
    "Chain",
    "GPTConfig",
    "GPTOutput",
    "GPTWithDict",
    "GPTWithOutput",
    "GPTWithUnusedBranch",
    "random_batch",
    "random_images",
]


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """The dimensions of a GPT and of its batches."""

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
    """A transformer block, which has attention and a feed-forward network, each after a normalization."""

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
    """A decoder-only transformer whose forward returns the mean cross entropy of its predictions."""

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
    """Return random tokens and random targets, each of shape (batch size, context)."""
    generator = torch.Generator().manual_seed(seed)
    shape = (config.batch_size, config.context)
    tokens = torch.randint(config.vocabulary, shape, generator=generator)
    return tokens, torch.randint(config.vocabulary, shape, generator=generator)


@dataclass(frozen=True, kw_only=True)
class GPTOutput:
    """Everything a GPT can be asked for."""

    loss: Tensor  # ()
    logits: Tensor  # (batch, time, vocabulary)
    hidden_states: list[Tensor]  # a layer each, (batch, time, width)
    by_position: dict[str, dict[str, Tensor]]  # of each layer, of each position: (batch, width)


class GPTWithUnusedBranch(GPT):
    """As above, with one more block that no forward goes through."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.branch = Block(config)


class _GPTInside(nn.Module):
    """A GPT that is asked for everything: some 200 tensors at the smallest size."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gpt = GPT(config)

    def output_of(self, tokens: Tensor, targets: Tensor) -> GPTOutput:
        x = self.gpt.tokens(tokens) + self.gpt.positions.weight[: tokens.shape[1]]
        hidden_states = []
        for block in self.gpt.blocks:
            x = block(x)
            hidden_states.append(x)
        logits = self.gpt.head(self.gpt.norm(x))
        return GPTOutput(
            loss=F.cross_entropy(logits.flatten(0, 1), targets.flatten()),
            logits=logits,
            hidden_states=hidden_states,
            by_position={
                f"layer {layer}": {f"position {t}": row for t, row in enumerate(hidden.unbind(1))}
                for layer, hidden in enumerate(hidden_states)
            },
        )


class GPTWithDict(_GPTInside):
    """Its output is a dict of tensors, lists and dicts of them."""

    def forward(self, tokens: Tensor, targets: Tensor) -> dict[str, object]:
        return dict(vars(self.output_of(tokens, targets)))


class GPTWithOutput(_GPTInside):
    """Its output is a dataclass."""

    def forward(self, tokens: Tensor, targets: Tensor) -> GPTOutput:
        return self.output_of(tokens, targets)


class CNN(nn.Module):
    """Convolutions with BatchNorm, so three buffers a layer; returns the mean cross entropy."""

    def __init__(self, *, num_layers: int = 16, width: int = 24, num_classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, stride=2, padding=1, bias=False)
        self.convolutions = nn.ModuleList(
            nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(num_layers)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(num_layers))
        self.head = nn.Linear(width, num_classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:  # (batch, 3, height, width), (batch,) -> ()
        x = self.stem(images)
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = x + F.relu(norm(convolution(x)))
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


class Chain(nn.Module):
    """Many small layers, of two parameters each; returns the mean square of what comes out."""

    def __init__(self, *, num_parameters: int, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_parameters // 2))

    def forward(self, x: Tensor) -> Tensor:  # (batch, width) -> ()
        for layer in self.layers:
            x = x + 0.1 * layer(x)
        return x.square().mean()


def random_images(*, batch_size: int = 4, num_classes: int = 10, seed: int) -> tuple[Tensor, Tensor]:
    """Images of shape (batch, 3, 32, 32) and labels."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(batch_size, 3, 32, 32, generator=generator)
    return images, torch.randint(num_classes, (batch_size,), generator=generator)
