"""EvolutionStrategy against a reference of a few lines, over ranks as threads: same bits, few bytes, loud errors."""

from __future__ import annotations

import copy
import functools
import math
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import syncline as sl
from syncline.evolution import strategy as strategy_module
from syncline.evolution.members import noise_, pair_weights
from syncline.transport import Transport, run_ranks
from syncline.words import format_bytes

EXAMPLES = Path(__file__).parents[2] / "examples"
X = torch.linspace(-1, 1, 24).view(8, 3)
Y = X.sum(1, keepdim=True).sin()


def network(seed: int = 0) -> nn.Sequential:
    """Two layers with tied weights between them, one frozen parameter, a BatchNorm in train mode."""
    g = torch.Generator().manual_seed(seed)  # torch's own is shared by the threads
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    for p in module.parameters():
        nn.init.normal_(p, generator=g)
    module[2].weight = module[0].weight
    module[4].bias.requires_grad_(False)
    return module


def error(module: nn.Module) -> Tensor:
    return F.mse_loss(module(X), Y)


def error_of_weight(module: nn.Module) -> Tensor:
    return module.weight.square().sum()


def fail(error: Exception, module: nn.Module) -> float:
    raise error


def state_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in module.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def after(
    num_ranks: int, num_steps: int = 4, population: int = 10, optimizer: Any = torch.optim.Adam
) -> list[tuple[dict[str, Tensor], list[sl.EvolutionRecord]]]:
    """State and records of each rank after some steps; ranks begin with different values."""

    def program(transport: Transport) -> tuple[dict[str, Tensor], list[sl.EvolutionRecord]]:
        module = network(transport.rank)
        es = sl.EvolutionStrategy(module, 0.1, 0.05, population, 7, optimizer=optimizer, group=transport)
        records = [es.step(error) for _ in range(num_steps)]
        return state_of(module), records

    return run_ranks(num_ranks, program)


# ---------------------------------------------------------------------- against a reference


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_a_trajectory_is_that_of_the_reference(num_ranks: int, optimizer: Any) -> None:
    sigma, lr, num_pairs, seed = 0.1, 0.05, 5, 7
    module = network()
    theta = [p for p in module.parameters() if p.requires_grad]
    reference = optimizer(theta, lr=lr)
    losses_of_steps = []
    for step in (1, 2, 3, 4):
        start = nn.utils.parameters_to_vector(theta).detach()
        noise = [noise_(torch.empty(len(start)), seed=seed, step=step, pair=p) for p in range(num_pairs)]
        losses = []
        for eps in noise:
            for sign in (1, -1):
                nn.utils.vector_to_parameters(start + sign * sigma * eps, theta)
                losses.append(error(module).item())
        gradient = sum(w * eps for w, eps in zip(pair_weights(losses, sigma), noise, strict=True))
        nn.utils.vector_to_parameters(start, theta)
        for p, part in zip(theta, gradient.split([p.numel() for p in theta]), strict=True):
            p.grad = part.view(p.shape)
        reference.step()
        losses_of_steps.append(losses)

    for state, records in after(num_ranks, optimizer=optimizer):
        assert [record.step for record in records] == [1, 2, 3, 4]
        for record, losses in zip(records, losses_of_steps, strict=True):
            assert record.losses == pytest.approx(losses, rel=1e-5)
            assert record.mean_loss == pytest.approx(sum(losses) / len(losses), rel=1e-5)
            assert (record.best_loss, record.num_nonfinite) == (min(record.losses), 0)
        for name, p in module.named_parameters():
            torch.testing.assert_close(state[name], p.detach(), rtol=1e-5, atol=1e-6)


def test_any_number_of_ranks_takes_the_same_steps_bit_for_bit() -> None:
    (expected,) = after(1)
    for num_ranks in (2, 3, 7):  # 5 pairs: unevenly dealt out, and none for some ranks
        for state, records in after(num_ranks):
            assert same(state, expected[0])
            assert records == expected[1]


def test_only_what_requires_grad_is_moved_and_tied_parameters_stay_tied() -> None:
    module = network()
    start = state_of(module)
    es = sl.EvolutionStrategy(module, 0.1, 0.05, 10, 0)
    es.step(error)
    moved = {name for name, tensor in module.state_dict().items() if not torch.equal(tensor, start[name])}
    assert moved == {name for name, p in module.named_parameters(remove_duplicate=False) if p.requires_grad}
    assert module[0].weight is module[2].weight
    assert all(p.grad is None for p in module.parameters())


def test_a_gradient_that_was_there_stays_there() -> None:
    module = nn.Linear(2, 1)
    grad = module.weight.grad = torch.full((1, 2), 3.0)
    sl.EvolutionStrategy(module, 0.1, 0.05, 4, 0).step(lambda module: module.weight.sum())
    assert module.weight.grad is grad
    assert grad.tolist() == [[3.0, 3.0]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_parameters_of_other_types_and_layouts_are_trained(dtype: torch.dtype) -> None:
    module = nn.Conv2d(2, 2, 3).to(dtype=dtype, memory_format=torch.channels_last)
    es = sl.EvolutionStrategy(module, 0.1, 0.05, 20, 0)

    def distance(module: nn.Module) -> Tensor:
        return sum((p - 1).float().square().sum() for p in module.parameters())

    records = [es.step(distance) for _ in range(60)]
    assert records[-1].mean_loss < 0.5 * records[0].mean_loss
    assert module.weight.dtype is dtype


def test_the_global_generator_is_not_touched() -> None:
    state = torch.get_rng_state()
    sl.EvolutionStrategy(nn.Linear(1, 1, device="meta").to_empty(device="cpu"), 0.1, 0.1, 4, 0).step(
        lambda module: module.weight.nan_to_num().sum()
    )
    assert torch.equal(torch.get_rng_state(), state)


def test_learns_real_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    import example_data as datasets

    try:
        if not (datasets.data_folder() / datasets.MNIST.file_name).exists():
            pytest.skip("the digits are not on this machine: python examples/example_data.py fetches them")
        images, labels = datasets.mnist_digits()
    finally:
        del sys.modules["example_data"]
    images = F.avg_pool2d(images, 4).flatten(1)  # (5000, 49)
    held_out = torch.arange(len(labels)) % 5 == 0
    x, y = images[~held_out], labels[~held_out]

    def program(transport: Transport) -> float:
        module = nn.Linear(49, 10)
        nn.init.zeros_(module.weight)
        es = sl.EvolutionStrategy(module, 0.05, 0.05, 32, 0, optimizer=torch.optim.Adam, group=transport)
        for step in range(120):
            batch = torch.arange(step, len(y), 16)  # 250 digits, the same on every rank
            es.step(lambda module, batch=batch: F.cross_entropy(module(x[batch]), y[batch]))
        with torch.no_grad():
            right = module(images[held_out]).argmax(1) == labels[held_out]
        return right.float().mean().item()

    accuracies = run_ranks(2, program)
    assert accuracies[0] == accuracies[1]
    assert accuracies[0] > 0.7


# ---------------------------------------------------------------------- what travels


@pytest.mark.parametrize("population", [4, 16, 18, 64])
def test_bytes_a_step_do_not_depend_on_the_size_of_the_module(population: int) -> None:
    def program(transport: Transport, width: int) -> tuple[dict[str, int], dict[str, int], str]:
        module = nn.Linear(width, width)
        es = sl.EvolutionStrategy(module, 0.1, 0.1, population, 0, group=transport)
        before = es.statistics()
        es.step(lambda module: module.weight.sum())
        moved = es.statistics() - before
        return moved.num_calls, moved.payload_bytes, es.contract["losses"].size

    small, large = (run_ranks(2, functools.partial(program, width=width))[0] for width in (2, 200))
    assert small == large
    num_calls, num_bytes, words = small
    expected = 2 * 105 + (0 if population <= 16 else 8 * (population + 2 * (population % 4 == 2)))
    assert num_bytes == {"all_gather": expected}
    assert num_calls == {"all_gather": 1 if population <= 16 else 2}
    assert words == f"{population} floats, {format_bytes(expected)} a step"


def test_the_contract_says_what_travels() -> None:
    def program(transport: Transport) -> str:
        return sl.EvolutionStrategy(network(), 0.1, 0.1, 64, 0, group=transport).contract.long()

    first, second = run_ranks(2, program)
    assert first == second
    lines = [line.split("  ") for line in first.splitlines()]
    assert lines[0] == ["Contract: EvolutionStrategy(Sequential), 2 ranks, transport: threads"]
    cells = [[cell.strip() for cell in line if cell] for line in lines[2:]]
    assert cells == [
        ["losses", "64 floats, 722 B a step", "in step, when all are evaluated", "all_gather", "none"],
        ["noise", "32 pairs", "never", "made again from seed, step, pair", "none"],
        [
            "parameters",
            "6 tensors, 96 B",
            "once, at construction",
            "rank 0's; then the same update everywhere",
            "none: compared in each step",
        ],
        ["buffers", "3 tensors", "once, at construction", "put back after each evaluation", "none"],
    ]
    alone = sl.EvolutionStrategy(nn.Linear(1, 1), 0.1, 0.1, 64, 0).contract
    assert [row.when for row in alone.rows] == ["never: alone", "never", "never: alone", "never"]


# ---------------------------------------------------------------------- what is put back


@pytest.mark.parametrize("raised", [RuntimeError("no"), KeyboardInterrupt()])
@pytest.mark.parametrize("nth", [1, 2, 5])
def test_parameters_and_buffers_are_put_back_when_an_evaluation_raises(
    raised: BaseException, nth: int
) -> None:
    module = network()
    es = sl.EvolutionStrategy(module, 0.1, 0.05, 10, 0)
    start = state_of(module)
    calls = []

    def loss_fn(module: nn.Module) -> Tensor:
        calls.append(state_of(module))
        loss = error(module)
        if len(calls) == nth:
            raise raised
        return loss

    with pytest.raises(type(raised)) as caught:
        es.step(loss_fn)
    assert caught.value is raised
    assert same(state_of(module), start)
    assert all(not torch.equal(seen["0.weight"], start["0.weight"]) for seen in calls)
    assert es.num_steps == 0


def test_what_an_evaluation_does_to_parameters_and_buffers_is_undone_before_the_next() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))
            self.register_buffer("calls", torch.zeros(1))
            self.register_buffer("cache", None)
            self.calls: Tensor
            self.cache: Tensor | None

    seen = []

    def loss_fn(module: Counting) -> float:
        assert module.cache is None
        seen.append((module.weight.item(), module.calls.item()))
        module.calls += 1
        module.calls = module.calls + 1  # another object
        module.cache = torch.zeros(3)
        module.weight.fill_(100.0)  # learning within a life
        return 0.0

    module = Counting()
    calls = module.calls
    sl.EvolutionStrategy(module, 0.1, 0.05, 6, 0).step(loss_fn)
    assert module.calls is calls
    assert (calls.item(), module.cache, module.weight.item()) == (0.0, None, 0.0)
    assert [n for _, n in seen] == [0.0] * 6
    assert [w for w, _ in seen[::2]] == [-w for w, _ in seen[1::2]]


# ---------------------------------------------------------------------- what goes wrong


def test_an_exception_in_loss_fn_is_raised_where_it_was_and_told_elsewhere() -> None:
    def program(transport: Transport) -> str:
        module = network()
        es = sl.EvolutionStrategy(module, 0.1, 0.05, 10, 0, group=transport)
        es.step(error)
        start = state_of(module)

        def loss_fn(module: nn.Module) -> Tensor:
            if transport.rank == 1:
                raise OSError("the simulator is gone")
            return error(module)

        with pytest.raises(OSError if transport.rank == 1 else sl.PeerFailed) as caught:
            es.step(loss_fn)
        assert same(state_of(module), start)
        assert es.step(error).step == 2  # nobody is stuck
        if transport.rank != 1:
            assert "in loss_fn" in caught.value.__notes__[0]
        return str(caught.value)

    texts = run_ranks(3, program)
    assert texts[1] == "the simulator is gone"
    assert texts[0] == texts[2]
    assert "step 2: loss_fn raised an exception on rank 1, so no parameter was changed" in texts[0]
    assert texts[0].endswith("OSError: the simulator is gone")


def test_an_exception_in_loss_fn_is_raised_where_it_was_also_when_the_ranks_do_not_agree() -> None:
    def program(transport: Transport) -> None:
        es = sl.EvolutionStrategy(nn.Linear(1, 1), 0.1, 0.1, 4, 0, group=transport)
        if transport.rank == 1:
            es.optimizer.param_groups[0]["lr"] = 0.3
        with pytest.raises(OSError if transport.rank == 1 else sl.ContractMismatch):
            es.step(functools.partial(fail, OSError()) if transport.rank == 1 else error_of_weight)

    run_ranks(2, program)


@pytest.mark.parametrize(
    ("loss", "words"),
    [(None, "got None"), (torch.zeros(2), r"got a tensor of shape \(2,\)"), ("much", "got 'much'")],
)
def test_a_loss_that_is_no_number_is_refused(loss: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        sl.EvolutionStrategy(nn.Linear(1, 1), 0.1, 0.1, 4, 0).step(lambda module: loss)


def test_a_loss_that_is_not_finite_is_the_worst() -> None:
    def program(transport: Transport, bad: float) -> tuple[list[float], int, float]:
        module = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(module.weight)
        es = sl.EvolutionStrategy(module, 1.0, 1.0, 8, 0, group=transport)
        # What is right of 0 has no finite loss, so the module has to go left.
        record = es.step(lambda module: bad if module.weight > 0 else 0.0)
        assert [math.isfinite(loss) for loss in record.losses].count(False) == record.num_nonfinite == 4
        return [record.mean_loss, record.best_loss], record.num_nonfinite, module.weight.item()

    results = [run_ranks(2, functools.partial(program, bad=bad)) for bad in (math.nan, math.inf, -math.inf)]
    assert all(result == results[0][0] for ranks in results for result in ranks)
    assert results[0][0][0] == [0.0, 0.0]
    assert results[0][0][2] < 0


def test_without_a_finite_loss_every_rank_raises_and_nothing_changes() -> None:
    def program(transport: Transport) -> str:
        module = network()
        es = sl.EvolutionStrategy(module, 0.1, 0.05, 10, 0, group=transport)
        start = state_of(module)
        with pytest.raises(ValueError, match="a finite loss of at least one of 10 members") as caught:
            es.step(lambda module: math.nan)
        assert same(state_of(module), start)
        assert es.num_steps == 0
        return str(caught.value)

    first, second = run_ranks(2, program)
    assert first == second


def mismatch(make: Callable[[Transport], Any]) -> str:
    """What two ranks are told, the same."""

    def program(transport: Transport) -> str:
        with pytest.raises(sl.ContractMismatch) as caught:
            make(transport)
        return str(caught.value)

    first, second = run_ranks(2, program)
    assert first == second
    return first


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"sigma": 0.2}, "sigma\n    expected 0.1 (rank 0)\n    got      0.2 (rank 1)"),
        ({"lr": 0.2}, "optimizer.param_groups[0].lr\n    expected 0.1 (rank 0)\n    got      0.2 (rank 1)"),
        ({"population": 6}, "population\n    expected 4 (rank 0)\n    got      6 (rank 1)"),
        ({"seed": 1}, "seed\n    expected 0 (rank 0)\n    got      1 (rank 1)"),
        ({"optimizer": torch.optim.Adam}, "optimizer\n    expected SGD (rank 0)\n    got      Adam (rank 1)"),
        ({"module": nn.Linear(2, 1)}, "expected torch.float32 (1, 1) on cpu"),
    ],
)
def test_ranks_that_differ_are_told_before_the_first_step(changed: dict[str, Any], words: str) -> None:
    def make(transport: Transport) -> None:
        arguments = {"module": nn.Linear(1, 1), "sigma": 0.1, "lr": 0.1, "population": 4, "seed": 0}
        sl.EvolutionStrategy(**(arguments | (changed if transport.rank else {})), group=transport)

    assert words in mismatch(make)


def test_machines_that_make_other_noise_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def noise_of_this_machine(out: Tensor, **which: int) -> Tensor:
        noise_(out, **which)
        if threading.current_thread().name == "rank 1":
            out[-1] = torch.nextafter(out[-1], torch.tensor(9.0))  # by the last bit
        return out

    monkeypatch.setattr(strategy_module, "noise_", noise_of_this_machine)
    text = mismatch(lambda transport: sl.EvolutionStrategy(nn.Linear(1, 1), 0.1, 0.1, 4, 0, group=transport))
    assert "noise\n    expected made from the seed, digest" in text
    assert "same version of torch" in text


def test_replicas_that_have_drifted_are_told_by_name_and_can_be_made_equal() -> None:
    def make(transport: Transport) -> None:
        module = network()
        es = sl.EvolutionStrategy(module, 0.1, 0.05, 10, 0, group=transport)
        es.step(error)
        if transport.rank == 1:
            with torch.no_grad():
                module[0].bias[0] += 1e-6
        start = state_of(module)
        try:
            es.step(error)
        finally:
            assert same(state_of(module), start)
            sl.broadcast_(module, group=transport)
            assert es.step(error).step == 2

    text = mismatch(make)
    assert "parameter 0.bias\n    expected digest" in text
    assert "parameter 0.weight" not in text
    assert "sl.broadcast_(module)" in text


def test_a_learning_rate_changed_on_one_rank_is_told() -> None:
    def make(transport: Transport) -> None:
        es = sl.EvolutionStrategy(nn.Linear(1, 1), 0.1, 0.1, 4, 0, group=transport)
        if transport.rank == 1:
            es.optimizer.param_groups[0]["lr"] = 0.3
        es.step(lambda module: module.weight.sum())

    assert "lr\n    expected 0.1 (rank 0)\n    got      0.3 (rank 1)" in mismatch(make)


class Foreign(torch.optim.SGD):
    """An optimizer of other parameters than it was given."""

    def __init__(self, parameters: list[nn.Parameter], lr: float) -> None:
        super().__init__([nn.Parameter(torch.zeros(1))], lr=lr)


@pytest.mark.parametrize(
    ("changed", "kind", "words"),
    [
        ({"sigma": 0.0}, ValueError, "expected sigma to be a finite number above 0, got 0.0"),
        ({"sigma": math.nan}, ValueError, "expected sigma to be a finite number above 0, got nan"),
        ({"population": 5}, ValueError, "expected population to be even, got 5"),
        ({"population": 0}, ValueError, "expected population to be an integer of at least 2, got 0"),
        ({"population": 4.0}, TypeError, "got 4.0"),
        ({"seed": "zero"}, TypeError, "got 'zero'"),
        ({"lr": math.inf}, ValueError, "expected lr to be a finite number of at least 0, got inf"),
        ({"module": nn.Tanh()}, ValueError, "Tanh has no parameter to train"),
        ({"module": nn.Linear(1, 1).requires_grad_(False)}, ValueError, "Linear has no parameter to train"),
        (
            {"module": nn.Linear(1, 1, dtype=torch.complex64)},
            ValueError,
            "expected real floating-point parameters, but weight",
        ),
        ({"module": [nn.Linear(1, 1)]}, TypeError, "expected module to be a torch.nn.Module, got a list"),
        ({"module": nn.LazyLinear(1)}, ValueError, "run one forward"),
        ({"optimizer": Foreign}, ValueError, "to return an optimizer of exactly the"),
        (
            {"optimizer": lambda parameters, lr: lr},
            TypeError,
            "to return a torch.optim.Optimizer of these parameters, got a float",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_what_one_rank_refuses_every_rank_raises(
    changed: dict[str, Any], kind: type[Exception], words: str
) -> None:
    def program(transport: Transport) -> str:
        arguments = {"module": nn.Linear(1, 1), "sigma": 0.1, "lr": 0.1, "population": 4, "seed": 0}
        with pytest.raises(kind) as caught:
            sl.EvolutionStrategy(**(arguments | (changed if transport.rank else {})), group=transport)
        return str(caught.value)

    first, second = run_ranks(2, program)
    assert first == second
    assert first.startswith("sl.EvolutionStrategy: refused, nothing was sent\nrank 1: ")
    assert words in first


def test_modules_whose_parameters_are_not_this_ranks_own_are_refused() -> None:
    def program(transport: Transport) -> None:
        whole = nn.Sequential(sl.share_(nn.Linear(1, 1), group=transport))
        with pytest.raises(ValueError, match="one copy for all ranks"):
            sl.EvolutionStrategy(whole, 0.1, 0.1, 4, 0, group=transport)
        ddp = sl.DistributedDataParallel(nn.Linear(1, 1), process_group=transport)
        with pytest.raises(ValueError, match=r"pass ddp\.module"):
            sl.EvolutionStrategy(ddp, 0.1, 0.1, 4, 0, group=transport)

    run_ranks(2, program)


# ---------------------------------------------------------------------- saved and loaded


def test_a_run_goes_on_bit_for_bit_with_another_number_of_ranks() -> None:
    (expected,) = after(1, num_steps=5)

    def first_part(transport: Transport) -> tuple[dict[str, Any], dict[str, Any]]:
        module = network()
        es = sl.EvolutionStrategy(module, 0.1, 0.05, 10, 7, optimizer=torch.optim.Adam, group=transport)
        for _ in range(2):
            es.step(error)
        return copy.deepcopy((module.state_dict(), es.state_dict()))

    def second_part(transport: Transport, module_state: Any, state: Any) -> tuple[Any, list[Any]]:
        module = network(seed=5)
        module.load_state_dict(module_state)
        # The arguments are others: those of the state count.
        es = sl.EvolutionStrategy(module, 9.0, 9.0, 2, 9, optimizer=torch.optim.Adam, group=transport)
        es.load_state_dict(copy.deepcopy(state))
        return module.state_dict(), [es.step(error) for _ in range(3)]

    saved = run_ranks(2, first_part)[1]
    for state, records in run_ranks(3, lambda transport: second_part(transport, *saved)):
        assert same(state, expected[0])
        assert records == expected[1][2:]


def test_a_state_of_something_else_is_refused_and_nothing_changes() -> None:
    es = sl.EvolutionStrategy(nn.Linear(1, 1), 0.1, 0.1, 4, 0)
    with pytest.raises(ValueError, match=r"EvolutionStrategy with the keys num_steps, .*; got the keys lr"):
        es.load_state_dict({"lr": 1})
    with pytest.raises(ValueError, match="expected population to be even"):
        es.load_state_dict(es.state_dict() | {"population": 3, "num_steps": 8})
    assert es.num_steps == 0
