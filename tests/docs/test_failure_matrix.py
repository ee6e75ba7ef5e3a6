"""The page of failures has each failure that tests provoke. What was measured is not compared."""

from __future__ import annotations

import re

from failure_rows import FAILURES, KINDS, PAGE, PLACES, ROOT, page_of

TESTS = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))


def test_each_failure_is_provoked_by_a_test() -> None:
    assert set(re.findall(r'\brecord(?:ed)?\(\s*"([a-z ]+)"', TESTS)) == set(FAILURES)


def test_the_page_has_each_failure_and_each_place_in_steps() -> None:
    lines = PAGE.read_text().splitlines()
    for failure in FAILURES.values():
        assert any(line.startswith(f"| {failure.what} |") for line in lines), (
            f"make failure-matrix: {failure.what}"
        )
    for place in PLACES:
        [line] = [line for line in lines if re.match(rf"\| {place} \|( [^|]+ \|){{{len(KINDS)}}}$", line)]
        assert re.search(r"\d s", line), f"make failure-matrix: {place}"


def test_a_page_has_the_slowest_of_each_failure() -> None:
    rows = [
        {"failure": "killed", "transport": "shm", "sees": "PeerLost: a|b", "seconds": seconds}
        for seconds in (0.5, 0.25)
    ]
    rows += [
        {"place": "verdict", "kind": "kill", "transport": transport, "seconds": seconds}
        for transport, seconds in (("c10d", 0.5), ("shm", 0.125), ("shm", 12.0))
    ]
    page = page_of(rows)
    assert "| a rank is killed | shared memory | `PeerLost: a/b` | 1 s | 0.50 s |" in page
    assert "| verdict | 12.0 s (shared memory), 0.50 s (Gloo) | - | - | - | - |" in page
    assert "the slowest of 3 runs" in page
