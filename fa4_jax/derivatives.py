"""Derivatives of attention as linear maps: forward, reverse, and both of the second order.

What is differentiated is a `Computation`: a plan on one device, or a device's share of a sequence
(`fa4_jax.parallel`). Reverse mode is its backward. All else is its forward and backward by the
default path, which JAX differentiates forwards, in O(length) memory: their loops have no reverse
mode, and need none.
With results y(x), a cotangent c and the function L(x) = <c, y(x)>,

    the pushforward  u -> y'(x) u                has the transpose  c -> L'(x), the pullback,
    the pullback's derivative  u -> L"(x) u      is its own transpose, and
    that of the pushforward  u -> y"(x)(u, v)    has the transpose  c -> L"(x) v.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fa4_jax import sinks
from fa4_jax.operands import Cotangents, Direction, Gradients, Operands, Results, Tangents
from fa4_jax.operations import Function, LinearMap
from fa4_jax.passes import DIFFERENTIABLE, DISPATCHED, Passes


@dataclasses.dataclass(frozen=True)
class Computation:
    """A forward and its backward, each by the passes that it is given. Hashable.

    Attributes:
      work: what is static; the first argument of both functions.
      forward: takes work, passes and operands.
      backward: takes work, passes, operands without sinks, and cotangents.
      tangent: computes tangents by kernels, from work, operands and a direction; or None.
      hessian: computes how gradients of query, key and value move, by kernels, from work, operands,
        cotangents and tangents; or None. Nothing else has a gradient then.
      fence_backward: the backward begins after the forward has ended. Without a fence common
        subexpression elimination merges the transfers of both, and keeps what was received.
    """

    work: Any
    forward: Callable[[Any, Passes, Operands], Results]
    backward: Callable[[Any, Passes, Operands, Cotangents], Gradients]
    tangent: Callable[[Any, Operands, Direction], Results] | None = None
    hessian: Callable[[Any, Operands, Cotangents, Tangents], Gradients] | None = None
    fence_backward: bool = False


class Point(NamedTuple):
    """The operands that have gradients, as in `Operands`; and their tangents or cotangents."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    bias: Any
    scale: jax.Array | None
    soft_cap: jax.Array | None
    sinks: jax.Array | None


class Moved(NamedTuple):
    """Output and log-sum-exp, and their tangents or cotangents."""

    output: jax.Array
    lse: jax.Array


def joined(others: Operands, point: Point) -> Operands:
    """The operands of which `split` made two parts."""
    return others._replace(**point._asdict())


class Fixed(NamedTuple):
    """What a derivative takes as it is: the other operands, and the results at the point."""

    others: Operands
    output: jax.Array
    lse: jax.Array

    def operands(self, point: Point) -> Operands:
        """The operands with those of a point."""
        return joined(self.others, point)


def split(operands: Operands) -> tuple[Operands, Point]:
    """The operands without those that have gradients, and these."""
    others = operands._replace(**dict.fromkeys(Point._fields))
    return others, Point(*(getattr(operands, name) for name in Point._fields))


def _default(of: Computation, fixed: Fixed, point: Point) -> Moved:
    """Output and log-sum-exp, which JAX differentiates forwards."""
    found = of.forward(of.work, DIFFERENTIABLE, fixed.operands(point))
    return Moved(found.output, found.lse)


def _gradients(
    of: Computation, passes: Passes, operands: Operands, cotangents: Cotangents
) -> Point:
    """Cotangents of the operands. The backward itself knows nothing of sinks."""
    found = of.backward(of.work, passes, operands._replace(sinks=None), cotangents)
    own = operands.sinks
    of_sinks = None if own is None else sinks.gradient(own, cotangents)
    return Point(*found, of_sinks)


def _results(fixed: Fixed, point: Point) -> Moved:
    """Arrays of the types of tangents and cotangents of results."""
    del point
    return Moved(fixed.output, fixed.lse)


def _operands(fixed: Fixed, point: Point) -> Point:
    """Arrays of the types of tangents and cotangents of operands."""
    del fixed
    return point


def _moved(of: Computation, fixed: Fixed, point: Point, moved: Point) -> Moved:
    """The tangent of the results where the point moves, by the default path."""
    return jax.jvp(functools.partial(_default, of, fixed), (point,), (moved,))[1]


def _tangents(of: Computation, fixed: Fixed, point: Point, moved: Point) -> Moved:
    """The tangent of the results where the point moves, by kernels where they compute it."""
    if of.tangent is None:
        return _moved(of, fixed, point, moved)
    direction = Direction(fixed.output, fixed.lse, moved.query, moved.key, moved.value)
    found = of.tangent(of.work, fixed.operands(point), direction)
    return Moved(found.output, found.lse)


@functools.lru_cache(maxsize=512)
def pushforward(of: Computation) -> LinearMap:
    """Tangents of operands to those of results; its transpose is the backward."""

    def apply(fixed: Fixed, point: Point, moved: Point) -> Moved:
        return _tangents(of, fixed, point, moved)

    def derivative(fixed: Fixed, point: Point, other: Point, moved: Point) -> Moved:
        return _curvature(of)(fixed, (point, moved), other)

    at_once = of.tangent is not None
    return LinearMap(apply, _results, lambda: pullback(of), derivative, traced_at_once=at_once)


@functools.lru_cache(maxsize=512)
def pullback(of: Computation) -> LinearMap:
    """Cotangents of results to those of operands: the backward."""

    def apply(fixed: Fixed, point: Point, bars: Moved) -> Point:
        if of.fence_backward:
            fixed, point, bars = jax.lax.optimization_barrier((fixed, point, bars))
        cotangents = Cotangents(fixed.output, fixed.lse, *bars)
        return _gradients(of, DISPATCHED, fixed.operands(point), cotangents)

    def derivative(fixed: Fixed, point: Point, moved: Point, bars: Moved) -> Point:
        return _hessian(of)(fixed, (point, bars), moved)

    return LinearMap(apply, _operands, lambda: pushforward(of), derivative, traced_at_once=True)


def _of_gradients(of: Computation, fixed: Fixed, point: Point, bars: Moved, moved: Point) -> Point:
    """The tangent of the cotangents of the operands where the point moves.

    The backward takes the results as they are known, so that no forward is computed again.
    """

    def gradients(point: Point, results: Moved) -> Point:
        cotangents = Cotangents(*results, *bars)
        return _gradients(of, DIFFERENTIABLE, fixed.operands(point), cotangents)

    tangents = _tangents(of, fixed, point, moved)
    if of.hessian is not None:
        cotangents = Cotangents(fixed.output, fixed.lse, *bars)
        moving = Tangents(moved.query, moved.key, moved.value, tangents.output, tangents.lse)
        return Point(*of.hessian(of.work, fixed.operands(point), cotangents, moving), sinks=None)
    at = point, Moved(fixed.output, fixed.lse)
    return jax.jvp(gradients, at, (moved, tangents))[1]


def _recomputed(of: Computation, fixed: Fixed, point: Point, bars: Moved, moved: Point) -> Point:
    """What `_of_gradients` returns, as a function of the point alone: results follow from it."""

    def gradients(point: Point) -> Point:
        results = _default(of, fixed, point)
        cotangents = Cotangents(results.output, results.lse, bars.output, bars.lse)
        return _gradients(of, DIFFERENTIABLE, fixed.operands(point), cotangents)

    return jax.jvp(gradients, (point,), (moved,))[1]


@functools.lru_cache(maxsize=512)
def _hessian(of: Computation) -> LinearMap:
    """Hessian of <bars, results> at a point with bars, which is its own transpose."""

    def apply(fixed: Fixed, point: tuple[Point, Moved], moved: Point) -> Point:
        return _of_gradients(of, fixed, *point, moved)

    def derivative(
        fixed: Fixed, point: tuple[Point, Moved], other: tuple[Point, Moved], moved: Point
    ) -> Point:
        return jax.jvp(lambda at: _recomputed(of, fixed, at[0], at[1], moved), (point,), (other,))[
            1
        ]

    at_once = of.hessian is not None
    return LinearMap(
        apply, lambda _, point: point[0], lambda: _hessian(of), derivative, traced_at_once=at_once
    )


@functools.lru_cache(maxsize=512)
def _curvature(of: Computation) -> LinearMap:
    """Second derivative of the results at a point with one tangent, linear in the other one."""

    def apply(fixed: Fixed, point: tuple[Point, Point], moved: Point) -> Moved:
        at, other = point
        return jax.jvp(lambda at: _moved(of, fixed, at, other), (at,), (moved,))[1]

    def transposed(fixed: Fixed, point: tuple[Point, Point], bars: Moved) -> Point:
        at, other = point
        return _of_gradients(of, fixed, at, bars, other)

    def derivative(
        fixed: Fixed, point: tuple[Point, Point], other: tuple[Point, Point], bars: Moved
    ) -> Point:
        def again(at: tuple[Point, Point]) -> Point:
            return _recomputed(of, fixed, at[0], bars, at[1])

        return jax.jvp(again, (point,), (other,))[1]

    def back() -> LinearMap:
        # <bars, D2(u, v)> = <u, Hessian of <bars, results> times v>.
        return LinearMap(
            *(transposed, lambda _, point: point[0], lambda: _curvature(of), derivative),
            traced_at_once=of.hessian is not None,
        )

    return LinearMap(apply, lambda fixed, _: Moved(fixed.output, fixed.lse), back)


@functools.lru_cache(maxsize=512)
def attention(of: Computation, named: Callable[[Results], Results]) -> Function:
    """The results; `named` says which of them a rematerialised layer may keep."""

    def apply(others: Operands, point: Point) -> Results:
        return of.forward(of.work, DISPATCHED, joined(others, point))

    def jvp(others: Operands, point: Point, moved: Point) -> tuple[Results, Results]:
        results = named(attention(of, named)(others, point))
        fixed = Fixed(others, results.output, results.lse)
        found = pushforward(of)(fixed, point, moved)
        top = None if results.max_logit is None else jnp.zeros_like(results.max_logit)
        return results, Results(found.output, found.lse, top)

    return Function(apply, jvp)
