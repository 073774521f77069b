"""The pure-JAX attention: forward and backward, O(length) memory where there are many scores.

    s_ij = scale q_i . k_j + bias_ij,  lse_i = log sum_j exp(s_ij),  p_ij = exp(s_ij - lse_i)
    o_i  = sum_j p_ij v_j
    dv_j = sum_i p_ij do_i,  delta_i = do_i . o_i - dlse_i,  ds_ij = p_ij (do_i . v_j - delta_i)
    dq_i = scale sum_j ds_ij k_j,  dk_j = scale sum_i ds_ij q_i,  dbias_ij = ds_ij,
    dscale = sum_i q_i . dq_i / scale

Few scores are held at once (`dense`), many never are (`blockwise`).
"""

from __future__ import annotations

import dataclasses
import math
from types import ModuleType

import jax
import jax.numpy as jnp

from fa4_jax import mesh_types
from fa4_jax.operands import Cotangents, Gradients, Operands
from fa4_jax.problem import Problem
from fa4_jax.xla import blockwise, dense

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Settings:
    """Measured choices of the default path.

    Attributes:
      dense_scores: most scores, over batch and heads, that one dense block holds. They are as many
        as blocks have in flight, so that longer calls take no less memory.
    """

    dense_scores: int = blockwise.SCORES_PER_BLOCK


SETTINGS = Settings()


def implementation(problem: Problem) -> ModuleType:
    """`dense` or `blockwise`: by the number of scores, `blockwise` where that is symbolic."""
    sizes = problem.batch, problem.query_heads, problem.query_length, problem.key_length
    known = all(isinstance(size, int) for size in sizes)
    return dense if known and math.prod(sizes) <= SETTINGS.dense_scores else blockwise


def forward(problem: Problem, operands: Operands) -> tuple[Array, Array]:
    """Attention output and log-sum-exp.

    Returns:
      output [B, T, N, H] in the storage type; lse [B, N, T] f32 (f64 for f64), natural log. Rows
      that see no key or lie past their query length are 0 and -inf.
    """
    return implementation(problem).forward(problem, operands)


def backward(problem: Problem, operands: Operands, cotangents: Cotangents) -> Gradients:
    """Gradients of query, key, value (in the storage type), and of bias and scale (in theirs)."""
    return implementation(problem).backward(problem, operands, cotangents)


def nothing(problem: Problem, operands: Operands) -> tuple[Array, Array]:
    """Output and log-sum-exp, as of `forward`, where no row sees any key."""
    b, t, n = problem.batch, problem.query_length, problem.query_heads
    output = jnp.zeros((b, t, n, problem.head_dims[1]), operands.query.dtype)
    lse = jnp.full((b, n, t), -jnp.inf, problem.accumulator)
    axes = mesh_types.union_varying(operands)
    return mesh_types.cast_varying(output, axes), mesh_types.cast_varying(lse, axes)
