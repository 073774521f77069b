"""Attention over a paged cache of keys and values: `decode`, and the cache itself."""

from fa4_jax.paged.cache import PagedCache
from fa4_jax.paged.call import decode

__all__ = ["PagedCache", "decode"]
