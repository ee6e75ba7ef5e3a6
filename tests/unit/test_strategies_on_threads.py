"""Strategies at work: what is printed, refused, saved, and what two ranks that differ are told. Ranks are threads."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
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

    def values(self) -> Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.ddp.parameters()]).clone()


def texts_of(program: Callable[[Transport], object], kind: type[Exception], num_ranks: int = 2) -> list[str]:
    """What each rank was told."""
    texts: dict[int, str] = {}

    def rank(transport: Transport) -> None:
        with pytest.raises(kind) as refusal:
            program(transport)
        texts[transport.rank] = str(refusal.value)

    run_ranks(num_ranks, rank)
    return [texts[rank] for rank in range(num_ranks)]


# ---------------------------------------------------------------------- what is refused


def test_a_strategy_that_acts_at_the_step_is_named_before_anything_drifts() -> None:
    def program(transport: Transport) -> None:
        ddp = sl.DistributedDataParallel(net(), process_group=transport, strategy=sl.LocalSGD(8))
        before = [p.clone() for p in ddp.parameters()]
        try:
            ddp(batch(transport.rank, 0)).sum().backward()
        finally:
            assert all(torch.equal(a, b) for a, b in zip(before, ddp.parameters(), strict=True))

    first, second = texts_of(program, sl.SynclineError)
    assert first == second
    assert (
        "strategy=LocalSGD(every=8) synchronizes parameters after steps of an attached optimizer, but no optimizer "
        "is attached" in first
    )
    assert "optimizer = ddp.attach(optimizer)" in first


def test_one_rank_that_has_not_attached_is_named() -> None:
    def program(transport: Transport) -> None:
        ddp = sl.DistributedDataParallel(net(), process_group=transport, strategy=sl.DiLoCo(8))
        if transport.rank == 0:
            ddp.attach(torch.optim.SGD(ddp.parameters(), lr=0.1))
        ddp(batch(transport.rank, 0)).sum().backward()

    first, second = texts_of(program, sl.SynclineError)
    assert first == second
    assert "rank 1" in first


def test_different_every_is_told_before_anything_is_sent() -> None:
    def program(transport: Transport) -> None:
        sl.DistributedDataParallel(
            net(), process_group=transport, strategy=sl.LocalSGD(8 if transport.rank else 4)
        )

    first, second = texts_of(program, sl.ContractMismatch)
    assert first == second
    assert "LocalSGD(every=4)" in first
    assert "LocalSGD(every=8)" in first


def test_a_different_error_feedback_is_told_before_anything_is_sent() -> None:
    def program(transport: Transport) -> None:
        compression = sl.compression.Quantize(4, error_feedback=transport.rank == 0)
        sl.DistributedDataParallel(
            net(), process_group=transport, strategy=sl.DiLoCo(4, compression=compression)
        )

    first, second = texts_of(program, sl.ContractMismatch)
    assert first == second
    assert "Quantize(bits=4, error_feedback=False)" in first


def test_an_outer_optimizer_over_foreign_parameters_is_refused_on_every_rank() -> None:
    def program(transport: Transport) -> None:
        module = net()
        foreign = transport.rank == 1
        sl.DistributedDataParallel(
            module,
            process_group=transport,
            strategy=sl.DiLoCo(
                4, outer=lambda p: torch.optim.SGD(module.parameters() if foreign else p, lr=0.7)
            ),
        )

    first, second = texts_of(program, ValueError)
    assert first == second
    assert "rank 1: expected outer(parameters) to return an optimizer of exactly the 4 parameters" in first
    assert "got a SGD with 0 of them and 4 others. The outer optimizer steps copies" in first


def test_too_many_fragments_are_refused() -> None:
    text, _ = texts_of(lambda t: Run(t, sl.DiLoCo(9, fragments=9)), ValueError)
    assert "expected between 1 and 4 fragments" in text


def test_a_class_instead_of_a_strategy_is_refused() -> None:
    with pytest.raises(TypeError, match=r"got the class LocalSGD\. Create an object of this class"):
        sl.DistributedDataParallel(net(), strategy=sl.LocalSGD)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected strategy to be None or a strategy such as"):
        sl.DistributedDataParallel(net(), strategy="local")  # type: ignore[arg-type]


def test_what_does_not_go_with_drift_is_refused() -> None:
    def program(transport: Transport) -> None:
        with pytest.raises(ValueError, match="sharded=True cannot be combined with strategy=LocalSGD"):
            Run(transport, sl.LocalSGD(2), sharded=True)
        run = Run(transport, sl.LocalSGD(2))
        with pytest.raises(
            ValueError,
            match=r"ranks without inputs cannot take part in parameter syncs, so join\(\) is not possible",
        ):
            run.ddp.join()
        with pytest.raises(ValueError, match="a wrapper cannot be copied or pickled"):
            copy.deepcopy(run.ddp)

    run_ranks(2, program)


def test_different_learning_rates_are_told_when_the_ranks_meet() -> None:
    def program(transport: Transport) -> None:
        run = Run(transport, sl.LocalSGD(2))
        if transport.rank:
            run.optimizer.param_groups[0]["lr"] = 0.5
        run.step(1)
        run.step(2)

    first, second = texts_of(program, sl.ContractMismatch)
    assert first == second
    assert "the parameter sync of Sequential after step 2" in first
    assert "lr of optimizer 0 (AdamW), param_groups[0]" in first


def test_a_server_is_not_asked_to_meet_after_different_numbers_of_steps() -> None:
    def program(transport: Transport) -> None:
        run = Run(transport, sl.ParameterServer(4))
        run.step(1)
        if transport.rank:
            run.step(2)
        run.ddp.sync_parameters_()

    first, second = texts_of(program, sl.ContractMismatch)
    assert first == second
    assert "expected 1 (rank 0)" in first
    assert "Call it after the same number of steps on every rank" in first


@pytest.mark.parametrize(
    "strategy", [sl.LocalSGD(3), sl.DiLoCo(3), sl.DiLoCo(4, fragments=2, delay=1), sl.Gossip("ring")], ids=str
)
def test_ranks_that_have_made_different_numbers_of_steps_do_not_meet(strategy: Any) -> None:
    """They would want different things done: of one average one rank would send parameters, the other distances."""

    def program(transport: Transport) -> None:
        run = Run(transport, strategy)
        run.step(1)
        if transport.rank and not isinstance(strategy, sl.Gossip):
            run.optimizer.step()
        elif transport.rank:
            run.ddp._replica.drift.rounds.optimizers.num_steps += 1
        run.ddp.sync_parameters_()

    first, second = texts_of(program, sl.ContractMismatch)
    assert first == second
    assert "steps done" in first


def test_outer_optimizers_that_differ_are_told() -> None:
    def program(transport: Transport) -> None:
        Run(transport, sl.DiLoCo(2, outer=lambda p: torch.optim.SGD(p, lr=0.1 + transport.rank)))

    first, _ = texts_of(program, sl.ContractMismatch)
    assert "outer optimizer, param_groups[0].lr" in first

    def changed(transport: Transport) -> None:
        run = Run(transport, sl.DiLoCo(2))
        run.step(1)
        if transport.rank:
            run.ddp.outer_optimizer.param_groups[0]["lr"] = 0.25
        run.step(2)

    first, _ = texts_of(changed, sl.ContractMismatch)
    assert "got      0.25 (rank 1)" in first


@pytest.mark.parametrize("strategy", [sl.DiLoCo(2), sl.ParameterServer(1)], ids=str)
def test_replicas_that_differ_before_the_first_step_are_refused(strategy: Any) -> None:
    def program(transport: Transport) -> None:
        run = Run(transport, strategy)
        with torch.no_grad():
            run.ddp.module[0].weight += transport.rank
        run.step(1)

    first, second = texts_of(program, sl.ReplicaDivergence)
    assert first == second
    assert "expected equal parameters on all ranks" in first


def test_an_optimizer_that_takes_the_place_of_another_counts() -> None:
    def program(transport: Transport) -> list[int]:
        run = Run(transport, sl.LocalSGD(2))
        former = run.optimizer
        for step in range(1, 4):
            run.step(step)
        run.optimizer = run.ddp.attach(torch.optim.SGD(run.ddp.parameters(), lr=0.1))
        run.step(4)
        with pytest.raises(sl.SynclineError, match="this AdamW was replaced"):
            former.step()
        return [run.ddp.last_round.step]

    assert run_ranks(2, program) == [[4], [4]]


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
        for step in range(1, 4):
            run.step(step)
        return before, run.ddp.contract.long(), run.ddp.explain()

    before, after, explained = run_ranks(2, program)[0]
    assert "strategy: LocalSGD(every=2, warmup=1)" in before
    assert "every 2 steps, with the parameters" in before
    assert "average, statistics pooled" in before
    assert "after step 3" in after
    assert "step 3: local" in after
    assert "gradients stay on their rank" in explained
    assert "after step 3: averaged parameters, buffers" in explained
    assert "next after step 5" in explained


def test_last_meeting_is_recorded() -> None:
    def program(transport: Transport) -> Any:
        run = Run(transport, sl.DiLoCo(2))
        for step in range(1, 4):
            run.step(step)
        return run.ddp.last_round

    record = run_ranks(2, program)[0]
    assert record.step == 2
    assert record.what == (
        "sent the outer gradient of fragment 0",
        "took the outer step of fragment 0",
    )
    assert record.payload_bytes >= 26 * 4


# ---------------------------------------------------------------------- what travels, and what does not


def test_buffers_meet_with_the_parameters_and_not_in_forward() -> None:
    def program(transport: Transport) -> tuple[list[int], Tensor]:
        run = Run(transport, sl.LocalSGD(3), normalized=True)
        run.step(0)  # with it, what is agreed before the first step
        seen = []
        for step in (1, 2):
            before = transport.statistics().total_calls
            run.step(step)
            seen.append(transport.statistics().total_calls - before)
        sl.check_replicas(run.ddp.module, group=transport)
        return seen, run.ddp.module[1].running_mean

    (calls, mean), (_, other) = run_ranks(2, program)
    assert calls[0] == 0, "nothing is sent between two meetings"
    assert calls[1] > 0
    assert torch.equal(mean, other)


@pytest.mark.parametrize("policy", ["broadcast", "none"])
def test_buffers_meet_by_the_policy_that_was_asked_for(policy: Any) -> None:
    def program(transport: Transport) -> Tensor:
        run = Run(transport, sl.LocalSGD(2), normalized=True, buffers=policy)
        before = run.ddp.module[1].running_mean.clone()
        run.step(1)
        own = run.ddp.module[1].running_mean.clone()
        assert not torch.equal(before, own)
        run.step(2)
        return run.ddp.module[1].running_mean

    means = run_ranks(2, program)
    assert torch.equal(*means) == (policy == "broadcast")


def test_optimizer_state_meets_when_asked() -> None:
    def program(transport: Transport, *, state: bool) -> Tensor:
        run = Run(transport, sl.LocalSGD(2, optimizer_state=state))
        run.step(1)
        run.step(2)
        return torch.cat([s["exp_avg"].reshape(-1) for s in run.optimizer.state.values()])

    assert torch.equal(*run_ranks(2, lambda t: program(t, state=True)))
    assert not torch.equal(*run_ranks(2, lambda t: program(t, state=False)))


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


@pytest.mark.parametrize("staleness", [1, 3])
def test_a_stale_server_ends_where_all_updates_lead(staleness: int) -> None:
    """With gradients that do not depend on the parameters, the end does not depend on who was when where."""

    def program(transport: Transport) -> Tensor:
        module = nn.Linear(5, 3, bias=False).double()
        nn.init.zeros_(module.weight)
        ddp = sl.DistributedDataParallel(
            module, process_group=transport, strategy=sl.ParameterServer(staleness)
        )
        optimizer = ddp.attach(torch.optim.SGD(ddp.parameters(), lr=0.1))
        for step in range(10):
            optimizer.zero_grad()
            ddp(torch.full((1, 5), transport.rank + step, dtype=torch.float64)).sum().backward()
            optimizer.step()
        ddp.sync_parameters_()
        sl.check_replicas(module, group=transport)
        return module.weight.detach()

    expected = -0.1 * sum(step + 1.0 for step in range(10))
    for weight in run_ranks(3, program):
        torch.testing.assert_close(weight, torch.full_like(weight, expected))


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


def test_workers_are_synchronous_in_the_warmup() -> None:
    def program(transport: Transport, strategy: Any) -> Tensor:
        module = net().double()
        ddp = sl.DistributedDataParallel(module, process_group=transport, strategy=strategy)
        optimizer = ddp.attach(torch.optim.SGD(ddp.parameters(), lr=0.1))
        for step in range(1, 6):
            optimizer.zero_grad()
            ddp(batch(transport.rank, step).double()).square().mean().backward()
            optimizer.step()
        return torch.cat([p.detach().reshape(-1) for p in ddp.parameters()])

    expected = run_ranks(4, lambda t: program(t, None))[0]
    for strategy in (sl.DiLoCo(8, warmup=5, every_step_within=2), sl.LocalSGD(8, warmup=5)):
        for found in run_ranks(4, lambda t, strategy=strategy: program(t, strategy)):
            torch.testing.assert_close(found, expected)


def test_what_a_verb_writes_is_where_the_outer_loop_goes_on() -> None:
    """It is not taken for something that was learnt."""

    def program(transport: Transport) -> tuple[Tensor, Tensor]:
        run = Run(transport, sl.DiLoCo(2))
        for step in range(1, 4):
            run.step(step)
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
    run.step(1)
    run.step(2)
    run.ddp.sync_parameters_()


def test_buffers_meet_in_every_step_of_the_warmup() -> None:
    def program(transport: Transport) -> None:
        run = Run(transport, sl.LocalSGD(4, warmup=2), normalized=True)
        run.step(1)
        sl.check_replicas(run.ddp.module, group=transport)
        run.step(2)
        sl.check_replicas(run.ddp.module, group=transport)

    run_ranks(2, program)


def test_manual_explains_that_nothing_is_sent() -> None:
    def program(transport: Transport) -> str:
        return sl.DistributedDataParallel(net(), process_group=transport, strategy=sl.Manual()).explain()

    assert "nothing sent: gradients stay on their rank" in run_ranks(2, program)[0]


# ---------------------------------------------------------------------- saved and loaded

RESUMED = [
    sl.LocalSGD(3, warmup=1),
    sl.DiLoCo(3),
    sl.DiLoCo(4, fragments=2, delay=3, compression=sl.compression.Quantize(4, error_feedback=True)),
    sl.Gossip("exponential", weight=2.0),
    sl.ParameterServer(0),
]


@pytest.mark.parametrize("strategy", RESUMED, ids=str)
def test_a_run_goes_on_from_what_was_saved(strategy: Any) -> None:
    def program(transport: Transport) -> tuple[Tensor, Tensor]:
        whole = Run(transport, strategy)
        for step in range(1, 7):
            whole.step(step)
        saved = copy.deepcopy(
            (whole.ddp.module.state_dict(), whole.optimizer.state_dict(), whole.ddp.sync_state_dict())
        )
        for step in range(7, 12):
            whole.step(step)

        resumed = Run(transport, strategy)
        resumed.ddp.module.load_state_dict(saved[0])
        resumed.optimizer.load_state_dict(saved[1])
        resumed.ddp.load_sync_state_dict(saved[2])
        for step in range(7, 12):
            resumed.step(step)
        return whole.values(), resumed.values()

    for whole, resumed in run_ranks(2, program):
        assert torch.equal(whole, resumed)


def test_residuals_of_compression_are_saved_as_well() -> None:
    def program(transport: Transport) -> tuple[Tensor, Tensor]:
        wrap = {"compression": sl.compression.Quantize(4, error_feedback=True)}
        whole = Run(transport, None, **wrap)
        for step in range(1, 4):
            whole.step(step)
        saved = copy.deepcopy(
            (whole.ddp.module.state_dict(), whole.optimizer.state_dict(), whole.ddp.sync_state_dict())
        )
        whole.step(4)
        resumed = Run(transport, None, **wrap)
        resumed.ddp.module.load_state_dict(saved[0])
        resumed.optimizer.load_state_dict(saved[1])
        resumed.ddp.load_sync_state_dict(saved[2])
        resumed.step(4)
        return whole.values(), resumed.values()

    for whole, resumed in run_ranks(2, program):
        torch.testing.assert_close(whole, resumed, rtol=1e-6, atol=1e-7)


def test_what_was_saved_under_another_strategy_is_refused() -> None:
    saved = Run(None, sl.DiLoCo(3)).ddp.sync_state_dict()
    with pytest.raises(ValueError, match=r"saved under strategy=DiLoCo\(every=3\)"):
        Run(None, sl.DiLoCo(4)).ddp.load_sync_state_dict(saved)
    with pytest.raises(ValueError, match="expected a state of sync_state_dict"):
        Run(None, None).ddp.load_sync_state_dict(saved)


def test_what_is_loaded_after_wrapping_is_where_the_outer_loop_begins() -> None:
    run = Run(None, sl.DiLoCo(1, outer=lambda p: torch.optim.SGD(p, lr=1.0)))
    with torch.no_grad():
        for parameter in run.ddp.parameters():
            parameter.fill_(0.25)
    reference = Run(None, None)
    with torch.no_grad():
        for parameter in reference.ddp.parameters():
            parameter.fill_(0.25)
    run.step(1)
    reference.step(1)
    torch.testing.assert_close(run.values(), reference.values())


@pytest.mark.parametrize(
    "strategy",
    [
        sl.EveryStep(),
        sl.Manual(),
        *RESUMED,
        sl.DiLoCo(4, fragments=2, delay=3),
        sl.LocalSGD(5, every_step_within=2),
    ],
    ids=str,
)
def test_after_a_meeting_all_ranks_are_equal(strategy: Any) -> None:
    def program(transport: Transport) -> None:
        run = Run(transport, strategy, normalized=True)
        for step in range(1, 8):
            run.step(step)
        run.ddp.sync_parameters_()
        sl.check_replicas(run.ddp.module, group=transport)

    run_ranks(4, program)
