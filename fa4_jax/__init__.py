"""FlashAttention-4 for JAX."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from fa4_jax import bias, lse, masks, runtime
from fa4_jax.api import attention
from fa4_jax.autodiff import save_attention_policy
from fa4_jax.export import export_checks
from fa4_jax.paged import PagedCache, decode
from fa4_jax.support import explain, supports

if TYPE_CHECKING:
    from fa4_jax import flax, parallel

__version__ = "0.1.0"

__all__ = [
    "PagedCache",
    "attention",
    "bias",
    "decode",
    "explain",
    "export_checks",
    "flax",
    "lse",
    "masks",
    "parallel",
    "save_attention_policy",
    "supports",
]

# Cheap, and needed before a program that was exported elsewhere is run: it calls the FFI target.
runtime.register()


def __getattr__(name: str) -> ModuleType:
    """Imports `flax` and `parallel` at their first use, since few programs need them."""
    if name in ("flax", "parallel"):
        return importlib.import_module(f"fa4_jax.{name}")
    raise AttributeError(f"module 'fa4_jax' has no attribute {name!r}")
