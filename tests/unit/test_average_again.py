"""What average_ keeps of a module from call to call: nothing that is wrong, nothing alive. Ranks are threads."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import syncline as sl
from syncline.session import REGISTRY
from syncline.tensors import ReductionPlan, walk
from syncline.transport import Transport, run_ranks
from syncline.verbs import average
from syncline.verbs.average import Likeness


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.square = nn.Linear(3, 3)
        self.low = nn.Linear(3, 2, dtype=torch.bfloat16)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("table", torch.zeros(4))


def replace(net: Any) -> None:
    net.square.weight = nn.Parameter(torch.zeros(3, 3))


def move(net: Any) -> None:
    net.square.weight.data = net.square.weight.data.clone()


def transpose(net: Any) -> None:
    net.square.weight.data = net.square.weight.data.t()


def reshape(net: Any) -> None:
    net.table.data = net.table.data.view(-1, 2)


def reinterpret(net: Any) -> None:
    net.table.data = net.table.data.view(torch.int32 if net.table.is_floating_point() else torch.float32)


def widen(net: Any) -> None:
    net.low.to(torch.float64)


def reassign_buffer(net: Any) -> None:
    net.table = torch.zeros(6)


def add(net: Any) -> None:
    net.more = nn.Linear(2, 1)


def tie(net: Any) -> None:
    if "norm" in net._modules:
        net.norm.bias = net.square.bias


def untie(net: Any) -> None:
    if "norm" in net._modules:
        net.norm.bias = nn.Parameter(torch.zeros(3))


def rename(net: Any) -> None:
    modules = net._modules
    old, new = ("norm", "batch") if "norm" in modules else ("batch", "norm")
    net.add_module(new, modules.pop(old))


CHANGES: list[Callable[[Any], object]] = [
    *(replace, move, transpose, reshape, reinterpret, widen, reassign_buffer, add, tie, untie, rename),
]

BACK: list[Callable[[Any], object]] = [
    lambda net: None,
    lambda net: net.low.to(torch.bfloat16),
    lambda net: net._modules.pop("more", None),
]
"""Changes that leave a new module as it is."""


def fill(net: nn.Module, seed: int) -> None:
    """Other values, in place."""
    g = torch.Generator().manual_seed(seed)
    for tensor in dict.fromkeys([*net.parameters(), *net.buffers()]):
        fresh = torch.randint(1, 100, tensor.shape, generator=g)
        tensor.data.copy_(fresh)


def tensors_of(net: nn.Module) -> list[Tensor]:
    return [*net.parameters(), *net.buffers()]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_module_that_changes_between_calls_is_averaged_as_one_that_was_never_seen(
    asynchronous: bool,
) -> None:
    nets = [Net() for _ in range(3)]
    strangers: list[nn.Module] = []

    def program(t: Transport) -> None:
        for one in (nets[t.rank], strangers[t.rank]):
            if asynchronous:
                sl.average_(one, 1.0 + t.rank, group=t, async_op=True).wait()
            else:
                sl.average_(one, group=t)

    changes = [*BACK, *CHANGES, *BACK, *reversed(CHANGES)]
    for seed, change in enumerate(changes):
        for rank, net in enumerate(nets):
            change(net)
            fill(net, 10 * seed + rank)
        strangers[:] = copy.deepcopy(nets)
        run_ranks(2 + seed % 2, program)
        for net, stranger in zip(nets, strangers, strict=True):
            for ours, theirs in zip(tensors_of(net), tensors_of(stranger), strict=True):
                assert ours.stride() == theirs.stride(), (seed, change)
                assert torch.equal(ours, theirs), (seed, change)


def test_what_was_found_out_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    nets = [Net(), Net()]
    made: list[str] = []
    for kind, name in ((average._ModulePlan, "module"), (ReductionPlan, "reduction")):
        before = kind.__init__

        def counted(self: Any, *args: Any, before: Any = before, name: str = name) -> None:
            made.append(name)
            before(self, *args)

        monkeypatch.setattr(kind, "__init__", counted)
    for weight in (1.0, 1.0, 1.0):
        run_ranks(2, lambda t: sl.average_(nets[t.rank], weight, group=t))  # noqa: B023
    assert sorted(made) == ["module", "module", "reduction", "reduction"]
    run_ranks(2, lambda t: sl.average_(nets[t.rank], 1.0 + t.rank, group=t))
    assert made.count("module") == 2, "another weight needs no other look at the module"
    assert made.count("reduction") == 4, "but bfloat16 travels as float32 where it is scaled"


def test_ranks_whose_modules_differ_later_are_told_so() -> None:
    nets = [Net(), Net()]
    run_ranks(2, lambda t: sl.average_(nets[t.rank], group=t))
    transpose(nets[0])
    run_ranks(2, lambda t: sl.average_(nets[t.rank], group=t))  # strides may differ
    widen(nets[0])
    with pytest.raises(sl.ContractMismatch, match=r"low\.weight"):
        run_ranks(2, lambda t: sl.average_(nets[t.rank], group=t))


def test_nothing_of_a_module_is_kept_alive() -> None:
    nets = [Net(), Net()]
    run_ranks(2, lambda t: sl.average_(nets[t.rank], group=t))
    given_up = nets[0].square.weight
    was = weakref.ref(given_up), weakref.ref(given_up.untyped_storage())
    del given_up
    replace(nets[0])
    gc.collect()
    assert [ref() for ref in was] == [None, None]
    kept = weakref.ref(REGISTRY.by_module(average._ModulePlan)[nets[0]])
    gone = weakref.ref(nets[0])
    nets.clear()
    gc.collect()
    assert gone() is None
    assert kept() is None


def test_a_likeness_fits_the_tensors_that_it_is_of_and_no_others() -> None:
    for change in CHANGES:
        net = Net()
        likeness = Likeness(walk(net))
        fill(net, 1)
        net.square.weight.requires_grad_(False)
        assert likeness.fits(walk(net))
        change(net)
        assert not likeness.fits(walk(net)), change
    # Empty tensors have no address.
    other = nn.Module()
    other.register_buffer("x", torch.zeros(0))
    other.register_buffer("y", other.x)
    likeness = Likeness(walk(other))
    assert likeness.fits(walk(other))
    other.y = torch.zeros(0)
    assert not likeness.fits(walk(other))


def test_a_pending_conjugation_or_sign_is_another_tensor() -> None:
    net = nn.Module()
    net.register_buffer("z", torch.ones(2, dtype=torch.complex64))
    net.register_buffer("y", net.z.conj().imag.detach())
    assert net.y.is_neg()
    likeness = Likeness(walk(net))
    net.z.data = net.z.data.conj()
    assert not likeness.fits(walk(net))
    likeness = Likeness(walk(net))
    net.y.data = torch.view_as_real(net.z.data.conj())[..., 1]
    assert not likeness.fits(walk(net))


def test_tensors_may_be_swapped_afterwards() -> None:
    net = Net()
    run_ranks(1, lambda t: sl.average_(net, group=t))
    other = nn.Parameter(torch.zeros(3, 3).to_sparse(), requires_grad=False)
    net.square.weight.requires_grad_(False)
    torch.utils.swap_tensors(net.square.weight, other)
    with pytest.raises(
        ValueError, match=r"expected square\.weight to be a dense tensor, got torch\.sparse_coo"
    ):
        run_ranks(1, lambda t: sl.average_(net, group=t))
