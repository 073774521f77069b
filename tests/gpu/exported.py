"""Exports programs for Hopper GPUs on a machine without any; tests/gpu/test_exported.py runs them.

JAX_PLATFORMS=cpu python -m tests.gpu.exported      # anywhere: writes build/exported
python -m pytest tests/gpu/test_exported.py         # on such a GPU, with that folder
"""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import jax
import jax.export
import jax.numpy as jnp

import fa4_jax
from fa4_jax.conformance.cases import Case

ARCH = "sm_90a"
FOLDER = pathlib.Path(__file__).resolve().parents[2] / "build" / "exported"
OPTIONS = {"is_causal": True, "query_offset": 60, "deterministic": True, "return_residual": True}

CASE = Case(
    head_dim=128,
    batch=2,
    heads=(8, 2),
    query_length=700,
    key_length=900,
    is_causal=True,
    query_offset=60,
    key_lengths=(900, 411),
    deterministic=True,
)
PROGRAMS = {"fixed": "", "symbolic_batch": "b", "symbolic": "bts"}
"""The programs, with the names of their symbolic dimensions."""


def both_ways(q: Any, k: Any, v: Any, lengths: Any, bars: tuple[Any, Any], **options: Any) -> Any:
    """Returns output, log-sum-exp, and the gradients of query, key and value."""

    def run(q: Any, k: Any, v: Any) -> Any:
        return fa4_jax.attention(q, k, v, key_value_seq_lengths=lengths, **OPTIONS, **options)

    results, transpose = jax.vjp(run, q, k, v)
    return (*results, *transpose(bars))


def operands(symbols: str) -> tuple[Any, ...]:
    """Returns the types of the arguments of `both_ways`."""
    sizes: dict[str, Any] = {"b": CASE.batch, "t": CASE.query_length, "s": CASE.key_length}
    if symbols:
        sizes |= zip(symbols, jax.export.symbolic_shape(",".join(symbols)), strict=True)
    b, t, s = sizes["b"], sizes["t"], sizes["s"]
    n, k = CASE.heads
    query = jax.ShapeDtypeStruct((b, t, n, CASE.head_dim), jnp.bfloat16)
    key = jax.ShapeDtypeStruct((b, s, k, CASE.head_dim), jnp.bfloat16)
    lengths = jax.ShapeDtypeStruct((b,), jnp.int32)
    return query, key, key, lengths, (query, jax.ShapeDtypeStruct((b, n, t), jnp.float32))


def main() -> None:
    """Writes the programs."""
    if jax.default_backend() != "cpu":
        raise SystemExit(f"this is to show an export without a GPU, but JAX has {jax.devices()}")
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, symbols in PROGRAMS.items():
        exported = jax.export.export(
            jax.jit(functools.partial(both_ways, arch=ARCH)),
            platforms=("cuda",),
            disabled_checks=fa4_jax.export_checks(),
        )(*operands(symbols))
        blob = exported.serialize()
        (FOLDER / name).write_bytes(blob)
        launches = exported.mlir_module().count('kernel = "')
        print(f"{FOLDER / name}: {len(blob)} bytes, {launches} launches for {ARCH}")


if __name__ == "__main__":
    main()
