"""A parameter server with one shard per rank, and each rank's view of all shards."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from syncline.strategies.base import Message
from syncline.strategies.execution.flat import flat_groups
from syncline.transport.base import Transport
from syncline.transport.work import Work

_SHORTEST_PAUSE_SECONDS = 20e-6

_LONGEST_PAUSE_SECONDS = 1e-3


class ShardedServer:
    """Sends this rank's updates, adds up the updates of others, and adopts the servers' values.

    `ParameterServer` decides when. Updates and values have separate connections. On each, the messages between two
    ranks arrive in the order of their clocks. For each shard, a rank computes with the last values that it received
    from the server plus its own updates since then.

    Args:
        tensors: the parameters, of one floating type, on one device.
        transport: connects the ranks; four lanes of it are opened.

    Raises:
        ValueError: the parameters have several types or are on several devices.
    """

    def __init__(self, tensors: Sequence[Tensor], transport: Transport) -> None:
        groups = flat_groups(tensors)
        if len(groups) != 1:
            kinds = ", ".join(f"{group.wire_dtype} on {group.device}" for group in groups)
            raise ValueError(
                f"ParameterServer needs parameters of one type on one device, got {kinds}: convert the module, or "
                "use another strategy"
            )
        self._group = groups[0]
        self._rank, self._size = transport.rank, transport.size
        self._updates = _Mail("update", transport)
        self._values = _Mail("values", transport)
        numel = self._group.numel
        bounds = [numel * rank // self._size for rank in range(self._size + 1)]
        self._spans = [slice(start, stop) for start, stop in pairwise(bounds)]
        self._moves: dict[int, Tensor] = {}
        """This rank's own updates, by clock, that some shard may not contain yet."""
        self._received: dict[int, dict[int, Tensor]] = {}
        """The updates of this rank's shard that are not added yet, by clock and rank."""
        self._closed = [0] * self._size
        self.restart()

    @property
    def lanes(self) -> list[Transport]:
        """The lanes that carry the messages."""
        return [*self._updates.lanes, *self._values.lanes]

    @property
    def is_settled(self) -> bool:
        """Whether every shard contains all of this rank's updates."""
        return not self._moves or max(self._moves) <= min(self._closed)

    def restart(self) -> None:
        """Take the ranks' current parameters, which are equal, as the servers' values."""
        self._written = self._group.read()  # (numel,): the parameters as last written
        self._served = self._written.clone()  # (numel,): each shard's values as this rank knows them

    def begin(self, clock: int) -> None:
        """Send the servers this rank's update for a completed step."""
        move = self._group.read().sub_(self._written)
        self._moves[clock] = move
        self._received.setdefault(clock, {})[self._rank] = move[self._spans[self._rank]]
        own = self._spans[self._rank]
        for rank in self._others():
            self._updates.send(move[self._spans[rank]], rank)
            # All ranks take the same number of steps, so the others will send messages for this clock too.
            self._updates.expect(rank, clock, move[own])
            self._values.expect(rank, clock, move[self._spans[rank]])

    def close(self, clock: int) -> None:
        """Add the mean of all ranks' updates of a clock to this rank's shard, and send its values to all ranks.

        The updates are added in rank order, so that the sum is reproducible.
        """
        updates = self._received.pop(clock)
        own = self._served[self._spans[self._rank]]
        total = torch.zeros_like(own)
        for rank in range(self._size):
            total += updates[rank]
        own.add_(total, alpha=1.0 / self._size)
        self._closed[self._rank] = clock
        values = own.clone()
        for rank in self._others():
            self._values.send(values, rank)

    def adopt(self, shard: int, clock: int) -> None:
        """Adopt the values received for a shard."""
        self._served[self._spans[shard]] = self._values.take(shard, clock)
        self._closed[shard] = clock

    def write(self) -> None:
        """Set the parameters to the shards' known values plus this rank's own updates since then."""
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
        """Return the messages that have arrived since the last call."""
        found = self._updates.poll()
        for message in found:
            self._received.setdefault(message.clock, {})[message.rank] = self._updates.take(
                message.rank, message.clock
            )
        return found + self._values.poll()

    def wait(self, timeout_seconds: float) -> list[Message]:
        """Wait until a message has arrived, and return the messages as `poll` does.

        Raises:
            CollectiveTimeout, PeerLost, ...: nothing arrived in time, or nothing can arrive any more.
        """
        deadline = time.monotonic() + timeout_seconds
        pause_seconds = _SHORTEST_PAUSE_SECONDS
        while not (messages := self.poll()):
            if time.monotonic() > deadline:
                (self._updates.oldest() or self._values.oldest()).wait(0.0)  # type: ignore[union-attr]
            time.sleep(pause_seconds)
            pause_seconds = min(2 * pause_seconds, _LONGEST_PAUSE_SECONDS)
        return messages

    def finish(self) -> None:
        """Wait until everything that this rank sent has arrived."""
        self._updates.finish()
        self._values.finish()

    def _others(self) -> list[int]:
        return [rank for rank in range(self._size) if rank != self._rank]

    def state_dict(self) -> dict[str, Any]:
        """Return the state, which belongs to this rank alone; no update may be in flight."""
        return {
            "served": self._served.clone(),
            "written": self._written.clone(),
            "closed": list(self._closed),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned."""
        self._served.copy_(state["served"])
        self._written.copy_(state["written"])
        # With another number of ranks the shards differ. All shards were closed at the same clock, because a state is
        # only saved when no update is in flight.
        closed = list(state["closed"])
        self._closed = closed if len(closed) == self._size else [max(closed)] * self._size
        self._moves.clear()


class _Mail:
    """Messages of one kind. Those from one rank arrive in the order of their clocks.

    There are two lanes, one to higher ranks and one to lower ranks. Some transports (NCCL) order the messages of a pair
    of ranks, and there a pending receive must not block a send.
    """

    def __init__(self, kind: Literal["update", "values"], transport: Transport) -> None:
        self._kind: Literal["update", "values"] = kind
        self._transport = transport
        self._to_higher, self._to_lower = (
            transport.lane(f"{kind} upwards"),
            transport.lane(f"{kind} downwards"),
        )
        self._sent: deque[tuple[Work, Tensor]] = deque()
        self._expected: dict[int, deque[tuple[int, Tensor, Work]]] = {}
        self._arrived: dict[tuple[int, int], Tensor] = {}

    @property
    def lanes(self) -> list[Transport]:
        """The lane to higher ranks and the lane to lower ranks."""
        return [self._to_higher, self._to_lower]

    def send(self, values: Tensor, rank: int) -> None:
        wire = values.to(self._transport.sending_device(values.device), copy=True)
        lane = self._to_higher if rank > self._transport.rank else self._to_lower
        self._sent.append((lane.send(wire, rank), wire))

    def expect(self, rank: int, clock: int, like: Tensor) -> None:
        blank = torch.empty(
            like.numel(), dtype=like.dtype, device=self._transport.sending_device(like.device)
        )
        lane = self._to_lower if rank > self._transport.rank else self._to_higher
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
        """Return the pending receive with the lowest clock, or None."""
        heads = [(queue[0][0], rank) for rank, queue in self._expected.items() if queue]
        return self._expected[min(heads)[1]][0][2] if heads else None

    def finish(self) -> None:
        while self._sent:
            self._sent.popleft()[0].wait()
