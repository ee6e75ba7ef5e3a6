"""Lightning's Fabric on two ranks under our strategy: it trains as under Lightning's own."""

from __future__ import annotations

from typing import Any

import pytest
from launched import ROOT, found_by, launch, python

pytest.importorskip("lightning")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return found_by("fabric_program.py", tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("name", ["plain", "clip", "bf16"])
def test_it_computes_the_same_bits_as_lightnings_own_strategy(found: dict[str, Any], name: str) -> None:
    theirs, ours = found[f"ddp, {name}"], found[f"syncline, {name}"]
    assert theirs.pop("wrapper") == "torch.nn.parallel.distributed"
    assert ours.pop("wrapper") == "syncline.ddp.wrapper"
    assert ours == theirs
    assert ours["equal"]


def test_shards_are_refused() -> None:
    from syncline.frameworks.lightning import SynclineFabricStrategy

    with pytest.raises(ValueError, match="do not pass zero_grad"):
        SynclineFabricStrategy(sharded=True)


def test_replicas_that_drift_are_equal_after_a_sync(found: dict[str, Any]) -> None:
    assert found["DiLoCo"]["equal"]  # twelve steps, with a parameter sync after each six
    assert found["DiLoCo"]["losses"][-1] < found["DiLoCo"]["losses"][0]


@pytest.mark.parametrize(
    ("launcher", "example", "printed"),
    [
        ("torchrun", "lightning_trainer.py", "validation loss"),
        ("syncline run", "fabric_train.py", "epoch 2: loss"),
    ],
)
def test_the_examples_train_under_other_launchers(launcher: str, example: str, printed: str) -> None:
    assert printed in launch(launcher, ROOT / "examples" / example)


def test_the_other_family_of_packages_has_the_strategies_too() -> None:
    code = (
        "import syncline.frameworks.pytorch_lightning as a, syncline.frameworks.lightning_fabric as b, pickle;"
        "import pytorch_lightning as pl, lightning_fabric as lf;"
        "t = pl.Trainer(strategy='syncline', accelerator='cpu', devices=2, logger=False);"
        "f = lf.Fabric(strategy='syncline_spawn', accelerator='cpu', devices=2);"
        "assert type(t.strategy) is a.SynclineStrategy and type(f.strategy) is b.SynclineFabricStrategy;"
        "assert type(pickle.loads(pickle.dumps(a.SynclineStrategy()))) is a.SynclineStrategy"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
