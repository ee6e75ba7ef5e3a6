"""SyncBatchNorm against one process' BatchNorm on the concatenated batch. Ranks are threads."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import syncline as sl
from support.cases import case
from support.threads import on_threads
from syncline.nn import SyncBatchNorm, _sync_batch_norm, pool_moments
from syncline.transport import ThreadGroup, Transport, run_ranks

BY_DIMENSIONS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
SHAPES = {2: (3,), 3: (3, 5), 4: (3, 4, 5), 5: (3, 2, 3, 4)}  # without the batch dimension

# N ranks and one process round the same sums in another order: some tens of roundings (2**-24 = 6e-8 in float32,
# 2**-53 = 1.1e-16 in float64) of numbers around 1. One sample more or less would be seen at 1e-2.
F32 = {"rtol": 1e-5, "atol": 2e-6}
F64 = {"rtol": 1e-12, "atol": 1e-13}


def batches(sizes: Sequence[int], shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    g = torch.Generator().manual_seed(len(shape))
    return [(2 * torch.randn(n, *shape, generator=g) + 1).to(dtype) for n in sizes]


def plain(dims: int, dtype: torch.dtype, **kwargs: Any) -> _BatchNorm:
    layer = BY_DIMENSIONS[dims](3, dtype=dtype, **kwargs)
    if layer.affine:
        with torch.no_grad():
            layer.weight.copy_(torch.tensor([0.5, -1.0, 2.0]))
            layer.bias.copy_(torch.tensor([0.1, 0.2, -0.3]))
    return layer


def steps(layer: nn.Module, xs: Sequence[Tensor], dys: Sequence[Tensor]) -> dict[str, Any]:
    """Outputs and input gradients of each step, summed parameter gradients, the final state."""
    outputs, grads = [], []
    for x, dy in zip(xs, dys, strict=True):
        x = x.clone().requires_grad_()
        y = layer(x)
        y.backward(dy)
        outputs.append(y.detach())
        grads.append(x.grad)
    return {
        "outputs": outputs,
        "input_grads": grads,
        "grads": [p.grad for p in layer.parameters()],
        "buffers": list(layer.buffers()),
    }


def compare(
    sizes: Sequence[int], dims: int, dtype: torch.dtype, *, num_steps: int = 2, **kwargs: Any
) -> list[dict[str, Any]]:
    """Train a layer on ranks and in one process; the ranks' results, checked against the process'."""
    xs = [batches(sizes, SHAPES[dims], dtype) for _ in range(num_steps)]
    xs = [[x * (step + 1) for x in of_step] for step, of_step in enumerate(xs)]
    g = torch.Generator().manual_seed(7)
    dys = [[torch.randn(x.shape, generator=g).to(dtype) for x in of_step] for of_step in xs]
    layer = plain(dims, dtype, **kwargs)
    alone = steps(copy.deepcopy(layer), [torch.cat(x) for x in xs], [torch.cat(dy) for dy in dys])

    def rank(t: Transport) -> dict[str, Any]:
        mine = SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(layer), t)
        return steps(mine, [x[t.rank] for x in xs], [dy[t.rank] for dy in dys])

    ranks = run_ranks(len(sizes), rank)
    tolerance = F64 if dtype is torch.float64 else F32
    for step in range(num_steps):
        for what in ("outputs", "input_grads"):
            whole = torch.cat([r[what][step] for r in ranks])
            torch.testing.assert_close(whole, alone[what][step], **tolerance)
    for i, expected in enumerate(alone["grads"]):
        torch.testing.assert_close(sum(r["grads"][i] for r in ranks), expected, **tolerance)
    for i, expected in enumerate(alone["buffers"]):
        torch.testing.assert_close(ranks[0]["buffers"][i], expected, **tolerance)
        assert all(torch.equal(r["buffers"][i], ranks[0]["buffers"][i]) for r in ranks)
    return ranks


# ---------------------------------------------------------------------- parity


def test_ranks_compute_what_one_process_computes_on_the_whole_batch() -> None:
    for sizes, dims, dtype in product(
        [(4, 4), (5, 1), (2, 0, 3), (0, 0, 6), (1, 1)], SHAPES, (torch.float32, torch.float64)
    ):
        with case(sizes, dims, dtype):
            compare(sizes, dims, dtype)


def test_every_argument_means_what_it_means_in_torch() -> None:
    for arguments in (
        {"momentum": None},
        {"momentum": 1.0},
        {"momentum": 0.0},
        {"eps": 0.1},
        {"affine": False},
        {"track_running_stats": False},
        {"affine": False, "track_running_stats": False},
    ):
        with case(arguments):
            compare((3, 1, 2), 4, torch.float64, num_steps=3, **arguments)


@on_threads(2)
def test_channels_last_stays_channels_last(t: Transport) -> None:
    for dims, memory_format in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        of_rank = batches((2, 3), SHAPES[dims], torch.float64)[t.rank]
        found = []
        for used in (memory_format, torch.contiguous_format):
            x = of_rank.clone(memory_format=used).requires_grad_()
            y = SyncBatchNorm(3, dtype=torch.float64, process_group=t)(x)
            y.square().sum().backward()
            found.append((y, x.grad))
        with case(dims):
            for mine, other in zip(*found, strict=True):
                assert mine.is_contiguous(memory_format=memory_format)
                torch.testing.assert_close(mine, other.contiguous(memory_format=memory_format), **F64)


def test_half_inputs_are_computed_in_float32() -> None:
    """The result is that of float32 on the same inputs, rounded once (the layer's parameters may be rounded too)."""

    def computed(t: Transport, x: Tensor, dtype: torch.dtype | None) -> list[Any]:
        layer = SyncBatchNorm(3, process_group=t, dtype=dtype)
        y = layer(x.requires_grad_())
        (y.float() ** 3).sum().backward()
        return [y, x.grad, layer.weight.grad, layer.bias.grad, layer.running_mean, layer.running_var]

    def rank(t: Transport, dtype: torch.dtype, half_layer: bool) -> None:
        x = (batches((40, 25), (3, 8), torch.float32)[t.rank] + 30).to(dtype)
        wide = computed(t, x.float(), None)
        mine = computed(t, x, dtype if half_layer else None)
        assert [tensor.dtype for tensor in mine[:2]] == [dtype] * 2
        assert {tensor.dtype for tensor in mine[2:]} == {dtype if half_layer else torch.float32}
        eps = torch.finfo(dtype).eps
        for i, (a, b) in enumerate(zip(mine, wide, strict=True)):
            # y**3 multiplies the relative error of y by 3; sums of 520 such gradients are of the size of b.
            atol = eps if i == 0 else 8 * eps * b.abs().max().item()
            torch.testing.assert_close(a.float(), b, rtol=eps, atol=atol)

    for dtype, half_layer in product((torch.float16, torch.bfloat16), (False, True)):
        with case(dtype, half_layer):
            run_ranks(2, partial(rank, dtype=dtype, half_layer=half_layer))


@on_threads(2)
def test_a_large_mean_does_not_cancel_the_variance(t: Transport) -> None:
    """Sums of squares in float32 would give a variance of 0 or worse here: 1e4**2 has a spacing of 8."""
    xs = [x + 1e4 for x in batches((50, 30), (3,), torch.float32)]
    layer = SyncBatchNorm(3, process_group=t, momentum=1.0)
    layer(xs[t.rank])
    expected = torch.cat(xs).double().var(0)
    # Each rank's mean is rounded by e = 5e-4; the ranks' means differ by D < 0.5: an error of 2 D e over 4.
    torch.testing.assert_close(layer.running_var.double(), expected, rtol=1.25e-4, atol=0)


def test_every_rank_has_the_same_bits_in_every_run() -> None:
    first, second = compare((5, 2), 4, torch.float32), compare((5, 2), 4, torch.float32)
    for a, b in zip(first, second, strict=True):
        for what in ("outputs", "input_grads", "grads", "buffers"):
            assert all(torch.equal(x, y) for x, y in zip(a[what], b[what], strict=True))


def test_a_second_derivative_is_refused() -> None:
    t = ThreadGroup(1).transport(0)
    x = torch.randn(4, 3, requires_grad=True)
    (dx,) = torch.autograd.grad(
        _sync_batch_norm(x, None, None, 1e-5, t)[0].pow(3).sum(), x, create_graph=True
    )
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


# ---------------------------------------------------------------------- what is sent


@on_threads(2)
def test_one_collective_in_forward_and_one_in_backward_if_they_are_needed(t: Transport) -> None:
    layer = SyncBatchNorm(3, process_group=t)
    y = layer(torch.randn(4, 3, requires_grad=True))
    forward = t.statistics()
    y.sum().backward()
    backward = t.statistics() - forward
    assert (forward.num_calls, backward.num_calls) == ({"all_gather": 1}, {"all_reduce": 1})
    assert forward.total_bytes == 2 * (2 * 3 + 1) * 4
    layer(torch.randn(4, 3)).sum().backward()  # the input needs no gradient: no collective in backward
    x, plain_layer = torch.randn(4, 3), nn.BatchNorm1d(3).eval()
    plain_layer.load_state_dict(layer.state_dict())
    assert torch.equal(layer.eval()(x), plain_layer(x))
    assert t.statistics().num_calls == {"all_gather": 2, "all_reduce": 1}


def test_alone_it_is_batch_norm_and_needs_no_group() -> None:
    x = torch.randn(5, 3)
    ours, torchs = sl.nn.SyncBatchNorm(3), nn.BatchNorm1d(3)
    assert torch.equal(ours(x), torchs(x))
    assert all(torch.equal(a, b) for a, b in zip(ours.buffers(), torchs.buffers(), strict=True))


@on_threads(2)
def test_two_forwards_before_one_backward(t: Transport) -> None:
    """A GAN's discriminator: running statistics change in between, saved tensors do not."""
    layer = SyncBatchNorm(2, process_group=t)
    (layer(torch.randn(3, 2)) - layer(torch.randn(3, 2))).square().sum().backward()
    assert layer.num_batches_tracked.item() == 2


# ---------------------------------------------------------------------- in a model


def test_under_ddp_a_model_trains_as_on_the_whole_batch() -> None:
    template = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 9, 2)
    ).double()
    xs = [batches((4, 2), (1, 5, 5), torch.float64) for _ in range(4)]

    def train(module: nn.Module, xs: list[Tensor], ddp: Any = None) -> list[Tensor]:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
        for x in xs:
            optimizer.zero_grad()
            if ddp is None:
                (module(x).pow(2).sum() / len(x)).backward()
            else:
                with ddp.normalize_by(len(x)):
                    ddp(x).pow(2).sum().backward()
            optimizer.step()
        return [*module.parameters(), *module.buffers()]

    def rank(t: Transport) -> list[Tensor]:
        module = sl.nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(template), t)
        ddp = sl.DistributedDataParallel(module, process_group=t)
        return train(module, [x[t.rank] for x in xs], ddp)

    ranks = run_ranks(2, rank)
    for mine, other, expected in zip(*ranks, train(template, [torch.cat(x) for x in xs]), strict=True):
        assert torch.equal(mine, other)
        torch.testing.assert_close(mine, expected, rtol=1e-10, atol=1e-12)


# ---------------------------------------------------------------------- conversion


def test_conversion_keeps_everything_and_changes_the_class() -> None:
    shared = nn.BatchNorm1d(3).eval()
    model = nn.ModuleDict(
        {
            "a": nn.Sequential(nn.BatchNorm1d(3, eps=0.5, momentum=None), nn.Linear(3, 3)),
            "b": nn.BatchNorm2d(2, affine=False),
            "c": nn.BatchNorm3d(2, track_running_stats=False, dtype=torch.float64),
            "d": nn.SyncBatchNorm(4),
            "e": shared,
            "f": nn.ModuleList([shared]),
            "g": nn.InstanceNorm1d(3),
        }
    )
    model["b"].qconfig = "a qconfig"
    model["a"][0].weight.requires_grad_(False)
    names, tensors = zip(*model.state_dict(keep_vars=True).items(), strict=True)
    shown = repr(model)
    t = ThreadGroup(1).transport(0)
    assert sl.nn.SyncBatchNorm.convert_sync_batchnorm(model, t) is model
    layers = [model["a"][0], *(model[key] for key in "bcde"), model["f"][0]]
    assert all(type(layer) is SyncBatchNorm and layer.process_group is t for layer in layers)
    assert all(isinstance(layer, nn.SyncBatchNorm) for layer in layers)
    assert model["e"] is model["f"][0]
    assert not model["e"].training
    assert model["b"].qconfig == "a qconfig"
    assert (model["a"][0].eps, model["a"][0].momentum) == (0.5, None)
    assert type(model["g"]) is nn.InstanceNorm1d
    after = model.state_dict(keep_vars=True)
    assert tuple(after) == names
    assert all(a is b for a, b in zip(after.values(), tensors, strict=True))
    for kind in ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncSyncBatchNorm"):
        shown = shown.replace(kind, "SyncBatchNorm")
    assert repr(model) == shown


def test_a_single_layer_is_not_changed_but_replaced() -> None:
    old = nn.BatchNorm1d(3)
    new = SyncBatchNorm.convert_sync_batchnorm(old)
    assert type(old) is nn.BatchNorm1d
    assert new.weight is old.weight
    new.weight = nn.Parameter(torch.zeros(3))
    assert old.weight is not new.weight
    assert not hasattr(old, "process_group")


def test_hooks_stay_and_can_be_removed() -> None:
    model, calls = nn.Sequential(nn.BatchNorm1d(3)), []
    handle = model[0].register_forward_hook(lambda *_: calls.append("forward"))
    SyncBatchNorm.convert_sync_batchnorm(model)
    model(torch.randn(2, 3))
    handle.remove()
    model(torch.randn(2, 3))
    assert calls == ["forward"]


def test_a_converted_layer_can_be_converted_to_another_group_copied_and_loaded() -> None:
    first, second = (ThreadGroup(1).transport(0) for _ in range(2))
    layer = SyncBatchNorm.convert_sync_batchnorm(SyncBatchNorm(3, process_group=first), second)
    layer.register_forward_hook(lambda *_: None)
    twin = copy.deepcopy(nn.ModuleList([layer, layer]))
    assert twin[0] is twin[1]
    assert layer.process_group is twin[0].process_group is second
    assert twin[0].weight is not layer.weight
    twin[0].load_state_dict(nn.BatchNorm1d(3).state_dict())


class Activated(nn.BatchNorm2d):
    """A layer of its own, as timm has them."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
def test_layers_that_conversion_would_spoil_are_refused_and_nothing_is_changed() -> None:
    patched = nn.BatchNorm1d(2)
    patched.forward = lambda x: x
    for layer, message in (
        (Activated(2), "got a Activated at 1.1, whose own forward would be lost"),
        (patched, "got a BatchNorm1d at 1.1, whose own forward"),
        (nn.LazyBatchNorm1d(), "got a lazy LazyBatchNorm1d at 1.1: before the conversion, run one forward"),
    ):
        model = nn.Sequential(nn.BatchNorm1d(2), nn.Sequential(nn.ReLU(), layer))
        with pytest.raises(TypeError, match=message):
            SyncBatchNorm.convert_sync_batchnorm(model)
        assert type(model[0]) is nn.BatchNorm1d


# ---------------------------------------------------------------------- bad input


@on_threads(2)
def test_a_wrong_input_is_refused_before_anything_is_sent(t: Transport) -> None:
    cases: list[tuple[Tensor, type[Exception], str]] = [
        (torch.zeros(3), ValueError, r"at least 2 dimensions, got shape \(3,\)"),
        (torch.zeros(2, 4), ValueError, r"num_features = 3 channels.*, got shape \(2, 4\)"),
        (torch.zeros(2, 3, dtype=torch.int64), TypeError, r"floating-point input, got torch\.int64"),
    ]
    for x, error, message in cases:
        with pytest.raises(error, match=message):
            SyncBatchNorm(3, process_group=t)(x)
    assert t.statistics().total_calls == 0


@on_threads(2)
def test_a_single_value_over_all_ranks_is_an_error_on_all(t: Transport) -> None:
    for sizes in ((1, 0), (0, 0)):
        layer = SyncBatchNorm(3, process_group=t)
        with pytest.raises(ValueError, match=f"more than 1 value .* got {sum(sizes)} over all 2 ranks"):
            layer(torch.zeros(sizes[t.rank], 3))
        assert not layer.running_mean.any()
        assert layer.num_batches_tracked.item() == 0


# ---------------------------------------------------------------------- pooling


def test_equal_moments_are_pooled_to_themselves() -> None:
    means, m2s = torch.tensor([[0.1, 1e30]] * 3), torch.tensor([[0.7, 3.0]] * 3)
    _, mean, var = pool_moments(torch.full((3, 1), 7.0), means, m2s)
    assert torch.equal(mean, means[0])
    torch.testing.assert_close(var, m2s[0] / 7, rtol=2e-7, atol=0)
