"""EvolutionStrategy against a reference of a few lines, over ranks as threads: same bits, few bytes, loud errors."""

from __future__ import annotations

import copy
import functools
import math
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.verbs import error_of_all
from torch import Tensor, nn

import syncline as sl
from syncline.evolution import strategy as strategy_module
from syncline.evolution.members import noise_, pair_weights
from syncline.transport import Transport, run_ranks
from syncline.words import format_bytes

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


def strategy_of(transport: Transport | None = None, **changed: Any) -> Any:
    """A strategy for a small module, with some arguments other than usual."""
    arguments = {"module": nn.Linear(1, 1), "sigma": 0.1, "lr": 0.1, "population": 4, "seed": 0}
    return sl.EvolutionStrategy(**(arguments | changed), group=transport)


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


@pytest.mark.parametrize(("num_ranks", "optimizer"), [(1, torch.optim.SGD), (2, torch.optim.Adam)])
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


def test_a_step_changes_trained_parameters_and_nothing_else() -> None:
    module = network()
    start, generator = state_of(module), torch.get_rng_state()
    grad = module[4].weight.grad = torch.full((1, 3), 3.0)
    sl.EvolutionStrategy(module, 0.1, 0.05, 10, 0).step(error)
    moved = {name for name, tensor in module.state_dict().items() if not torch.equal(tensor, start[name])}
    assert moved == {name for name, p in module.named_parameters(remove_duplicate=False) if p.requires_grad}
    assert module[0].weight is module[2].weight
    assert [p.grad for p in module.parameters() if p.grad is not None] == [grad]
    assert grad.tolist() == [[3.0, 3.0, 3.0]]
    assert torch.equal(torch.get_rng_state(), generator)


def test_parameters_of_other_types_and_layouts_are_trained() -> None:
    for dtype in (torch.float64, torch.bfloat16):
        module = nn.Conv2d(2, 2, 3).to(dtype=dtype, memory_format=torch.channels_last)
        es = sl.EvolutionStrategy(module, 0.1, 0.05, 20, 0)

        def distance(module: nn.Module) -> Tensor:
            return sum((p - 1).float().square().sum() for p in module.parameters())

        records = [es.step(distance) for _ in range(60)]
        assert records[-1].mean_loss < 0.5 * records[0].mean_loss, dtype
        assert module.weight.dtype is dtype


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
    for words in ("EvolutionStrategy(Sequential), 2 ranks", "64 floats, 722 B a step", "32 pairs", "96 B"):
        assert words in first
    contract = strategy_of(population=64).contract
    assert [row.when for row in contract.rows] == ["never: alone", "never", "never: alone", "never"]


# ---------------------------------------------------------------------- what is put back


@pytest.mark.parametrize(
    ("raised", "nth"), [(RuntimeError("no"), 1), (KeyboardInterrupt(), 2), (RuntimeError("no"), 5)]
)
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
        es = strategy_of(transport)

        def loss_fn(module: nn.Module) -> Tensor:
            if transport.rank == 1:
                raise OSError
            return module.weight.square().sum()

        if transport.rank == 1:
            es.optimizer.param_groups[0]["lr"] = 0.3
        with pytest.raises(OSError if transport.rank == 1 else sl.ContractMismatch):
            es.step(loss_fn)

    run_ranks(2, program)


def test_a_loss_that_is_no_number_is_refused() -> None:
    rows = [(None, "got None"), (torch.zeros(2), r"got a tensor of shape \(2,\)"), ("much", "got 'much'")]
    for loss, words in rows:
        with pytest.raises(TypeError, match=words):
            strategy_of().step(lambda module, loss=loss: loss)


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
    def program(transport: Transport) -> None:
        module = network()
        es = sl.EvolutionStrategy(module, 0.1, 0.05, 10, 0, group=transport)
        start = state_of(module)
        try:
            es.step(lambda module: math.nan)
        finally:
            assert same(state_of(module), start)
            assert es.num_steps == 0

    assert "a finite loss of at least one of 10 members" in str(error_of_all(ValueError, program))


def test_ranks_that_differ_are_an_error_before_the_first_step() -> None:
    rows: list[tuple[dict[str, Any], list[str]]] = [
        ({"sigma": 0.2}, ["sigma", "0.1 (rank 0)", "0.2 (rank 1)"]),
        ({"lr": 0.2}, ["optimizer.param_groups[0].lr", "0.1 (rank 0)", "0.2 (rank 1)"]),
        ({"population": 6}, ["population", "4 (rank 0)", "6 (rank 1)"]),
        ({"seed": 1}, ["seed", "0 (rank 0)", "1 (rank 1)"]),
        ({"optimizer": torch.optim.Adam}, ["optimizer", "SGD (rank 0)", "Adam (rank 1)"]),
        ({"module": nn.Linear(2, 1)}, ["expected torch.float32 (1, 1) on cpu"]),
    ]
    for changed, words in rows:

        def program(transport: Transport, changed: dict[str, Any] = changed) -> None:
            strategy_of(transport, **(changed if transport.rank else {}))

        text = str(error_of_all(sl.ContractMismatch, program))
        assert all(one in text for one in words), text

    def later(transport: Transport) -> None:
        es = strategy_of(transport)
        if transport.rank == 1:
            es.optimizer.param_groups[0]["lr"] = 0.3
        es.step(lambda module: module.weight.sum())

    text = str(error_of_all(sl.ContractMismatch, later))
    assert all(one in text for one in ("lr\n", "0.1 (rank 0)", "0.3 (rank 1)")), text


def test_machines_that_make_other_noise_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def noise_of_this_machine(out: Tensor, **which: int) -> Tensor:
        noise_(out, **which)
        if threading.current_thread().name == "rank 1":
            out[-1] = torch.nextafter(out[-1], torch.tensor(9.0))  # by the last bit
        return out

    monkeypatch.setattr(strategy_module, "noise_", noise_of_this_machine)
    text = str(error_of_all(sl.ContractMismatch, strategy_of))
    assert "noise\n    expected made from the seed, digest" in text
    assert "same version of torch" in text


def test_replicas_that_have_drifted_are_named_and_can_be_made_equal() -> None:
    def program(transport: Transport) -> None:
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

    text = str(error_of_all(sl.ContractMismatch, program))
    assert "parameter 0.bias\n    expected digest" in text
    assert "parameter 0.weight" not in text
    assert "sl.broadcast_(module)" in text


class Foreign(torch.optim.SGD):
    """An optimizer of other parameters than it was given."""

    def __init__(self, parameters: list[nn.Parameter], lr: float) -> None:
        super().__init__([nn.Parameter(torch.zeros(1))], lr=lr)


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"sigma": 0.0}, ValueError, "sigma to be a finite number above 0, got 0.0"),
    ({"sigma": math.nan}, ValueError, "sigma to be a finite number above 0, got nan"),
    ({"population": 5}, ValueError, "population to be even, got 5"),
    ({"population": 0}, ValueError, "population to be an integer of at least 2, got 0"),
    ({"population": 4.0}, TypeError, "got 4.0"),
    ({"seed": "zero"}, TypeError, "got 'zero'"),
    ({"lr": math.inf}, ValueError, "lr to be a finite number of at least 0, got inf"),
    ({"module": nn.Tanh()}, ValueError, "Tanh has no parameter to train"),
    ({"module": nn.Linear(1, 1).requires_grad_(False)}, ValueError, "Linear has no parameter to train"),
    ({"module": nn.Linear(1, 1, dtype=torch.complex64)}, ValueError, "but weight is of torch.complex64"),
    ({"module": [nn.Linear(1, 1)]}, TypeError, "module to be a torch.nn.Module, got a list"),
    ({"optimizer": Foreign}, ValueError, "an optimizer of exactly the"),
    ({"optimizer": lambda parameters, lr: lr}, TypeError, "a torch.optim.Optimizer of these parameters"),
]


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_arguments_that_one_rank_refuses_every_rank_raises() -> None:
    lazy = ({"module": nn.LazyLinear(1)}, ValueError, "run one forward")
    for changed, kind, words in [*REFUSED, lazy]:

        def program(transport: Transport, changed: dict[str, Any] = changed) -> None:
            strategy_of(transport, **(changed if transport.rank else {}))

        text = str(error_of_all(kind, program))
        assert text.startswith("sl.EvolutionStrategy: refused, nothing was sent\nrank 1: "), changed
        assert words in text


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
    es = strategy_of()
    with pytest.raises(ValueError, match=r"EvolutionStrategy with the keys num_steps, .*; got the keys lr"):
        es.load_state_dict({"lr": 1})
    with pytest.raises(ValueError, match="population to be even"):
        es.load_state_dict(es.state_dict() | {"population": 3, "num_steps": 8})
    assert es.num_steps == 0
