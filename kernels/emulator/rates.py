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
    named_barrier_latency=20,
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

_SOURCES: dict[str, tuple[str, Callable[[float, Rates], float]]] = {
    "fma_lanes": ("fma.rn.f32/throughput/16 warps", lambda x, _: x / 4),
    "alu_lanes": ("lop3.b32/throughput/16 warps", lambda x, _: x / 4),
    "special_lanes": ("ex2.approx.ftz.f32/throughput/16 warps", lambda x, _: x / 4),
    "convert_lanes": ("cvt.rn.bf16x2.f32/throughput/16 warps", lambda x, _: x / 4),
    "shuffle_lanes": ("shfl.sync.bfly.b32/throughput/16 warps", lambda x, _: x / 4),
    "shared_bytes": ("ld.shared.v4.b32/throughput/16 warps", lambda x, _: x),
    "mma_flops": (
        "wgmma/m64n256k16/rs/throughput/2 warpgroups",
        lambda x, _: 2 * 64 * 256 * 16 / x,
    ),
    "tma_load_bytes": ("tma load/4d/16 KB x 8/bandwidth/L2/all SMs", lambda x, _: x),
    "tma_store_bytes": ("tma store/4d/16 KB x 4/bandwidth/L2/all SMs", lambda x, _: x),
    "reduce_bytes": ("red.global.add.v4.f32/throughput/256 threads/all SMs", lambda x, _: x),
    "arithmetic_latency": ("fma.rn.f32/latency", lambda x, _: x),
    "special_latency": ("ex2.approx.ftz.f32/latency", lambda x, _: x),
    "convert_latency": ("cvt.rn.bf16x2.f32/latency", lambda x, _: x),
    "shuffle_latency": ("shfl.sync.bfly.b32/latency", lambda x, _: x),
    "shared_latency": ("ld.shared.b32/latency", lambda x, _: x),
    "global_latency": ("ld.global/latency/L2", lambda x, _: x),
    "mma_latency": (
        "wgmma/m64n128k16/ss/latency",
        lambda x, r: x - 2 * 64 * 128 * 16 / r.mma_flops,
    ),
    "tma_latency": (
        "tma load/4d/16 KB/latency/L2/1 SM",
        lambda x, r: x - 16384 / r.tma_load_bytes,
    ),
    "proxy_fence_latency": ("st.shared.v4+fence.proxy.async/latency", lambda x, _: x),
    "barrier_latency": ("mbarrier/arrive to wait", lambda x, _: x),
    "named_barrier_latency": ("bar.sync/128 threads", lambda x, _: x),
    "cta_latency": ("cta/end to next start/384 threads", lambda x, _: x),
}
"""Field: the microbenchmark that measures it, and the field's value of the measured one."""


def measured(rates: Rates, values: Mapping[str, float]) -> Rates:
    """Rates with every field replaced that one of the measurements tells.

    Args:
      values: by name of the measurement, in its own unit.
    """
    found: dict[str, float] = {}
    for field, (name, convert) in _SOURCES.items():
        if name in values:
            now = dataclasses.replace(rates, **found)
            found[field] = max(convert(values[name], now), 0.0)
    assumed = rates.assumed - found.keys()
    return dataclasses.replace(rates, **found, assumed=assumed)
