"""The benchmarks measure speed, memory and host-side cost of `fa4_jax.attention` and its peers in
JAX.
"""
