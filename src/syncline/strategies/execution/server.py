"""A parameter server that is divided among the ranks: each rank serves one shard, and receives all other shards."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from syncline.strategies.actions import Action, Adopt, Close, Message, RestartOuter, Update
from syncline.strategies.execution.flat import flat_groups
from syncline.strategies.execution.kept import Kept
from syncline.transport.base import Transport
from syncline.transport.work import Work

_SHORTEST_PAUSE_SECONDS = 20e-6

_LONGEST_PAUSE_SECONDS = 1e-3


class ShardedServer(Kept):
    """The data of a parameter server on one rank: the shard that this rank serves, and the last values of all shards.

    The strategy `ParameterServer` decides when to send and to receive. Updates and values are sent on separate lanes.
    On each lane, the messages between two ranks arrive in the order of their steps. A rank computes with the last
    values that it received for each shard, plus its own later updates.

    Args:
        tensors: the parameters, of one floating-point dtype, on one device.
        transport: connects the ranks. Four lanes of it are opened.

    Raises:
        ValueError: the parameters have several dtypes, or are on several devices.
    """

    name = "server"
    has_copies = True
    serves = True

    def __init__(self, tensors: Sequence[Tensor], transport: Transport) -> None:
        groups = flat_groups(tensors)
        if len(groups) != 1:
            kinds = ", ".join(f"{group.wire_dtype} on {group.device}" for group in groups)
            raise ValueError(
                f"ParameterServer: expected all parameters to have one dtype and to be on one device, got {kinds}. "
                "Convert or move the parameters, or use another strategy"
            )
        self._group = groups[0]
        self._transport = transport
        self._others = [rank for rank in range(transport.size) if rank != transport.rank]
        self._updates = _Mail("update", transport)
        self._values = _Mail("values", transport)
        self.lanes = [*self._updates.lanes, *self._values.lanes]
        numel = self._group.numel
        bounds = [numel * rank // self._transport.size for rank in range(self._transport.size + 1)]
        self._spans = [slice(start, stop) for start, stop in pairwise(bounds)]
        self._moves: dict[int, Tensor] = {}
        """This rank's updates, by step. An update is deleted once the received values of all shards contain it."""
        self._received: dict[int, dict[int, Tensor]] = {}
        """The updates that wait to be added to this rank's shard, by step and by the rank that sent them."""
        self._closed = [0] * self._transport.size
        self.start()

    @property
    def closed_up_to(self) -> int:
        return min(self._closed)

    @property
    def is_settled(self) -> bool:
        return not self._moves or max(self._moves) <= min(self._closed)

    def start(self) -> None:
        self._written = self._group.read()  # (numel,): the parameters as last written
        self._served = self._written.clone()  # (numel,): the values of all shards as this rank knows them

    def run(self, action: Action) -> None:
        match action:
            case RestartOuter():
                self.start()
            case Update(clock):
                self._send_update(clock)
            case Close(clock):
                self._close(clock)
            case Adopt(shard, clock):
                self._served[self._spans[shard]] = self._values.take(shard, clock)
                self._closed[shard] = clock
            case _:
                super().run(action)

    def _send_update(self, clock: int) -> None:
        """Send each server this rank's update of step `clock`: the change of the server's shard in that step."""
        move = self._group.read().sub_(self._written)
        own = self._spans[self._transport.rank]
        self._moves[clock] = move
        self._received.setdefault(clock, {})[self._transport.rank] = move[own]
        for rank in self._others:
            self._updates.send(move[self._spans[rank]], rank)
            # All ranks take the same number of steps, so the others will send messages for this clock too.
            self._updates.expect(rank, clock, move[own])
            self._values.expect(rank, clock, move[self._spans[rank]])

    def _close(self, clock: int) -> None:
        """Add the mean of all ranks' updates of step `clock` to this rank's shard, and send the shard to all ranks.

        The updates are added in rank order, so that the sum is reproducible.
        """
        updates = self._received.pop(clock)
        own = self._served[self._spans[self._transport.rank]]
        total = torch.zeros_like(own)
        for rank in range(self._transport.size):
            total += updates[rank]
        own.add_(total, alpha=1.0 / self._transport.size)
        self._closed[self._transport.rank] = clock
        values = own.clone()
        for rank in self._others:
            self._values.send(values, rank)

    def write(self) -> None:
        """Write the last values of each shard, plus this rank's later updates of it, into the parameters."""
        known = self._served.clone()
        for clock in sorted(self._moves):
            if clock <= min(self._closed):
                del self._moves[clock]
                continue
            for shard, span in enumerate(self._spans):
                if clock > self._closed[shard]:
                    known[span] += self._moves[clock][span]
        self._group.write(known)
        self._written = self._group.read()  # includes the rounding of the write

    def poll(self) -> list[Message]:
        found = self._updates.poll()
        for _, rank, clock in found:
            self._received.setdefault(clock, {})[rank] = self._updates.take(rank, clock)
        return found + self._values.poll()

    def wait(self) -> list[Message]:
        """Wait until a message from another rank has arrived. Return all messages that have arrived.

        Raises:
            CollectiveTimeout: no message arrived in time.
            SynclineError: no message can arrive any more, for example because a rank has failed (`PeerLost`).
        """
        deadline = time.monotonic() + self._transport.timeout_seconds
        pause_seconds = _SHORTEST_PAUSE_SECONDS
        while not (messages := self.poll()):
            if time.monotonic() > deadline:
                (self._updates.oldest() or self._values.oldest()).wait(0.0)  # type: ignore[union-attr]
            time.sleep(pause_seconds)
            pause_seconds = min(2 * pause_seconds, _LONGEST_PAUSE_SECONDS)
        return messages

    def finish(self) -> None:
        self._updates.finish()
        self._values.finish()

    def state_dict(self) -> dict[str, Any]:
        """Return the last values of all shards that this rank has received. No update may be in flight."""
        return {
            "served": self._served.clone(),
            "written": self._written.clone(),
            "closed": list(self._closed),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._served.copy_(state["served"])
        self._written.copy_(state["written"])
        # The shards depend on the number of ranks. All shards were closed at the same clock, because a state is saved
        # only while no update is in flight.
        closed = list(state["closed"])
        self._closed = closed if len(closed) == self._transport.size else [max(closed)] * self._transport.size
        self._moves.clear()


class _Mail:
    """The messages of one kind, updates or values, between this rank and all other ranks.

    Messages from one rank arrive in the order of their steps. One lane carries the messages from lower to higher ranks,
    and a second lane those from higher to lower ranks. Some transports (NCCL) run the messages of a pair of ranks on
    one lane in order, so on a single lane a pending receive could block a send.
    """

    def __init__(self, kind: Literal["update", "values"], transport: Transport) -> None:
        self._kind: Literal["update", "values"] = kind
        self._rank = transport.rank
        self._sending_device = transport.sending_device
        self._to_higher = transport.lane(f"{kind} upwards")
        self._to_lower = transport.lane(f"{kind} downwards")
        self.lanes = [self._to_higher, self._to_lower]
        self._sent: deque[tuple[Work, Tensor]] = deque()
        self._expected: dict[int, deque[tuple[int, Tensor, Work]]] = {}
        """For each rank, the messages that have not arrived yet, as (step, tensor for the values, pending receive)."""
        self._arrived: dict[tuple[int, int], Tensor] = {}
        """The messages that have arrived and were not taken yet. A key is (rank that sent the message, step)."""

    def send(self, values: Tensor, rank: int) -> None:
        wire = values.to(self._sending_device(values.device), copy=True)
        lane = self._to_higher if rank > self._rank else self._to_lower
        self._sent.append((lane.send(wire, rank), wire))

    def expect(self, rank: int, clock: int, like: Tensor) -> None:
        blank = torch.empty_like(like, device=self._sending_device(like.device))
        lane = self._to_lower if rank > self._rank else self._to_higher
        self._expected.setdefault(rank, deque()).append((clock, blank, lane.recv(blank, rank)))

    def poll(self) -> list[Message]:
        found = []
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()[0].wait()
        for rank, queue in sorted(self._expected.items()):
            while queue and queue[0][2].is_completed():
                clock, values, work = queue.popleft()
                work.wait()
                self._arrived[rank, clock] = values
                found.append(Message(self._kind, rank, clock))
        return found

    def take(self, rank: int, clock: int) -> Tensor:
        return self._arrived.pop((rank, clock))

    def oldest(self) -> Work | None:
        """Return the pending receive for the earliest step. Return None if no receive is pending."""
        heads = [queue[0] for _, queue in sorted(self._expected.items()) if queue]
        return min(heads, key=lambda head: head[0])[2] if heads else None

    def finish(self) -> None:
        while self._sent:
            self._sent.popleft()[0].wait()
