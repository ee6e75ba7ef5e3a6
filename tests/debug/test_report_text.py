"""The report as a text."""

from __future__ import annotations

from syncline.debug import Finding, Report
from syncline.debug.diagnosis import OwnFinding, merged


def finding(what: str, *causes: str) -> Finding:
    return Finding(ranks=(0,), module="mix", kind="Mix", what=what, causes=causes)


def test_findings_are_numbered_and_their_causes_listed() -> None:
    findings = (
        finding("mix differs", "a", "b"),
        finding("head differs", "c"),
    )
    text = str(Report(title="asked", num_ranks=1, checked=(), findings=findings))
    assert text.splitlines() == [
        "asked: 1 rank, 2 disagreements",
        "1. mix differs",
        "  - a",
        "  - b",
        "2. head differs",
        "  - c",
        "checked",
    ]


def test_doubts_stand_beside_disagreements() -> None:
    report = Report(title="", num_ranks=2, checked=(), findings=(finding("x"),), doubts=("one", "two"))
    assert report.verdict == "1 disagreement, but one and two (see notes)"
    assert not report.agrees


def test_ranks_with_data_of_their_own_have_one_finding_with_the_first_ranks_sums() -> None:
    for amounts, text in (
        (["sum 1 | sum 2", "sum 3 | sum 5"], "ranks 0, 1, it differs (rank 0: sum 1 | sum 2)"),
        (["", ""], "ranks 0, 1, it differs"),
    ):
        own = OwnFinding(module="mix", kind="Mix", what="it differs", causes=())
        (found,) = merged([own._replace(amounts=one) for one in amounts])
        assert (found.what, found.ranks) == (text, (0, 1))


def test_other_causes_are_other_findings() -> None:
    told = [OwnFinding(module="mix", kind="Mix", what="it differs", causes=(cause,)) for cause in "aba"]
    assert [(one.ranks, one.causes) for one in merged(told)] == [((0, 2), ("a",)), ((1,), ("b",))]
