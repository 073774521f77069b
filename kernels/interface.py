"""The kernels' parameters, as dataclasses of what travels together; nothing here needs CuTe-DSL.

Host functions and kernels accept these dataclasses, and CuTe-DSL makes a parameter of every field,
in order. `params` lists the same fields for the manifest. So a parameter's name, type and place
stand here alone.
"""

from __future__ import annotations

import dataclasses
import typing
from typing import Annotated, Any

from fa4_jax.manifest import Param


@dataclasses.dataclass(frozen=True)
class Dim:
    """A parameter that is one dimension of a buffer; without a name, of `params`' buffer `of`."""

    axis: int
    buffer: str = ""


F32 = Annotated[Any, "f32"]
"""An fp32 value that the FFI call has as an attribute."""
I32 = Annotated[Any, "i32"]
"""A 32-bit integer that the FFI call has as an attribute."""
Pointer = Annotated[Any, "pointer"]
"""The address of a buffer."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of q [batch, query_length, heads, ...] and k [batch, key_length, kv_heads, ...]."""

    batch: Annotated[Any, Dim(0, "q")]
    query_length: Annotated[Any, Dim(1, "q")]
    key_length: Annotated[Any, Dim(1, "k")]
    heads: Annotated[Any, Dim(2, "q")]
    kv_heads: Annotated[Any, Dim(2, "k")]


@dataclasses.dataclass(frozen=True)
class HeadDims:
    """Columns of q and k, and of v."""

    head_dim: Annotated[Any, Dim(3, "q")]
    value_dim: Annotated[Any, Dim(3, "v")]


@dataclasses.dataclass(frozen=True)
class RowShape:
    """Shape of one buffer of query rows."""

    batch: Annotated[Any, Dim(0)]
    query_length: Annotated[Any, Dim(1)]
    heads: Annotated[Any, Dim(2)]
    head_dim: Annotated[Any, Dim(3)]


@dataclasses.dataclass(frozen=True)
class RowSizes:
    """What a kernel that works row by row needs of it."""

    query_length: Annotated[Any, Dim(1)]
    heads: Annotated[Any, Dim(2)]


@dataclasses.dataclass(frozen=True)
class SmCount:
    """The number of multiprocessors of the device."""

    sm_count: Annotated[Any, "sm_count"]


@dataclasses.dataclass(frozen=True)
class Window:
    """Keys that a row sees on either side of its diagonal; `bands.UNBOUNDED` is no bound."""

    left: I32
    right: I32


@dataclasses.dataclass(frozen=True)
class ForwardScalars:
    """Scalars of the forward; both scales are in units of log2."""

    scale_log2: F32
    rescale_threshold_log2: F32
    window: Window


@dataclasses.dataclass(frozen=True)
class SplitScalars:
    """Numbers of the split forward.

    caps: 1 where scores are capped, by soft_cap f32 [1]; 0 where it has no element.
    """

    scale_log2: F32
    caps: Annotated[Any, Dim(0, "soft_cap")]
    soft_cap: Pointer
    window: Window


@dataclasses.dataclass(frozen=True)
class BackwardScalars:
    """Scalars of the main backward kernel."""

    scale_log2: F32
    scale: F32
    window: Window


@dataclasses.dataclass(frozen=True)
class PostScalars:
    """Scalars of the kernel after the main backward kernel."""

    scale: F32


@dataclasses.dataclass(frozen=True)
class ForwardBuffers:
    """Operands and results of the forward; a counter only if tiles are dealt by ticket."""

    q: Pointer
    k: Pointer
    v: Pointer
    extents: Pointer
    o: Pointer
    lse: Pointer
    tile_ticket: Pointer


@dataclasses.dataclass(frozen=True)
class SplitLoads:
    """What the split forward loads by tensor maps."""

    k: Pointer
    v: Pointer


@dataclasses.dataclass(frozen=True)
class SplitBuffers:
    """What the split forward reads and writes by pointers.

    o_parts f32 [batch, splits, query_length, heads, value_dim], lse_parts f32 [batch, splits,
    query_length, heads] and max_parts of the same shape, or with no heads where largest scores are
    not wanted, both in units of log2: the results of parts of the keys. Where the one part is all
    of them, these have no part, and the results are those of `JoinBuffers`, which otherwise have no
    batch entry here.
    """

    q: Pointer
    extents: Pointer
    sinks: Pointer
    o_parts: Pointer
    lse_parts: Pointer
    max_parts: Pointer
    o: Pointer
    lse: Pointer
    row_max: Pointer


@dataclasses.dataclass(frozen=True)
class SplitShape:
    """How many parts the keys have, and the packed rows: `parts` is an array without elements.

    max_heads: N where the largest scores are wanted, else 0. whole: 1 where the one part is all of
    the keys, else 0. sink_heads: N where there are sinks, else 0.
    """

    splits: Annotated[Any, Dim(0, "parts")]
    row_blocks: Annotated[Any, Dim(1, "parts")]
    max_heads: Annotated[Any, Dim(2, "parts")]
    whole: Annotated[Any, Dim(4, "parts")]
    sink_heads: Annotated[Any, Dim(0, "sinks")]


@dataclasses.dataclass(frozen=True)
class PageBuffers:
    """Where keys are whose k and v are pages [pages, page_length, kv_heads, ...].

    Key j of a batch entry is row j % page_length of the page that page_table i32 [batch,
    table_width] has at j // page_length.
    """

    pages: Annotated[Any, Dim(0, "k")]
    table_width: Annotated[Any, Dim(1, "page_table")]
    page_table: Pointer


@dataclasses.dataclass(frozen=True)
class JoinBuffers:
    """Operands and results of the kernel that joins the parts of a split forward.

    row_max f32 [batch, heads, query_length]: each row's largest score, where they are wanted.
    """

    o_parts: Pointer
    lse_parts: Pointer
    max_parts: Pointer
    extents: Pointer
    sinks: Pointer
    o: Pointer
    lse: Pointer
    row_max: Pointer


@dataclasses.dataclass(frozen=True)
class JoinShape:
    """Shape of o_parts; how many heads have sinks and largest scores: all or none."""

    batch: Annotated[Any, Dim(0, "o_parts")]
    splits: Annotated[Any, Dim(1, "o_parts")]
    query_length: Annotated[Any, Dim(2, "o_parts")]
    heads: Annotated[Any, Dim(3, "o_parts")]
    value_dim: Annotated[Any, Dim(4, "o_parts")]
    sink_heads: Annotated[Any, Dim(0, "sinks")]
    max_heads: Annotated[Any, Dim(3, "max_parts")]


@dataclasses.dataclass(frozen=True)
class RangeBuffers:
    """Keys of each row, int32; kernels/common/row_ranges.py. One batch element or all.

    query_order only for the forward, key_order only for a backward without a fixed order; neither
    for the split forward. mask_* and state_heads are bits of a mask of pairs
    (kernels/common/pair_masks.py), only where a key reads them; mask_heads is 0 in a call without
    one.
    """

    batch: Annotated[Any, Dim(0, "row_low")]
    row_low: Pointer
    row_high: Pointer
    row_table: Pointer
    tag_low: Pointer
    tag_high: Pointer
    tag_key: Pointer
    tag_tiles: Pointer
    query_order: Pointer
    key_order: Pointer
    mask_batch: Annotated[Any, Dim(0, "mask_bits")]
    mask_heads: Annotated[Any, Dim(1, "mask_bits")]
    state_heads: Annotated[Any, Dim(1, "mask_some")]
    mask_bits: Pointer
    mask_some: Pointer
    mask_every: Pointer


@dataclasses.dataclass(frozen=True)
class SplitRanges(RangeBuffers):
    """Keys of each row of a split forward; range_rows: T, or 0 where rows have no ranges."""

    range_rows: Annotated[Any, Dim(1, "row_low")]


@dataclasses.dataclass(frozen=True)
class LogitBuffers:
    """Numbers of whole heads, f32, that a forward with ranges takes and returns.

    sink_heads: N where the call has sinks, else 0, and sinks is empty. max_heads: N where the
    largest scores are wanted, else 0, and max_logit is empty. soft_cap: one number, only if scores
    are capped.
    """

    sink_heads: Annotated[Any, Dim(0, "sinks")]
    max_heads: Annotated[Any, Dim(1, "max_logit")]
    sinks: Pointer
    max_logit: Pointer
    soft_cap: Pointer


@dataclasses.dataclass(frozen=True)
class SinkBuffer:
    """The sinks of a forward without ranges, f32 [N]."""

    sinks: Pointer


@dataclasses.dataclass(frozen=True)
class CapBuffer:
    """The soft cap of a backward: one f32."""

    soft_cap: Pointer


@dataclasses.dataclass(frozen=True)
class BiasBuffers:
    """What is added to scores: bias f32 [B|1, N|1, T, S], or [B|1, N|1, 1, S] for all rows alike.

    [B|1, N|1, 1, T + S - 1] is by distance: row i and key j get element j - i + T - 1. (With T = 1
    both are the same.) Where bias_first is not NO_BAND, [B|1, N|1, T + 1, BAND_GAP + L] is banded:
    row i and key j get the row's c-th element from its end, c = i + query offset - j - bias_first,
    if 0 <= c < L, and 0 otherwise. Kernels with `KernelKey.band_as_given` take [B|1, N|1, T, L],
    where c counts from the row's start.
    """

    bias_batch: Annotated[Any, Dim(0, "bias")]
    bias_heads: Annotated[Any, Dim(1, "bias")]
    bias_rows: Annotated[Any, Dim(2, "bias")]
    bias_columns: Annotated[Any, Dim(3, "bias")]
    bias_first: I32
    bias: Pointer


@dataclasses.dataclass(frozen=True)
class BiasGradientLoads:
    """What the kernel of a bias's gradient loads by tensor maps."""

    q: Pointer
    k: Pointer
    v: Pointer
    do: Pointer


@dataclasses.dataclass(frozen=True)
class BiasGradientBuffers:
    """What it reads and writes by pointers; a counter only if tiles are dealt by ticket.

    lse_log2, delta f32 [batch, heads, padded rows]: of the kernel before the main one. dbias f32 or
    pairs: of the bias's shape, or by distance [B|1, N|1, 2, tile * units]: `fa4_jax.bias_buffer`.
    """

    extents: Pointer
    lse_log2: Pointer
    delta: Pointer
    dbias: Pointer
    tile_ticket: Pointer


@dataclasses.dataclass(frozen=True)
class BiasGradientShape:
    """Shape of dbias, and tiles of each of its planes: of `dbias_shape`, which has no elements."""

    padded_rows: Annotated[Any, Dim(2, "delta")]
    dbias_columns: Annotated[Any, Dim(4, "dbias_shape")]
    units: Annotated[Any, Dim(5, "dbias_shape")]


@dataclasses.dataclass(frozen=True)
class RowBuffers:
    """What the main backward kernel reads and adds to row by row; counters only if deterministic.

    All but `extents` are in query tiles of the kernel's `m` rows.
    """

    lse_log2: Pointer
    delta: Pointer
    extents: Pointer
    dq_acc: Pointer
    dq_order: Pointer
    dq_ticket: Pointer
    dq_cleared: Pointer


@dataclasses.dataclass(frozen=True)
class TailBuffers:
    """Where the parts of a dense backward's last key tiles meet; kernels/sm90/backward_tail.py.

    tail_tiles: how many of these there is room for, 0 where the mask is not dense.
    """

    tail_tiles: Annotated[Any, Dim(0, "tail")]
    tail_acc: Pointer
    tail_parts: Pointer


@dataclasses.dataclass(frozen=True)
class TailSizes:
    """What the kernel before the main one must know of these tiles, to clear their buffers.

    key_tiles: of all KV heads, of the call.
    """

    key_tiles: Annotated[Any, Dim(1, "tail")]
    sm_count: Annotated[Any, "sm_count"]


@dataclasses.dataclass(frozen=True)
class BackwardBuffers:
    """What the main backward kernel loads and stores by tensor maps."""

    q: Pointer
    k: Pointer
    v: Pointer
    do: Pointer
    dk: Pointer
    dv: Pointer


@dataclasses.dataclass(frozen=True)
class TangentBuffers:
    """Operands and results of the tangent kernel; o and lse are those of the forward.

    A counter only if tiles are dealt by ticket.
    """

    q: Pointer
    q_tangent: Pointer
    k: Pointer
    k_tangent: Pointer
    v: Pointer
    v_tangent: Pointer
    extents: Pointer
    o: Pointer
    lse: Pointer
    o_tangent: Pointer
    lse_tangent: Pointer
    tile_ticket: Pointer


@dataclasses.dataclass(frozen=True)
class HessianBuffers:
    """Operands and results of the kernels of Hessian-vector products.

    row_statistics: of `fa4_jax.row_statistics`.
    One kernel stores dq_tangent, the other one dk_tangent and dv_tangent.
    """

    q: Pointer
    q_tangent: Pointer
    k: Pointer
    k_tangent: Pointer
    v: Pointer
    v_tangent: Pointer
    do: Pointer
    extents: Pointer
    row_statistics: Pointer
    dq_tangent: Pointer
    dk_tangent: Pointer
    dv_tangent: Pointer


@dataclasses.dataclass(frozen=True)
class PreBuffers:
    """Operands and results of the kernel before the main backward kernel."""

    o: Pointer
    do: Pointer
    lse: Pointer
    dlse: Pointer
    extents: Pointer
    lse_log2: Pointer
    delta: Pointer
    dq_acc: Pointer
    dq_order: Pointer
    dq_ticket: Pointer
    dq_cleared: Pointer


@dataclasses.dataclass(frozen=True)
class KeyHeads:
    """How many KV heads a call has."""

    kv_heads: Annotated[Any, Dim(2, "k")]


@dataclasses.dataclass(frozen=True)
class PostBuffers:
    """Operands and results of the kernel after the main backward kernel; q gives the sizes."""

    q: Pointer
    extents: Pointer
    dq_acc: Pointer
    dq: Pointer


@dataclasses.dataclass(frozen=True)
class PostOrder:
    """How often dQ was added to each query tile, if that is in order; orders: B then, else 0."""

    orders: Annotated[Any, Dim(0, "dq_order")]
    dq_order: Pointer


def params(parameters: Any, of: str = "", prefix: str = "") -> tuple[Param, ...]:
    """Lists the parameters of a dataclass of this module, in order.

    Args:
      parameters: the class.
      of: the buffer that a `Dim` without one belongs to.
      prefix: put before every name; a field that is a dataclass is one for its own fields.
    """
    hints = typing.get_type_hints(parameters, include_extras=True)
    listed: list[Param] = []
    for field in dataclasses.fields(parameters):
        name, hint = prefix + field.name, hints[field.name]
        if dataclasses.is_dataclass(hint):
            listed += params(hint, of, f"{name}_")
            continue
        (kind,) = hint.__metadata__
        if isinstance(kind, Dim):
            listed.append(Param(name, "dim", buffer=kind.buffer or of, axes=(kind.axis,)))
        else:
            listed.append(Param(name, kind, buffer=name if kind == "pointer" else ""))
    return tuple(listed)
