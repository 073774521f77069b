"""The contenders that are timed: fa4_jax and the other attentions that there are on a GPU."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import fa4_jax
from benchmarks.contenders import (
    AS_GIVEN,
    Abilities,
    Absent,
    Contender,
    as_batch,
    clipped,
    document_ids,
    longest,
    packed,
    scaled_query,
    sinks,
    starts,
)
from benchmarks.shapes import Case
from benchmarks.torch_peer import FA4, FA4_DETERMINISTIC, flash_attn_4
from fa4_jax import masks

OURS = "fa4_jax"
DETERMINISTIC = "fa4_jax deterministic"
CUDNN = "jax.nn cudnn"
PALLAS = "pallas attention_mgpu"
FA3 = "FlashAttention-3"
JLA = "jax-linear-attention"
XLA = "jax.nn xla"

TABLE = "fa4_jax, table given"
"""Ours with a table of tiles that was made before."""

PLAIN = "fa4_jax, plain"
"""Ours with the same documents as rows of a batch, without sinks, without a soft cap."""

OWN = (OURS, DETERMINISTIC, TABLE, PLAIN)

PEERS = (CUDNN, FA3, FA4, JLA, PALLAS)
"""Others' attention on a GPU; ours is compared with the best of them in each case."""

OTHERS = (*PEERS, FA4_DETERMINISTIC, XLA)
"""Everything that is not ours."""

PACKAGES = ("flash-attn-4", "torch", "dew-flash-attn-cu13", "jax-linear-attention")
"""The packages of peers whose versions a run records."""

_JLA_HEAD_DIMS = ((64, 64), (128, 128), (192, 128))
_PALLAS_KEY_BLOCKS = {64: 256, 128: 128, 256: 64}


def contenders(case: Case, platform: str) -> tuple[list[Contender], list[Absent]]:
    """Returns the contenders of a case, ours first.

    Args:
      platform: "gpu" (all peers; ours insists on its kernels) or "cpu" (ours and XLA's).
    """
    found: list[Contender | Absent] = [*_ours(case, platform), *_for_comparison(case, platform)]
    if platform == "gpu":
        found += [_cudnn(case), _fa3(case), *flash_attn_4(case), _jla(case), _pallas(case)]
        if case.chained > 1:  # Elsewhere it is far slower, and its scores fill the memory.
            found.append(_xla(case))
    else:
        found.append(_xla(case))
    present = [x for x in found if isinstance(x, Contender)]
    return present, [x for x in found if isinstance(x, Absent)]


def _attention(case: Case, platform: str) -> Callable[..., jax.Array]:
    """Returns our attention with the case's options, but for documents."""
    lengths = None if case.lengths is None else jnp.asarray(case.lengths)
    return functools.partial(
        fa4_jax.attention,
        is_causal=case.is_causal,
        query_offset=case.query_offset,
        query_seq_lengths=lengths,
        key_value_seq_lengths=lengths,
        local_window_size=case.window,
        logits_soft_cap=case.soft_cap,
        sinks=sinks(case),
        implementation="kernel" if platform == "gpu" else None,
    )


def _ours(case: Case, platform: str) -> list[Contender]:
    attend = _attention(case, platform)
    if (ids := document_ids(case)) is not None:
        without = attend

        def attend(*operands: jax.Array, **options: Any) -> jax.Array:
            # Behind the barrier the compiler does not see that the ids are constants.
            hidden = jax.lax.optimization_barrier(jnp.asarray(ids))
            return without(*operands, segment_ids=hidden, **options)

    deterministic = functools.partial(attend, deterministic=True)
    return [
        Contender(OURS, attend),
        Contender(DETERMINISTIC, deterministic, backward_only=True),
    ]


def _for_comparison(case: Case, platform: str) -> list[Contender]:
    """Returns our calls that show what a table of tiles, or what a capability costs."""
    found: list[Contender] = []
    if (ids := document_ids(case)) is not None:
        rows = (case.batch, case.query_length, *case.heads)
        query = key = jax.ShapeDtypeStruct(rows, case.dtype)
        table = masks.tile_table(None, query, key, segment_ids=jnp.asarray(ids))
        found.append(Contender(TABLE, functools.partial(_attention(case, platform), mask=table)))
    equal = len(set(itertools.chain(*(case.documents or ())))) < 2
    if equal and (case.documents or case.sinks or case.soft_cap):
        bare = dataclasses.replace(case, documents=None, sinks=False, soft_cap=None)
        same = not (case.sinks or case.soft_cap)
        attend = _attention(bare, platform)
        found.append(Contender(PLAIN, attend, as_batch(case), computes_the_case=same))
    return found


def _jax_nn(name: str, implementation: str, case: Case) -> Contender | Absent:
    refusal = Abilities(windows=True, lengths=True).refusal(case)
    if refusal is not None:
        return Absent(name, refusal)
    lengths = None if case.lengths is None else jnp.asarray(case.lengths, jnp.int32)
    attend = functools.partial(
        jax.nn.dot_product_attention,
        is_causal=case.is_causal,
        query_seq_lengths=lengths,
        key_value_seq_lengths=lengths,
        local_window_size=case.window,
        implementation=implementation,  # type: ignore[arg-type]
    )
    return Contender(name, attend, clipped(case))


def _cudnn(case: Case) -> Contender | Absent:
    if case.window is not None and not case.is_causal:
        return Absent(CUDNN, "it has no limit on the right of a window")
    return _jax_nn(CUDNN, "cudnn", case)


def _xla(case: Case) -> Contender | Absent:
    if case.dtype == "float16":
        return Absent(XLA, "XLA's CPU backend lacks its float16 products")
    return _jax_nn(XLA, "xla", case)


def _fa3(case: Case) -> Contender | Absent:
    """FlashAttention-3's C++ kernels through an XLA FFI (the package dew-flash-attn)."""
    abilities = Abilities(windows=True, lengths=True, last_key=True, documents=True, sinks=True)
    refusal = abilities.refusal(case)
    if refusal is not None:
        return Absent(FA3, refusal)
    try:
        flash: Any = importlib.import_module("dew_flash_attn")
    except (ImportError, OSError) as error:
        return Absent(FA3, f"cannot be imported: {error}")
    # A window holds causality, too: its right side is then 0.
    options: dict[str, Any] = {
        "is_causal": case.is_causal and case.window is None,
        "window_size": case.window or (-1, -1),
    }
    if case.sinks:
        options["sinks"] = sinks(case)
    if case.pieces is None:
        return Contender(FA3, functools.partial(flash.flash_mha, **options))
    attend = functools.partial(
        flash.flash_mha_varlen,
        cu_seqlens=jnp.asarray(starts(case), jnp.int32),
        max_seqlen=longest(case),
        **options,
    )
    return Contender(FA3, attend, packed(case))


def _jla(case: Case) -> Contender | Absent:
    """The softmax attention of jax-linear-attention, in Pallas (Mosaic GPU)."""
    abilities = Abilities(value_dim=True, windows=True, lengths=True, documents=True, sinks=True)
    refusal = abilities.refusal(case)
    if refusal is not None:
        return Absent(JLA, refusal)
    if not case.is_causal or case.query_length != case.key_length:
        return Absent(JLA, "it is causal, with as many keys as queries")
    if (case.head_dim, case.output_dim) not in _JLA_HEAD_DIMS:
        return Absent(JLA, f"its head dims of query and value are {_JLA_HEAD_DIMS}")
    try:
        flash: Any = importlib.import_module("jla.ops.mosaic_gpu.attention")
    except ImportError as error:
        return Absent(JLA, f"cannot be imported: {error}")
    lengths = case.lengths
    segments = document_ids(case)
    if lengths is not None:
        segments = jnp.repeat(jnp.arange(len(lengths)), jnp.asarray(lengths))[None]
    options: dict[str, Any] = {"sinks": sinks(case)} if case.sinks else {}
    attend = functools.partial(
        flash.flash_attention,
        segment_ids=None if segments is None else jnp.asarray(segments),
        # It counts the row's own position.
        sliding_window=None if case.window is None else case.window[0] + 1,
        # The fused backward needs value's head dim to be query's.
        backward="fused" if case.value_dim is None else "ranged",
        **options,
    )
    return Contender(JLA, attend, AS_GIVEN if lengths is None else packed(case, batch_axis=True))


def _pallas(case: Case) -> Contender | Absent:
    if case.dtype != "float16":
        return Absent(PALLAS, "its shared memory is float16, whatever the operands are")
    refusal = Abilities().refusal(case)
    if refusal is not None:
        return Absent(PALLAS, refusal)
    if case.head_dim not in _PALLAS_KEY_BLOCKS:
        return Absent(PALLAS, f"its head dims are {tuple(_PALLAS_KEY_BLOCKS)}")
    try:
        from jax.experimental.pallas.ops.gpu import attention_mgpu
    except ImportError as error:
        return Absent(PALLAS, f"cannot be imported: {error}")
    # Forward: as in the module's own benchmark, the widest keys' block that fits in shared
    # memory. Backward: two warpgroups where both of their tiles fit.
    config = attention_mgpu.TuningConfig(
        block_q=64,
        block_kv=_PALLAS_KEY_BLOCKS[case.head_dim],
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
        layout=scaled_query(case.head_dim**-0.5),
        no_backward="it has no causal backward" if case.is_causal else None,
    )
