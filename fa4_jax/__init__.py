"""FlashAttention-4 for JAX."""
