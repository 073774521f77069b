"""The parts of a first day, in the order in which they run."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

from benchmarks.day_one import (
    bitwise,
    both_designs,
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
"""The item that hangs or faults where `--inject` asks for it."""

_NO_GPU = "it needs hardware; this is the emulator"
_ONE_DESIGN = "no pass of this architecture has two designs"


@dataclasses.dataclass(frozen=True)
class Target:
    """The machine on which a first day runs.

    Attributes:
      arch: "sm_90a" or "sm_100f".
      emulated: whether it is the emulator.
      full: whether all conformance cases run, not two for each head dim.
      seed: the seed of random inputs and of the emulator's schedules.
    """

    arch: str
    emulated: bool = False
    full: bool = False
    seed: int = 0

    def environment(self) -> Mapping[str, str]:
        """Returns the environment of a part's process."""
        found = dict(os.environ) | {"PYTHONPATH": str(ROOT)}
        # Several processes run one after the other on one GPU, with other libraries than JAX.
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
        """Returns the compute capability that the emulator reports."""
        return {"sm_90a": "9.0", "sm_100f": "10.0"}[self.arch]


def programs() -> dict[str, Litmus]:
    """Returns all litmus programs by name, those with the fewest requirements first."""
    groups = (litmus_memory, litmus_tensor, litmus_pairs)
    return {litmus.name: litmus for group in groups for litmus in group.PROGRAMS}


def parts(target: Target) -> list[Part]:
    """Returns the parts; those that cannot run say why."""
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
        Part(
            "designs",
            tuple(case.id for case in both_designs.cells(arch)),
            limit_s=120,
            total_s=600,
            reason=hardware or ("" if both_designs.cells(arch) else _ONE_DESIGN),
        ),
        # These come last, since what is broken on purpose may do anything.
        Part("controls", litmus, limit_s=40, total_s=240, reason=hardware),
    ]


def selected(found: list[Part], only: list[str]) -> list[Part]:
    """Returns the parts whose names contain one of some texts; all where there is no text.

    Raises:
      ValueError: a text names no part.
    """
    for text in only:
        if not any(text in part.name for part in found):
            names = ", ".join(part.name for part in found)
            raise ValueError(f"no part is called {text!r}; there are {names}")
    return [part for part in found if not only or any(text in part.name for text in only)]


def injections(text: str, found: list[Part]) -> dict[str, str]:
    """Returns part: "hang" or "fault", from words such as "hang:litmus,fault:bitwise".

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
    """Returns the part, with an item before its own that hangs or faults."""
    if deed is None:
        return part
    return dataclasses.replace(part, items=(INJECTED, *part.items))
