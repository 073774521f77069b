"""How fast an SM's units are: the one table behind every timing estimate.

Rates come from documentation, latencies from published microbenchmarks where there are any;
`assumed` names the fields that have no such source yet. `measured` replaces fields by what
`python -m benchmarks.microbenchmarks` found on a GPU. Nothing here was fitted to attention kernels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping


@dataclasses.dataclass(frozen=True)
class Rates:
    """One architecture. Lanes are results a cycle of one of an SM's four sub-partitions.

    CUDA C++ Programming Guide, arithmetic throughput: fma, alu, multiply, special, convert, vote
    (shuffle_lanes: warp shuffles). PTX latencies are cycles until a dependent instruction issues.

    Attributes:
      memory_lanes: of ld and st instructions.
      mma_flops: a cycle of the SM, dense 16-bit inputs.
      mma_latency: from the end of a product's last operand read until its result is waited for.
      shared_bytes: a cycle of the SM, reads and writes together.
      tma_load_bytes, tma_store_bytes: a cycle of one SM when all SMs load or store.
      tma_latency, tma_store_latency: of the first byte, from or to L2.
      tensor_memory_bytes: that warps load or store, a cycle of the SM; 0 if it has none.
      reduce_bytes: of fp32 additions to global memory, a cycle of one SM when all add.
      barrier_latency: from the last arrival or byte until a waiting warp goes on.
      named_barrier_latency: the same of bar.sync.
      named_barrier_warp: what every warp of the barrier adds to it.
      wait_latency: of an mbarrier's wait that need not wait.
      narrow_issue: cycles of the issue slot of an instruction to a unit of 16 lanes.
      cta_latency: from the end of a CTA to the first instruction of the next in its place.
      assumed: fields without a source.
    """

    name: str
    multiprocessors: int
    clock_ghz: float
    fma_lanes: float
    alu_lanes: float
    multiply_lanes: float
    special_lanes: float
    convert_lanes: float
    shuffle_lanes: float
    memory_lanes: float
    mma_flops: float
    shared_bytes: float
    tma_load_bytes: float
    tma_store_bytes: float
    tensor_memory_bytes: float
    reduce_bytes: float
    arithmetic_latency: float
    special_latency: float
    convert_latency: float
    shuffle_latency: float
    shared_latency: float
    global_latency: float
    mma_latency: float
    tensor_memory_latency: float
    tma_latency: float
    tma_store_latency: float
    proxy_fence_latency: float
    barrier_latency: float
    named_barrier_latency: float
    named_barrier_warp: float
    wait_latency: float
    narrow_issue: float
    cta_latency: float
    assumed: frozenset[str]


_ASSUMED = frozenset(
    {
        "special_latency",
        "convert_latency",
        "shuffle_latency",
        "mma_latency",
        "tma_load_bytes",
        "tma_store_bytes",
        "tma_latency",
        "tma_store_latency",
        "proxy_fence_latency",
        "barrier_latency",
        "named_barrier_latency",
        "cta_latency",
    }
)

HOPPER = Rates(
    name="H200",
    multiprocessors=132,
    clock_ghz=1.83,  # at which 4096 FLOP a cycle and SM give the data sheet's 989.5 TFLOP/s
    fma_lanes=32,
    alu_lanes=16,
    multiply_lanes=16,
    special_lanes=4,
    convert_lanes=16,
    shuffle_lanes=8,
    memory_lanes=8,
    mma_flops=4096,
    shared_bytes=128,
    tma_load_bytes=32,
    tma_store_bytes=32,
    tensor_memory_bytes=0,
    reduce_bytes=17,  # 31 GB/s an SM at 1.83 GHz: issue 2889 of the official implementation
    arithmetic_latency=4,
    special_latency=20,
    convert_latency=6,
    shuffle_latency=24,
    shared_latency=29,  # arXiv 2402.13499, as are the next two
    global_latency=263,
    mma_latency=16,
    tensor_memory_latency=0,
    tma_latency=450,
    tma_store_latency=450,
    proxy_fence_latency=20,
    barrier_latency=20,
    named_barrier_latency=12,
    named_barrier_warp=2,
    wait_latency=39,
    narrow_issue=1.86,
    cta_latency=0,
    assumed=_ASSUMED,
)

BLACKWELL = dataclasses.replace(
    HOPPER,
    name="B200",
    multiprocessors=148,
    clock_ghz=1.85,
    mma_flops=8192,
    tensor_memory_bytes=512,
    tensor_memory_latency=30,
    assumed=_ASSUMED
    | {
        "reduce_bytes",
        "arithmetic_latency",
        "shared_latency",
        "global_latency",
        "tensor_memory_bytes",
        "tensor_memory_latency",
    },
)
"""What is not given here is Hopper's: the same lanes by documentation, latencies assumed equal."""

RATES: Mapping[str, Rates] = {"sm_90a": HOPPER, "sm_100f": BLACKWELL}
"""By architecture of a kernel's key."""

_SOURCES: dict[str, tuple[tuple[str, ...], Callable[..., float]]] = {
    # Of arithmetic without fma what 4 warps get through, one in each sub-partition: with 16 the
    # difference of two loops came out above what can be issued (256 for fma, -454 for mov).
    "fma_lanes": (("fma.rn.f32/throughput/8 warps",), lambda x: min(x / 4, 32.0)),
    "alu_lanes": (("lop3.b32/throughput/4 warps",), lambda x: x / 4),
    "special_lanes": (("ex2.approx.ftz.f32/throughput/4 warps",), lambda x: x / 4),
    "convert_lanes": (("cvt.rn.bf16x2.f32/throughput/4 warps",), lambda x: x / 4),
    "shuffle_lanes": (("shfl.sync.bfly.b32/throughput/8 warps",), lambda x: x / 4),
    "narrow_issue": (
        ("fma+lop3/throughput/8 warps", "fma.rn.f32/throughput/8 warps"),
        lambda both, fma: 2 * 128 / both - 128 / fma,
    ),
    "shared_bytes": (("ld.shared.v4.b32/throughput/16 warps",), lambda x: x),
    "mma_flops": (
        ("wgmma/m64n256k16/ss/throughput/1 warpgroups",),
        lambda x: 2 * 64 * 256 * 16 / x,
    ),
    "tma_load_bytes": (("tma load/4d/16 KB x 8/bandwidth/L2/all SMs",), lambda x: x),
    "tma_store_bytes": (("tma store/4d/16 KB x 4/bandwidth/L2/all SMs",), lambda x: x),
    "reduce_bytes": (("red.global.add.v4.f32/throughput/256 threads/all SMs",), lambda x: x),
    "arithmetic_latency": (("fma.rn.f32/latency",), lambda x: x),
    "special_latency": (("ex2.approx.ftz.f32/latency",), lambda x: x),
    "convert_latency": (("cvt.rn.bf16x2.f32/latency",), lambda x: x),
    "shuffle_latency": (("shfl.sync.bfly.b32/latency",), lambda x: x),
    "shared_latency": (("ld.shared.b32/latency",), lambda x: x),
    "global_latency": (("ld.global/latency/L2",), lambda x: x),
    # Fence, commit and wait, an issue slot each, are measured with it.
    "mma_latency": (
        ("wgmma/m64n64k16/ss/latency", "wgmma/m64n64k16/ss/throughput/1 warpgroups"),
        lambda alone, more: alone - more - 3,
    ),
    "barrier_latency": (
        ("mbarrier/arrive to wait", "mbarrier/arrive"),
        lambda there, arrive: there - arrive,
    ),
    "wait_latency": (("mbarrier/try_wait that succeeds",), lambda x: x - 2),
    # From 8 KB to 16 KB only the bytes are more; the wait for the barrier is counted there.
    "tma_latency": (
        (
            "tma load/4d/8 KB/latency/L2/1 SM",
            "tma load/4d/16 KB/latency/L2/1 SM",
            "mbarrier/arrive to wait",
            "mbarrier/arrive",
        ),
        lambda small, large, there, arrive: 2 * small - large - (there - arrive),
    ),
    "tma_store_latency": (
        (
            "tma store/2d/8 KB/latency until written",
            "tma store/2d/16 KB/latency until written",
        ),
        lambda small, large: 2 * small - large,
    ),
    "proxy_fence_latency": (("st.shared.v4+fence.proxy.async/latency",), lambda x: x - 4),
    "named_barrier_latency": (
        ("bar.sync/128 threads", "bar.sync/256 threads"),
        lambda four, eight: 2 * four - eight,
    ),
    "named_barrier_warp": (
        ("bar.sync/128 threads", "bar.sync/256 threads"),
        lambda four, eight: (eight - four) / 4,
    ),
    "cta_latency": (("cta/end to next start/384 threads",), lambda x: x),
}
"""Field: the microbenchmarks that measure it, and the field's value of the measured ones."""


def measured(rates: Rates, values: Mapping[str, float]) -> Rates:
    """Rates with every field replaced that the measurements tell.

    Args:
      values: by name of the measurement, in its own unit.
    """
    found = {
        field: max(convert(*(values[name] for name in names)), 0.0)
        for field, (names, convert) in _SOURCES.items()
        if all(name in values for name in names)
    }
    assumed = rates.assumed - found.keys()
    return dataclasses.replace(rates, **found, assumed=assumed)
