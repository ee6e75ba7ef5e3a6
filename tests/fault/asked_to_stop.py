"""Asks ranks to stop at any moment, many times, and looks each time how they end: DIRECTORY STRATEGY NUM_STOPS SEED.

Ranks are forks of this process, so that each begins at once; the signals come from outside, one or several at a time.
Prints how often each number of ranks was told, and after which steps they stopped.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn

import syncline as sl
from syncline.testing import held_port, variables_of_rank

SIZE = 3
STRATEGIES: dict[str, Any] = {
    "every-step": {},
    "sharded": {"sharded": True},
    "local-sgd": {"strategy": sl.LocalSGD(5)},
    "gossip": {"strategy": sl.Gossip("ring")},
}


def train(directory: str, strategy: str, ready: int, num_steps: int) -> None:
    world = sl.init(device="cpu")
    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
        seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))
    ddp = sl.DistributedDataParallel(model, **STRATEGIES[strategy])
    optimizer = ddp.attach(torch.optim.AdamW(ddp.parameters(), lr=0.01))
    losses = Losses()
    state = sl.TrainState(model=ddp, optimizer=optimizer, losses=losses)
    checkpointer = sl.Checkpointer(directory, keep=2)
    checkpointer.load(state)
    checkpointer.stop_if_asked(state)
    os.write(ready, b"x")
    while state.step < num_steps:
        g = torch.Generator().manual_seed(state.step * SIZE + world.rank)
        loss = ddp(torch.randn(8, 6, generator=g)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.values.append(loss.item())
        state.commit()
        if state.step % 50 == 0:
            checkpointer.save(state, blocking=False)
        checkpointer.stop_if_asked(state)
    checkpointer.save(state)
    sl.shutdown()


class Losses:
    """Of all steps, whoever made them: saved, so that two runs can be compared."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def state_dict(self) -> Any:
        return {"values": self.values}

    def load_state_dict(self, state: Any) -> None:
        self.values = list(state["values"])


def start(directory: str, strategy: str, num_steps: int) -> list[int]:
    """Pids of ranks that train."""
    told, ready = os.pipe()
    pids = []
    with held_port() as port:
        for rank in range(SIZE):
            pid = os.fork()
            if pid == 0:
                os.environ |= variables_of_rank(rank, SIZE, port)
                end_as_a_program_does(lambda: train(directory, strategy, ready, num_steps))
            pids.append(pid)
        os.close(ready)
        for _ in range(SIZE):
            assert os.read(told, 1) == b"x"
        os.close(told)
    return pids


def end_as_a_program_does(program: Any) -> None:
    code = 1
    try:
        program()
        code = 0
    except SystemExit as stopped:
        code = stopped.code
        sl.shutdown()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def codes_of(pids: list[int]) -> list[int]:
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def newest(directory: str) -> int:
    return max(int(path.name.rpartition("-")[2]) for path in Path(directory).glob("save-*"))


def content(directory: str) -> dict[str, bytes]:
    path = max(Path(directory).glob(f"save-*-step-{newest(directory)}"))
    return {file.name: file.read_bytes() for file in path.glob("*.safetensors")}


def main() -> None:
    directory, strategy, num_stops, seed = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    rng = random.Random(seed)
    torch.set_num_threads(1)
    stopped, whole = f"{directory}/stopped", f"{directory}/whole"
    asked: Counter[int] = Counter()
    steps: list[int] = []
    for _ in range(num_stops):
        pids = start(stopped, strategy, num_steps=10**6)
        time.sleep(rng.uniform(0, 0.1))
        chosen = rng.sample(pids, rng.randint(1, SIZE))
        for pid in chosen:
            os.kill(pid, rng.choice([signal.SIGTERM, signal.SIGUSR1]))
        assert codes_of(pids) == [sl.EXIT_STOPPED] * SIZE
        asked[len(chosen)] += 1
        steps.append(newest(stopped))
    last = steps[-1] + 3
    assert codes_of(start(stopped, strategy, last)) == [0] * SIZE
    assert codes_of(start(whole, strategy, last)) == [0] * SIZE
    assert content(stopped) == content(whole), "it is not the run that it would have been"
    print(dict(sorted(asked.items())), steps)


if __name__ == "__main__":
    main()
