"""The Trainer of Transformers with Syncline's wrapper: the losses and weights of torch's class, and a resumed run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import syncline as sl

pytest.importorskip("transformers")

from launched import ROOT, launch

EXAMPLES = ROOT / "examples"
PAGE = ROOT / "docs" / "recipes" / "transformers.md"


def test_the_example_trains_on_two_ranks(tmp_path: Path) -> None:
    printed = launch("torchrun", EXAMPLES / "transformers_trainer.py", "--output", str(tmp_path))
    assert "2 ranks on 1 host, transport: shared memory" in printed
    assert float(printed.split("evaluation loss ")[1].split()[0]) < 3  # log(64) = 4.16 before training


def run_trainer(
    patch: pytest.MonkeyPatch, directory: Path, *, ours: bool, resume: bool = False, **arguments: Any
) -> tuple[list[dict[str, float]], list[torch.Tensor]]:
    """Train on this rank, and return the logged losses and the weights."""
    patch.syspath_prepend(EXAMPLES)
    from transformers_trainer import make_trainer

    if ours:
        patch.setattr(torch.nn.parallel, "DistributedDataParallel", sl.DistributedDataParallel)
    trainer = make_trainer(str(directory), **arguments)
    trainer.train(resume_from_checkpoint=resume)
    assert isinstance(trainer.model_wrapped, sl.DistributedDataParallel) == ours
    assert isinstance(trainer.model_wrapped, torch.nn.parallel.DistributedDataParallel)
    logged = [
        {key: value for key, value in entry.items() if key in ("step", "loss", "grad_norm", "eval_loss")}
        for entry in trainer.state.log_history
    ]
    return logged, [parameter.detach().clone() for parameter in trainer.model.parameters()]


ARGUMENTS: dict[str, dict[str, Any]] = {
    "default": {},
    "no unused parameters": {
        "ddp_find_unused_parameters": False,
        "ddp_bucket_cap_mb": 1,
        "ddp_backend": "gloo",
    },
    "mean of micro-batches": {"average_tokens_across_devices": False, "gradient_accumulation_steps": 3},
    "bfloat16": {"bf16": True, "gradient_accumulation_steps": 1},
    "activation checkpoints": {"gradient_checkpointing": True, "ddp_broadcast_buffers": False},
    "static graph": {
        "ddp_static_graph": True,
        "ddp_find_unused_parameters": False,
        "gradient_accumulation_steps": 1,
    },
}


@pytest.mark.ranks(2, timeout=120)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_losses_and_weights_are_those_of_torchs_class(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    runs = []
    for ours in (False, True):
        with monkeypatch.context() as patch:
            arguments = ARGUMENTS[name] | {
                "max_steps": 6,
                "logging_steps": 1,
                "eval_steps": 3,
                "save_strategy": "no",
            }
            runs.append(run_trainer(patch, tmp_path, ours=ours, **arguments))
    (expected, expected_weights), (found, found_weights) = runs
    assert found == expected
    assert all(torch.equal(*pair) for pair in zip(found_weights, expected_weights, strict=True))


@pytest.mark.ranks(2, timeout=120)
def test_a_subclass_sets_arguments_that_only_syncline_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (block,) = re.findall(r"```python\n(import torch.*?)```", PAGE.read_text(), re.S)
    monkeypatch.setattr(torch.nn.parallel, "DistributedDataParallel", None)  # what the block sets is undone
    exec(block, {})
    monkeypatch.syspath_prepend(EXAMPLES)
    from transformers_trainer import make_trainer

    trainer = make_trainer(str(tmp_path), max_steps=3, save_strategy="no")
    trainer.train()
    assert type(trainer.model_wrapped).__name__ == "Wrapper"
    checks = str(trainer.model_wrapped.contract).split("checks")[1]
    assert "replica" in checks


@pytest.mark.ranks(2, timeout=120)
def test_a_static_graph_with_accumulation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's class raises an internal assertion in the first step."""
    arguments = {
        "ddp_find_unused_parameters": False,
        "max_steps": 3,
        "logging_steps": 1,
        "save_strategy": "no",
    }
    runs = []
    for static in (False, True):
        with monkeypatch.context() as patch:
            runs.append(run_trainer(patch, tmp_path, ours=True, ddp_static_graph=static, **arguments))
    assert runs[0][0] == runs[1][0]


@pytest.mark.ranks(2, timeout=120)
def test_a_resumed_run_ends_with_the_same_losses_and_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    arguments: dict[str, Any] = {"logging_steps": 1, "eval_steps": 3, "save_steps": 3}
    arguments["lr_scheduler_type"] = "constant"  # the default depends on max_steps

    def run(
        name: str, max_steps: int, *, resume: bool = False
    ) -> tuple[list[dict[str, float]], list[torch.Tensor]]:
        with monkeypatch.context() as patch:
            return run_trainer(
                patch, tmp_path / name, ours=True, resume=resume, **arguments, max_steps=max_steps
            )

    expected, expected_weights = run("whole", 6)
    run("resumed", 3)
    found, found_weights = run("resumed", 6, resume=True)
    assert found == expected
    assert all(torch.equal(*pair) for pair in zip(found_weights, expected_weights, strict=True))
