"""Finds the XLA FFI headers to build with, and prints the folder that holds xla/ffi/api/ffi.h.

    python ffi/xla_headers.py            those of the installed jaxlib
    python ffi/xla_headers.py FOLDER     those of the oldest supported jaxlib, unpacked to FOLDER

A handler built with newer headers is rejected by an older JAX, and the rejection stops JAX's
backend, so the version of the interface is checked.
"""

from __future__ import annotations

import importlib.util
import pathlib
import re
import subprocess
import sys
import tempfile
import zipfile

JAXLIB = "0.8.0"
"""The oldest supported version; pyproject.toml's build requirement is the same."""

_INTERFACE = (0, 1)
_PREFIX = "jaxlib/include/"


def installed() -> pathlib.Path:
    """Returns the headers of the installed jaxlib."""
    spec = importlib.util.find_spec("jaxlib")
    if spec is None or spec.origin is None:
        raise SystemExit(f"the XLA FFI headers come from jaxlib: pip install jaxlib=={JAXLIB}")
    return pathlib.Path(spec.origin).parent / "include"


def downloaded(folder: pathlib.Path) -> pathlib.Path:
    """Returns the headers of jaxlib JAXLIB in `folder`, which it fills if it has none."""
    if not (folder / "xla" / "ffi" / "api" / "ffi.h").exists():
        with tempfile.TemporaryDirectory() as scratch:
            _download(pathlib.Path(scratch))
            (wheel,) = pathlib.Path(scratch).glob("*.whl")
            _unpack(wheel, folder)
    return folder


def _download(folder: pathlib.Path) -> None:
    # The headers are the same in every wheel of a version, so this one serves all machines.
    wheel = ["--platform", "manylinux_2_27_x86_64", "--python-version", "3.12"]
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
    ]
    subprocess.run([*command, *wheel, f"jaxlib=={JAXLIB}"], cwd=folder, check=True)


def _unpack(wheel: pathlib.Path, folder: pathlib.Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith(_PREFIX) and name.endswith(".h"):
                target = folder / name.removeprefix(_PREFIX)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(archive.read(name))


def check(folder: pathlib.Path) -> None:
    """Stops if these headers are of another interface version."""
    text = (folder / "xla" / "ffi" / "api" / "c_api.h").read_text()
    found = tuple(
        int(number)
        for name in ("MAJOR", "MINOR")
        for number in re.findall(rf"#define XLA_FFI_API_{name} (\d+)", text)
    )
    if found != _INTERFACE:
        raise SystemExit(
            f"{folder} has version {found} of XLA's FFI, jaxlib {JAXLIB} has {_INTERFACE}: "
            "newer headers make a library that older JAX refuses"
        )


def main() -> None:
    """Prints the folder."""
    folder = downloaded(pathlib.Path(sys.argv[1])) if len(sys.argv) > 1 else installed()
    check(folder)
    print(folder.resolve())


if __name__ == "__main__":
    main()
