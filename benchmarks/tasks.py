"""What benchmarks train on real data: the examples' GPT, on Shakespeare's plays and on Python code, and their CNN, on
MNIST digits. Samples depend on nothing but seed, rank and step."""

from __future__ import annotations

import math
import random
import sys
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import mnist_cnn
import shakespeare_gpt
import syncline as sl
from example_data import Package, fetch, shakespeare_text

__all__ = [
    "TASKS",
    "Batch",
    "MnistDigits",
    "PythonGPT",
    "ShakespeareGPT",
    "Task",
    "characters",
    "seed_of",
    "shakespeare_text",
    "share_of_rate",
]

Batch = tuple[Tensor, Tensor]
FLOOR = 0.01  # of the learning rate's schedule: what is left of the peak at the end
PYTHON_CODE = Package(
    content="Python code of networkx",
    name="networkx",
    version="3.4.2",
    sha256="df5d4365b724cf81b8c6a7312509d0c22386097011ad1abe274afd5e9d3bbc5f",
)


def seed_of(*parts: int) -> int:
    """A seed for these numbers, unlike that of any others."""
    return random.Random("/".join(map(str, parts))).getrandbits(48)


def share_of_rate(step: int, num_steps: int) -> float:
    """Of the peak: up along a straight line in the first twentieth, then down along a cosine.

    Args:
        step: from 0.
        num_steps: of the whole run.
    """
    warm_up = (step + 1) / max(1, num_steps // 20)
    return min(warm_up, FLOOR + (1 - FLOOR) / 2 * (1 + math.cos(math.pi * step / num_steps)))


def python_code() -> str:
    """566 modules in the order of their file names: 6.1 million characters."""
    with zipfile.ZipFile(fetch(PYTHON_CODE)) as wheel:
        modules = sorted(name for name in wheel.namelist() if name.endswith(".py"))
        text = "".join(wheel.read(module).decode() for module in modules)
    return text.encode("ascii", "ignore").decode()


def characters(text: str) -> tuple[int, Tensor, Tensor]:
    """How many different ones there are, and their numbers, for training and for validation."""
    number_of = {character: number for number, character in enumerate(sorted(set(text)))}
    tokens = torch.tensor([number_of[character] for character in text])
    training, validation = tokens.tensor_split([len(tokens) * 9 // 10])
    return len(number_of), training, validation


class Task(ABC):
    """A model, its data and its optimizer."""

    batch_size: int
    """Samples a step, over all ranks."""
    num_validation: int
    """Samples that the result is evaluated on, over all ranks."""

    @abstractmethod
    def model(self) -> nn.Module:
        """A new one, by torch's global generator."""

    @abstractmethod
    def optimizer(self, parameters: Iterable[nn.Parameter], learning_rate: float) -> torch.optim.Optimizer:
        """The one that works well here."""

    @abstractmethod
    def draw(self, num_samples: int) -> Batch:
        """Training samples, by torch's global generator."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean over a batch, in nats."""

    @abstractmethod
    def evaluate(self, model: nn.Module, rank: int, num_ranks: int) -> tuple[dict[str, float], int]:
        """What a rank's share of the validation samples says: means of "loss" and others, and over how many items."""

    def batch(self, seed: int, rank: int, num_ranks: int, step: int) -> Batch:
        """A rank's samples of a step."""
        torch.manual_seed(seed_of(seed, rank, step))
        return self.draw(self.batch_size // num_ranks)


class TextGPT(Task):
    """The GPT of examples/shakespeare_gpt.py: sequences of 128 characters, 16 a step."""

    def __init__(self, text: str, *, batch_size: int = 16, num_validation: int = 256) -> None:
        self.batch_size, self.num_validation = batch_size, num_validation
        self._num_characters, self._training, self._validation = characters(text)

    def model(self) -> nn.Module:
        return shakespeare_gpt.GPT(self._num_characters)

    def optimizer(self, parameters: Iterable[nn.Parameter], learning_rate: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            parameters, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )

    def draw(self, num_samples: int) -> Batch:
        starts = torch.randint(len(self._training) - shakespeare_gpt.CONTEXT, (num_samples,))
        return shakespeare_gpt.windows(self._training, starts)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        inputs, targets = batch
        return shakespeare_gpt.sum_of_losses(model, inputs, targets) / targets.numel()

    @torch.no_grad()
    def evaluate(self, model: nn.Module, rank: int, num_ranks: int) -> tuple[dict[str, float], int]:
        last = len(self._validation) - shakespeare_gpt.CONTEXT - 1
        starts = torch.linspace(0, last, self.num_validation, dtype=torch.float64).long()[rank::num_ranks]
        loss_sum, num_tokens = 0.0, 0
        for part in starts.split(32):
            inputs, targets = shakespeare_gpt.windows(self._validation, part)
            loss_sum += shakespeare_gpt.sum_of_losses(model, inputs, targets).item()
            num_tokens += targets.numel()
        return {"loss": loss_sum / max(1, num_tokens)}, num_tokens


class ShakespeareGPT(TextGPT):
    """It learns 38 plays."""

    def __init__(self, *, batch_size: int = 16, num_validation: int = 256) -> None:
        super().__init__(shakespeare_text(), batch_size=batch_size, num_validation=num_validation)


class PythonGPT(TextGPT):
    """It learns the modules of a Python package."""

    def __init__(self, *, batch_size: int = 16, num_validation: int = 256) -> None:
        super().__init__(python_code(), batch_size=batch_size, num_validation=num_validation)


class MnistDigits(Task):
    """The CNN with BatchNorm of examples/mnist_cnn.py: 64 digits a step."""

    def __init__(self, *, batch_size: int = 64, num_validation: int = 1000) -> None:
        self.batch_size, self.num_validation = batch_size, num_validation
        training, held_out = mnist_cnn.split_digits()
        self._images, self._labels = training.tensors
        self._held_out = held_out.tensors

    def model(self) -> nn.Module:
        return mnist_cnn.MnistCNN()

    def optimizer(self, parameters: Iterable[nn.Parameter], learning_rate: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=0.05, fused=True)

    def draw(self, num_samples: int) -> Batch:
        chosen = torch.randint(len(self._labels), (num_samples,))
        device = sl.world().device
        return mnist_cnn.shifted(self._images[chosen]).to(device), self._labels[chosen].to(device)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, rank: int, num_ranks: int) -> tuple[dict[str, float], int]:
        device = sl.world().device
        images, labels = (part[rank : self.num_validation : num_ranks].to(device) for part in self._held_out)
        model.eval()
        logits = model(images)
        model.train()
        num_correct = mnist_cnn.count_correct(logits, labels)
        means = {"loss": F.cross_entropy(logits, labels).item(), "accuracy": num_correct / len(labels)}
        return means, len(labels)


TASKS: dict[str, Callable[..., Task]] = {"gpt": ShakespeareGPT, "python": PythonGPT, "mnist": MnistDigits}
