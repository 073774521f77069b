"""Speed, memory and host-side cost of `fa4_jax.attention` beside its peers in JAX."""
