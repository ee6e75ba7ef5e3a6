"""Train with torch's FSDP2, tensor parallelism or ZeRO, over the shared memory of Syncline's backend.

syncline run -n 2 examples/torch_parallelism.py -- fsdp2
syncline run -n 4 examples/torch_parallelism.py -- tensor     # 2 replicas, each split over 2 ranks
syncline run -n 2 examples/torch_parallelism.py -- zero
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

import syncline as sl

Parts = tuple[nn.Module, torch.optim.Optimizer, DeviceMesh]
"""A module to train, its optimizer, and the mesh of the ranks that get different samples."""


class Network(nn.Module):
    """Two layers, of which the first can be split by columns and the second by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(2, 64), nn.Linear(64, 1)

    def forward(self, points: Tensor) -> Tensor:  # (batch, 2) -> (batch,)
        out: Tensor = self.down(self.up(points).tanh())
        return out[:, 0]


def fsdp2(network: Network) -> Parts:
    """Each rank keeps a shard of every parameter, and gathers the others when they are needed."""
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    for layer in (network.up, network.down, network):
        fully_shard(layer, mesh=mesh)
    return network, torch.optim.AdamW(network.parameters(), lr=0.02), mesh


def tensor(network: Network) -> Parts:
    """Two ranks split each layer, and Syncline's wrapper averages over the replicas."""
    mesh = init_device_mesh(DEVICE, (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "tensor"))
    parallelize_module(network, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    ddp = sl.DistributedDataParallel(network, device_mesh=mesh["data"])
    return ddp, torch.optim.AdamW(ddp.parameters(), lr=0.02, foreach=False), mesh["data"]


def zero(network: Network) -> Parts:
    """Each rank keeps the optimizer's state for its part of the parameters. `sharded=True` is Syncline's own way."""
    ddp = sl.DistributedDataParallel(network)
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=0.02)
    return ddp, optimizer, init_device_mesh(DEVICE, (dist.get_world_size(),))


DEVICE = (
    "cpu"  # the backend serves the memory of one host; CUDA tensors go to NCCL with "cpu:syncline,cuda:nccl"
)
WAYS: dict[str, Callable[[Network], Parts]] = {"fsdp2": fsdp2, "tensor": tensor, "zero": zero}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()
    sl.register_backend()
    dist.init_process_group("cpu:syncline")

    torch.manual_seed(0)  # the same parameters and the same samples on all ranks
    points = 2 * torch.rand(1024, 2) - 1
    dataset = TensorDataset(points, ((points.norm(dim=1) - 0.6).abs() < 0.2).float())  # inside of a ring?
    module, optimizer, mesh = WAYS[args.way](Network())
    sampler = sl.DistributedSampler(dataset, mesh.size(), mesh.get_local_rank())
    loader = DataLoader(dataset, batch_size=64 // mesh.size(), sampler=sampler)
    for _ in range(args.epochs):
        for batch, inside in loader:
            optimizer.zero_grad()
            loss = nn.functional.binary_cross_entropy_with_logits(module(batch), inside)
            loss.backward()
            optimizer.step()
    mean = sl.mean(loss.item())
    if dist.get_rank() == 0:
        print(f"Loss with {args.way} on {dist.get_world_size()} ranks: {mean:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
