"""The contenders that are timed: fa4_jax and the other attentions that JAX has."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax

import fa4_jax
from benchmarks.shapes import Case

OURS = "fa4_jax"
DETERMINISTIC = "fa4_jax deterministic"
CUDNN = "jax.nn cudnn"
PALLAS = "pallas attention_mgpu"
FA3 = "FlashAttention-3"
JLA = "jax-linear-attention"
XLA = "jax.nn xla"

PEERS = (CUDNN, FA3, JLA, PALLAS)
"""Others' attention on a GPU; ours is compared with the best of them in each case."""

Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Contender:
    """An attention as a function of query, key and value.

    Attributes:
      query_factor: a factor of the queries, applied beforehand, untimed (for one without a scale).
      backward_only: whether its forward is another contender's.
      no_backward: why it has no backward, otherwise None.
    """

    name: str
    attend: Attention
    query_factor: float = 1.0
    backward_only: bool = False
    no_backward: str | None = None


@dataclasses.dataclass(frozen=True)
class Absent:
    """A contender that cannot take part, and why."""

    name: str
    reason: str


def contenders(case: Case, platform: str) -> tuple[list[Contender], list[Absent]]:
    """Returns the contenders of a case, ours first.

    Args:
      platform: "gpu" (all peers; ours insists on its kernels) or "cpu" (ours and XLA's).
    """
    peers = (_cudnn, _fa3, _jla, _pallas) if platform == "gpu" else (_xla,)
    found = [*_ours(case, platform), *(peer(case) for peer in peers)]
    present = [x for x in found if isinstance(x, Contender)]
    return present, [x for x in found if isinstance(x, Absent)]


def _ours(case: Case, platform: str) -> list[Contender]:
    attend = functools.partial(
        fa4_jax.attention,
        is_causal=case.is_causal,
        query_offset=case.query_offset,
        implementation="kernel" if platform == "gpu" else None,
    )
    deterministic = functools.partial(attend, deterministic=True)
    return [
        Contender(OURS, attend),
        Contender(DETERMINISTIC, deterministic, backward_only=True),
    ]


def _jax_nn(name: str, implementation: str, case: Case) -> Contender | Absent:
    if case.is_causal and case.query_offset:
        return Absent(name, "jax.nn.dot_product_attention has no query offset")
    attend = functools.partial(
        jax.nn.dot_product_attention,
        is_causal=case.is_causal,
        implementation=implementation,  # type: ignore[arg-type]
    )
    return Contender(name, attend)


def _cudnn(case: Case) -> Contender | Absent:
    return _jax_nn(CUDNN, "cudnn", case)


def _xla(case: Case) -> Contender | Absent:
    if case.dtype == "float16":
        return Absent(XLA, "XLA's CPU backend lacks its float16 products")
    return _jax_nn(XLA, "xla", case)


def _fa3(case: Case) -> Contender | Absent:
    """FlashAttention-3's C++ kernels through an XLA FFI (the package dew-flash-attn)."""
    if case.is_causal and case.query_offset:
        return Absent(FA3, "a query offset was not tried with it")
    try:
        flash: Any = importlib.import_module("dew_flash_attn")
    except ImportError as error:
        return Absent(FA3, f"cannot be imported: {error}")
    return Contender(FA3, functools.partial(flash.flash_mha, is_causal=case.is_causal))


def _jla(case: Case) -> Contender | Absent:
    """The softmax attention of jax-linear-attention, in Pallas (Mosaic GPU)."""
    if not case.is_causal or case.query_offset:
        return Absent(JLA, "it is causal, without a query offset")
    try:
        flash: Any = importlib.import_module("jla.ops.mosaic_gpu.attention")
    except ImportError as error:
        return Absent(JLA, f"cannot be imported: {error}")
    return Contender(JLA, functools.partial(flash.flash_attention, backward="fused"))


def _pallas(case: Case) -> Contender | Absent:
    if case.dtype != "float16":
        return Absent(PALLAS, "its shared memory is float16, whatever the operands are")
    if case.is_causal and case.query_offset:
        return Absent(PALLAS, "it has no query offset")
    try:
        from jax.experimental.pallas.ops.gpu import attention_mgpu
    except ImportError as error:
        return Absent(PALLAS, f"cannot be imported: {error}")
    # Forward: as in the module's own benchmark, the widest keys' block that fits in shared
    # memory. Backward: two warpgroups where both of their tiles fit.
    config = attention_mgpu.TuningConfig(
        block_q=64,
        block_kv={64: 256, 128: 128, 256: 64}[case.head_dim],
        max_concurrent_steps=2,
        causal=case.is_causal,
        compute_wgs_bwd=1 if case.head_dim == 256 else 2,
        block_q_dkv=64,
        block_kv_dkv=64,
        block_q_dq=64,
        block_kv_dq=64,
    )
    return Contender(
        PALLAS,
        lambda q, k, v: attention_mgpu.attention(q, k, v, config),
        query_factor=case.head_dim**-0.5,
        no_backward="it has no causal backward" if case.is_causal else None,
    )
