"""Functions that describe sizes, counts, names, ranks, and differences between ranks as text.

From the same values, every rank computes the same text.
"""

from __future__ import annotations

import textwrap
import unicodedata
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

from syncline.errors import SynclineError

MAX_COLUMNS = 100
"""The largest number of columns of a printed table or report."""


def wrapped(text: str, columns: int = MAX_COLUMNS, *, indent: str = "  ") -> list[str]:
    """Return a line of text as lines of at most `columns` characters. Nothing is left out.

    Args:
        text: the line. If it begins with spaces, all lines begin with these spaces.
        columns: the largest length of a line. A word that is longer is divided.
        indent: the additional indentation of all lines but the first.

    Examples:
        >>> wrapped("  sent by all_reduce when weight was ready", 28)
        ['  sent by all_reduce when', '    weight was ready']
    """
    margin = text[: len(text) - len(text.lstrip())]
    lines = textwrap.wrap(
        text.strip(),
        columns,
        initial_indent=margin,
        subsequent_indent=margin + indent,
        break_on_hyphens=False,
    )
    return lines or [""]


def printable(text: str) -> str:
    r"""Return a text from a file or from another process, so that it can be printed.

    A character that a terminal could obey, or that changes the direction of the text, becomes its escape. Line ends and
    tabs stay.

    Examples:
        >>> print(printable("fc\x1b[2J\x07.weight"))
        fc\x1b[2J\x07.weight
    """
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() or one in "\n\t" or unicodedata.category(one) == "Zs" else ascii(one)[1:-1]
        for one in text
    )


def shortened(text: str, columns: int = MAX_COLUMNS) -> str:
    """Return a text as one line of at most `columns` characters. "..." in its middle marks what was left out.

    Examples:
        >>> shortened("<Contract of DistributedDataParallel(Net): 6 rows>", 30)
        '<Contract of ...Net): 6 rows>'
    """
    line = " ".join(text.split())
    if len(line) <= columns:
        return line
    half = (columns - 3) // 2
    return f"{line[:half]}...{line[-half:]}"


def one_line(instance: object, text: str) -> str:
    """Return the `repr` of an object: its class and a text about it, in one line of at most 100 columns.

    Examples:
        >>> one_line(3, "the number of hosts")
        '<int: the number of hosts>'
    """
    kind = type(instance).__name__
    return f"<{kind}: {shortened(text, MAX_COLUMNS - len(kind) - 4)}>"


def format_bytes(num_bytes: int) -> str:
    """Format a size with three digits and a decimal unit, as in `421 kB`.

    Examples:
        >>> format_bytes(0), format_bytes(1234), format_bytes(421_000), format_bytes(76_800_000)
        ('0 B', '1.23 kB', '421 kB', '76.8 MB')
    """
    if num_bytes < 1000:
        return f"{num_bytes} B"
    value, unit = num_bytes / 1000, "kB"
    for larger in ("MB", "GB", "TB", "PB"):
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {unit}"


def format_count(number: int, noun: str) -> str:
    """Format a count with its noun, as in `1 tensor`, `8 tensors` or `1,234 tensors`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def format_time(seconds: float) -> str:
    """Format a duration in milliseconds, or in seconds from 10 s.

    Examples:
        >>> format_time(0.00042), format_time(0.0412), format_time(41.2)
        ('0.4 ms', '41.2 ms', '41.2 s')
    """
    return f"{seconds * 1e3:.1f} ms" if seconds < 10 else f"{seconds:.1f} s"


def format_names(names: Sequence[str], num_shown: int = 4, *, noun: str = "parameters") -> str:
    """Join names by commas. If there are more than `num_shown`, show only the first names, the last name and the count.

    Examples:
        >>> format_names(["a", "b"]), format_names(["a", "b", "c", "d", "e"])
        ('a, b', 'a, b, c, ..., e (5 parameters)')
    """
    if len(names) <= num_shown:
        return ", ".join(names)
    return ", ".join([*names[: num_shown - 1], "...", names[-1]]) + f" ({len(names)} {noun})"


K = TypeVar("K", bound=Hashable)

DEFAULT_REMEDY = "Give every rank the same objects and arguments, in the same order."

_MAX_ENTRIES = 20
"""The maximum number of differences to show for a group of ranks. The text also says how many are not shown."""


def describe_difference(
    title: str, descriptions: Sequence[Sequence[str]], *, remedy: str = DEFAULT_REMEDY
) -> str | None:
    """Return a text about the differences between the ranks' descriptions of an object or a call.

    Ranks with equal descriptions form a group. The description of the largest group is the expected one. Among groups
    of equal size, the group with the lowest rank counts as the largest. Every other group is compared with it.

    Args:
        title: the name of the object or call that must be the same on all ranks.
        descriptions: the lines of each rank, in rank order. A line holds a name, a separator (two spaces, or a colon
            and a space), and properties. A line is compared with the line of another rank that has the same name.
        remedy: the last line of the text, which says what to do.

    Returns:
        A text without a trailing newline, or None if the descriptions are equal.

    Examples:
        >>> print(describe_difference("Net", [["weight  (2, 3)"], ["weight  (2, 4)"], ["weight  (2, 3)"]]))
        Net: the ranks do not agree. The expected values are those of most ranks.
        rank 1 against ranks 0, 2:
          weight
            expected (2, 3) (ranks 0, 2)
            got      (2, 4) (rank 1)
        Give every rank the same objects and arguments, in the same order.
    """
    groups = ranks_with({rank: tuple(lines) for rank, lines in enumerate(descriptions)})
    if len(groups) < 2:
        return None
    reference = min(groups, key=lambda lines: (-len(groups[lines]), groups[lines]))
    is_majority = 2 * len(groups[reference]) > len(descriptions)
    expected = "those of most ranks" if is_majority else f"those of rank {groups[reference][0]}"
    text = [f"{title}: the ranks do not agree. The expected values are {expected}."]
    for lines, ranks in groups.items():
        if lines is not reference:
            here, there = describe_ranks(ranks), describe_ranks(groups[reference])
            text.append(f"{here} against {there}:")
            entries = _entries(lines, reference, here, there)
            text += [line for entry in entries[:_MAX_ENTRIES] for line in entry]
            if len(entries) > _MAX_ENTRIES:
                text.append(f"  and {len(entries) - _MAX_ENTRIES} more")
    return "\n".join([*text, remedy])


def refusal_of(
    title: str,
    reasons: Mapping[int, tuple[str, str, str | None]],
    refusal: str | None = None,
    *,
    size: int | None = None,
) -> Exception:
    """Return the error that all ranks raise together if some ranks cannot take part in a call.

    Args:
        title: the name of the call.
        reasons: for each rank that cannot take part, the error of that rank; in rank order. An error is a tuple (name
            of its class, its text, name of the user's function that raised it). The last entry is None if Syncline
            raised the error.
        refusal: the words that follow the title. Pass None for "refused, nothing was sent", or for "failed" if a user's
            function raised one of the errors.
        size: the number of ranks. If all of them refuse for one reason, the text is one line. None means unknown.

    Returns:
        A TypeError if all errors are TypeErrors, a ValueError if all errors are TypeErrors or ValueErrors, a
        RuntimeError if all errors are RuntimeErrors of Syncline, else a SynclineError.

    Examples:
        >>> refusal_of("sl.mean", {1: ("ValueError", "expected a weight of at least 0, got -1", None)})
        ValueError('sl.mean: refused, nothing was sent\\nrank 1: expected a weight of at least 0, got -1')
    """
    refusing = ranks_with(reasons)
    has_failed = any(called is not None for _, _, called in refusing)
    names = {name for name, _, _ in refusing}
    error_class: type[Exception] = SynclineError
    if names <= {"TypeError", "ValueError"}:
        error_class = TypeError if names == {"TypeError"} else ValueError
    elif names == {"RuntimeError"} and not has_failed:
        error_class = RuntimeError
    text = [f"{title}: {refusal or ('failed' if has_failed else 'refused, nothing was sent')}"]
    for (name, message, called), ranks in refusing.items():
        cause = f"{name}: {message}" if message else name
        if called is not None:
            cause = f"{called} raised {cause}"
        elif name in ("TypeError", "ValueError") or error_class is RuntimeError:
            cause = message
        if refusal is None and not has_failed and len(ranks) == size:
            return error_class(f"{title}: {cause} (all ranks)")
        text.append(f"{describe_ranks(ranks)}: {cause}")
    return error_class(printable("\n".join(text)))


def ranks_with(values: Mapping[int, K]) -> dict[K, list[int]]:
    """Return for each value the ranks that have it. Values and ranks stay in the given order.

    Examples:
        >>> ranks_with({0: "a", 1: "b", 3: "a"})
        {'a': [0, 3], 'b': [1]}
    """
    found: dict[K, list[int]] = {}
    for rank, value in values.items():
        found.setdefault(value, []).append(rank)
    return found


def groups_of(values: Sequence[Hashable]) -> tuple[tuple[int, ...], ...]:
    """Group the indices of equal values. Larger groups come first.

    Groups of equal size are in the order of their lowest indices.

    Examples:
        >>> groups_of(["a", "b", "b"])
        ((1, 2), (0,))
    """
    groups = ranks_with(dict(enumerate(values))).values()
    return tuple(map(tuple, sorted(groups, key=lambda group: (-len(group), group))))


def end_of_processes(ranks: Sequence[int]) -> str:
    """Return the words that the processes of these ranks have ended, to stand behind `describe_ranks`.

    Examples:
        >>> end_of_processes([3]), end_of_processes([3, 4])
        ('its process has ended', 'their processes have ended')
    """
    return "its process has ended" if len(ranks) == 1 else "their processes have ended"


def describe_ranks(ranks: Sequence[int]) -> str:
    """Return a text that names the ranks. It writes three or more consecutive ranks as a range.

    Examples:
        >>> describe_ranks([0, 2, 3, 4, 7]), describe_ranks([1])
        ('ranks 0, 2-4, 7', 'rank 1')
    """
    ordered = sorted(ranks)
    parts: list[str] = []
    first = 0
    for last, rank in enumerate(ordered):
        if last + 1 < len(ordered) and ordered[last + 1] == rank + 1:
            continue
        run = ordered[first : last + 1]
        parts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else [str(rank) for rank in run]
        first = last + 1
    return f"rank{'s' if len(ordered) != 1 else ''} {', '.join(parts)}"


def describe_groups(groups: Sequence[Sequence[int]]) -> str:
    """Return a text that names groups of ranks.

    Examples:
        >>> describe_groups([(0, 2), (1,)])
        'ranks 0, 2 | rank 1'
    """
    return " | ".join(map(describe_ranks, groups))


def outside_of_largest(groups: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the ranks outside of the first group, in rank order. `groups_of` puts the largest group first.

    Examples:
        >>> outside_of_largest([(1, 3, 4), (2,), (0,)])
        (0, 2)
    """
    return tuple(sorted(rank for group in groups[1:] for rank in group))


def _name_and_properties(line: str) -> tuple[str, str]:
    for separator in ("  ", ": "):
        name, found, properties = line.partition(separator)
        if found and name.strip():
            return name.strip(), properties.strip()
    return line.strip(), ""


def _by_name(lines: Sequence[str]) -> dict[tuple[str, int], str]:
    """Return the properties in each line, by the line's name and a number that distinguishes lines of the same name."""
    seen: Counter[str] = Counter()
    properties: dict[tuple[str, int], str] = {}
    for line in lines:
        name, rest = _name_and_properties(line)
        properties[name, seen[name]] = rest
        seen[name] += 1
    return properties


def _entries(lines: Sequence[str], reference: Sequence[str], here: str, there: str) -> list[list[str]]:
    """Return the differences between two descriptions. Each difference is a list of lines to show."""
    expected, got = _by_name(reference), _by_name(lines)
    entries = [
        [f"  {key[0]}", f"    expected {properties} ({there})", f"    got      {got[key]} ({here})"]
        for key, properties in expected.items()
        if key in got and got[key] != properties
    ]
    entries += [[f"  also has  {_line(key, got)}"] for key in got if key not in expected]
    entries += [[f"  lacks  {_line(key, expected)}"] for key in expected if key not in got]
    common = [key for key in expected if key in got]
    common_here = [key for key in got if key in expected]
    if common != common_here:
        position = next(i for i, (a, b) in enumerate(zip(common, common_here, strict=True)) if a != b)
        what = (
            "the entries are"
            if len(common) == len(expected) == len(got)
            else "the entries that both have are"
        )
        entries.append(
            [
                f"  {what} in another order. The first difference is at entry {position + 1}:",
                f"    expected {common[position][0]} ({there})",
                f"    got      {common_here[position][0]} ({here})",
            ]
        )
    # Lines that differ only in spaces produce no entry.
    return entries or [["  the entries differ only in spaces"]]


def _line(key: tuple[str, int], properties: dict[tuple[str, int], str]) -> str:
    return f"{key[0]}  {properties[key]}".rstrip()
