"""Programs that nobody wrote: where torch's class is right so is ours; where it is not, ours is, or says why not."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from .broken import Forgetful, Jealous, Possessive
from .grammar import draw
from .program import (
    Backward,
    Forward,
    Layer,
    Loop,
    Model,
    OnRank,
    Optimizer,
    Program,
    Step,
    Wrapper,
    ZeroGrad,
    statements_of,
)
from .runner import Runner, Tally, report_of
from .text import text_of

SEEDS = range(1_000_000, 1_000_200)


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with closing(Runner()) as runner:
        yield runner


@pytest.mark.real
def test_drawn_programs_end_as_under_torchs_class_or_right_or_with_a_named_error(
    runner: Runner, capsys: pytest.CaptureFixture[str]
) -> None:
    tally, failures = Tally(), []
    began = time.monotonic()
    for program, verdict in runner.verdicts(map(draw, SEEDS)):
        tally.add(program, verdict)
        if not verdict.faults:
            continue
        if runner.fails_alike(program, verdict):
            failures.append(report_of(*runner.shrunk(program, verdict)))
        else:  # for want of time, most often
            with capsys.disabled():
                print(f"\nseen once only: {report_of(program, verdict)}")
    with capsys.disabled():
        print(f"\nfuzzer: {time.monotonic() - began:.0f} s: {tally}")
    assert not failures, "\n\n".join([str(tally), *failures])
    assert tally.torch["right"] > len(SEEDS) / 2
    assert tally.num_alone > len(SEEDS) / 3


def test_a_class_that_leaves_out_a_reduction_is_found_and_the_program_is_shrunk(runner: Runner) -> None:
    step = (Forward(0, 1, loss="l0"), Backward(("l0",)), Step(0), ZeroGrad(0))
    program = Program(
        models=(Model((Layer("linear"),)),),
        wrappers=(Wrapper(0),),
        optimizers=(Optimizer("sgd", (0,)),),
        body=(OnRank(0, (Forward(0, 2, no_grad=True),)), Loop((3, 3), step)),
    )
    least = found(runner, Forgetful, program)
    kinds = [type(statement) for statement in statements_of(least.body)]
    assert OnRank not in kinds
    assert kinds.count(Forward) == (1 if Loop in kinds else 2)


@pytest.mark.parametrize(
    ("broken", "text"),
    [(Possessive, "nn.Sequential(nn.Linear(4, 4), w1"), (Jealous, "transformed('vmap', w0")],
)
def test_a_class_that_is_wrong_with_what_is_inside_or_around_is_found(
    runner: Runner, broken: type, text: str
) -> None:
    """It is wrong only with a wrapper inside, or inside of a transform: what is left has that."""
    models = (Model((Layer("linear"), Layer("tanh")), around=1), Model((Layer("linear"),)))
    body = (Forward(0, 1), Forward(0, 2, loss="l0", kind="vmap"), Backward(("l0",)))
    program = Program(models, (Wrapper(0), Wrapper(1)), (), body)
    assert text in text_of(found(runner, broken, program))


def found(runner: Runner, broken: type, program: Program) -> Program:
    """Check that a class is found to differ from torch's; what is left of the program."""
    wrapping = runner.wrapping({"gloo": broken})
    verdict = next(wrapping.verdicts([program], ("torch", "gloo")))[1]
    assert verdict.torch == "right"
    assert [fault.kind for fault in verdict.faults] == ["differs from torch"]
    return wrapping.shrunk(program, verdict)[0]
