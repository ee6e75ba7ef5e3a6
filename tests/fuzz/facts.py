"""What is known of a program without running it: what it asks for, by the documented rules of our class."""

from __future__ import annotations

from dataclasses import dataclass, field

from .program import (
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
    NoSync,
    OnRank,
    Program,
    Replace,
    Rewrap,
    Save,
    Statement,
    Step,
    Swap,
    ZeroGrad,
    statements_of,
)

__all__ = ["Facts", "facts_of", "kinds_in"]


@dataclass
class Facts:
    """What a program asks for."""

    decides_otherwise: bool = False
    """Torch's class and ours differ on whether some backward is reduced.

    Ours reduces each backward that runs outside of `no_sync`, unless all forwards since the last reduction ran inside.
    Torch's class reduces one, wherever it runs, for all forwards that ran outside of it before.
    """
    wraps_alone: bool = False
    """One rank wraps a module, and sends nothing by that (`init_sync=False`)."""
    contradicts_join: bool = False
    """Inside of `join`, a forward outside of `no_sync` has its backward inside of it, or the other way round."""
    steps_local: bool = False
    """An optimizer steps gradients that the last backward left to each rank, as `no_sync` asked for."""
    ends_local: set[int] = field(default_factory=set)
    """Models whose gradients are each rank's own at the end, as `no_sync` asked for."""
    is_uneven: bool = False
    """Ranks run other statements, more than evaluations."""
    sends_buffers_alone: bool = False
    """One rank calls a wrapper that has buffers: torch sends them without grad mode, too."""
    backwards_bare: bool = False
    """A backward goes through `.module`."""
    backwards_alone: bool = False
    """The same on one rank only."""
    torch_errs: bool = False
    """Torch's class may be wrong without a word.

    In `join`, where a rank has had no input, it takes what no rank uses as used. A wrapper that has had a forward
    without a backward reduces parameters that it shares with another one in the backward of that one; and one with
    a static graph counts the gradients of that one as its own.
    """
    sends_buffers_after_join: bool = False
    """A wrapper that has buffers is called after its `join`: torch's class stays inside, and sends the last rank's."""
    compiles: bool = False
    """Compiled autograd runs a backward, and adds up in another order."""
    interrupts_heads: bool = False
    """Between the backwards of two heads something else happens that begins a step, or needs its gradients."""
    ends_between_heads: bool = False
    """The program ends before the backward of the second head, so no class has averaged the gradients."""
    swaps_in_graph: bool = False
    """Parameters are swapped while a graph refers to them: torch refuses it."""
    refuses_expanded: bool = False
    """A module with an expanded buffer that has to be sent is wrapped.

    Ours then raises on every rank, at once. Torch's class raises where the buffer is first written, if it is.
    """
    sends_lazy: bool = False
    """A module with other buffers makes one in a forward, with a size of its own on each rank, and buffers are sent.

    A module without other ones sends it when it is wrapped anew. Ours then raises. Torch's class sends the buffer, too.
    Over Gloo it raises if rank 0 has more; if it has less, the end of the buffer on other ranks stays what it was.
    """
    drifts_unseen: bool = False
    """Parameters differ between ranks, as the program wants it, and no look at the replicas is due after that."""
    has_one_process_meaning: bool = True
    """One process with the batches of both ranks is to end the same."""


@dataclass
class _State:
    """Of an abstract run."""

    off: set[int] = field(default_factory=set)
    """Wrappers whose flag is off, as it is inside of their `no_sync`."""
    losses: dict[str, list[int]] = field(default_factory=dict)
    """The wrappers that a loss went through."""
    expecting: set[int] = field(default_factory=set)
    """Wrappers of which torch's class reduces the next backward."""
    bare: set[str] = field(default_factory=set)
    """Losses of forwards through `.module`."""
    announced: dict[int, bool] = field(default_factory=dict)
    """Of wrappers that had a forward since our class reduced last: whether one ran outside of their `no_sync`."""
    graphs: set[str] = field(default_factory=set)
    """Losses whose graphs no backward has freed."""
    heads: dict[str, str] = field(default_factory=dict)
    """The head that a loss is of, where it is of one."""
    left: dict[int, set[str]] = field(default_factory=dict)
    """Of wrappers after the backward of one head: the other one."""
    local: set[int] = field(default_factory=set)
    """Models whose gradients are each rank's own."""
    evaluating: set[int] = field(default_factory=set)
    """Models in eval mode."""
    frozen: set[int] = field(default_factory=set)
    """Wrappers whose modules are frozen."""
    num_reduced: dict[int, int] = field(default_factory=dict)
    """By wrapper: the number of its reductions."""
    drifted_at: dict[int, int] = field(default_factory=dict)
    """By wrapper whose replicas differ: the number of its reductions before they did."""
    has_joined: set[int] = field(default_factory=set)
    """Wrappers after their `join`."""
    lonely: bool = False
    """Inside of what one rank runs."""
    joined: bool = False
    """Inside of a join."""


def kinds_in(layers: tuple[Layer, ...]) -> set[str]:
    """The kinds of all layers, also of inner ones."""
    found: set[str] = set()
    for layer in layers:
        found |= {layer.kind} | kinds_in(layer.inner)
    return found


class _Walk:
    """Through what some ranks run: all of it, as if one process ran it."""

    def __init__(self, program: Program, ranks: tuple[int, ...]) -> None:
        self.program = program
        self.ranks = ranks
        self.facts = Facts()
        self.state = _State()
        self.kinds = [kinds_in(model.layers) for model in program.models]
        for number, model in enumerate(program.models):
            if model.encoder_of is not None:
                self.kinds[number] |= self.kinds[model.encoder_of]
        for wrapper in program.wrappers:
            options, model = dict(wrapper.options), program.models[wrapper.model]
            self.facts.refuses_expanded |= (
                "expanded" in kinds_in(model.layers)
                and model.around is None
                and options.get("broadcast_buffers", True)
            )
            kinds = kinds_in(model.layers)
            self.facts.sends_lazy |= (
                "lazy" in kinds
                and bool(kinds & {"batch_norm", "scaled", "expanded", "ignored"})
                and options.get("broadcast_buffers", True)
            )
            if kinds & {"scaled", "bank"} and not options.get("broadcast_buffers", True):
                self.facts.has_one_process_meaning = False  # each rank keeps its own

    def model_of(self, wrapper: int) -> int:
        return self.program.wrappers[wrapper].model

    def related(self, wrapper: int) -> set[int]:
        """Models that have parameters of this wrapper's."""
        model = self.model_of(wrapper)
        roots = {self.root(model)}
        return {m for m in range(len(self.program.models)) if m == model or self.root(m) in roots}

    def with_inner(self, wrappers: list[int]) -> list[int]:
        """Wrappers, and those that are layers of their models."""
        inner = [self.program.models[self.model_of(wrapper)].around for wrapper in wrappers]
        return [*wrappers, *(wrapper for wrapper in inner if wrapper is not None)]

    def inside(self, wrapper: int) -> set[int]:
        """The model of a wrapper, and models whose wrappers are layers of it."""
        return {self.model_of(w) for w in self.with_inner([wrapper])}

    def root(self, model: int) -> int:
        encoder = self.program.models[model].encoder_of
        return model if encoder is None else self.root(encoder)

    def synchronizes(self, wrapper: int) -> bool:
        return wrapper not in self.state.off

    def drift(self, wrapper: int) -> None:
        """Note that the replicas of a wrapper differ from now on."""
        self.state.drifted_at.setdefault(wrapper, self.state.num_reduced.get(wrapper, 0))
        self.facts.has_one_process_meaning = False

    def end(self, wrapper: int) -> None:
        """Note whether a look at the replicas was due while they differed: in the reductions 1, 2, 4, 8, ..."""
        num = self.state.num_reduced.pop(wrapper, 0)
        drifted_at = self.state.drifted_at.pop(wrapper, None)
        if drifted_at is not None:
            is_due = any(number & (number - 1) == 0 for number in range(drifted_at + 1, num + 1))
            self.facts.drifts_unseen |= not is_due

    def walk(self, body: tuple[Statement, ...]) -> None:
        for statement in body:
            self.visit(statement)

    def visit(self, s: Statement) -> None:
        state, facts = self.state, self.facts
        match s:
            case Forward():
                self.forward(s)
            case Backward():
                self.backward(s)
            case Drop():
                state.losses.pop(s.loss, None)
                state.graphs.discard(s.loss)
            case Swap():
                facts.swaps_in_graph |= bool(state.graphs or state.left)
            case Clip():
                facts.interrupts_heads |= s.wrapper in state.left
                facts.is_uneven |= state.lonely
                if state.local & (self.related(s.wrapper) | self.inside(s.wrapper)):
                    facts.has_one_process_meaning = False  # by the norm of each rank's own
            case Average():
                facts.interrupts_heads |= s.wrapper in state.left
                state.local -= self.inside(s.wrapper)
                facts.is_uneven |= state.lonely
            case ZeroGrad():
                facts.interrupts_heads |= s.wrapper in state.left
                state.local -= self.inside(s.wrapper)
                facts.is_uneven |= state.lonely
            case Step():
                facts.interrupts_heads |= bool(state.left)
                models = self.program.optimizers[s.optimizer].models
                numbers = [n for n, w in enumerate(self.program.wrappers) if w.model in models]
                inside = {model for number in numbers for model in self.inside(number)}
                facts.steps_local |= bool(state.local & inside)
                facts.is_uneven |= state.lonely
            case Flag():
                (state.off.discard if s.on else state.off.add)(s.wrapper)
                facts.is_uneven |= state.lonely
            case Mode():
                inside = self.inside(s.wrapper)
                state.evaluating = (
                    state.evaluating - self.related(s.wrapper) - inside
                    if s.train
                    else state.evaluating | inside
                )
            case Freeze():
                frozen = set(self.with_inner([s.wrapper]))
                state.frozen = state.frozen | frozen if s.on else state.frozen - frozen
                facts.is_uneven |= state.lonely
            case Rewrap():
                self.end(s.wrapper)
                facts.is_uneven |= state.lonely
                wrapper = self.program.wrappers[s.wrapper]
                vouches = ("init_sync", False) in wrapper.options
                facts.wraps_alone |= state.lonely and vouches
                is_sent = dict(wrapper.options).get("broadcast_buffers", True)
                facts.sends_lazy |= "lazy" in self.kinds[wrapper.model] and is_sent
            case Save():
                pass
            case Replace():
                facts.is_uneven |= state.lonely
                for number, wrapper in enumerate(self.program.wrappers):
                    if wrapper.model == s.model and not s.is_equal:
                        self.drift(number)
            case NoSync():
                was_off = s.wrapper in state.off
                state.off.add(s.wrapper)
                self.walk(s.body)
                (state.off.add if was_off else state.off.discard)(s.wrapper)
            case Join():
                if dict(self.program.wrappers[s.wrapper].options).get("find_unused_parameters"):
                    parts = statements_of(s.body)
                    facts.torch_errs |= any(isinstance(part, Loop) and 0 in part.counts for part in parts)
                before_joined, state.joined = state.joined, True
                self.walk(s.body)
                state.joined = before_joined
                state.has_joined.add(s.wrapper)
            case OnRank() if s.rank not in self.ranks:
                pass
            case OnRank():
                before_lonely, state.lonely = state.lonely, True
                modes = set(state.evaluating)
                self.walk(s.body)
                facts.is_uneven |= modes != state.evaluating
                state.lonely = before_lonely
            case Loop():
                if s.counts[0] != s.counts[1]:
                    facts.is_uneven = True
                for _ in range(max(s.counts[rank] for rank in self.ranks)):
                    self.walk(s.body)
            case _:
                facts.is_uneven |= state.lonely

    def backward(self, s: Backward) -> None:
        state, facts = self.state, self.facts
        facts.is_uneven |= state.lonely
        facts.compiles |= s.compiled
        if s.create_graph:
            state.graphs.add("of a gradient")
        elif not s.retain:
            state.graphs.difference_update(s.losses)
        if state.bare.intersection(s.losses):
            facts.backwards_bare = True
            facts.backwards_alone |= state.lonely
        reached = {wrapper for loss in s.losses for wrapper in state.losses.get(loss, [])}
        related = {model for wrapper in reached for model in self.related(wrapper)}
        facts.torch_errs |= any(self.model_of(w) in related for w in state.expecting - reached)
        facts.torch_errs |= len(related) > 1 and any(
            dict(wrapper.options).get("static_graph") and wrapper.model in related
            for wrapper in self.program.wrappers
        )
        for wrapper in reached - state.frozen:
            if self.leaves_a_head(s, wrapper):
                state.local |= self.related(wrapper)
                continue
            synchronizes = self.synchronizes(wrapper) and state.announced.get(wrapper, True)
            is_otherwise = synchronizes != (wrapper in state.expecting)
            facts.decides_otherwise |= is_otherwise
            facts.contradicts_join |= state.joined and (
                is_otherwise or self.synchronizes(wrapper) != synchronizes
            )
            state.expecting.discard(wrapper)
            if synchronizes:
                state.num_reduced[wrapper] = state.num_reduced.get(wrapper, 0) + 1
                state.announced.pop(wrapper, None)
                state.local.discard(self.model_of(wrapper))  # others may have parameters of their own
            else:
                state.local |= self.related(wrapper)

    def leaves_a_head(self, s: Backward, wrapper: int) -> bool:
        """Whether a backward waits for that of the other head."""
        heads = {s.part} if s.part else {self.state.heads.get(loss, "ab") for loss in s.losses}
        left = self.state.left.pop(wrapper, {"a", "b"}) - set("".join(heads))
        if left:
            self.state.left[wrapper] = left
        return bool(left)

    def forward(self, s: Forward) -> None:
        state, facts = self.state, self.facts
        facts.interrupts_heads |= s.wrapper in state.left and not s.no_grad
        wrappers = self.with_inner([s.wrapper] if s.after is None else [s.wrapper, s.after])
        called = [wrapper for wrapper in wrappers if not (s.is_bare and wrapper == s.wrapper)]
        for wrapper in wrappers:
            kinds = self.kinds[self.model_of(wrapper)]
            is_training = self.model_of(wrapper) not in state.evaluating
            is_noisy = "dropout" in kinds and is_training
            if "act_norm" in kinds and is_training:
                self.drift(wrapper)
            counts_batches = "batch_norm" in kinds and is_training
            sends = bool(kinds & {"batch_norm", "scaled"}) and wrapper in called
            facts.sends_buffers_after_join |= sends and wrapper in state.has_joined
            if state.lonely:
                facts.sends_buffers_alone |= sends
                if counts_batches:
                    facts.has_one_process_meaning = False
            elif is_noisy or counts_batches:
                facts.has_one_process_meaning = False
        if s.autocast:
            facts.has_one_process_meaning = False  # rounded in another order
        if s.loss is not None and not s.no_grad:
            (state.bare.add if s.is_bare else state.bare.discard)(s.loss)
            state.losses[s.loss] = self.with_inner([s.wrapper]) if s.detach else wrappers
            names = {s.loss: "a", s.second: "b"} if s.kind == "heads" and s.second else {s.loss: "ab"}
            for name, head in names.items():
                state.losses[name], state.heads[name] = state.losses[s.loss], head
                state.graphs.add(name)
        if not s.no_grad:
            state.expecting |= {wrapper for wrapper in called if self.synchronizes(wrapper)}
            for wrapper in called:
                before = state.announced.get(wrapper, False)
                state.announced[wrapper] = before or self.synchronizes(wrapper)


def facts_of(program: Program) -> Facts:
    """Walk through a program."""
    walk = _Walk(program, (0, 1))
    walk.walk(program.body)
    facts = walk.facts
    for wrapper in list(walk.state.drifted_at):
        walk.end(wrapper)
    for rank in (0, 1):  # to which backward a forward belongs is each rank's own affair
        own = _Walk(program, (rank,))
        own.walk(program.body)
        facts.decides_otherwise |= own.facts.decides_otherwise
        facts.contradicts_join |= own.facts.contradicts_join
    facts.ends_local = set(walk.state.local)
    facts.ends_between_heads = bool(walk.state.left)
    if facts.is_uneven or facts.steps_local:
        facts.has_one_process_meaning = False
    return facts
