"""Operations that bring their derivatives along: linear maps with their transposes, and functions.

`jax.custom_vjp` refuses forward mode, and `jax.custom_jvp` transposes its rule operation by
operation. A call of this module is one operation, which JAX differentiates, transposes and batches
by what its `LinearMap` or `Function` says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from fa4_jax import mesh_types

Tree = Any


@dataclasses.dataclass(frozen=True, eq=False)
class LinearMap:
    """apply(fixed, point, x) is linear in x and differentiable in the point.

    All arguments and results are pytrees of arrays.

    Attributes:
      apply: takes fixed, point and x. What is fixed has no derivative: numbers that are no floats,
        and results that follow from the point.
      like: from fixed and point to arrays of the types of a result.
      transpose: makes the map from cotangents of the result to cotangents of x, at the same point.
      derivative: takes fixed, point, the point's tangent and x, and returns the result's tangent,
        for which it calls a linear map of the point's tangent. None: JAX differentiates `apply`.
      traced_at_once: `apply` is traced when the map is called, and not only where it runs. JAX has
        to see a partitioning rule in a program before it lowers it, since only then does the
        program know its devices.
    """

    apply: Callable[[Tree, Tree, Tree], Tree]
    like: Callable[[Tree, Tree], Tree]
    transpose: Callable[[], LinearMap]
    derivative: Callable[[Tree, Tree, Tree, Tree], Tree] | None = None
    traced_at_once: bool = False

    def __call__(self, fixed: Tree, point: Tree, x: Tree) -> Tree:
        """Returns apply(fixed, point, x), as one operation."""
        args = (fixed, point, x)
        leaves, structure = jax.tree.flatten(args)
        fixed_size, point_size, x_size = (len(jax.tree.leaves(arg)) for arg in args)
        like, result = jax.tree.flatten(self.like(fixed, point))
        call = _Call(self, structure, result, (fixed_size, point_size, x_size))
        types = tuple(jax.typeof(y) for y in like)
        closed = jax.make_jaxpr(self.apply)(*args) if self.traced_at_once else None
        out = _linear_p.bind(*leaves, call=call, types=types, closed=closed)
        return jax.tree.unflatten(result, out)

    def tangent(self, fixed: Tree, point: Tree, moved: Tree, x: Tree) -> Tree:
        """Returns the result's tangent where the point moves."""
        if self.derivative is not None:
            return self.derivative(fixed, point, moved, x)
        return jax.jvp(lambda point: self.apply(fixed, point, x), (point,), (moved,))[1]

    def batched(self, fixed: Tree, point: Tree, size: int) -> LinearMap:
        """Returns the map of a batch of `size` calls, whose x and results have axis 0.

        Args:
          fixed, point: of each of their arrays, 0 if it has an axis, too, and None if not.
        """
        derivative = self.derivative
        return LinearMap(
            jax.vmap(self.apply, in_axes=(fixed, point, 0)),
            jax.vmap(self.like, in_axes=(fixed, point), axis_size=size),
            lambda: self.transpose().batched(fixed, point, size),
            derivative and jax.vmap(derivative, in_axes=(fixed, point, point, 0)),
            self.traced_at_once,
        )


@dataclasses.dataclass(frozen=True)
class _Call:
    """How the operands and results of the operation are those of a map.

    Attributes:
      arguments, result: structures of (fixed, point, x) and of the result.
      sizes: the numbers of arrays of fixed, point and x.
    """

    map: LinearMap
    arguments: Any
    result: Any
    sizes: tuple[int, int, int]

    def parts(self, leaves: Any) -> tuple[list[Any], list[Any], list[Any]]:
        """Returns the leaves of fixed, point and x."""
        fixed, point, _ = self.sizes
        leaves = list(leaves)
        return leaves[:fixed], leaves[fixed : fixed + point], leaves[fixed + point :]

    def trees(self, leaves: Any) -> list[Tree]:
        """Returns fixed, point and x of operands, or of anything that there is one of for each."""
        structures = jax.tree.unflatten(self.arguments, [0] * sum(self.sizes))
        return [
            jax.tree.unflatten(jax.tree.structure(part), of_part)
            for part, of_part in zip(structures, self.parts(leaves), strict=True)
        ]


_linear_p = Primitive("fa4_jax_linear")
_linear_p.multiple_results = True


def _run(*leaves: Any, call: _Call, types: tuple[Any, ...], closed: Any) -> list[Any]:
    del types
    if closed is not None:
        return jaxpr_as_fun(closed)(*leaves)
    return jax.tree.leaves(call.map.apply(*call.trees(leaves)))


def _types(*operands: Any, call: _Call, types: tuple[Any, ...], closed: Any) -> list[Any]:
    del operands, call, closed
    return list(types)


def _is_zero(x: Any) -> bool:
    return isinstance(x, ad.Zero)


def _jvp(
    primals: Any, tangents: Any, *, call: _Call, types: tuple[Any, ...], closed: Any
) -> tuple[Any, Any]:
    """The tangents of the point and of x add up."""
    out = _linear_p.bind(*primals, call=call, types=types, closed=closed)
    _, of_point, of_x = call.parts(tangents)
    fixed, point, x = call.trees(primals)
    moved = [ad.instantiate_zeros(t) for t in (*of_point, *of_x)]
    point_moved = jax.tree.unflatten(jax.tree.structure(point), moved[: len(of_point)])
    x_moved = jax.tree.unflatten(jax.tree.structure(x), moved[len(of_point) :])
    terms = list[Tree]()
    if not all(map(_is_zero, of_x)):
        terms.append(call.map(fixed, point, x_moved))
    if not all(map(_is_zero, of_point)):
        terms.append(call.map.tangent(fixed, point, point_moved, x))
    if not terms:
        return out, [jnp.zeros_like(y) for y in out]
    return out, jax.tree.leaves(jax.tree.map(lambda *some: sum(some[1:], some[0]), *terms))


def _transpose(
    cotangents: Any, *leaves: Any, call: _Call, types: tuple[Any, ...], closed: Any
) -> list[Any]:
    del types, closed
    fixed, point, x = call.parts(leaves)
    others = [None] * (len(fixed) + len(point))
    if all(map(_is_zero, cotangents)):
        return [*others, *[None] * len(x)]
    fixed, point, _ = call.trees(leaves)
    bars = jax.tree.unflatten(call.result, [ad.instantiate_zeros(bar) for bar in cotangents])
    return [*others, *jax.tree.leaves(call.map.transpose()(fixed, point, bars))]


def _batch(
    leaves: Any, axes: Any, *, call: _Call, types: tuple[Any, ...], closed: Any
) -> tuple[list[Any], list[int]]:
    del types, closed
    (size,) = {x.shape[axis] for x, axis in zip(leaves, axes, strict=True) if axis is not None}
    leaves, others = list(leaves), len(leaves) - call.sizes[2]
    mapped = [i for i, axis in enumerate(axes) if axis is not None or i >= others]
    arrays = [
        jnp.broadcast_to(leaves[i], (size, *leaves[i].shape))
        if axes[i] is None
        else jnp.moveaxis(leaves[i], axes[i], 0)
        for i in mapped
    ]
    for i, array in zip(mapped, mesh_types.leading_alike(arrays), strict=True):
        leaves[i] = array
    fixed_axes, point_axes, _ = call.trees([None if axis is None else 0 for axis in axes])
    out = jax.tree.leaves(call.map.batched(fixed_axes, point_axes, size)(*call.trees(leaves)))
    return out, [0] * len(out)


_linear_p.def_impl(jax.jit(_run, static_argnames=("call", "types", "closed")))
_linear_p.def_abstract_eval(_types)
mlir.register_lowering(_linear_p, mlir.lower_fun(_run, multiple_results=True))
ad.primitive_jvps[_linear_p] = _jvp
ad.primitive_transposes[_linear_p] = _transpose
batching.primitive_batchers[_linear_p] = _batch


@dataclasses.dataclass(frozen=True, eq=False)
class Function:
    """A function of what is fixed, as for a `LinearMap`, and of a point, in which it is smooth.

    It is one operation under every transformation. JAX forgets the rule of a `custom_jvp` when it
    linearizes a loop, so that there would be no second derivative.

    Attributes:
      apply: takes fixed and point.
      jvp: takes fixed, point and the point's tangent; returns results and their tangents, which
        are linear maps of that one.
    """

    apply: Callable[[Tree, Tree], Tree]
    jvp: Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]

    def __call__(self, fixed: Tree, point: Tree) -> Tree:
        """Returns apply(fixed, point), as one operation."""
        leaves, arguments = jax.tree.flatten((fixed, point))
        closed, shape = jax.make_jaxpr(self.apply, return_shape=True)(fixed, point)
        out = _function_p.bind(*leaves, function=self, arguments=arguments, closed=closed)
        return jax.tree.unflatten(jax.tree.structure(shape), out)

    def batched(self, fixed: Tree, point: Tree) -> Function:
        """Returns the function of a batch of calls, whose results have axis 0.

        Args:
          fixed, point: of each of their arrays, 0 if it has an axis, too, and None if not.
        """
        return Function(
            jax.vmap(self.apply, in_axes=(fixed, point)),
            jax.vmap(self.jvp, in_axes=(fixed, point, point)),
        )


_function_p = Primitive("fa4_jax_function")
_function_p.multiple_results = True


def _run_function(*leaves: Any, function: Function, arguments: Any, closed: Any) -> list[Any]:
    del function, arguments
    return jaxpr_as_fun(closed)(*leaves)


def _types_of_function(*operands: Any, function: Function, arguments: Any, closed: Any) -> Any:
    del operands, function, arguments
    return closed.out_avals


def _jvp_of_function(
    primals: Any, tangents: Any, *, function: Function, arguments: Any, closed: Any
) -> tuple[Any, Any]:
    del closed
    fixed, point = jax.tree.unflatten(arguments, primals)
    of_point = list(tangents)[len(jax.tree.leaves(fixed)) :]
    moved = jax.tree.unflatten(jax.tree.structure(point), map(ad.instantiate_zeros, of_point))
    results, found = function.jvp(fixed, point, moved)
    return jax.tree.leaves(results), jax.tree.leaves(found)


def _batch_function(
    leaves: Any, axes: Any, *, function: Function, arguments: Any, closed: Any
) -> tuple[list[Any], list[int]]:
    del closed
    leaves = [
        x if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(leaves, axes, strict=True)
    ]
    flags = jax.tree.unflatten(arguments, [None if axis is None else 0 for axis in axes])
    out = jax.tree.leaves(function.batched(*flags)(*jax.tree.unflatten(arguments, leaves)))
    return out, [0] * len(out)


_function_p.def_impl(jax.jit(_run_function, static_argnames=("function", "arguments", "closed")))
_function_p.def_abstract_eval(_types_of_function)
mlir.register_lowering(_function_p, mlir.lower_fun(_run_function, multiple_results=True))
ad.primitive_jvps[_function_p] = _jvp_of_function
batching.primitive_batchers[_function_p] = _batch_function
