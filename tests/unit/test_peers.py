"""Following the processes of the other ranks."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from syncline.transport.shared_memory.peers import Peers

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="a system without process descriptors")


def test_a_process_that_has_ended_is_gone_and_another_is_not() -> None:
    ended = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    peers = Peers([os.getpid(), ended.pid, os.getppid()], 0)
    assert peers.gone() == []
    ended.communicate(b"\n")
    assert peers.gone() == [1]
    peers.close()
    assert peers.gone() == []


def test_many_threads_may_ask_at_once() -> None:
    peers = Peers([os.getpid(), os.getppid()], 0)
    answers: list[object] = []

    def ask() -> None:
        try:
            answers.append({tuple(peers.gone()) for _ in range(3000)})
        except RuntimeError as error:
            answers.append(error)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [{()}] * 4
