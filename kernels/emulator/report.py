"""What a launch did: instructions by class, operations, bytes and waits, by warp role.

What an instruction costs follows from its text in nearly all cases, so a launch only counts how
often each step ran and how many lanes sat out; `ptx.costs` adds up the rest. Effects whose cost is
known at run time alone (sizes in descriptors) report it to `Warp.count`.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kernels.emulator.ptx.costs import QUANTITIES

if TYPE_CHECKING:
    from rich.table import Table


@dataclasses.dataclass(frozen=True)
class Activity:
    """What a role did: executed warp instructions by class, and `QUANTITIES`."""

    classes: dict[str, int]
    quantities: dict[str, int]

    @property
    def instructions(self) -> int:
        """All of them."""
        return sum(self.classes.values())


@dataclasses.dataclass(frozen=True)
class Report:
    """What a launch did.

    Attributes:
      grid: CTAs.
      roles: warp indices by name; every warp has one.
      kinds: the class of every mnemonic of the kernel.
      instructions: warp instructions executed, by warp index and mnemonic, summed over CTAs.
      quantities: the rest, by warp index and name of `QUANTITIES`, summed over CTAs.
      executed: positions in the kernel's `instructions` of those that some lane executed.
      shared_bytes: shared memory of a CTA.
      tensor_columns: most columns of tensor memory that a CTA held at a time.
      seconds: time that the emulation took.
    """

    kernel: str
    grid: tuple[int, int, int]
    roles: dict[str, tuple[int, ...]]
    kinds: Mapping[str, str]
    instructions: tuple[Counter[str], ...]
    quantities: tuple[Counter[str], ...]
    executed: frozenset[int]
    shared_bytes: int
    tensor_columns: int
    seconds: float

    @property
    def total(self) -> int:
        """All warp instructions."""
        return sum(sum(counter.values()) for counter in self.instructions)

    def of(self, quantity: str) -> int:
        """A quantity, summed over all warps."""
        if quantity not in QUANTITIES:
            raise KeyError(quantity)
        return sum(counter[quantity] for counter in self.quantities)

    def by_role(self) -> dict[str, Activity]:
        """What every role did, and "all"."""
        everyone = tuple(range(len(self.instructions)))
        return {
            name: self._activity(warps) for name, warps in (*self.roles.items(), ("all", everyone))
        }

    def _activity(self, warps: Sequence[int]) -> Activity:
        classes: Counter[str] = Counter()
        quantities: Counter[str] = Counter()
        for warp in warps:
            quantities.update(self.quantities[warp])
            for mnemonic, count in self.instructions[warp].items():
                classes[self.kinds[mnemonic]] += count
        return Activity(dict(sorted(classes.items())), dict(quantities))

    def to_json(self) -> str:
        """One line of JSON: sizes, and per role its warps, classes and quantities."""
        roles = {
            name: {"warps": self.roles.get(name), **dataclasses.asdict(activity)}
            for name, activity in self.by_role().items()
        }
        roles["all"]["warps"] = list(range(len(self.instructions)))
        document: dict[str, Any] = {
            "kernel": self.kernel,
            "grid": self.grid,
            "shared_bytes": self.shared_bytes,
            "tensor_columns": self.tensor_columns,
            "seconds": self.seconds,
            "roles": roles,
        }
        return json.dumps(document)

    def table(self) -> Table:
        """A row for every class and quantity that is not zero, a column for every role."""
        from rich.table import Table

        activities = self.by_role()
        table = Table("", *activities, title=self._title(), box=None)
        for column in table.columns[1:]:
            column.justify = "right"
        classes = activities["all"].classes
        rows = [("instructions", [a.instructions for a in activities.values()])]
        rows += [(f"  {c}", [a.classes.get(c, 0) for a in activities.values()]) for c in classes]
        rows += [
            (name.replace("_", " "), [a.quantities.get(name, 0) for a in activities.values()])
            for name in QUANTITIES
            if activities["all"].quantities.get(name)
        ]
        for name, values in rows:
            table.add_row(name, *(f"{value:,}" if value else "" for value in values))
        return table

    def _title(self) -> str:
        columns = f", {self.tensor_columns} tensor columns" if self.tensor_columns else ""
        size = f"{self.shared_bytes / 1024:.1f} KiB shared"
        return f"{self.kernel}: {math.prod(self.grid)} CTAs, {size}{columns}"


def check_roles(roles: Mapping[str, Sequence[int]], warps: int) -> dict[str, tuple[int, ...]]:
    """Roles with every warp in one: those without a name are "warp 3".

    Raises:
      ValueError: a warp has two roles or does not exist.
    """
    named = {name: tuple(indices) for name, indices in roles.items()}
    seen = [index for indices in named.values() for index in indices]
    if len(set(seen)) != len(seen) or "all" in named:
        raise ValueError(f"{roles=}: one role a warp, none called 'all'")
    if seen and not 0 <= min(seen) <= max(seen) < warps:
        raise ValueError(f"{roles=}: warps are 0 to {warps - 1}")
    rest = {f"warp {index}": (index,) for index in range(warps) if index not in seen}
    return named | rest
