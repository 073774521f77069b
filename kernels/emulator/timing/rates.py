"""The speeds of an SM's units: the one table on which every timing estimate rests.

Hopper's numbers are what `python -m benchmarks.microbenchmarks` measured on an H200
(`benchmarks/results/nvidia-h200-microbenchmarks.json`), except for a few from documentation.
`SOURCES` says which measurement gives which field, and a test holds that they agree. `assumed`
names the fields without a source. Nothing here was fitted to attention kernels.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping


@dataclasses.dataclass(frozen=True)
class Rates:
    """One architecture. Lanes are results a cycle of one of an SM's four sub-partitions.

    Bytes of an SM are what it gets in a cycle when all SMs do the same, those called `alone` what
    it gets when no other does. Latencies are cycles.

    Attributes:
      fma_lanes .. shuffle_lanes: of a unit; `multiply` is of integers, `convert` packs two floats.
      memory_lanes: of ld and st instructions.
      narrow_issue: cycles of the issue slot of an instruction to a unit of 16 lanes.
      mma_flops: a cycle of the SM, dense 16-bit inputs.
      shared_bytes: a cycle of the SM, reads and writes, of instructions, copies and products.
      one_address_bytes: that lanes get, a cycle of the SM, of loads from one and the same address.
      tma_load_bytes, tma_store_bytes: from and to L2.
      tensor_memory_bytes: that warps load or store, a cycle of the SM; 0 if it has none.
      reduce_bytes: of fp32 additions to global memory.
      cluster_bytes: that an SM sends to another of its cluster.
      dram_bytes: of DRAM, reads and writes half and half.
      l2_bytes: what L2 keeps.
      arithmetic_latency .. global_latency: until a dependent instruction issues; global: of L2.
      mma_latency: from the end of a product's last operand read until its result is waited for.
      tma_latency, tma_store_latency: of the first byte, from or to L2.
      dram_latency: what a load takes longer from DRAM than from L2.
      signal_latency: from a release of one SM to the acquire of another that polls.
      cluster_latency: what an arrival at, or bytes for, another SM of the cluster take longer.
      release_latency: of the memory barrier with which an arrival begins that releases to the
        cluster; the warp stands still.
      pair_latency: what the result of a pair's product takes longer, at both SMs.
      barrier_latency: from the last arrival or byte until a waiting warp goes on.
      wait_latency: of an mbarrier's wait that need not wait.
      named_barrier_latency, named_barrier_warp: of bar.sync: the sum of the first and, for every
        warp of the barrier, the second.
      cta_latency: from the end of a CTA to the first instruction of the next in its place.
      grid_latency: from the end of a grid to the first instruction of the next.
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
    narrow_issue: float
    mma_flops: float
    shared_bytes: float
    one_address_bytes: float
    tma_load_bytes: float
    tma_load_alone: float
    tma_store_bytes: float
    tma_store_alone: float
    tensor_memory_bytes: float
    reduce_bytes: float
    reduce_alone: float
    cluster_bytes: float
    dram_bytes: float
    l2_bytes: int
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
    dram_latency: float
    signal_latency: float
    cluster_latency: float
    release_latency: float
    pair_latency: float
    proxy_fence_latency: float
    barrier_latency: float
    wait_latency: float
    named_barrier_latency: float
    named_barrier_warp: float
    cta_latency: float
    grid_latency: float
    assumed: frozenset[str]

    def alone(self) -> Rates:
        """What an SM gets while no other one asks for anything."""
        return dataclasses.replace(
            self,
            tma_load_bytes=self.tma_load_alone,
            tma_store_bytes=self.tma_store_alone,
            reduce_bytes=self.reduce_alone,
        )


_CLUSTER_LATENCY = 78.5
"""Half of what a load from another SM of the cluster takes longer than one's own: 180 cycles on an
H100 (arXiv 2402.13499) against 23 (`shared_latency`)."""

HOPPER = Rates(
    name="H200",
    multiprocessors=132,
    clock_ghz=1.83,  # at which 4096 FLOP a cycle and SM give the data sheet's 989.5 TFLOP/s
    fma_lanes=32,
    alu_lanes=16.15,
    multiply_lanes=16,  # CUDA C++ Programming Guide, arithmetic throughput
    special_lanes=4.003,
    convert_lanes=16.15,
    shuffle_lanes=8.003,
    memory_lanes=8,  # H100 white paper: load and store units
    narrow_issue=1.858,
    mma_flops=4097,
    shared_bytes=128,
    one_address_bytes=259.2,
    tma_load_bytes=34.51,
    tma_load_alone=108.4,
    tma_store_bytes=18.9,
    tma_store_alone=31.94,
    tensor_memory_bytes=0,
    reduce_bytes=19.39,
    reduce_alone=25.59,
    cluster_bytes=19.48,
    dram_bytes=15.91,
    l2_bytes=52 << 20,  # reads by all SMs slow down between 48 and 56 MB
    arithmetic_latency=4,
    special_latency=17,
    convert_latency=4,
    shuffle_latency=24,
    shared_latency=23,
    global_latency=271.8,
    mma_latency=48.95,
    tensor_memory_latency=0,
    tma_latency=247.5,
    tma_store_latency=89.38,
    dram_latency=793.9,
    signal_latency=1074,
    cluster_latency=_CLUSTER_LATENCY,
    release_latency=248.5,
    pair_latency=0,
    proxy_fence_latency=19.07,
    barrier_latency=70.22,
    wait_latency=38.99,
    named_barrier_latency=11.99,
    named_barrier_warp=2,
    cta_latency=312.5,
    grid_latency=3350,
    assumed=frozenset(),
)

BLACKWELL = dataclasses.replace(
    HOPPER,
    name="B200",
    multiprocessors=148,
    clock_ghz=1.85,
    mma_flops=8192,
    mma_latency=53.8,
    pair_latency=34,
    dram_bytes=26.5,
    tensor_memory_bytes=512,
    tensor_memory_latency=30,
    l2_bytes=126 << 20,
    assumed=frozenset({field.name for field in dataclasses.fields(Rates)})
    - {
        *("name", "multiprocessors", "clock_ghz", "mma_flops", "shared_bytes", "l2_bytes"),
        *("fma_lanes", "alu_lanes", "multiply_lanes", "special_lanes", "convert_lanes"),
        *("shuffle_lanes", "memory_lanes", "assumed"),
        *("mma_latency", "pair_latency", "dram_bytes"),
    },
)
"""Lanes, products and shared memory are as documented, and four fields as others measured them on a
B200 (`PUBLISHED`); all else is assumed to be Hopper's."""

PUBLISHED: Mapping[str, str] = {
    "clock_ghz": "flashinfer 2899: of flash-attn-4's forward 1450 TFLOP/s at first, 1237 at the "
    "1.58 GHz of a hot GPU",
    "mma_latency": "SemiAnalysisAI/microbench-blackwell, umma_latency: m128n128k16 from shared "
    "memory is waited for 200 cycles after its issue; less 64 of work, 12 of issue and "
    "barrier_latency",
    "pair_latency": "the same: m256n128k16 of a pair takes 234",
    "dram_bytes": "the same, tma2d_throughput: 7.26 TB/s of reads",
}
"""Blackwell's fields that others measured, and who."""

RATES: Mapping[str, Rates] = {"sm_90a": HOPPER, "sm_100f": BLACKWELL}
"""The rates of each architecture of a kernel's key."""

_REDUCTIONS = (
    *(f"red.global.add.v4.f32/throughput/{n} threads/all SMs" for n in (128, 256, 384)),
    *(f"red.global.add.v4.f32/throughput/256 threads/all SMs, {n} to the same" for n in (2, 8, 32)),
)

SOURCES: dict[str, tuple[tuple[str, ...], Callable[..., float]]] = {
    # Except for fma, the throughput of arithmetic is that of 4 warps, one in each sub-partition:
    # with 16 warps the difference of two loops exceeded what can be issued (256 for fma, -454 for
    # mov).
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
    "one_address_bytes": (
        ("ld.shared.v4.b32 of one address/throughput/16 warps",),
        lambda x: x,
    ),
    "mma_flops": (
        ("wgmma/m64n256k16/ss/throughput/1 warpgroups",),
        lambda x: 2 * 64 * 256 * 16 / x,
    ),
    "tma_load_bytes": (("tma load/4d/16 KB x 8/bandwidth/L2/all SMs",), lambda x: x),
    "tma_load_alone": (("tma load/4d/16 KB x 8/bandwidth/L2/1 SM",), lambda x: x),
    "tma_store_alone": (("tma store/2d/16 KB x 4/bandwidth/L2/1 SM",), lambda x: x),
    "reduce_alone": (("red.global.add.v4.f32/throughput/256 threads/1 SM",), lambda x: x),
    "dram_bytes": (("stream/4 ld.global + 4 st.global/bandwidth/DRAM/all SMs",), lambda x: x),
    "dram_latency": (
        ("tma load/4d/16 KB/latency/DRAM/1 SM", "tma load/4d/16 KB/latency/L2/1 SM"),
        lambda dram, l2: dram - l2,
    ),
    "signal_latency": (("signal/red.release to ld.acquire",), lambda x: x),
    "grid_latency": (("grid/end to next start/384 threads",), lambda x: x),
    "tma_store_bytes": (("tma store/4d/16 KB x 4/bandwidth/L2/all SMs",), lambda x: x),
    # The rows and their repetitions lie between 15 and 30, by how L2's slices share the addresses.
    "reduce_bytes": (_REDUCTIONS, lambda *xs: statistics.median(xs)),
    "arithmetic_latency": (("fma.rn.f32/latency",), round),
    "special_latency": (("ex2.approx.ftz.f32/latency",), round),
    "convert_latency": (("cvt.rn.bf16x2.f32/latency",), round),
    "shuffle_latency": (("shfl.sync.bfly.b32/latency",), round),
    "shared_latency": (("ld.shared.b32/latency",), round),
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
    "cluster_bytes": (("cluster/16 KB x 4 to the other/bandwidth/all SMs",), lambda x: x),
    "cluster_latency": (
        ("cluster/arrive of the CTA's scope to wait", "mbarrier/arrive to wait"),
        lambda there, here: there - here,
    ),
    # The arrival of the measurement releases to the cluster: ptxas 13.0 begins it with MEMBAR.
    "release_latency": (
        ("cluster/arrive to wait", "mbarrier/arrive to wait"),
        lambda there, here: there - here - _CLUSTER_LATENCY,
    ),
    "wait_latency": (("mbarrier/try_wait that succeeds",), lambda x: x - 2),
    # 16 KB differ from 8 KB by the bytes alone; barrier_latency counts the wait for the barrier.
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
"""The microbenchmarks that measure a field, and a function from their values to the field's."""


def numbers(rates: Rates) -> dict[str, float]:
    """The rates by field, without names: what an estimate that is kept rests on."""
    return {k: v for k, v in dataclasses.asdict(rates).items() if k not in ("name", "assumed")}


def measured(rates: Rates, values: Mapping[str, float]) -> Rates:
    """The rates, with every field replaced that the measurements determine.

    Args:
      values: by name of the measurement, in its own unit.
    """
    found = {
        field: max(convert(*(values[name] for name in names)), 0.0)
        for field, (names, convert) in SOURCES.items()
        if all(name in values for name in names)
    }
    assumed = rates.assumed - found.keys()
    return dataclasses.replace(rates, **found, assumed=assumed)
