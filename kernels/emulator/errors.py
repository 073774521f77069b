"""What the emulator raises: bad input before a launch, broken rules during one."""

from __future__ import annotations

import dataclasses


class PtxError(ValueError):
    """The text is not PTX that the emulator can run; raised before anything runs."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a rule was broken. `lane` is None where the whole warp is meant."""

    kernel: str
    cta: tuple[int, int, int]
    warp: int | None = None
    lane: int | None = None
    line: int | None = None
    text: str = ""

    def __str__(self) -> str:
        parts = [self.kernel, f"CTA {self.cta}"]
        parts += [] if self.warp is None else [f"warp {self.warp}"]
        parts += [] if self.lane is None else [f"lane {self.lane}"]
        parts += [] if self.line is None else [f"PTX line {self.line}: {self.text}"]
        return ", ".join(parts)


class EmulationError(Exception):
    """A kernel broke a rule of the machine.

    Attributes:
      rule: short name of the rule, e.g. "race" or "deadlock".
      place: where.
    """

    def __init__(self, rule: str, message: str, place: Place):
        super().__init__(f"{rule}: {message} [{place}]")
        self.rule = rule
        self.place = place
