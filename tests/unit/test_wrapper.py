"""The wrapper itself: what it accepts, refuses, prints, and does about buffers. Ranks are threads."""

from __future__ import annotations

import copy
import gc
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from fake_devices import fake, two_gpus  # noqa: F401  # a fixture
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import syncline as sl
from syncline import ContractMismatch
from syncline import DistributedDataParallel as DDP
from syncline.ddp import torch_names
from syncline.ddp.wrapping import checked_device_ids
from syncline.gradients import ReplicaProtocol, replica_of
from syncline.transport import ThreadGroup, Transport, run_ranks


def alone() -> Transport:
    return ThreadGroup(1).transport(0)


# ---------------------------------------------------------------------- another group


def test_ranks_train_on_in_another_group_after_one_was_lost() -> None:
    smaller, start = ThreadGroup(2), nn.Linear(3, 2)

    def program(t: Transport) -> list[Tensor] | None:
        ddp = DDP(copy.deepcopy(start), process_group=t)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)

        def step(x: Tensor) -> None:
            optimizer.zero_grad()
            ddp(x).square().mean().backward()
            optimizer.step()

        step(torch.ones(1, 3) * t.rank)
        if t.rank == 1:
            return None
        for _ in range(2):  # in this group, the error is raised again
            with pytest.raises(sl.SynclineError, match=r"step 2, backward, bucket 0 .* rank 1"):
                step(torch.ones(1, 3) * t.rank)
        ddp._update_process_group(smaller.transport(t.rank // 2))
        step(torch.ones(1, 3) * t.rank)
        return [p.detach().clone() for p in ddp.parameters()]

    def alone() -> list[Tensor]:
        net = copy.deepcopy(start)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for ranks in ((0, 1, 2), (0, 2)):
            optimizer.zero_grad()
            for rank in ranks:
                (net(torch.ones(1, 3) * rank).square().mean() / len(ranks)).backward()
            optimizer.step()
        return [p.detach() for p in net.parameters()]

    first, _, last = run_ranks(3, program)
    for mine, other, expected in zip(first, last, alone(), strict=True):
        assert torch.equal(mine, other)
        assert torch.allclose(mine, expected)


# ---------------------------------------------------------------------- bad input


@pytest.mark.usefixtures("two_gpus")
def test_device_ids_are_indices_of_gpus() -> None:
    net = nn.Module()
    net.weight = nn.Parameter(fake(torch.zeros(2)))
    assert checked_device_ids(net, [torch.device("cuda")], None) == ([1], 1)
    assert checked_device_ids(net, [0], "cuda:1") == ([0], 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("module", [None, 3, nn.Linear, [nn.Linear(1, 1)]])
def test_something_that_is_no_module_is_refused(module: Any) -> None:
    with pytest.raises(TypeError, match=r"expected module to be a torch\.nn\.Module, got"):
        DDP(module, process_group=alone())


def test_a_module_without_trained_parameters_is_refused() -> None:
    with pytest.raises(RuntimeError, match="ReLU has no trainable parameters, so it needs no wrapper"):
        DDP(nn.ReLU(), process_group=alone())
    with pytest.raises(RuntimeError, match="Linear has no trainable parameters"):
        DDP(nn.Linear(1, 1).requires_grad_(False), process_group=alone())


def test_with_several_ranks_the_refusal_is_an_error_of_torchs_class() -> None:
    def program(transport: Transport) -> str:
        with pytest.raises(
            RuntimeError, match="when a module doesn't have any parameters that require a gradient"
        ) as caught:
            DDP(nn.ReLU(), process_group=transport)
        assert type(caught.value) is RuntimeError
        return str(caught.value)

    first, second = run_ranks(2, program)
    assert first == second
    assert first.startswith("sl.DistributedDataParallel: DistributedDataParallel is not needed when")
    assert first.endswith(" (all ranks)")


@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
def test_lazy_parameters_are_refused_by_name() -> None:
    with pytest.raises(RuntimeError, match=r"lazy parameters .* 0\.weight, 0\.bias\. .* Run one forward"):
        DDP(nn.Sequential(nn.LazyLinear(2), nn.Linear(2, 2)), process_group=alone())


@pytest.mark.parametrize("arguments", [{"device_ids": [0]}, {"output_device": 1}, {"device_ids": [0, 1]}])
def test_device_ids_on_cpu_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="device_ids"):
        DDP(nn.Linear(1, 1), process_group=alone(), **arguments)


@pytest.mark.parametrize("cap_mb", [0, -1, float("nan")])
def test_a_bucket_cap_that_is_not_positive_is_refused(cap_mb: float) -> None:
    with pytest.raises(ValueError, match="bucket_cap_mb to be a finite number above 0"):
        DDP(nn.Linear(1, 1), process_group=alone(), bucket_cap_mb=cap_mb)


def test_arguments_may_be_given_by_position_as_in_torch() -> None:
    ddp = DDP(nn.Linear(1, 1), None, None, 0, False, True, alone(), 25, True, False, True, False)
    assert (ddp.broadcast_buffers, ddp.find_unused_parameters, ddp.gradient_as_bucket_view) == (
        False,
        True,
        True,
    )


# ---------------------------------------------------------------------- agreement


def mismatch_texts(build: Any, **different: Any) -> list[str]:
    def rank(t: Transport) -> str:
        module = build(t.rank)
        before = [p.detach().clone() for p in module.parameters()]
        with pytest.raises(ContractMismatch) as error:
            DDP(module, process_group=t, **({} if t.rank == 0 else different))
        assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True)), (
            "nothing was sent"
        )
        return str(error.value)

    return run_ranks(3, rank)


def named(**layers: nn.Module) -> nn.Module:
    module = nn.Module()
    for name, layer in layers.items():
        module.add_module(name, layer)
    return module


def frozen_bias() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.bias.requires_grad_(False)
    return layer


@pytest.mark.parametrize(
    ("first", "other", "words"),
    [
        (lambda: named(a=nn.Linear(2, 2)), lambda: named(b=nn.Linear(2, 2)), ["a.weight", "b.weight"]),
        (lambda: nn.Linear(2, 2), lambda: nn.Linear(2, 3), ["weight", "(2, 2)", "(3, 2)"]),
        (lambda: nn.Linear(2, 2), lambda: nn.Linear(2, 2).double(), ["float32", "float64"]),
        (lambda: nn.Linear(2, 2), frozen_bias, ["bias", "requires_grad"]),
        (
            lambda: named(a=nn.Linear(2, 2), b=nn.Linear(2, 2)),
            lambda: named(b=nn.Linear(2, 2), a=nn.Linear(2, 2)),
            ["order"],
        ),
        (
            lambda: nn.Conv2d(3, 4, 2),
            lambda: nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last),
            ["strides"],
        ),
        (lambda: nn.BatchNorm1d(2), lambda: nn.BatchNorm1d(2, track_running_stats=False), ["running_mean"]),
    ],
)
def test_different_modules_are_refused_with_the_same_text_on_every_rank(
    first: Any, other: Any, words: list[str]
) -> None:
    texts = mismatch_texts(lambda rank: other() if rank == 1 else first())
    assert len(set(texts)) == 1
    for word in [*words, "rank 1", "Build the same module"]:
        assert word in texts[0]


def test_different_arguments_are_refused() -> None:
    texts = mismatch_texts(lambda rank: nn.Linear(2, 2), bucket_cap_mb=1)
    assert len(set(texts)) == 1
    assert "up to 1048576 bytes" in texts[0]


@pytest.mark.parametrize(
    ("different", "lines"),
    [
        ({"find_unused_parameters": True}, ("find_unused_parameters", "expected True", "got      False")),
        ({"init_sync": False}, ("init_sync", "expected False", "got      True")),
        ({"strategy": sl.LocalSGD(4)}, ("strategy", "expected LocalSGD(every=4)", "got      EveryStep()")),
    ],
)
def test_a_mismatch_names_the_argument_and_its_values(different: Any, lines: Sequence[str]) -> None:
    text = mismatch_texts(lambda rank: nn.Linear(2, 2), **different)[0]
    for line in lines:
        assert line in text


def test_arguments_without_effect_on_other_ranks_may_differ() -> None:
    def rank(t: Transport) -> float:
        ddp = DDP(nn.Linear(1, 1), process_group=t, gradient_as_bucket_view=t.rank == 1)
        ddp(torch.full((1, 1), float(t.rank))).sum().backward()
        return ddp.module.weight.grad.item()

    assert run_ranks(2, rank) == [0.5, 0.5]


def test_equal_arguments_give_equal_configurations() -> None:
    first, same, other = (
        DDP(nn.Linear(1, 1), bucket_cap_mb=1, static_graph=static)._replica.config
        for static in (False, False, True)
    )
    assert first == same != other


# ---------------------------------------------------------------------- parameters and buffers


def test_parameters_and_buffers_are_rank_0s_after_construction() -> None:
    def rank(t: Transport) -> Any:
        module = nn.BatchNorm1d(2)
        module.weight.data.fill_(t.rank + 5)
        module.running_mean.fill_(t.rank + 7)
        module.num_batches_tracked.fill_(t.rank + 9)
        DDP(module, process_group=t, forward_sync_buffers=False)
        return module.weight.tolist(), module.running_mean.tolist(), module.num_batches_tracked.item()

    assert run_ranks(2, rank) == [([5.0, 5.0], [7.0, 7.0], 9)] * 2


def test_broadcast_buffers_false_leaves_them_alone_at_construction_too_as_in_torch() -> None:
    def rank(t: Transport) -> tuple[float, str]:
        module = nn.BatchNorm1d(1)
        module.running_mean.fill_(t.rank)
        ddp = DDP(module, process_group=t, broadcast_buffers=False)
        return module.running_mean.item(), ddp.contract["buffers"].when

    assert run_ranks(2, rank) == [(0.0, "never"), (1.0, "never")]


def test_of_both_names_for_buffers_the_newer_wins_as_in_torch() -> None:
    with pytest.warns(FutureWarning, match="only forward_sync_buffers applies"):
        ddp = DDP(
            nn.BatchNorm1d(1), process_group=alone(), broadcast_buffers=True, forward_sync_buffers=False
        )
    assert not ddp.forward_sync_buffers


def test_init_sync_false_sends_nothing() -> None:
    def rank(t: Transport) -> float:
        module = nn.Linear(1, 1)
        module.weight.data.fill_(t.rank)
        ddp = DDP(module, process_group=t, init_sync=False)
        assert "broadcast" not in ddp.statistics().num_calls
        return module.weight.item()

    assert run_ranks(2, rank) == [0.0, 1.0]


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2, momentum=1.0)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.norm.running_mean.clone()
        return self.norm(x)


def batch(t: Transport) -> Tensor:
    """Mean r + 1."""
    return torch.tensor([[0.0, 0.0], [1.0, 1.0]]) + t.rank + 0.5


def test_buffers_are_broadcast_before_forward_but_not_after_no_sync_or_no_grad() -> None:
    def rank(t: Transport) -> list[tuple[float, bool]]:
        ddp = DDP(Norm(), process_group=t)
        seen = []

        def forward() -> None:
            ddp(batch(t)).sum().backward()
            seen.append((ddp.module.seen[0].item(), ddp._replica.buffers.last_forward().sent))

        forward()
        forward()
        with ddp.no_sync():
            forward()  # the one before was synchronized: sent
        forward()  # the one before ran under no_sync: not sent
        forward()
        with torch.no_grad():
            ddp(batch(t))
        forward()
        return seen

    first, second = run_ranks(2, rank)
    assert first == [(0.0, True), (1.0, True), (1.0, True), (1.0, False), (1.0, True), (1.0, False)]
    assert second == [(0.0, True), (1.0, True), (1.0, True), (2.0, False), (1.0, True), (2.0, False)]


def test_a_buffer_replaced_by_assignment_is_broadcast_too() -> None:
    def rank(t: Transport) -> float:
        ddp = DDP(Norm(), process_group=t)
        ddp(batch(t)).sum().backward()
        ddp.module.norm.running_mean = torch.full((2,), 10.0 + t.rank)
        ddp(batch(t)).sum().backward()
        return ddp.module.seen[0].item()

    assert run_ranks(2, rank) == [10.0, 10.0]


def test_two_forwards_before_one_backward_keep_batch_norm_working() -> None:
    def rank(t: Transport) -> None:
        ddp = DDP(Norm(), process_group=t)
        (ddp(batch(t)) + ddp(batch(t) + 1)).sum().backward()

    run_ranks(2, rank)


def test_without_buffers_forward_sends_nothing() -> None:
    def rank(t: Transport) -> int:
        ddp = DDP(nn.Linear(2, 2), process_group=t)
        ddp(batch(t))  # the first one agrees on what was registered since construction
        before = ddp.statistics().total_calls
        for _ in range(3):
            ddp(batch(t))
        return ddp.statistics().total_calls - before

    assert run_ranks(2, rank) == [0, 0]


# ---------------------------------------------------------------------- words


def test_state_dict_keys_have_torchs_prefix() -> None:
    assert list(DDP(nn.Linear(1, 1), process_group=alone()).state_dict()) == ["module.weight", "module.bias"]


def test_the_contract_answers_before_and_after_the_first_step() -> None:
    def rank(t: Transport) -> tuple[str, str, str, str]:
        ddp = DDP(nn.Sequential(nn.Linear(2, 2), Norm()), process_group=t)
        before, plan = ddp.contract.long(), ddp.explain()
        ddp(batch(t)).sum().backward()
        return before, plan, ddp.contract.long(), ddp.explain()

    before, plan, after, record = run_ranks(2, rank)[0]
    assert before.splitlines()[0] == (
        "Contract: DistributedDataParallel(Sequential), 2 ranks on 1 host, transport: threads"
    )
    assert "gradients      4 tensors, 40 B  every backward outside no_sync" in before
    assert "parameters     4 tensors, 40 B  once, at construction" in before
    assert "buffers        3 tensors, 24 B  before forward, not after no_sync" in before
    assert "only when asked: sl.mean(...)" in before
    assert "last done" not in before
    assert "step 1: 1 bucket, mean over 2 ranks" in after
    assert "before the last forward" in after
    assert plan.splitlines()[0] == "One step, as planned (none has run yet)"
    assert record.splitlines()[0] == "One step, as recorded on rank 0, step 1"
    assert "buffers     broadcast from rank 0: 3 tensors, 24 B, 1 call" in record
    assert "sent by all_reduce when 0.weight was ready" in record
    assert ".grad now holds the mean over 2 ranks" in record
    assert "loss      local to each rank, not averaged automatically" in record


def test_the_safety_checks_have_a_size_and_are_named_when_asked() -> None:
    def rank(t: Transport) -> tuple[str, str, list[str]]:
        ddp = DDP(nn.Linear(2, 2), process_group=t)
        planned = ddp.explain(verbose=True)
        ddp(batch(t)).sum().backward()
        return ddp.contract["safety checks"].size, ddp.explain(), [planned, ddp.explain(verbose=True)]

    size, brief, verbose = run_ranks(2, rank)[0]
    assert re.fullmatch(r"\d+ B", size)
    assert f"plus {size} of safety checks (ddp.explain(verbose=True) names them)" in brief
    assert "requests to stop" not in brief
    for text in verbose:
        assert f"plus {size} of safety checks: requests to stop, " in text


def test_the_timeline_names_the_communication_hook() -> None:
    def as_they_are(state: object, bucket: Any) -> torch.futures.Future[Tensor]:
        raise AssertionError("never called")

    def rank(t: Transport) -> str:
        ddp = DDP(nn.Linear(2, 1), process_group=t)
        ddp.register_comm_hook(None, as_they_are)
        return ddp.explain()

    text = " ".join(run_ranks(2, rank)[0].split())
    assert "as_they_are when the last of its gradients is ready" in text
    assert "all_reduce" not in text


def test_explain_speaks_from_the_record_not_from_the_plan() -> None:
    def rank(t: Transport) -> list[str]:
        ddp = DDP(nn.Linear(2, 2), process_group=t)
        with ddp.no_sync():
            ddp(batch(t)).sum().backward()
        texts = [ddp.explain(), str(ddp.contract)]
        ddp.zero_grad()
        with ddp.normalize_by(5):
            ddp(batch(t)).sum().backward()
        return [*texts, ddp.explain()]

    silent, contract, counted = run_ranks(2, rank)[1]
    assert "nothing sent: backward ran under no_sync" in silent
    assert "added up, no_sync" in contract
    assert "buffers     nothing sent: the module has no buffers" in counted
    assert "recorded on rank 1, step 1" in counted


def test_alone_everything_says_that_nothing_is_sent() -> None:
    ddp = DDP(nn.Linear(2, 2), process_group=alone())
    ddp(torch.ones(1, 2)).sum().backward()
    assert "1 rank alone" in ddp.contract.title
    assert ddp.statistics().total_calls == 0
    assert ddp.explain().count("nothing sent: there is one rank") == 2


def test_the_wrapper_is_freed_when_dropped() -> None:
    gc.collect()
    model = nn.Linear(2, 2)
    ddp = DDP(model, process_group=alone())
    ddp(torch.ones(1, 2)).sum().backward()
    del ddp
    assert not model.weight._post_accumulate_grad_hooks


# ---------------------------------------------------------------------- found by code below the wrapper


class LooksWrapped(nn.Linear):
    """A user's module that has everything that a replica and its wrapper have."""

    def __init__(self) -> None:
        super().__init__(2, 1)
        vars(self)["_replica"] = self
        for name in (*vars(ReplicaProtocol), "sync_state_dict", "load_sync_state_dict"):
            if not name.startswith("_") and name not in dir(nn.Module):
                setattr(self, name, lambda *args, **kwargs: pytest.fail("taken for a wrapper"))


class Framework(DDP):
    """A subclass, as frameworks have it."""


def test_only_syncline_wrappers_are_found() -> None:
    looks, wrapper = LooksWrapped(), Framework(nn.Linear(2, 1))
    assert replica_of(looks) is replica_of(nn.Linear(2, 1)) is replica_of("text") is None
    assert replica_of(wrapper) is vars(wrapper)["_replica"]
    assert replica_of(wrapper.module) is None
    assert replica_of(Framework.__new__(Framework)) is None  # its constructor has failed


def test_a_module_that_looks_wrapped_is_saved_and_compared_as_it_is() -> None:
    looks = LooksWrapped()
    state = sl.TrainState(model=looks)
    assert sl.check_replicas(state).num_compared == 3  # weight, bias, step
    state.load_state_dict(state.state_dict())


def test_methods_that_only_the_library_calls_are_not_public() -> None:
    documented = {
        *(
            "attach",
            "clip_grad_norm_",
            "normalize_by",
            "report",
            "sync_buffers_",
            "sync_parameters_",
            "contract",
            "explain",
        ),
        *(
            "last_step",
            "last_round",
            "outer_optimizer",
            "statistics",
            "sync_state_dict",
            "load_sync_state_dict",
        ),
    }
    public = {name for name in dir(DDP) if not name.startswith("_")}
    torchs_attributes = {*dir(nn.parallel.DistributedDataParallel), *vars(torch_names.TorchNames)}
    assert public - torchs_attributes == documented


def test_a_wrapper_may_be_freed_while_torch_calls_the_hooks_before_a_step() -> None:
    """The garbage collector may run at any time, and frees a wrapper that is in a cycle."""
    net = nn.Linear(2, 1)
    wrappers = [DDP(nn.Linear(2, 1))]

    def free(*_: object) -> None:
        wrappers.clear()
        gc.collect()

    handle = register_optimizer_step_pre_hook(free)
    try:
        wrappers.append(DDP(net))
        torch.optim.SGD(net.parameters()).step()
    finally:
        handle.remove()
    assert not wrappers
