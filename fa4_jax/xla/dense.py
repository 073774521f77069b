"""The attention of few scores: one tile, without a loop, so that it compiles fast.

The backward computes exp(score - maximum) again as the forward does, which the compiler finds in a
program that holds both passes, and exp(maximum - log-sum-exp) row by row.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fa4_jax.operands import Cotangents, Gradients, Operands, Results
from fa4_jax.problem import Problem
from fa4_jax.xla import tile as tiles
from fa4_jax.xla.tile import Call, Tile

Array = jax.Array


def _whole(problem: Problem, operands: Operands) -> tuple[Call, Tile]:
    t, s = problem.query_length, problem.key_length
    return tiles.make_call(problem, operands, t, s), Tile(0, t, 0, s)


def forward(problem: Problem, operands: Operands) -> Results:
    """Output, log-sum-exp and largest scores, as `xla.forward`."""
    call, tile = _whole(problem, operands)
    keys = tiles.make_keys(call, operands).part(tile)
    query = call.query_of(tiles.known_rows(operands.query, call), tile)
    found = tiles.softmax(call.scores(call.scaled(query, keys), tile))
    top, total, acc = found.top, found.total, tiles.weighted(found.weights, keys)
    max_logit = tiles.max_logit(call, top, total)
    if operands.sinks is not None:
        top, total, acc = tiles.with_sinks(operands.sinks, top, total, acc)
    o, lse = tiles.finish(call, top, total, acc)
    o = tiles.native_rows(o.astype(operands.query.dtype))
    return Results(o, lse.reshape(lse.shape[0], problem.query_heads, -1), max_logit)


def backward(problem: Problem, operands: Operands, cotangents: Cotangents) -> Gradients:
    """Gradients of the operands, as `xla.backward`."""
    call, tile = _whole(problem, operands)
    keys = tiles.make_keys(call, operands).part(tile)
    rows = tiles.make_rows(call, operands, cotangents)
    own = rows.part(tile, call)
    scaled = call.scaled(own.query, keys)
    scores = call.scores(scaled, tile)
    found = tiles.softmax(scores)
    # Not 1 / found.total: the log-sum-exp may be that of more keys than this call's.
    share = jnp.exp(found.top - own.shift)
    weights = call.hide(found.weights * share, scores, tile, 0.0)
    products = tiles.products(call, own, keys, weights, scaled, tile)
    return tiles.gradients(call, operands, rows, products)
