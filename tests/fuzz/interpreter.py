"""Runs a program on this rank, under any class, and keeps what can be seen of it. Also in one process, as both."""

from __future__ import annotations

import contextlib
import io
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import modules
from .program import Program
from .text import text_of

__all__ = ["Outcome", "alone", "on_rank"]

WIDTH = 4
_INSIDE = ".module."
"""In the names of what belongs to a wrapper inside of a module. It is kept as its own model's."""


@dataclass
class Outcome:
    """What can be seen of one run on one rank. Tensors by name."""

    error: str | None = None
    """The type and the text of the exception that ended it."""
    kinds: tuple[str, ...] = ()
    """The type of that exception, and its base classes."""
    line: str = ""
    """The program's line that raised it."""
    was_alone: bool = False
    """It ended in good order, while the other rank still waited for it."""
    seconds: float = 0.0
    """How long it took."""
    seen: list[float] = field(default_factory=list)
    """Losses and other numbers."""
    parameters: dict[str, Tensor] = field(default_factory=dict)
    """At the end, and also before a module is wrapped again, which makes those of all ranks equal."""
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    has_warned: bool = False
    """A look at the replicas has warned that they differ."""


class Alone(nn.Module):
    """In place of a wrapper, where one process has the batches of both ranks."""

    def __init__(self, module: nn.Module, process_group: object = None, **options: object) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Any:
        return self.module(x)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    join = no_sync


class _Run:
    """One run. Its public names are those that programs use."""

    def __init__(
        self,
        wrap: Any,
        rank: int | None,
        group: Any,
        plain_group: Any,
        is_torchs: bool,
    ) -> None:
        self.rank = rank
        self.is_torchs = is_torchs
        self.outcome = Outcome()
        self.group, self.plain_group, self.wrap = group, plain_group, wrap
        self._drawn: Counter[int] = Counter()
        self._wrapped: Counter[nn.Module] = Counter()
        self._sizes = (0, 0)

    def names(self) -> dict[str, Any]:
        own = (
            "batch",
            "loss",
            "losses",
            "part",
            "hooked",
            "compiled",
            "ignoring",
            "swap",
            "penalty",
            "seen",
            "total",
            "switch",
            "through_bytes",
            "distinct",
            "rank",
            "group",
        )
        return {
            "__builtins__": __builtins__,
            "torch": torch,
            "nn": nn,
            "DDP": self.wrapped,
            **{name: getattr(modules, name) for name in modules.__all__},
            **{name: getattr(self, name) for name in own},
        }

    def wrapped(self, module: nn.Module, **options: Any) -> nn.Module:
        if times := self._wrapped[module]:
            number = list(self._wrapped).index(module)
            for name, parameter in module.named_parameters():
                key = f"{name} of module {number} before it is wrapped again ({times})"
                self.outcome.parameters[key] = parameter.detach().clone()
        self._wrapped[module] += 1
        return self.wrap(module, **options)

    def ignoring(self, module: nn.Module) -> nn.Module:
        """Let a wrapper of this module ignore what belongs to wrappers inside of it, and expanded buffers."""
        parameters = module.named_parameters(remove_duplicate=False)  # a tied one has several names
        names = [name for name, _ in parameters if _INSIDE in name]
        names += [n for n, t in module.named_buffers() if _INSIDE in n or (0 in t.stride() and t.numel() > 1)]
        if self.rank is not None:
            self.wrap._set_params_and_buffers_to_ignore_for_model(module, names)
        return module

    def batch(self, seed: int, sizes: tuple[int, int]) -> Tensor:
        """This rank's inputs, others in each call; in one process those of both ranks."""
        self._sizes = sizes
        self._drawn[seed] += 1
        ranks = (0, 1) if self.rank is None else (self.rank,)
        parts = []
        for rank in ranks:
            generator = torch.Generator().manual_seed(1000 * seed + 10 * self._drawn[seed] + rank)
            drawn = torch.randn(sizes[rank], WIDTH, generator=generator, dtype=torch.float64)
            parts.append(drawn.to(torch.get_default_dtype()))
        return torch.cat(parts)

    def loss(self, output: Tensor | tuple[Tensor, ...]) -> Tensor:
        """The mean over samples; in one process the mean of both ranks' means."""
        output = modules.unpacked(output)
        output = torch.cat(output, dim=1) if isinstance(output, tuple) else output
        output = output.to(torch.get_default_dtype())
        parts = [output] if self.rank is not None else output.split(self._sizes)
        found = torch.stack([(part - 1).square().mean() for part in parts]).mean()
        self.seen(found)
        return found

    def losses(self, outputs: tuple[Tensor, ...]) -> list[Tensor]:
        """A loss of each output."""
        return [self.loss(output) for output in outputs]

    def part(self, module: nn.Module) -> list[nn.Parameter]:
        return [parameter for parameter in module.parameters() if parameter.requires_grad]

    @contextlib.contextmanager
    def hooked(self, what: str, *models: nn.Module) -> Iterator[None]:
        """Hooks that read `.grad`, or clear it, during a backward.

        Torch's class runs them with gradients of this rank, so that to clear them is no use. There `.grad` is cleared
        after the backward, which is to end the same.
        """
        seen: dict[nn.Parameter, Tensor | None] = {}

        def hook(parameter: Tensor) -> None:
            assert isinstance(parameter, nn.Parameter)
            assert parameter.grad is not None, "a hook ran without a gradient"
            seen[parameter] = None if what == "clear" else parameter.grad.detach().clone()
            if what == "clear" and not self.is_torchs:
                parameter.grad = None

        parameters = self.distinct(p for model in models for p in self.part(model))
        handles = [parameter.register_post_accumulate_grad_hook(hook) for parameter in parameters]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        for parameter, read in seen.items():
            if self.is_torchs:
                parameter.grad = None if what == "clear" else parameter.grad
            elif read is None or parameter.grad is None:
                assert parameter.grad is read, "a hook cleared .grad in vain, or .grad is lost"
            else:
                assert torch.equal(read.nan_to_num(), parameter.grad.nan_to_num()), (
                    "a hook read another .grad"
                )

    def compiled(self) -> contextlib.AbstractContextManager[object]:
        """Compiled autograd, which torch's class refuses: there an ordinary backward is to end the same.

        The graph that it has found runs as it is: to compile one takes half a minute, and no rank is to wait so long.
        """
        if self.is_torchs or self.rank is None:
            return contextlib.nullcontext()
        from torch._dynamo import compiled_autograd

        return compiled_autograd._enable(lambda graph: graph)

    def swap(self, module: nn.Module) -> None:
        """Swap parameters with copies: nothing changes, but hooks are lost. Torch's class is spared that."""
        if self.is_torchs or self.rank is None:
            return
        for parameter in self.distinct(module.parameters()):
            copy = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
            copy.grad = parameter.grad
            torch.utils.swap_tensors(parameter, copy)

    def penalty(self, model: Callable[[Tensor], Any], x: Tensor) -> Tensor:
        """The loss of the gradient of the output with respect to the input."""
        x = x.detach().requires_grad_()
        output = modules.unpacked(model(x))
        output = torch.cat(output, dim=1) if isinstance(output, tuple) else output
        (gradient,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
        return self.loss(gradient)

    def seen(self, number: Tensor) -> None:
        self.outcome.seen.append(number.item())

    def total(self, module: nn.Module) -> Tensor:
        """The program's own collective: the sum of all parameters of all ranks."""
        found = sum(p.detach().sum() for p in module.parameters())
        assert isinstance(found, Tensor)
        if self.rank is not None:
            dist.all_reduce(found, group=self.plain_group)
            found /= 2
        return found

    def average(self, module: nn.Module) -> None:
        """The program's own averaging of gradients."""
        for parameter in self.distinct(module.parameters()):
            if self.rank is not None and parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=self.plain_group)
                parameter.grad /= 2

    def switch(self, module: nn.Module, to: int) -> None:
        for part in module.modules():
            if isinstance(part, modules.Branch):
                part.to = to

    def through_bytes(self, state: Any) -> Any:
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        return torch.load(file)

    def distinct(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        return list({id(p): p for p in parameters}.values())

    def keep(self, names: dict[str, Any], program: Program) -> None:
        """What the models hold at the end."""
        for number in range(len(program.models)):
            model = names.get(f"m{number}")
            if model is None:
                continue
            for name, parameter in model.named_parameters():
                if _INSIDE in name:
                    continue
                self.outcome.parameters[f"m{number}.{name}"] = parameter.detach().clone()
                gradient = parameter.grad
                self.outcome.gradients[f"m{number}.{name}"] = (
                    None if gradient is None else gradient.detach().clone()
                )
            for name, buffer in model.named_buffers():
                self.outcome.buffers[f"m{number}.{name}"] = buffer.detach().clone()


class Ended:
    """A run that has ended: its outcome, and what it still holds (wrappers, say) until `free`."""

    def __init__(self, outcome: Outcome, names: dict[str, Any]) -> None:
        self.outcome = outcome
        self._names = names

    def free(self) -> None:
        """Let everything go."""
        self._names.clear()


def on_rank(
    program: Program,
    wrap: Callable[..., nn.Module],
    *,
    rank: int | None,
    group: Any = None,
    plain_group: Any = None,
    is_torchs: bool = False,
) -> Ended:
    """Run a program on this rank. `plain_group` is for what the program itself sends."""
    run = _Run(wrap, rank, group, plain_group, is_torchs)
    text = text_of(program)
    names = run.names()
    before = torch.get_default_dtype()
    try:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("ignore")
            warnings.filterwarnings("always", "(.|\n)*expected equal parameters", RuntimeWarning)
            exec(compile(text, "<program>", "exec"), names)
    except Exception as error:
        run.outcome.error = f"{type(error).__name__}: {error}"
        run.outcome.kinds = tuple(kind.__name__ for kind in type(error).__mro__)
        run.outcome.line = _line_of(error, text)
        traceback.clear_frames(error.__traceback__)
    finally:
        run.outcome.has_warned = bool(heard)
        run.keep(names, program)
        torch.set_default_dtype(before)
    return Ended(run.outcome, names)


def alone(program: Program) -> Outcome:
    """Run a program in one process, which has the batches of both ranks."""
    ended = on_rank(program, Alone, rank=None)
    ended.free()
    return ended.outcome


def _line_of(error: BaseException, text: str) -> str:
    numbers = [
        frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<program>"
    ]
    if not numbers or numbers[0] is None:
        return ""
    return f"{numbers[0]}: {text.splitlines()[numbers[0] - 1].strip()}"
