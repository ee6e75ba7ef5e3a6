"""How parameters are divided into fragments, which meet at different steps."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["plan_fragments"]


def plan_fragments(sizes_numel: Sequence[int], num_fragments: int) -> tuple[tuple[int, ...], ...]:
    """Divide parameters into so many runs of neighbours, as equal in elements as their sizes allow.

    Args:
        sizes_numel: elements of each parameter, in the module's order.
        num_fragments: how many.

    Returns:
        For each fragment the indices of its parameters: each index once, none of the fragments empty. The largest
        fragment is as small as it can be.

    Raises:
        ValueError: there are fewer parameters than fragments.

    Example:
        >>> plan_fragments([100, 1, 1, 50, 60], 2)
        ((0, 1, 2), (3, 4))
    """
    if not 1 <= num_fragments <= len(sizes_numel):
        raise ValueError(
            f"expected between 1 and {len(sizes_numel)} fragments, for there are {len(sizes_numel)} parameters; "
            f"got {num_fragments}"
        )
    low, high = max(sizes_numel), sum(sizes_numel)
    while low < high:  # the smallest cap with which that many fragments do
        cap = (low + high) // 2
        if len(_filled(sizes_numel, cap)) <= num_fragments:
            high = cap
        else:
            low = cap + 1
    fragments = _filled(sizes_numel, low)
    while len(fragments) < num_fragments:  # there is room for more: part the largest that can be parted
        at = max(
            (i for i in range(len(fragments)) if len(fragments[i]) > 1),
            key=lambda i: sum(sizes_numel[j] for j in fragments[i]),
        )
        whole = fragments[at]
        cut = min(
            range(1, len(whole)),
            key=lambda k: max(sum(sizes_numel[j] for j in whole[:k]), sum(sizes_numel[j] for j in whole[k:])),
        )
        fragments[at : at + 1] = [whole[:cut], whole[cut:]]
    return tuple(tuple(fragment) for fragment in fragments)


def _filled(sizes_numel: Sequence[int], cap_numel: int) -> list[list[int]]:
    """Runs of neighbours, each as long as the cap allows."""
    fragments: list[list[int]] = []
    filled = cap_numel + 1
    for index, size in enumerate(sizes_numel):
        if filled + size > cap_numel:
            fragments.append([])
            filled = 0
        fragments[-1].append(index)
        filled += size
    return fragments
