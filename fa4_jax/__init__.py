"""FlashAttention-4 for JAX."""

from fa4_jax import lse, runtime
from fa4_jax.api import attention
from fa4_jax.autodiff import save_attention_policy
from fa4_jax.export import export_checks
from fa4_jax.support import explain, supports

__all__ = ["attention", "explain", "export_checks", "lse", "save_attention_policy", "supports"]

# Cheap, and needed before a program that was exported elsewhere is run: it calls the FFI target.
runtime.register()
