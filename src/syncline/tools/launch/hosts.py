"""The launchers of a resilient job that runs on several hosts, as one of them sees them.

[Note: what launchers record]

The launchers share a store, which is in the launcher of the first host, and which the ranks use as well. Each launcher
records there that it runs, and, in the end, that its ranks have ended. The launcher with the store waits for all
others, because their ranks need the store; a launcher that shows no sign of life is not waited for. torch's own wait at
this place lasts five minutes if a host was lost, and no longer than that if the ranks of another host still train.

A launcher also records the end of each of its ranks that was lost. The ranks of other hosts cannot see it, and would
wait for the rank as long as for a silent one.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial

from syncline._torch.process_groups import PrefixStore, TCPStore
from syncline.environment import patience
from syncline.errors import PeerLost
from syncline.liveness.connection import StoreSilent, interruptibly
from syncline.liveness.store import SignedStore
from syncline.resilience.register import Line
from syncline.session.listening import is_of_this_host

_PULSE_SECONDS = 1.0

_SILENT_SECONDS = patience(15.0)
"""The time without a pulse after which a launcher is not waited for. Its ranks have given up by then."""

_POLL_SECONDS = 0.05

_CONNECT_SECONDS = 30.0


class OtherHosts:
    """The other launchers of the job.

    Args:
        variables: the environment variables of a rank of this host, which name the store.
    """

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._own = int(variables["GROUP_RANK"])
        self._others = [n for n in range(int(variables["GROUP_WORLD_SIZE"])) if n != self._own]
        address = variables["MASTER_ADDR"]
        self.has_store = is_of_this_host(address)
        """Whether the store of the job is in the launcher of this host."""
        store = interruptibly(
            lambda: TCPStore(
                address,
                int(variables["MASTER_PORT"]),
                is_master=False,
                timeout=timedelta(seconds=_CONNECT_SECONDS),
                wait_for_workers=False,
            )
        )
        launchers = PrefixStore(f"syncline launchers {variables['TORCHELASTIC_RESTART_COUNT']}", store)
        self._line = Line(launchers, _SILENT_SECONDS)
        self._pulses: dict[int, tuple[str, float]] = {}
        """The last pulse of each other launcher, and the time when it was first seen."""
        self.are_training_without_this_host = bool(self._read([f"pulse {self._own}"])) and self.are_running()
        """Whether this launcher takes the place of one that was lost."""
        self._life = uuid.uuid4().hex[:8]
        self._over = threading.Event()
        arguments = Line(launchers, _SILENT_SECONDS), self._own, self._life, self._over
        self._thread = threading.Thread(target=_beat, args=arguments, name="syncline-launcher", daemon=True)
        self._thread.start()

    def record_lost(self, name: str) -> None:
        """Record in the store that a rank of this host has ended. `name` is its name in `sl.steps`."""
        with contextlib.suppress(PeerLost):
            self._line.record_lost(name)

    def are_running(self) -> bool:
        """Return whether another launcher still has ranks."""
        try:
            found = self._read([f"{kind} {n}" for n in self._others for kind in ("pulse", "ended")])
        except StoreSilent:
            return True  # nothing shows that they have ended
        except PeerLost:
            return False
        now = time.monotonic()
        is_any_running = False
        for n in self._others:
            pulse = found.get(f"pulse {n}", "")
            if n not in self._pulses or self._pulses[n][0] != pulse:
                self._pulses[n] = pulse, now
            has_ended = found.get(f"ended {n}") == pulse.partition(" ")[0]
            is_any_running |= not has_ended and now - self._pulses[n][1] < _SILENT_SECONDS
        return is_any_running

    def withdraw(self) -> None:
        """Record that the ranks of this host have ended."""
        self._over.set()
        self._thread.join(_SILENT_SECONDS)  # in a request while Python shuts down, it would abort the process
        with contextlib.suppress(PeerLost):
            self._line.ask(lambda store: store.set(f"ended {self._own}", self._life))

    def wait(self) -> None:
        """If the store is here, wait until the ranks of all hosts have ended."""
        while self.has_store and self.are_running():
            time.sleep(_POLL_SECONDS)

    def _read(self, keys: Sequence[str]) -> Mapping[str, str]:
        return self._line.ask(partial(SignedStore.readable, keys=keys))


def _beat(line: Line, own: int, life: str, over: threading.Event) -> None:
    number, has_said_so = 0, False
    while not over.is_set():
        number += 1
        try:
            line.ask(partial(SignedStore.set, key=f"pulse {own}", text=f"{life} {number}"))
        except StoreSilent:
            pass  # the first host's launcher is stopped, and may continue
        except PeerLost:
            return  # the store has ended, which `OtherHosts` finds in its own requests
        except Exception as error:
            if not has_said_so:
                text = f"cannot show the other hosts that this launcher runs, and tries again: {error!r}"
                print(f"syncline run: {text}", file=sys.stderr)
            has_said_so = True
        over.wait(_PULSE_SECONDS)
