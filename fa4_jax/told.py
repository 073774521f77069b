"""What the library says in its log, each thing once."""

from __future__ import annotations

import functools
import logging

logger = logging.getLogger("fa4_jax")


@functools.lru_cache(maxsize=256)
def once(message: str) -> None:
    """A warning, the first time."""
    logger.warning(message)
