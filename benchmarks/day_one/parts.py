"""The parts of a first day, in the order in which they run."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

from benchmarks.day_one import (
    bitwise,
    constants,
    families,
    litmus_memory,
    litmus_pairs,
    litmus_tensor,
    speed,
)
from benchmarks.day_one.litmus import Litmus
from benchmarks.day_one.process import Part

ROOT = Path(__file__).parents[2]
STAND_IN = ROOT / "build" / "emulated"
"""What `make emulated` leaves: a stand-in for libcuda and the kernels' PTX."""

INJECTED = "injected on purpose"
"""The item that hangs or faults where `--inject` says so."""

_NO_GPU = "it needs hardware; this is the emulator"


@dataclasses.dataclass(frozen=True)
class Target:
    """What a first day runs on.

    Attributes:
      arch: "sm_90a" or "sm_100f".
      emulated: on the emulator.
      full: all conformance cases, not two for each head dim.
      seed: of random inputs and of the emulator's schedules.
    """

    arch: str
    emulated: bool = False
    full: bool = False
    seed: int = 0

    def environment(self) -> Mapping[str, str]:
        """Environment of a part's process."""
        found = dict(os.environ) | {"PYTHONPATH": str(ROOT)}
        # Several processes after each other on one GPU, beside other libraries than JAX.
        found.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        if self.emulated:
            found |= {
                "FA4_JAX_LIBCUDA": str(STAND_IN / "libemulated_cuda.so"),
                "FA4_JAX_KERNELS": str(STAND_IN),
                "FA4_JAX_EMULATED_GPU": f"capability={self.capability} schedule=starve "
                f"asynchronous=random start_order=random seed={self.seed}",
                "JAX_PLATFORMS": "cpu",
                "OPENBLAS_NUM_THREADS": "1",
            }
        return found

    @property
    def capability(self) -> str:
        """Compute capability that the emulator pretends to."""
        return {"sm_90a": "9.0", "sm_100f": "10.0"}[self.arch]


def programs() -> dict[str, Litmus]:
    """All litmus programs by name: those that need least first."""
    groups = (litmus_memory, litmus_tensor, litmus_pairs)
    return {litmus.name: litmus for group in groups for litmus in group.PROGRAMS}


def parts(target: Target) -> list[Part]:
    """The parts; those that cannot run say why."""
    arch, emulated = target.arch, target.emulated
    slow = 600.0 if emulated else 90.0
    litmus = tuple(programs())
    hardware = _NO_GPU if emulated else ""
    measured = (constants.CLOCK, *constants.measurements(arch))
    return [
        Part("doctor", ("doctor",)),
        Part("litmus", litmus, limit_s=40, total_s=240),
        *(
            Part(f"selftest: {family.name}", tuple(case.id for case in family.cases), slow, 1800)
            for family in families.families(arch, emulated, target.full)
        ),
        Part("bitwise", tuple(case.id for case in bitwise.cases(emulated)), slow, 900),
        Part("constants", measured, limit_s=60, total_s=240, reason=hardware),
        Part("speed", tuple(c.id for c in speed.CELLS), limit_s=180, total_s=600, reason=hardware),
        # Last, since what is broken on purpose may do anything.
        Part("controls", litmus, limit_s=40, total_s=240, reason=hardware),
    ]


def selected(found: list[Part], only: list[str]) -> list[Part]:
    """The parts whose names contain one of some texts; all where there is none.

    Raises:
      ValueError: a text names no part.
    """
    for text in only:
        if not any(text in part.name for part in found):
            names = ", ".join(part.name for part in found)
            raise ValueError(f"no part is called {text!r}; there are {names}")
    return [part for part in found if not only or any(text in part.name for text in only)]


def injections(text: str, found: list[Part]) -> dict[str, str]:
    """Part: "hang" or "fault", from words such as "hang:litmus,fault:bitwise".

    Raises:
      ValueError: a word names no part or another deed.
    """
    injected: dict[str, str] = {}
    for word in filter(None, text.split(",")):
        deed, _, name = word.partition(":")
        names = [part.name for part in found if not part.reason]
        if deed not in ("hang", "fault") or name not in names:
            raise ValueError(f"{word!r}: hang:PART or fault:PART, PART one of {', '.join(names)}")
        injected[name] = deed
    return injected


def with_injected(part: Part, deed: str | None) -> Part:
    """The part, with an item before its own that hangs or faults."""
    if deed is None:
        return part
    return dataclasses.replace(part, items=(INJECTED, *part.items))
