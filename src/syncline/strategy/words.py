"""Strategies in words: by them ranks compare what they were given."""

from __future__ import annotations

from dataclasses import fields

__all__ = ["every_words", "in_words", "value_in_words"]


def in_words(description: object) -> str:
    """A frozen dataclass as a user would write it, without what has its default; callables by qualified name.

    Example:
        >>> from syncline.strategy import LocalSGD
        >>> in_words(LocalSGD(8, warmup=100))
        'LocalSGD(every=8, warmup=100)'
    """
    shown = []
    for field in fields(description):  # type: ignore[arg-type]
        value = getattr(description, field.name)
        if value != field.default:
            shown.append(f"{field.name}={value_in_words(value)}")
    return f"{type(description).__name__}({', '.join(shown)})"


def value_in_words(value: object) -> str:
    """A callable by its qualified name, a partial with its arguments, anything else as Python shows it."""
    wrapped = getattr(value, "func", None)
    if wrapped is not None:  # a functools.partial
        arguments = [repr(a) for a in value.args]  # type: ignore[attr-defined]
        arguments += [f"{key}={item!r}" for key, item in value.keywords.items()]  # type: ignore[attr-defined]
        return f"{value_in_words(wrapped)}({', '.join(arguments)})"
    if callable(value):
        return str(getattr(value, "__qualname__", type(value).__name__))
    return repr(value) if isinstance(value, str) else str(value)


def every_words(steps: int) -> str:
    """`every 8 steps`."""
    return f"every {steps} steps" if steps > 1 else "every step"
