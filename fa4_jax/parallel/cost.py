"""Which scheme is best: seconds and bytes of each, from a model whose numbers can be replaced.

    total = compute + exposed
    compute: the busiest device's FLOPs at the speed of one GPU
    exposed: transfers that no kernel hides, what merging partial results costs, and latencies

Model and fit: docs/notes/parallel.md. It is plain arithmetic and needs no device.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Literal

from fa4_jax import bands, validate
from fa4_jax.api import Window
from fa4_jax.parallel.layout import Layout
from fa4_jax.parallel.schemes import AllGather, Ring, RingUlysses, Scheme, Ulysses
from fa4_jax.parallel.ulysses import check_heads

Pass = Literal["forward", "backward"]
PASSES: tuple[Pass, ...] = ("forward", "backward")


@dataclasses.dataclass(frozen=True)
class Rates:
    """Speeds of the GPUs and their links.

    The defaults are fitted to 4 H200s with NVLink, bf16, d = 128, causal
    (benchmarks/results/nvidia-h200-x4-parallel.json), but for what is between hosts.

    Attributes:
      forward_flops, backward_flops: of attention on one GPU, FLOP/s.
      exchange_bytes_per_s: what a GPU receives in an all-to-all of heads, from its own host.
      gather_bytes_per_s: the same for all-gathers, their way back, and permutes.
      network_bytes_per_s: per GPU, from other hosts. An assumption (400 Gbit/s), not measured.
      memory_bytes_per_s: of the GPU's own memory.
      hidden: share of a permute that runs under a kernel which lasts long enough.
      permute_s: what each step of a ring costs in each pass whatever its size.
      collective_s: the same for all other collectives.
      network_s: what each of both costs more if it crosses hosts. An assumption.
    """

    forward_flops: float = 690e12
    backward_flops: float = 570e12
    exchange_bytes_per_s: float = 240e9
    gather_bytes_per_s: float = 100e9
    network_bytes_per_s: float = 50e9
    memory_bytes_per_s: float = 4e12
    hidden: float = 0.5
    permute_s: float = 55e-6
    collective_s: float = 13e-6
    network_s: float = 20e-6

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            may_be_zero = name in ("hidden", "permute_s", "collective_s", "network_s")
            if value < 0 or (value == 0 and not may_be_zero) or not math.isfinite(value):
                raise ValueError(f"{name} must be positive, got {value}")
        if self.hidden > 1:
            raise ValueError(f"hidden is a share, got {self.hidden}")


@dataclasses.dataclass(frozen=True)
class Workload:
    """Self-attention of whole sequences, sharded over one axis of devices.

    Attributes: as the arguments of `choose`; window is that of `bands`.
    """

    tokens: int
    query_heads: int
    kv_heads: int
    head_dim: int
    batch: int
    window: bands.Window
    devices: int
    devices_per_host: int
    storage_bytes: int
    backward: bool

    @property
    def layout(self) -> Layout:
        """The layout that gives every device the same work."""
        return "zigzag" if self.window == bands.CAUSAL else "contiguous"

    @property
    def rows(self) -> int:
        """Rows of a shard."""
        return -(-self.tokens // self.devices)

    @property
    def passes(self) -> tuple[Pass, ...]:
        """The passes of a step: forward alone, or forward and backward."""
        return PASSES if self.backward else PASSES[:1]

    def pairs(self, rows: int) -> int:
        """The number of pairs (row, key) that see each other, in the first `rows` rows."""
        return bands.visible_pairs(bands.Band(self.tokens, self.tokens, 0, *self.window), rows)

    @property
    def neighbours(self) -> int:
        """At most this many other shards hold keys that the rows of a shard see."""
        return min(sum(-(-side // self.rows) for side in self.window), self.devices - 1)

    @property
    def query_bytes(self) -> int:
        """Bytes of a shard of queries, or of the output."""
        return self.batch * self.rows * self.query_heads * self.head_dim * self.storage_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of a shard of keys and values."""
        return 2 * self.batch * self.rows * self.kv_heads * self.head_dim * self.storage_bytes

    @property
    def float_bytes(self) -> int:
        """Bytes of a shard of the output in float32."""
        return self.query_bytes * 4 // self.storage_bytes

    @property
    def own_bytes(self) -> int:
        """Bytes of operands and results."""
        return (2 * self.query_bytes + self.block_bytes) * len(self.passes)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What a scheme costs.

    Attributes:
      name: of the scheme, with the devices of each axis if there are two.
      scheme: None if it does not apply.
      compute_s, exposed_s: parts of total_s.
      efficiency: one GPU's time for its share of the FLOPs, over total_s.
      memory_bytes: of a device: operands, results, and what lies between.
      reason: why it does not apply, else empty.
    """

    name: str
    scheme: Scheme | None
    compute_s: float = math.inf
    exposed_s: float = math.inf
    efficiency: float = 0.0
    memory_bytes: int = 0
    reason: str = ""

    @property
    def total_s(self) -> float:
        """Seconds of a call."""
        return self.compute_s + self.exposed_s


@dataclasses.dataclass(frozen=True)
class Choice:
    """All schemes, the fastest first, then those that do not apply. `str` gives a table."""

    work: Workload
    rates: Rates
    estimates: tuple[Estimate, ...]

    @property
    def best(self) -> Scheme:
        """The fastest that applies.

        Raises:
          ValueError: none does.
        """
        scheme = self.estimates[0].scheme
        if scheme is None:
            raise ValueError("no scheme applies:\n" + str(self))
        return scheme

    def __str__(self) -> str:
        width = max(len(x.name) for x in self.estimates)
        lines = [f"{'scheme':{width}}  compute ms  exposed ms   total ms  efficiency  GiB/device"]
        for x in self.estimates:
            if x.scheme is None:
                lines.append(f"{x.name:{width}}  {x.reason}")
                continue
            times = (f"{1e3 * s:10.3f}" for s in (x.compute_s, x.exposed_s, x.total_s))
            memory = f"{x.memory_bytes / 2**30:10.2f}"
            lines.append(f"{x.name:{width}}  {'  '.join(times)}  {x.efficiency:10.3f}  {memory}")
        return "\n".join(lines)


def choose(
    *,
    tokens: int,
    query_heads: int,
    kv_heads: int,
    head_dim: int,
    devices: int,
    devices_per_host: int | None = None,
    batch: int = 1,
    is_causal: bool = False,
    local_window_size: Window = None,
    storage_bytes: int = 2,
    backward: bool = True,
    axis: str = "seq",
    rates: Rates | None = None,
) -> Choice:
    """The schemes of context parallelism, ranked by their estimated time.

    Args:
      tokens: T = S of the whole sequences.
      query_heads, kv_heads, batch: of the devices that share a sequence: after data and tensor
        axes have had their parts.
      devices: size of the sequence's mesh axis.
      devices_per_host: how many of them, next to each other, share a host; None: all.
      is_causal, local_window_size: as `fa4_jax.attention`.
      storage_bytes: of an element of query, key and value.
      backward: whether forward and backward are meant, or the forward alone.
      axis: that the schemes name. The 2-D scheme takes two: `axis`_ring and `axis`_ulysses.
      rates: of the machine, by default `Rates()`.

    Raises:
      ValueError: a size is wrong.
    """
    per_host = min(devices if devices_per_host is None else devices_per_host, devices)
    numbers = {
        "tokens": tokens,
        "query_heads": query_heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "batch": batch,
        "devices": devices,
        "devices_per_host": per_host,
        "storage_bytes": storage_bytes,
    }
    for name, value in numbers.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if query_heads % kv_heads:
        raise ValueError(f"{query_heads} query heads are no multiple of {kv_heads} KV heads")
    if devices % per_host:
        raise ValueError(f"{devices} devices do not fill hosts of {per_host}")
    window = validate.window(local_window_size, is_causal)
    work = Workload(window=window, backward=backward, **numbers)
    rates = rates or Rates()
    found = [
        _ring(work, rates, axis),
        _all_gather(work, rates, axis),
        _ulysses(work, rates, axis),
        _ring_ulysses(work, rates, axis),
    ]
    return Choice(work, rates, tuple(sorted(found, key=lambda x: x.total_s)))


def _kernel_s(work: Workload, rates: Rates, which: Pass, pairs: float, heads: float) -> float:
    """Seconds of attention's kernels for `pairs` pairs in each sequence of the batch."""
    forward = 4 * work.batch * heads * work.head_dim * pairs
    if which == "forward":
        return forward / rates.forward_flops
    return 2.5 * forward / rates.backward_flops


def _ideal_s(work: Workload, rates: Rates) -> float:
    pairs = work.pairs(work.tokens) / work.devices
    return sum(_kernel_s(work, rates, x, pairs, work.query_heads) for x in work.passes)


def _max_pairs(work: Workload) -> float:
    """The number of pairs of the device that has the most."""
    if work.layout == "zigzag":
        return work.pairs(work.tokens) / work.devices
    ends = [min(i * work.rows, work.tokens) for i in range(work.devices + 1)]
    counts = [work.pairs(end) for end in ends]
    return max(b - a for a, b in itertools.pairwise(counts))


def _shards_fit(work: Workload, chunks: int) -> str:
    """The reason why zig-zag is unavailable, or an empty string."""
    if work.layout == "zigzag" and work.tokens % chunks:
        return f"zig-zag takes a multiple of {chunks} tokens, not {work.tokens}: pad them"
    return ""


def _estimate(
    work: Workload, rates: Rates, scheme: Scheme, name: str, times: tuple[float, float], extra: int
) -> Estimate:
    compute, exposed = times
    efficiency = _ideal_s(work, rates) / (compute + exposed)
    return Estimate(name, scheme, compute, exposed, efficiency, work.own_bytes + extra)


def _steps_s(
    work: Workload, rates: Rates, kernels: Mapping[Pass, float], steps: int, block: int, hosts: bool
) -> float:
    """Seconds of a ring's permutes that no kernel hides, and of merging.

    Args:
      kernels: seconds of all kernels of a pass.
      block: bytes of K and V that travel a step; in the backward dK and dV too.
      hosts: whether a step crosses hosts.
    """
    speed = rates.gather_bytes_per_s
    speed = min(speed, rates.network_bytes_per_s) if hosts else speed
    latency = rates.permute_s + (rates.network_s if hosts else 0.0)
    exposed = 0.0
    for which, kernel in kernels.items():
        transfer = block * (1 if which == "forward" else 2) / speed
        beside = transfer * rates.hidden
        step = latency + transfer - beside + max(0.0, beside - kernel / (steps + 1))
        # Reads the sum and a part, writes the sum: of the output, or of dQ.
        merging = (2 * work.float_bytes + work.query_bytes) * (steps + 1)
        exposed += steps * step + merging / rates.memory_bytes_per_s
    return exposed


def _ring(work: Workload, rates: Rates, axis: str) -> Estimate:
    if reason := _shards_fit(work, 2 * work.devices):
        return Estimate("ring", None, reason=reason)
    steps = work.neighbours
    pairs = _max_pairs(work)
    kernels: Mapping[Pass, float] = {
        x: _kernel_s(work, rates, x, pairs, work.query_heads) for x in work.passes
    }
    hosts = work.devices > work.devices_per_host
    exposed = _steps_s(work, rates, kernels, steps, work.block_bytes, hosts)
    extra = 4 * work.float_bytes + 2 * work.block_bytes
    times = sum(kernels.values()), exposed
    return _estimate(work, rates, Ring(axis, work.layout), "ring", times, extra)


def _all_gather(work: Workload, rates: Rates, axis: str) -> Estimate:
    if reason := _shards_fit(work, 2 * work.devices):
        return Estimate("all-gather", None, reason=reason)
    n, per_host, block = work.devices, work.devices_per_host, work.block_bytes
    shards = work.neighbours
    pairs = _max_pairs(work)
    compute = sum(_kernel_s(work, rates, x, pairs, work.query_heads) for x in work.passes)
    within = block * shards / rates.gather_bytes_per_s
    gather, back = within, within
    latency = rates.collective_s
    if n > per_host:
        latency += rates.network_s
        crossing = min(shards, n - per_host)
        # All blocks enter a host once, on all its links, and go round in it meanwhile; a window's
        # are sent to those GPUs that need them.
        links = per_host if shards == n - 1 else 1
        gather = max(within, crossing * block / links / rates.network_bytes_per_s)
        # On the way back every GPU has its own dK and dV for everybody: nothing is shared.
        back = max(within, crossing * block / rates.network_bytes_per_s)
    exposed = 2 * latency + gather
    if work.backward:
        exposed += 4 * latency + gather + back
    held = block * (shards + 1)
    extra = work.float_bytes + 2 * held + 2 * block
    return _estimate(
        work, rates, AllGather(axis, work.layout), "all-gather", (compute, exposed), extra
    )


def _exchange_s(work: Workload, rates: Rates, devices: int, per_host: int, kv: int) -> float:
    """All-to-alls of Q, O, K, V and the log-sum-exp among neighbouring devices, in one pass.

    Args:
      kv: bytes of K and V that a device sends away and keeps, each head as often as it is needed.
    """
    lse = 4 * work.batch * work.rows * work.query_heads
    share = (2 * work.query_bytes + kv + lse) / devices
    near, far = min(devices, per_host) - 1, max(0, devices - per_host)
    latency = 5 * (rates.collective_s + (rates.network_s if far else 0.0))
    return latency + max(
        share * near / rates.exchange_bytes_per_s, share * far / rates.network_bytes_per_s
    )


def _replicated_kv_bytes(work: Workload, devices: int) -> int:
    """Bytes of K and V shards, with the copies of heads that several devices need."""
    return work.block_bytes * max(1, devices // work.kv_heads)


def _heads_fit(work: Workload, devices: int) -> str:
    """The reason why Ulysses is unavailable, or an empty string."""
    try:
        check_heads(work.query_heads, work.kv_heads, "seq", devices)
    except ValueError:
        heads = f"{work.query_heads} query and {work.kv_heads} KV heads"
        return f"{heads} cannot be shared out among {devices} devices"
    return ""


def _ulysses(work: Workload, rates: Rates, axis: str) -> Estimate:
    n = work.devices
    if reason := _heads_fit(work, n):
        return Estimate("Ulysses", None, reason=reason)
    kv = _replicated_kv_bytes(work, n)
    exchange = _exchange_s(work, rates, n, work.devices_per_host, kv)
    extra = work.float_bytes + 2 * work.query_bytes + kv
    times = _ideal_s(work, rates), len(work.passes) * exchange
    return _estimate(work, rates, Ulysses(axis), "Ulysses", times, extra)


def _ring_ulysses(work: Workload, rates: Rates, axis: str) -> Estimate:
    """Ulysses among as many devices of a host as heads allow, a ring over the rest."""
    n, per_host = work.devices, work.devices_per_host
    sizes = [u for u in range(2, min(per_host, n - 1) + 1) if per_host % u == 0 and n % u == 0]
    fitting = [u for u in sizes if not _heads_fit(work, u)]
    if not fitting:
        heads = f"{work.query_heads} query and {work.kv_heads} KV heads"
        why = f"{heads} fit no divisor" if sizes else "there is no divisor"
        reason = f"{why} between 1 and {n} of the {per_host} devices of a host"
        return Estimate("ring x Ulysses", None, reason=reason)
    u = max(fitting)
    rings = n // u
    name = f"ring {rings} x Ulysses {u}"
    if reason := _shards_fit(work, math.lcm(n, 2 * rings)):
        return Estimate(name, None, reason=reason)
    kv = _replicated_kv_bytes(work, u)
    wide = dataclasses.replace(work, devices=rings, devices_per_host=max(1, per_host // u))
    steps = wide.neighbours
    pairs = _max_pairs(wide)
    heads = work.query_heads / u
    kernels: Mapping[Pass, float] = {
        x: _kernel_s(work, rates, x, pairs, heads) for x in work.passes
    }
    exposed = _steps_s(work, rates, kernels, steps, kv, hosts=n > per_host)
    exposed += len(work.passes) * _exchange_s(work, rates, u, per_host, kv)
    extra = 4 * work.float_bytes + 2 * work.query_bytes + 3 * kv
    scheme = RingUlysses(f"{axis}_ring", f"{axis}_ulysses", work.layout)
    return _estimate(work, rates, scheme, name, (sum(kernels.values()), exposed), extra)
