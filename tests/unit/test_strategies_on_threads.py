"""Strategies at work: what is printed, refused, saved, and what two ranks that differ are told. Ranks are threads."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.verbs import error_of_all
from torch import Tensor, nn

import syncline as sl
from syncline.transport import Transport, run_ranks


def net(*, normalized: bool = False) -> nn.Module:
    layers = [nn.Linear(3, 4), nn.BatchNorm1d(4) if normalized else nn.Identity(), nn.Tanh(), nn.Linear(4, 2)]
    module = nn.Sequential(*layers)
    generator = torch.Generator().manual_seed(0)  # of its own: ranks are threads
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5, generator=generator)
    return module


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(100 * step + rank))


class Run:
    """One rank's training."""

    def __init__(
        self, transport: Transport | None, strategy: Any, *, normalized: bool = False, **wrap: Any
    ) -> None:
        self.ddp = sl.DistributedDataParallel(
            net(normalized=normalized), process_group=transport, strategy=strategy, **wrap
        )
        self.rank = 0 if transport is None else transport.rank
        self.optimizer = self.ddp.attach(torch.optim.AdamW(self.ddp.parameters(), lr=0.02))

    def step(self, step: int) -> None:
        self.optimizer.zero_grad()
        self.ddp(batch(self.rank, step)).square().mean().backward()
        self.optimizer.step()

    def steps(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            self.step(step)

    def values(self) -> Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.ddp.parameters()]).clone()

    def saved(self) -> Any:
        return copy.deepcopy(
            (self.ddp.module.state_dict(), self.optimizer.state_dict(), self.ddp.sync_state_dict())
        )

    def load(self, saved: Any) -> None:
        self.ddp.module.load_state_dict(saved[0])
        self.optimizer.load_state_dict(saved[1])
        self.ddp.load_sync_state_dict(saved[2])


def wrapped(strategy: Callable[[int], Any]) -> Callable[[Transport], object]:
    """A program that wraps a module with a strategy that may depend on the rank."""
    return lambda t: sl.DistributedDataParallel(net(), process_group=t, strategy=strategy(t.rank))


# ---------------------------------------------------------------------- what is refused


def test_a_strategy_that_acts_at_the_step_needs_an_attached_optimizer_before_anything_drifts() -> None:
    def program(transport: Transport) -> None:
        ddp = sl.DistributedDataParallel(net(), process_group=transport, strategy=sl.LocalSGD(8))
        before = [p.clone() for p in ddp.parameters()]
        try:
            ddp(batch(transport.rank, 0)).sum().backward()
        finally:
            assert all(torch.equal(a, b) for a, b in zip(before, ddp.parameters(), strict=True))

    text = str(error_of_all(sl.SynclineError, program))
    assert "strategy=LocalSGD(every=8)" in text
    assert "ddp.attach(optimizer)" in text

    def on_one_rank(transport: Transport) -> None:
        ddp = sl.DistributedDataParallel(net(), process_group=transport, strategy=sl.DiLoCo(8))
        if transport.rank == 0:
            ddp.attach(torch.optim.SGD(ddp.parameters(), lr=0.1))
        ddp(batch(transport.rank, 0)).sum().backward()

    assert "rank 1" in str(error_of_all(sl.SynclineError, on_one_rank))


def outer_of(parameters: Callable[[int, Any], Any]) -> Callable[[Transport], object]:
    return wrapped(lambda rank: sl.DiLoCo(4, outer=lambda p: torch.optim.SGD(parameters(rank, p), lr=0.7)))


@pytest.mark.parametrize(
    ("kind", "program", "words"),
    [
        pytest.param(
            sl.ContractMismatch,
            wrapped(lambda rank: sl.LocalSGD(8 if rank else 4)),
            ["LocalSGD(every=4)", "LocalSGD(every=8)"],
            id="every",
        ),
        pytest.param(
            sl.ContractMismatch,
            wrapped(
                lambda rank: sl.DiLoCo(4, compression=sl.compression.Quantize(4, error_feedback=rank == 0))
            ),
            ["Quantize(bits=4, error_feedback=False)"],
            id="error feedback",
        ),
        pytest.param(
            sl.ContractMismatch,
            wrapped(lambda rank: sl.DiLoCo(2, outer=lambda p: torch.optim.SGD(p, lr=0.1 + rank))),
            ["outer optimizer, param_groups[0].lr"],
            id="outer learning rate",
        ),
        pytest.param(
            ValueError,
            outer_of(lambda rank, p: net().parameters() if rank == 1 else p),
            ["rank 1: expected outer(parameters)", "exactly the 4 parameters", "0 of them and 4 others"],
            id="foreign parameters",
        ),
        pytest.param(
            ValueError,
            wrapped(lambda rank: sl.DiLoCo(9, fragments=9)),
            ["between 1 and 4 fragments"],
            id="too many fragments",
        ),
    ],
)
def test_strategies_that_do_not_fit_are_an_error_on_every_rank_when_a_module_is_wrapped(
    kind: type[Exception], program: Callable[[Transport], object], words: list[str]
) -> None:
    text = str(error_of_all(kind, program))
    assert all(one in text for one in words), text


def test_a_class_instead_of_a_strategy_is_refused() -> None:
    with pytest.raises(TypeError, match=r"got the class LocalSGD\. Create an object of this class"):
        sl.DistributedDataParallel(net(), strategy=sl.LocalSGD)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected strategy to be None or a strategy such as"):
        sl.DistributedDataParallel(net(), strategy="local")  # type: ignore[arg-type]


def test_calls_that_do_not_go_with_drift_are_refused() -> None:
    def program(transport: Transport) -> None:
        with pytest.raises(ValueError, match="sharded=True cannot be combined with strategy=LocalSGD"):
            Run(transport, sl.LocalSGD(2), sharded=True)
        run = Run(transport, sl.LocalSGD(2))
        with pytest.raises(ValueError, match=r"join\(\) is not possible"):
            run.ddp.join()
        with pytest.raises(ValueError, match="a wrapper cannot be copied or pickled"):
            copy.deepcopy(run.ddp)

    run_ranks(2, program)


@pytest.mark.parametrize("strategy", [sl.LocalSGD(2), sl.DiLoCo(2)], ids=str)
def test_settings_of_optimizers_are_compared_when_the_ranks_meet(strategy: Any) -> None:
    def program(transport: Transport) -> None:
        run = Run(transport, strategy)
        run.step(1)
        if transport.rank:
            (run.ddp.outer_optimizer or run.optimizer).param_groups[0]["lr"] = 0.25
        run.step(2)

    text = str(error_of_all(sl.ContractMismatch, program))
    assert "the parameter sync of Sequential after step 2" in text
    assert "0.25 (rank 1)" in text
    assert ("lr of optimizer 0 (AdamW), param_groups[0]" in text) == isinstance(strategy, sl.LocalSGD)


@pytest.mark.parametrize(
    "strategy",
    [
        *(sl.LocalSGD(3), sl.DiLoCo(3), sl.DiLoCo(4, fragments=2, delay=1)),
        *(sl.Gossip("ring"), sl.ParameterServer(4)),
    ],
    ids=str,
)
def test_ranks_that_have_made_different_numbers_of_steps_do_not_meet(strategy: Any) -> None:
    """They would want different things done: of one average one rank would send parameters, the other distances."""

    def program(transport: Transport) -> None:
        run = Run(transport, strategy)
        run.step(1)
        if transport.rank and isinstance(strategy, sl.Gossip):
            state = run.ddp.sync_state_dict()
            state["rounds"]["step"] += 1
            run.ddp.load_sync_state_dict(state)
        elif transport.rank:
            run.optimizer.step()
        run.ddp.sync_parameters_()

    text = str(error_of_all(sl.ContractMismatch, program))
    assert "steps done" in text
    assert "expected 1 (rank 0)" in text
    assert "Call it after the same number of steps on every rank" in text


@pytest.mark.parametrize("strategy", [sl.DiLoCo(2), sl.ParameterServer(1)], ids=str)
def test_replicas_that_differ_before_the_first_step_are_refused(strategy: Any) -> None:
    def program(transport: Transport) -> None:
        run = Run(transport, strategy)
        with torch.no_grad():
            run.ddp.module[0].weight += transport.rank
        run.step(1)

    assert "expected equal parameters" in str(error_of_all(sl.ReplicaDivergence, program))


def test_an_optimizer_that_takes_the_place_of_another_counts() -> None:
    def program(transport: Transport) -> None:
        run = Run(transport, sl.LocalSGD(2))
        former = run.optimizer
        run.steps(1, 3)
        run.optimizer = run.ddp.attach(torch.optim.SGD(run.ddp.parameters(), lr=0.1))
        run.step(4)
        with pytest.raises(sl.SynclineError, match="this AdamW was replaced"):
            former.step()
        assert run.ddp.last_round.step == 4

    run_ranks(2, program)


def test_nothing_of_a_server_is_saved_while_updates_are_under_way() -> None:
    def program(transport: Transport) -> None:
        run = Run(transport, sl.ParameterServer(2))
        run.step(1)
        with pytest.raises(sl.SynclineError, match=r"call ddp\.sync_parameters_\(\) on all ranks first"):
            run.ddp.sync_state_dict()
        run.ddp.sync_parameters_()
        run.ddp.load_sync_state_dict(run.ddp.sync_state_dict())
        run.step(2)
        run.ddp.sync_parameters_()

    run_ranks(3, program)


# ---------------------------------------------------------------------- what is printed


def test_the_contract_says_what_the_strategy_does_and_what_it_did() -> None:
    def program(transport: Transport) -> tuple[str, str, str]:
        run = Run(transport, sl.LocalSGD(2, warmup=1), normalized=True)
        before = run.ddp.contract.long()
        run.steps(1, 3)
        return before, run.ddp.contract.long(), run.ddp.explain()

    before, after, explained = run_ranks(2, program)[0]
    for words in ("LocalSGD(every=2, warmup=1)", "every 2 steps, with the parameters", "statistics pooled"):
        assert words in before
    assert "after step 3" in after
    assert "step 3: local" in after
    for words in ("gradients stay on their rank", "after step 3: averaged parameters", "next after step 5"):
        assert words in explained


def test_the_last_round_is_recorded_and_manual_explains_that_nothing_is_sent() -> None:
    def program(transport: Transport) -> Any:
        run = Run(transport, sl.DiLoCo(2))
        run.steps(1, 3)
        manual = sl.DistributedDataParallel(net(), process_group=transport, strategy=sl.Manual())
        assert "nothing sent: gradients stay on their rank" in manual.explain()
        return run.ddp.last_round

    record = run_ranks(2, program)[0]
    assert record.step == 2
    assert record.what == ("sent the outer gradient of fragment 0", "took the outer step of fragment 0")
    assert record.payload_bytes >= 26 * 4


# ---------------------------------------------------------------------- what travels, and what does not


@pytest.mark.parametrize("policy", [None, "broadcast", "none"])
def test_buffers_meet_with_the_parameters_by_their_policy_and_not_in_forward(policy: Any) -> None:
    def program(transport: Transport) -> list[Tensor]:
        wrap = {} if policy is None else {"buffers": policy}
        run = Run(transport, sl.LocalSGD(3), normalized=True, **wrap)
        run.step(0)  # with it, what is agreed before the first step
        seen = []
        for step in (1, 2):
            before = transport.statistics().total_calls
            run.step(step)
            seen.append(run.ddp.module[1].running_mean.clone())
            assert (transport.statistics().total_calls > before) == (step == 2), "only a meeting sends"
        if policy != "none":
            sl.check_replicas(run.ddp.module, group=transport)
        return seen

    (first, last), (other_first, other_last) = run_ranks(2, program)
    assert not torch.equal(first, other_first)
    assert torch.equal(last, other_last) == (policy != "none")


def test_buffers_meet_in_every_step_of_the_warmup() -> None:
    def program(transport: Transport) -> None:
        run = Run(transport, sl.LocalSGD(4, warmup=2), normalized=True)
        for step in (1, 2):
            run.step(step)
            sl.check_replicas(run.ddp.module, group=transport)

    run_ranks(2, program)


@pytest.mark.parametrize("state", [True, False])
def test_optimizer_state_meets_when_asked(state: bool) -> None:
    def program(transport: Transport) -> Tensor:
        run = Run(transport, sl.LocalSGD(2, optimizer_state=state))
        run.steps(1, 2)
        return torch.cat([s["exp_avg"].reshape(-1) for s in run.optimizer.state.values()])

    assert torch.equal(*run_ranks(2, program)) == state


def test_a_step_is_done_when_every_attached_optimizer_has_stepped() -> None:
    def program(transport: Transport) -> list[int]:
        ddp = sl.DistributedDataParallel(net(), process_group=transport, strategy=sl.LocalSGD(2))
        parameters = list(ddp.parameters())
        a = ddp.attach(torch.optim.SGD(parameters[:2], lr=0.1))
        b = ddp.attach(torch.optim.SGD(parameters[2:], lr=0.1))
        steps = []
        for step in range(4):
            ddp(batch(transport.rank, step)).sum().backward()
            a.step()
            b.step()
            steps.append(0 if ddp.last_round is None else ddp.last_round.step)
        return steps

    assert run_ranks(2, program)[0] == [0, 2, 2, 4]


def test_accumulation_and_clipping_need_nothing_special() -> None:
    def program(transport: Transport) -> None:
        run = Run(transport, sl.LocalSGD(2))
        for step in range(4):
            run.optimizer.zero_grad()
            with run.ddp.no_sync():
                run.ddp(batch(run.rank, step)).square().mean().backward()
            if step < 3:
                run.ddp(batch(run.rank, step + 50)).square().mean().backward()
            run.ddp.clip_grad_norm_(0.1)
            run.optimizer.step()
        sl.check_replicas(run.ddp.module, group=transport)

    run_ranks(2, program)


def test_items_are_counted_on_each_rank_where_gradients_stay_local() -> None:
    def program(transport: Transport) -> float:
        ddp = sl.DistributedDataParallel(nn.Linear(1, 1), process_group=transport, strategy=sl.LocalSGD(2))
        ddp.attach(torch.optim.SGD(ddp.parameters(), lr=0.1))
        x = torch.full((2 + transport.rank, 1), 3.0)
        with ddp.normalize_by(len(x)):
            ddp(x).sum().backward()
        with ddp.normalize_by(len(x)):  # added to what is there: the mean over both
            ddp(x).sum().backward()
        return ddp.module.weight.grad.item()

    assert run_ranks(2, program) == [3.0, 3.0]


def test_a_missing_gradient_is_named_on_its_rank() -> None:
    def program(transport: Transport) -> None:
        run = Run(transport, sl.LocalSGD(3))
        run.step(1)
        if transport.rank == 1:
            run.ddp.module[0](batch(1, 0)).sum().backward()
            run.ddp.zero_grad()

    with pytest.raises(sl.UnreducedGradients) as error:
        run_ranks(2, program)
    assert "on rank 1: 3.weight, 3.bias" in str(error.value)


def test_compression_encodes_what_travels() -> None:
    def program(transport: Transport) -> tuple[int, int]:
        sizes = []
        for compression in (None, sl.compression.Quantize(4)):
            module = nn.Linear(64, 64)
            ddp = sl.DistributedDataParallel(
                module, process_group=transport, strategy=sl.DiLoCo(1, compression=compression)
            )
            optimizer = ddp.attach(torch.optim.SGD(ddp.parameters(), lr=0.1))
            ddp(torch.randn(4, 64)).square().mean().backward()
            before = transport.statistics()
            optimizer.step()
            sizes.append((transport.statistics() - before).sent_bytes(transport.size))
            sl.check_replicas(module, group=transport)
        return sizes[0], sizes[1]

    plain, encoded = run_ranks(2, program)[0]
    assert plain > 5 * encoded


def test_gradients_of_the_warmup_are_encoded_as_the_wrapper_says() -> None:
    def program(transport: Transport) -> None:
        run = Run(transport, sl.LocalSGD(2, warmup=2), compression=sl.compression.Cast(torch.bfloat16))
        for step in range(6):
            run.step(step)
            if step == 1:
                sl.check_replicas(run.ddp.module, group=transport)
        sl.check_replicas(run.ddp.module, group=transport)
        assert "Cast" in run.ddp.contract["gradients"].how
        assert run.ddp.contract["gradients"].when == "in the first 2 steps"

    run_ranks(2, program)


def test_small_outer_steps_add_up_in_bfloat16() -> None:
    """One of four ranks moves by one unit in the last place each round: a quarter of it is the mean."""

    def program(transport: Transport) -> float:
        module = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
        nn.init.ones_(module.weight)
        strategy = sl.DiLoCo(1, outer=lambda p: torch.optim.SGD(p, lr=1.0))
        ddp = sl.DistributedDataParallel(module, process_group=transport, strategy=strategy)
        optimizer = ddp.attach(torch.optim.SGD(ddp.parameters(), lr=2.0**-8))
        for _ in range(64):
            optimizer.zero_grad()
            (ddp(torch.ones(1, 1, dtype=torch.bfloat16)) * (transport.rank == 0)).sum().backward()
            optimizer.step()
        return module.weight.item()

    for weight in run_ranks(4, program):
        assert weight == pytest.approx(1 - 64 * 2.0**-8 / 4, abs=0.01)


def test_what_a_verb_writes_is_where_the_outer_loop_goes_on() -> None:
    """It is not taken for something that was learnt."""

    def program(transport: Transport) -> tuple[Tensor, Tensor]:
        run = Run(transport, sl.DiLoCo(2))
        run.steps(1, 3)
        with sl.diverge(run.ddp), torch.no_grad():
            for parameter in run.ddp.parameters():
                parameter += 1.0
        sl.broadcast_(run.ddp, group=transport)
        before = run.values()
        run.optimizer.param_groups[0]["lr"] = 0.0
        run.optimizer.param_groups[0]["weight_decay"] = 0.0
        run.ddp.outer_optimizer.param_groups[0]["momentum"] = 0.0
        run.ddp.outer_optimizer.param_groups[0]["nesterov"] = False
        run.step(4)
        return before, run.values()

    for before, after in run_ranks(2, program):
        torch.testing.assert_close(before, after)


def test_the_same_script_runs_alone() -> None:
    run = Run(None, sl.LocalSGD(2, every_step_within=2))
    run.steps(1, 2)
    run.ddp.sync_parameters_()


# ---------------------------------------------------------------------- saved and loaded

RESUMED = [
    sl.LocalSGD(3, warmup=1),
    sl.DiLoCo(3),
    sl.DiLoCo(4, fragments=2, delay=3, compression=sl.compression.Quantize(4, error_feedback=True)),
    sl.Gossip("exponential", weight=2.0),
    sl.ParameterServer(0),
]


@pytest.mark.parametrize("strategy", [None, *RESUMED], ids=str)
def test_a_run_goes_on_from_what_was_saved_and_ends_equal(strategy: Any) -> None:
    """Without a strategy, from the residuals of compressed gradients."""
    residuals = {} if strategy else {"compression": sl.compression.Quantize(4, error_feedback=True)}

    def program(transport: Transport) -> None:
        whole = Run(transport, strategy, **residuals)
        whole.steps(1, 6)
        saved = whole.saved()
        whole.steps(7, 11)
        resumed = Run(transport, strategy, **residuals)
        resumed.load(saved)
        resumed.steps(7, 11)
        if strategy:
            assert torch.equal(whole.values(), resumed.values())
        else:
            torch.testing.assert_close(whole.values(), resumed.values(), rtol=1e-6, atol=1e-7)
        whole.ddp.sync_parameters_()
        sl.check_replicas(list(whole.ddp.parameters()), group=transport)

    run_ranks(2, program)


def test_a_state_of_another_strategy_is_refused() -> None:
    saved = Run(None, sl.DiLoCo(3)).ddp.sync_state_dict()
    with pytest.raises(ValueError, match=r"saved under strategy=DiLoCo\(every=3\)"):
        Run(None, sl.DiLoCo(4)).ddp.load_sync_state_dict(saved)
    with pytest.raises(ValueError, match="expected a state of sync_state_dict"):
        Run(None, None).ddp.load_sync_state_dict(saved)


def test_values_that_are_loaded_after_wrapping_are_where_the_outer_loop_begins() -> None:
    run, reference = Run(None, sl.DiLoCo(1, outer=lambda p: torch.optim.SGD(p, lr=1.0))), Run(None, None)
    for one in (run, reference):
        for parameter in one.ddp.parameters():
            nn.init.constant_(parameter, 0.25)
        one.step(1)
    torch.testing.assert_close(run.values(), reference.values())


@pytest.mark.parametrize(
    "strategy",
    [
        *(sl.EveryStep(), sl.Manual(), sl.Gossip("exponential", weight=2.0), sl.ParameterServer(0)),
        # With four ranks, codes go from each rank to each.
        *(RESUMED[2], sl.LocalSGD(5, every_step_within=2)),
    ],
    ids=str,
)
def test_after_a_meeting_all_ranks_are_equal_with_their_buffers(strategy: Any) -> None:
    def program(transport: Transport) -> None:
        run = Run(transport, strategy, normalized=True)
        run.steps(1, 7)
        run.ddp.sync_parameters_()
        sl.check_replicas(run.ddp.module, group=transport)

    run_ranks(4, program)
