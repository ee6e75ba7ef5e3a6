from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from syncline import Contract, Row
from syncline.contract import add_evidence, table
from syncline.words import format_bytes, format_count


def row(what: str) -> Row:
    return Row(what=what, size="1 tensor, 4 B", when="never", how="-", drift_allowed="none")


def test_columns_are_aligned_and_lines_have_no_trailing_space() -> None:
    text = table([("a", "bbb", ""), ("cccc", "d", "")])
    assert text == "a     bbb\ncccc  d"


def test_the_table_has_a_heading_and_a_line_for_each_row() -> None:
    lines = str(Contract(title="T", rows=(row("gradients"), row("buffers")))).splitlines()
    assert lines[0] == "Contract: T"
    assert lines[1].split("  ")[0] == "what"
    assert [line.split()[0] for line in lines[2:]] == ["gradients", "buffers"]


def test_evidence_adds_a_column() -> None:
    contract = Contract(title="T", rows=(row("gradients"), row("buffers")))
    seen = add_evidence(contract, {"gradients": "step 3"})
    assert "last done" in str(seen)
    assert "last done" not in str(contract)
    assert seen["gradients"].last_done == "step 3"
    assert seen["buffers"].last_done == "-"


def test_a_row_is_found_by_name() -> None:
    contract = Contract(title="T", rows=(row("gradients"),))
    assert contract["gradients"].size == "1 tensor, 4 B"
    with pytest.raises(
        KeyError, match=r"expected the name of a row, which is one of gradients; got 'gradient'"
    ):
        contract["gradient"]


def test_a_contract_is_immutable() -> None:
    with pytest.raises(FrozenInstanceError):
        Contract(title="T", rows=()).title = "U"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (99_949, "99.9 kB"),
        (999_499, "999 kB"),
        (999_600, "1.00 MB"),
    ],
)
def test_bytes_have_three_digits(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


def test_counts_have_a_plural_and_separators() -> None:
    assert [format_count(n, "tensor") for n in (0, 1, 1234)] == ["0 tensors", "1 tensor", "1,234 tensors"]
