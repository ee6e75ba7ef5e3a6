"""Requests to a store whose process is stopped end at a deadline, and the connection can be used again after it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import hangs
from meeting import in_threads
from support.cases import case
from support.states import wait_until
from syncline import PeerLost
from syncline.liveness import Place, SignedStore, StoreConnection, StoreMedium
from syncline.liveness.connection import StoreSilent, interruptibly
from syncline.liveness.folder_store import FolderStore

SERVER = (
    "import torch.distributed as dist\n"
    "store = dist.TCPStore('127.0.0.1', 0, None, True, wait_for_workers=False)\n"
    "print(store.port, flush=True)\n"
    "input()\n"
)


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[int, int]]:
    """The process number and the port of a process that holds a store."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    yield process.pid, int(process.stdout.readline())
    os.kill(process.pid, signal.SIGCONT)
    hangs.communicate(process, input="\n")


REQUESTS: dict[str, Callable[[SignedStore], object]] = {
    "has": lambda store: store.has("here"),
    "get": lambda store: store.get("here"),
    "multi_get": lambda store: store.multi_get(["here"]),
    "readable": lambda store: store.readable(["here"]),
    "set_first": lambda store: store.set_first("here", "other"),
    "wait": lambda store: store.wait(["missing"], timedelta(milliseconds=1)),
    "delete": lambda store: store.delete("missing"),
    "count_up": lambda store: store.count_up("count"),
}


def test_each_request_to_a_stopped_store_has_a_deadline(server: tuple[int, int]) -> None:
    pid, port = server
    for name, request in REQUESTS.items():
        store = SignedStore(connection_to(port).under(name), token=None)
        store.set("here", "text")
        stop(pid)
        try:
            for _ in range(2):  # the second request finds that the first has no answer yet
                if name == "delete":
                    request(store)  # it ends, and raises nothing, as with a store that cannot delete
                    continue
                words = r"has not answered for .* s, although the connection"
                with case(name), pytest.raises(PeerLost, match=words):
                    request(store)
        finally:
            os.kill(pid, signal.SIGCONT)

        def answer(store: Any = store) -> str:
            with contextlib.suppress(StoreSilent):
                return store.get("here")
            return ""

        # The late answer is not taken for that of a later request.
        assert wait_until(answer) == "text", name


def connection_to(port: int) -> StoreConnection:
    client = dist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
    return StoreConnection(client, answer_seconds=0.2)


def stop(pid: int) -> None:
    """Stop a process, and wait until it is stopped: until then it can answer."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] == "T")


def test_notices_at_a_stopped_store_are_left_out_until_it_runs_again(server: tuple[int, int]) -> None:
    pid, port = server
    medium = StoreMedium(connection_to(port).under("notices"), rank=0, size=1)
    medium.write("place/0", Place(step=3).to_json())
    stop(pid)
    try:
        assert medium.read("place/0") is None
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: medium.read("place/0") is not None)


def test_signal_handlers_run_while_a_call_blocks() -> None:
    class Signalled(Exception):
        pass

    def handle(*_: object) -> None:
        raise Signalled

    before, blocks = signal.signal(signal.SIGUSR1, handle), threading.Event()

    def call() -> None:
        os.kill(os.getpid(), signal.SIGUSR1)
        blocks.wait()

    try:
        with pytest.raises(Signalled):
            interruptibly(call)
    finally:
        blocks.set()
        signal.signal(signal.SIGUSR1, before)
    with pytest.raises(ZeroDivisionError):
        interruptibly(lambda: 1 // 0)
    assert interruptibly(lambda: 5) == 5


# ---------------------------------------------------------------------- a store in a folder


def test_a_store_in_a_folder_does_what_torchs_do(tmp_path: Path) -> None:
    inner = FolderStore(tmp_path / "store")
    inner.set_timeout(timedelta(milliseconds=10))
    store = SignedStore(dist.PrefixStore("a", inner), token="a secret of the job")
    with pytest.raises(dist.DistStoreError):
        store.get("key")
    store.set("key", "text")
    store.set("key", "newer")
    assert store.get("key") == "newer"
    assert store.set_first("key", "late") == "newer"
    assert store.set_first("other", "first") == "first"
    assert store.multi_get(["other", "key"]) == ["first", "newer"]
    assert store.readable(["key", "missing"]) == {"key": "newer"}
    assert (store.count_up("count"), store.count_up("count")) == (1, 2)
    store.delete("key")
    assert not store.has("key")
    assert FolderStore(tmp_path / "store").check(["a/other"]), "another process sees it, too"


def test_one_of_many_first_writers_wins_and_no_reader_sees_half_a_value(tmp_path: Path) -> None:
    stores = [FolderStore(tmp_path) for _ in range(4)]
    values = [bytes([number]) * 100_000 for number in range(4)]
    seen: list[bytes] = []
    for key in map(str, range(20)):
        in_threads(
            [lambda i=i, k=key: seen.append(stores[i].compare_set(k, b"", values[i])) for i in range(4)]
        )
        assert set(seen[-4:]) == {stores[0].get(key)}
    assert set(seen) <= set(values)
