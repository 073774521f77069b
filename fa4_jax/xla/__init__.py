"""The pure-JAX attention: forward and backward, O(length) memory where there are many scores.

    s_ij = cap(scale q_i . k_j) + bias_ij,  lse_i = log sum_j exp(s_ij),  p_ij = exp(s_ij - lse_i)
    o_i  = sum_j p_ij v_j
    dv_j = sum_i p_ij do_i,  delta_i = do_i . o_i - dlse_i,  ds_ij = p_ij (do_i . v_j - delta_i)
    dq_i = scale sum_j ds_ij k_j,  dk_j = scale sum_i ds_ij q_i,  dbias_ij = ds_ij,
    dscale = sum_i q_i . dq_i / scale

With a soft cap c, cap(x) = c tanh(x / c), and ds of the other gradients is (1 - tanh^2) of the one
above. A sink is one more term of the sum over j, with a value of 0.

Few scores are held at once (`dense`), many never are (`blockwise`).
"""

from __future__ import annotations

import dataclasses
import math
from types import ModuleType

import jax
import jax.numpy as jnp

from fa4_jax import mesh_types
from fa4_jax.operands import Cotangents, Direction, Gradients, Operands, Results, Tangents
from fa4_jax.problem import Problem
from fa4_jax.xla import blockwise, dense

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Settings:
    """Measured choices of the default path.

    Attributes:
      dense_scores: most scores, over batch and heads, that one dense block holds. They are as many
        as a CPU's blocks have in flight, so that longer calls take no less memory.
    """

    dense_scores: int = blockwise.BLOCK_SIZES["cpu"].scores


SETTINGS = Settings()


def implementation(problem: Problem) -> ModuleType:
    """`dense` or `blockwise`: by the number of scores, `blockwise` where that is symbolic."""
    sizes = problem.batch, problem.query_heads, problem.query_length, problem.key_length
    known = all(isinstance(size, int) for size in sizes)
    return dense if known and math.prod(sizes) <= SETTINGS.dense_scores else blockwise


def forward(problem: Problem, operands: Operands) -> Results:
    """Attention output, log-sum-exp and largest scores.

    Returns:
      output [B, T, N, H] in the storage type; lse [B, N, T] f32 (f64 for f64), natural log. Rows
      that see no key or lie past their query length are 0 and -inf; with sinks the former's is the
      sink. max_logit [B, N] f32, where it is wanted.
    """
    return implementation(problem).forward(problem, operands)


def backward(problem: Problem, operands: Operands, cotangents: Cotangents) -> Gradients:
    """Gradients of query, key, value (in the storage type), bias, scale, soft cap (in theirs)."""
    return implementation(problem).backward(problem, operands, cotangents)


def tangent(problem: Problem, operands: Operands, direction: Direction) -> Results:
    """Tangents of output and log-sum-exp where query, key and value move."""

    def results(*moved: jax.Array) -> tuple[jax.Array, jax.Array]:
        found = forward(problem, operands._replace(query=moved[0], key=moved[1], value=moved[2]))
        return found.output, found.lse

    primals = operands.query, operands.key, operands.value
    moved = direction.query, direction.key, direction.value
    _, (output, lse) = jax.jvp(results, primals, moved)
    return Results(output, lse)


def hessian(
    problem: Problem, operands: Operands, cotangents: Cotangents, tangents: Tangents
) -> Gradients:
    """Tangents of the gradients of query, key and value where operands and results move."""

    def gradients(at: Tangents) -> tuple[Array, Array, Array]:
        own = operands._replace(query=at.query, key=at.key, value=at.value)
        bars = cotangents._replace(output=at.output, lse=at.lse)
        found = backward(problem, own, bars)
        return found.query, found.key, found.value

    operands_there = operands.query, operands.key, operands.value
    at = Tangents(*operands_there, cotangents.output, cotangents.lse)
    query, key, value = jax.jvp(gradients, (at,), (tangents,))[1]
    return Gradients(query, key, value, None)


def nothing(problem: Problem, operands: Operands) -> Results:
    """The results of `forward` where no row sees any key."""
    b, t, n = problem.batch, problem.query_length, problem.query_heads
    output = jnp.zeros((b, t, n, problem.head_dims[1]), operands.query.dtype)
    lse = jnp.full((b, n, t), -jnp.inf, problem.accumulator)
    if operands.sinks is not None:
        lse = jnp.broadcast_to(operands.sinks[None, :, None], lse.shape)
        if problem.has_lengths:
            used = jnp.arange(t)[None, :] < operands.extents[:, :1]
            lse = jnp.where(used[:, None], lse, -jnp.inf)
    max_logit = jnp.full((b, n), -jnp.inf, jnp.float32) if problem.returns_max_logit else None
    axes = mesh_types.union_varying(operands)
    results = Results(output, lse, max_logit)
    return jax.tree.map(lambda x: mesh_types.cast_varying(x, axes), results)
