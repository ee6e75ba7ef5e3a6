"""Accelerate with Syncline's wrapper: the example, Accelerate's own tests, and the weights of torch's class."""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import syncline as sl

pytest.importorskip("accelerate")

from accelerate import Accelerator, DDPCommunicationHookType, DistributedDataParallelKwargs
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration, DistributedType, set_seed
from launched import ROOT, launch

EXAMPLES = ROOT / "examples"
PAGE = ROOT / "docs" / "recipes" / "accelerate.md"


@contextlib.contextmanager
def fresh_accelerate(monkeypatch: pytest.MonkeyPatch, *, ours: bool = True) -> Iterator[None]:
    """Forget the state of Accelerate, which is global, and let it wrap models with Syncline's class."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    if ours:
        monkeypatch.setattr(
            torch.nn.parallel, "DistributedDataParallel", None
        )  # what the page sets is undone
        (block,) = re.findall(r"```python\n(import torch.*?)```", PAGE.read_text(), re.S)
        exec(block, {})
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def test_the_example_trains_on_two_ranks() -> None:
    printed = launch("accelerate launch", EXAMPLES / "accelerate_train.py")
    assert "2 ranks on 1 host, transport: shared memory" in printed
    accuracy = float(printed.split("held-out accuracy ")[1].split()[0])
    assert accuracy > 0.95


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
def test_a_resumed_run_ends_with_the_same_weights(
    mixed_precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    from accelerate_train import train

    def run(name: str, epochs: range, resume_from: Path | None = None) -> dict[str, torch.Tensor]:
        with fresh_accelerate(monkeypatch, ours=False):
            accelerator = Accelerator(
                mixed_precision=mixed_precision,
                gradient_accumulation_steps=2,
                dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
            )
            train(accelerator, epochs, resume_from=resume_from, save_to=tmp_path / name)
            (model,) = accelerator._models
            return {key: value.clone() for key, value in model.state_dict().items()}

    whole = run("whole", range(2))
    run("first", range(1))
    resumed = run("second", range(1, 2), tmp_path / "first")
    for name, value in whole.items():
        assert torch.equal(resumed[name], value), name


def train_with(accelerator: Accelerator, *, explicit: bool) -> list[torch.Tensor]:
    """Train some steps with accumulation and clipping, and return the losses and the parameters."""
    set_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    data = TensorDataset(torch.randn(90, 8), torch.randint(2, (90,)))
    loader = DataLoader(data, batch_size=5, shuffle=True)
    if explicit:
        ddp: Any = sl.DistributedDataParallel(accelerator.prepare_model(model, evaluation_mode=True))
    else:
        ddp = accelerator.prepare(model)
    optimizer, loader = accelerator.prepare(optimizer, loader)
    losses = []
    for inputs, labels in loader:
        with accelerator.accumulate(ddp):
            loss = F.cross_entropy(ddp(inputs), labels)
            losses.append(loss.detach())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                losses.append(accelerator.clip_grad_norm_(ddp.parameters(), 0.5))
            optimizer.step()
            optimizer.zero_grad()
    assert accelerator.unwrap_model(ddp, keep_fp32_wrapper=False) is model
    return [*losses, *model.state_dict().values()]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
@pytest.mark.parametrize("explicit", [True, False])
def test_the_weights_are_those_of_torchs_class(
    mixed_precision: str, explicit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments: dict[str, Any] = {"mixed_precision": mixed_precision, "gradient_accumulation_steps": 2}
    with monkeypatch.context() as patch, fresh_accelerate(patch, ours=False):
        expected = train_with(Accelerator(**arguments), explicit=False)
    with monkeypatch.context() as patch, fresh_accelerate(patch, ours=not explicit):
        found = train_with(Accelerator(**arguments), explicit=explicit)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.ranks(2, timeout=200)
@pytest.mark.parametrize("script", ["test_sync", "test_ops", "test_script"])
def test_accelerates_own_tests_pass(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with fresh_accelerate(monkeypatch):
        importlib.import_module(f"accelerate.test_utils.scripts.{script}").main()


@pytest.mark.ranks(2, timeout=200)
def test_accelerates_own_tests_of_data_loops_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run its functions as `main` does, with `join_uneven_inputs` switched on, which Accelerate does on GPUs alone."""
    from accelerate.test_utils.scripts import test_distributed_data_loop as script

    with fresh_accelerate(monkeypatch):
        accelerator = script.create_accelerator()
        torch.manual_seed(accelerator.process_index)
        script.test_default_ensures_even_batch_sizes()
        script.test_can_disable_even_batches()
        with monkeypatch.context() as patch:
            patch.setattr(Accelerator, "multi_device", True)
            patch.setattr(Accelerator, "prepare_model", prepare_on_cpu)
            script.test_can_join_uneven_inputs()
            script.test_join_can_override_even_batches()
            script.test_join_can_override_for_mixed_type_dataloaders()
            script.test_join_raises_warning_for_iterable_when_overriding_even_batches()
        accelerator.state.distributed_type = DistributedType.FSDP
        script.test_join_raises_warning_for_non_ddp_distributed(accelerator)
        accelerator.state.distributed_type = DistributedType.MULTI_CPU
        script.test_pickle_accelerator()
        script.test_stateful_dataloader(accelerator)
        script.test_stateful_dataloader_save_state(accelerator)


def prepare_on_cpu(accelerator: Accelerator, model: nn.Module, **_: object) -> nn.Module:
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    accelerator._models.append(wrapped)
    return wrapped


HOOKS = DDPCommunicationHookType


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wrapper", [HOOKS.NO, HOOKS.FP16, HOOKS.BF16])
@pytest.mark.parametrize("hook", [HOOKS.FP16, HOOKS.BF16, HOOKS.POWER_SGD, HOOKS.BATCHED_POWER_SGD])
def test_communication_hooks_of_accelerate(hook: Any, wrapper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate's test_ddp_comm_hook.py, without the arguments `device_ids` that no class takes on CPUs."""
    from accelerate.test_utils.scripts.test_ddp_comm_hook import MockModel, _run_and_get_grads

    with fresh_accelerate(monkeypatch):
        kwargs = DistributedDataParallelKwargs(comm_hook=hook, comm_wrapper=wrapper)
        accelerator = Accelerator(kwargs_handlers=[kwargs])
        model = accelerator.prepare(MockModel())
        assert isinstance(model, sl.DistributedDataParallel)
        hooked = _run_and_get_grads(model, accelerator.local_process_index)
        plain = _run_and_get_grads(sl.DistributedDataParallel(MockModel()), accelerator.local_process_index)
        torch.testing.assert_close(hooked, plain, rtol=1e-2, atol=1e-2)


@pytest.mark.ranks(2)
def test_wrapped_before_and_attached_after_prepare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strategies and shards act at the step of the optimizer that Accelerate has wrapped."""
    with fresh_accelerate(monkeypatch, ours=False):
        for arguments in ({"strategy": sl.LocalSGD(3)}, {"sharded": True}):
            accelerator = Accelerator()
            torch.manual_seed(0)
            model = accelerator.prepare_model(nn.Linear(2, 1), evaluation_mode=True)
            ddp = sl.DistributedDataParallel(model, **arguments)
            optimizer = accelerator.prepare(ddp.attach(torch.optim.SGD(ddp.parameters(), lr=0.01)))
            for step in range(1, 4):
                ddp(torch.full((3, 2), accelerator.process_index + 1.0)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                weight = ddp.module.weight[0, 0].item()
                drifts = "strategy" in arguments and step < 3
                assert (sl.mean(weight) != weight) == drifts
