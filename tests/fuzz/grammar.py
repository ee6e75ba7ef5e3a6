"""Draws a program from a seed: mostly what real training loops do, sometimes with a slip, sometimes anything."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

from .facts import kinds_in
from .program import (
    TRANSFORMS,
    AllReduce,
    Average,
    Backward,
    Clip,
    Drop,
    Flag,
    Forward,
    Freeze,
    Join,
    Layer,
    Loop,
    Mode,
    Model,
    NoSync,
    OnRank,
    Optimizer,
    Program,
    Prune,
    Reload,
    ReloadOptimizer,
    Replace,
    Rewrap,
    Save,
    Statement,
    Step,
    Swap,
    Switch,
    Wrapper,
    ZeroGrad,
    rewritten,
    statements_of,
    with_body,
)

__all__ = ["draw"]

_NOT_TRANSFORMED = {"batch_norm", "dropout", "checkpoint", "reentrant", "vmap"}
"""Kinds of layers that torch.func refuses inside of some transform."""


def without_swaps(body: tuple[Statement, ...]) -> tuple[Statement, ...]:
    """With an empty loop in the place of each swap, which TorchScript and pruning do not allow."""
    return rewritten(body, lambda s: Loop((0, 0), ()) if isinstance(s, Swap) else s)


def without_transform(s: Any) -> Statement:
    """Call a wrapper plainly."""
    return replace(s, kind="loss") if isinstance(s, Forward) and s.kind in TRANSFORMS else s  # type: ignore[no-any-return]


def draw(seed: int) -> Program:
    """The program of a seed, always the same."""
    return _Author(Random(seed), seed).program()


class _Author:
    """Writes one program."""

    def __init__(self, random: Random, seed: int) -> None:
        self.random = random
        self.seed = seed
        self.num_seeds = 0
        self.known_losses: list[str] = []
        self.noise: dict[str, float] = {}
        self.models: list[Model] = []
        self.wrappers: list[Wrapper] = []
        self.optimizers: list[Optimizer] = []

    # ------------------------------------------------------------------ choices

    def often(self, chance: float) -> bool:
        return self.random.random() < chance

    def one_of(self, **weights: float) -> str:
        return self.random.choices(list(weights), list(weights.values()))[0]

    def wrapper(self) -> int:
        return self.random.randrange(len(self.wrappers))

    def optimizer(self) -> int:
        return self.random.randrange(len(self.optimizers))

    def loss(self) -> str:
        return f"l{self.random.randrange(3)}"

    # ------------------------------------------------------------------ the program

    def program(self) -> Program:
        shape = self.one_of(single=6, heads=1, actor_critic=1, gan=1.5, pair=1)
        self.models = [replace(self.model(), has_heads=shape == "heads")]
        if shape == "actor_critic":
            self.models.append(replace(self.model(), encoder_of=0))
        elif shape in ("gan", "pair"):
            self.models.append(self.model())
        self.wrappers = [Wrapper(number, self.options(model)) for number, model in enumerate(self.models)]
        if len(self.models) == 2 and self.often(0.5):
            self.optimizers = [Optimizer(self.optimizer_kind(), (0, 1))]
        else:
            self.optimizers = [
                Optimizer(self.optimizer_kind(), (number,)) for number in range(len(self.models))
            ]
        body = self.training(shape)
        if self.often(0.2):
            body = self.with_a_slip(body)
        if self.often(0.08):
            body = (*body, *(self.anything(2) for _ in range(self.random.randint(2, 6))))
        dtype = self.one_of(float64=2, float32=1)
        body = self.extended(body)
        models, wrappers, optimizers = tuple(self.models), tuple(self.wrappers), tuple(self.optimizers)
        return Program(models, wrappers, optimizers, body, dtype, self.seed)

    def optimizer_kind(self) -> str:
        return self.one_of(sgd=1, momentum=1, adamw=1)

    def options(self, model: Model) -> tuple[tuple[str, Any], ...]:
        """Mostly those that the model needs."""
        found: list[tuple[str, Any]] = []
        kinds = kinds_in(model.layers)
        if self.often(0.9 if kinds & {"unused", "branch"} else 0.12):
            found.append(("find_unused_parameters", True))
        elif self.often(0.3 if "reentrant" in kinds else 0.1):
            found.append(("static_graph", True))
        if self.often(0.25):
            found.append(("gradient_as_bucket_view", True))
        if self.often(0.15):
            found.append(("broadcast_buffers", False))
        if self.often(0.2):
            found.append(("bucket_cap_mb", 0.0001))
        if self.often(0.05):
            found.append(("init_sync", False))
        return tuple(found)

    # ------------------------------------------------------------------ models

    def model(self) -> Model:
        self.noise = {"batch_norm": 2.0 * self.often(0.45), "dropout": 0.7 * self.often(0.15)}
        layers = [Layer("linear")]
        for _ in range(self.random.randint(1, 3)):
            layers.append(self.layer(2))
        return Model((*layers, Layer("linear")))

    def layer(self, depth: int) -> Layer:
        if depth and self.often(0.3):
            kind = self.one_of(
                twice=2, residual=2, unused=0.7, frozen=1, branch=1, checkpoint=1.5, reentrant=0.4
            )
            num_inner = 2 if kind == "branch" else self.random.randint(1, 2)
            inner = [self.layer(depth - 1) for _ in range(num_inner)]
            return Layer(kind, (Layer("linear"), *inner) if kind != "branch" else tuple(inner))
        return Layer(self.one_of(linear=3, layer_norm=1, tanh=2, tied=0.7, **self.noise))

    # ------------------------------------------------------------------ training

    def training(self, shape: str) -> tuple[Statement, ...]:
        body: list[Statement] = []
        if self.often(0.15):
            body += self.aside()
        num = self.random.randint(1, 3)
        if shape == "single" and self.often(0.06):  # torch's Join counts the collectives of plain steps only
            counts = (num, num + self.random.choice([-1, 1]))
            steps: list[Statement] = [*self._plain(0), *self.after_backward([0]), *self.zero([0])]
            body.append(Join(0, (Loop(counts, tuple(steps)),)))
            return tuple(body)
        steps = []
        for _ in range(self.random.choice([1, 1, 2])):
            if self.often(0.3):
                steps += self.aside()
            steps += self.gan_step() if shape == "gan" and self.often(0.8) else self.step()
        if self.often(0.2):
            steps += self.aside()
        counts = (num, num + self.random.choice([-1, 1])) if self.often(0.03) else (num, num)
        body.append(Loop(counts, tuple(steps)))
        if self.often(0.3):
            body += self.aside()
        if self.often(0.1):
            body += [*self.change(), Loop((2, 2), tuple(self.step()))]
        return tuple(body)

    def forward(self, wrapper: int, loss: str | None, **more: Any) -> Forward:
        self.num_seeds += 1
        if loss is not None:
            self.known_losses.append(loss)
        sizes = (3, 3) if self.often(0.8) else (self.random.randint(2, 5), self.random.randint(2, 5))
        kind = "penalty" if self.often(0.05) else "loss"
        autocast = self.often(0.05)
        return Forward(wrapper, self.num_seeds, sizes, loss, **{"kind": kind, "autocast": autocast, **more})

    def stepping(self, wrapper: int) -> int:
        """The optimizer of a wrapper's model."""
        return next(
            number
            for number, optimizer in enumerate(self.optimizers)
            if self.wrappers[wrapper].model in optimizer.models
        )

    def zero(self, wrappers: list[int]) -> list[Statement]:
        set_to_none = self.often(0.75)
        return [ZeroGrad(wrapper, set_to_none) for wrapper in wrappers]

    def after_backward(self, wrappers: list[int]) -> list[Statement]:
        body: list[Statement] = []
        if self.often(0.25):
            body += [Clip(wrapper) for wrapper in wrappers]
        optimizers = sorted({self.stepping(wrapper) for wrapper in wrappers})
        return body + [Step(number) for number in optimizers]

    def step(self) -> list[Statement]:
        """One step of one wrapper, or of all."""
        wrappers = [self.wrapper()] if self.often(0.5) else list(range(len(self.wrappers)))
        if any(len(o.models) > 1 for o in self.optimizers):
            wrappers = list(range(len(self.wrappers)))
        work = self.one_of(
            plain=5,
            accumulate=4,
            one_backward=1,
            two_forwards=0.3,
            twice=0.15,
            dropped=1,
            graph=0.2,
            heads=8.0 * self.models[0].has_heads,
        )
        body: list[Statement] = []
        for wrapper in wrappers:
            body += getattr(self, f"_{work}")(wrapper)
        zero, after = self.zero(wrappers), self.after_backward(wrappers)
        return [*zero, *body, *after] if self.often(0.7) else [*body, *after, *zero]

    def _plain(self, wrapper: int) -> list[Statement]:
        loss = self.loss()
        hook = self.random.choice(["read", "clear"]) if self.often(0.07) else None
        return [self.forward(wrapper, loss), Backward((loss,), hook=hook, compiled=self.often(0.01))]

    def _heads(self, wrapper: int) -> list[Statement]:
        """A backward of each head, or one of both, for the parameters of one after the other."""
        forward = self.forward(wrapper, "l0", kind="heads", second="l1")
        first, second = self.random.sample(["a", "b"], 2)
        if self.often(0.3):
            both = ("l0", "l1")
            body = [forward, Backward(both, retain=True, part=first), Backward(both, part=second)]
        else:
            of = {"a": ("l0",), "b": ("l1",)}
            body = [forward, Backward(of[first]), Backward(of[second])]
        if self.often(0.2):  # something else happens between the two
            body.insert(2, self.forward(wrapper, None, no_grad=True, kind="loss"))
        return [NoSync(wrapper, tuple(body)), *self._plain(wrapper)] if self.often(0.2) else body

    def _accumulate(self, wrapper: int) -> list[Statement]:
        num = self.random.randint(1, 2)
        last = self._plain(wrapper)
        micro = tuple(self._plain(wrapper))
        how = self.one_of(no_sync=3, flag=1, each=1, backward_inside=0.15, forward_inside=1)
        if how == "no_sync":
            return [Loop((num, num), (NoSync(wrapper, micro),)), *last]
        if how == "flag":
            return [Flag(wrapper, False), Loop((num, num), micro), Flag(wrapper, True), *last]
        if how == "each":
            return [Loop((num, num), micro), *last]
        forward, backward = micro
        if how == "backward_inside":
            return [forward, NoSync(wrapper, (backward,)), *last]
        return [Loop((num, num), (NoSync(wrapper, (forward,)), backward)), *last]

    def _one_backward(self, wrapper: int) -> list[Statement]:
        """Several forwards, and one backward of the sum."""
        return [self.forward(wrapper, "l0"), self.forward(wrapper, "l1"), Backward(("l0", "l1"))]

    def _two_forwards(self, wrapper: int) -> list[Statement]:
        """Several forwards, then their backwards."""
        order = self.random.sample(["l0", "l1"], 2)
        return [
            self.forward(wrapper, "l0"),
            self.forward(wrapper, "l1"),
            *(Backward((name,)) for name in order),
        ]

    def _twice(self, wrapper: int) -> list[Statement]:
        """Backward twice on one graph."""
        loss = self.loss()
        return [self.forward(wrapper, loss), Backward((loss,), retain=True), Backward((loss,))]

    def _graph(self, wrapper: int) -> list[Statement]:
        loss = self.loss()
        return [self.forward(wrapper, loss), Backward((loss,), create_graph=True)]

    def _dropped(self, wrapper: int) -> list[Statement]:
        """A forward that nobody backwards, on both ranks or on one, kept or not."""
        extra: list[Statement] = [self.forward(wrapper, self.random.choice([None, "l2"]))]
        if self.often(0.6):
            extra = [OnRank(self.random.randrange(2), tuple(extra))]
        loss = self.random.choice(["l0", "l1"])
        parts = [extra, [self.forward(wrapper, loss)], [Backward((loss,))]]
        at = self.random.randrange(3)
        return [s for part in (*parts[1 : 1 + at], parts[0], *parts[1 + at :]) for s in part]

    def gan_step(self) -> list[Statement]:
        """The discriminator on real and on generated samples, then the generator through the discriminator."""
        generator, discriminator = (0, 1)
        body = self.zero([discriminator])
        body += (
            [self.forward(discriminator, "l0"), Backward(("l0",))]
            if self.often(0.7)
            else [self.forward(discriminator, "l0")]
        )
        is_open = not isinstance(body[-1], Backward)
        body.append(self.forward(discriminator, "l1", after=generator, detach=True, kind="loss"))
        body.append(Backward(("l0", "l1") if is_open else ("l1",)))
        if self.often(0.2):
            body += [self.forward(discriminator, "l2", kind="penalty"), Backward(("l2",))]
        body += self.after_backward([discriminator])
        body += self.zero([generator])
        freezes = self.often(0.25)
        if freezes:
            body.append(Freeze(discriminator, True))
        body += [self.forward(discriminator, "l0", after=generator, kind="loss"), Backward(("l0",))]
        if freezes:
            body.append(Freeze(discriminator, False))
        return body + self.after_backward([generator])

    # ------------------------------------------------------------------ beside the training

    def aside(self) -> list[Statement]:
        """What programs do between two steps."""
        wrapper = self.wrapper()
        what = self.one_of(
            evaluate=4, save=1, reload=1, optimizer=0.5, sum=1, probe=0.25, switch=0.7, swap=0.7
        )
        if what == "evaluate":
            return self.evaluation(wrapper)
        if what == "save":
            body: tuple[Statement, ...] = (Save(wrapper),)
            return [OnRank(0, body)] if self.often(0.7) else list(body)
        if what == "reload":
            return [Reload(wrapper, bytes=self.often(0.5))]
        if what == "optimizer":
            return [ReloadOptimizer(self.optimizer())]
        if what == "sum":
            return [AllReduce(wrapper)]
        if what == "swap":
            return [Swap(self.wrappers[wrapper].model)]
        if what == "switch":
            switch = Switch(self.wrappers[wrapper].model, self.random.randrange(2))
            return [OnRank(self.random.randrange(2), (switch,))] if self.often(0.4) else [switch]
        # The gradients of one batch are looked at, and thrown away.
        body = (
            self.forward(wrapper, "l2", is_bare=self.often(0.5)),
            Backward(("l2",)),
            Clip(wrapper),
            ZeroGrad(wrapper),
        )
        return [OnRank(0, body)] if self.often(0.5) else list(body)

    def evaluation(self, wrapper: int) -> list[Statement]:
        more = {"is_bare": self.often(0.3), "no_grad": self.often(0.75), "kind": "loss"}
        body: list[Statement] = [self.forward(wrapper, None, **more)]
        if self.often(0.3):
            body = [Loop((2, 2), tuple(body))]
        if self.often(0.75):
            body = [Mode(wrapper, False), *body, Mode(wrapper, True)]
        if self.often(0.5):
            return [OnRank(0 if self.often(0.8) else 1, tuple(body))]
        return body

    def change(self) -> list[Statement]:
        """What programs do between two phases."""
        wrapper = self.wrapper()
        what = self.one_of(rewrap=2, freeze=0.5, mode=1)
        if what == "rewrap":
            return [Rewrap(wrapper)]
        if what == "freeze":
            return [Freeze(wrapper, True), Freeze(wrapper, False)]
        return [Mode(wrapper, False)]

    # ------------------------------------------------------------------ drawn last

    def extended(self, body: tuple[Statement, ...]) -> tuple[Statement, ...]:
        """With what is drawn last, so that the rest of a seed's program stays what it is without."""
        if self.often(0.05):
            inner = Layer(self.one_of(linear=1, layer_norm=1, tanh=1, tied=1))
            self.add_layer(Layer(self.random.choice(TRANSFORMS), (Layer("linear"), inner)))
        if self.often(0.07):
            self.add_layer(Layer("scaled"))
        if self.often(0.03):
            self.add_layer(Layer(self.one_of(expanded=2, ignored=3)))
        has_join = any(isinstance(s, Join) for s in statements_of(body))
        if self.often(0.08) and not has_join:
            body = self.nested(body)
        if self.often(0.07) and not has_join:
            how = self.random.choice(TRANSFORMS)
            body = rewritten(body, lambda s: self.by_transform(s, how))
        if self.often(0.1):
            number = self.random.randrange(len(self.models))
            inner = [self.wrappers[model.around].model for model in self.models if model.around is not None]
            if not self.models[number].has_heads and number not in inner:
                how = self.random.choice(["opaque", "slots", "closure", "leaf", "view"])
                self.models[number] = replace(self.models[number], returns=how)
                body = rewritten(body, lambda s: without_transform(s))
        if self.often(0.05):
            self.add_layer(Layer("lazy"))
        if self.often(0.03) and ("broadcast_buffers", False) in self.wrappers[0].options:
            self.add_layer(Layer("bank"), 0)
        if self.often(0.04):
            self.add_layer(Layer("scripted"))
            body = without_swaps(body)
        if self.often(0.05):
            at = self.random.randrange(len(body) + 1)
            body = without_swaps((*body[:at], Prune(self.random.randrange(len(self.models))), *body[at:]))
        if self.often(0.05) and not has_join:
            body = self.averaging(body)
        if self.often(0.03) and not has_join:
            self.add_layer(Layer("act_norm"))
            body = rewritten(body, without_transform)
        # A former wrapper of a module that has changed since, whose output is alive, would take part, too.
        if self.often(0.04) and not has_join and not any(isinstance(s, Rewrap) for s in statements_of(body)):
            at = self.random.randrange(len(body) + 1)
            number = self.random.randrange(len(self.models))
            replaced = Replace(number, self.random.randrange(100), self.often(0.5))
            body = without_swaps((*body[:at], replaced, *body[at:], *self.two_steps()))
        kinds = {getattr(s, "kind", type(s).__name__) for s in statements_of(body)}
        kinds |= set[str]().union(*(kinds_in(model.layers) for model in self.models))
        # Compiled autograd fails in backwards of gradients, and refers to parameters; also without a wrapper.
        if kinds & {"penalty", "grad", "jacobian", "Swap"}:
            body = rewritten(body, lambda s: replace(s, compiled=False) if isinstance(s, Backward) else s)
        return body

    def averaging(self, body: tuple[Statement, ...]) -> tuple[Statement, ...]:
        """Append steps of a loop that averages by itself; only the forward is in `no_sync`, as torch allows."""
        wrapper = self.stepped()
        forward = NoSync(wrapper, (self.forward(wrapper, "l0"),))
        step = (ZeroGrad(wrapper), forward, Backward(("l0",)), Average(wrapper), Step(self.stepping(wrapper)))
        return (*body, Loop((2, 2), step))

    def two_steps(self) -> list[Statement]:
        wrapper = self.stepped()
        return [Loop((2, 2), (ZeroGrad(wrapper), *self._plain(wrapper), Step(self.stepping(wrapper))))]

    def stepped(self) -> int:
        """A wrapper with an optimizer."""
        models = {model for optimizer in self.optimizers for model in optimizer.models}
        return next(number for number, one in enumerate(self.wrappers) if one.model in models)

    def add_layer(self, layer: Layer, number: int | None = None) -> None:
        """Put a layer into some model, not as the first or the last one."""
        number = self.random.randrange(len(self.models)) if number is None else number
        layers = self.models[number].layers
        at = self.random.randrange(1, len(layers))
        self.models[number] = replace(self.models[number], layers=(*layers[:at], layer, *layers[at:]))

    def nested(self, body: tuple[Statement, ...]) -> tuple[Statement, ...]:
        """Put a wrapper into some model, and into some programs its `no_sync` around that of the outer one."""
        outer, inner = self.random.randrange(len(self.models)), len(self.models)
        self.models[outer] = replace(self.models[outer], around=inner)
        self.models.append(self.model())
        self.wrappers.append(Wrapper(inner, self.options(self.models[inner])))
        if self.often(0.5):
            return body

        def change(s: Statement) -> Statement:
            return NoSync(inner, (s,)) if isinstance(s, NoSync) and s.wrapper == outer else s

        return rewritten(body, change)

    def by_transform(self, s: Statement, how: str) -> Statement:
        """Call a wrapper, in most of its forwards, by a transform of torch.func."""
        if not isinstance(s, Forward) or s.kind != "loss" or s.after is not None:
            return s
        model = self.models[self.wrappers[s.wrapper].model]
        inner = () if model.around is None else self.models[model.around].layers
        is_fit = not model.has_heads and not kinds_in(model.layers + inner) & _NOT_TRANSFORMED
        return replace(s, kind=how) if is_fit and self.often(0.7) else s

    # ------------------------------------------------------------------ slips, and anything

    def with_a_slip(self, body: tuple[Statement, ...]) -> tuple[Statement, ...]:
        """One statement, somewhere, is left out, doubled, moved, put on one rank, or put under no_sync."""
        at = self.random.randrange(len(body))
        inner = getattr(body[at], "body", ())
        if inner and self.often(0.85):
            return (*body[:at], with_body(body[at], self.with_a_slip(inner)), *body[at + 1 :])
        before, statement, after = body[:at], body[at], body[at + 1 :]
        if isinstance(statement, Join):
            return body
        slip = self.one_of(leave_out=2, double=1, swap=1, on_rank=1, no_sync=1, insert=2)
        if slip == "leave_out":
            return (*before, *after)
        if slip == "double":
            return (*before, statement, statement, *after)
        if slip == "swap":
            return (*before, *after[:1], statement, *after[1:])
        if slip == "on_rank":
            return (*before, OnRank(self.random.randrange(2), (statement,)), *after)
        if slip == "no_sync":
            return (*before, NoSync(self.wrapper(), (statement,)), *after)
        return (*before, self.anything(1), *body[at:])

    def anything(self, depth: int) -> Statement:
        wrapper = self.wrapper()
        kinds = {
            "forward": 4.0,
            "backward": 3.0,
            "zero": 1.0,
            "step": 1.5,
            "clip": 0.5,
            "mode": 0.5,
            "flag": 0.3,
        }
        kinds |= {"aside": 2.0, "change": 0.3, "drop": 0.3}
        if depth:
            kinds |= {"no_sync": 0.7, "on_rank": 0.5, "loop": 0.5}
        what = self.one_of(**kinds)
        if what == "forward":
            more = {"is_bare": self.often(0.2), "no_grad": self.often(0.15)}
            return self.forward(wrapper, self.loss(), **more)
        if what == "backward":
            loss = self.random.choice(self.known_losses or ["l0"])
            return Backward((loss,), retain=self.often(0.3), create_graph=self.often(0.05))
        if what == "zero":
            return ZeroGrad(wrapper, self.often(0.7))
        if what == "step":
            return Step(self.optimizer())
        if what == "clip":
            return Clip(wrapper)
        if what == "mode":
            return Mode(wrapper, self.often(0.5))
        if what == "flag":
            return Flag(wrapper, self.often(0.7))
        if what == "drop":
            return Drop(self.random.choice(self.known_losses or ["l0"]))
        if what in ("aside", "change"):
            return self.random.choice(self.aside() if what == "aside" else self.change())
        body = tuple(self.anything(depth - 1) for _ in range(self.random.randint(1, 3)))
        if what == "no_sync":
            return NoSync(wrapper, body)
        if what == "on_rank":
            return OnRank(self.random.randrange(2), body)
        return Loop((2, 2), body)
