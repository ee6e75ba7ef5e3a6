"""The default of `on_nonfinite`: one warning, which names rank and parameter, and changes nothing."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import syncline.gradients.copying
from support.inside import without_scalers
from syncline import DistributedDataParallel as DDP
from syncline import LocalSGD
from syncline._torch import note_scalers
from syncline.compression import Quantize
from syncline.gradients.copying import copy_scaled
from syncline.gradients.riders.finite import OwnGradients
from syncline.gradients.riders.nonfinite_notice import NonFiniteNotice
from syncline.native import find_library
from syncline.transport import ThreadGroup, Transport, run_ranks

torch.manual_seed(0)
NET = nn.Sequential(nn.Linear(3, 200), nn.Tanh(), nn.Linear(200, 200), nn.Tanh(), nn.Linear(200, 2))
"""2.weight is large, so it is checked while it is copied. The others are small."""


@pytest.fixture(autouse=True)
def every_warning() -> Any:
    note_scalers()
    with without_scalers(), warnings.catch_warnings():
        warnings.simplefilter("always")
        yield


def train(t: Transport, name: str, value: float, *, num_steps: int = 3, **kwargs: Any) -> DDP:
    """Train, and let one element of a gradient of the last rank be `value` from the second step on."""
    ddp = DDP(copy.deepcopy(NET), process_group=t, **kwargs)
    optimizer = ddp.attach(torch.optim.SGD(ddp.parameters(), lr=0.1))
    for step in range(num_steps):
        if step == 1 and t.rank == t.size - 1:
            parameter = ddp.module.get_parameter(name)
            parameter.register_hook(
                lambda g: g.clone().view(-1).index_fill_(0, torch.tensor([1]), value).view_as(g)
            )
        optimizer.zero_grad()
        ddp(torch.full((4, 3), 1.0 + t.rank)).square().mean().backward()
        optimizer.step()
    return ddp


def heard(size: int, name: str, value: float, **kwargs: Any) -> list[str]:
    """The warnings of such a run on all ranks."""
    with warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always")
        run_ranks(size, lambda t: train(t, name, value, **kwargs))
    return [str(record.message) for record in records if "not finite" in str(record.message)]


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"gradient_as_bucket_view": True},
        {"sharded": True},
        {"bucket_cap_mb": 0.01},
        {"compression": Quantize(8)},
    ],
    ids=lambda kwargs: next(iter(kwargs), "plain"),
)
def test_one_element_on_one_rank_is_one_warning(kwargs: dict[str, Any]) -> None:
    for name in ("0.bias", "2.weight"):
        for value, kind in ((math.nan, "NaN"), (-math.inf, "infinity")):
            (text,) = heard(2, name, value, **kwargs)
            assert text.startswith("step 2, backward")
            assert f"rank 1: {name} ({kind} in 1 of " in text
            assert "rank 0:" not in text


def test_the_record_names_it_on_every_rank_in_that_step_only() -> None:
    def program(t: Transport) -> list[Any]:
        ddp = train(t, "2.weight", math.nan, num_steps=2)
        found = [dict(ddp.last_step.nonfinite.found), ddp.last_step.nonfinite.outcome]
        ddp(torch.ones(1, 3)).sum().backward()
        return [*found, ddp.last_step.nonfinite]

    assert run_ranks(2, program) == [[{1: ("2.weight",)}, "warned", None]] * 2


def test_ignore_says_nothing_and_the_weights_are_those_of_ignore() -> None:
    def weights(policy: str) -> list[Tensor]:
        ddps = run_ranks(2, lambda t: train(t, "0.bias", 1e30, on_nonfinite=policy))
        return [p.detach() for ddp in ddps for p in ddp.parameters()]

    assert not heard(2, "0.bias", math.nan, on_nonfinite="ignore")
    for mine, expected in zip(weights("warn"), weights("ignore"), strict=True):
        assert torch.equal(mine, expected)


@pytest.mark.parametrize(
    ("size", "kwargs"), [(1, {}), (2, {"strategy": LocalSGD(every=4)})], ids=["alone", "local"]
)
def test_a_rank_that_sends_nothing_warns_for_itself(size: int, kwargs: dict[str, Any]) -> None:
    (text,) = heard(size, "4.bias", math.nan, **kwargs)
    assert f"rank {size - 1}: 0.weight" in text


def test_alone_it_looks_at_the_first_steps_and_each_eighth_until_it_has_warned() -> None:
    notice = NonFiniteNotice()
    notice.use(["weight"], ThreadGroup(1).transport(0), list)
    wrong = [(0, torch.tensor([math.nan]))]
    for step in range(17, 24):
        notice.conclude_alone(wrong, step=step)
        assert notice.last is None
    notice.conclude_alone(wrong, step=24)
    with pytest.warns(RuntimeWarning, match="step 24"):
        notice.act()
    notice.backward_begins(has_hook=False)
    notice.conclude_alone(wrong, step=32)
    assert notice.last is None
    notice.act()


def test_a_scaler_handles_infinities_itself() -> None:
    def program(t: Transport) -> None:
        ddp = DDP(copy.deepcopy(NET), process_group=t)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
        for _ in range(2):
            scaler.scale(ddp(torch.full((4, 3), 1e4)).square().sum()).backward()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_ranks(2, program)


def test_what_an_accelerator_finds_is_reported_a_step_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks of an accelerator, run on the CPU. The consequence of a step must not hide its cause."""
    monkeypatch.setattr(OwnGradients, "check", lambda own, bucket: own.check_later(bucket.own_parts()))
    (text,) = heard(2, "2.weight", math.nan)
    assert text.startswith("step 2, backward")
    assert "rank 1: 2.weight (NaN)" in text
    assert "rank 0:" not in text


# ---------------------------------------------------------------------- the copy that checks


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_copy_has_torch_s_bits_and_finds_what_is_not_finite(num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    words = torch.randint(-(2**31), 2**31, (1_100_003,)).to(torch.int32)
    every = words.view(torch.float32).nan_to_num(0, 0, 0)
    view = torch.empty_like(every)
    for scale in (1.0, 0.5, 1 / 3):
        assert copy_scaled(view, every, scale) == (find_library() is not None), scale
        assert torch.equal(view.view(torch.int32), (every * scale).view(torch.int32)), scale
        for at in (0, 5, len(every) - 1):
            for value in (math.nan, math.inf, -math.inf):
                wrong = every.clone()
                wrong[at] = value
                assert not copy_scaled(view, wrong, scale), (scale, at, value)
                assert torch.equal(view.isfinite(), wrong.isfinite()), (scale, at, value)


def test_a_copy_between_other_forms_is_torch_s(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = torch.randn(8, 6)
    for gradient in (
        plain.t(),
        plain.double(),
        torch.empty(6, 16).copy_(torch.randn(6, 16))[:, ::2].t(),
        plain.bfloat16(),
    ):
        view = torch.empty(gradient.shape)
        assert not copy_scaled(view, gradient, 0.25)
        assert torch.equal(view, gradient.float() * 0.25)
    view = torch.empty(6, 8).t()
    copy_scaled(view, torch.randn(6, 8).t(), 0.5)  # strides that both have
    assert not copy_scaled(plain, plain, 1.0)
    monkeypatch.setattr(syncline.gradients.copying, "library_if_any", lambda: None)
    view = torch.empty(8, 6)
    assert not copy_scaled(view, plain, 0.5)
    assert torch.equal(view, plain * 0.5)
