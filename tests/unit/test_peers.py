"""Following the processes of the other ranks."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from syncline.liveness import RankProcess
from syncline.transport.shared_memory import sockets
from syncline.transport.shared_memory.sockets import Peers

pytestmark = pytest.mark.skipif(
    not hasattr(os, "waitid"), reason="a system without processes that wait to be reaped"
)


def followed(*pids: int) -> Peers:
    processes = [RankProcess.here(pid) for pid in pids]
    assert None not in processes
    return Peers(processes, 0)  # type: ignore[arg-type]


def test_a_process_that_has_ended_is_gone_and_another_is_not() -> None:
    ended = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    peers = followed(os.getpid(), ended.pid, os.getppid())
    assert peers.gone() == []
    ended.kill()
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    assert peers.gone() == [1]  # though its number is not free yet
    ended.communicate()
    assert peers.gone() == [1]


def test_many_threads_may_ask_at_once() -> None:
    peers = followed(os.getpid(), os.getppid())
    answers: list[object] = []

    def ask() -> None:
        try:
            answers.append({tuple(peers.gone()) for _ in range(1000)})
        except RuntimeError as error:
            answers.append(error)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [{()}] * 4


def test_a_queue_that_strangers_fill_only_delays_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = sockets.listener_for_next()
    address = sockets.address_of(listener)
    strangers = []
    with pytest.raises(BlockingIOError):
        while True:
            strangers.append(socket.socket(socket.AF_UNIX))
            strangers[-1].setblocking(False)
            strangers[-1].connect(b"\0" + address.encode())

    def drain(seconds: float) -> None:
        for one in strangers[:-1]:
            listener.accept()[0].close()
            one.close()

    monkeypatch.setattr(sockets, "time", type("Clock", (), {"monotonic": time.monotonic, "sleep": drain}))
    expected = sockets.RankOnSocket(0, os.getpid(), os.getuid())
    with sockets.connected(address, expected, 1, bytes(32), 20.0), listener.accept()[0] as connection:
        assert len(connection.recv(100)) == 36
    strangers[-1].close()
    listener.close()
