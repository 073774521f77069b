"""Times masks given as functions beside PyTorch's flex_attention, flash-attn-4 and jax.nn.

    python -m benchmarks.mask_peers [--length 8192] [--head-dim 128] [--triangle]

The masks are those of `benchmarks.pair_masks`. What says which tiles a mask has (our table, the
others' block masks) is made before, as a model does once for all layers. flex_attention is
compiled by torch.compile; flash-attn-4 takes its mask_mod and block sparsity, forward alone; jax.nn
takes the mask as a boolean array. --triangle times AlphaFold's triangle attention instead, beside
jax.nn and our default path: a pair bias of every head, with its gradient, and the mask of residues.
"""

from __future__ import annotations

import argparse
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import pair_masks, torch_peer
from benchmarks.measure import describe
from benchmarks.timing import Call, Protocol, Timing, interleave
from fa4_jax import attention, masks

Array = jax.Array
Operands = tuple[Array, Array, Array]
WAYS = ("forward", "forward and backward")
BLOCK_KEYS = (128, 176, 192, 160, 112, 96, 80, 64)
"""Keys of a block that flash-attn-4 is asked for; its kernel takes one of these."""


def jax_calls(
    attend: Callable[..., Array], given: tuple[Any, ...], gradients: int = 3
) -> list[Call]:
    """Returns a forward, and a forward with the gradients of the first operands."""

    def loss(*given: Any) -> Array:
        return attend(*given).astype(jnp.float32).sum()

    functions = jax.jit(attend), jax.jit(jax.grad(loss, argnums=tuple(range(gradients))))
    return [functools.partial(function, *given) for function in functions]


def flex_calls(operands: Operands, function: Any) -> list[Call]:
    """Returns the calls of flex_attention; function: of torch's tensors."""
    torch: Any = torch_peer.load_torch()
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    torch._dynamo.reset()  # After some masks it would compile no more.
    length = operands[0].shape[1]
    q, k, v = (
        torch.from_dlpack(x).clone().transpose(1, 2).contiguous().requires_grad_() for x in operands
    )
    blocks = flex.create_block_mask(function, None, None, length, length, device=q.device)
    attend = functools.partial(torch.compile(flex.flex_attention, dynamic=False), block_mask=blocks)
    ones = torch.ones_like(q)

    def forward() -> Any:
        with torch.no_grad():
            return torch_peer.Tensors(torch, (attend(q, k, v).transpose(1, 2),))

    def gradients() -> Any:
        found = torch.autograd.grad(attend(q, k, v), (q, k, v), ones)
        return torch_peer.Tensors(torch, tuple(x.transpose(1, 2) for x in found))

    return [forward, gradients]


def cute_masks() -> dict[str, Any]:
    """Returns the masks as functions of CuTe-DSL's vectors, as flash-attn-4 takes them."""
    cutlass: Any = importlib.import_module("cutlass")
    cute: Any = importlib.import_module("cutlass.cute")
    utils: Any = importlib.import_module("flash_attn.cute.utils")

    def number(value: int) -> Any:
        return utils.scalar_to_ssa(value, cutlass.Int32)

    @cute.jit
    def causal(b: Any, h: Any, q: Any, k: Any, info: Any, arrays: Any) -> Any:
        return k <= q

    @cute.jit
    def sliding(b: Any, h: Any, q: Any, k: Any, info: Any, arrays: Any) -> Any:
        return (k <= q) & (k > q - number(pair_masks.WINDOW))

    @cute.jit
    def prefix(b: Any, h: Any, q: Any, k: Any, info: Any, arrays: Any) -> Any:
        return (k <= q) | (k < number(pair_masks.PREFIX))

    @cute.jit
    def half_partial(b: Any, h: Any, q: Any, k: Any, info: Any, arrays: Any) -> Any:
        even = (q // number(128) + k // number(128)) % number(2) == number(0)
        return even | ((q + k) % number(3) > number(0))

    return {"causal": causal, "sliding": sliding, "prefix": prefix, "half partial": half_partial}


def flash_attn_4_calls(operands: Operands, function: Any) -> list[Call]:
    """Returns the forward of flash-attn-4 with a mask_mod and its block sparsity."""
    modules = torch_peer.load()
    if isinstance(modules, str):
        raise RuntimeError(modules)
    torch = modules.torch
    sparsity = importlib.import_module("flash_attn.cute.compute_block_sparsity")
    q, k, v = (torch.from_dlpack(x).clone() for x in operands)
    length = q.shape[1]
    errors = []
    for keys in BLOCK_KEYS:
        sizes = (128, keys, 1, 1, length, length)
        found = sparsity.compute_block_sparsity(*sizes, function, None, q.device)
        blocks = found if hasattr(found, "mask_block_cnt") else found[1]
        attend = functools.partial(
            modules.flash.flash_attn_func, mask_mod=function, block_sparse_tensors=blocks
        )
        try:
            attend(q, k, v)
        except Exception as error:
            errors.append(describe(error)[:200])
            continue

        def forward(attend: Any = attend) -> Any:
            with torch.no_grad():
                found = attend(q, k, v)
            return torch_peer.Tensors(torch, (found[0] if isinstance(found, tuple) else found,))

        return [forward]
    raise RuntimeError("; ".join(errors))


def dense(mask: Any, length: int) -> Array:
    """Returns a mask that is a function as a boolean array [1, 1, length, length]."""
    position, zero = jnp.arange(length), jnp.int32(0)
    return jax.jit(mask.fn)(zero, zero, position[:, None], position, *mask.operands)[None, None]


def output_of(call: Call) -> Array:
    """Returns what a forward computes."""
    found = call()
    return found.arrays()[0] if isinstance(found, torch_peer.Tensors) else found


def timings(contenders: dict[str, Callable[[], list[Call]]], loops: int) -> dict[str, list[str]]:
    """Returns cells of each contender: the largest difference of its output from the first one's,
    milliseconds of its calls; or why there are none.
    """
    ready: dict[str, list[Call]] = {}
    cells: dict[str, list[str]] = {}
    expected = None
    for name, make in contenders.items():
        try:
            calls = make()
            output = output_of(calls[0]).astype(jnp.float32)
            for call in calls[1:]:
                jax.block_until_ready(call())
        except Exception as error:  # One contender must not end the table.
            cells[name] = [describe(error)[:300]]
            continue
        expected = output if expected is None else expected
        ready[name] = calls
        cells[name] = [f"{jnp.abs(output - expected).max():.1e}"]
    for i, _ in enumerate(WAYS):
        calls = {name: own[i] for name, own in ready.items() if i < len(own)}
        for name, found in interleave(calls, Protocol(loops=loops)).items():
            text = f"{found.median * 1e3:.3f}" if isinstance(found, Timing) else describe(found)
            cells[name].append(text[:60])
    return cells


def jax_nn(implementation: Any, given: tuple[Any, ...], gradients: int, *names: str) -> list[Call]:
    """Returns the calls of jax.nn; names: of the operands after query, key and value."""

    def attend(query: Array, key: Array, value: Array, *more: Array) -> Array:
        options: Any = dict(zip(names, more, strict=True))
        return jax.nn.dot_product_attention(
            query, key, value, implementation=implementation, **options
        )

    return jax_calls(attend, given, gradients)


def ours(implementation: Any, given: tuple[Any, ...], gradients: int, *names: str) -> list[Call]:
    """Returns the calls of fa4_jax.attention; names: as `jax_nn`."""

    def attend(query: Array, key: Array, value: Array, *more: Any) -> Array:
        options: Any = dict(zip(names, more, strict=True))
        return attention(query, key, value, implementation=implementation, **options)

    return jax_calls(attend, given, gradients)


def of_mask(
    operands: Operands, name: str, mask: masks.Mask, ids: np.ndarray
) -> dict[str, Callable[[], list[Call]]]:
    """Returns the contenders of a mask; ids: of the documents of the rows."""
    boolean = dense(mask, operands[0].shape[1])
    table = masks.tile_table(mask, *operands[:2])
    return {
        "fa4_jax": lambda: ours("kernel", (*operands, table), 3, "mask"),
        "flex_attention": lambda: flex_calls(operands, torch_function(name, ids)),
        "flash-attn-4": lambda: flash_attn_4_calls(operands, cute_masks()[name]),
        "jax.nn cudnn": lambda: jax_nn("cudnn", (*operands, boolean), 3, "mask"),
        "jax.nn xla": lambda: jax_nn("xla", (*operands, boolean), 3, "mask"),
    }


def torch_function(name: str, ids: np.ndarray) -> Any:
    """Returns the mask of a name as a function of torch's tensors."""
    torch: Any = torch_peer.load_torch()
    if name != "documents":
        return getattr(pair_masks, name.replace(" ", "_"))
    on_device = torch.from_numpy(ids[None]).cuda()
    return lambda b, h, q, k: pair_masks.documents(b, h, q, k, on_device)


def of_triangle(length: int) -> dict[str, Callable[[], list[Call]]]:
    """Returns the contenders of triangle attention: each row of residues is a batch element."""
    heads, head_dim = 4, 32
    keys = jax.random.split(jax.random.key(length), 5)
    shape = (length, length, heads, head_dim)
    operands = [jax.random.normal(key, shape, jnp.bfloat16) for key in keys[:3]]
    bias = jax.random.normal(keys[3], (1, heads, length, length), jnp.bfloat16)
    given = (*operands, bias, jax.random.uniform(keys[4], (1, 1, 1, length)) < 0.9)
    return {
        "fa4_jax": lambda: ours("kernel", given, 4, "bias", "mask"),
        "fa4_jax, default path": lambda: ours("xla", given, 4, "bias", "mask"),
        "jax.nn cudnn": lambda: jax_nn("cudnn", given, 4, "bias", "mask"),
        "jax.nn xla": lambda: jax_nn("xla", given, 4, "bias", "mask"),
    }


def problems(options: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields names and contenders of what is timed."""
    if options.triangle:
        for length in (256, 512, 768):
            yield f"{length} residues", of_triangle(length)
        return
    length = options.length
    keys = jax.random.split(jax.random.key(0), 3)
    shape = (1, length, options.heads, options.head_dim)
    q, k, v = (jax.random.normal(key, shape, jnp.bfloat16) for key in keys)
    ids = pair_masks.document_ids(length)
    for name, (mask, _) in pair_masks.pairs_of_masks(jnp.asarray(ids)[None]).items():
        yield name, of_mask((q, k, v), name, mask, ids)


def main() -> None:
    """Prints a table."""
    parser = pair_masks.parser(__doc__)
    parser.add_argument("--triangle", action="store_true")
    options = parser.parse_args()
    torch_peer.load_torch()  # before JAX starts its devices
    torch_peer.load()
    table = Table("of", "contender", "difference", *(f"{way} [ms]" for way in WAYS))
    for name, contenders in problems(options):
        for contender, cells in timings(contenders, options.loops).items():
            table.add_row(name, contender, *cells)
            print(name, contender, *cells, flush=True)  # A run that is cut short has these lines.
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
