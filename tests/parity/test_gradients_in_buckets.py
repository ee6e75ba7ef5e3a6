"""What programs do with the tensors in `.grad`: they see what they see under torch's class, and keep what they keep.

Each program runs under both classes, on processes: over shared memory, which ranks map together, and over Gloo.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import syncline as sl
from support.cases import case

TorchDDP = torch.nn.parallel.DistributedDataParallel
WIDTH = 160
"""So that the gradient of a weight is large: more than 64 KiB."""

Program = Callable[[Any], list[Any]]
ON_BOTH = pytest.mark.parametrize("transport", ["shm", "c10d"])


class Net(nn.Module):
    """Three weights of one shape, and small biases. The middle layer can be left out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, *, leaves_out: bool = False) -> Tensor:
        for layer in (self.layers[0], self.layers[2]) if leaves_out else self.layers:
            x = torch.tanh(layer(x))
        return x


def backward(ddp: Any, step: int, **kwargs: Any) -> None:
    generator = torch.Generator().manual_seed(100 * dist.get_rank() + step)
    ddp(torch.randn(4, WIDTH, generator=generator), **kwargs).square().sum().backward()


def gradients(ddp: Any) -> list[Tensor]:
    return [p.grad.clone() for p in ddp.parameters() if p.grad is not None]


def steps(ddp: Any, from_: int, to: int) -> list[Tensor]:
    seen = []
    for step in range(from_, to):
        ddp.zero_grad()
        backward(ddp, step)
        seen += gradients(ddp)
    return seen


# ---------------------------------------------------------------------- programs, between three steps and three others


def keeps_gradients_of_each_step(ddp: Any) -> list[Any]:
    kept = []
    for step in range(3, 6):
        ddp.zero_grad()
        backward(ddp, step)
        kept += [p.grad for p in ddp.parameters()]
    return kept


def keeps_one_gradient_in_one_step(ddp: Any) -> list[Any]:
    return [ddp.module.layers[1].weight.grad]


def keeps_views(ddp: Any) -> list[Any]:
    gradient = ddp.module.layers[1].weight.grad
    return [gradient.detach(), gradient.view(-1)[7:90], gradient.data]


def keeps_an_array(ddp: Any) -> list[Any]:
    """It knows no more of the gradient than its address."""
    return [ddp.module.layers[at].weight.grad.numpy() for at in (0, 2)]


def keeps_what_it_then_adds_to(ddp: Any) -> list[Any]:
    kept = [p.grad for p in ddp.parameters()]
    for step in range(3, 6):
        backward(ddp, step)
    assert all(p.grad is gradient for p, gradient in zip(ddp.parameters(), kept, strict=True))
    return kept


def sets_to_zero(ddp: Any) -> list[Any]:
    seen, kept = [], [p.grad for p in ddp.parameters()]
    for step in range(3, 6):
        ddp.zero_grad(set_to_none=False)
        backward(ddp, step)
        assert all(p.grad is gradient for p, gradient in zip(ddp.parameters(), kept, strict=True))
        seen += gradients(ddp)
    return seen


def has_gradient_buffers_of_its_own(ddp: Any) -> list[Any]:
    seen, parameters = [], list(ddp.parameters())
    flat = torch.zeros(sum(p.numel() for p in parameters))
    for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = part.view_as(parameter)
    for step in range(3, 6):
        flat.zero_()
        backward(ddp, step)
        seen.append(flat.clone())
    return seen


def has_one_gradient_buffer_of_its_own(ddp: Any) -> list[Any]:
    seen = []
    for step in range(3, 6):
        ddp.zero_grad()
        own = ddp.module.layers[2].weight.grad = torch.zeros(WIDTH, WIDTH)
        backward(ddp, step)
        seen += [own, *gradients(ddp)]
    return seen


def accumulates_and_never_clears(ddp: Any) -> list[Any]:
    seen = []
    for step, is_local in enumerate((True, True, False, False, True, False), start=3):
        with ddp.no_sync() if is_local else nullcontext():
            backward(ddp, step)
        seen += gradients(ddp)
    return seen


def captures_in_hooks(ddp: Any) -> list[Any]:
    """In torch's class, a tensor that was in `.grad` during the backward holds the mean after it."""
    captured: list[Tensor] = []
    for parameter in ddp.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: captured.append(p.grad))
    seen = steps(ddp, 3, 6)
    in_order = sorted(captured, key=lambda gradient: (gradient.dim(), gradient.double().sum().item()))
    return [*seen, *in_order]


def reads_gradients_during_backward(ddp: Any) -> list[Any]:
    read: list[Tensor] = []
    first, last = ddp.module.layers[0], ddp.module.layers[2]
    last.register_full_backward_hook(lambda *_: read.append(last.weight.grad.clone()))
    first.weight.register_hook(lambda _: read.append(last.weight.grad * 2))
    return [*steps(ddp, 3, 6), *read]


def marks_gradients_in_hooks(ddp: Any) -> list[Any]:
    def mark(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mark = len(marks)  # type: ignore[attr-defined]
        marks.append(weakref.ref(parameter.grad))

    marks: list[weakref.ref[Tensor]] = []
    for parameter in ddp.parameters():
        parameter.register_post_accumulate_grad_hook(mark)
    seen = steps(ddp, 3, 6)
    found = [(p.grad.mark, marks[p.grad.mark]() is p.grad) for p in ddp.parameters()]
    return [*seen, [is_same for _, is_same in found], sorted(at for at, _ in found)]


def exchanges_gradients(ddp: Any) -> list[Any]:
    a, b = ddp.module.layers[0].weight, ddp.module.layers[1].weight
    a.grad, b.grad = b.grad, a.grad
    backward(ddp, 3)
    return gradients(ddp)


def turns_a_gradient(ddp: Any) -> list[Any]:
    weight = ddp.module.layers[0].weight
    weight.grad = weight.grad.t()
    backward(ddp, 3)
    return gradients(ddp)


def replaces_memory(ddp: Any) -> list[Any]:
    one, two, three = (layer.weight for layer in ddp.module.layers)
    one.grad.data = one.grad.clone()
    two.grad.share_memory_()
    three.grad.set_(three.grad * 2)
    backward(ddp, 3)
    return gradients(ddp)


def changes_in_place(ddp: Any) -> list[Any]:
    seen = []
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(3, 6):
        optimizer.zero_grad()
        backward(ddp, step)
        for parameter in ddp.parameters():
            parameter.grad.mul_(1 + dist.get_rank())
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.1)
        seen += gradients(ddp)
    return seen


def is_used_in_a_later_graph(ddp: Any) -> list[Any]:
    scale = torch.tensor(2.0, requires_grad=True)
    value = (ddp.module.layers[0].weight.grad * scale).square().sum()
    steps(ddp, 3, 6)
    value.backward()
    return [scale.grad]


def strides(ddp: Any) -> list[Any]:
    return [p.grad.stride() for p in ddp.parameters()]


def leaves_out_a_parameter(ddp: Any) -> list[Any]:
    """Ranks have changed its gradient, each in its way, and no rank uses it in the next backward."""
    for parameter in ddp.parameters():
        parameter.grad.mul_(3 + dist.get_rank())
    backward(ddp, 3, leaves_out=True)
    return gradients(ddp)


PROGRAMS: list[Program] = [
    keeps_gradients_of_each_step,
    keeps_one_gradient_in_one_step,
    keeps_views,
    keeps_an_array,
    keeps_what_it_then_adds_to,
    sets_to_zero,
    has_gradient_buffers_of_its_own,
    has_one_gradient_buffer_of_its_own,
    accumulates_and_never_clears,
    captures_in_hooks,
    reads_gradients_during_backward,
    marks_gradients_in_hooks,
    exchanges_gradients,
    turns_a_gradient,
    replaces_memory,
    changes_in_place,
    is_used_in_a_later_graph,
    strides,
    leaves_out_a_parameter,
]


@pytest.mark.ranks(2, timeout=300)
@pytest.mark.filterwarnings("ignore")  # of strides, by torch
@ON_BOTH
def test_programs_see_what_they_see_under_torchs_class(transport: Any) -> None:
    def run(wrap: Any, program: Program) -> list[Any]:
        ddp = wrap(Net(), bucket_cap_mb=0.12, find_unused_parameters=program is leaves_out_a_parameter)
        before = steps(ddp, 0, 3)
        found = program(ddp)  # which may hold gradients while further steps are made
        return [*before, *steps(ddp, 9, 12), *found]

    sl.init(transport=transport, timeout=60)
    for program in PROGRAMS:
        ours, theirs = run(sl.DistributedDataParallel, program), run(TorchDDP, program)
        assert len(ours) == len(theirs)
        for at, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            with case(program.__name__, f"value {at} of {len(ours)}"):
                assert torch.equal(torch.as_tensor(a), torch.as_tensor(b))


# ---------------------------------------------------------------------- what is not compared with torch's class


@pytest.mark.ranks(2)
@ON_BOTH
def test_a_rank_that_has_no_inputs_left_keeps_its_gradients(transport: Any) -> None:
    rank = sl.init(transport=transport, timeout=60).rank
    ddp: Any = sl.DistributedDataParallel(Net())
    with ddp.join():
        steps(ddp, 0, 3)
        last = gradients(ddp)
        if rank == 0:
            steps(ddp, 3, 5)
    if rank == 1:
        assert all(torch.equal(a, b) for a, b in zip(gradients(ddp), last, strict=True))


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore")  # of create_graph=True
@ON_BOTH
def test_a_gradient_with_a_graph_keeps_it(transport: Any) -> None:
    """torch's class raises an error here, because it writes to a tensor that requires grad."""
    sl.init(transport=transport, timeout=60)
    ddp: Any = sl.DistributedDataParallel(Net())
    steps(ddp, 0, 3)
    for create_graph in (True, False):
        ddp.zero_grad()
        ddp(torch.full((2, WIDTH), 0.1)).square().sum().backward(create_graph=create_graph)
        assert ddp.module.layers[0].weight.grad.requires_grad == create_graph
        found = [p.grad.detach().clone() for p in ddp.parameters()]
        if create_graph:
            with_graph = found
    assert all(torch.equal(a, b) for a, b in zip(with_graph, found, strict=True))
