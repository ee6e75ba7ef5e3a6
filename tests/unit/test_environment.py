"""What the user sets by environment variables."""

from __future__ import annotations

import pytest

from syncline import environment


def test_the_user_makes_all_graces_longer_by_one_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SYNCLINE_PATIENCE", raising=False)
    assert environment.patience(0.5) == 0.5
    monkeypatch.setenv("SYNCLINE_PATIENCE", "4")
    assert environment.patience(0.5) == 2


def test_a_child_has_the_patience_of_its_parent_and_no_other_variable_of_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SYNCLINE_PATIENCE", "4")
    monkeypatch.setenv("SYNCLINE_TRANSPORT", "c10d")
    ours = {name for name in environment.for_child({"SYNCLINE_RUN": "1"}) if name.startswith("SYNCLINE")}
    assert ours == {"SYNCLINE_PATIENCE", "SYNCLINE_RUN"}


def test_a_number_that_the_user_sets_is_above_0(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, read in {
        "SYNCLINE_PATIENCE": lambda: environment.patience(1.0),
        "SYNCLINE_BUCKET_CAP_MB": environment.bucket_cap_mb,
    }.items():
        for value in ("much", "0", "-1", "inf", "nan"):
            monkeypatch.setenv(name, value)
            with pytest.raises(ValueError, match=rf"{name} to be a number above 0, got '{value}'"):
                read()
