"""Which settings are tried, and which has won (pure functions)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from syncline.contract import table
from syncline.tools.plan.options import CAPS_MB, Option
from syncline.tools.plan.predict import Planner
from syncline.words import MAX_COLUMNS, format_time, wrapped

_CLEARLY = 0.98
"""A setting has won if it takes at most this part of the time of the program as it is."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One way to run the program. A field that is None leaves the program as it is."""

    cap_mb: float | None = None
    transport: str | None = None
    num_threads: int | None = None
    value: float | None = None
    """A value of the option of the program that is varied, such as a batch size."""

    def words(self, option: str = "") -> str:
        """Return the setting in words.

        Args:
            option: the option of the program that is varied.

        Examples:
            >>> Setting(cap_mb=2.0, num_threads=4).words(), Setting(value=32.0).words("--batch-size")
            ('bucket_cap_mb=2, 4 threads', '--batch-size 32')
            >>> Setting().words()
            'as it is'
        """
        parts = []
        if self.value is not None:
            parts.append(f"{option} {self.value:g}")
        if self.cap_mb is not None:
            parts.append(f"bucket_cap_mb={self.cap_mb:g}")
        if self.transport is not None:
            parts.append(f'transport="{self.transport}"')
        if self.num_threads is not None:
            parts.append(f"{self.num_threads} thread{'s' if self.num_threads > 1 else ''}")
        return ", ".join(parts) or "as it is"

    def variables(self) -> dict[str, str]:
        """Return the environment variables by which a program is run with this setting."""
        found = {}
        if self.cap_mb is not None:
            found["SYNCLINE_BUCKET_CAP_MB"] = f"{self.cap_mb:g}"
        if self.transport is not None:
            found["SYNCLINE_TRANSPORT"] = self.transport
        if self.num_threads is not None:
            found["OMP_NUM_THREADS"] = str(self.num_threads)
        return found


def settings_to_try(
    planner: Planner | None, *, num_cores: int, num_ranks: int, values: Sequence[float], most_caps: int = 3
) -> list[Setting]:
    """Return the settings that are worth a trial, the program as it is first.

    Args:
        planner: the planner of the program as it is; None if its gradients are not synchronized in every step. Of the
            bucket sizes, the best ones by its prediction are tried.
        num_cores: the cores of this host.
        num_ranks: the ranks on this host.
        values: values of the option that is varied.
        most_caps: the largest number of bucket sizes.
    """
    found = [Setting()]
    if planner is not None and num_ranks > 1:
        caps = sorted(CAPS_MB, key=lambda cap: planner.predict(Option(cap_mb=cap)).step)
        layouts: dict[int, float] = {}
        for cap in caps:
            layouts.setdefault(len(planner.buckets[cap]), cap)
        found += [Setting(cap_mb=cap) for cap in list(layouts.values())[:most_caps]]
        found += [Setting(transport=name) for name in ("shm", "c10d")]
    usual = max(1, num_cores // num_ranks)
    found += [Setting(num_threads=num) for num in sorted({1, max(1, usual // 2)} - {usual})]
    found += [Setting(value=value) for value in values]
    return found


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The measured times of a setting."""

    setting: Setting
    steps: Sequence[float]
    """The median step of each run, in seconds; empty if a run failed."""

    @property
    def step(self) -> float:
        """How long a step takes."""
        return median(self.steps) if self.steps else float("inf")

    def cost(self, base_value: float | None) -> float:
        """Return how long a step takes for the work of a step of the program as it is.

        Args:
            base_value: the value of the varied option in the program as it is. The work of a step is taken to grow
                with this value. None if no option is varied.
        """
        if self.setting.value is None or base_value is None:
            return self.step
        return self.step * base_value / self.setting.value


def combined(trials: Sequence[Trial], base_value: float | None) -> Setting | None:
    """Return the setting that has the best value of each field; None if that is no new one.

    Examples:
        >>> combined([Trial(setting=Setting(), steps=[1.0]), Trial(setting=Setting(cap_mb=2.0), steps=[0.8]),
        ...           Trial(setting=Setting(num_threads=2), steps=[0.9])], None)
        Setting(cap_mb=2.0, transport=None, num_threads=2, value=None)
    """
    base = trials[0].cost(base_value)
    best = Setting()
    for field in ("cap_mb", "transport", "num_threads", "value"):
        of_field = [one for one in trials if getattr(one.setting, field) is not None]
        winner = min(of_field, key=lambda one: one.cost(base_value), default=None)
        if winner is not None and winner.cost(base_value) <= _CLEARLY * base:
            best = replace(best, **{field: getattr(winner.setting, field)})
    return None if best in [one.setting for one in trials] else best


def winner_of(trials: Sequence[Trial], base_value: float | None) -> Trial:
    """Return the trial that has won: the program as it is, unless another setting is clearly faster."""
    best = min(trials, key=lambda one: one.cost(base_value))
    return best if best.cost(base_value) <= _CLEARLY * trials[0].cost(base_value) else trials[0]


def trials_text(
    trials: Sequence[Trial], predicted: Mapping[Setting, float], option: str, base_value: float | None
) -> str:
    """Return the trials as text, with the one that has won.

    Args:
        trials: the trials, the program as it is first.
        predicted: what the planner has predicted for some settings, in seconds.
        option: the option of the program that is varied; empty if there is none.
        base_value: its value in the program as it is.
    """
    best, base = winner_of(trials, base_value), trials[0]
    head = ["", "median step", "predicted", "for the same work"]
    rows = [
        [
            one.setting.words(option),
            format_time(one.step) if one.steps else "failed",
            format_time(predicted[one.setting]) if one.setting in predicted else "",
            f"{one.cost(base_value) / base.step:.2f}" if one.steps else "",
        ]
        for one in trials
    ]
    lines = [table([head, *rows], MAX_COLUMNS), ""]
    if best is base:
        return "\n".join([*lines, "Nothing was clearly faster than the program as it is."])
    saved = 1 - best.cost(base_value) / base.step
    lines += wrapped(f"Won: {best.setting.words(option)}, {saved:.0%} less time for the same work.")
    variables = best.setting.variables()
    if variables:
        assigned = " ".join(f"{name}={value}" for name, value in variables.items())
        lines += wrapped(f"Set it in the program, or run it with {assigned}")
    return "\n".join(lines)
