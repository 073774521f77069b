"""Compiles one kernel: KernelKey -> cubin, PTX and what it uses.

It runs in a process of its own architecture: CuTe-DSL reads CUTE_DSL_ARCH when it is imported, so
cutlass and the kernel sources are imported inside the functions here.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any

from fa4_jax.key import KernelKey
from fa4_jax.manifest import Launch, Param
from kernels.build import cubin_info

if TYPE_CHECKING:
    from kernels.kernel_source import KernelSource

# ptxas says so of products that wait for each other, which costs about half of the speed.
_SERIALIZED = re.compile(r"wgmma.{0,80}serialized", re.DOTALL)
_HOST_ENTRY = re.compile(rb"\b_mlir_\w*_mlir_ciface_\w+")
_SPILL_STORES = re.compile(r"(\d+)\s+bytes\s+spill\s+stores")


@dataclasses.dataclass(frozen=True)
class HostCode:
    """CuTe-DSL's own launch code, against which the FFI handler's launches are tested.

    Attributes:
      object_file: x86-64 or Arm machine code of the machine that compiled it.
      entry: its C function, `void entry(void** arguments_stream_and_status, int32_t count)`.
      module: the Python module that it was compiled from.
      arguments: what each argument before the stream is.
    """

    object_file: bytes
    entry: str
    module: str
    arguments: tuple[Param, ...]


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled kernel.

    Attributes:
      key: what was compiled.
      source: where it came from.
      cubin: the device code.
      ptx: the text that the device code was assembled from; the emulator runs it.
      host: code that launches it.
      info: registers, local memory and parameters.
      spill_bytes: bytes of registers that are spilled: local memory per thread.
      serialized: ptxas made the warpgroup products wait for each other.
      seconds: time that it took.
    """

    key: KernelKey
    source: KernelSource
    cubin: bytes
    ptx: str
    host: HostCode
    info: cubin_info.KernelInfo
    spill_bytes: int
    serialized: bool
    seconds: float


def prepare_process(arch: str) -> None:
    """Prepares this process for one architecture, before cutlass is first imported."""
    if "cutlass" in sys.modules and os.environ.get("CUTE_DSL_ARCH") != arch:
        raise RuntimeError(f"cutlass was imported before CUTE_DSL_ARCH={arch} was set")
    os.environ["CUTE_DSL_ARCH"] = arch
    os.environ["CUTE_DSL_DISABLE_FILE_CACHING"] = "1"
    os.environ["CUTE_DSL_COMPILER_OPT"] = "diagnostic=ptx"  # The remarks then say what ptxas says.


def compile_kernel(key: KernelKey) -> Compiled:
    """Compiles the kernel of a key.

    Raises:
      NotImplementedError: the key has no source.
      ValueError: the cubin does not hold exactly the kernel that was asked for.
    """
    prepare_process(key.arch)
    from kernels import sources

    return compile_source(key, sources.source(key))


@dataclasses.dataclass(frozen=True)
class Ptx:
    """A kernel's text, its name in it, how it is launched, and its sizes by name."""

    text: str
    symbol: str
    launch: Launch
    tile: dict[str, int]


def compile_ptx(key: KernelKey) -> Ptx:
    """Returns the PTX of a key's kernel, for the emulator.

    Raises:
      NotImplementedError: the key has no source.
    """
    compiled = compile_kernel(key)
    return Ptx(
        compiled.ptx, compiled.info.symbol, compiled.source.launch, dict(compiled.source.tile)
    )


def compile_source(key: KernelKey, source: KernelSource) -> Compiled:
    """Compiles a kernel source under the name of a key.

    Raises:
      ValueError: the cubin does not hold exactly the kernel that was asked for, or ptxas did not
        say what it spills.
    """
    start = time.perf_counter()
    compiled, output = _run_compiler(source, key.arch)
    cubin: bytes = compiled.__cubin__
    info = _only_kernel(key, source, cubin)
    stores = [int(match[1]) for match in _SPILL_STORES.finditer(output)]
    if not stores:
        raise ValueError(f"{key.name}: ptxas did not say what it spills: {output!r}")
    return Compiled(
        key=key,
        source=source,
        cubin=cubin,
        ptx=compiled.__ptx__,
        host=_host_code(compiled, source),
        info=info,
        # Each of these tells of spills on its own; a change of ptxas might silence one of them.
        spill_bytes=max(info.stack_bytes, *stores, 4 * min(info.local_accesses, 1)),
        serialized=_SERIALIZED.search(output) is not None,
        seconds=time.perf_counter() - start,
    )


def _run_compiler(source: KernelSource, arch: str) -> tuple[Any, str]:
    """Returns CuTe-DSL's compiled function and what ptxas said."""
    import cutlass.cute as cute

    with tempfile.TemporaryDirectory() as folder:
        # The option remarks{ptx} prints what ptxas says, too, but makes CuTe-DSL note the place in
        # the source of every operation, which takes a quarter of the time.
        remarks = pathlib.Path(folder, "remarks.yaml")
        options = (
            f"--gpu-arch {arch} --keep-cubin --keep-ptx --dump-dir {folder} "
            f"--ptxas-options -v --remark-output {remarks}"
        )
        compiled = cute.compile(source.host, *source.arguments, options=options)
        return compiled, remarks.read_text()


def _only_kernel(key: KernelKey, source: KernelSource, cubin: bytes) -> cubin_info.KernelInfo:
    kernels = cubin_info.read(cubin)
    if len(kernels) != 1:
        raise ValueError(f"{key.name}: one kernel expected in the cubin, found {sorted(kernels)}")
    (info,) = kernels.values()
    launch = source.launch
    if not info.symbol.startswith(source.symbol_prefix):
        raise ValueError(f"{key.name}: symbol {info.symbol}, expected {source.symbol_prefix}*")
    if len(info.param_bytes) != len(launch.params):
        raise ValueError(
            f"{key.name}: the cubin takes {len(info.param_bytes)} parameters, "
            f"its Launch names {len(launch.params)}"
        )
    if info.block is not None and info.block != launch.block:
        raise ValueError(f"{key.name}: compiled for blocks of {info.block}, not {launch.block}")
    return info


def _host_code(compiled: Any, source: KernelSource) -> HostCode:
    object_file: bytes = compiled.dump_to_object("host")
    entries = {found.decode() for found in _HOST_ENTRY.findall(object_file)}
    if len(entries) != 1:
        raise ValueError(f"{source.symbol_prefix}: entries of the host code: {sorted(entries)}")
    module = type(source.host).__module__
    return HostCode(object_file, entries.pop(), module, source.host_arguments)
