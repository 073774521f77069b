"""Every ValueError and NotImplementedError about a call's arguments. Nothing below checks again."""

from __future__ import annotations

import math
import numbers
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from fa4_jax.bands import LIMIT, Window, limits
from fa4_jax.problem import Problem, default_scale

DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "f32", "float64": "f64"}
IMPLEMENTATIONS = (None, "kernel", "xla")
NUMERICS = ("fast", "exact")

_INT32 = np.iinfo(np.int32)


def is_static(x: Any) -> bool:
    """Whether x has a value now, rather than when the program runs."""
    return not isinstance(x, jax.core.Tracer)


def arrays(query: jax.Array, key: jax.Array, value: jax.Array) -> None:
    """Ranks, sizes and types of the three operands, as the caller gave them.

    Raises:
      ValueError: the operands do not fit together.
      NotImplementedError: a floating type that no implementation takes.
    """
    operands = {"query": query, "key": key, "value": value}
    for name, x in operands.items():
        if x.ndim not in (3, 4):
            raise ValueError(f"{name} must have 3 or 4 dimensions, got shape {x.shape}")
        if x.ndim != query.ndim:
            raise ValueError(f"{name} has shape {x.shape} but query has shape {query.shape}")
        if x.dtype != query.dtype:
            raise ValueError(f"{name} has dtype {x.dtype} but query has dtype {query.dtype}")
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"{name} must be floating point, got dtype {x.dtype}")
        if x.dtype.name not in DTYPES:
            raise NotImplementedError(f"{name} has dtype {x.dtype}; supported: {', '.join(DTYPES)}")
        for dimension, size in zip(("heads", "head_dim"), x.shape[-2:], strict=True):
            if not isinstance(size, int):
                raise NotImplementedError(
                    f"{name} has symbolic {dimension}, {size}: only batch and lengths "
                    "may be symbolic"
                )
        if x.shape[-1] == 0 or x.shape[-2] == 0:
            raise ValueError(f"{name} must have heads and a head_dim, got shape {x.shape}")
    if value.shape[:-1] != key.shape[:-1]:
        raise ValueError(f"value has shape {value.shape} but key has shape {key.shape}")
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(f"key has head_dim {key.shape[-1]} but query has {query.shape[-1]}")
    if query.ndim == 4 and query.shape[0] != key.shape[0]:
        raise ValueError(f"key has batch size {key.shape[0]} but query has {query.shape[0]}")
    if query.shape[-2] % key.shape[-2]:
        raise ValueError(
            f"query has {query.shape[-2]} heads, not a multiple of key's {key.shape[-2]}"
        )
    for name, x in operands.items():
        if isinstance(x.shape[-3], int) and x.shape[-3] >= LIMIT:
            raise NotImplementedError(f"{name} has length {x.shape[-3]}, the limit is {LIMIT}")


def dense(name: str, x: jax.Array | None, shape: tuple[int, int, int, int]) -> None:
    """A bias or mask, already of rank 4, against [B, N, T, S].

    Raises:
      ValueError: it does not broadcast, or has the wrong type.
    """
    if x is None:
        return
    if x.ndim != 4 or any(size not in (1, full) for size, full in zip(x.shape, shape, strict=True)):
        raise ValueError(f"{name} must broadcast to [B, N, T, S] = {shape}, got shape {x.shape}")
    if name == "mask" and x.dtype != jnp.bool_:
        raise ValueError(f"mask must be boolean, got dtype {x.dtype} (an additive one is a bias)")
    if name == "bias" and not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"bias must be floating point, got dtype {x.dtype}")


def lengths(name: str, x: Any, batch: int) -> Any:
    """Per-batch lengths as an array. Traced values cannot be checked: negative ones count as 0.

    Returns:
      [B] of an integer type, of NumPy where no JAX array was given; None for None.

    Raises:
      ValueError: not integers that fit int32, not [B], or negative.
    """
    if x is None:
        return None
    x = _integers(name, x)
    if x.shape != (batch,):
        raise ValueError(f"{name} must have shape [B] = ({batch},), got {x.shape}")
    if is_static(x) and (np.asarray(x) < 0).any():
        raise ValueError(f"{name} must not be negative, got {np.asarray(x).tolist()}")
    return x


def token_counts(name: str, x: Any, batch: int) -> Any:
    """Counts of tokens as an array: [] or [B] of an integer type.

    Raises:
      ValueError: another type or shape.
    """
    x = _integers(name, x)
    if x.shape not in ((), (batch,)):
        raise ValueError(f"{name} must have shape [] or [B] = ({batch},), got {x.shape}")
    return x


def query_offset(x: Any, batch: int) -> Any:
    """Offset as an array.

    Returns:
      [] or [B] of an integer type, of NumPy where no JAX array was given.

    Raises:
      ValueError: another type or shape, or beyond the limit.
    """
    x = token_counts("query_offset", x, batch)
    if isinstance(x, np.ndarray) and (beyond := x[abs(x) >= LIMIT]).size:
        raise ValueError(f"query_offset must be within +-{LIMIT}, got {beyond[0]}")
    return x


def _integers(name: str, x: Any) -> Any:
    """A number, an array, or a list of numbers, as an array of an integer type.

    Raises:
      ValueError: it is none, or a static one does not fit int32.
    """
    if isinstance(x, list | tuple) and any(isinstance(y, jax.Array) for y in x):
        x = jnp.stack([jnp.asarray(_integers(name, y)) for y in x])
    elif not isinstance(x, jax.Array):
        given, x = x, np.asarray(x)
        if x.dtype == object and all(isinstance(y, numbers.Integral) for y in x.ravel()):
            raise ValueError(f"{name} must fit int32, got {_largest(x)}")
        if x.dtype.kind in "OUS":
            raise ValueError(f"{name} must be an integer or an array of them, got {given!r}")
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(f"{name} must be of an integer type, got dtype {x.dtype}: {x}")
    if is_static(x) and x.size and x.dtype.itemsize >= 4 and x.dtype != jnp.int32:
        largest = _largest(np.asarray(x))
        if not _INT32.min <= largest <= _INT32.max:
            raise ValueError(f"{name} must fit int32, got {largest}")
    return x


def _largest(x: np.ndarray) -> int:
    """The element furthest from 0."""
    return max(int(x.min()), int(x.max()), key=abs)


def scale(x: Any, head_dim: int) -> tuple[float | None, jax.Array | None]:
    """Softmax scale: its value, or what is traced. None means 1 / sqrt(head_dim).

    Raises:
      ValueError: not a scalar; or static and not positive and finite (in float32).
    """
    return (default_scale(head_dim), None) if x is None else _positive("scale", x)


def _positive(name: str, x: Any) -> tuple[float | None, jax.Array | None]:
    """A number or what is traced, the other being None.

    Raises:
      ValueError: not a scalar; or static and not positive and finite (in float32).
    """
    if not is_static(x):
        if x.shape != () or not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"{name} must be one floating-point number, got {x.dtype}{[*x.shape]}")
        return None, x
    if isinstance(x, bool) or not isinstance(x, numbers.Real | np.ndarray | jax.Array):
        raise ValueError(f"{name} must be a number, got {x!r}")
    if shape := getattr(x, "shape", ()):
        raise ValueError(f"{name} must be a scalar, got shape {shape}")
    with np.errstate(over="ignore", under="ignore"):
        value = float(np.float32(x))
    if not (math.isfinite(value) and value >= np.finfo(np.float32).tiny):
        raise ValueError(f"{name} must be positive and finite, got {x}")
    return float(x), None


def soft_cap(x: Any) -> tuple[float | None, jax.Array | None]:
    """Cap of the scores: its value, or what is traced; None for both without one.

    Raises:
      ValueError: not a scalar; or static and not positive and finite (in float32).
    """
    return (None, None) if x is None else _positive("logits_soft_cap", x)


def sinks(x: Any, query_heads: int) -> jax.Array | None:
    """Sinks as an array [N].

    Raises:
      ValueError: another shape, or not floating.
    """
    if x is None:
        return None
    x = jnp.asarray(x)
    if x.shape != (query_heads,):
        raise ValueError(f"sinks must have shape [N] = ({query_heads},), got {x.shape}")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"sinks must be floating point, got dtype {x.dtype}")
    return x


def static_scale(x: float | None) -> float:
    """The scale of a problem where it has to be static.

    Raises:
      NotImplementedError: it is traced.
    """
    if x is None:
        raise NotImplementedError("scale is traced; fa4_jax.parallel takes a static one")
    return x


def window(size: Any, is_causal: bool, name: str = "local_window_size") -> Window:
    """(left, right) in keys, causality included; UNBOUNDED for no limit.

    Raises:
      ValueError: not an int or a pair of ints >= 0 or None.
    """
    flag("is_causal", is_causal)
    pair = size if isinstance(size, tuple | list) else (size, size)
    if len(pair) != 2:
        raise ValueError(f"{name} must be an int or (left, right), got {size}")
    for side in pair:
        if side is None:
            continue
        if isinstance(side, bool) or not isinstance(side, numbers.Integral):
            raise ValueError(f"{name} must be an int or (left, right), got {size}")
        if side < 0:
            raise ValueError(f"{name} must not be negative (None is open), got {size}")
    left, right = (None if side is None else int(side) for side in pair)
    return limits(left, right, is_causal)


def tokens(name: str, x: Any, batch: int, length: int, rank: int) -> Any:
    """One integer for each token.

    Args:
      rank: of query; 3 drops the batch axis.

    Returns:
      [B, L] or [1, L], [L] for rank 3, of an integer type whose values fit int32; of NumPy where no
      JAX array was given.

    Raises:
      ValueError: another type or shape.
    """
    x = _integers(name, x)
    shapes = ((length,),) if rank == 3 else ((batch, length), (1, length))
    if x.shape not in shapes:
        expected = f"[{length}]" if rank == 3 else f"[{batch} or 1, {length}]"
        raise ValueError(f"{name} must have shape {expected}, got {x.shape}")
    if not is_static(x) and not np.can_cast(x.dtype, np.int32):
        raise ValueError(f"{name} must be of a type that fits int32, got dtype {x.dtype}")
    return x


MOST_INTERVALS = 3


def intervals(name: str, x: Any, batch: int, length: int, rank: int) -> Any:
    """Ends of intervals as integers [B|1, T, n], n at most MOST_INTERVALS; [T, n] for rank 3.

    Raises:
      ValueError: another type or shape.
    """
    x = _integers(name, x)
    shapes = ((length,),) if rank == 3 else ((batch, length), (1, length))
    if x.shape[:-1] not in shapes or not 1 <= x.shape[-1] <= MOST_INTERVALS:
        expected = f"[{length}, n]" if rank == 3 else f"[{batch} or 1, {length}, n]"
        raise ValueError(
            f"{name} must have shape {expected} with 1 <= n <= {MOST_INTERVALS}, got {x.shape}"
        )
    return x


def prefix_lengths(x: Any, batch: int) -> Any:
    """Lengths of prefixes as an array: [] or [B] of an integer type.

    Raises:
      ValueError: another type or shape.
    """
    return token_counts("prefix's lengths", x, batch)


def window_side(x: Any) -> Any:
    """One side of a window as an integer array [].

    Raises:
      ValueError: another type or shape.
    """
    x = _integers("mask: window", x)
    if x.shape != ():
        raise ValueError(f"mask: window takes one integer a side, got shape {x.shape}")
    return x


def chunk_size(x: Any) -> int:
    """Positions in a chunk.

    Raises:
      ValueError: no int >= 1.
    """
    if isinstance(x, bool) or not isinstance(x, numbers.Integral) or x < 1:
        raise ValueError(f"chunked's size must be an int >= 1, got {x}")
    return int(x)


def index(name: str, x: Any, count: int) -> int:
    """A static index of one of `count` things.

    Raises:
      ValueError: no int, or out of range.
    """
    is_int = isinstance(x, numbers.Integral) and not isinstance(x, bool)
    if not is_int or not 0 <= int(x) < count:
        raise ValueError(f"{name} must be within 0 to {count - 1}, got {x}")
    return int(x)


def is_array(x: Any) -> bool:
    """Whether x is an array, rather than a number or None."""
    return isinstance(x, jax.Array | np.ndarray)


def flag(name: str, x: Any) -> bool:
    """A static boolean.

    Raises:
      ValueError: anything else.
    """
    if not isinstance(x, bool | np.bool_):
        raise ValueError(f"{name} must be True or False, got {x}")
    return bool(x)


def choice(name: str, x: Any, choices: tuple[Any, ...]) -> Any:
    """One of a few strings.

    Raises:
      ValueError: another value.
    """
    if x not in choices:
        raise ValueError(f"{name} must be one of {choices}, got {x!r}")
    return x


def known_sizes(problem: Problem, who: str) -> None:
    """Checks the sizes of a call that needs them while its program is traced.

    Raises:
      NotImplementedError: one is symbolic (`jax.export`).
    """
    for name in ("batch", "query_length", "key_length"):
        if not isinstance(size := getattr(problem, name), int):
            raise NotImplementedError(
                f"{who} takes no symbolic {name.replace('_', ' ')}, got {size}"
            )


def nothing(sizes: tuple[int, int, int]) -> bool:
    """Whether there is nothing to compute with batch, query length and key length."""
    return 0 in sizes


def is_empty(problem: Problem) -> bool:
    """Whether there is nothing to compute: no batch, no queries or no keys."""
    return nothing((problem.batch, problem.query_length, problem.key_length))
