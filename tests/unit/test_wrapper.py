"""The wrapper itself: what it accepts, refuses, prints, and does about buffers. Ranks are threads."""

from __future__ import annotations

import copy
import gc
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_devices import fake, two_gpus  # noqa: F401  # a fixture
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import syncline as sl
from support.cases import case
from support.threads import on_threads
from support.verbs import error_of_all
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

        def step() -> None:
            optimizer.zero_grad()
            ddp(torch.ones(1, 3) * t.rank).square().mean().backward()
            optimizer.step()

        step()
        if t.rank == 1:
            return None
        for _ in range(2):  # in this group, the error is raised again
            with pytest.raises(sl.SynclineError, match=r"step 2, backward, bucket 0 .* rank 1"):
                step()
        ddp._update_process_group(smaller.transport(t.rank // 2))
        step()
        return [p.detach().clone() for p in ddp.parameters()]

    net = copy.deepcopy(start)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for ranks in ((0, 1, 2), (0, 2)):
        optimizer.zero_grad()
        for rank in ranks:
            (net(torch.ones(1, 3) * rank).square().mean() / len(ranks)).backward()
        optimizer.step()
    first, _, last = run_ranks(3, program)
    for mine, other, expected in zip(first, last, net.parameters(), strict=True):
        assert torch.equal(mine, other)
        assert torch.allclose(mine, expected)


def test_a_parameter_may_be_frozen_before_a_loss_and_thawed_after_it() -> None:
    def program(t: Transport, smaller: ThreadGroup) -> list[bool]:
        ddp = DDP(
            nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), process_group=t, find_unused_parameters=True
        )
        frozen, found = ddp.module[0].weight, []
        for trains in (True, False, True):
            frozen.requires_grad_(trains)
            if t.rank < 2 and not trains:
                ddp._update_process_group(smaller.transport(t.rank))
            ddp.zero_grad()
            if t.rank < 2 or not found:
                ddp(torch.full((1, 2), t.rank + 1.0)).sum().backward()
            found.append(frozen.grad is not None)
        return found

    smaller = ThreadGroup(2)
    assert run_ranks(3, lambda t: program(t, smaller))[:2] == [[True, False, True]] * 2


def test_a_layer_that_only_some_ranks_have_added_before_a_loss_is_compared_after_it() -> None:
    start = nn.Sequential(nn.Linear(3, 2))

    def program(
        t: Transport, early: tuple[int, ...], values: tuple[float, float], smaller: ThreadGroup
    ) -> list[Any]:
        ddp = DDP(copy.deepcopy(start), process_group=t)
        ddp(torch.ones(1, 3)).sum().backward()
        if t.rank == 2:
            return []
        layer = nn.Linear(2, 1)
        for parameter in layer.parameters():
            nn.init.constant_(parameter, values[t.rank])
        if t.rank in early:
            ddp.module.append(layer)
        ddp._update_process_group(smaller.transport(t.rank))
        if t.rank not in early:
            ddp.module.append(layer)
        ddp.zero_grad()
        ddp(torch.ones(1, 3) * t.rank).square().sum().backward()
        return [p.grad for p in ddp.parameters()]

    def run(early: tuple[int, ...], values: tuple[float, float]) -> list[list[Any]]:
        smaller = ThreadGroup(2)
        return run_ranks(3, lambda t: program(t, early, values, smaller))

    for early in ((0, 1), (0,), (1,)):
        with case(early):
            first, second, _ = run(early, (1.0, 1.0))
            assert len(first) == 4
            assert all(map(torch.equal, first, second))
            with pytest.raises(ContractMismatch, match=r"1\.weight"):
                run(early, (1.0, 2.0))


# ---------------------------------------------------------------------- bad input


@pytest.mark.usefixtures("two_gpus")
def test_device_ids_are_indices_of_gpus() -> None:
    net = nn.Module()
    net.weight = nn.Parameter(fake(torch.zeros(2)))
    assert checked_device_ids(net, [torch.device("cuda")], None) == ([1], 1)
    assert checked_device_ids(net, [0], "cuda:1") == ([0], 1)


@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
def test_modules_that_cannot_be_wrapped_are_refused() -> None:
    with pytest.raises(RuntimeError, match="ReLU has no trainable parameters, so it needs no wrapper"):
        DDP(nn.ReLU(), process_group=alone())
    with pytest.raises(RuntimeError, match="Linear has no trainable parameters"):
        DDP(nn.Linear(1, 1).requires_grad_(False), process_group=alone())
    with pytest.raises(RuntimeError, match=r"lazy parameters .* 0\.weight, 0\.bias\. .* Run one forward"):
        DDP(nn.Sequential(nn.LazyLinear(2), nn.Linear(2, 2)), process_group=alone())
    for arguments in ({"device_ids": [0]}, {"output_device": 1}, {"device_ids": [0, 1]}):
        with case(arguments), pytest.raises(ValueError, match="device_ids"):
            DDP(nn.Linear(1, 1), process_group=alone(), **arguments)


def test_with_several_ranks_the_refusal_is_an_error_of_torchs_class() -> None:
    error = error_of_all(RuntimeError, lambda t: DDP(nn.ReLU(), process_group=t))
    assert str(error).startswith("sl.DistributedDataParallel: DistributedDataParallel is not needed when")
    assert "doesn't have any parameters that require a gradient" in str(error)
    assert str(error).endswith(" (all ranks)")


# ---------------------------------------------------------------------- agreement


def mismatch(build: Callable[[int], nn.Module], **different: Any) -> str:
    """The text of the error, which is the same on each of three ranks. Only rank 0 has no arguments."""

    def program(t: Transport) -> None:
        module = build(t.rank)
        before = copy.deepcopy(module.state_dict())
        try:
            DDP(module, process_group=t, **({} if t.rank == 0 else different))
        finally:
            assert all(map(torch.equal, before.values(), module.state_dict().values())), "nothing was sent"

    return str(error_of_all(ContractMismatch, program, 3))


def named(**layers: nn.Module) -> nn.Module:
    module = nn.Module()
    for name, layer in layers.items():
        module.add_module(name, layer)
    return module


def ab() -> nn.Module:
    return named(a=nn.Linear(2, 2), b=nn.Linear(2, 2))


def frozen_bias() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.bias.requires_grad_(False)
    return layer


def test_different_modules_are_refused_with_the_same_text_on_every_rank() -> None:
    cases: list[tuple[nn.Module, nn.Module, list[str]]] = [
        (named(a=nn.Linear(2, 2)), named(b=nn.Linear(2, 2)), ["a.weight", "b.weight"]),
        (nn.Linear(2, 2), nn.Linear(2, 3), ["weight", "(2, 2)", "(3, 2)"]),
        (nn.Linear(2, 2), nn.Linear(2, 2).double(), ["float32", "float64"]),
        (nn.Linear(2, 2), frozen_bias(), ["bias", "requires_grad"]),
        (ab(), named(b=nn.Linear(2, 2), a=nn.Linear(2, 2)), ["order"]),
        (
            nn.Conv2d(3, 4, 2),
            nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last),
            ["strides"],
        ),
        (nn.BatchNorm1d(2), nn.BatchNorm1d(2, track_running_stats=False), ["running_mean"]),
    ]
    for first, other, words in cases:
        modules = [first, other, copy.deepcopy(first)]
        text = mismatch(modules.__getitem__)
        assert [word for word in (*words, "rank 1", "Build the same module") if word not in text] == [], text


def test_a_mismatch_names_the_argument_and_its_values() -> None:
    """Nothing is sent before arguments are compared."""
    cases: list[tuple[dict[str, Any], list[str]]] = [
        ({"bucket_cap_mb": 1}, ["up to 1048576 bytes"]),
        ({"find_unused_parameters": True}, ["find_unused_parameters", "expected True", "got      False"]),
        ({"init_sync": False}, ["init_sync", "expected False", "got      True"]),
        ({"strategy": sl.LocalSGD(4)}, ["strategy", "expected LocalSGD(every=4)", "got      EveryStep()"]),
    ]
    for different, words in cases:
        text = mismatch(lambda _: nn.Linear(2, 2), **different)
        assert [word for word in words if word not in text] == [], text


@on_threads(2)
def test_arguments_without_effect_on_other_ranks_may_differ(t: Transport) -> None:
    ddp = DDP(nn.Linear(1, 1), process_group=t, gradient_as_bucket_view=t.rank == 1)
    ddp(torch.full((1, 1), float(t.rank))).sum().backward()
    assert ddp.module.weight.grad.item() == 0.5


def test_equal_arguments_give_equal_configurations() -> None:
    first, same, other = (
        replica_of(DDP(nn.Linear(1, 1), bucket_cap_mb=1, static_graph=static)).config
        for static in (False, False, True)
    )
    assert first == same != other


# ---------------------------------------------------------------------- parameters and buffers


@on_threads(2)
def test_parameters_and_buffers_are_rank_0s_after_construction(t: Transport) -> None:
    """With broadcast_buffers=False, buffers are left alone, as in torch."""
    for argument, when in (("forward_sync_buffers", "once, at construction"), ("broadcast_buffers", "never")):
        module = nn.BatchNorm1d(2)
        module.weight.data.fill_(t.rank + 5)
        module.running_mean.fill_(t.rank + 7)
        module.num_batches_tracked.fill_(t.rank + 9)
        ddp = DDP(module, process_group=t, **{argument: False})
        rank = t.rank if when == "never" else 0
        with case(argument):
            assert module.weight.tolist() == [5.0, 5.0]
            assert (module.running_mean.tolist(), module.num_batches_tracked) == ([rank + 7.0] * 2, rank + 9)
            assert ddp.contract["buffers"].when == when


def test_of_both_names_for_buffers_the_newer_wins_as_in_torch() -> None:
    both = {"broadcast_buffers": True, "forward_sync_buffers": False}
    with pytest.warns(FutureWarning, match="only forward_sync_buffers applies"):
        ddp = DDP(nn.BatchNorm1d(1), process_group=alone(), **both)
    assert not ddp.forward_sync_buffers


@on_threads(2)
def test_init_sync_false_sends_nothing(t: Transport) -> None:
    module = nn.Linear(1, 1)
    module.weight.data.fill_(t.rank)
    ddp = DDP(module, process_group=t, init_sync=False)
    assert "broadcast" not in ddp.statistics().num_calls
    assert module.weight.item() == t.rank


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


@on_threads(2)
def test_buffers_are_broadcast_before_forward_but_not_after_no_sync_or_no_grad(t: Transport) -> None:
    ddp = DDP(Norm(), process_group=t)
    seen = []

    def forward() -> None:
        ddp(batch(t)).sum().backward()
        seen.append((ddp.module.seen[0].item(), ddp.contract["buffers"].last_done[:6] == "before"))

    forward()
    forward()
    with ddp.no_sync():
        forward()  # the one before was synchronized: sent
    forward()  # the one before ran under no_sync: not sent
    forward()
    with torch.no_grad():
        ddp(batch(t))
    forward()
    own = (1.0 + t.rank, False)
    assert seen == [(0.0, True), (1.0, True), (1.0, True), own, (1.0, True), own]


@on_threads(2)
def test_two_forwards_before_one_backward_keep_batch_norm_working(t: Transport) -> None:
    ddp = DDP(Norm(), process_group=t)
    (ddp(batch(t)) + ddp(batch(t) + 1)).sum().backward()


@on_threads(2)
def test_without_buffers_forward_sends_nothing(t: Transport) -> None:
    ddp = DDP(nn.Linear(2, 2), process_group=t)
    ddp(batch(t))  # the first one agrees on what was registered since construction
    before = ddp.statistics().total_calls
    for _ in range(3):
        ddp(batch(t))
    assert ddp.statistics().total_calls == before


# ---------------------------------------------------------------------- words


def test_state_dict_keys_have_torchs_prefix() -> None:
    assert list(DDP(nn.Linear(1, 1), process_group=alone()).state_dict()) == ["module.weight", "module.bias"]


def test_the_contract_and_explain_answer_before_and_after_each_kind_of_step() -> None:
    """From the record, not from the plan, as soon as there is one."""

    def program(t: Transport) -> list[str]:
        ddp = DDP(nn.Sequential(nn.Linear(2, 2), Norm()), process_group=t)
        texts = [ddp.contract.long() + ddp.explain()]
        with ddp.no_sync():
            ddp(batch(t)).sum().backward()
        texts.append(ddp.contract.long() + ddp.explain())
        ddp.zero_grad()
        ddp(batch(t)).sum().backward()
        return [*texts, ddp.contract.long() + ddp.explain()]

    planned, silent, recorded = run_ranks(2, program)[1]
    expected = {
        planned: [
            "Contract: DistributedDataParallel(Sequential), 2 ranks on 1 host, transport: threads",
            "gradients      4 tensors, 40 B  every backward outside no_sync",
            "parameters     4 tensors, 40 B  once, at construction",
            "buffers        3 tensors, 24 B  before forward, not after no_sync",
            "only when asked: sl.mean(...)",
            "One step, as planned (none has run yet)",
        ],
        silent: ["added up, no_sync", "nothing sent: backward ran under no_sync"],
        recorded: [
            "step 1: 1 bucket, mean over 2 ranks",
            "One step, as recorded on rank 1, step 1",
            "sent by all_reduce when 0.weight was ready",
            ".grad now holds the mean over 2 ranks",
            "loss      local to each rank, not averaged automatically",
        ],
    }
    for text, words in expected.items():
        assert [one for one in words if one not in text] == [], text
    assert "last done" not in planned


@on_threads(2)
def test_explain_says_what_became_of_buffers(t: Transport) -> None:
    for module, words in (
        (Norm(), "buffers     broadcast from rank 0: 3 tensors, 24 B, 1 call"),
        (nn.Linear(2, 2), "buffers     nothing sent: the module has no buffers"),
    ):
        ddp = DDP(module, process_group=t)
        ddp(batch(t)).sum().backward()
        assert words in ddp.explain()


@on_threads(2)
def test_the_safety_checks_have_a_size_and_are_named_when_asked(t: Transport) -> None:
    ddp = DDP(nn.Linear(2, 2), process_group=t)
    planned = ddp.explain(verbose=True)
    ddp(batch(t)).sum().backward()
    size, brief = ddp.contract["safety checks"].size, ddp.explain()
    assert re.fullmatch(r"\d+ B", size)
    assert f"plus {size} of safety checks (ddp.explain(verbose=True) names them)" in brief
    assert "requests to stop" not in brief
    for text in (planned, ddp.explain(verbose=True)):
        assert f"plus {size} of safety checks: requests to stop, " in text


@on_threads(2)
def test_the_timeline_names_the_communication_hook(t: Transport) -> None:
    def as_they_are(state: object, bucket: Any) -> torch.futures.Future[Tensor]:
        raise AssertionError("never called")

    ddp = DDP(nn.Linear(2, 1), process_group=t)
    ddp.register_comm_hook(None, as_they_are)
    text = " ".join(ddp.explain().split())
    assert "as_they_are when the last of its gradients is ready" in text
    assert "all_reduce" not in text


def test_alone_everything_says_that_nothing_is_sent() -> None:
    ddp = DDP(nn.Linear(2, 2), process_group=alone())
    ddp(torch.ones(1, 2)).sum().backward()
    assert "1 rank alone" in ddp.contract.title
    assert ddp.statistics().total_calls == 0
    assert ddp.explain().count("nothing sent: there is one rank") == 2


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


PUBLIC = """
    attach clip_grad_norm_ normalize_by report sync_buffers_ sync_parameters_ contract explain
    last_step last_round outer_optimizer statistics sync_state_dict load_sync_state_dict
"""


def test_methods_that_only_the_library_calls_are_not_public() -> None:
    public = {name for name in dir(DDP) if not name.startswith("_")}
    torchs_attributes = {*dir(nn.parallel.DistributedDataParallel), *vars(torch_names.TorchNames)}
    assert public - torchs_attributes == set(PUBLIC.split())


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
