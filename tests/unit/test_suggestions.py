"""An error about a misspelt argument proposes the right one: of every public function, class and method."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import pytest
from torch import nn

import syncline as sl
from syncline.checks import suggests_arguments
from syncline.testing import run_ranks

NOT_MADE_BY_PROGRAMS = (sl.Contract, sl.Row, sl.Statistics, sl.World)

CALLED_BY_TORCH = (sl.compression.hook,)

WITH_METHODS = (
    sl.Checkpointer,
    sl.DistributedDataParallel,
    sl.DistributedSampler,
    sl.EvolutionStrategy,
    sl.TrainState,
)
"""Their methods are called by programs. Those of strategies and exporters, say, are called by Syncline."""


def is_made_by_programs(kind: type) -> bool:
    is_base = inspect.isabstract(kind) or Protocol in kind.__bases__
    is_received = kind in NOT_MADE_BY_PROGRAMS or kind.__module__ in (
        "syncline.records",
        "syncline.debug.report",
    )
    return not is_base and not is_received and not issubclass(kind, BaseException)


def functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Each public function, constructor and method of Syncline, with its name."""
    yield "testing.run_ranks", run_ranks
    for module in (sl, sl.compression, sl.debug, sl.exporters, sl.nn):
        for name in module.__all__:
            found = getattr(module, name)
            if inspect.isfunction(found) and found not in CALLED_BY_TORCH:
                yield name, found
            elif inspect.isclass(found) and is_made_by_programs(found):
                yield f"{name}()", found.__init__
    for kind in WITH_METHODS:
        for name in dir(kind):
            method = inspect.getattr_static(kind, name)
            is_ours = inspect.isfunction(method) and method.__module__.startswith("syncline.")
            if is_ours and not name.startswith("_"):
                yield f"{kind.__name__}.{name}", method


def named(function: Callable[..., Any]) -> list[str]:
    """The names of the arguments of a function; empty if it takes any name."""
    parameters = list(inspect.signature(function).parameters.values())
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return []
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [one.name for one in parameters if one.kind in kinds and one.name != "self"]


CASES = {title: function for title, function in functions() if named(function)}


def test_the_table_has_what_programs_call() -> None:
    expected = {"mean", "trace", "Checkpointer()", "Checkpointer.save", "DistributedDataParallel.explain"}
    assert (
        expected | {"DistributedDataParallel.clip_grad_norm_", "DistributedSampler()", "steps"}
        <= CASES.keys()
    )


def test_a_misspelt_argument_is_named_with_the_right_one() -> None:
    for title, function in CASES.items():
        name = max(named(function), key=len)
        arguments = [object()] if "self" in inspect.signature(function).parameters else []
        with pytest.raises(TypeError) as error:
            function(*arguments, **{f"{name}_": 1})
        words = rf"got an unexpected keyword argument '{name}_'[:.] [Dd]id you mean '{name}'\?$"
        assert re.search(words, str(error.value)), title


def test_an_error_from_inside_of_a_function_keeps_its_words() -> None:
    def inner(*, amount: int) -> None: ...

    @suggests_arguments
    def outer(*, values: int) -> None:
        inner(vlaues=values)  # type: ignore[call-arg]

    with pytest.raises(TypeError) as caught:
        outer(values=1)
    assert "values" not in str(caught.value)


def test_a_metric_without_a_name_is_told_how_to_name_it() -> None:
    ddp = sl.DistributedDataParallel(nn.Linear(2, 1))
    with pytest.raises(TypeError, match=re.escape("name the metric: ddp.report(loss=loss)")):
        ddp.report(0.25)
