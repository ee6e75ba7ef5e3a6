"""Kills a process that saves and saves, many times, and looks each time what it has left: DIRECTORY NUM_KILLS SEED.

Processes are forks of this one, so that each begins at once. Every second one is killed while it saves. Prints how many
saves there were, and where they were met.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import syncline as sl
from syncline.transport import run_ranks


class Numbers:
    """So many that writing takes a while; all are equal to the step."""

    def __init__(self) -> None:
        self.tensors = [torch.zeros(300_000) for _ in range(4)]

    def set(self, value: int) -> None:
        for tensor in self.tensors:
            tensor.fill_(value)

    def state_dict(self) -> Any:
        return {"tensors": self.tensors}

    def load_state_dict(self, state: Any) -> None:
        self.tensors = state["tensors"]


def save_forever(directory: str, ready: int) -> None:
    numbers = Numbers()
    state = sl.TrainState(numbers=numbers)

    def program(transport: Any) -> None:
        checkpointer = sl.Checkpointer(directory, keep=2, group=transport)
        checkpointer.load(state)
        is_ready = False
        while True:
            state.commit()
            numbers.set(state.step)
            checkpointer.save(state, blocking=state.step % 2 == 0)
            if not is_ready:  # the first save of a process takes longer than the others
                os.write(ready, b"x")
                is_ready = True

    run_ranks(1, program)


def load(directory: str) -> int:
    numbers = Numbers()
    state = sl.TrainState(numbers=numbers)
    step = run_ranks(1, lambda t: sl.Checkpointer(directory, group=t).load(state))[0]
    if step is None:
        return 0
    assert all(torch.equal(tensor, torch.full_like(tensor, step)) for tensor in numbers.tensors), step
    return step


def saves_under_way(directory: str) -> list[Path]:
    return [path for path in Path(directory).glob("unfinished-*") if path.is_dir()]


def main() -> None:
    directory, num_kills, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    rng = random.Random(seed)
    torch.set_num_threads(1)
    last = 0
    met: Counter[str] = Counter()
    for number in range(num_kills):
        told, ready = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                save_forever(directory, ready)
            finally:
                os._exit(1)
        os.close(ready)
        assert os.read(told, 1) == b"x"
        os.close(told)
        time.sleep(rng.uniform(0, 0.1))
        while number % 2 and not saves_under_way(directory):
            time.sleep(0.0001)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        met["in a save" if saves_under_way(directory) else "between two"] += 1
        found = load(directory)
        assert found >= last, f"step {found}, and step {last} was there before"
        last = found
    print(f"{last} saves, met {met['in a save']} times in one")


if __name__ == "__main__":
    main()
