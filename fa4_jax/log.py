"""The library's log, to which each message goes once."""

from __future__ import annotations

import functools
import logging

logger = logging.getLogger("fa4_jax")


@functools.lru_cache(maxsize=256)
def warn_once(message: str) -> None:
    """Logs a warning the first time that it is called with this message."""
    logger.warning(message)
