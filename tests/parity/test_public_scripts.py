"""Two training scripts that many have copied, written anew in small: under ours they end as under torch's class.

Bit for bit, over Gloo and over shared memory: with two ranks a sum has one order only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import TinyGPT
from torch import Tensor, nn
from torch.nn import functional as F

from syncline import DistributedDataParallel
from syncline.session import transport_of
from syncline.transport import C10dTransport

Wrap = Callable[[nn.Module], Any]
State = dict[str, Any]


def ends_alike(train: Callable[[Wrap, Path], State], folder: Path) -> None:
    """Run a script under torch's class, and under ours by both ways."""
    assert transport_of().reduces_in_place, "the default group's transport is expected to be shared memory"
    wraps: dict[str, Wrap] = {
        "torch": nn.parallel.DistributedDataParallel,
        "gloo": lambda module: DistributedDataParallel(module, process_group=C10dTransport()),
        "shared memory": DistributedDataParallel,
    }
    ends = {}
    for name, wrap in wraps.items():
        place = folder / name
        place.mkdir(exist_ok=True)
        dist.barrier()
        ends[name] = train(wrap, place)
    theirs = ends.pop("torch")
    assert all(torch.isfinite(value).all() for value in theirs.values() if isinstance(value, Tensor))
    for name, mine in ends.items():
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            same = torch.equal(mine[key], value) if isinstance(value, Tensor) else mine[key] == value
            assert same, f"{name}, {key}: {mine[key]} instead of {value}"


def state_of(**modules: nn.Module) -> State:
    """Copies of parameters, gradients and buffers."""
    found: State = {}
    for name, module in modules.items():
        found |= {f"{name}.{key}": value.detach().clone() for key, value in module.state_dict().items()}
        for key, parameter in module.named_parameters():
            if parameter.grad is not None:
                found[f"gradient of {name}.{key}"] = parameter.grad.clone()
    return found


# ---------------------------------------------------------------------- a small GPT


class Gpt(TinyGPT):
    """Returns logits and loss, as scripts of this kind expect, and drops activations."""

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = F.dropout(super().forward(tokens), 0.2, self.training)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train_gpt(wrap: Wrap, folder: Path) -> State:
    """Accumulates gradients, clips them, evaluates and saves on rank 0, ends, and resumes from what was saved."""
    num_micro, clip, path = 3, 1.0, folder / "ckpt.pt"
    is_master = dist.get_rank() == 0
    text = torch.randint(11, (200,), generator=torch.Generator().manual_seed(7))
    losses: list[float] = []

    def get_batch() -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(text) - 7, (4,))
        return torch.stack([text[i : i + 6] for i in starts]), torch.stack(
            [text[i + 1 : i + 7] for i in starts]
        )

    def lr_of(iteration: int) -> float:
        if iteration < 2:
            return 0.01 * (iteration + 1) / 3
        return 0.001 + 0.5 * (1 + math.cos(math.pi * (iteration - 2) / 8)) * 0.009

    @torch.no_grad()
    def estimate_loss(model: nn.Module) -> float:
        model.eval()
        found = torch.zeros(2)
        for k in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                _, loss = model(*get_batch())
            found[k] = loss.item()
        model.train()
        return found.mean().item()

    def run(*, until: int, resumes: bool) -> nn.Module:
        torch.manual_seed(1337 + dist.get_rank())
        model, begin = Gpt(tied=True), 0
        saved = torch.load(path) if resumes else None
        if saved is not None:
            model.load_state_dict(saved["model"])
            begin = saved["iteration"]
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.95), eps=1e-6)
        if saved is not None:
            optimizer.load_state_dict(saved["optimizer"])
        ddp = wrap(model)
        raw = ddp.module
        x, y = get_batch()
        for iteration in range(begin, until):
            for group in optimizer.param_groups:
                group["lr"] = lr_of(iteration)
            if iteration % 2 == 0 and is_master:
                losses.append(estimate_loss(ddp))
                if iteration > 0:
                    state = {"model": raw.state_dict(), "optimizer": optimizer.state_dict()}
                    torch.save(state | {"iteration": iteration}, path)
            for micro in range(num_micro):
                ddp.require_backward_grad_sync = micro == num_micro - 1
                with torch.autocast("cpu", torch.bfloat16):
                    _, loss = ddp(x, y)
                    loss = loss / num_micro
                x, y = get_batch()
                scaler.scale(loss).backward()
                losses.append(loss.item())
            scaler.unscale_(optimizer)
            losses.append(torch.nn.utils.clip_grad_norm_(ddp.parameters(), clip).item())
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
        return raw

    first = run(until=5, resumes=False)
    dist.barrier()
    return state_of(first=first, second=run(until=8, resumes=True)) | {"losses": losses}


# ---------------------------------------------------------------------- a GAN


def train_gan(wrap: Wrap, folder: Path) -> State:
    """Two wrappers: the discriminator on real samples, on detached ones, and the generator through it."""
    torch.manual_seed(dist.get_rank())
    generator = wrap(
        nn.Sequential(
            nn.ConvTranspose2d(5, 8, 3, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(True),
            nn.ConvTranspose2d(8, 1, 4, 2, 1, bias=False),
            nn.Tanh(),
        )
    )
    discriminator = wrap(
        nn.Sequential(
            nn.Conv2d(1, 6, 4, 2, 1, bias=False),
            nn.BatchNorm2d(6),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(6, 1, 3, bias=False),
            nn.Flatten(),
            nn.Sigmoid(),
        )
    )
    optimizers = [
        torch.optim.Adam(net.parameters(), lr=2e-3, betas=(0.5, 0.999)) for net in (discriminator, generator)
    ]
    fixed_noise = torch.randn(4, 5, 1, 1)
    seen: list[float] = []
    for real in _images(num_batches=5):
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        discriminator.zero_grad()
        loss_real = F.binary_cross_entropy(discriminator(real), ones)
        loss_real.backward()
        fake = generator(torch.randn(len(real), 5, 1, 1))
        loss_fake = F.binary_cross_entropy(discriminator(fake.detach()), zeros)
        loss_fake.backward()
        optimizers[0].step()
        generator.zero_grad()
        output = discriminator(fake)
        loss = F.binary_cross_entropy(output, ones)
        loss.backward()
        optimizers[1].step()
        seen += [(loss_real + loss_fake).item(), loss.item(), output.mean().item()]
    with torch.no_grad():  # samples to look at, and the last checkpoint
        seen.append(generator(fixed_noise).mean().item())
    if dist.get_rank() == 0:
        torch.save(generator.state_dict(), folder / "generator.pth")
    return state_of(generator=generator.module, discriminator=discriminator.module) | {"seen": seen}


def _images(num_batches: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    for _ in range(num_batches):
        yield torch.rand(6, 1, 6, 6, generator=generator) * 2 - 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize("train", [train_gpt, train_gan])
def test_a_public_script_ends_as_under_torchs_class(
    train: Callable[[Wrap, Path], State], tmp_path: Path
) -> None:
    ends_alike(train, tmp_path)
