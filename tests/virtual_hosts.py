"""Simulated hosts for tests of several folders, which are skipped where there can be none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import hangs
from syncline.testing import HostsUnavailable, SimulatedHosts, simulated_hosts

__all__ = ["hosts_or_skip", "outputs_of"]


@contextmanager
def hosts_or_skip(
    num_hosts: int = 2, *, megabits_per_second: float | None = None
) -> Iterator[SimulatedHosts]:
    """`simulated_hosts`; without root, the test is skipped."""
    try:
        with simulated_hosts(num_hosts, megabits_per_second=megabits_per_second) as hosts:
            yield hosts
    except HostsUnavailable as error:
        pytest.skip(str(error))


def outputs_of(hosts: SimulatedHosts) -> list[tuple[int, str, str]]:
    """Do what `hosts.outputs` does. If a rank hangs, the error has the stacks of all."""
    outputs = hangs.communicate_with_all(hosts.processes)
    codes = [process.returncode for process in hosts.processes]
    hosts.processes.clear()
    return [(code, *output) for code, output in zip(codes, outputs, strict=True)]
