"""Compiled kernels that need not be compiled again: build/kernels/<key name>.{cubin,ptx,o,json}.

Each entry keeps a digest of everything that its cubin depends on: the text of the modules that the
module which makes its kernel imports, directly or not, and the versions of the compiler's packages.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
import pathlib
from typing import Any

from fa4_jax import manifest
from fa4_jax.key import KernelKey
from fa4_jax.manifest import Cubin, Factor, Param
from kernels import sources
from kernels.build.compile import HostCode

REPOSITORY = pathlib.Path(__file__).absolute().parents[2]
DIRECTORY = REPOSITORY / "build" / "kernels"

_ALWAYS = ("kernels.sources", "kernels.build.compile")
_COMPILER_PACKAGES = ("nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-cu12")


@dataclasses.dataclass(frozen=True)
class Entry:
    """A compiled kernel: its manifest record, its code, and what the record leaves out."""

    cubin: Cubin
    code: bytes
    ptx: str
    host: HostCode
    seconds: float


@functools.cache
def toolchain() -> dict[str, str]:
    """Returns the versions of what compiles the kernels; these packages contain ptxas."""
    return {name: importlib.metadata.version(name) for name in _COMPILER_PACKAGES}


def find(key: KernelKey) -> Entry | None:
    """Returns the kernel of a key, if one was compiled from the present sources."""
    path = DIRECTORY / key.name
    try:
        record = json.loads(path.with_suffix(".json").read_text())
        code = path.with_suffix(".cubin").read_bytes()
        ptx = path.with_suffix(".ptx").read_text()
        object_file = path.with_suffix(".o").read_bytes()
    except FileNotFoundError:
        return None
    # The digest comes first, since a record of other sources may have another form.
    if record["digest"] != digest(sources.module(key)):
        return None
    cubin = manifest.cubin_from_json(record["cubin"])
    if hashlib.sha256(code).hexdigest() != cubin.sha256:
        return None
    arguments = tuple(_param_from_json(param) for param in record["host"]["arguments"])
    host = HostCode(object_file, record["host"]["entry"], record["host"]["module"], arguments)
    return Entry(cubin, code, ptx, host, record["seconds"])


def store(entry: Entry) -> None:
    """Keeps a compiled kernel in place of an older one of its key."""
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    path = DIRECTORY / entry.cubin.key.name
    replace(path.with_suffix(".cubin"), entry.code)
    replace(path.with_suffix(".ptx"), entry.ptx.encode())
    replace(path.with_suffix(".o"), entry.host.object_file)
    host = {
        "module": entry.host.module,
        "entry": entry.host.entry,
        "arguments": [dataclasses.asdict(param) for param in entry.host.arguments],
    }
    record = {
        "digest": digest(sources.module(entry.cubin.key)),
        "cubin": manifest.cubin_to_json(entry.cubin),
        "host": host,
        "seconds": entry.seconds,
    }
    replace(path.with_suffix(".json"), json.dumps(record).encode())


def replace(path: pathlib.Path, data: bytes) -> None:
    """Writes a file in one step, so that a process that reads it sees the old or the new one."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_bytes(data)
    partial.replace(path)


@functools.cache
def digest(module: str) -> str:
    """Returns the digest of what the kernels of a module are compiled from."""
    found = hashlib.sha256(json.dumps(toolchain()).encode())
    for name in sorted(sources_of(module)):
        found.update(name.encode() + b"\0" + _file(name).read_bytes())
    return found.hexdigest()


def sources_of(module: str) -> set[str]:
    """Returns the modules that the kernels of a module are compiled from.

    They are all of this repository's that it and the compiler import at their top level, directly
    or not. kernels.sources imports the kernel families inside its function, so that one family's
    change leaves the others as they are.
    """
    seen: set[str] = set()
    modules = {module, *_ALWAYS}
    while modules:
        name = modules.pop()
        seen.add(name)
        modules |= _imports(name) - seen
    return seen


@functools.cache
def _imports(module: str) -> frozenset[str]:
    """Returns what a module imports at its top level, without the packages that contain it.

    `from fa4_jax import bands` needs that module, not what the package's users import by it.
    """
    names: set[str] = set()
    for node in ast.parse(_file(module).read_text()).body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if _file(name).is_file() else node.module for name in inside}
    ours = {name for name in names if name.split(".")[0] in ("kernels", "fa4_jax")}
    return frozenset(name for name in ours if _file(name).is_file())


def _file(module: str) -> pathlib.Path:
    path = REPOSITORY.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _param_from_json(data: dict[str, Any]) -> Param:
    size = tuple(Factor(**factor) for factor in data["size"])
    return Param(**(data | {"axes": tuple(data["axes"]), "box": tuple(data["box"]), "size": size}))
