"""Optuna: trials on two ranks, of which some are pruned and some fail, and no rank waits for another forever."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from forks import Forks

optuna = pytest.importorskip("optuna")

PROGRAM = Path(__file__).parents[2] / "examples" / "optuna_search.py"


def test_a_study_goes_on_after_pruned_and_failed_trials(forks: Forks, tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path}/study.db"
    line = ["-n", 2, PROGRAM, "--", "--trials", 12, "--epochs", 4, "--storage", storage]
    done = forks.launch(tmp_path, *line, warm_ranks=True).wait()
    assert done.returncode == 0, done.stderr
    assert "[rank 0] Best loss: " in done.stdout
    study = optuna.load_study(study_name="ring", storage=storage)
    states = Counter(trial.state.name for trial in study.trials)
    assert states.keys() == {"COMPLETE", "PRUNED", "FAIL"}, states
    assert sum(states.values()) == 12
    for trial in study.trials:  # rank 0 has reported the mean after each epoch, until the trial was left
        num_epochs = len(trial.intermediate_values)
        assert num_epochs == 4 if trial.state.name == "COMPLETE" else num_epochs <= 4


def test_an_error_on_one_rank_ends_the_study_and_marks_the_trial(forks: Forks, tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path}/study.db"
    program = tmp_path / "failing.py"
    program.write_text(
        f"import sys\nsys.path.insert(0, {str(PROGRAM.parent)!r})\n"
        "import os, signal\n"
        "if os.environ['RANK'] == '0':  # it has to mark the trial, and the launcher ends it soon after rank 1\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "import optuna_search, syncline as sl\n"
        "step, calls = optuna_search.step, []\n"
        "def fails(*arguments):\n"
        "    calls.append(arguments)\n"
        "    if sl.world().rank == 1 and len(calls) == 5:\n"
        "        raise MemoryError('only rank 1')\n"
        "    return step(*arguments)\n"
        "optuna_search.step = fails\n"
        "optuna_search.main()\n"
    )
    line = ["-n", 2, program, "--", "--trials", 3, "--epochs", 2, "--storage", storage]
    done = forks.launch(tmp_path, *line, warm_ranks=True).wait()
    assert done.returncode == 1
    assert "MemoryError: only rank 1" in done.stderr
    (trial,) = optuna.load_study(study_name="ring", storage=storage).trials
    assert trial.state.name == "FAIL"
