"""The verb `keep_best_`, which copies the values of the rank with the best score to all ranks, in place."""

from __future__ import annotations

import math
import struct
from typing import Any, Literal

from torch import Tensor

from syncline.checks import checked_choice, checked_number, number_in
from syncline.session.world import transport_of
from syncline.suggestions import suggests_arguments
from syncline.verbs.broadcast import Replaced
from syncline.verbs.common import Group, Prepared, agree_on_call, global_rank, refuse_one_copy, verb

_TITLE = "sl.keep_best_"

_REMEDY = "Pass the same tensors in the same containers, and the same mode, on every rank."

_SCORE = struct.Struct("<d")


@suggests_arguments
def keep_best_(
    target: Any, score: float | Tensor, mode: Literal["max", "min"] = "max", *, group: Group = None
) -> int:
    """Copy the values of `target` from the rank with the best score to all other ranks, in place.

    One collective sends the scores and compares names, shapes and dtypes. Then the values of the best rank are sent in
    the same way as by `broadcast_`.

    Args:
        target: a Module, an Optimizer, a Tensor, or nested dicts, lists and tuples of tensors; see `broadcast_`.
        score: this rank's score, a number or a tensor with one element. A score of NaN is never the best.
        mode: "max" if the highest score is the best, "min" if the lowest score is the best.
        group: see `broadcast_`.

    Returns:
        The rank with the best score. If several ranks have the best score, the lowest of these ranks is returned. As in
        torch, the result is a global rank. If `group` is a Syncline transport, it is a rank of that transport.

    Raises:
        ContractMismatch: the ranks passed different targets or modes. The text is the same on every rank.
        TypeError: `target` has an unsupported type, or contains something other than tensors; or `score` is not a
            number. Every rank raises the error.
        ValueError: the mode is unknown, all scores are NaN, a tensor cannot be written in place, the optimizer is
            sharded, or the ranks use one copy of the parameters. Every rank raises the error.

    Examples:
        >>> import torch, syncline as sl
        >>> model, validation_loss = torch.nn.Linear(2, 1), 0.25
        >>> sl.keep_best_(model, validation_loss, mode="min")
        0
    """
    transport = transport_of(group)
    with verb(transport, "keep_best_"):

        def prepare() -> Prepared[Replaced]:
            checked_choice("mode", mode, ("max", "min"))
            payload = _SCORE.pack(_checked_score(score))
            refuse_one_copy(target)
            replaced = Replaced(target)
            return Prepared(replaced, [f"mode  {mode}", *replaced.lines], payload)

        replaced, payloads = agree_on_call(transport, _TITLE, prepare, remedy=_REMEDY)
        scores: list[float] = [_SCORE.unpack_from(payload)[0] for payload in payloads]
        candidates = [rank for rank, number in enumerate(scores) if not math.isnan(number)]
        if not candidates:
            raise ValueError(
                f"{_TITLE}: expected a score that is not NaN on at least one rank, got NaN on all {transport.size} "
                "ranks, so no rank is the best, and no values were copied"
            )
        choose = max if mode == "max" else min
        # Of equal scores this is the first, so the lowest rank.
        best = choose(candidates, key=scores.__getitem__)
        if transport.size > 1:
            replaced.run(transport, best)
        return global_rank(best, group)


def _checked_score(score: Any) -> float:
    """Return the score as a float. Infinite scores and NaN are allowed, but complex numbers are not."""
    number = number_in(score)
    is_nan = isinstance(number, float) and math.isnan(number)
    return math.nan if is_nan else checked_number("score", number, finite=False)
