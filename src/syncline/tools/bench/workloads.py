"""The workloads of the benchmarks: an all_reduce with each engine, and training steps of small GPTs with each wrapper.

Two more workloads serve as comparisons: a copy of the tensor that all_reduce reduces, and a training step without
synchronization.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from syncline.ddp.wrapper import DistributedDataParallel
from syncline.torch_backend import register_backend
from syncline.transport.base import ReduceOp, Transport
from syncline.verbs import all_reduce_

OURS = "syncline"

OURS_SUM = "syncline, sum only"

IN_PLACE = "syncline, in place"

VERB = "sl.all_reduce_"

BACKEND = "backend syncline"

GLOO = "gloo"

COPY = "copy"


def backend_group(notes: list[str]) -> dist.ProcessGroup | None:
    """Create a process group of all ranks with torch's backend "syncline".

    Returns:
        The group, or None if it could not be created. The reason is then added to `notes`.
    """
    try:
        register_backend()
        group: dist.ProcessGroup = dist.new_group(backend="syncline")
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        notes.append(f'torch.distributed could not create a group with the backend "syncline": {reason}')
        return None
    return group


def engines(
    numel: int, *, transport: Transport, backend: dist.ProcessGroup | None, with_sum: bool = False
) -> dict[str, tuple[Callable[[], object], Tensor]]:
    """Return the engines to measure, by name.

    Args:
        numel: the number of fp32 elements to reduce.
        transport: Syncline's transport between the ranks of torch's default group. The default group uses Gloo.
        backend: a group with the backend "syncline". None omits the engine that uses this group.
        with_sum: whether to add an engine that makes Syncline's all_reduce with a plain sum, without a division.

    Returns:
        For each engine, a function that makes one all_reduce, and the tensor that it reduces. The engine "copy" copies
        the tensor instead.
    """
    plain = torch.ones(numel)
    size = transport.size

    def ours(tensor: Tensor, op: ReduceOp = "mean") -> Callable[[], object]:
        return lambda: transport.all_reduce(tensor, op).wait()

    def by_torch(group: dist.ProcessGroup | None, divide: bool) -> Callable[[], object]:
        def reduce() -> None:
            dist.all_reduce(plain, dist.ReduceOp.SUM if divide else dist.ReduceOp.AVG, group=group)
            if divide:
                plain.div_(size)

        return reduce

    found: dict[str, tuple[Callable[[], object], Tensor]] = {OURS: (ours(plain), plain)}
    if transport.reduces_in_place:
        allocated = transport.allocate(numel, torch.float32, torch.device("cpu"))
        found[IN_PLACE] = (ours(allocated), allocated)
    if with_sum:
        found[OURS_SUM] = (ours(plain, "sum"), plain)
    found[VERB] = (lambda: all_reduce_(plain, op="mean"), plain)
    if backend is not None:
        found[BACKEND] = (by_torch(backend, divide=False), plain)
    found[GLOO] = (by_torch(None, divide=True), plain)
    target = torch.empty(numel)
    found[COPY] = (lambda: target.copy_(plain), plain)
    return found


def checked(
    found: Mapping[str, tuple[Callable[[], object], Tensor]], *, rank: int, size: int
) -> dict[str, Callable[[], object]]:
    """Check that each engine computes the right result, and then set all tensors to 0.

    Args:
        found: the result of `engines`.
        rank: this rank.
        size: the number of ranks.

    Returns:
        The function of each engine, by name.

    Raises:
        RuntimeError: the result of an engine is wrong.
    """
    for name, (call, tensor) in found.items():
        tensor.fill_(rank + 1)
        call()
        expected = size * (size + 1) / 2
        if name == COPY:
            continue
        if name != OURS_SUM:
            expected /= size
        if not torch.allclose(tensor, torch.tensor(expected)):
            raise RuntimeError(f"{name}: expected {expected:g} from all_reduce, got {tensor[:3].tolist()}")
    for _, tensor in found.values():
        tensor.zero_()
    return {name: call for name, (call, _) in found.items()}


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


LOCAL = "not synchronized"

BUCKET_VIEW = "syncline, bucket view"

SHARDED = "syncline, sharded"

Wrap = Callable[[nn.Module], nn.Module]


def wrappers(backend: dist.ProcessGroup | None) -> dict[str, Wrap]:
    """Return the competitors in training, by name. Each is a function that wraps a module for data-parallel training.

    Args:
        backend: a group with the backend "syncline". One competitor is torch's own class with this group. None omits
            this competitor.
    """
    theirs: Any = nn.parallel.DistributedDataParallel
    ours: Any = DistributedDataParallel
    on_backend: dict[str, Wrap] = {
        "torch DDP, backend syncline": partial(theirs, process_group=backend, gradient_as_bucket_view=True)
    }
    return {
        LOCAL: lambda module: module,
        "torch DDP, gloo": theirs,
        "torch DDP, gloo, bucket view": partial(theirs, gradient_as_bucket_view=True),
        **(on_backend if backend is not None else {}),
        OURS: ours,
        BUCKET_VIEW: partial(ours, gradient_as_bucket_view=True),
        SHARDED: partial(ours, sharded=True),
    }


def steps_of(
    model: str, *, rank: int, backend: dist.ProcessGroup | None, notes: list[str]
) -> dict[str, Callable[[], None]]:
    """Return the training steps of all competitors, by name. Each is a function that makes one step.

    Each competitor has its own replica of the model, and uses fused AdamW. All competitors use the same batch.

    Args:
        model: a name in `SIZES`.
        rank: this rank. Its number is also the seed of the batch.
        backend: a group with the backend "syncline", or None to omit the competitor that needs the group.
        notes: a list of texts. If a competitor is not available, the reason is added to this list.
    """
    torch.manual_seed(0)
    base = GPT(SIZES[model])
    batch = random_batch(SIZES[model], seed=rank)
    found = {}
    for name, wrap in wrappers(backend).items():
        try:
            found[name] = _step_of(wrap(copy.deepcopy(base)), batch, attaches=name == SHARDED)
        except (ValueError, NotImplementedError) as error:
            notes.append(f"{name}: {error}")
    return found


def num_parameters_of(model: str) -> int:
    """Return the number of parameters of a GPT.

    Args:
        model: a name in `SIZES`.
    """
    return sum(parameter.numel() for parameter in GPT(SIZES[model]).parameters())


def _step_of(module: nn.Module, batch: tuple[torch.Tensor, ...], *, attaches: bool) -> Callable[[], None]:
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    if attaches:
        optimizer = module.attach(optimizer)  # type: ignore[operator]

    def step() -> None:
        module(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
