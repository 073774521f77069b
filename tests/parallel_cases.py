"""Context-parallel cases: schemes, masks and meshes, run the same on CPUs and on GPUs."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fa4_jax import parallel
from fa4_jax.conformance import runner
from fa4_jax.conformance.cases import Case
from fa4_jax.conformance.compare import compare
from fa4_jax.conformance.oracle import REFERENCE_SHIFTS, STORAGE, Inputs, oracle, visible

RESULTS = ("output", "lse", "dq", "dk", "dv")


def schemes(ring: str, ulysses: str | None = None) -> list[parallel.Scheme]:
    """Every scheme over an axis or, for those that take two, over a pair of axes."""
    if ulysses is None:
        kinds = (parallel.Ring, parallel.AllGather, parallel.Ulysses)
        return [kind(ring, layout) for kind in kinds for layout in ("contiguous", "zigzag")]
    return [parallel.RingUlysses(ring, ulysses, x) for x in ("contiguous", "zigzag")]


def masks(length: int, **fields: Any) -> dict[str, Case]:
    """Cases by the name of their mask, with batches of two.

    Args:
      length: of the rows, and of the keys unless the case says otherwise; a multiple of 48.
      fields: of every case.
    """

    def case(**own: Any) -> Case:
        return Case(**{"query_length": length, "key_length": length, **fields, **own})

    part = length // 48
    return {
        "dense": case(),
        "causal": case(is_causal=True),
        "causal with lengths": case(
            is_causal=True,
            query_lengths=(length, 13 * part),
            key_lengths=(41 * part, 7 * part),
            poison=True,
        ),
        "lengths": case(key_lengths=(0, 29 * part), query_lengths=(length, 30 * part), poison=True),
        "window": case(window=(9 * part, 3 * part)),
        "causal window": case(is_causal=True, window=10 * part),
        "later keys": case(window=(0, None)),
        "chunked prefill": case(is_causal=True, query_offset=length, key_length=2 * length),
        "offsets with a window": case(
            is_causal=True, window=20 * part, query_offset=(5 * part, -7 * part)
        ),
        "nothing seen": case(is_causal=True, query_offset=-2 * length),
    }


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where whole arrays lie.

    Attributes:
      specs: of query, key, value, output's and log-sum-exp's cotangent, and of what is per batch.
      order: shards of a zig-zag order, or None.
      shards: parts of a sequence that are computed apart, on devices of a ring or a gathering axis.
      heads: devices that share out the heads of whole sequences or of shards (Ulysses), or 1.
    """

    mesh: Mesh
    specs: tuple[P, P, P, P, P, P]
    order: int | None
    shards: int
    heads: int

    def place(self, x: Any, spec: P) -> jax.Array:
        """x on the devices."""
        return jax.device_put(x, NamedSharding(self.mesh, spec))

    def ordered(self, x: np.ndarray, axis: int, natural: bool = False) -> np.ndarray:
        """x in the scheme's order, or back from it."""
        if self.order is None:
            return x
        chunks = np.arange(x.shape[axis]).reshape(2 * self.order, -1)
        positions = np.stack((chunks[: self.order], chunks[: self.order - 1 : -1]), 1).ravel()
        return np.take(x, np.argsort(positions) if natural else positions, axis)

    def shares(self, length: int) -> list[list[np.ndarray]]:
        """Positions by shard, in a zig-zag order by chunk, each of which is computed by itself."""
        chunks = 1 if self.order is None or self.shards == 1 else 2
        positions = np.array_split(self.ordered(np.arange(length), 0), self.shards)
        return [np.array_split(share, chunks) for share in positions]


def make_layout(
    mesh: Mesh,
    scheme: parallel.Scheme,
    batch: str | None = None,
    heads: str | None = None,
    kv_heads: str | None = None,
) -> Layout:
    """The layout in which a scheme takes its operands."""
    rows, keys = P(batch, scheme.axes, heads), P(batch, scheme.axes, kv_heads)
    order = mesh.shape[scheme.axes[0]] if scheme.layout == "zigzag" else None
    lse = P(batch, heads, scheme.axes)
    devices = [mesh.shape[axis] for axis in scheme.axes]
    if isinstance(scheme, parallel.Ulysses):
        devices.insert(0, 1)
    shards, sharing_heads = (*devices, 1)[:2]
    return Layout(mesh, (rows, keys, keys, rows, lse, P(batch)), order, shards, sharing_heads)


def make_mesh(kind: AxisType, **axes: int) -> Mesh:
    """A mesh of the first devices; Manual means Auto, made manual by the case."""
    kinds = (AxisType.Auto if kind is AxisType.Manual else kind,) * len(axes)
    count = math.prod(axes.values())
    return jax.make_mesh(tuple(axes.values()), tuple(axes), kinds, devices=jax.devices()[:count])


def options_of(case: Case) -> dict[str, Any]:
    """Static keyword arguments of attention."""
    everything = runner.arguments(case)
    names = ("scale", "is_causal", "local_window_size", "deterministic", "numerics")
    options = {name: everything[name] for name in names}
    if isinstance(case.query_offset, int):
        options["query_offset"] = case.query_offset
    return options


def per_batch_of(case: Case) -> dict[str, np.ndarray]:
    """Array keyword arguments of attention, int32 [B]."""
    arrays = {
        "query_seq_lengths": case.query_lengths,
        "key_value_seq_lengths": case.key_lengths,
        "query_offset": None if isinstance(case.query_offset, int) else case.query_offset,
    }
    return {name: np.asarray(x, np.int32) for name, x in arrays.items() if x is not None}


_QUICKLY: dict[str, Any] = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_parallel_codegen_split_count": 1,
}
"""Halves the time that compiling for CPUs takes; the partitioned program is the same."""


def compiled(
    case: Case,
    inputs: Inputs,
    scheme: parallel.Scheme,
    layout: Layout,
    kind: AxisType,
    implementation: Any = None,
) -> tuple[Any, tuple[Any, ...]]:
    """The program of output, log-sum-exp and all gradients, and its placed arguments."""
    q, k, v, o, lse, batch = layout.specs
    options = {"scheme": scheme, "return_residual": True, "implementation": implementation}
    options |= options_of(case)

    def both(q: Any, k: Any, v: Any, bars: Any, per_batch: Any) -> Any:
        if kind is AxisType.Manual:
            attend = parallel.local_attention
            own = options
        else:
            attend = parallel.attention
            own = options | {"mesh": layout.mesh}
            if kind is AxisType.Auto:
                own = own | {"specs": layout.specs[:3]}
        results, transpose = jax.vjp(lambda *x: attend(*x, **per_batch, **own), q, k, v)
        return *results, *transpose(bars)

    per_batch = per_batch_of(case)
    where = (q, k, v, (o, lse), dict.fromkeys(per_batch, batch))
    function = both
    if kind is AxisType.Manual:
        function = jax.shard_map(
            both, mesh=layout.mesh, in_specs=where, out_specs=(o, lse, q, k, v)
        )
    arrays = (inputs.query, inputs.key, inputs.value, inputs.output_bar)
    rows = [layout.ordered(x, 1) for x in arrays]
    bars = (rows[3], layout.ordered(inputs.lse_bar, 2))
    placed = jax.tree.map(layout.place, (*rows[:3], bars, per_batch), where)
    with jax.default_matmul_precision("highest"):
        lowered = jax.jit(function).lower(*placed)
        return lowered.compile(_QUICKLY if jax.default_backend() == "cpu" else None), placed


def ordinary_in_parts(case: Case, inputs: Inputs, layout: Layout, shift: float) -> dict[str, Any]:
    """The ordinary computation by shards, whose results are each rounded and summed in float32.

    Gradients of keys and values are rounded where they leave a kernel, a device and a KV head's
    copies.

    Args:
      shift: as in the conformance module's `ordinary`.
    """
    storage = STORAGE[case.dtype]
    factor = np.float32(2.0**-shift)
    b, t, n, _ = inputs.query.shape
    k = case.heads[1]
    seen = visible(case, inputs.mask)
    scale = np.float32(case.head_dim**-0.5 if case.scale is None else case.scale)

    def rounded(x: np.ndarray, by: Any = 1) -> np.ndarray:
        return (x * by).astype(storage).astype(np.float32) / by

    def heads_first(x: np.ndarray, used: Any) -> np.ndarray:
        x = np.repeat(x.astype(np.float32).transpose(0, 2, 1, 3), n // x.shape[2], axis=1)
        return np.where(used[..., None], x, 0)

    def of_keys(weights: np.ndarray, rows: np.ndarray, scale: Any) -> np.ndarray:
        """Weights [B, N, T, S] and rows [B, N, T, H] -> gradient [B, K, S, H]."""
        copies = max(1, layout.heads // k)
        shards = []
        for shard in layout.shares(t):
            parts = []
            for own in shard:
                part = rounded(weights[:, :, own].swapaxes(2, 3)) @ rows[:, :, own]
                part = part.reshape(b, k, copies, n // k // copies, *part.shape[2:]).sum(3)
                parts.append(rounded(part * scale))
            shards.append(rounded(np.sum(parts, axis=0)))
        return rounded(np.sum(shards, axis=0)).sum(2)

    query, o_bar = (heads_first(x, seen.any(3)) for x in (inputs.query, inputs.output_bar))
    key, value = (heads_first(x, seen.any(2)) for x in (inputs.key, inputs.value))
    s = np.where(seen, query @ key.swapaxes(2, 3) * scale, -np.inf)
    top = np.maximum(s.max(-1, keepdims=True), -1e30) - np.float32(shift)
    e = np.exp(s - top)
    total = e.sum(-1, keepdims=True)
    safe = np.where(total == 0, 1, total)
    output, dq = np.zeros_like(o_bar), np.zeros_like(query)
    for own in itertools.chain(*layout.shares(key.shape[2])):
        share = np.where((x := e[..., own].sum(-1, keepdims=True)) == 0, 1, x)
        output += rounded(rounded(e[..., own]) @ value[:, :, own] / share) * share / safe
    output = rounded(output)
    delta = (o_bar * output).sum(-1, keepdims=True) - inputs.lse_bar[..., None]
    p = e / safe
    ds = p * (o_bar @ value.swapaxes(2, 3) - delta)
    for own in itertools.chain(*layout.shares(key.shape[2])):
        dq += rounded(rounded(ds[..., own], factor) @ key[:, :, own] * scale)
    dk, dv = of_keys(ds * factor, query, scale / factor), of_keys(p * factor, o_bar, 1 / factor)
    lse = np.where(total == 0, -np.inf, top + np.log(safe))[..., 0]
    found = {"output": output, "dq": dq, "dk": dk, "dv": dv}
    return {"lse": lse} | {name: rounded(x).transpose(0, 2, 1, 3) for name, x in found.items()}


def shifts(case: Case) -> tuple[float, ...]:
    """Draws of rounding errors: small cases have few elements, so it takes more to know them."""
    more = tuple(shift + 0.0625 * i for shift in REFERENCE_SHIFTS for i in (1, 2))
    return REFERENCE_SHIFTS + (more if case.query_length <= 256 else ())


def failures(case: Case, inputs: Inputs, layout: Layout, results: Any) -> list[str]:
    """What is wrong with output, log-sum-exp and gradients, held against the float64 oracle."""
    with np.errstate(all="ignore"):
        truth = oracle(case, inputs)
        usual = [ordinary_in_parts(case, inputs, layout, shift) for shift in shifts(case)]
    found = []
    for name, result in zip(RESULTS, results, strict=True):
        natural = layout.ordered(np.asarray(result), 2 if name == "lse" else 1, natural=True)
        verdict = compare(name, case.dtype, natural, truth[name], [x[name] for x in usual])
        if verdict.failure is not None:
            found.append(f"{name}: {verdict.failure}")
    return found


COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
WIDTHS = {"pred": 1, "f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2}


def received_bytes(program: Any) -> dict[str, int]:
    """Bytes that all devices together receive from others, by kind of collective, in HLO."""
    total: dict[str, int] = {}
    for line in program.as_text().splitlines():
        match = re.search(r"= (.*?) (" + "|".join(COLLECTIVES) + r")(-start)?\(", line)
        if match is None:
            continue
        kind = match.group(2)
        shapes = re.findall(r"(\w+)\[([\d,]*)\]", match.group(1))
        if match.group(3) and kind != "all-reduce":
            shapes = [shape for shape in shapes if shape != ("u32", "")]  # no contexts
            shapes = shapes[len(shapes) // 2 :]  # operands, then results
        size = sum(WIDTHS[t] * math.prod(map(int, filter(None, d.split(",")))) for t, d in shapes)
        if kind == "collective-permute":
            pairs = re.search(r"source_target_pairs=\{(.*?)\}\}", line)
            assert pairs is not None, line
            received = size * sum(a != b for a, b in re.findall(r"(\d+),(\d+)", pairs.group(1)))
        else:
            number, each = _groups(line)
            received = size * (each - 1) // each * number * each
        total[kind] = total.get(kind, 0) + received
    return total


def _groups(line: str) -> tuple[int, int]:
    """Groups of devices of a collective, and devices in each."""
    if found := re.search(r"replica_groups=\{\{(.*?)\}\}", line):
        groups = found.group(1).split("},{")
        return len(groups), groups[0].count(",") + 1
    if found := re.search(r"replica_groups=\[(\d+),(\d+)\]", line):
        return int(found.group(1)), int(found.group(2))
    found = re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", line)
    assert found is not None, line
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", found.group(1))}
    each = math.prod(sizes[name] for name in re.findall(r"'(\w+)'", found.group(2)))
    return math.prod(sizes.values()) // each, each
