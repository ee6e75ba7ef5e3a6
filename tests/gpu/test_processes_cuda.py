"""Training by two processes: over NCCL with two GPUs, over Gloo with both ranks on one GPU. Skipped without a GPU.

TEST_GPU_DEVICE=cpu runs the same programs on the CPU, over Gloo, which shows that the programs themselves are right.
"""

from __future__ import annotations

import copy
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hangs
import syncline as sl
from syncline.native import NativeUnavailable, library

DEVICE = os.environ.get("TEST_GPU_DEVICE", "cuda")
pytestmark = [
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]

ONE_GPU, TWO_GPUS, NO_GPU = "both ranks on one GPU", "a GPU for each rank", "the CPU"
DEVICES = {ONE_GPU: "cuda:0", TWO_GPUS: "cuda", NO_GPU: "cpu"}
BACKENDS = {ONE_GPU: "cuda:gloo", TWO_GPUS: "cuda:nccl", NO_GPU: "cpu:gloo"}


@pytest.fixture(params=[NO_GPU] if DEVICE == "cpu" else [ONE_GPU, TWO_GPUS])
def place(request: pytest.FixtureRequest) -> str:
    where: str = request.param
    if where == TWO_GPUS and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    return where


@pytest.fixture
def native_core() -> None:
    try:
        library()
    except NativeUnavailable as error:
        pytest.skip(f"needs the native core: {error}")


def on_two_ranks(program: Callable[..., Any], *args: Any, seconds: float = 240) -> Any:
    """Run a program on two new processes, and return the result of rank 0."""
    return sl.launch(program, ranks=2, args=args, method="spawn", timeout=seconds)


def join(place: str, transport: str = "c10d") -> sl.World:
    world = sl.init(transport=transport, device=DEVICES[place], timeout=60)
    assert BACKENDS[place] in dist.get_backend_config().split(",")
    assert str(world.device) == (f"cuda:{world.rank}" if place == TWO_GPUS else DEVICES[place])
    return world


def network(device: torch.device, *, norm: bool = True) -> nn.Module:
    torch.manual_seed(0)
    first, between = nn.Linear(16, 40, bias=not norm), nn.BatchNorm1d(40) if norm else nn.Identity()
    return nn.Sequential(first, between, nn.ReLU(), nn.Linear(40, 3)).to(device)


def batch(rank: int, step: int, device: torch.device) -> Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * step + rank)).to(device)


def steps(net: nn.Module, optimizer: torch.optim.Optimizer, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Train for one step on each input, and return copies of the parameters."""
    for x in inputs:
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
    return [parameter.detach().cpu().clone() for parameter in net.parameters()]


def trained(net: nn.Module, inputs: Sequence[Tensor], **options: Any) -> list[Tensor]:
    ddp = sl.DistributedDataParallel(net, **options)
    optimizer = ddp.attach(torch.optim.AdamW(ddp.parameters(), lr=0.05))
    found = steps(ddp, optimizer, inputs)
    ddp.sync_parameters_()
    sl.check_replicas(ddp.module)
    return found


# ---------------------------------------------------------------------- training


def train_as_one_process(place: str) -> None:
    world = join(place)
    device = world.device
    halves = [batch(world.rank, step, device).double() for step in range(4)]
    wholes = [torch.cat([batch(rank, step, device) for rank in range(2)]).double() for step in range(4)]
    alone = network(device).double()
    expected = steps(alone, torch.optim.AdamW(alone.parameters(), lr=0.05), wholes)
    for options in (
        {},
        {"gradient_as_bucket_view": True, "bucket_cap_mb": 1e-3},
        {"sharded": True},
        {"replica_check": sl.ReplicaCheck(every=1), "on_nonfinite": "skip"},
        {"device_ids": None if place == NO_GPU else [device]},
    ):
        net = sl.nn.SyncBatchNorm.convert_sync_batchnorm(network(device).double())
        for mine, other in zip(trained(net, halves, **options), expected, strict=True):
            torch.testing.assert_close(
                mine, other, rtol=1e-7, atol=1e-9, msg=lambda m, o=options: f"{o}: {m}"
            )


def test_two_ranks_train_as_one_process_on_the_whole_batch(place: str) -> None:
    on_two_ranks(train_as_one_process, place)


def train_in_other_ways(place: str) -> None:
    world = join(place)
    halves = [batch(world.rank, step, world.device) for step in range(4)]
    for option in (
        {"compression": sl.compression.Cast(torch.bfloat16)},
        {"compression": sl.compression.Quantize(4)},
        {"compression": sl.compression.PowerSGD(2)},
        {"strategy": sl.LocalSGD(2)},
        {"strategy": sl.DiLoCo(2)},
        {"strategy": sl.Gossip("exponential")},
        {"strategy": sl.ParameterServer(1)},
    ):
        trained(network(world.device), halves, **option)


def test_compressions_and_strategies_keep_or_make_replicas_equal(place: str) -> None:
    on_two_ranks(train_in_other_ways, place)


def train_compiled(place: str) -> None:
    world = join(place)
    halves = [batch(world.rank, step, world.device).double() for step in range(4)]
    # On a GPU this mode runs the compiled forward and backward as CUDA graphs.
    how: dict[str, Any] = {"backend": "aot_eager"} if place == NO_GPU else {"mode": "reduce-overhead"}
    expected = trained(network(world.device, norm=False).double(), halves)
    compiled = trained(torch.compile(network(world.device, norm=False).double(), **how), halves)
    for mine, other in zip(compiled, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-7, atol=1e-9)


def test_a_compiled_module_inside_the_wrapper_trains_as_without_compilation(place: str) -> None:
    on_two_ranks(train_compiled, place, seconds=480)


def train_over_a_group_of_the_program(place: str) -> None:
    rank = int(os.environ["RANK"])
    device = torch.device(f"cuda:{rank}" if place == TWO_GPUS else DEVICES[place])
    if place != NO_GPU:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if place == TWO_GPUS else "gloo")
    trained(network(device), [batch(rank, step, device) for step in range(3)])
    assert sl.world().device == device
    assert sl.mean(float(rank)) == 0.5  # NCCL sends even numbers of the host from a GPU
    assert sl.all_reduce_(torch.tensor([1.0 + rank])).tolist() == [3.0]
    dist.destroy_process_group()


def test_a_group_that_the_program_created_is_used(place: str) -> None:
    on_two_ranks(train_over_a_group_of_the_program, place)


class Branches(nn.Module):
    """A module of which each forward uses one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)

    def forward(self, x: Tensor, branch: int) -> Tensor:
        layer = self.second if branch else self.first
        return layer(x)  # type: ignore[no-any-return]


def run_unevenly(place: str) -> None:
    world = join(place)
    x = torch.full((1, 2), 1.0 + world.rank, device=world.device)
    ddp = sl.DistributedDataParallel(Branches().to(world.device), find_unused_parameters=True)
    ddp(x, branch=world.rank).sum().backward()
    grads = [parameter.grad.tolist() for parameter in ddp.parameters()]
    assert grads == [[[0.5, 0.5]], [[1.0, 1.0]]], grads
    strict = sl.DistributedDataParallel(Branches().to(world.device))
    with pytest.raises(sl.errors.UnreducedGradients, match=r"on rank 0: second\.weight\n.*first\.weight"):
        strict(x, branch=world.rank).sum().backward()
    net = nn.Linear(2, 1, bias=False).to(world.device)
    joined = sl.DistributedDataParallel(net)
    with joined.join():
        for _ in range(1 + world.rank):  # rank 1 has one batch more
            joined.zero_grad()
            joined(x).sum().backward()
    sl.check_replicas(net)


def test_ranks_may_use_other_parameters_and_have_other_numbers_of_batches(place: str) -> None:
    on_two_ranks(run_unevenly, place)


# ---------------------------------------------------------------------- verbs, checkpoints, reports


def call_verbs(place: str) -> None:
    world = join(place)
    rank, device = world.rank, world.device
    x = torch.full((3,), 1.0 + rank, device=device)
    assert sl.all_reduce_(x.clone()).tolist() == [3.0] * 3
    assert sl.all_reduce_(x.clone(), "max").tolist() == [2.0] * 3
    assert sl.broadcast_(x.clone().half(), src=1).tolist() == [2.0] * 3
    assert sl.average_(x.clone(), weight=1.0 + rank).tolist() == pytest.approx([5 / 3] * 3)
    assert float(sl.mean(torch.tensor(float(rank), device=device))) == 0.5
    gathered = sl.gather(torch.full((1 + rank,), rank, device=device))
    assert gathered.tolist() == [0, 1, 1]
    assert gathered.device == device
    net = nn.Linear(2, 1).to(device)
    net(torch.full((1, 2), float(rank), device=device)).sum().backward()
    sl.sync_gradients_(net)
    assert net.weight.grad.tolist() == [[0.5, 0.5]]
    sl.barrier()
    sl.broadcast_(net)
    sl.check_replicas(net)
    if rank == 1:
        with torch.no_grad():
            net.bias += 1
    with pytest.raises(sl.errors.ReplicaDivergence, match="bias"):
        sl.check_replicas(net)
    with pytest.raises(ValueError, match="shared memory"):
        sl.share_(net)


def test_verbs_give_the_same_results_on_both_ranks(place: str) -> None:
    on_two_ranks(call_verbs, place)


def save_and_resume(place: str, folder: Path) -> None:
    world = join(place)

    def run(num_steps: int, path: Path, *, load: bool = False, sharded: bool = False) -> list[Tensor]:
        ddp = sl.DistributedDataParallel(network(world.device), sharded=sharded)
        optimizer = ddp.attach(
            torch.optim.AdamW(ddp.parameters(), lr=0.1, fused=sharded)
        )  # its step is a tensor there
        state = sl.TrainState(model=ddp, optimizer=optimizer)
        with sl.Checkpointer(path, stop_signals=()) as checkpointer:
            if load:
                checkpointer.load(state)
                assert state.step == 2
            for step in range(state.step, num_steps):
                optimizer.zero_grad()
                ddp(batch(world.rank, step, world.device)).square().mean().backward()
                optimizer.step()
                state.commit()
            checkpointer.save(state)
        assert all(parameter.device == world.device for parameter in ddp.parameters())
        return [parameter.detach().cpu().clone() for parameter in ddp.parameters()]

    for sharded in (False, True):
        name = f"sharded {sharded}"
        run(2, folder / name, sharded=sharded)
        resumed = run(4, folder / name, load=True, sharded=sharded)
        whole = run(4, folder / f"{name} whole", sharded=sharded)
        assert all(map(torch.equal, resumed, whole))


def test_a_resumed_run_equals_one_that_was_not_interrupted(place: str, tmp_path: Path) -> None:
    on_two_ranks(save_and_resume, place, tmp_path)


class Noise(nn.Module):
    """A layer that adds another number in each call."""

    num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        Noise.num_calls += 1
        return x + Noise.num_calls


def ask_for_reports(place: str) -> None:
    world = join(place)
    x = batch(world.rank, 0, world.device)
    ddp = sl.DistributedDataParallel(network(world.device))

    def step(inputs: Tensor) -> Tensor:
        loss: Tensor = ddp(inputs).square().mean()
        loss.backward()
        return loss

    report = sl.debug.compare_replicas(step, ddp, inputs=(x,))
    assert report.agrees, report
    assert any("gradients after they were reduced" in line for line in report.checked), report
    assert all(parameter.grad is None for parameter in ddp.parameters())
    for _ in range(3):
        step(x)
    text = ddp.explain()
    assert "One step, as recorded on rank" in text
    assert "-> bucket 0" in text
    assert ("The gradients are on cuda, for which this process does not wait" in text) == (place != NO_GPU)
    noisy = nn.Sequential(nn.Linear(16, 4), Noise()).to(world.device)
    found = sl.debug.compare_replicas(lambda inputs: noisy(inputs).sum(), noisy, inputs=(x,))
    assert found.findings[0].module == "1", found


def test_debug_and_explain_describe_a_step_on_the_device(place: str) -> None:
    on_two_ranks(ask_for_reports, place)


# ---------------------------------------------------------------------- failures and mixtures


def lose_rank_1(place: str, folder: Path) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher ends rank 0 two seconds after rank 1, too
    world = join(place)
    ddp = sl.DistributedDataParallel(network(world.device, norm=False))
    try:
        for step in range(1000):
            if (world.rank, step) == (1, 3):
                os.kill(os.getpid(), signal.SIGKILL)
            ddp(batch(world.rank, step, world.device)).square().mean().backward()
            if place != NO_GPU:
                torch.cuda.synchronize()
    except sl.PeerLost as error:
        (folder / "raised").write_text(str(error))
        raise


def test_a_killed_rank_ends_the_job_and_is_named(place: str, tmp_path: Path) -> None:
    with pytest.raises(sl.PeerLost, match="rank 1"):
        on_two_ranks(lose_rank_1, place, tmp_path, seconds=120)
    if place != TWO_GPUS:  # a wait over NCCL is on the GPU, where nothing watches the other processes
        text = (tmp_path / "raised").read_text()
        assert "rank 1: its process has ended" in text
        assert "step 4, backward" in text


STEPS = """
import os, signal, sys, torch, syncline as sl

world = sl.init(transport="c10d", device=sys.argv[1], timeout=60)
first, device = world.rank, world.device
torch.manual_seed(0)
net = torch.nn.Linear(16, 3).double().to(device)
expected = torch.nn.Linear(16, 3).double().to(device)
expected.load_state_dict(net.state_dict())
ddp = sl.DistributedDataParallel(net)
optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.05)
state = sl.TrainState(model=ddp, optimizer=optimizer)
torch.manual_seed(first)
attempts = []
for step in sl.steps(state, until=6):
    with step:
        x = torch.rand(8, 16, dtype=torch.float64, device=device)  # drawn on the device
        attempts.append(step.attempt)
        if (first, step.number) == (1, 3):
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        ddp(x).square().mean().backward()
        optimizer.step()
assert attempts == [1, 1, 1, 2, 1, 1, 1], attempts
# The same on one process: two steps with the batches of both ranks, and four with those of rank 0.
optimizer = torch.optim.AdamW(expected.parameters(), lr=0.05)
generators = [torch.Generator(device).manual_seed(rank) for rank in range(2)]
for number in range(1, 7):
    present = generators if number < 3 else generators[:1]
    x = torch.cat([torch.rand(8, 16, dtype=torch.float64, device=device, generator=one) for one in present])
    optimizer.zero_grad()
    expected(x).square().mean().backward()
    optimizer.step()
for mine, other in zip(net.parameters(), expected.parameters(), strict=True):
    torch.testing.assert_close(mine, other, rtol=1e-7, atol=1e-9)
print(f"rank {first} has made {state.step} steps, {sl.world().size} rank is left")
sl.shutdown()
"""


def test_the_other_rank_repeats_the_step_with_the_same_random_numbers(place: str, tmp_path: Path) -> None:
    if place == TWO_GPUS:
        pytest.skip("a rank that waits over NCCL does not notice that another one was lost")
    (tmp_path / "train.py").write_text(STEPS)
    command = [sys.executable, "-m", "syncline", "run", "--resilient", "-n", "2"]
    command += [str(tmp_path / "train.py"), DEVICES[place]]
    done = hangs.run(command)
    assert done.returncode == 0, done.stderr
    assert "rank 0 has made 6 steps, 1 rank is left" in done.stdout
    assert "step 3: rank 1 of 2 was lost; the ranks, now 1, repeat the step" in done.stderr


def use_one_gpu_over_nccl() -> None:
    torch.cuda.set_device(0)
    dist.init_process_group("nccl")
    with pytest.raises(sl.SynclineError, match="NCCL needs one GPU for each rank"):
        sl.DistributedDataParallel(nn.Linear(2, 1).cuda())


def test_two_ranks_on_one_gpu_over_nccl_are_refused_by_name() -> None:
    if DEVICE != "cuda" or not dist.is_nccl_available():
        pytest.skip("needs NCCL")
    on_two_ranks(use_one_gpu_over_nccl, seconds=120)


def train_on_cpu_and_device(place: str) -> None:
    world = join(place, "auto")
    on_cpu = copy.deepcopy(network(torch.device("cpu"), norm=False))
    wrapped = [sl.DistributedDataParallel(on_cpu)]
    wrapped.append(sl.DistributedDataParallel(network(world.device, norm=False)))
    assert "shared memory" in str(wrapped[0].contract), wrapped[0].contract
    for step in range(3):
        for ddp in wrapped:
            device = next(ddp.parameters()).device
            ddp.zero_grad()
            ddp(batch(world.rank, step, device)).square().mean().backward()
            sl.check_replicas([parameter.grad for parameter in ddp.parameters()])
    for mine, other in zip(*(ddp.parameters() for ddp in wrapped), strict=True):
        torch.testing.assert_close(mine.grad, other.grad.cpu(), rtol=1e-3, atol=1e-4)


@pytest.mark.usefixtures("native_core")
def test_a_module_on_the_cpu_uses_shared_memory_beside_one_on_the_device(place: str) -> None:
    on_two_ranks(train_on_cpu_and_device, place)


def call_torch_over_the_backend(place: str) -> None:
    rank = int(os.environ["RANK"])
    device = torch.device(f"cuda:{rank}" if place == TWO_GPUS else DEVICES[place])
    sl.register_backend()
    on_device = {NO_GPU: "", ONE_GPU: ",cuda:gloo", TWO_GPUS: ",cuda:nccl"}[place]
    dist.init_process_group(f"cpu:syncline{on_device}")
    if place != NO_GPU:
        torch.cuda.set_device(device)
    for where in (torch.device("cpu"), device):
        x = torch.full((3,), 1.0 + rank, device=where)
        dist.all_reduce(x)
        assert x.tolist() == [3.0] * 3
        ddp = nn.parallel.DistributedDataParallel(network(where, norm=False))
        ddp(batch(rank, 0, where)).sum().backward()
        sl.check_replicas([parameter.grad for parameter in ddp.parameters()])
    dist.destroy_process_group()


@pytest.mark.usefixtures("native_core")
def test_torchs_calls_use_shared_memory_for_the_cpu_and_another_backend_for_the_device(place: str) -> None:
    on_two_ranks(call_torch_over_the_backend, place)
