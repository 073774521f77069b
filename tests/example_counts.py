"""How many examples hypothesis tries in tests that take long: all, or in `make test` a share."""

from __future__ import annotations

SHARE = 0.25
share = 1.0
"""What tests/conftest.py makes SHARE in `make test`, before any test's module asks for a count."""


def count(most: int) -> int:
    """Returns how many of at most `most` examples a test tries."""
    return max(1, round(most * share))
