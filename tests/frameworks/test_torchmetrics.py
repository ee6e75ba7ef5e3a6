"""torchmetrics over the ranks: the values of one process, exactly."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import syncline as sl

pytest.importorskip("torchmetrics")

from launched import ROOT, launch
from torchmetrics import metric
from torchmetrics.classification import BinaryAccuracy

EXAMPLES = ROOT / "examples"


def test_the_example_counts_each_sample_once() -> None:
    assert "501 samples, on 2 ranks" in launch("syncline run", EXAMPLES / "torchmetrics_eval.py")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("num_samples", [501, 64])
def test_metrics_of_two_ranks_are_those_of_one_process(
    num_samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    import torchmetrics_eval as example

    torch.manual_seed(0)
    model = torch.nn.Linear(8, example.NUM_CLASSES)
    dataset = example.make_data(num_samples, seed=2)
    found = example.evaluate(model, dataset)
    assert found["confusion"].sum() == num_samples
    with monkeypatch.context() as patch:  # each rank alone, over all samples
        patch.setattr(metric, "jit_distributed_available", lambda: False)
        patch.setattr(
            sl, "DistributedSampler", lambda dataset, **_: torch.utils.data.SequentialSampler(dataset)
        )
        expected = example.evaluate(model, dataset)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-6)
    assert torch.equal(found["confusion"], expected["confusion"])
    assert torch.equal(found["accuracy"], expected["accuracy"])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("backend", ["gloo", "syncline"])
def test_sync_on_each_step_and_by_hand(backend: str) -> None:
    sl.register_backend()
    rank = dist.get_rank()
    group = dist.new_group(backend=backend)
    targets = torch.tensor([[1, 1, 0], [0, 0, 0]])[rank]
    accuracy = BinaryAccuracy(dist_sync_on_step=True, process_group=group)
    assert accuracy(torch.ones(3), targets) == pytest.approx(2 / 6)  # the batches of both ranks
    with accuracy.sync_context():
        assert accuracy.tp == 2
    assert accuracy.tp == (2, 0)[rank]  # this rank's own again
    assert accuracy.compute() == pytest.approx(2 / 6)
