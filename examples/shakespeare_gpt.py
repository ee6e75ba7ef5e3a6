"""Train a small GPT to write like Shakespeare, character by character, on any number of processes.

syncline run -n 2 examples/shakespeare_gpt.py
torchrun --nproc-per-node 2 examples/shakespeare_gpt.py
python examples/shakespeare_gpt.py

With --directory it saves while it trains, and resumes from the last save when it is started again.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import syncline as sl
from example_data import shakespeare_text
from progress import Progress, synchronized

CONTEXT = 128  # characters that the model sees
WIDTH = 128
NUM_HEADS = 4
NUM_LAYERS = 4


class Block(nn.Module):
    """A layer: attention to earlier characters, then a small network for each character."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:  # (batch, time, WIDTH)
        batch, length, _ = x.shape
        heads = self.query_key_value(self.norm1(x)).view(batch, length, 3, NUM_HEADS, WIDTH // NUM_HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each (batch, NUM_HEADS, time, WIDTH / NUM_HEADS)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        mixed: Tensor = self.mlp(self.norm2(x))
        return x + mixed


class GPT(nn.Module):
    """A GPT with four layers and 0.83 million parameters."""

    def __init__(self, num_characters: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(num_characters, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(NUM_LAYERS)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, num_characters, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:  # (batch, time) -> (batch, time, num_characters)
        x = self.characters(tokens) + self.positions.weight[: tokens.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


class Windows:
    """Random places in a text, different on each rank. The state is saved, so that a resumed run draws the same places.

    A rank that did not exist at the save gets rank 0's state. It ignores this state, so that it draws other places.
    """

    def __init__(self, text: Tensor, seed: int) -> None:
        self._text = text
        self._seed = seed
        self._randomness = torch.Generator().manual_seed(seed)

    def draw(self, number: int) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(self._text) - CONTEXT, (number,), generator=self._randomness)
        return windows(self._text, starts)

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self._seed, "randomness": self._randomness.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["seed"] == self._seed:
            self._randomness.set_state(state["randomness"])


def windows(text: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the inputs, and the next character at each place of the inputs. Both have shape (len(starts), CONTEXT)."""
    pieces = text[starts[:, None] + torch.arange(CONTEXT + 1)].to(sl.world().device)
    return pieces[:, :-1], pieces[:, 1:]


def sum_of_losses(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum")


@torch.no_grad()
def validation_loss(ddp: sl.DistributedDataParallel, text: Tensor) -> float:
    """Return nats per character over 256 windows, which are spread evenly over `text` and divided among the ranks."""
    world = sl.world()
    starts = torch.linspace(0, len(text) - CONTEXT - 1, 256).long()[world.rank :: world.size]
    loss_sum, num_tokens = 0.0, 0
    for part in starts.chunk(8):
        inputs, targets = windows(text, part)
        loss_sum += sum_of_losses(ddp, inputs, targets).item()
        num_tokens += targets.numel()
    return sl.mean(loss_sum / num_tokens, weight=num_tokens)


def share_of_lr(step: int, num_steps: int) -> float:
    """Return the factor of the learning rate: a linear warm-up, then a cosine down to a tenth."""
    warm_up = (step + 1) / max(1, num_steps // 20)
    return min(warm_up, 0.1 + 0.45 * (1 + math.cos(math.pi * step / num_steps)))


def train(
    ddp: sl.DistributedDataParallel, training: Tensor, validation: Tensor, args: argparse.Namespace
) -> float:
    """Train until `args.steps`. Return the last validation loss."""
    world = sl.world()
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: share_of_lr(step, args.steps))
    # If the sequences of a step cannot be divided equally, some ranks have one more than others.
    num_sequences = len(range(world.rank, args.batch_size, world.size))
    drawn = Windows(training, seed=1000 * args.seed + world.rank)
    state = sl.TrainState(model=ddp, optimizer=optimizer, scheduler=schedule, windows=drawn)
    checkpointer = sl.Checkpointer(args.directory) if args.directory else None
    if checkpointer is not None:
        found = checkpointer.load(state)
        if found and world.rank == 0:
            print(f"Going on from step {found}.", flush=True)
        checkpointer.stop_if_asked(state)  # from now on, SIGTERM and SIGUSR1 ask the ranks to save and stop
    report_every = max(1, args.steps // 10)
    loss = math.inf
    start = time.perf_counter()
    with Progress(args.steps, shown=world.rank == 0) as progress:
        progress.advance("", by=state.step)
        first = state.step
        while state.step < args.steps:
            inputs, targets = drawn.draw(num_sequences)
            optimizer.zero_grad()
            # The gradient becomes the sum over all ranks, divided by the number of tokens of all ranks.
            with ddp.normalize_by(targets.numel()):
                loss_sum = sum_of_losses(ddp, inputs, targets)
                ddp.report(loss=loss_sum / targets.numel(), weight=targets.numel())
                loss_sum.backward()
            # Every rank has the same gradient now, so every rank clips it in the same way.
            torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            state.commit()

            step = state.step
            record = ddp.last_step
            assert record is not None
            progress.advance(f"loss {record.metrics['loss']:.3f}")
            if step % report_every == 0 or step == args.steps:
                loss = validation_loss(ddp, validation)
                rate = (step - first) * args.batch_size * CONTEXT / (time.perf_counter() - start)
                progress.print(
                    f"step {step:>4}/{args.steps}  validation loss {loss:.3f}  {rate:,.0f} tokens/s"
                )
                if checkpointer is not None:
                    checkpointer.save(state, blocking=False)
            if checkpointer is not None:
                checkpointer.stop_if_asked(state)
    if checkpointer is not None:
        checkpointer.wait()
        if first == state.step:  # all steps were made before
            loss = validation_loss(ddp, validation)
    return loss


@torch.no_grad()
def write(model: nn.Module, alphabet: str, length: int) -> str:
    tokens = torch.tensor([[alphabet.index("\n")]], device=sl.world().device)
    for _ in range(length):
        logits = model(tokens[:, -CONTEXT:])[0, -1]
        tokens = torch.cat([tokens, torch.multinomial(logits.softmax(0), 1)[None]], dim=1)
    return "".join(alphabet[token] for token in tokens[0].tolist())


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a character GPT on 38 plays of Shakespeare.")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch-size", type=int, default=16, help="sequences per step, over all ranks")
    parser.add_argument("--lr", type=float, default=3e-3, help="the highest learning rate of the schedule")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", help="where to save, and where to go on from; on all hosts the same")
    parser.add_argument("--target-loss", type=float, help="fail above this validation loss in nats, say 2.3")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    world = sl.init()
    if args.batch_size < world.size:
        sys.exit(f"--batch-size {args.batch_size} leaves some of the {world.size} ranks without a sequence")
    if "OMP_NUM_THREADS" not in os.environ:  # not set: divide the cores among the ranks
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world.local_size))

    text = shakespeare_text()
    alphabet = "".join(sorted(set(text)))
    number_of = {character: number for number, character in enumerate(alphabet)}
    tokens = torch.tensor([number_of[character] for character in text])
    training, validation = tokens.tensor_split([len(tokens) * 9 // 10])

    torch.manual_seed(args.seed)
    ddp = sl.DistributedDataParallel(GPT(len(alphabet)).to(world.device))
    if world.rank == 0:
        print(f"{ddp.contract}\n", flush=True)

    start = time.perf_counter()
    loss = train(ddp, training, validation, args)
    seconds = time.perf_counter() - start
    if world.rank == 0:
        print(f"\n{ddp.explain()}\n\n{synchronized(ddp.statistics(), seconds)}\n")
        # ddp.module, not ddp: rank 0 writes alone, so nothing may be synchronized.
        print(f"What it writes:\n{write(ddp.module, alphabet, 300)}\n")
        print(f"Validation loss: {loss:.3f} nats per character, after {seconds:.0f} s")
    sl.shutdown()
    if args.target_loss is not None and loss > args.target_loss:
        sys.exit(f"Validation loss {loss:.3f} is above the target of {args.target_loss}.")


if __name__ == "__main__":
    main()
