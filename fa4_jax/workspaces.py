"""The buffers that a call needs beyond its inputs and outputs, for `explain`."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax

from fa4_jax import bias_buffer, validate
from fa4_jax.group_split import group_split
from fa4_jax.key import BIAS_GRADIENT_TILES, Pass
from fa4_jax.paged import gather
from fa4_jax.paged.problem import PagedProblem
from fa4_jax.plan import Kernel, Plan, given_shapes, new_buffers

_ITEM_BYTES = {"bf16": 2, "fp16": 2, "f32": 4, "f64": 8, "i32": 4}
_OUTPUTS = ("dq", "dk", "dv")


@dataclasses.dataclass(frozen=True)
class Workspace:
    """A buffer that a call needs beyond its inputs and outputs."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


@dataclasses.dataclass(frozen=True)
class Held:
    """What kernels would read of a call that is not as the caller has it: shapes, or None.

    Attributes:
      bits: of the words of bits of a mask.
      bias: without its numbers, `bias_buffer.abstract`.
      masked_bias: a copy of a dense bias that holds the masks beside it (`masks.in_bias`).
    """

    bits: tuple[int, ...] | None = None
    bias: Any = None
    masked_bias: jax.ShapeDtypeStruct | None = None


def copies(problem: PagedProblem, plan: Plan) -> tuple[Workspace, ...]:
    """The keys and values that kernels take side by side, which are copied from pages."""
    if not plan.forward or plan.problem.page_length is not None:
        return ()
    names, dtype = ("k_copied", "v_copied"), plan.problem.dtype
    return tuple(
        Workspace(*x) for x in zip(names, (dtype,) * 2, gather.shapes(problem), strict=True)
    )


def workspaces(plan: Plan, held: Held) -> tuple[Workspace, ...]:
    """What the launches of a plan, and XLA's operations around them, hold."""
    launches = [kernel.launch for kernel in plan.forward_launches + plan.backward]
    problem, own = plan.problem, {"parts": plan.parts, "tail": plan.tail_shape}
    bias = _bias(plan, held)
    if bias is not None:
        lengths = problem.query_length, problem.key_length
        is_banded = problem.bias == "banded"
        tile = BIAS_GRADIENT_TILES[plan.backward[0].key.arch]
        shape = bias_buffer.gradient_shape(bias.shape, lengths, tile, is_banded)
        own |= {"bias": bias.shape, "dbias_shape": shape}
    found = [
        Workspace(name, result.dtype, shape)
        for name, (result, shape) in new_buffers(problem, launches, own).items()
        if name not in _OUTPUTS and 0 not in shape
    ]
    if plan.forward and held.bits is not None:
        found.append(Workspace("mask_bits", "i32", held.bits))
    if plan.forward and (copy := held.masked_bias) is not None:
        found.append(Workspace("masked_bias", validate.DTYPES[copy.dtype.name], copy.shape))
    found += _bias_copies(plan, held)
    split = group_split(plan)
    if split.parts > 1:
        shapes = given_shapes(split.plan.problem)
        names = {"k_repeated": "k", "v_repeated": "v", "dk_parts": "k", "dv_parts": "v"}
        found += [Workspace(name, problem.dtype, shapes[of]) for name, of in names.items()]
    return tuple(found)


def _bias_copies(plan: Plan, held: Held) -> list[Workspace]:
    """The copies of a bias that kernels read: of other types, or with rows that are filled up, as
    those of a dense one to pairs, or those of a banded one by zeros between them."""
    bias = _bias(plan, held)
    if bias is None:
        return []
    if plan.problem.bias == "distance":
        return [Workspace("bias", "f32", bias.shape)]
    (own,), found = jax.tree.leaves(held.bias), {}
    for kernel in (plan.forward[0], *filter(_is_main, plan.backward)):
        read = _read(kernel, held)
        name = "bias" if read.size == own.size else "bias_padded"
        if read.size != own.size or read.dtype != own.dtype:
            found[name] = Workspace(name, validate.DTYPES[read.dtype.name], read.shape)
    return list(found.values())


def _bias(plan: Plan, held: Held) -> Any:
    """Shape and type of what the main kernel reads of a bias, or None."""
    if held.bias is None or not plan.forward:
        return None
    return _read(next((x for x in plan.backward if _is_main(x)), plan.forward[0]), held)


def _is_main(kernel: Kernel) -> bool:
    return kernel.key.kernel is Pass.BACKWARD


def _read(kernel: Kernel, held: Held) -> Any:
    """Shape and type of what a kernel reads of a bias."""
    return jax.eval_shape(lambda x: bias_buffer.buffer(x, kernel.key), held.bias)
