"""Every name of torch's class: overridden, harmless as it is inherited, or refused by one clear error."""

from __future__ import annotations

import inspect
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Joinable

import syncline as sl
from support.cases import case
from syncline.ddp.torch_names import REFUSED
from syncline.testing import run_ranks
from syncline.transport import Transport

TorchDDP = torch.nn.parallel.DistributedDataParallel

HARMLESS = {
    "_active_ddp_module": "torch.compile looks here, in torch's class, for the wrapper whose forward runs",
    "_build_debug_param_to_name_mapping": "names by index, of the parameters that it is given",
    "_build_params_for_reducer": "lists the parameters that require grad",
    "_get_active_ddp_module": "reads _active_ddp_module",
    "_get_data_parallel_params": "lists parameters",
    "_get_parameters": "lists parameters",
    "_inside_ddp_forward": "sets _active_ddp_module, as our forward does if something reads that",
    "_log_and_throw": "raises what it is given; there is no logger",
    "_set_params_and_buffers_to_ignore_for_model": "marks the module, which is read when it is wrapped",
    "gather": "of outputs, which nobody calls",
    "scatter": "of inputs, which nobody calls",
    "to_kwargs": "moves inputs, and nobody calls it",
}
"""Names of torch's class that are right as they are inherited, and why."""

OF_EVERY_CLASS = {"__abstractmethods__", "__annotations__", "__dict__", "__doc__", "__module__", "_abc_impl"}

KNOWN_VERSION = "2.13"
"""In later versions of torch a new name is not a failure: look at it when this is raised."""


def overridden() -> set[str]:
    """Names that our class or its part for torch's names defines."""
    lookup_order = sl.DistributedDataParallel.__mro__
    ours = lookup_order[: lookup_order.index(TorchDDP)]
    return {name for cls in ours for name in vars(cls)} - set(REFUSED)


def own_names() -> set[str]:
    """Names of torch's class that are not simply those of every module and joinable."""
    inherited = {
        name for name in dir(TorchDDP) if any(_same(name, base) for base in (nn.Module, Joinable, object))
    }
    return set(dir(TorchDDP)) - inherited - OF_EVERY_CLASS


def _same(name: str, base: type) -> bool:
    missing = object()
    of_base = inspect.getattr_static(base, name, missing)
    return of_base is not missing and inspect.getattr_static(TorchDDP, name) is of_base


def test_every_name_of_torchs_class_is_overridden_harmless_or_refused() -> None:
    unknown = own_names() - overridden() - set(HARMLESS) - set(REFUSED)
    if torch.__version__.startswith(KNOWN_VERSION):
        assert not unknown
        assert set(HARMLESS) | set(REFUSED) <= own_names(), "these are torch's no more"
    assert not set(HARMLESS) & overridden()


def test_what_drives_torchs_reducer_names_what_to_use_instead() -> None:
    ddp = sl.DistributedDataParallel(nn.Linear(1, 1))
    for name, instead in REFUSED.items():
        with case(name):
            with pytest.raises(sl.SynclineError, match="does not use torch's reducer") as caught:
                getattr(ddp, name)(1, some=2)
            assert name in str(caught.value)
            assert instead in str(caught.value)


def test_what_is_harmless_works() -> None:
    ddp = sl.DistributedDataParallel(nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)))
    parameters, is_sparse = ddp._build_params_for_reducer()
    assert [p is q for p, q in zip(parameters, ddp.parameters(), strict=True)] == [True] * 4
    assert not any(is_sparse)
    names = ddp._build_debug_param_to_name_mapping(parameters)
    assert [names[i] for i in range(4)] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert len(list(ddp._get_parameters(ddp.module))) == len(list(ddp._get_data_parallel_params(ddp))) == 4
    with pytest.raises(KeyError, match="said"):
        ddp._log_and_throw(KeyError, "said")
    with ddp._inside_ddp_forward():
        assert ddp._get_active_ddp_module() is ddp
    assert ddp._run_ddp_forward(torch.ones(2, 1)).shape == (2, 1)


def test_a_subclass_may_replace_how_the_module_runs_as_in_torch() -> None:
    class Doubled(sl.DistributedDataParallel):
        def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
            return 2 * super()._run_ddp_forward(*inputs, **kwargs)

    module = nn.Linear(1, 1)
    x = torch.ones(1, 1)
    assert torch.equal(Doubled(module)(x), 2 * module(x))


def test_no_thread_leaves_its_wrapper_there() -> None:
    """Then the attribute could hold the last reference to a wrapper, and be read by others while that is freed."""
    both, left = threading.Barrier(2), threading.Event()

    class Net(nn.Linear):
        def forward(self, x: Any) -> Any:
            both.wait()
            return super().forward(x)

    def rank(t: Transport) -> None:
        ddp = sl.DistributedDataParallel(Net(1, 1), process_group=t)
        if t.rank:  # enters the forward like rank 0, and leaves it later
            ddp.module.register_forward_hook(lambda *_: left.wait() and None)
        ddp(torch.ones(1, 1))
        left.set()

    run_ranks(2, rank)
    assert TorchDDP._get_active_ddp_module() is None


@pytest.mark.filterwarnings("ignore:Guards may run slower:RuntimeWarning")  # Python 3.13.0
def test_torch_compile_finds_the_wrapper_in_whose_forward_it_compiles() -> None:
    """By it, torch splits graphs at the buckets. In a step that compiles nothing it is not set, which would cost."""
    found = []

    class Net(nn.Linear):
        def forward(self, x: Any) -> Any:
            found.append(TorchDDP._get_active_ddp_module())
            return self.run(x)

    torch.compiler.reset()  # an earlier test of this process may have compiled
    net = Net(1, 1)
    net.run = super(Net, net).forward
    ddp = sl.DistributedDataParallel(net)
    for _ in range(2):
        ddp(torch.ones(1, 1)).sum().backward()
    assert found == [ddp, None]
    found.clear()

    def backend(graph: Any, _: Any) -> Any:
        found.append(TorchDDP._get_active_ddp_module())
        return graph.forward

    net.run = torch.compile(net.run, backend=backend)
    try:
        ddp(torch.ones(1, 1)).sum().backward()
    finally:
        torch.compiler.reset()
    assert found == [ddp, ddp]
    assert TorchDDP._get_active_ddp_module() is None


@pytest.mark.ranks(2)
def test_whether_buffers_are_sent_before_or_after_forward_is_torchs() -> None:
    from torch.nn.parallel.distributed import _BufferCommHookLocation as Location

    # torch 2.11 reads broadcast_buffers in forward
    switch = "forward_sync_buffers" if _has_argument("forward_sync_buffers") else "broadcast_buffers"

    def found(wrap: Any, location: Any) -> list[bool]:
        ddp = wrap(nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2)))
        if location is not None:
            ddp._register_buffer_comm_hook(None, lambda state, buffers: None, location)
        seen = [ddp._check_sync_bufs_pre_fwd(), ddp._check_sync_bufs_post_fwd()]
        setattr(ddp, switch, False)
        return [*seen, ddp._check_sync_bufs_pre_fwd(), ddp._check_sync_bufs_post_fwd()]

    for location in (None, Location.PRE_FORWARD, Location.POST_FORWARD):
        assert found(sl.DistributedDataParallel, location) == found(TorchDDP, location)


def test_backwards_are_not_finalized_by_hand() -> None:
    ddp = sl.DistributedDataParallel(nn.Linear(1, 1))
    ddp.require_manual_backward_finalization = False
    assert not ddp.require_manual_backward_finalization
    assert not ddp.should_finalize_after_backward
    with pytest.raises(sl.SynclineError, match=r"finalize_backward\(\) is not supported"):
        ddp.require_manual_backward_finalization = True
    with pytest.raises(sl.SynclineError, match=r"finalize_backward\(\) is not supported"):
        ddp.finalize_backward()


# ---------------------------------------------------------------------- arguments

LATER_ARGUMENTS = ("batched_grad_copy", "forward_sync_buffers", "lazy_bucket_allocation")
"""Arguments that torch 2.11 lacks, in torch's order. 2.13 has the first two, 2.15 all."""


def _has_argument(name: str) -> bool:
    return name in inspect.signature(TorchDDP).parameters


def test_arguments_stand_in_torchs_order() -> None:
    ours = inspect.signature(sl.DistributedDataParallel).parameters
    theirs = inspect.signature(TorchDDP).parameters
    positional = [name for name, p in ours.items() if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert positional[: len(theirs)] == list(theirs)
    assert positional[len(theirs) :] == [name for name in LATER_ARGUMENTS if name not in theirs]
    defaults = {name: p.default for name, p in theirs.items()}
    if not _has_argument("forward_sync_buffers"):  # torch 2.11, which knows no None
        assert defaults.pop("broadcast_buffers") is True
    assert {name: ours[name].default for name in defaults} == defaults


@pytest.mark.ranks(1)
def test_bucket_caps_are_reported_as_in_torch() -> None:
    def told(wrap: Any, arguments: dict[str, Any]) -> list[Any]:
        ddp = wrap(nn.Linear(1, 1), **arguments)
        is_chosen_here = ddp.bucket_bytes_cap_default
        cap = None if is_chosen_here else ddp.bucket_bytes_cap
        logged = None if is_chosen_here else ddp._get_ddp_logging_data()["bucket_cap_bytes"]
        return [is_chosen_here, cap, logged, ddp.bucket_bytes_cap_list]

    arguments: dict[str, Any]
    for arguments in (
        {},
        {"bucket_cap_mb": 3},
        {"bucket_cap_mb": 0.5},
        {"bucket_cap_mb_list": [2, 5, 1]},
        {"bucket_cap_mb": 7, "bucket_cap_mb_list": [2, 5, 1]},
        {"bucket_cap_mb": 7, "bucket_cap_mb_list": []},
        {"bucket_cap_mb_list": []},
    ):
        assert told(sl.DistributedDataParallel, arguments) == told(TorchDDP, arguments), arguments


def test_the_last_cap_of_a_list_goes_on() -> None:
    def rank(t: Transport) -> list[int]:
        module, caps = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(10))), (2, 5, 1)
        in_mib = {"bucket_cap_mb": 7 * 4 / 2**20, "bucket_cap_mb_list": [cap * 4 / 2**20 for cap in caps]}
        ddp = sl.DistributedDataParallel(module, process_group=t, **in_mib)
        ddp(torch.ones(1, 1)).sum().backward()
        return [len(bucket.parameters) for bucket in ddp.last_step.buckets]

    assert run_ranks(2, rank) == [[2, 5, 1, 1, 1]] * 2
    with pytest.raises(ValueError, match="above 0"):
        sl.DistributedDataParallel(nn.Linear(1, 1), bucket_cap_mb_list=[1, 0])


def test_arguments_that_change_nothing_are_kept_as_torch_keeps_them() -> None:
    ddp = sl.DistributedDataParallel(nn.Linear(1, 1), batched_grad_copy=True, lazy_bucket_allocation=True)
    assert ddp.batched_grad_copy
    assert ddp.lazy_bucket_allocation


@pytest.mark.ranks(1)
def test_modules_on_wrong_devices_are_refused_as_in_torch_and_by_name() -> None:
    partly = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, device="meta"))
    normed = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)))
    for wrap in (sl.DistributedDataParallel, TorchDDP):
        with pytest.raises(ValueError, match=r"(?s)must be on the same type of devices.*meta"):
            wrap(partly)
        with pytest.raises(ValueError, match="SyncBatchNorm layers only work with GPU modules"):
            wrap(normed)
    with pytest.raises(ValueError, match=r"1 is on CPU\. Use layers of sl\.nn\.SyncBatchNorm"):
        sl.DistributedDataParallel(normed)
    sl.DistributedDataParallel(sl.nn.SyncBatchNorm.convert_sync_batchnorm(normed))
    with pytest.raises(ValueError, match=r"0\.weight on cpu, 1\.weight on meta"):
        sl.DistributedDataParallel(partly)
    sl.DistributedDataParallel(partly, ignore=["1.*"])
    with pytest.raises(RuntimeError, match=r"have no values: weight, bias\. Call module\.to_empty"):
        sl.DistributedDataParallel(nn.Linear(1, 1, device="meta"))


# ---------------------------------------------------------------------- attributes that may be set, and broadcasts


@pytest.mark.ranks(2)
def test_buffers_can_be_broadcast_by_torchs_name_for_it() -> None:
    ddp = sl.DistributedDataParallel(nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2)))
    mean = ddp.module[1].running_mean
    mean.fill_(dist.get_rank())
    ddp._default_broadcast_coalesced(authoritative_rank=1)
    assert mean.tolist() == [1.0, 1.0]
    mine = torch.tensor([dist.get_rank()])
    ddp._distributed_broadcast_coalesced([mine], 1)
    assert mine.item() == 0


@pytest.mark.ranks(2)
def test_setting_the_process_group_synchronizes_over_it() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return (self.scale * x).sum()

    ddp = sl.DistributedDataParallel(Scaled())
    x = torch.tensor([dist.get_rank() + 1.0])
    ddp(x).backward()
    assert ddp.module.scale.grad.item() == 1.5
    alone, _ = dist.new_subgroups(group_size=1)
    ddp.process_group = alone
    assert ddp.process_group is alone
    ddp.zero_grad()
    ddp(x).backward()
    assert ddp.module.scale.grad.item() == x.item()
    ddp.process_group = dist.group.WORLD
    ddp.zero_grad()
    ddp(x).backward()
    assert ddp.module.scale.grad.item() == 1.5
    assert "2 ranks" in ddp.contract.title
