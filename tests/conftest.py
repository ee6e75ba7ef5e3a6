"""For all tests: a property is judged by what it finds, not by how long a busy machine takes for an example."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("syncline", deadline=None)
settings.load_profile("syncline")
