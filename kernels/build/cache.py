"""Compiled kernels that need not be compiled again: build/kernels/<digest>.{cubin,o,json}.

The digest covers everything that a cubin depends on: the key, the text of every kernel source, and
the versions of the compiler's packages.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import pathlib
from typing import Any

from fa4_jax import key as key_module
from fa4_jax import manifest
from fa4_jax.key import KernelKey
from fa4_jax.manifest import Cubin, Factor, Param
from kernels.build.compile import HostCode

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
DIRECTORY = REPOSITORY / "build" / "kernels"

_COMPILER_PACKAGES = ("nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-cu12")


@dataclasses.dataclass(frozen=True)
class Entry:
    """A compiled kernel: its manifest record, its code, and what the record leaves out."""

    cubin: Cubin
    code: bytes
    host: HostCode
    seconds: float


@functools.cache
def toolchain() -> dict[str, str]:
    """Versions of what compiles the kernels; ptxas comes inside these packages."""
    return {name: importlib.metadata.version(name) for name in _COMPILER_PACKAGES}


@functools.cache
def _sources_digest() -> str:
    files = sorted((REPOSITORY / "kernels").rglob("*.py"))
    files += [pathlib.Path(module.__file__ or "") for module in (key_module, manifest)]
    digest = hashlib.sha256(json.dumps(toolchain()).encode())
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def _path(key: KernelKey) -> pathlib.Path:
    digest = hashlib.sha256(f"{_sources_digest()} {key.name}".encode())
    return DIRECTORY / digest.hexdigest()[:32]


def find(key: KernelKey) -> Entry | None:
    """The kernel of a key, if one was compiled from the present sources."""
    path = _path(key)
    try:
        record = json.loads(path.with_suffix(".json").read_text())
        code = path.with_suffix(".cubin").read_bytes()
        object_file = path.with_suffix(".o").read_bytes()
    except FileNotFoundError:
        return None
    cubin = manifest.cubin_from_json(record["cubin"])
    intact = hashlib.sha256(code).hexdigest() == cubin.sha256
    if not intact:
        return None
    arguments = tuple(_param_from_json(param) for param in record["host_arguments"])
    host = HostCode(object_file, record["host_entry"], arguments)
    return Entry(cubin, code, host, record["seconds"])


def store(entry: Entry) -> None:
    """Keeps a compiled kernel."""
    path = _path(entry.cubin.key)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".cubin").write_bytes(entry.code)
    path.with_suffix(".o").write_bytes(entry.host.object_file)
    record = {
        "cubin": manifest.cubin_to_json(entry.cubin),
        "host_entry": entry.host.entry,
        "host_arguments": [dataclasses.asdict(param) for param in entry.host.arguments],
        "seconds": entry.seconds,
    }
    path.with_suffix(".json").write_text(json.dumps(record))


def _param_from_json(data: dict[str, Any]) -> Param:
    size = tuple(Factor(**factor) for factor in data["size"])
    return Param(**(data | {"axes": tuple(data["axes"]), "box": tuple(data["box"]), "size": size}))
