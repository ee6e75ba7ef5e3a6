"""Messages at a store: whatever stands there is a message of this job, or one clear error."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline import SynclineError
from syncline.liveness import (
    Failure,
    Notices,
    Place,
    SignedStore,
    StoreConnection,
    StoreMedium,
    Wait,
    decode,
)
from syncline.session import Presence, wait_for_all
from syncline.transport.shared_memory.engine import MAX_ABORT_BYTES
from syncline.transport.shared_memory.hub import Hub, store_exchange

TOKEN = "a token that nobody guesses"


def presence(rank: int, size: int = 2) -> Presence:
    return Presence(rank=rank, size=size, host="h", pid=100 + rank, gpu=None)


PRESENCE = json.dumps(vars(presence(1)))
PLACE = Place(step=3, wait=Wait(lane="main", call=2, words="w"), num_started={"main": 2}, seen=1.5).to_json()
FAILURE = Failure(SynclineError, "text").to_json(1)

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def junk_like(message: str) -> st.SearchStrategy[bytes]:
    """Bytes, JSON of other shapes, and the message with a field that is changed, added or left out."""
    record = json.loads(message)

    def changed(name: str, value: Any) -> bytes:
        return json.dumps({**record, name: value}).encode()

    names = st.sampled_from(sorted(record))
    return (
        st.binary(max_size=200)
        | values.map(lambda value: json.dumps(value).encode())
        | st.builds(changed, names | st.text(max_size=5), values)
        | names.map(lambda name: json.dumps({k: v for k, v in record.items() if k != name}).encode())
        | st.integers(0, len(message)).map(lambda end: message[:end].encode())
        | st.integers(1000, 20000).map(lambda depth: b"[" * depth)
    )


# ---------------------------------------------------------------------- the parser of each key


PARSERS: list[tuple[str, Callable[[Any], Any]]] = [
    (PRESENCE, lambda text: decode(Presence, text, "a presence")),
    (PLACE, Place.from_json),
    (FAILURE, Failure.from_json),
]


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(PARSERS).flatmap(lambda one: st.tuples(st.just(one), junk_like(one[0]))))
def test_a_message_is_read_back_and_junk_is_a_named_error(
    case: tuple[tuple[str, Callable[[Any], Any]], bytes],
) -> None:
    (message, parse), junk = case
    parse(message)
    text = "expected, got"
    try:
        parse(junk)
    except SynclineError as error:
        text = str(error)
    assert "expected" in text
    assert "got" in text
    text.encode()


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=300).filter(lambda junk: not junk.startswith(b"syncline plain ")), st.booleans())
def test_bytes_that_nobody_of_the_job_wrote_are_a_named_error(junk: bytes, has_token: bool) -> None:
    inner = dist.HashStore()
    store = SignedStore(inner, token=TOKEN if has_token else None)
    inner.set("key", junk)
    with pytest.raises(SynclineError, match="key 'key' at the store: expected"):
        store.get("key")
    assert store.readable(["key", "missing"]) == {}


@dataclass(frozen=True)
class Record:
    count: int
    share: float = 0.5
    words: dict[str, int] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    name: str | None = None


def test_fields_have_their_declared_types() -> None:
    assert decode(Record, '{"count": 1, "share": 2}', "here") == Record(1, 2.0)
    for text in ("true", "1.0", '"1"', "null"):
        with pytest.raises(SynclineError, match="here: expected the JSON text of a Record, got"):
            decode(Record, f'{{"count": {text}}}', "here")
    for rest in (
        '"lines": [1]',
        '"lines": {}',
        '"share": NaN',
        '"share": 1e999',
        '"words": {"a": 0.5}',
        '"name": "\\ud800"',
        '"other": 1',
    ):
        with pytest.raises(SynclineError, match="here: expected the JSON text of a Record"):
            decode(Record, f'{{"count": 1, {rest}}}', "here")


def test_a_message_that_is_too_long_is_refused() -> None:
    inner = dist.HashStore()
    inner.set("key", b"syncline plain " + bytes(1 << 20))
    with pytest.raises(SynclineError, match="at most 1048576 bytes, not of 1048591 bytes"):
        SignedStore(inner, token=None).get("key")


# ---------------------------------------------------------------------- signatures


def test_who_does_not_know_the_token_writes_nothing_that_is_believed_and_reads_nothing() -> None:
    inner = dist.HashStore()
    for writer in (None, "another token of somebody"):
        SignedStore(inner, token=writer).set("rank 1", PRESENCE)
        with pytest.raises(SynclineError, match="expected a message signed with this job's token"):
            SignedStore(inner, token=TOKEN).get("rank 1")
    SignedStore(inner, token=TOKEN).set("rank 1", "text")
    with pytest.raises(SynclineError, match="SYNCLINE_TOKEN is not set in this process"):
        SignedStore(inner, token=None).get("rank 1")


def test_a_message_counts_only_under_its_own_key() -> None:
    inner = dist.HashStore()
    store = SignedStore(inner, token=TOKEN)
    store.set("rank 1", "text")
    inner.set("rank 2", inner.get("rank 1"))
    assert store.get("rank 1") == "text"
    with pytest.raises(SynclineError, match="key 'rank 2'"):
        store.get("rank 2")


def test_a_token_that_can_be_guessed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNCLINE_TOKEN", "short")
    with pytest.raises(ValueError, match=r"SYNCLINE_TOKEN .* at least 16 .* got 5 characters"):
        SignedStore(dist.HashStore())


# ---------------------------------------------------------------------- junk where ranks wait_for_all


def test_a_first_writer_does_not_become_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNCLINE_TOKEN", TOKEN)
    for key, taken in (("rank 0", presence(0)), ("rank 1", presence(1))):
        store = dist.HashStore()
        store.set(key, b"syncline plain " + json.dumps(vars(taken)).encode())
        with pytest.raises(SynclineError, match=f"key '{key}' at the store: expected a message signed"):
            wait_for_all(store, presence(0), 1.0)


def test_junk_where_ranks_meet_is_a_named_error() -> None:
    for junk in (b"junk", b"\xff\xfe", b"syncline plain {}", b"syncline plain [1]", b"syncline plain null"):
        for key in ("rank 0", "rank 1"):
            store = dist.HashStore()
            store.set(key, junk)
            with pytest.raises(SynclineError, match=f"key '{key}' at the store: expected"):
                wait_for_all(store, presence(0), 1.0)


def test_a_message_that_no_rank_writes_is_refused() -> None:
    for name, value, words in (
        ("rank", 0, "expected a message of rank 1, got a message of rank 0"),
        ("fault", ["TypeError"], "expected the entry `fault` to be the class name and the text of an error"),
    ):
        store = dist.HashStore()
        SignedStore(store).set("rank 1", json.dumps({**vars(presence(1)), name: value}))
        with pytest.raises(SynclineError, match=words):
            wait_for_all(store, presence(0), 1.0)


def test_junk_where_ranks_share_memory_is_a_named_error() -> None:
    for key in ("syncline/exchange/epoch/0", "syncline/exchange/1/0/1"):
        store = dist.HashStore()
        store.set(key, b"junk")
        with pytest.raises(SynclineError, match=f"key '{key}' at the store: expected"):
            store_exchange(store, 0, 2, 1.0)(b"here")


def test_junk_from_a_rank_on_how_it_shares_memory_is_a_named_error() -> None:
    row: list[bytes] = []

    class Stop(Exception):
        pass

    def keep(payload: bytes) -> list[bytes]:
        row.append(payload)
        raise Stop

    with pytest.raises(Stop):
        Hub(rank=1, size=2, exchange=keep, timeout_seconds=5.0)
    told = row[0].decode()

    @settings(max_examples=100, deadline=None)
    @given(junk_like(told) | st.sampled_from([told.replace('"token": ""', '"token": "zz"').encode()]))
    def holds(junk: bytes) -> None:
        def exchange(payload: bytes) -> list[bytes]:
            if payload == row[0]:
                return [junk, payload]
            raise Stop

        with pytest.raises((SynclineError, Stop)) as raised:
            Hub(rank=1, size=2, exchange=exchange, timeout_seconds=5.0)
        if raised.type is not Stop:
            str(raised.value).encode()

    holds()


def notices_at(store: dist.Store, rank: int) -> Notices:
    notices = Notices(rank=rank, size=2)
    notices.use(StoreMedium(StoreConnection(store), rank=rank, size=2))
    return notices


def test_junk_among_notices_is_a_reason_or_left_out_or_a_named_error() -> None:
    store = dist.HashStore()
    notices = notices_at(store, rank=0)
    assert notices.failure() is None
    store.set("syncline/1/place/1", b"junk")
    notices.post(lambda: Place(step=1))
    assert notices.places() == {0: Place(step=1)}
    for junk in (b"junk", b"syncline plain {}"):
        store.set("syncline/1/failure", junk)
        failure = notices.failure()
        assert failure is not None
        assert "expected" in failure.text
        assert notices.publish(Failure(SynclineError, "mine")).text in ("mine", failure.text)
    store.set("syncline/epoch/1", b"junk")
    with pytest.raises(SynclineError, match="key 'epoch/1' at the store: expected"):
        notices_at(store, rank=1)


def test_a_long_failure_keeps_its_end_and_fits_into_shared_memory() -> None:
    for letter in ("a", "ä", "\U0001f600", "\n", '"'):
        sent = Failure(SynclineError, letter * 100_000 + " the cause").to_json(1).encode()
        assert len(sent) < MAX_ABORT_BYTES, letter
        received = Failure.from_json(sent)
        assert received.aborted_by == 1
        assert received.text.endswith(letter * 1000 + " the cause"), letter
