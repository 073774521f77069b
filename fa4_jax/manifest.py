"""What the build tells the library about each cubin: the manifest, as data.

A kernel's launch is described here completely (buffers, grid, parameters), so that one generic FFI
handler can launch every kernel and the JAX layer can size every result. `kernels.build` writes
these records to `manifest.json`; `load` reads them back. All sizes are in elements unless the
name says bytes.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

from fa4_jax.key import KernelKey, Pass

SCHEMA = 1


@dataclasses.dataclass(frozen=True)
class Factor:
    """One factor of a size: a constant, or a rounded dimension of an operand.

    value = constant                                             if buffer is None
    value = ceil(shape[buffer][axis] / divisor) * multiple       otherwise
    (divisor = tile, multiple = 1 counts tiles; divisor = multiple = tile rounds up to tiles.)
    """

    constant: int = 1
    buffer: str | None = None
    axis: int = 0
    divisor: int = 1
    multiple: int = 1

    def evaluate(self, shapes: dict[str, tuple[int, ...]]) -> int:
        """Value for the given operand shapes."""
        if self.buffer is None:
            return self.constant
        return -(-shapes[self.buffer][self.axis] // self.divisor) * self.multiple


Size = tuple[Factor, ...]
"""A product of factors."""


def evaluate_size(size: Size, shapes: dict[str, tuple[int, ...]]) -> int:
    """Product of the size's factors."""
    value = 1
    for factor in size:
        value *= factor.evaluate(shapes)
    return value


@dataclasses.dataclass(frozen=True)
class Result:
    """A result buffer of the FFI call. A result named like an operand aliases that operand."""

    name: str
    dtype: str  # "bf16", "fp16", "f32", "i32"
    shape: tuple[Size, ...]
    # The handler writes zeros to it, on the call's stream, before the kernel starts; f32 and i32.
    zeroed: bool = False


@dataclasses.dataclass(frozen=True)
class Param:
    """One kernel parameter, in launch order.

    kind        value                                              fields used
    tensor_map  128-byte CUtensorMap over a row-major buffer       buffer, axes, box, swizzle_bytes
    pointer     address of the buffer                              buffer
    dim         i32: shape[buffer][axis]                           buffer, axes (one axis)
    size        i32: a product of factors                          size
    i32, f32    the FFI attribute called `name`
    sm_count    i32: number of multiprocessors of the device
    """

    name: str
    kind: str
    buffer: str = ""
    axes: tuple[int, ...] = ()  # tensor_map: the buffer's axes, contiguous one first
    box: tuple[int, ...] = ()  # tensor_map: box sizes in the order of `axes`
    swizzle_bytes: int = 0
    size: Size = ()


@dataclasses.dataclass(frozen=True)
class Launch:
    """How a kernel is called, from JAX and on the device."""

    operands: tuple[str, ...]
    results: tuple[Result, ...]
    params: tuple[Param, ...]
    grid: tuple[Size, Size, Size]
    block: tuple[int, int, int]
    dynamic_smem_bytes: int
    cluster: tuple[int, int, int] = (1, 1, 1)
    # grid.x has at most this many CTAs for each multiprocessor, in whole clusters; 0 is no limit.
    persistent: int = 0
    # May start while the launch before it ends (programmatic dependent launch): the kernel waits
    # for that one's end, by griddepcontrol.wait, before it touches global memory.
    programmatic: bool = False


@dataclasses.dataclass(frozen=True)
class Cubin:
    """One compiled kernel."""

    key: KernelKey
    launch: Launch
    symbol: str
    file: str  # relative to the manifest
    sha256: str
    registers: int
    spill_bytes: int
    tile: dict[str, int]  # sizes worth telling a person, e.g. {"m": 128, "n": 128}


@dataclasses.dataclass(frozen=True)
class Manifest:
    """All kernels of an installation, by key."""

    cubins: dict[KernelKey, Cubin]
    toolchain: dict[str, str]
    directory: pathlib.Path


def _size_to_json(size: Size) -> list[dict[str, Any]]:
    defaults = Factor()
    return [
        {k: v for k, v in dataclasses.asdict(f).items() if v != getattr(defaults, k)} for f in size
    ]


def _size_from_json(data: list[dict[str, Any]]) -> Size:
    return tuple(Factor(**factor) for factor in data)


def cubin_to_json(cubin: Cubin) -> dict[str, Any]:
    """JSON form of one record; inverse of cubin_from_json."""
    data = dataclasses.asdict(cubin)
    launch, data["name"] = data["launch"], cubin.key.name
    launch["grid"] = [_size_to_json(size) for size in cubin.launch.grid]
    for result, source in zip(launch["results"], cubin.launch.results, strict=True):
        result["shape"] = [_size_to_json(size) for size in source.shape]
        if not source.zeroed:
            del result["zeroed"]
    defaults = dataclasses.asdict(Param("", ""))
    launch["params"] = [
        {
            k: v
            for k, v in (dataclasses.asdict(p) | {"size": _size_to_json(p.size)}).items()
            if k in ("name", "kind") or (v != defaults[k] and v != [])
        }
        for p in cubin.launch.params
    ]
    return data


def cubin_from_json(data: dict[str, Any]) -> Cubin:
    """Record from its JSON form."""
    key = data["key"] | {"kernel": Pass(data["key"]["kernel"])}
    launch = data["launch"]
    return Cubin(
        key=KernelKey(**key),
        launch=Launch(
            operands=tuple(launch["operands"]),
            results=tuple(
                Result(
                    name=r["name"],
                    dtype=r["dtype"],
                    shape=tuple(_size_from_json(s) for s in r["shape"]),
                    zeroed=r.get("zeroed", False),
                )
                for r in launch["results"]
            ),
            params=tuple(
                Param(
                    name=p["name"],
                    kind=p["kind"],
                    buffer=p.get("buffer", ""),
                    axes=tuple(p.get("axes", ())),
                    box=tuple(p.get("box", ())),
                    swizzle_bytes=p.get("swizzle_bytes", 0),
                    size=_size_from_json(p.get("size", [])),
                )
                for p in launch["params"]
            ),
            grid=tuple(_size_from_json(s) for s in launch["grid"]),  # type: ignore[arg-type]
            block=tuple(launch["block"]),
            dynamic_smem_bytes=launch["dynamic_smem_bytes"],
            cluster=tuple(launch["cluster"]),
            persistent=launch["persistent"],
            programmatic=launch["programmatic"],
        ),
        symbol=data["symbol"],
        file=data["file"],
        sha256=data["sha256"],
        registers=data["registers"],
        spill_bytes=data["spill_bytes"],
        tile=dict(data["tile"]),
    )


def dump(manifest: Manifest) -> str:
    """The text of manifest.json, in key order so that equal builds give equal bytes."""
    cubins = [cubin_to_json(manifest.cubins[key]) for key in sorted(manifest.cubins)]
    document = {"schema": SCHEMA, "toolchain": manifest.toolchain, "kernels": cubins}
    return json.dumps(document, indent=1) + "\n"


def read(path: pathlib.Path) -> dict[str, Any]:
    """The JSON of a manifest, as far as its outermost level is known to be right.

    Raises:
      ValueError: the file is missing, damaged or of another schema; its name is in the message.
    """
    try:
        document = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not isinstance(document, dict) or "schema" not in document:
        raise ValueError(f"{path} is damaged: it names no schema")
    if document["schema"] != SCHEMA:
        raise ValueError(
            f"{path}: manifest schema {document['schema']}, this library reads {SCHEMA}"
        )
    if not {"toolchain", "kernels"} <= set(document):
        raise ValueError(f"{path} is damaged: it lists no kernels")
    return document


MALFORMED = (KeyError, TypeError, ValueError, AttributeError)
"""What reading a record raises that is not as `cubin_to_json` writes it."""


def load(path: pathlib.Path) -> Manifest:
    """Reads a manifest.

    Raises:
      ValueError: as `read`, or a record is damaged.
    """
    document = read(path)
    try:
        cubins = [cubin_from_json(entry) for entry in document["kernels"]]
    except MALFORMED as error:
        raise ValueError(f"{path} is damaged: a record has a wrong or no {error}") from error
    return Manifest({c.key: c for c in cubins}, document["toolchain"], path.parent)
