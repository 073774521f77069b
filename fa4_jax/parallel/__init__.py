"""Context parallelism: one attention over sequences that are sharded along their lengths."""

from fa4_jax.parallel.cost import Choice, Estimate, Rates, choose
from fa4_jax.parallel.decode import local_decode
from fa4_jax.parallel.layout import from_zigzag, to_zigzag
from fa4_jax.parallel.local import local_attention
from fa4_jax.parallel.schemes import AllGather, Ring, RingUlysses, Scheme, Ulysses
from fa4_jax.parallel.sharded import attention

__all__ = [
    "AllGather",
    "Choice",
    "Estimate",
    "Rates",
    "Ring",
    "RingUlysses",
    "Scheme",
    "Ulysses",
    "attention",
    "choose",
    "from_zigzag",
    "local_attention",
    "local_decode",
    "to_zigzag",
]
