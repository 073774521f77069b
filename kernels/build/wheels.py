"""python -m kernels.build.wheels: one wheel for each processor, cross-compiled, into dist/.

Only the FFI library differs from one processor to the other, so any machine builds all wheels: Zig
carries a C++ compiler, a C++ library and the C library's symbols for every target.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).absolute().parents[2]
BUILD = ROOT / "build" / "wheels"
OUTPUT = ROOT / "dist"

PROCESSORS = ("x86_64", "aarch64")

GLIBC = (2, 27)
"""The oldest C library that the wheels run with: that of the wheels of jaxlib 0.8 to 0.12."""

_MEMBER = "fa4_jax/libfa4_jax.so"
_C_LIBRARY = re.compile(r"lib(c|dl|m|pthread)\.so\.\d+|ld-linux-[\w-]+\.so\.\d+")
_OURS = "fa4_jax_"


class WheelError(Exception):
    """A wheel that must not be shipped: it would not load, or disturb others in its process."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Builds the wheels of the processors that are named, by default of all."""
    parser = argparse.ArgumentParser(prog="python -m kernels.build.wheels", description=__doc__)
    parser.add_argument("processors", nargs="*", metavar="PROCESSOR", help=", ".join(PROCESSORS))
    processors = parser.parse_args(arguments).processors or PROCESSORS
    if unknown := set(processors) - set(PROCESSORS):
        parser.error(f"{', '.join(sorted(unknown))}: one of {', '.join(PROCESSORS)} is expected")
    shutil.rmtree(OUTPUT, ignore_errors=True)
    for processor in processors:
        wheel = build(processor)
        audit(wheel, processor)
        check(wheel, processor)
        print(f"{wheel.relative_to(ROOT)}: {wheel.stat().st_size / 2**20:.1f} MiB", flush=True)


def build(processor: str) -> pathlib.Path:
    """Builds a processor's wheel; returns its path in dist/.

    Raises:
      subprocess.CalledProcessError: a compiler or pip failed; it has said why.
    """
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    # scikit-build-core would take the tag from the machine that it runs on.
    tag = f"py3-none-manylinux_{GLIBC[0]}_{GLIBC[1]}_{processor}"
    for setting in (f"wheel.tags={tag}", f"build-dir={BUILD / processor}"):
        command += ["--config-settings", setting]
    # The program itself: pip's build environment hides Python packages from `python -m ziglang`.
    compiler = f"{_zig()} c++ -target {processor}-linux-gnu.{GLIBC[0]}.{GLIBC[1]}"
    environment = os.environ | {"CXX": compiler}
    command += ["--wheel-dir", str(OUTPUT), "."]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    (wheel,) = OUTPUT.glob(f"*-{tag}.whl")
    return wheel


def audit(wheel: pathlib.Path, processor: str) -> None:
    """Checks by auditwheel that the wheel runs wherever its tag says.

    Raises:
      WheelError: it does not.
    """
    command = [sys.executable, "-m", "auditwheel", "show", "--json", str(wheel)]
    # Of standard error only a failure is of interest: cubins bring a warning each.
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise WheelError(f"{wheel.name}: auditwheel failed\n{done.stderr}")
    found = json.loads(done.stdout)["overall_tag"]
    version = re.fullmatch(rf"manylinux_(\d+)_(\d+)_{processor}", found)
    if version is None or tuple(map(int, version.groups())) > GLIBC:
        raise WheelError(f"{wheel.name}: auditwheel finds it fit for {found} only")


def check(wheel: pathlib.Path, processor: str) -> None:
    """Checks what auditwheel does not: the library's processor, its neighbours and its exports.

    Raises:
      WheelError: the library is another processor's, needs more than the C library, or exports
        symbols that are not ours.
    """
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        library = pathlib.Path(archive.extract(_MEMBER, folder))
        found = machine(library)
        if found != processor:
            raise WheelError(f"{wheel.name}: the library is for {found}, not for {processor}")
        if others := [name for name in needed(library) if not _C_LIBRARY.fullmatch(name)]:
            raise WheelError(f"{wheel.name}: the library needs {', '.join(others)}")
        if others := [name for name in exported(library) if not name.startswith(_OURS)]:
            raise WheelError(f"{wheel.name}: the library exports {', '.join(others)}")


def machine(library: pathlib.Path) -> str:
    """Returns the processor that a library is compiled for, as PROCESSORS writes it."""
    names = {"Advanced Micro Devices X86-64": "x86_64", "AArch64": "aarch64"}
    found: str = re.findall(r"Machine: +(.*)", _readelf("--file-header", library))[0]
    return names.get(found, found)


def needed(library: pathlib.Path) -> list[str]:
    """Returns the shared libraries that a library needs."""
    return re.findall(r"\(NEEDED\).*\[(.*)\]", _readelf("--dynamic", library))


def exported(library: pathlib.Path) -> list[str]:
    """Returns the symbols that a library offers to its process."""
    rows = (row.split() for row in _readelf("--dyn-syms", library).splitlines())
    # Num: Value Size Type Bind Vis Ndx Name
    symbols = [row for row in rows if len(row) >= 8 and row[0].rstrip(":").isdigit()]
    return [row[7] for row in symbols if row[6] != "UND" and row[4] != "LOCAL"]


def _readelf(option: str, library: pathlib.Path) -> str:
    command = ["readelf", "--wide", option, str(library)]
    english = os.environ | {"LC_ALL": "C"}
    return subprocess.run(command, env=english, capture_output=True, text=True, check=True).stdout


def _zig() -> pathlib.Path:
    spec = importlib.util.find_spec("ziglang")
    if spec is None or spec.origin is None:
        raise SystemExit("the cross compiler is missing: `make wheels` installs ziglang")
    return pathlib.Path(spec.origin).parent / "zig"


if __name__ == "__main__":
    main()
