"""For tests on two hosts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from syncline.testing import HostsUnavailable, TwoHosts, two_hosts


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    """Two hosts: network namespaces of this machine, joined by a cable of the kernel's. Needs root; skips otherwise."""
    try:
        with two_hosts() as made:
            yield made
    except HostsUnavailable as error:
        pytest.skip(str(error))
