"""What the roles of a kernel carry from block to block and from tile to tile."""

import dataclasses

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from kernels.common import ptx
from kernels.common.softmax import LN_2, LOG2_E, TANH_UNIT, select
from kernels.interface import (
    BackwardScalars,
    BiasBuffers,
    CapBuffer,
    ForwardScalars,
    LogitBuffers,
    RowBuffers,
)


@dataclasses.dataclass(frozen=True)
class Progress:
    """What a role has done since the kernel began.

    Attributes:
      tiles: query tiles that had blocks.
      blocks: their key blocks.
    """

    tiles: Int32
    blocks: Int32

    def after(self, blocks: Int32) -> "Progress":
        """Returns the progress after one more tile, of `blocks` blocks."""
        return Progress(self.tiles + 1, self.blocks + blocks)


@dataclasses.dataclass(frozen=True)
class Scales:
    """How scores become exponents.

    Attributes:
      scale_log2: of a score, in units of log2.
      lag_limit: by how much a row's maximum may exceed its reference, in units of scores.
      before_cap: of a product, of which `softmax.tanh` makes the score, in units of the soft cap;
        None or 0 where there is no cap.
      before_bias: of a product, to which a bias is then added; None where there is none.
      near_limit: up to which |product| times before_cap a block needs no maximum.
    """

    scale_log2: Float32
    lag_limit: Float32
    before_cap: Float32 | None = None
    before_bias: Float32 | None = None
    near_limit: Float32 | None = None


def soft_cap_of(buffers: LogitBuffers | CapBuffer) -> Float32:
    """Reads the soft cap; 0 where scores are not capped."""
    return cute.make_tensor(buffers.soft_cap, cute.make_layout(1))[0]


def sink_of(buffers: LogitBuffers, head: Int32) -> Float32:
    """Reads the sink of a query head; -inf where the call has none."""
    sink = ptx.load_word_below(buffers.sinks + head, 0, buffers.sink_heads).bitcast(Float32)
    return select(buffers.sink_heads > 0, sink, -Float32.inf)


def make_scales(scalars: ForwardScalars, soft_cap: Float32 | None = None) -> Scales:
    """Returns the scales of a call."""
    scale_log2, before_cap = scalars.scale_log2, None
    if soft_cap is not None:
        scale_log2, before_cap = soft_cap * LOG2_E, scale_log2 * (LN_2 * TANH_UNIT) / soft_cap
    return Scales(scale_log2, scalars.rescale_threshold_log2 / scale_log2, before_cap)


def make_biased_scales(scalars: ForwardScalars) -> Scales:
    """Returns the scales of a call whose scores have a bias, which is in units of exp."""
    limit = scalars.rescale_threshold_log2 * LN_2
    return Scales(Float32(LOG2_E), limit, before_bias=scalars.scale_log2 * LN_2)


def _is_cap(soft_cap: Float32, before_cap: Float32) -> Boolean:
    """Whether scores are capped; a cap so large that before_cap is 0 changes none."""
    return (soft_cap != 0.0) & (before_cap != 0.0)


def make_optional_scales(scalars: ForwardScalars, soft_cap: Float32) -> Scales:
    """Returns the scales of a call that may have no cap: then soft_cap and before_cap are 0."""
    plain, capped = make_scales(scalars), make_scales(scalars, soft_cap)
    is_capped = _is_cap(soft_cap, capped.before_cap)
    return Scales(
        select(is_capped, capped.scale_log2, plain.scale_log2),
        select(is_capped, capped.lag_limit, plain.lag_limit),
        select(is_capped, capped.before_cap, Float32(0.0)),
    )


@dataclasses.dataclass(frozen=True)
class Exponents:
    """How a backward gets the exponents of P, before it subtracts the LSE, in units of log2.

    Attributes:
      scale_log2: of a product or, where there is a cap, of the score in units of it.
      before_cap: of a product, of which `softmax.tanh` makes that score; None or 0 where there is
        no cap.
      before_bias: of a product, to which a bias is then added; None where there is none.
    """

    scale_log2: Float32
    before_cap: Float32 | None = None
    before_bias: Float32 | None = None


def make_exponents(
    scalars: BackwardScalars, buffer: CapBuffer | None, bias: BiasBuffers | None = None
) -> Exponents:
    """Returns the exponents of a call; it reads the cap where there is one.

    A bias is in units of exp, and so are scores with one.
    """
    if bias is not None:
        return Exponents(Float32(LOG2_E), before_bias=scalars.scale)
    if buffer is None:
        return Exponents(scalars.scale_log2)
    cap = soft_cap_of(buffer)
    return Exponents(cap * LOG2_E, scalars.scale * TANH_UNIT / cap)


def make_optional_exponents(
    scalars: BackwardScalars, buffer: CapBuffer | None, bias: BiasBuffers | None = None
) -> Exponents:
    """Returns the exponents of a call that may have no cap: then it and before_cap are 0."""
    plain = make_exponents(scalars, None, bias)
    if buffer is None:
        return plain
    capped = make_exponents(scalars, buffer)
    is_capped = _is_cap(soft_cap_of(buffer), capped.before_cap)
    return Exponents(
        select(is_capped, capped.scale_log2, plain.scale_log2),
        select(is_capped, capped.before_cap, Float32(0.0)),
    )


@dataclasses.dataclass(frozen=True)
class Limits:
    """The keys low <= j < high that a row sees; tensors where a thread has several rows."""

    low: Int32 | cute.Tensor
    high: Int32 | cute.Tensor


@dataclasses.dataclass(frozen=True)
class Rows:
    """What the main backward kernels read and add to row by row, in query tiles of `m` rows, fp32.

    Attributes:
      lse_log2, delta: inputs, one value a row.
      dq_acc: accumulators of dQ.
      dq_order: additions to each query tile, where they are ordered.
      dq_cleared: shares of a section's dq_acc that are 0, where the kernel clears it.
      tiles: query tiles of a head.
    """

    lse_log2: cute.Pointer
    delta: cute.Pointer
    dq_acc: cute.Pointer
    dq_order: cute.Pointer | None
    dq_cleared: cute.Pointer | None
    tiles: Int32

    def tile(self, batch: Int32, heads: Int32, head: Int32, block: Int32) -> Int64:
        """Returns the index of a head's query tile among all tiles of all batch elements."""
        return (Int64(batch) * heads + head) * self.tiles + block


def make_rows(buffers: RowBuffers, query_length: Int32, m: int) -> Rows:
    """Returns the rows of a call whose query tiles have m rows."""
    tiles = (query_length + m - 1) // m
    return Rows(
        buffers.lse_log2, buffers.delta, buffers.dq_acc, buffers.dq_order, buffers.dq_cleared, tiles
    )
