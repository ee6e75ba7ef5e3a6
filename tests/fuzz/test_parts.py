"""The parts of the fuzzer that need no ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from .facts import Facts, facts_of
from .grammar import draw
from .interpreter import Alone, Outcome, _Run, alone
from .oracle import judge
from .program import (
    TRANSFORMS,
    Backward,
    Flag,
    Forward,
    Layer,
    Loop,
    Model,
    NoSync,
    OnRank,
    Optimizer,
    Program,
    Replace,
    Rewrap,
    Statement,
    Step,
    Swap,
    Wrapper,
    ZeroGrad,
    statements_of,
)
from .shrink import shrink, smaller, weight
from .text import text_of

LINEAR = Model((Layer("linear"),))
HEADS = Model((Layer("linear"), Layer("linear")), has_heads=True)
PLAIN_STEP = (Forward(0, 1, loss="l0"), Backward(("l0",)), Step(0), ZeroGrad(0))


def program_of(*body: Statement, model: Model = LINEAR) -> Program:
    return Program((model,), (Wrapper(0),), (Optimizer("sgd", (0,)),), body)


def outcome(**values: float) -> Outcome:
    weights = {f"m0.{name}": torch.tensor([value], dtype=torch.float64) for name, value in values.items()}
    return Outcome(parameters=weights, gradients=dict.fromkeys(weights))


# ---------------------------------------------------------------------- grammar and text


def test_a_seed_is_always_the_same_program_and_every_program_is_python() -> None:
    kinds = set()
    for seed in range(400):
        program = draw(seed)
        assert program == draw(seed)
        compile(text_of(program), "<program>", "exec")
        kinds |= {type(statement).__name__ for statement in statements_of(program.body)}
        kinds |= {layer.kind for model in program.models for layer in model.layers}
        kinds |= {name for wrapper in program.wrappers for name, _ in wrapper.options}
        kinds |= {f"{s.kind} of a wrapper" for s in statements_of(program.body) if isinstance(s, Forward)}
        kinds |= {model.returns for model in program.models}
        kinds |= {"nested" for model in program.models if model.around is not None}
    rare = {"Drop", "Freeze", "Join", "Rewrap", "ReloadOptimizer", "Flag", "Swap"}
    layers = {
        "batch_norm",
        "dropout",
        "tied",
        "twice",
        "unused",
        "frozen",
        "branch",
        "checkpoint",
        "reentrant",
    }
    options = {"find_unused_parameters", "static_graph", "gradient_as_bucket_view", "broadcast_buffers"}
    last = {*TRANSFORMS, *(f"{how} of a wrapper" for how in TRANSFORMS)}
    last |= {
        "scaled",
        "expanded",
        "nested",
        "ignored",
        "lazy",
        "bank",
        "scripted",
        "Prune",
        "Average",
        "act_norm",
        "Replace",
    }
    last |= {"opaque", "slots", "closure", "leaf", "view"}
    assert kinds >= rare | layers | options | last


def test_most_programs_have_a_meaning_in_one_process() -> None:
    """So that torch's class is not the only witness."""
    meant = [program for program in map(draw, range(300)) if facts_of(program).has_one_process_meaning]
    assert len(meant) > 100
    assert [alone(program).error for program in meant[:20]].count(None) > 14


def test_a_program_reads_like_a_training_script() -> None:
    program = program_of(Loop((2, 3), PLAIN_STEP), OnRank(0, (Forward(0, 2, no_grad=True),)))
    assert text_of(program) == (
        "torch.set_default_dtype(torch.float64)\n"
        "torch.manual_seed(rank or 0)\n"
        "m0 = nn.Sequential(nn.Linear(4, 4))\n"
        "w0 = DDP(m0, process_group=group)\n"
        "o0 = torch.optim.SGD(m0.parameters(), lr=0.1)\n"
        "for _ in range((2, 3)[rank]):\n"
        "    l0 = loss(w0(batch(1, (3, 3))))\n"
        "    l0.backward()\n"
        "    o0.step()\n"
        "    w0.zero_grad()\n"
        "if rank == 0:\n"
        "    with torch.no_grad():\n"
        "        loss(w0(batch(2, (3, 3))))\n"
    )


# ---------------------------------------------------------------------- facts


def test_what_no_sync_asks_for() -> None:
    forward, backward = PLAIN_STEP[:2]
    assert not facts_of(program_of(NoSync(0, (forward, backward)), *PLAIN_STEP)).steps_local
    assert facts_of(program_of(NoSync(0, (forward, backward)), Step(0))).steps_local
    assert facts_of(program_of(NoSync(0, (forward, backward)))).ends_local == {0}
    in_forward = facts_of(program_of(NoSync(0, (forward,)), backward))  # local, as with torch's class
    assert (in_forward.decides_otherwise, in_forward.ends_local) == (False, {0})
    assert not facts_of(program_of(Forward(0, 9), NoSync(0, (forward,)), backward)).decides_otherwise
    assert facts_of(program_of(forward, NoSync(0, (backward,)))).decides_otherwise
    assert not facts_of(program_of(NoSync(0, (forward, backward)), ZeroGrad(0), Step(0))).steps_local
    assert facts_of(program_of(forward, forward, backward, backward)).decides_otherwise
    assert not facts_of(program_of(forward, forward, backward)).decides_otherwise
    switched_on = NoSync(0, (Flag(0, True), forward, backward))
    assert facts_of(program_of(switched_on)).ends_local == set()
    assert facts_of(program_of(Flag(0, False), switched_on, forward, backward)).ends_local == {0}
    dropped = Forward(0, 9)  # torch's class then reduces the backward inside of no_sync
    assert facts_of(program_of(dropped, NoSync(0, (forward, backward)), *PLAIN_STEP)).decides_otherwise
    in_no_sync = NoSync(0, (forward, backward))  # on rank 1 torch's class reduces it, for the dropped one
    assert facts_of(program_of(OnRank(1, (dropped,)), OnRank(0, PLAIN_STEP), in_no_sync)).decides_otherwise


def test_the_backwards_of_two_heads_are_one_step() -> None:
    heads, of_a, of_b = (
        Forward(0, 1, loss="l0", kind="heads", second="l1"),
        Backward(("l0",)),
        Backward(("l1",)),
    )
    whole = facts_of(program_of(heads, of_a, of_b, Step(0), model=HEADS))
    assert (whole.decides_otherwise, whole.steps_local, whole.interrupts_heads) == (False, False, False)
    both = ("l0", "l1")
    parts = (Backward(both, retain=True, part="a"), Backward(both, part="b"))
    assert not facts_of(program_of(heads, *parts, Step(0), model=HEADS)).steps_local
    assert facts_of(program_of(heads, of_a, model=HEADS)).ends_local == {0}
    for between in (Step(0), ZeroGrad(0), Forward(0, 2)):
        assert facts_of(program_of(heads, of_a, between, of_b, model=HEADS)).interrupts_heads
    evaluation = Forward(0, 2, no_grad=True)
    assert not facts_of(program_of(heads, of_a, evaluation, of_b, model=HEADS)).interrupts_heads


def test_a_wrapper_inside_of_another_one_reduces_for_itself() -> None:
    forward, backward = PLAIN_STEP[:2]

    def nested(*body: Statement) -> Facts:
        models = (replace(LINEAR, around=1), LINEAR)
        return facts_of(Program(models, (Wrapper(0), Wrapper(1)), (Optimizer("sgd", (0,)),), body))

    assert nested(*PLAIN_STEP) == facts_of(program_of(*PLAIN_STEP))
    outer, both = NoSync(0, (forward, backward)), NoSync(1, (NoSync(0, (forward, backward)),))
    assert (nested(outer).ends_local, nested(outer).decides_otherwise) == ({0}, False)
    assert (nested(both).ends_local, nested(both).decides_otherwise) == ({0, 1}, False)
    assert nested(NoSync(1, (forward, backward)), Step(0)).steps_local
    assert not nested(NoSync(1, (forward, backward)), ZeroGrad(0), Step(0)).steps_local


def test_parameters_are_swapped_where_no_graph_refers_to_them() -> None:
    forward, backward = PLAIN_STEP[:2]
    assert facts_of(program_of(forward, Swap(0), backward)).swaps_in_graph
    assert not facts_of(program_of(*PLAIN_STEP, Swap(0), *PLAIN_STEP)).swaps_in_graph
    assert facts_of(program_of(*PLAIN_STEP, Swap(0), *PLAIN_STEP)).has_one_process_meaning


def test_which_programs_one_process_can_run() -> None:
    noisy = Model((Layer("linear"), Layer("residual", (Layer("batch_norm"),))))
    evaluation = OnRank(0, (Forward(0, 5),))
    assert facts_of(program_of(*PLAIN_STEP, evaluation)).has_one_process_meaning
    assert not facts_of(program_of(*PLAIN_STEP, model=noisy)).has_one_process_meaning
    assert not facts_of(program_of(OnRank(1, PLAIN_STEP))).has_one_process_meaning
    assert not facts_of(program_of(Loop((1, 2), PLAIN_STEP))).has_one_process_meaning


def test_replicas_that_drift_apart_are_looked_at_in_the_reductions_1_2_4_8() -> None:
    normed = Model((Layer("linear"), Layer("act_norm")))
    apart = Replace(0, 7, is_equal=False)
    assert not facts_of(program_of(*PLAIN_STEP, model=normed)).drifts_unseen
    assert facts_of(program_of(Forward(0, 2, no_grad=True), model=normed)).drifts_unseen
    assert not facts_of(program_of(apart, *PLAIN_STEP)).drifts_unseen
    assert facts_of(program_of(*2 * PLAIN_STEP, apart, *PLAIN_STEP)).drifts_unseen
    assert not facts_of(program_of(*2 * PLAIN_STEP, apart, *2 * PLAIN_STEP)).drifts_unseen
    assert facts_of(program_of(*3 * PLAIN_STEP, Rewrap(0), *2 * PLAIN_STEP, apart, *PLAIN_STEP)).drifts_unseen
    assert not facts_of(program_of(*PLAIN_STEP, replace(apart, is_equal=True))).drifts_unseen


# ---------------------------------------------------------------------- oracle


def judged(torch_ends: tuple[Outcome, Outcome], ours: tuple[Outcome, Outcome], *body: Statement) -> list[str]:
    reports = tuple({"torch": t, "gloo": o} for t, o in zip(torch_ends, ours, strict=True))
    verdict = judge(program_of(*(body or PLAIN_STEP)), reports, None)  # type: ignore[arg-type]
    return [fault.kind for fault in verdict.faults]


def test_where_torch_is_right_ours_is_the_same_bit_for_bit() -> None:
    right = (outcome(w=1.0), outcome(w=1.0))
    nearly = outcome(w=1.0 + 2**-50)
    failed = Outcome(error="SynclineError: no", kinds=("SynclineError", "RuntimeError"))
    assert judged(right, right) == []
    assert judged(right, (nearly, nearly)) == ["differs from torch"]
    assert judged(right, (failed, failed)) == ["raises"]
    assert judged(right, (outcome(w=1.0), Outcome(was_alone=True))) == ["hangs"]


def test_where_torch_is_wrong_ours_is_right_or_a_named_error() -> None:
    differs = (outcome(w=1.0), outcome(w=2.0))
    named = Outcome(error="SynclineError: no", kinds=("SynclineError", "RuntimeError"))
    unnamed = Outcome(error="RuntimeError: Connection closed by peer", kinds=("RuntimeError",))
    assert judged(differs, (outcome(w=3.0), outcome(w=3.0))) == []
    assert judged(differs, (named, named)) == []
    assert judged(differs, differs) == ["silent difference"]
    warned = (replace(differs[0], has_warned=True), replace(differs[1], has_warned=True))
    assert judged(differs, warned) == []
    assert judged(differs, (warned[0], differs[1])) == ["silent difference"]
    assert judged((unnamed, unnamed), (unnamed, unnamed)) == ["unnamed error"]
    local = (NoSync(0, PLAIN_STEP[:2]), Step(0))
    assert judged(differs, differs, *local) == []  # asked for


def test_an_expanded_buffer_is_refused_on_every_rank_wherever_it_is_sent() -> None:
    text = "RuntimeError: several elements of 1.scale use the same memory"
    refused = Outcome(error=text, kinds=("RuntimeError",), line="4: w0 = DDP(m0)")
    later, right = replace(refused, line="6: l0 = loss(w0(batch(1, (3, 3))))"), outcome(w=1.0)

    def found(layer: str, *ours: Outcome, **options: bool) -> list[str]:
        program = program_of(*PLAIN_STEP, model=Model((Layer("linear"), Layer(layer))))
        program = replace(program, wrappers=(Wrapper(0, tuple(options.items())),))
        a, b = ({"torch": right, "gloo": o} for o in ours)
        return [fault.kind for fault in judge(program, (a, b), None).faults]

    assert found("expanded", refused, refused) == []
    for ours in ((refused, right), (right, right), (later, later)):
        assert found("expanded", *ours) == ["expanded buffer"]
    for layer, is_sent in (("ignored", True), ("expanded", False)):
        assert found(layer, right, right, broadcast_buffers=is_sent) == []
        assert found(layer, refused, refused, broadcast_buffers=is_sent) == ["raises"]


def test_one_process_is_a_witness_where_torch_differs() -> None:
    program = program_of(*PLAIN_STEP)
    one = alone(program)
    assert one.error is None
    wrong = replace(one, parameters={name: p + 1 for name, p in one.parameters.items()})
    reports = ({"torch": wrong, "gloo": one}, {"torch": one, "gloo": one})
    assert judge(program, reports, one).faults == ()
    reports = ({"torch": wrong, "gloo": wrong}, {"torch": one, "gloo": wrong})
    assert [fault.kind for fault in judge(program, reports, one).faults] == ["differs from one process"]


def test_what_wrapping_again_would_hide_is_kept() -> None:
    first = alone(program_of(*PLAIN_STEP))
    second = alone(program_of(*PLAIN_STEP, Rewrap(0), *PLAIN_STEP))
    kept = {name: p for name, p in second.parameters.items() if "before it is wrapped again" in name}
    assert len(kept) == len(first.parameters)
    assert all(torch.equal(a, b) for a, b in zip(kept.values(), first.parameters.values(), strict=True))


def test_what_is_left_out_for_torchs_class_changes_nothing() -> None:
    """Hooks that read, swaps, the backwards of two heads or one of both: the same end in one process."""
    forward, backward = PLAIN_STEP[:2]
    plain = alone(program_of(*PLAIN_STEP, *PLAIN_STEP))
    read = replace(backward, hook="read")
    other = alone(program_of(forward, read, *PLAIN_STEP[2:], Swap(0), *PLAIN_STEP))
    heads, both = Forward(0, 1, loss="l0", kind="heads", second="l1"), ("l0", "l1")
    whole = alone(program_of(heads, Backward(both), Step(0), model=HEADS))
    parts = (Backward(both, retain=True, part="a"), Backward(both, part="b"))
    in_parts = alone(program_of(heads, *parts, Step(0), model=HEADS))
    for expected, found in ((plain, other), (whole, in_parts)):
        assert found.error is None
        for name, parameter in expected.parameters.items():
            assert torch.equal(parameter, found.parameters[name])
    cleared = alone(program_of(forward, replace(backward, hook="clear")))
    assert cleared.error is None
    assert set(cleared.gradients.values()) == {None}


def test_a_hook_that_reads_another_gradient_than_the_backward_leaves_is_found() -> None:
    run = _Run(Alone, 0, None, None, is_torchs=False)
    layer = torch.nn.Linear(1, 1, bias=False)
    with pytest.raises(AssertionError, match="read another"), run.hooked("read", layer):
        layer(torch.ones(1, 1)).sum().backward()
        layer.weight.grad *= 2  # as a reduction after the hook would
    with pytest.raises(AssertionError, match="in vain"), run.hooked("clear", layer):
        layer(torch.ones(1, 1)).sum().backward()
        layer.weight.grad = torch.ones(1, 1)


# ---------------------------------------------------------------------- shrinking


def test_shrinking_leaves_what_is_needed_and_nothing_else() -> None:
    """Of some drawn programs: what is left fails still, and nothing that is smaller by one change does."""

    def fails(program: Program) -> bool:
        steps = [s for s in statements_of(program.body) if isinstance(s, Step)]
        return bool(steps) and any(isinstance(s, Forward) for s in statements_of(program.body))

    for program in filter(fails, map(draw, range(8))):
        least = shrink(program, lambda candidates: next(filter(fails, candidates), None))
        assert fails(least)
        assert len(statements_of(least.body)) == 2
        assert least.dtype == "float64"
        assert not any(fails(candidate) for candidate in smaller(least) if weight(candidate) < weight(least))


def test_what_is_smaller_is_still_python() -> None:
    for seed in range(3):
        for candidate in smaller(draw(seed)):
            compile(text_of(candidate), "<program>", "exec")
