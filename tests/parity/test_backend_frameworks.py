"""torch's own programs on the "syncline" backend: they need no other change, and compute what they compute on Gloo."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import syncline as sl
from syncline.transport.shared_memory import SharedMemoryUnavailable


def on_both(program: Callable[[], list[Tensor]]) -> None:
    """Run `program` with Gloo as the default group and then with ours; what it returns must be equal."""
    expected = program()
    use_syncline()
    for mine, theirs in zip(program(), expected, strict=True):
        torch.testing.assert_close(mine, theirs)


def use_syncline() -> None:
    """Put a group over the backend in the default group's place."""
    sl.register_backend()
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._world.pg_map[dist.group.WORLD][1]
    dist.barrier()
    dist.destroy_process_group()
    try:
        dist.init_process_group(
            "cpu:syncline", store=dist.PrefixStore("syncline", store), rank=rank, world_size=size
        )
    except SharedMemoryUnavailable as error:
        pytest.skip(str(error))
    assert type(dist.group.WORLD).__name__ == "SynclineProcessGroup"


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 40), nn.BatchNorm1d(40), nn.Tanh(), nn.Linear(40, 50), nn.Linear(50, 3))


def batch(step: int) -> Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))


def trained(module: nn.Module, num_steps: int = 3) -> nn.Module:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for step in range(num_steps):
        module(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return module


def whole(module: nn.Module) -> list[Tensor]:
    """All of a module's state, sharded parameters put together."""
    return [
        (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for value in module.state_dict().values()
    ]


# ---------------------------------------------------------------------- data parallel


def with_a_hook_and_accumulation() -> nn.Module:
    ddp = nn.parallel.DistributedDataParallel(model())
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    with ddp.no_sync():
        ddp(batch(9)).sum().backward()
    return trained(ddp)


def with_sparse_gradients() -> nn.Module:
    torch.manual_seed(0)
    ddp = nn.parallel.DistributedDataParallel(nn.EmbeddingBag(10, 4, sparse=True, mode="sum"))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(3):
        ddp(torch.tensor([[step, dist.get_rank() + 3]])).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return ddp


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_distributed_data_parallel() -> None:
    options: list[dict[str, Any]] = [
        {},
        {"bucket_cap_mb": 0.005, "gradient_as_bucket_view": True},
        {"find_unused_parameters": True},
        {"static_graph": True},
    ]

    def program() -> list[Tensor]:
        modules = [trained(nn.parallel.DistributedDataParallel(model(), **each)) for each in options]
        modules += [with_a_hook_and_accumulation(), with_sparse_gradients()]
        modules += [trained(sl.DistributedDataParallel(model()))]
        return [value for module in modules for value in whole(module)]

    on_both(program)


@pytest.mark.ranks(2)
def test_an_error_comes_out_of_torch_s_backward() -> None:
    use_syncline()
    ddp = nn.parallel.DistributedDataParallel(model())
    trained(ddp, 2)
    loss = ddp(batch(2)).sum()
    dist.barrier()
    group: Any = dist.group.WORLD
    if dist.get_rank() == 0:
        group.transport.abort("enough of it")
    else:
        with pytest.raises(RuntimeError, match="enough of it"):
            loss.backward()


@pytest.mark.ranks(2)
def test_fully_shard() -> None:
    def program() -> list[Tensor]:
        found = []
        for keeps_parameters in (False, True):
            module = model()
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            for layer in (module[0], module[3]):
                fully_shard(layer, mesh=mesh, reshard_after_forward=not keeps_parameters)
            fully_shard(module, mesh=mesh)
            found += whole(trained(module))[:1]  # batch statistics are each rank's own
        return found

    on_both(program)


# ---------------------------------------------------------------------- meshes


@pytest.mark.ranks(4)
def test_device_meshes_their_sub_groups_and_hybrid_sharding() -> None:
    def program() -> list[Tensor]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
        found = []
        for name in ("rows", "columns"):
            mine = torch.tensor([float(dist.get_rank())])
            dist.all_reduce(mine, group=mesh.get_group(name))
            found.append(mine)
        flat = mesh["rows", "columns"]._flatten("all")
        total = torch.ones(2)
        dist.all_reduce(total, group=flat.get_group())
        tensor = torch.arange(24.0).view(4, 6)
        sharded = distribute_tensor(tensor, mesh, [Shard(0), Shard(1)])
        product = (
            sharded @ distribute_tensor(tensor.t().contiguous(), mesh, [Shard(1), Shard(0)])
        ).full_tensor()
        module = nn.Sequential(*[layer for layer in model() if isinstance(layer, nn.Linear)])
        fully_shard(module, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
        return [*found, total, sharded.full_tensor(), product, *whole(trained(module))]

    on_both(program)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("backend", ["gloo", "syncline"])
def test_tensor_parallel_inside_of_data_parallel(backend: str) -> None:
    if backend == "syncline":
        use_syncline()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    replica = mesh["data"].get_local_rank()

    def losses(wrapped: nn.Module) -> list[float]:
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
        found = []
        for step in range(4):
            inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + replica))
            loss = wrapped(inputs).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    def network() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))

    expected = losses(nn.parallel.DistributedDataParallel(network(), process_group=mesh.get_group("data")))
    split = network()
    parallelize_module(split, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    ddp = sl.DistributedDataParallel(split, device_mesh=mesh["data"])
    assert losses(ddp) == pytest.approx(expected)
    # torch's class loses the parameters in the first forward: named_parameters() is empty from then on.
    shapes = {name: tuple(parameter.shape) for name, parameter in split.named_parameters()}
    assert shapes == {"0.weight": (5, 6), "0.bias": (5,), "2.weight": (3, 5), "2.bias": (3,)}
    with pytest.raises(RuntimeError):
        split(torch.ones(1, 7))
    assert type(split[0].weight) is nn.Parameter  # the layers see parts again, also after an error


# ---------------------------------------------------------------------- functional and object collectives


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore:`torch.distributed._functional_collectives:FutureWarning")  # older names
def test_functional_collectives() -> None:
    def program() -> list[Tensor]:
        group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
        assert group is not None
        mine = torch.arange(6.0).view(3, 2) + rank
        sizes = [1 + (rank + peer) % size for peer in range(size)]
        results = [
            functional.all_reduce(mine, "sum", group),
            functional.all_reduce(mine, "avg", group),
            functional.broadcast(mine, 1, group),
            functional.all_gather_tensor(mine, 0, group),
            functional.reduce_scatter_tensor(torch.arange(4.0 * size) * (rank + 1), "sum", 0, group),
            functional.all_to_all_single(torch.arange(float(sum(sizes))) + rank, sizes, sizes, group),
            *functional.all_reduce_coalesced([mine, mine * 2], "sum", group),
            *functional.all_gather_into_tensor_coalesced([mine, mine * 2], group),
            *functional.reduce_scatter_tensor_coalesced(
                [torch.arange(2.0 * size), torch.ones(size)], "sum", [0, 0], group
            ),
        ]
        return [functional.wait_tensor(result) for result in results]

    on_both(program)


@pytest.mark.ranks(2)
def test_compiled_collectives() -> None:
    importlib.import_module("torch._dynamo")
    # From now on the compiler leaves Syncline out.
    sl.DistributedDataParallel(nn.Linear(1, 1))(torch.ones(1, 1))

    def program() -> list[Tensor]:
        group = dist.group.WORLD
        assert group is not None

        @torch.compile(backend="eager", fullgraph=True)
        def compiled(tensor: Tensor) -> Tensor:
            return functional.all_reduce(tensor * 2, "sum", group) + 1

        return [compiled(torch.arange(3.0) + dist.get_rank())]

    on_both(program)


@pytest.mark.ranks(3)
def test_object_collectives() -> None:
    use_syncline()
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = {"rank": rank, "text": "x" * 100 * rank}
    everyone = [{"rank": r, "text": "x" * 100 * r} for r in range(size)]
    found: list[Any] = [None] * size
    dist.all_gather_object(found, mine)
    assert found == everyone
    told = [mine, rank]
    dist.broadcast_object_list(told, src=1)
    assert told == [everyone[1], 1]
    collected: list[Any] | None = [None] * size if rank == 2 else None
    dist.gather_object(mine, collected, dst=2)
    assert collected == (everyone if rank == 2 else None)
    given: list[Any] = [None]
    dist.scatter_object_list(given, everyone if rank == 0 else None, src=0)
    assert given == [everyone[rank]]
    if rank == 0:
        dist.send_object_list([mine], dst=1)
    elif rank == 1:
        received: list[Any] = [None]
        dist.recv_object_list(received, src=0)
        assert received == [everyone[0]]
