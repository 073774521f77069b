"""Times forward mode and second derivatives beside the forward and jax.nn, and prints tables.

    python -m benchmarks.tangents [--head-dims 64 128] [--lengths 1024 4096 16384] [--loops 7]

Cells have TOKENS tokens of WIDTH features, bfloat16. "forward and tangent" is `jax.jvp` of
`fa4_jax.attention`, "default path" the same with implementation="xla", "jax.nn" that of
`jax.nn.dot_product_attention` (XLA), which holds [T, S] scores and is left out where these do not
fit. Memory is what a compiled jvp needs beside its arguments and results. The second table has the
gradient of a jvp whose tangent is stopped, as MeanFlow's loss has it, and Hessian-vector products.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from benchmarks.timing import Call, Protocol, Timing, interleave
from fa4_jax import attention

Array = jax.Array
Attend = Callable[..., Array]

TOKENS, WIDTH = 32768, 2048
MOST_SCORES = 2**31
"""Elements of [B, N, T, S] with which jax.nn is timed."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """One shape: [TOKENS / length, length, WIDTH / head_dim, head_dim] of q, k and v."""

    head_dim: int
    length: int
    is_causal: bool

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return TOKENS // self.length, self.length, WIDTH // self.head_dim, self.head_dim

    @property
    def name(self) -> str:
        return f"d{self.head_dim} S={self.length} {'causal' if self.is_causal else 'dense'}"

    @property
    def scores(self) -> int:
        """Elements of [B, N, T, S]."""
        batch, length, heads, _ = self.shape
        return batch * heads * length * length

    def operands(self) -> tuple[Array, ...]:
        """Returns q, k, v and their tangents."""
        keys = jax.random.split(jax.random.key(0), 6)
        return tuple(jax.random.normal(key, self.shape, jnp.bfloat16) for key in keys)


def ways(cell: Cell) -> dict[str, Attend]:
    """Returns the ways to compute a cell's attention, by name."""
    ours = functools.partial(attention, is_causal=cell.is_causal)
    found: dict[str, Attend] = {
        "ours": ours,
        "default path": functools.partial(ours, implementation="xla"),
    }
    if cell.scores <= MOST_SCORES:
        found["jax.nn"] = functools.partial(
            jax.nn.dot_product_attention, is_causal=cell.is_causal, implementation="xla"
        )
    return found


def tangent(attend: Attend) -> Callable[..., Any]:
    """Output and its tangent, of q, k, v and their tangents."""
    return lambda *x: jax.jvp(attend, x[:3], x[3:])


def gradient_of_tangent(attend: Attend) -> Callable[..., Any]:
    """Gradients of a loss of the output and of a tangent that is stopped, as in MeanFlow."""

    def loss(*x: Array) -> Array:
        output, moved = jax.jvp(attend, x[:3], x[3:])
        error = output - jax.lax.stop_gradient(moved)
        return (error.astype(jnp.float32) ** 2).sum()

    return jax.grad(loss, (0, 1, 2))


def hessian_product(attend: Attend) -> Callable[..., Any]:
    """The Hessian of a loss of q, k and v times their tangents."""

    def loss(*x: Array) -> Array:
        return (attend(*x).astype(jnp.float32) ** 2).sum()

    return lambda *x: jax.jvp(jax.grad(loss, (0, 1, 2)), x[:3], x[3:])[1]


def compiled(function: Callable[..., Any], operands: tuple[Array, ...]) -> tuple[Call, float]:
    """Returns a call, and MB that it needs beside arguments and results."""
    program = jax.jit(function).lower(*operands).compile()
    found: Any = program.memory_analysis()
    return functools.partial(program, *operands), found.temp_size_in_bytes / 1e6


def timed(
    functions: dict[str, tuple[Callable[..., Any], tuple[Array, ...]]], protocol: Protocol
) -> dict[str, tuple[float, float]]:
    """Returns milliseconds and temporary MB of each function, by name; NaN if it fails."""
    calls, memory = dict[str, Call](), dict[str, float]()
    for name, (function, operands) in functions.items():
        try:
            calls[name], memory[name] = compiled(function, operands)
        except Exception as error:
            Console().print(f"{name}: {error}"[:300])
    results = interleave(calls, protocol)
    return {
        name: (x.median * 1e3 if isinstance(x, Timing) else float("nan"), memory[name])
        for name, x in results.items()
    }


def first_order(cells: list[Cell], protocol: Protocol, alone: bool) -> Table:
    """Times forwards, and forwards with tangents; alone: ours without the others."""
    table = Table(
        *("cell", "forward [ms]", "forward and tangent [ms]", "over forward", "memory [MB]"),
        *("default path [ms]", "jax.nn [ms]"),
    )
    for cell in cells:
        operands, listed = cell.operands(), ways(cell)
        functions = {"forward": (listed["ours"], operands[:3])}
        chosen = ["ours"] if alone else list(listed)
        functions |= {name: (tangent(listed[name]), operands) for name in chosen}
        found = timed(functions, protocol)
        forward, (both, memory) = found["forward"][0], found["ours"]
        others = (found.get(name, (float("nan"), 0.0))[0] for name in ("default path", "jax.nn"))
        table.add_row(
            *(cell.name, f"{forward:.3f}", f"{both:.3f}", f"{both / forward:.2f}"),
            *(f"{memory:.2f}", *(f"{x:.3f}" for x in others)),
        )
    return table


def second_order(cells: list[Cell], protocol: Protocol, alone: bool) -> Table:
    """Times gradients of tangents and Hessian-vector products; alone: ours without jax.nn."""
    table = Table("cell", "what", "ours [ms]", "memory [MB]", "jax.nn [ms]", "jax.nn / ours")
    for cell in cells:
        operands, listed = cell.operands(), ways(cell)
        for name, make in (
            ("gradient of a stopped tangent", gradient_of_tangent),
            ("Hessian-vector product", hessian_product),
        ):
            names = ("ours",) if alone else ("ours", "jax.nn")
            chosen = {way: listed[way] for way in names if way in listed}
            found = timed({way: (make(x), operands) for way, x in chosen.items()}, protocol)
            ours, memory = found["ours"]
            other = found.get("jax.nn", (float("nan"), 0.0))[0]
            numbers = f"{ours:.3f}", f"{memory:.2f}", f"{other:.3f}", f"{other / ours:.2f}"
            table.add_row(cell.name, name, *numbers)
    return table


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--lengths", type=int, nargs="*", default=[1024, 4096, 16384])
    parser.add_argument("--second", type=int, nargs="*", default=[4096], help="lengths of table 2")
    parser.add_argument("--loops", type=int, default=7)
    parser.add_argument("--alone", action="store_true", help="time ours without the others")
    options = parser.parse_args()
    protocol, console = Protocol(options.loops), Console(width=140)
    for lengths, make in ((options.lengths, first_order), (options.second, second_order)):
        cells = [
            Cell(head_dim, length, is_causal)
            for head_dim in options.head_dims
            for length in lengths
            for is_causal in (False, True)
        ]
        if cells:
            console.print(make(cells, protocol, options.alone))


if __name__ == "__main__":
    main()
