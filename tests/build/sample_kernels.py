"""Two small kernels that exist for tests alone. tests/build/remote.py compiles them."""

# CuTe-DSL does not mark what it exports, and rewrites the kernels before Python sees them.
# pyright: reportPrivateImportUsage=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportInvalidTypeArguments=false, reportAttributeAccessIssue=false

from __future__ import annotations

import dataclasses

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_stream, make_ptr

from fa4_jax.key import KernelKey, Pass
from fa4_jax.manifest import Factor, Launch, Param, Result
from kernels.kernel_source import KernelSource

KEY = KernelKey("sm_90a", Pass.FORWARD, "bf16", 64)
TILE = 64
THREADS = 128
BOX = (TILE, TILE)


class Scale:
    """y[rows, columns] = scale * x by TMA, in clusters of two, on at most `processors` CTAs."""

    @cute.jit
    def __call__(
        self,
        x: cute.Pointer,
        y: cute.Pointer,
        rows: Int32,
        columns: Int32,
        padded_rows: Int32,
        shift: Int32,
        scale: Float32,
        processors: Int32,
        stream: cuda.CUstream,
    ):
        layout = cute.make_layout((rows, columns), stride=(cute.assume(columns, divby=4), 1))
        tile = cute.make_layout(BOX, stride=(TILE, 1))
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        x_map, _ = cpasync.make_tiled_tma_atom(load, cute.make_tensor(x, layout), tile, BOX)
        y_map, _ = cpasync.make_tiled_tma_atom(store, cute.make_tensor(y, layout), tile, BOX)
        tiles = cute.ceil_div(rows, TILE) * cute.ceil_div(columns, TILE)
        self.kernel(x_map, y_map, x, padded_rows, shift, scale, processors).launch(
            grid=[cutlass.min(tiles, processors), 2, 1],
            block=[THREADS, 1, 1],
            cluster=[1, 2, 1],
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        x_map: cute.CopyAtom,
        y_map: cute.CopyAtom,
        x: cute.Pointer,
        padded_rows: Int32,
        shift: Int32,
        scale: Float32,
        processors: Int32,
    ):
        @cute.struct
        class Storage:
            barrier: cute.struct.MemRange[cutlass.Int64, 1]
            tile: cute.struct.Align[cute.struct.MemRange[Float32, TILE * TILE], 1024]

        storage = cutlass.memory.SmemAllocator().allocate(Storage)
        tile = storage.tile.get_tensor(cute.make_layout(BOX, stride=(TILE, 1)))
        barrier = storage.barrier.data_ptr()
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        if thread == 0:
            cute.arch.mbarrier_init(barrier, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        # The descriptors bound the copies, so that coordinates are all that a kernel needs.
        layout = cute.make_layout((1 << 20, 1 << 20), stride=(cute.E(1), cute.E(0)))
        origin = cute.make_identity_tensor((1 << 20, 1 << 20)).iterator
        coordinates = cute.local_tile(cute.make_tensor(origin, layout), BOX, (block, 0))
        one = cute.make_layout(1)
        parts = (cute.group_modes(tile, 0, 2), cute.group_modes(coordinates, 0, 2))
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, TILE * TILE * 4)
            shared, memory = cpasync.tma_partition(x_map, 0, one, *parts)
            cute.copy(x_map, memory, shared, tma_bar_ptr=barrier)
        cute.arch.mbarrier_wait(barrier, 0)
        first = cute.make_tensor(x, cute.make_layout(1))[0]
        number = Float32(padded_rows + shift + processors)
        for i in cutlass.range_constexpr(TILE * TILE // THREADS):
            at = i * THREADS + thread
            tile[at // TILE, at % TILE] = tile[at // TILE, at % TILE] * scale + first + number
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_threads()
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
            shared, memory = cpasync.tma_partition(y_map, 0, one, *parts)
            cute.copy(y_map, shared, memory)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0)


class Spilling:
    """Keeps far more values live than 1024 threads have registers for."""

    VALUES = 128

    @cute.jit
    def __call__(self, x: cute.Pointer, count: Int32, stream: cuda.CUstream):
        self.kernel(x, count).launch(grid=[1, 1, 1], block=[1024, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Pointer, count: Int32):
        thread, _, _ = cute.arch.thread_idx()
        n = self.VALUES
        memory = cute.make_tensor(x, cute.make_layout((1024, n), stride=(1, 1024)))
        values = cute.make_rmem_tensor((n,), Float32)
        for i in cutlass.range_constexpr(n):
            values[i] = memory[thread, i]
        for _ in cutlass.range(count, unroll=1):
            for i in cutlass.range_constexpr(n):
                values[i] = values[i] * values[(7 * i + 3) % n] + values[(5 * i + 1) % n]
        for i in cutlass.range_constexpr(n):
            memory[thread, i] = values[i]


for _kernel, _name in ((Scale, "sample_scale"), (Spilling, "sample_spilling")):
    _kernel.kernel.set_name_prefix(_name, remove_cutlass_symbol=True, keep_mangled_name=False)
    _kernel.__call__.set_name_prefix(
        f"{_name}_host", remove_cutlass_symbol=True, keep_mangled_name=False
    )


def _float_pointer():
    return make_ptr(Float32, 0, cute.AddressSpace.gmem, assumed_align=16)


def scale_source() -> KernelSource:
    """The kernel that is fit for use."""
    rows, columns = Factor(buffer="x"), Factor(buffer="x", axis=1)
    sizes = (
        Param("rows", "dim", "x", axes=(0,)),
        Param("columns", "dim", "x", axes=(1,)),
    )
    numbers = (
        Param("padded_rows", "size", size=(dataclasses.replace(rows, divisor=16, multiple=16),)),
        Param("shift", "i32"),
        Param("scale", "f32"),
        Param("processors", "sm_count"),
    )
    launch = Launch(
        operands=("x",),
        results=(Result("y", "f32", ((rows,), (columns,))),),
        params=(
            Param("x_map", "tensor_map", "x", axes=(1, 0), box=BOX),
            Param("y_map", "tensor_map", "y", axes=(1, 0), box=BOX),
            Param("x", "pointer", "x"),
            *numbers,
        ),
        grid=(
            (dataclasses.replace(rows, divisor=TILE), dataclasses.replace(columns, divisor=TILE)),
            (Factor(constant=2),),
            (Factor(),),
        ),
        block=(THREADS, 1, 1),
        dynamic_smem_bytes=1024 + 4 * TILE * TILE,
        cluster=(1, 2, 1),
        persistent=1,
    )
    return KernelSource(
        host=Scale(),
        arguments=(
            _float_pointer(),
            _float_pointer(),
            *(Int32(64),) * 4,
            Float32(1),
            Int32(1),
            make_fake_stream(),
        ),
        host_arguments=(
            Param("x", "pointer", "x"),
            Param("y", "pointer", "y"),
            *sizes,
            *numbers,
        ),
        launch=launch,
        tile={"m": TILE, "n": TILE},
        symbol_prefix="sample_scale",
    )


def spilling_source() -> KernelSource:
    """The kernel that is not."""
    params = (Param("x", "pointer", "x"), Param("count", "i32"))
    launch = Launch(
        operands=("x",),
        results=(),
        params=params,
        grid=((Factor(),), (Factor(),), (Factor(),)),
        block=(1024, 1, 1),
        dynamic_smem_bytes=0,
    )
    arguments = (_float_pointer(), Int32(1), make_fake_stream())
    return KernelSource(Spilling(), arguments, params, launch, {}, "sample_spilling")
