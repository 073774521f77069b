"""The fp16 kernels are the bf16 kernels with another storage type, and nothing else.

Their PTX is the same text but for the names of types, the two type fields of tcgen05.mma's
instruction descriptor. (In Hopper's postprocessing NVVM numbers registers of the arithmetic another
way, so that mnemonics are compared there. Where two elements of a bias are read at once, bfloat16
is widened by a shift and float16 by a conversion: there only what synchronises, copies and
multiplies is the same, in the same order. Hopper's capped forwards have limits of their own.) So
what is proven of the synchronisation of one holds for the other.
"""

from __future__ import annotations

import dataclasses
import re

import pytest

from fa4_jax import catalogue
from fa4_jax.key import KernelKey, Pass
from kernels.build import cache

_LIMITS = {"bf16": "0f43200000", "fp16": "0f42400000"}
"""160 and 48, TANH_UNIT times `forward_output.MOST_EXPONENTS`."""
_OPERAND_TYPES = 1 << 7 | 1 << 10
"""Bits of the instruction descriptor of kind::f16: A and B are bfloat16."""
_MMA = re.compile(r"(tcgen05\.mma\S* [^;]*, )(\d+)(, \w+;)")
_ORDERED = re.compile(
    r"(?m)^\s*(?:@!?%\w+ +)?"
    r"((?:mbarrier|wgmma|mma|ldmatrix|movmatrix|bar|barrier|fence|cp|red|atom|elect|st|setmaxnreg"
    r"|griddepcontrol|ld\.acquire|ld\.shared)\b[\w.:]*)"
)
"""What synchronises, copies, multiplies or stores: mnemonics."""
FP16 = [key for key in catalogue.all_keys() if key.dtype == "fp16"]


def as_fp16(ptx: str) -> str:
    """The text of a bf16 kernel with float16 in place of bfloat16."""

    def descriptor(found: re.Match[str]) -> str:
        assert int(found[2]) & _OPERAND_TYPES == _OPERAND_TYPES
        return f"{found[1]}{int(found[2]) ^ _OPERAND_TYPES}{found[3]}"

    return _MMA.sub(descriptor, ptx).replace("bf16", "f16")


@pytest.mark.each_kernel
@pytest.mark.parametrize("key", FP16, ids=lambda key: key.name)
def test_fp16_is_the_same_text(key: KernelKey) -> None:
    texts = []
    for dtype in ("bf16", "fp16"):
        entry = cache.find(dataclasses.replace(key, dtype=dtype))
        assert entry is not None, f"run python -m kernels.build for {key.name} and its bf16 kernel"
        texts.append(entry.ptx)
    bf16, fp16 = texts
    assert bf16 != fp16 or "bf16" not in bf16
    texts = [as_fp16(bf16), fp16]
    if (key.arch, key.kernel) == ("sm_90a", Pass.BACKWARD_POST):
        texts = [re.sub(r"(?m)^\t(\w[\w.:]*) .*$", r"\1", text) for text in texts]
    if key.soft_cap and key.kernel is Pass.FORWARD:
        assert all(_LIMITS[dtype] in text for dtype, text in zip(_LIMITS, texts, strict=True))
        texts = [texts[0].replace(_LIMITS["bf16"], _LIMITS["fp16"]), texts[1]]
    of_bias = key.bias or key.kernel is Pass.BIAS_GRADIENT
    if of_bias and key.pairwise_bias:
        # The slopes of ALiBi are bf16 in kernels of either type.
        texts = [_ORDERED.findall(text.replace("bf16", "f16")) for text in texts]
        assert len(texts[0]) > 50
    same = texts[0] == texts[1]  # no diff of thousands of lines
    assert same
