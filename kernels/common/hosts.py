"""Host functions, which the kernels of both architectures share, and what a compiler needs of them.

A host function makes the tensor maps of a description and launches the kernel. At run time the FFI
handler does its work from the manifest; the tests compare the two launches byte for byte.
"""

import dataclasses
import typing
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_stream, make_ptr

from fa4_jax.key import KernelKey, Pass
from kernels import interface
from kernels.common import launches, tensors
from kernels.common.resources import Maps, with_fields
from kernels.description import Description
from kernels.interface import (
    BackwardBuffers,
    BackwardScalars,
    BiasBuffers,
    CapBuffer,
    ForwardBuffers,
    ForwardScalars,
    HeadDims,
    KeyHeads,
    LogitBuffers,
    PageBuffers,
    PostBuffers,
    PostOrder,
    PostScalars,
    PreBuffers,
    RangeBuffers,
    RowBuffers,
    RowShape,
    RowSizes,
    SinkBuffer,
    Sizes,
    SmCount,
    TailBuffers,
    TailSizes,
)
from kernels.kernel_source import KernelSource

_COUNTS = (
    "extents",
    "tile_ticket",
    "dq_order",
    "dq_ticket",
    "dq_cleared",
    "tail_parts",
    "page_table",
)
_RANGES = tuple(field.name for field in dataclasses.fields(RangeBuffers))
_ELEMENTS = dict.fromkeys((*_COUNTS, *_RANGES), Int32) | dict.fromkeys(
    (
        *("lse", "dlse", "lse_tangent", "lse_log2", "delta", "sinks", "max_logit", "soft_cap"),
        *("dq_acc", "tail_acc", "o_parts", "lse_parts", "max_parts", "row_max", "row_statistics"),
        *("bias", "dbias"),
    ),
    Float32,
)
"""Element types of the buffers that are not stored in the key's dtype."""
PREFIXES = {
    Pass.FORWARD: "fa4_fwd",
    Pass.FORWARD_SPLIT: "fa4_fwd_split",
    Pass.FORWARD_JOIN: "fa4_fwd_join",
    Pass.TANGENT: "fa4_tangent",
    Pass.HESSIAN_QUERY: "fa4_hessian_q",
    Pass.HESSIAN_KEY: "fa4_hessian_kv",
    Pass.BACKWARD_PRE: "fa4_bwd_pre",
    Pass.BACKWARD: "fa4_bwd",
    Pass.BACKWARD_POST: "fa4_bwd_post",
    Pass.BIAS_GRADIENT: "fa4_bias_grad",
}
"""How the kernels' symbols begin."""
NAMED = {"remove_cutlass_symbol": True, "keep_mangled_name": False}


def tensor_maps(
    description: Description, dtype: Any, pointers: dict[str, Any], shapes: dict[str, tuple]
) -> Maps:
    """Makes the tensor maps of a description; shapes: [batch, length, heads, columns] by buffer."""
    load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
    maps = {}
    for wanted in description.maps:
        tensor = tensors.bthd_tensor(pointers[wanted.buffer], shapes[wanted.buffer])
        box = (wanted.rows, wanted.columns)
        maps[wanted.name], _ = cpasync.make_tiled_tma_atom(
            store if wanted.store else load,
            tensor,
            tensors.single_layout(dtype, box, wanted.span_bytes),
            box,
        )
    return with_fields(Maps, tuple(maps))(**maps)


def buffer_shapes(sizes: Sizes, dims: HeadDims) -> dict[str, tuple]:
    """Returns [batch, length, heads, columns] of operands, results and their gradients, by name."""
    rows, keys = (sizes.query_length, sizes.heads), (sizes.key_length, sizes.kv_heads)
    return {
        **dict.fromkeys(("q",), (sizes.batch, *rows, dims.head_dim)),
        **dict.fromkeys(("o", "do"), (sizes.batch, *rows, dims.value_dim)),
        **dict.fromkeys(("k", "dk"), (sizes.batch, *keys, dims.head_dim)),
        **dict.fromkeys(("v", "dv"), (sizes.batch, *keys, dims.value_dim)),
    }


def of_pages(pages: PageBuffers, sizes: Sizes, dims: HeadDims) -> dict[str, tuple]:
    """Returns the shapes of k and v where they are pages."""
    shape = (pages.pages, sizes.key_length, sizes.kv_heads)
    return {"k": (*shape, dims.head_dim), "v": (*shape, dims.value_dim)}


def all_pointers(*buffers: Any) -> dict[str, Any]:
    """Returns the pointers of dataclasses of buffers, by name."""
    return {name: value for some in buffers for name, value in vars(some).items()}


def residency(description: Description) -> dict[str, int]:
    """Returns what a launch says of how many CTAs a multiprocessor has at a time."""
    ctas = description.division.persistent
    # Without the share of shared memory the compiler asks a GPU for it, and none is there.
    share = {"preferred_smem_carveout": 100} if ctas > 1 else {}
    return {"min_blocks_per_mp": ctas or 1, **share}


class ForwardHost:
    """Launches a forward kernel; a subclass sets the attributes and has `kernel`.

    Attributes:
      description: of the kernel.
      dtype: storage type.
      ranges: whether rows have ranges of keys in memory.
      reads_cap: whether the kernel reads a soft cap.
      reads_mask: whether it reads bits of a mask of pairs.
      paged: K and V lie in pages.
      bias: whether numbers in memory are added to the scores.
      sinks: whether rows have sinks, and no ranges.
    """

    description: Description
    dtype: Any
    ranges: bool = False
    reads_cap: bool = False
    reads_mask: bool = False
    paged: bool = False
    bias: bool = False
    sinks: bool = False
    kernel: Any

    @cute.jit
    def __call__(
        self,
        buffers: ForwardBuffers,
        sizes: Sizes,
        dims: HeadDims,
        scalars: ForwardScalars,
        device: SmCount,
        ranges: RangeBuffers,
        logits: LogitBuffers,
        pages: PageBuffers,
        bias: BiasBuffers,
        sink: SinkBuffer,
        stream: cuda.CUstream,
    ):
        description = self.description
        shapes = buffer_shapes(sizes, dims)
        if cutlass.const_expr(self.paged):
            shapes |= of_pages(pages, sizes, dims)
        maps = tensor_maps(description, self.dtype, all_pointers(buffers), shapes)
        rows = description.division.rows
        tiles = cute.ceil_div(sizes.query_length, rows) * sizes.heads * sizes.batch
        if cutlass.const_expr(description.division.persistent):
            places = device.sm_count * description.division.persistent // description.ctas
            tiles = cutlass.min(tiles, cutlass.max(places, 1))
        counters = ()
        if cutlass.const_expr(description.division.by_ticket):
            counters = (buffers.tile_ticket,)
        if cutlass.const_expr(self.ranges):
            absent = launches.absent_orders(forward=True, deterministic=False)
            absent += () if self.reads_mask else launches.MASK
            ranges = dataclasses.replace(ranges, **dict.fromkeys(absent))
            if cutlass.const_expr(not self.reads_cap):
                logits = dataclasses.replace(logits, soft_cap=None)
            counters = (*counters, ranges, logits)
        if cutlass.const_expr(self.paged):
            counters = (*counters, pages)
        named = {"bias": bias} if self.bias else {}
        named |= {"sinks": sink.sinks} if self.sinks else {}
        self.kernel(maps, buffers.extents, buffers.lse, sizes, scalars, *counters, **named).launch(
            grid=[tiles * description.ctas, 1, 1],
            block=[description.threads, 1, 1],
            cluster=[description.ctas, 1, 1],
            stream=stream,
            **residency(description),
        )


class BackwardHost:
    """Launches a main backward kernel; a subclass sets the attributes and has `kernel`.

    Attributes:
      description: of the kernel.
      dtype: storage type.
      deterministic: dQ is added in order.
      counters: of `launches.counters_of`.
      ranges: whether rows have ranges of keys in memory.
      reads_cap: whether the kernel reads a soft cap.
      reads_mask: whether it reads bits of a mask of pairs.
      bias: whether numbers in memory are added to the scores.
    """

    description: Description
    dtype: Any
    deterministic: bool
    counters: tuple[str, ...]
    ranges: bool = False
    reads_cap: bool = False
    reads_mask: bool = False
    bias: bool = False
    kernel: Any

    @cute.jit
    def __call__(
        self,
        buffers: BackwardBuffers,
        rows: RowBuffers,
        sizes: Sizes,
        dims: HeadDims,
        scalars: BackwardScalars,
        ranges: RangeBuffers,
        cap: CapBuffer,
        tail: TailBuffers,
        device: SmCount,
        bias: BiasBuffers,
        stream: cuda.CUstream,
    ):
        description = self.description
        maps = tensor_maps(
            description, self.dtype, all_pointers(buffers), buffer_shapes(sizes, dims)
        )
        absent = launches.absent_counters(self.counters)
        rows = dataclasses.replace(rows, **dict.fromkeys(absent))
        tiles = cute.ceil_div(sizes.key_length, description.division.keys)
        tiles = tiles * sizes.kv_heads * sizes.batch
        more = ()
        if cutlass.const_expr(description.division.splits_tail):
            tiles, more = tiles * launches.MOST_TAIL_PARTS, (None, None, tail)
        if cutlass.const_expr(description.division.persistent):
            tiles = cutlass.min(tiles, cutlass.max(device.sm_count // description.ctas, 1))
        if cutlass.const_expr(self.ranges):
            absent = launches.absent_orders(forward=False, deterministic=self.deterministic)
            absent += () if self.reads_mask else launches.MASK
            ranges = dataclasses.replace(ranges, **dict.fromkeys(absent))
            more = (ranges, cap) if self.reads_cap else (ranges,)
        named = {"bias": bias} if self.bias else {}
        self.kernel(maps, rows, sizes, scalars, *more, **named).launch(
            grid=[tiles * description.ctas, 1, 1],
            block=[description.threads, 1, 1],
            cluster=[description.ctas, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=description.division.programmatic,
        )


class PreHost:
    """Launches a kernel before the main one; a subclass sets the attributes and has `kernel`.

    Attributes:
      description: of the kernel.
      counters: of `launches.counters_of`.
    """

    description: Description
    counters: tuple[str, ...]
    kernel: Any

    @cute.jit
    def __call__(
        self,
        buffers: PreBuffers,
        shape: RowShape,
        keys: KeyHeads,
        tail: TailBuffers,
        tail_sizes: TailSizes,
        stream: cuda.CUstream,
    ):
        absent = launches.absent_counters(self.counters)
        buffers = dataclasses.replace(buffers, **dict.fromkeys(absent))
        sizes = RowSizes(shape.query_length, shape.heads)
        tiles = cute.ceil_div(shape.query_length, self.description.division.rows)
        splits_tail, clears = self.description.division.splits_tail, "dq_cleared" not in absent
        named = {"tail": tail, "tail_sizes": tail_sizes} if splits_tail else {}
        named |= {"keys": keys} if clears else {}
        self.kernel(buffers, sizes, shape.head_dim, **named).launch(
            grid=[tiles * shape.heads * shape.batch, 1, 1],
            block=[self.description.threads, 1, 1],
            stream=stream,
        )


class PostHost:
    """Launches a kernel after the main one; a subclass sets the attributes and has `kernel`.

    Attributes:
      description: of the kernel.
      dtype: storage type.
    """

    description: Description
    dtype: Any
    kernel: Any

    @cute.jit
    def __call__(
        self,
        buffers: PostBuffers,
        shape: RowShape,
        scalars: PostScalars,
        order: PostOrder,
        stream: cuda.CUstream,
    ):
        shapes = {"dq": (shape.batch, shape.query_length, shape.heads, shape.head_dim)}
        maps = tensor_maps(self.description, self.dtype, all_pointers(buffers), shapes)
        tiles = cute.ceil_div(shape.query_length, self.description.division.rows)
        sizes = RowSizes(shape.query_length, shape.heads)
        more = (order,) if self.description.division.stores_first else ()
        self.kernel(maps, buffers.extents, buffers.dq_acc, sizes, scalars, *more).launch(
            grid=[tiles * shape.heads * shape.batch, 1, 1],
            block=[self.description.threads, 1, 1],
            stream=stream,
            use_pdl=self.description.division.programmatic,
        )


for _host, _pass in (
    (ForwardHost, Pass.FORWARD),
    (BackwardHost, Pass.BACKWARD),
    (PreHost, Pass.BACKWARD_PRE),
    (PostHost, Pass.BACKWARD_POST),
):
    _host.__call__.set_name_prefix(f"{PREFIXES[_pass]}_host", **NAMED)


def forward_source(host: ForwardHost, key: KernelKey, tile: dict[str, int]) -> KernelSource:
    """Returns what the compiler needs of a forward kernel; tile: sizes that the build prints."""
    takes = (
        *(ForwardBuffers, Sizes, HeadDims, ForwardScalars, SmCount),
        *(RangeBuffers, LogitBuffers, PageBuffers, BiasBuffers, SinkBuffer),
    )
    return make_source(host, key, takes, tile)


def backward_source(host: BackwardHost, key: KernelKey, tile: dict[str, int]) -> KernelSource:
    """Returns what the compiler needs of a main backward kernel.

    tile: sizes that the build prints.
    """
    buffers = (BackwardBuffers, RowBuffers)
    of_call = (Sizes, HeadDims, BackwardScalars)
    takes = (*buffers, *of_call, RangeBuffers, CapBuffer, TailBuffers, SmCount, BiasBuffers)
    return make_source(host, key, takes, tile)


def pre_source(host: PreHost, key: KernelKey) -> KernelSource:
    """Returns what the compiler needs of a kernel before the main one."""
    takes = (PreBuffers, RowShape, KeyHeads, TailBuffers, TailSizes)
    tile = {"m": host.description.division.rows}
    return make_source(host, key, takes, tile, of="do")


def post_source(host: PostHost, key: KernelKey) -> KernelSource:
    """Returns what the compiler needs of a kernel after the main one."""
    tile = {"m": host.description.division.rows}
    takes = (PostBuffers, RowShape, PostScalars, PostOrder)
    return make_source(host, key, takes, tile, of="q")


def make_source(
    host: Any,
    key: KernelKey,
    takes: tuple[type, ...],
    tile: dict[str, int],
    of: str = "",
) -> KernelSource:
    """Returns what the compiler needs of a kernel.

    takes: dataclasses of `interface`, the host function's arguments; of: as in `interface.params`.
    """
    type(host).kernel.set_name_prefix(PREFIXES[key.kernel], **NAMED)
    return KernelSource(
        host=host,
        arguments=(*(_example(some, key.dtype) for some in takes), make_fake_stream()),
        host_arguments=tuple(param for some in takes for param in interface.params(some, of)),
        launch=launches.launch(key, host.description),
        tile=tile,
        symbol_prefix=PREFIXES[key.kernel],
    )


def _example(parameters: Any, dtype: str) -> Any:
    """Makes a value of a dataclass of `interface` with which a host function can be compiled."""
    hints = typing.get_type_hints(parameters, include_extras=True)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(parameters):
        if dataclasses.is_dataclass(hints[field.name]):
            values[field.name] = _example(hints[field.name], dtype)
            continue
        (kind,) = hints[field.name].__metadata__
        if kind == "pointer":
            element = _ELEMENTS.get(field.name, tensors.TYPES[dtype])
            values[field.name] = make_ptr(element, 0, cute.AddressSpace.gmem, assumed_align=16)
        else:
            values[field.name] = Float32(1.0) if kind == "f32" else Int32(1)
    return parameters(**values)
