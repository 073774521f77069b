"""What tests of derivatives share: calls, derivatives, and a comparison in float64."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from fa4_jax import attention, autodiff, sinks
from fa4_jax.derivatives import Computation
from fa4_jax.operands import Cotangents, Operands, Results
from fa4_jax.passes import DISPATCHED

Point = dict[str, jax.Array]
Function = Callable[[Point], Any]


def loss(function: Callable[..., Any]) -> Callable[..., jax.Array]:
    """A function of output and log-sum-exp, none of whose derivatives is zero."""

    def of_all(*args: Any) -> jax.Array:
        output, lse = function(*args)
        return jnp.sin(output).sum() + (jnp.where(lse == -jnp.inf, 0, lse) ** 2).sum()

    return of_all


def close(actual: Any, expected: Any) -> None:
    """Fails unless all arrays are equal up to the rounding of float64."""

    def same(a: jax.Array, b: jax.Array) -> None:
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)

    jax.tree.map(same, actual, expected)


@dataclasses.dataclass(frozen=True)
class Call:
    """A call: which operands it has besides query, key and value, its options and who sees whom."""

    name: str
    more: tuple[str, ...]
    options: dict[str, Any]
    visible: np.ndarray

    def ours(self, point: Point) -> Any:
        return attention(**point, **self.options, return_residual=True)

    def plain(self, point: Point) -> Any:
        """Output and log-sum-exp, 0 and -inf (the sink, if there are any) in rows without keys."""
        heads, head_dim = point["query"].shape[2:]
        key, value = (
            jnp.repeat(point[x], heads // point[x].shape[2], axis=2) for x in ("key", "value")
        )
        s = jnp.einsum("btnh,bsnh->bnts", point["query"], key)
        s = s * (point["scale"] if "scale" in point else head_dim**-0.5)
        cap = (self.options | point).get("logits_soft_cap")
        if cap is not None:
            s = cap * jnp.tanh(s / cap)
        if "bias" in point:
            s = s + point["bias"]
        seen = jnp.asarray(self.visible)
        e = jnp.where(seen, jnp.exp(jnp.where(seen, s, 0)), 0)
        total = e.sum(-1)
        if "sinks" in point:
            total = total + jnp.exp(point["sinks"])[None, :, None]
        some = total > 0
        safe = jnp.where(some, total, 1)
        output = jnp.einsum("bnts,bsnh->btnh", e / safe[..., None], value)
        return output, jnp.where(some, jnp.log(safe), -jnp.inf)


def inner(one: Point, other: Point) -> jax.Array:
    return sum(((one[name] * other[name]).sum() for name in one), jnp.zeros(()))


def jvp(function: Function, x: Point, u: Point, v: Point) -> Any:
    return jax.jvp(function, (x,), (u,))


def jvp_of_grad(function: Function, x: Point, u: Point, v: Point) -> Any:
    return jax.jvp(jax.grad(loss(function)), (x,), (u,))


def grad_of_grad(function: Function, x: Point, u: Point, v: Point) -> Any:
    return jax.grad(lambda x: inner(jax.grad(loss(function))(x), u))(x)


def grad_of_jvp(function: Function, x: Point, u: Point, v: Point) -> Any:
    """Of both, the results and their tangents."""

    def of_both(x: Point, u: Point) -> jax.Array:
        (output, _), (moved, of_lse) = jax.jvp(function, (x,), (u,))
        return (output * moved).sum() + (of_lse**2).sum()

    return jax.grad(of_both, (0, 1))(x, u)


def jvp_of_jvp(function: Function, x: Point, u: Point, v: Point) -> Any:
    return jax.jvp(lambda x: jax.jvp(function, (x,), (u,)), (x,), (v,))


def mean_flow(function: Function, x: Point, u: Point, v: Point) -> Any:
    """A gradient over a jvp whose tangent is a target without one (MeanFlow, section 4)."""

    def of_point(x: Point) -> jax.Array:
        (output, _), (moved, _) = jax.jvp(function, (x,), (u,))
        return ((output - jax.lax.stop_gradient(v["query"] - moved)) ** 2).sum()

    return jax.grad(of_point)(x)


def linearized(function: Function, x: Point, u: Point, v: Point) -> Any:
    _, tangent = jax.linearize(function, x)
    back = jax.linear_transpose(tangent, x)
    output, lse = tangent(u)
    return (output, lse), back((output, lse))


DERIVATIVES = (
    *(jvp, jvp_of_grad, grad_of_grad, grad_of_jvp),
    *(jvp_of_jvp, mean_flow, linearized),
)


def by_custom_vjp(of: Computation, operands: Operands) -> Results:
    """The results of a computation by a `custom_vjp`, without forward mode."""

    @jax.custom_vjp
    def run(operands: Operands) -> Results:
        return of.forward(of.work, DISPATCHED, operands)

    def forward(operands: Operands) -> Any:
        found = run(operands)
        output = checkpoint_name(found.output, autodiff.OUTPUT_NAME)
        lse = checkpoint_name(found.lse, autodiff.LSE_NAME)
        return found._replace(output=output, lse=lse), (operands, output, lse)

    def backward(residuals: Any, bars: Results) -> tuple[Operands]:
        if of.fence_backward:
            residuals, bars = jax.lax.optimization_barrier((residuals, bars))
        operands, output, lse = residuals
        cotangents = Cotangents(output, lse, bars.output, bars.lse)
        plain = operands._replace(sinks=None)
        found = of.backward(of.work, DISPATCHED, plain, cotangents)._asdict()
        own = operands.sinks
        found["sinks"] = None if own is None else sinks.gradient(own, cotangents)
        return (jax.tree.map(lambda _: None, operands)._replace(**found),)

    run.defvjp(forward, backward)
    return run(operands)


def opcodes(program: str) -> collections.Counter[str]:
    """Counts the instructions of an optimised program."""
    return collections.Counter(re.findall(r"= \S+ ([a-z][a-z0-9-]*)\(", program))
