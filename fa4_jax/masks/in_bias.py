"""A mask beside a dense bias, for the kernels: -inf in the bias where it hides.

Kernels with a bias read neither bits nor ranges. Where the bias has an element for every pair that
the mask tells apart, the mask becomes part of it: one more array of the bias's size. AlphaFold's
pair bias beside a mask of residues is such a call; a bias that batch entries share, beside a mask
of each, is not.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp

from fa4_jax.boxes import Whole, positions
from fa4_jax.operands import Operands
from fa4_jax.plan import unsupported
from fa4_jax.problem import Problem
from fa4_jax.xla.tile import in_ranges

Array = jax.Array


def moved(operands: Operands, problem: Problem) -> tuple[Operands, Problem]:
    """The call without its mask, whose dense bias says the same; or as it was, where the bias
    cannot, or no kernel would take the other call either.
    """
    none = {"has_mask": False, "has_ranges": False, "has_tags": False}
    bare = dataclasses.replace(problem, **none)
    if problem.bias != "dense" or unsupported(bare) is not None or not _fits(operands, problem):
        return operands, problem
    bias = jnp.where(_visible(operands, problem), operands.bias, -jnp.inf)
    return operands._replace(bias=bias, mask=None, pairs=None, rows=None), bare


def _fits(operands: Operands, problem: Problem) -> bool:
    """Whether there is a mask, and its pairs are the bias's; not known of symbolic lengths."""
    masked = problem.has_mask or problem.has_ranges
    if not masked or operands.bits is not None:  # Prepared for calls without a bias.
        return False
    shape = jax.eval_shape(lambda: _visible(operands, problem)).shape
    bias = operands.bias.shape
    if not all(isinstance(size, int) for size in (*shape, *bias)):
        return False
    return all(mine in (1, theirs) for mine, theirs in zip(shape, bias, strict=True))


def _visible(operands: Operands, problem: Problem) -> Array:
    """Which row sees which key by a call's masks, bool [B|1, N|1, T|1, S|1]."""
    box = Whole(problem.query_length, problem.key_length)
    seen: list[Any] = []
    if operands.mask is not None:
        seen.append(operands.mask)
    if operands.pairs is not None:
        seen.append(operands.pairs.seen(box))
    if operands.rows is not None:
        parts = in_ranges(operands.rows, box, positions(box.key, box.keys))
        seen += [part[:, None] for part in parts]
    return functools.reduce(operator.and_, seen)
