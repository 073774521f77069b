"""What a kernel calls its warps and its mbarriers, for reports and errors."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class Names:
    """Names of a kernel's parts.

    Attributes:
      roles: warp indices by name; a report adds up by them.
      barriers: names of mbarriers by their first byte in dynamic shared memory.
    """

    roles: Mapping[str, Sequence[int]] = dataclasses.field(default_factory=dict)
    barriers: Mapping[int, str] = dataclasses.field(default_factory=dict)
