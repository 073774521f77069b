"""Times attention with biases beside the same calls without, and beside jax.nn; prints a table.

    python -m benchmarks.bias [--length 4096] [--head-dim 128] [--xla]

"with its gradient" is a forward and a backward that computes the gradient of the bias, too.
"""

from __future__ import annotations

import argparse
import functools
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from benchmarks.pair_masks import milliseconds
from benchmarks.timing import Call, Protocol, interleave
from fa4_jax import attention, bias

Array = jax.Array
WAYS = ("forward", "forward and backward", "with its gradient")


def forms(heads: int, length: int) -> dict[str, tuple[Any, Any]]:
    """Returns arrays of biases, and what makes biases of them, by name."""
    keys = jax.random.split(jax.random.key(1), 5)
    return {
        "alibi": (jax.random.uniform(keys[0], (heads,)) / length, bias.alibi),
        "relative": (jax.random.normal(keys[1], (32, heads)), bias.relative),
        "banded, 256 keys": (
            jax.random.normal(keys[4], (1, heads, length, 256)),
            bias.banded,
        ),
        "dense, of all heads": (
            jax.random.normal(keys[2], (1, 1, length, length), jnp.bfloat16),
            lambda x: x,
        ),
        "dense": (
            jax.random.normal(keys[3], (1, heads, length, length), jnp.bfloat16),
            lambda x: x,
        ),
    }


def calls_of(operands: tuple[Array, ...], attend: Any, own: tuple[Any, Any] | None) -> list[Call]:
    """Returns the calls of WAYS; own: the array of a bias, and what makes a bias of it, or None."""
    array, made = (jnp.zeros(()), lambda _: None) if own is None else own

    def loss(array: Array, *operands: Array) -> Array:
        return attend(*operands, made(array)).astype(jnp.float32).sum()

    gradients = jax.jit(jax.grad(loss, argnums=(1, 2, 3)))
    everything = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))
    forward = jax.jit(lambda array, *operands: attend(*operands, made(array)))
    calls = (forward, gradients, everything)
    return [functools.partial(call, array, *operands) for call in calls]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--loops", type=int, default=5)
    parser.add_argument("--xla", action="store_true", help="jax.nn's XLA beside it, where it fits")
    options = parser.parse_args()
    shape = (options.batch, options.length, options.heads, options.head_dim)
    keys = jax.random.split(jax.random.key(0), 3)
    operands = tuple(jax.random.normal(key, shape, jnp.bfloat16) for key in keys)
    ours = functools.partial(attention, is_causal=options.causal)
    theirs = functools.partial(jax.nn.dot_product_attention, is_causal=options.causal)
    calls = {("none", "ours"): calls_of(operands, ours, None)}
    for name, own in forms(options.heads, options.length).items():
        calls[name, "ours"] = calls_of(operands, ours, own)
        if options.xla and name.startswith("dense"):
            calls[name, "jax.nn"] = calls_of(operands, theirs, own)
    named = {
        f"{name}/{who}/{way}": call
        for (name, who), some in calls.items()
        for way, call in zip(WAYS, some, strict=True)
    }
    timings = interleave(named, Protocol(loops=options.loops))
    found = {key: milliseconds(timing) for key, timing in timings.items()}
    table = Table("bias", "by", *(f"{way} [ms]" for way in WAYS), *(f"plain / {w}" for w in WAYS))
    for name, who in calls:
        own = [found[f"{name}/{who}/{way}"] for way in WAYS]
        plain = [found[f"none/ours/{way}"] for way in WAYS]
        ratios = (f"{p / x:.3f}" for p, x in zip(plain, own, strict=True))
        table.add_row(name, who, *(f"{x:.3f}" for x in own), *ratios)
    Console(width=160).print(jax.devices()[0].device_kind, table)


if __name__ == "__main__":
    main()
