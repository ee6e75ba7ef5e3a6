"""Each program in examples/ runs, briefly, on two ranks and on whatever device there is."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path
from types import ModuleType

import pytest

import hangs
from forks import Forks
from syncline.native import find_library

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
BRIEFLY = {
    "mnist_cnn.py": ("MNIST", None, "Held-out accuracy: "),
    "mnist_evolution.py": ("MNIST", ["--steps", "3"], "Held-out accuracy: "),
    "shakespeare_gpt.py": ("SHAKESPEARE", ["--steps", "2", "--batch-size", "4"], "Validation loss: "),
}
"""By program: the data that it needs, arguments that make it short (None: as `make train` does), and its last words."""


@pytest.fixture
def datasets(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(EXAMPLES)
    import example_data as datasets

    return datasets


@pytest.mark.parametrize("program", BRIEFLY)
@pytest.mark.real
def test_an_example_runs_on_two_ranks(
    program: str, datasets: ModuleType, forks: Forks, tmp_path: Path
) -> None:
    data, arguments, last = BRIEFLY[program]
    try:
        datasets.fetch(getattr(datasets, data))
    except datasets.DatasetUnavailable as error:
        pytest.skip(f"the data cannot be had here: {error}")
    line = ["-n", "2", program, *arguments] if arguments is not None else make_train("EPOCHS=1")
    line = [str(EXAMPLES / program) if word.endswith(program) else word for word in line]
    done = forks.launch(tmp_path, *line).wait()
    assert done.returncode == 0, done.stderr
    assert f"[rank 0] {last}" in done.stdout
    assert done.stdout.count(last) == 1


def test_the_plain_script_starts_its_own_ranks(forks: Forks, tmp_path: Path) -> None:
    done = forks.start(tmp_path, EXAMPLES / "launch.py").wait()
    assert done.returncode == 0, done.stderr
    *of_ranks, last = done.stdout.splitlines()
    assert sorted(of_ranks) == [f"[rank {n}] rank {n} has trained on its own data" for n in range(2)]
    assert re.fullmatch(r"loss \d\.\d\de-\d\d, weight \[\[(1\.0|0\.99)\d*, (1\.0|0\.99)\d*\]\]", last)


def make_train(*variables: str) -> list[str]:
    """What `make train` gives to `syncline run`."""
    make = shutil.which("make")
    if make is None:
        pytest.skip("there is no make here")
    done = hangs.run([make, "--dry-run", "train", *variables], cwd=ROOT, check=True)
    (line,) = re.findall(r"/syncline run (.*)", done.stdout)
    return shlex.split(line)


@pytest.mark.parametrize(
    ("way", "num_ranks"),
    [("fsdp2", 2), *(pytest.param(*one, marks=pytest.mark.real) for one in (("zero", 2), ("tensor", 4)))],
)
def test_torch_s_own_parallelism_trains_on_the_backend(
    way: str, num_ranks: int, forks: Forks, tmp_path: Path
) -> None:
    if find_library() is None:
        pytest.skip("the native core is not here")
    line = ["-n", num_ranks, EXAMPLES / "torch_parallelism.py", "--", way]
    done = forks.launch(tmp_path, *line, warm_ranks=True).wait()
    assert done.returncode == 0, done.stderr
    (loss,) = re.findall(rf"Loss with {way} on {num_ranks} ranks: (\S+)", done.stdout)
    assert float(loss) < 0.6  # 0.69 if it has learned nothing


# ---------------------------------------------------------------------- none is left out


def programs(folder: Path) -> dict[str, str]:
    """The text of each example, by its file name, without the modules that other examples import."""
    texts = {path.name: path.read_text() for path in folder.glob("*.py")}
    imported = {
        f"{module}.py" for text in texts.values() for module in re.findall(r"^from (\w+) import", text, re.M)
    }
    return {name: text for name, text in texts.items() if name not in imported}


def untested(folder: Path) -> list[str]:
    """The examples that no test runs: neither a test of this file, nor one in the environment of the frameworks."""
    tests = "".join(path.read_text() for path in (ROOT / "tests" / "frameworks").glob("*.py"))
    here = {*BRIEFLY, "launch.py", "torch_parallelism.py"}
    return [
        name
        for name in programs(folder)
        if name not in here and not re.search(rf"\b{re.escape(name)}\b|\bimport {name[:-3]}\b", tests)
    ]


def test_each_example_is_run_by_a_test(tmp_path: Path) -> None:
    assert untested(EXAMPLES) == []
    (tmp_path / "new.py").write_text("from helper import x\n")
    (tmp_path / "helper.py").touch()
    assert untested(tmp_path) == ["new.py"]


def test_no_example_chooses_the_device() -> None:
    texts = {path.name: path.read_text() for path in EXAMPLES.glob("*.py")}
    for name in ("torch_parallelism.py", "fabric_train.py", "lightning_trainer.py"):
        del texts[name]  # the backend serves CPUs only; Lightning must be given two devices
    assert [name for name, text in texts.items() if re.search(r"""["'](cpu|cuda)["']""", text)] == []
