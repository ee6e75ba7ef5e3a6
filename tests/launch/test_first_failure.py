"""Which rank failed first, and how it is told: no processes."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path

from syncline import EXIT_STOPPED
from syncline.tools.launch.failures import (
    ErrorRecord,
    Failure,
    describe,
    first_failure,
    is_in,
    read_error_file,
)

LOST = "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:7"


def spoke(rank: int, summary: str, *, at: int, code: int = 1, return_code: int = 1) -> Failure:
    words = ErrorRecord(summary=summary, traceback=f"Traceback\n{summary}\n", time_ns=at, exit_code=code)
    return Failure(rank=rank, pid=100 + rank, return_code=return_code, record=words)


def after_a_lost_peer(rank: int, *, at: int) -> Failure:
    traceback = f"Traceback\n{LOST}\n\nDuring handling ...\n\nTraceback\nKeyError: 'loss'\n"
    words = ErrorRecord(summary="KeyError: 'loss'", traceback=traceback, time_ns=at, exit_code=1)
    return Failure(rank=rank, pid=100 + rank, return_code=1, record=words)


def stopped(rank: int, *, at: int) -> Failure:
    words = ErrorRecord(summary="SystemExit: 75", traceback="", time_ns=at, exit_code=EXIT_STOPPED)
    return Failure(rank=rank, pid=100 + rank, return_code=EXIT_STOPPED, record=words)


def silent(rank: int, return_code: int, *tail: str) -> Failure:
    return Failure(rank=rank, pid=100 + rank, return_code=return_code, record=None, stderr_tail=tail)


KILLED = -int(signal.SIGKILL)
TERMINATED = -int(signal.SIGTERM)


FIRST = {
    "by time, not by rank": (1, [spoke(0, LOST, at=20), spoke(1, "ValueError: x", at=10)]),
    "two lost connections: by time": (0, [spoke(0, LOST, at=10), spoke(1, LOST, at=20)]),
    "a reason of its own, told after the connections were closed": (
        1,
        [spoke(0, LOST, at=10), spoke(1, "ValueError: x", at=20)],
    ),
    "no reason of its own: what followed from a lost connection": (
        0,
        [spoke(0, LOST, at=10), after_a_lost_peer(1, at=20)],
    ),
    "a killed rank comes before both": (
        2,
        [spoke(0, LOST, at=10), spoke(1, "ValueError: x", at=20), silent(2, KILLED)],
    ),
    "a killed rank comes before its peer's lost connection": (1, [spoke(0, LOST, at=10), silent(1, KILLED)]),
    "a rank that the launcher ended does not": (0, [spoke(0, LOST, at=10), silent(1, TERMINATED)]),
    "an exception with a reason of its own comes before a silent death": (
        0,
        [spoke(0, "ValueError: x", at=10), silent(1, -int(signal.SIGABRT))],
    ),
    "of the silent, the first that was seen": (2, [silent(2, 7), silent(1, TERMINATED), silent(3, KILLED)]),
    "ended by SIGTERM from elsewhere": (1, [silent(1, TERMINATED)]),
    "ended by SIGTERM from elsewhere, then noticed by a peer": (
        1,
        [silent(1, TERMINATED), spoke(0, LOST, at=10)],
    ),
    "a rank that has stopped has not failed: one that fails later did": (
        1,
        [stopped(0, at=10), silent(1, 3)],
    ),
    "not even where that one only says that it lost its peer": (
        1,
        [stopped(0, at=10), spoke(1, LOST, at=20)],
    ),
    "a rank that did not end after another had stopped was ended by the launcher": (
        0,
        [stopped(0, at=10), silent(1, TERMINATED)],
    ),
}


def test_the_first_failure() -> None:
    for why, (rank, failures) in FIRST.items():
        assert first_failure(failures).rank == rank, why


def test_the_exit_code_is_never_0() -> None:
    assert spoke(0, "E", at=0).exit_code == spoke(0, "E", at=0, return_code=TERMINATED).exit_code == 1
    assert [silent(0, code).exit_code for code in (KILLED, 255, 256)] == [137, 255, 1]


def test_the_report_is_one_line_and_the_traceback() -> None:
    failures = [spoke(0, LOST, at=20), spoke(1, "ValueError: x", at=10), silent(2, TERMINATED)]
    assert describe(failures, host="h") == (
        "rank 1 (pid 101 on h) failed with exit code 1; failed later: rank 0 (exit code 1):\nTraceback\nValueError: x"
    )


def test_ranks_that_have_stopped_are_told_apart() -> None:
    text = describe([stopped(0, at=10), silent(1, 3), silent(2, 4)], host="a")
    assert text == (
        "rank 1 (pid 101 on a) failed with exit code 3; failed later: rank 2 (exit code 4); "
        "stopped as requested, without a failure: rank 0 (exit code 75)"
    )


def test_a_killed_rank_is_told_with_its_signal() -> None:
    line, hint = describe([silent(1, KILLED)], host="h").split("\n")
    assert line == "rank 1 (pid 101 on h) was killed by SIGKILL (signal 9), exit code 137:"
    assert "memory" in hint


def test_what_a_killed_rank_wrote_long_before_is_not_taken_for_the_reason() -> None:
    lost = "PeerLost: all_reduce on rank 0 of 2\n  rank 1: step 7, backward"
    killed = silent(1, KILLED, "UserWarning: no numpy", "  cpu = _conversion_method_template()")
    _, *rest = describe([killed, spoke(0, lost, at=5)], host="h").split("\n")
    hint, *seen = rest
    assert "memory" in hint
    assert seen == [
        "rank 0 then reported:",
        "PeerLost: all_reduce on rank 0 of 2",
        "  rank 1: step 7, backward",
    ]
    crashed = silent(1, -int(signal.SIGSEGV), "Fatal Python error: Segmentation fault", "x.py:3")
    assert describe([crashed], host="h").endswith(":\nFatal Python error: Segmentation fault\nx.py:3")


def test_many_other_failures_are_counted() -> None:
    failures = [silent(0, 3), *(silent(rank, rank + 10) for rank in range(1, 8))]
    assert "rank 4 (exit code 14) and 3 more kinds" in describe(failures, host="h")


def test_equal_errors_are_told_once() -> None:
    failures = [spoke(rank, f"ValueError: bad row {rank}", at=rank) for rank in range(4)]
    assert describe(failures, host="h").split("\n")[0] == (
        "ranks 0-3 (on h) failed with exit code 1, by the same error:"
    )


def test_what_the_user_has_seen_is_not_repeated() -> None:
    failures = [replace(spoke(0, "ValueError: x", at=1), is_shown=True), silent(1, TERMINATED)]
    assert describe(failures, host="h") == "rank 0 (pid 100 on h) failed with exit code 1"
    assert is_in(failures[0], ["before", "ValueError: x"])
    assert not is_in(failures[0], ["before", "ValueError: y"])


def test_other_hosts_are_pointed_at() -> None:
    assert "first failure on this host" in describe([silent(0, 1)], host="h", more_hosts=True)


CHAINED = [
    "Traceback (most recent call last):",
    "A",
    "During handling of the above exception, another exception occurred:",
    "Traceback (most recent call last):",
    "B",
]


def test_without_a_record_the_end_of_stderr_is_shown() -> None:
    for tail, num_shown in (
        (["noise", "Traceback (most recent call last):", "KeyError: 1"], 2),
        (["Traceback (most recent call last):", "handled", "noise", *CHAINED], 5),
        (["noise", "Fatal Python error: Segmentation fault", "  File x"], 2),
        ([str(line) for line in range(50)], 20),
    ):
        assert describe([silent(0, 1, *tail)], host="h").split("\n")[1:] == tail[-num_shown:]


def test_a_message_of_sys_exit_is_shown_once() -> None:
    words = ErrorRecord(summary="SystemExit: no data", traceback="", time_ns=0, exit_code=1)
    failure = Failure(rank=0, pid=1, return_code=1, record=words, stderr_tail=["no data"])
    assert describe([failure], host="h").split("\n") == [
        "rank 0 (pid 1 on h) called sys.exit, exit code 1:",
        "no data",
    ]


def test_records_of_torch_and_of_plain_text_are_read(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    of_torch = {"message": "E: x", "extraInfo": {"py_callstack": "T", "timestamp": "5"}}
    for message, summary, traceback in ((of_torch, "E: x", "T"), ("only text", "only text", "")):
        path.write_text(json.dumps({"message": message}))
        words = read_error_file(str(path))
        assert words is not None
        found = (words.summary, words.traceback, words.time_ns)
        assert found == (summary, traceback, path.stat().st_mtime_ns)


def test_a_missing_or_torn_record_is_none(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    assert read_error_file(str(path)) is None
    for content in ("", "{", "[]", "{}", '{"message": 1}'):
        path.write_text(content)
        assert read_error_file(str(path)) is None, content


def test_the_first_failure_is_found_though_the_system_clock_was_set_back() -> None:
    later, earlier = spoke(0, "ValueError: second", at=1), spoke(1, "KeyError: first", at=2)
    assert later.record is not None
    assert earlier.record is not None
    later = replace(later, record=replace(later.record, monotonic_ns=20))
    assert first_failure([later, earlier]) is later  # one of the two has no time but that of the system
    earlier = replace(earlier, record=replace(earlier.record, monotonic_ns=10))
    assert first_failure([later, earlier]) is earlier
