"""FlashAttention-4 for JAX."""

from fa4_jax import lse, runtime
from fa4_jax.api import attention
from fa4_jax.autodiff import save_attention_policy

__all__ = ["attention", "lse", "save_attention_policy"]

# Cheap, and needed before a program that was exported elsewhere is run: it calls the FFI target.
runtime.register()
