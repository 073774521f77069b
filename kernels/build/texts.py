"""python -m kernels.build.texts: which kernels' PTX differs from the recorded list.

A change of the kernels' sources that should change no kernel must leave every text as it was, byte
for byte. The list is `texts.json` beside this file: a digest for every kernel, and the versions of
the compiler that produced the texts. `--record` replaces it by what the build holds now.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import pathlib
import sys
from collections.abc import Sequence

from fa4_jax import catalogue
from kernels.build import cache

PATH = pathlib.Path(__file__).with_name("texts.json")
_DIGITS = 16


@dataclasses.dataclass(frozen=True)
class Texts:
    """Digests of the kernels' PTX, by kernel name.

    Attributes:
      toolchain: versions of the compiler's packages.
      digests: the first hexadecimal digits of each text's SHA-256.
    """

    toolchain: dict[str, str]
    digests: dict[str, str]

    def changed(self, other: Texts) -> list[str]:
        """Names of kernels that only one of the two has, or whose texts differ."""
        names = sorted(self.digests.keys() | other.digests.keys())
        return [name for name in names if self.digests.get(name) != other.digests.get(name)]


def recorded() -> Texts:
    """Returns the list in the repository."""
    return Texts(**json.loads(PATH.read_text()))


def built() -> Texts:
    """Returns what the build holds.

    Raises:
      LookupError: a kernel is missing, or older than its sources.
    """
    digests = {}
    for key in catalogue.all_keys():
        entry = cache.find(key)
        if entry is None:
            raise LookupError(f"{key.name} is not built: run python -m kernels.build")
        digests[key.name] = hashlib.sha256(entry.ptx.encode()).hexdigest()[:_DIGITS]
    return Texts(cache.toolchain(), digests)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; the exit status is 1 if texts differ."""
    parser = argparse.ArgumentParser(prog="python -m kernels.build.texts", description=__doc__)
    parser.add_argument("--record", action="store_true", help="replace the recorded list")
    options = parser.parse_args(arguments)
    now, before = built(), recorded() if PATH.exists() else Texts({}, {})
    changed = before.changed(now)
    print(*changed, sep="\n", end="\n" if changed else "")
    print(f"{len(changed)} of {len(now.digests)} texts differ from the recorded ones")
    if before.toolchain != now.toolchain:
        print(f"the compiler differs, too: recorded {before.toolchain}, here {now.toolchain}")
    if options.record:
        PATH.write_text(json.dumps(dataclasses.asdict(now), indent=1) + "\n")
        return 0
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
