"""What a person should know of a save that was loaded: what stays as it was, what is another's."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from syncline.plan.difference import describe_ranks
from syncline.state.found import Found
from syncline.state.train_state import TrainState
from syncline.words import format_count

__all__ = ["remarks"]


def remarks(name: str, found: Found, state: TrainState, num_ranks: int) -> Iterator[str]:
    """Sentences, the same on all ranks.

    Args:
        name: of the save.
        found: what was in it.
        state: what it was loaded into.
        num_ranks: how many there are now.
    """
    stays = [one for one in state.named if one not in found.names]
    if stays:
        has = ", ".join(one for one in found.names if one not in ("step", "rng"))
        yield f"{', '.join(stays)} {'was' if len(stays) == 1 else 'were'} not in {name}, which has {has}: as before"

    before = found.manifest.num_ranks
    own = found.own_names(state.named) if before != num_ranks else []
    if own:
        if num_ranks > before:
            what = f"{describe_ranks(range(before, num_ranks))} got what rank 0 had"
        else:
            what = f"what {describe_ranks(range(num_ranks, before))} had is left"
        yield (
            f"{name} is of {format_count(before, 'rank')}, each with {', '.join(own)} of its own, and there are "
            f"{num_ranks} now: {what}"
        )

    # Another class may mean other things by the same words. Modules may be wrapped another time.
    for key, one in state.named.items():
        now, then = type(one).__name__, found.manifest.classes.get(key)
        if then not in (now, None) and not isinstance(one, nn.Module):
            yield (
                f"{key} of {name} is the state of {then}, and {now} has taken it over: what it does not know is left "
                "unused, and settings are those that were saved"
            )
