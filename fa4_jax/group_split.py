"""Splitting a group of query heads among thread blocks of Hopper's backward.

A thread block of the backward computes dK and dV of some keys of one KV head, and for that visits
the rows of all query heads of its group. With few KV heads there are few such blocks, and under a
causal mask, or with lengths, they are unequally long, so multiprocessors idle at the end. If a KV
head counts as several, each with a part of the group, there are more and shorter ones. The parts'
dK and dV leave the kernel in the storage type and are summed in float32, in a fixed order, as in
context parallelism. docs/hopper.md has what was measured.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from fa4_jax.dtypes import wide
from fa4_jax.key import Pass
from fa4_jax.manifest import Launch, evaluate_size
from fa4_jax.operands import Operands
from fa4_jax.plan import Plan, given_shapes
from fa4_jax.problem import Problem

Array = jax.Array

ENOUGH_BLOCKS = {1: 4096, 2: 2048}
"""Thread blocks, about 32 and 16 on each multiprocessor, beyond which more were not faster; by how
many share a key tile."""

HALF_EMPTY_BLOCKS = 256
"""Thread blocks, about two a multiprocessor, that a call with lengths and no band should have. No
multiprocessor idles then if half of them have no keys, as on half of a zig-zag ring's devices."""

COST_KEYS = 512
"""Splitting a whole group took the time of so many keys of the sequence: K and V are copied, dK and
dV written and read again."""

LOSS_BLOCKS = 132
"""A launch of so many thread blocks, one a multiprocessor, took twice its shortest time under a
causal mask, one of twice as many 1.5 times it, and so on."""


@dataclasses.dataclass(frozen=True)
class GroupSplit:
    """A backward whose KV heads count as several each.

    Attributes:
      parts: as how many; 1 splits nothing.
      plan: the launches with that many KV heads.
    """

    parts: int
    plan: Plan

    def divide(self, operands: Operands) -> Operands:
        """Repeats each KV head: key and value [B, S, K, H] become [B, S, K parts, H]."""
        if self.parts == 1:
            return operands
        key, value = (jnp.repeat(x, self.parts, axis=2) for x in (operands.key, operands.value))
        return operands._replace(key=key, value=value)

    def join(self, x: Array) -> Array:
        """Sums a gradient [B, S, K parts, H] to [B, S, K, H]."""
        if self.parts == 1:
            return x
        b, s, heads, h = x.shape
        x = x.reshape(b, s, heads // self.parts, self.parts, h)
        return x.astype(wide(x.dtype)).sum(3).astype(x.dtype)


def group_split(plan: Plan) -> GroupSplit:
    """The split of a plan's backward; a pure function of shapes, mask and determinism."""
    parts = _parts(plan)
    heads = plan.problem.kv_heads
    return GroupSplit(parts, plan if parts == 1 else plan.resized(kv_heads=heads * parts))


def _parts(plan: Plan) -> int:
    problem = plan.problem
    is_even = not problem.band and not problem.has_lengths  # All thread blocks have equal work.
    if plan.arch != "sm_90a" or is_even or problem.group == 1 or not plan.backward:
        return 1
    if problem.deterministic:
        # A part's blocks wait less for their turn to add to dQ. No other size decides, so that a
        # program with symbolic dimensions gives the same bits.
        return problem.group if problem.band else 1
    if not all(isinstance(size, int) for size in given_shapes(problem)["q"]):
        return 1  # Symbolic dimensions: the number of thread blocks is not known.
    blocks = _thread_blocks(plan)
    divisors = [r for r in range(1, problem.group + 1) if problem.group % r == 0]
    wanted = ENOUGH_BLOCKS[_main(plan).cluster[0]] if problem.band else HALF_EMPTY_BLOCKS
    enough = next((r for r in divisors if r * blocks >= wanted), problem.group)
    affordable = [r for r in divisors if r <= enough and _pays(problem, r, blocks)]
    return max(affordable, default=1)


def _pays(problem: Problem, parts: int, blocks: int) -> bool:
    """Whether a split costs at most half of what equally busy multiprocessors would save."""
    seen = min(problem.query_length, sum(problem.window) + 1)
    return COST_KEYS * parts / (problem.group * seen) <= LOSS_BLOCKS / blocks / 2


def _main(plan: Plan) -> Launch:
    (launch,) = (x.launch for x in plan.backward if x.key.kernel is Pass.BACKWARD)
    return launch


def _thread_blocks(plan: Plan) -> int:
    launch = _main(plan)
    shapes = given_shapes(plan.problem)
    # A grid that may split its last tiles has room for their parts (tail.py).
    parts = launch.grid[0][0].multiple if "tail_acc" in launch.operands else 1
    return math.prod(evaluate_size(size, shapes) for size in launch.grid) // parts
