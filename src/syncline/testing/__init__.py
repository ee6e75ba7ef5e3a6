"""Testing distributed code: `@pytest.mark.ranks(n)` and the pool behind it (see `plugin`)."""
