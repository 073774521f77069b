"""A user's function of scores, `score_fn` of `attention`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fa4_jax.boxes import Box, Boxed, Dimensions, Indices, Whole, traced

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScoreFunction(Boxed):
    """fn(score, b, h, q, k), with the indices `at`."""

    fn: Callable[..., Any] = dataclasses.field(metadata={"static": True})
    at: Indices

    def changed(self, scores: Array, box: Box) -> Array:
        """What becomes of a box's scores [B, N, rows, keys]."""
        return self.fn(scores, *self.at.of(box))

    def mapped(self, change: Callable[[Array, Dimensions], Any]) -> Any:
        return dataclasses.replace(self, at=self.at.mapped(change))


def checked(
    fn: Any, sizes: tuple[int, int, int, int], offset: Any, dtype: str
) -> ScoreFunction | None:
    """A function of scores, which is traced once to check what it returns; None for None.

    Args:
      sizes: batch, query heads, query and key length.
      offset: query offset, integers [] or [B].
      dtype: of the scores.

    Raises:
      ValueError: it cannot be called or traced, or does not return scores.
    """
    if fn is None:
        return None
    if not callable(fn):
        raise ValueError(f"score_fn must be a function of (score, b, h, q, k), got {fn!r}")
    found = ScoreFunction(fn, Indices.of_call(sizes, offset))
    scores = jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype))
    box = Whole(*sizes[2:])
    result: Any = traced("score_fn", lambda x, s: x.changed(s, box), found, scores)
    if not isinstance(result, jax.ShapeDtypeStruct) or result.shape != sizes:
        raise ValueError(
            f"score_fn must return scores of the shape {sizes} that it is given, got {result}: it "
            "has to be elementwise"
        )
    if result.dtype != scores.dtype:
        raise ValueError(f"score_fn must return {scores.dtype} as it is given, got {result.dtype}")
    return found
