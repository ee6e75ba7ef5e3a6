"""The shards of a parameter server, one on each rank, and this rank's view of all of them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from syncline.strategies.actions import Message
from syncline.strategies.execution.flat import flat_groups
from syncline.transport.base import Transport, Work

__all__ = ["ShardedServer"]


_SHORTEST_PAUSE_SECONDS = 20e-6

_LONGEST_PAUSE_SECONDS = 1e-3


class ShardedServer:
    """Sends how this rank's parameters move, adds up what others send, and takes over what the servers have.

    `ParameterServer` decides when. Updates and values have connections of their own, on which the messages between two
    ranks come in the order of their clocks. What a rank computes with is, shard by shard, the last values that it has
    from the server and its own moves since then.

    Args:
        tensors: the parameters, of one floating type, on one device.
        transport: between the ranks; four lanes of it are opened.

    Raises:
        ValueError: they are of several types, or on several devices.
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
        """This rank's own updates, by clock, which a shard may not contain yet."""
        self._received: dict[int, dict[int, Tensor]] = {}
        """By clock and rank, the updates of this rank's shard that are not added yet."""
        self._closed = [0] * self._size
        self.restart()

    @property
    def lanes(self) -> list[Transport]:
        """What its messages travel by."""
        return [*self._updates.lanes, *self._values.lanes]

    @property
    def is_settled(self) -> bool:
        """Whether nothing is under way."""
        return not self._moves or max(self._moves) <= min(self._closed)

    def restart(self) -> None:
        """What the ranks have now, which is equal, is what the servers have."""
        self._written = self._group.read()  # (numel,): what the parameters were when they were written last
        self._served = self._written.clone()  # (numel,): each shard's values as this rank knows them

    def begin(self, clock: int) -> None:
        """A step is done: tell the servers how the parameters have moved in it."""
        move = self._group.read().sub_(self._written)
        self._moves[clock] = move
        self._received.setdefault(clock, {})[self._rank] = move[self._spans[self._rank]]
        own = self._spans[self._rank]
        for rank in self._others():
            self._updates.send(move[self._spans[rank]], rank)
            # What the others will send for this clock; all take as many steps.
            self._updates.expect(rank, clock, move[own])
            self._values.expect(rank, clock, move[self._spans[rank]])

    def close(self, clock: int) -> None:
        """Add up the updates of a clock, in the order of the ranks, and send everybody the shard's values."""
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
        """Take over a shard's values."""
        self._served[self._spans[shard]] = self._values.take(shard, clock)
        self._closed[shard] = clock

    def write(self) -> None:
        """Make the parameters what is known of the shards, and this rank's own moves since then."""
        known = self._served.clone()
        for clock in sorted(self._moves):
            if clock <= min(self._closed):
                del self._moves[clock]
                continue
            for shard, span in enumerate(self._spans):
                if clock > self._closed[shard]:
                    known[span] += self._moves[clock][span]
        self._group.write(known)
        self._written = self._group.read()  # as rounded

    def poll(self) -> list[Message]:
        """What has arrived since the last call."""
        found = self._updates.poll()
        for message in found:
            self._received.setdefault(message.clock, {})[message.rank] = self._updates.take(
                message.rank, message.clock
            )
        return found + self._values.poll()

    def wait(self, timeout_seconds: float) -> list[Message]:
        """The same, once there is something.

        Raises:
            CollectiveTimeout, PeerLost, ...: nothing came in time, or nothing ever will.
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
        """Everything that was sent has arrived."""
        self._updates.finish()
        self._values.finish()

    def _others(self) -> list[int]:
        return [rank for rank in range(self._size) if rank != self._rank]

    def state_dict(self) -> dict[str, Any]:
        """What it remembers, of this rank alone; nothing may be under way."""
        return {
            "served": self._served.clone(),
            "written": self._written.clone(),
            "closed": list(self._closed),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse."""
        self._served.copy_(state["served"])
        self._written.copy_(state["written"])
        # Another number of ranks has other shards; all were closed alike when nothing was under way.
        closed = list(state["closed"])
        self._closed = closed if len(closed) == self._size else [max(closed)] * self._size
        self._moves.clear()


class _Mail:
    """Messages of one kind; from one rank they come in the order of their clocks.

    They travel by two lanes, one to higher ranks and one to lower ones: where the messages of a pair go one after the
    other (NCCL), one that is expected must not hold up one that is to be sent.
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
        """Upwards and downwards."""
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
        """What has been waited for longest."""
        heads = [(queue[0][0], rank) for rank, queue in self._expected.items() if queue]
        return self._expected[min(heads)[1]][0][2] if heads else None

    def finish(self) -> None:
        while self._sent:
            self._sent.popleft()[0].wait()
