"""The timing model's constants: which microbenchmarks measure each, and what each should be."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping

from benchmarks import microbenchmarks
from benchmarks.day_one.litmus import BLACKWELL
from benchmarks.day_one.outcome import Result, Verdict
from benchmarks.micro import tensor_memory
from benchmarks.micro.program import Measurement
from kernels.emulator.timing import rates
from kernels.emulator.timing.rates import Rates

LAUNCHES = 3
CLOCK = "clock"
"""The item that warms the GPU up and reads its clock."""

TOLERANCE = 0.1
"""The report names a constant that is further from the table's than this."""

Source = tuple[tuple[str, ...], Callable[..., float]]

_OF_BLACKWELL: Mapping[str, Source] = {
    "mma_flops": (
        ("tcgen05.mma/m128n256k16/throughput",),
        lambda cycles: 2 * 128 * 256 * 16 / cycles,
    ),
    # The barrier's latency counts separately; election, issue, commit and branch use six slots.
    "mma_latency": (
        (
            "tcgen05.mma/m128n64k16/latency",
            "tcgen05.mma/m128n64k16/throughput",
            "mbarrier/arrive to wait",
            "mbarrier/arrive",
        ),
        lambda alone, more, there, arrive: alone - more - (there - arrive) - 6,
    ),
    "tensor_memory_bytes": (("tcgen05.ld/x32/throughput/4 warps",), lambda x: x),
    # The addition to the next address has a latency of 4.
    "tensor_memory_latency": (("tcgen05.ld/x1/latency",), lambda x: x - 4),
}

NOT_MEASURED: Mapping[str, str] = {}
"""The assumed fields without a microbenchmark, and why there is none."""


def table(arch: str) -> Rates:
    """Returns the rates that the timing model has of an architecture."""
    return rates.RATES[arch]


def sources(arch: str) -> dict[str, Source]:
    """Returns, for each field, the measurements that give it, and how."""
    found = dict(rates.SOURCES)
    return found | dict(_OF_BLACKWELL) if arch == BLACKWELL else found


def measurements(arch: str) -> dict[str, Measurement]:
    """Returns the measurements that some field or product shape needs, in the list's order."""
    known = microbenchmarks.measurements()
    if arch == BLACKWELL:
        known = [*known, *tensor_memory.measurements()]
    needed = {name for names, _ in sources(arch).values() for name in names}
    if arch == BLACKWELL:
        needed |= {f"{product.name}/throughput" for product in tensor_memory.products()}
    return {m.name: m for m in known if m.name in needed}


@dataclasses.dataclass(frozen=True)
class Shape:
    """The cycles of a product of one shape: measured, and by the timing model, which counts its
    FLOPs or the bytes that it reads from shared memory, whichever takes longer.
    """

    name: str
    model: float
    measured: float


def shapes(arch: str, values: Mapping[str, float]) -> list[Shape]:
    """Returns the shapes of products that were measured."""
    if arch != BLACKWELL:
        return []
    own = table(arch)
    return [
        Shape(
            x.name,
            max(x.flops / own.mma_flops, x.shared_bytes / own.shared_bytes) / x.ctas,
            values[name],
        )
        for x in tensor_memory.products()
        if (name := f"{x.name}/throughput") in values
    ]


@dataclasses.dataclass(frozen=True)
class Constant:
    """A field of the rates and its measured value.

    Attributes:
      assumed: whether the table has no source for it.
      measured: None if a measurement is missing; `why` says which.
    """

    field: str
    value: float
    assumed: bool
    measured: float | None
    why: str = ""

    @property
    def ratio(self) -> float | None:
        """Returns measured over the table's value, or None where either is 0 or unknown."""
        if not self.measured or not self.value:
            return None
        return self.measured / self.value


def constants(arch: str, values: Mapping[str, float]) -> list[Constant]:
    """Returns every field that is assumed or has a source, from measurements by name."""
    own, found = table(arch), []
    known = sources(arch)
    for field in sorted(own.assumed | known.keys()):
        names, convert = known.get(field, ((), None))
        missing = [name for name in names if name not in values]
        measured, why = None, ""
        if convert is None:
            why = NOT_MEASURED[field]
        elif missing:
            why = f"no value of {missing[0]}"
        else:
            measured = max(float(convert(*(values[name] for name in names))), 0.0)
        value = float(getattr(own, field))
        found.append(Constant(field, value, field in own.assumed, measured, why))
    return found


class Bench:
    """Runs measurements on the first GPU."""

    def __init__(self, arch: str):
        from benchmarks.micro.device import Device

        self._known = measurements(arch)
        self._device = Device()

    def run(self, item: str) -> Result:
        """Runs a measurement, or reads the clock."""
        if item == CLOCK:
            readings = [self._device.clock_mhz() for _ in range(30)]
            data = {"mhz": readings[-1], **self._device.describe()}
            return Result(Verdict.MEASURED, f"{readings[-1]:.0f} MHz", data)
        measurement = self._known[item]
        values = self._device.measure(measurement, LAUNCHES)
        value = statistics.median(values)
        data = {"value": value, "low": min(values), "high": max(values), "unit": measurement.unit}
        return Result(Verdict.MEASURED, f"{value:.2f} {measurement.unit}", data)
