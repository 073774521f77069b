"""Makes one attention call in a fresh process and prints how long each step took, as JSON.

    python -m benchmarks.first_call fa4_jax 4 8192 16 128

The arguments are "fa4_jax" or an implementation of jax.nn.dot_product_attention, then batch,
length, heads and head dim. JAX itself, its devices and a first computation come before the clock of
the call starts.
"""

from __future__ import annotations

import json
import sys
import time


class Clock:
    """Measures the seconds of each step since it was created."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self.steps: dict[str, float] = {}

    def step(self, name: str) -> None:
        """Ends a step."""
        now = time.perf_counter()
        self.steps[name] = now - self._last
        self._last = now


def main() -> None:
    """Prints the steps; the time of its imports is measured, too."""
    name, *sizes = sys.argv[1:]
    batch, length, heads, head_dim = map(int, sizes)
    clock = Clock()

    import jax
    import jax.numpy as jnp

    clock.step("jax_import")
    keys = jax.random.split(jax.random.key(0), 3)
    shape = (batch, length, heads, head_dim)
    inputs = [jax.random.normal(key, shape, jnp.bfloat16) for key in keys]
    jax.block_until_ready(inputs)
    clock.step("jax_start")

    if name == "fa4_jax":
        import fa4_jax

        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return fa4_jax.attention(q, k, v, is_causal=True)
    else:

        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return jax.nn.dot_product_attention(
                q,
                k,
                v,
                is_causal=True,
                implementation=name,  # type: ignore[arg-type]
            )

    clock.step("import")
    lowered = jax.jit(attend).lower(*inputs)
    clock.step("trace")
    compiled = lowered.compile()
    clock.step("compile")
    jax.block_until_ready(compiled(*inputs))
    clock.step("run")
    print(json.dumps(clock.steps))


if __name__ == "__main__":
    main()
