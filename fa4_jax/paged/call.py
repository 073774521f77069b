"""The public call."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal, TypedDict, Unpack, overload

import jax
from jax.typing import ArrayLike

from fa4_jax import dispatch, validate, xla
from fa4_jax import plan as plans
from fa4_jax.api import Implementation, Window, find_target
from fa4_jax.operands import Results
from fa4_jax.paged import blockwise, gather, kernel, mesh
from fa4_jax.paged.arguments import DecodeCall, canonicalise
from fa4_jax.paged.problem import PagedOperands, PagedPlan, PagedProblem, without_keys
from fa4_jax.problem import Problem


class Options(TypedDict, total=False):
    """Keyword arguments of `decode` that do not decide what it returns."""

    query_lengths: ArrayLike | None
    scale: float | jax.Array | None
    local_window_size: Window
    logits_soft_cap: float | jax.Array | None
    sinks: ArrayLike | None
    key_scale: ArrayLike | None
    value_scale: ArrayLike | None
    implementation: Implementation
    check: bool


@overload
def decode(
    query: ArrayLike,
    key_pages: ArrayLike,
    value_pages: ArrayLike,
    page_table: ArrayLike,
    lengths: ArrayLike,
    *,
    return_residual: Literal[False] = False,
    **options: Unpack[Options],
) -> jax.Array: ...


@overload
def decode(
    query: ArrayLike,
    key_pages: ArrayLike,
    value_pages: ArrayLike,
    page_table: ArrayLike,
    lengths: ArrayLike,
    *,
    return_residual: Literal[True],
    **options: Unpack[Options],
) -> tuple[jax.Array, jax.Array]: ...


def decode(
    query: ArrayLike,
    key_pages: ArrayLike,
    value_pages: ArrayLike,
    page_table: ArrayLike,
    lengths: ArrayLike,
    *,
    query_lengths: ArrayLike | None = None,
    scale: float | jax.Array | None = None,
    local_window_size: Window = None,
    logits_soft_cap: float | jax.Array | None = None,
    sinks: ArrayLike | None = None,
    key_scale: ArrayLike | None = None,
    value_scale: ArrayLike | None = None,
    return_residual: bool = False,
    implementation: Implementation = None,
    check: bool = False,
) -> Any:
    """Causal attention of the last T tokens of sequences whose keys and values lie in pages.

    The keys and values of the T tokens are in the pages before the call (`PagedCache`). Row i of
    entry b is its token number lengths[b] - T + i and sees the tokens up to and with itself.

    Args:
      query: [B, T, N, H]; bfloat16, float16, float32 or float64.
      key_pages, value_pages: [P, page, K, H], of query's dtype or float8_e4m3fn. N is a multiple of
        K; query head n uses KV head n // (N // K). Values may have another head dim.
      page_table: int32 [B, M]: the pages of each entry, in the order of its tokens; entries may
        share pages. Numbers past ceil(lengths / page) are never read; others are clamped to
        [0, P - 1], so that a wrong one reads a wrong page and does not fault.
      lengths: integers [B], not negative: cached tokens, the T new ones included; clamped to
        [0, M page]. Where one is less than T, the first rows see nothing.
      query_lengths: integers [B], not negative, T by default, clamped to [0, T]: rows 0 to
        query_lengths[b] - 1 are the last tokens of entry b, the rows after them are padding.
      scale: positive; 1 / sqrt(H) by default.
      local_window_size: (left, right): a row sees the `left` tokens before it and itself; None is
        open, an int is both, and right has no effect, since the call is causal.
      logits_soft_cap: positive; scores become cap * tanh(score / cap) after the scale.
      sinks: [N], floating: a score of each head with a value of 0, as one more key.
      key_scale, value_scale: float32 [K] or [P, K], factors of float8_e4m3fn pages; 1 by default.
        A key or value is the product, rounded to query's type.
      return_residual: also return the log-sum-exp of each row.
      implementation: "kernel" insists on the kernels (CUDA; bfloat16 or float16; scale a number),
        "xla" is the default path, pure JAX in O(length) memory. None takes kernels where they fit,
        and says in the log why not where a program is lowered for CUDA. Kernels read pages of a
        multiple of 16 tokens: for up to 64 rows T * N / K, and for any number where there are
        neither sinks nor a soft cap. Otherwise, and for other pages and float8, they take a
        copy of the pages that rows see, in query's type: `explain` says its size, the log that
        there is one, and a call for which it exceeds 4 GiB takes the default path.
      check: names lengths and page numbers that are out of range instead of clamping them:
        ValueError outside jit, inside through `jax.experimental.checkify.checkify`.

    Returns:
      The output, like query (with the values' head dim); a row that sees no token, or lies past its
      query length, is 0. With return_residual, (output, lse): lse is float32 (float64 for float64)
      [B, N, T], natural logarithm, -inf for such rows; with sinks a row that sees no token has its
      sink. There is no derivative: train with `attention`.

    Raises:
      ValueError: an argument is wrong; its name and value are in the message.
      NotImplementedError: no implementation takes this call; the message says why.
    """
    call = DecodeCall(
        *(query, key_pages, value_pages, page_table, lengths),
        query_lengths=query_lengths,
        scale=scale,
        local_window_size=local_window_size,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
        key_scale=key_scale,
        value_scale=value_scale,
        check=check,
    )
    return run(call, implementation, return_residual)


def run(call: DecodeCall, implementation: Implementation, return_residual: bool) -> Any:
    """What a call returns.

    Raises:
      ValueError, NotImplementedError: as `decode`.
    """
    operands, problem = canonicalise(call)
    validate.flag("return_residual", return_residual)
    plan = make_plan(problem, implementation, find_target(None))
    output, lse, _ = mesh.decode_on_mesh(attend, plan, operands)
    return (output, lse) if return_residual else output


def make_plan(
    problem: PagedProblem, implementation: Implementation, target: plans.Target
) -> PagedPlan:
    """What computes a call: the kernels where they fit, otherwise the default path.

    Raises:
      ValueError: there is no such implementation.
      NotImplementedError: the caller insists on a kernel, and there is none.
    """
    validate.choice("implementation", implementation, validate.IMPLEMENTATIONS)
    if implementation == "xla":
        return PagedPlan(problem, None)
    own, reason = kernel_problem(problem)
    if reason is None:
        found = plans.make_plan(own, target, implementation)
        if found.forward:
            return PagedPlan(problem, None, found)
        reason = found.forward_reason
    if implementation == "kernel":
        raise NotImplementedError(
            f"implementation='kernel': {reason}; implementation=None or 'xla' is the default path"
        )
    return PagedPlan(problem, reason)


def kernel_problem(problem: PagedProblem) -> tuple[Problem, str | None]:
    """What the kernels' plan is made of, and why no kernel takes it or None.

    Kernels read the pages themselves where they can, otherwise a copy.
    """
    pages = kernel.of_pages(problem)
    if unread(problem) is None:
        return pages, None
    own = gather.contiguous(problem)
    return own, plans.unsupported(own) or gather.unsupported(problem)


def unread(problem: PagedProblem) -> str | None:
    """Why no kernel reads the pages themselves, or None."""
    return kernel.unsupported(problem) or plans.unsupported(kernel.of_pages(problem))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _attend(plan: PagedPlan, operands: PagedOperands) -> Results:
    """Output [B, T, N, H] and log-sum-exp [B, N, T] of a plan."""
    kernels = plan.kernels
    if plan.reason is not None:
        message = f"decode uses the default path: {plan.reason}"
        operands = operands._replace(extents=operands.extents + dispatch.left_out(message))
    attention = plan.problem.attention
    if validate.is_empty(attention):
        return xla.nothing(attention, without_keys(operands))
    default = functools.partial(blockwise.forward, plan.problem)
    if kernels is None:
        return default(operands)
    own = dataclasses.replace(kernels, problem=kernel_problem(plan.problem)[0])
    if own.problem.page_length is None:
        reason = unread(plan.problem)
        copied = f"decode copies the pages for its kernels: {reason}"
        run = functools.partial(gather.forward, plan.problem, own, copied)
    else:
        run = functools.partial(kernel.forward, own)
    return dispatch.choose(own, run, default, operands)


@_attend.defjvp
def _no_derivative(plan: PagedPlan, primals: Any, tangents: Any) -> Any:
    del plan, primals, tangents
    raise NotImplementedError(
        "decode has no derivative: fa4_jax.attention computes the same from keys and values that "
        "are not in pages"
    )


attend = jax.jit(_attend, static_argnums=(0,), inline=True)
"""Jitted, lest a loop over pages be compiled anew in every call outside jit."""
