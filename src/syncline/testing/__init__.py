"""Tests with ranks: `@pytest.mark.ranks(n)` (see `syncline.testing.plugin`)."""
