"""python -m kernels.build.texts: which kernels' PTX differs from the recorded list.

A change of the kernels' sources that should change no kernel must leave every text as it was, byte
for byte. The list is `texts.json` beside this file: a digest for every kernel, and one for what the
kernels of each module were compiled from, sources and compiler. Where that is the recorded one, a
kernel need not be compiled again to know its text, nor that it spills no registers: the full build
that was recorded has shown both. `--record` replaces the list by what the build holds now, which
must be every kernel.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import pathlib
import sys
from collections.abc import Iterable, Mapping, Sequence

from fa4_jax import catalogue
from fa4_jax.key import KernelKey
from kernels import sources
from kernels.build import cache

PATH = pathlib.Path(__file__).with_name("texts.json")
_DIGITS = 16


@dataclasses.dataclass(frozen=True)
class Texts:
    """Digests of the kernels' PTX, by kernel name.

    Attributes:
      toolchain: versions of the compiler's packages.
      sources: the digest of what a module's kernels are compiled from, by the module's name.
      digests: the first hexadecimal digits of each text's SHA-256.
    """

    toolchain: dict[str, str]
    sources: dict[str, str]
    digests: dict[str, str]

    def changed(self, now: Texts, modules: Mapping[str, str]) -> list[str]:
        """Returns names of kernels whose texts are not known to be those of this list.

        The texts differ, or only the list or only the catalogue has the kernel, or it is not built
        now and its module has other sources than the list was made from.

        Args:
          now: texts of some kernels.
          modules: of the catalogue's kernels, by kernel name.
        """

        def is_known(name: str) -> bool:
            if name not in self.digests or name not in modules:
                return False
            if name in now.digests:
                return self.digests[name] == now.digests[name]
            return self.sources.get(modules[name]) == now.sources[modules[name]]

        return sorted(name for name in self.digests.keys() | modules if not is_known(name))


def modules() -> dict[str, str]:
    """Returns the modules that the catalogue's kernels are compiled from, by kernel name."""
    return {key.name: sources.module(key) for key in catalogue.all_keys()}


def recorded() -> Texts:
    """Returns the list in the repository."""
    return Texts(**json.loads(PATH.read_text()))


def of(entries: Iterable[cache.Entry]) -> Texts:
    """Returns the texts of compiled kernels, with the present digests of all sources."""
    return Texts(
        cache.toolchain(),
        {module: cache.digest(module) for module in sorted(set(modules().values()))},
        {
            entry.cubin.key.name: hashlib.sha256(entry.ptx.encode()).hexdigest()[:_DIGITS]
            for entry in entries
        },
    )


def built() -> Texts:
    """Returns what the build holds: the kernels that were compiled from the present sources."""
    found = map(cache.find, catalogue.all_keys())
    return of(entry for entry in found if entry is not None)


def unknown() -> set[KernelKey]:
    """Returns the keys whose texts nobody knows who has not built them."""
    names = recorded().changed(of(()), modules())
    return {key for key in catalogue.all_keys() if key.name in names}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; the exit status is 1 if texts differ, or are missing."""
    parser = argparse.ArgumentParser(prog="python -m kernels.build.texts", description=__doc__)
    parser.add_argument("--record", action="store_true", help="replace the recorded list")
    options = parser.parse_args(arguments)
    now, before = built(), recorded() if PATH.exists() else Texts({}, {}, {})
    changed = before.changed(now, modules())
    print(*changed, sep="\n", end="\n" if changed else "")
    print(f"{len(changed)} of {len(modules())} texts differ from the recorded ones, or may")
    missing = modules().keys() - now.digests
    print(f"{len(now.digests)} kernels are built, {len(missing)} are not")
    if before.toolchain != now.toolchain:
        print(f"the compiler differs, too: recorded {before.toolchain}, here {now.toolchain}")
    if not options.record:
        return 1 if changed else 0
    if missing:
        print("a record is of all kernels: run python -m kernels.build", file=sys.stderr)
        return 1
    PATH.write_text(json.dumps(dataclasses.asdict(now), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
