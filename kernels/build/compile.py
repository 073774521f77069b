"""Compiles one kernel: KernelKey -> cubin and what it uses.

Runs in a process of its own architecture: CuTe-DSL reads CUTE_DSL_ARCH when it is imported, so
cutlass and the kernel sources are imported inside the functions here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from fa4_jax.key import KernelKey
from kernels.build import cubin_info

if TYPE_CHECKING:
    from kernels.sources import KernelSource

# ptxas's word for products that wait for each other; it costs about half of the speed.
_SERIALIZED = re.compile(r"wgmma.{0,80}serialized", re.DOTALL)
_SPILLS = re.compile(r"(\d+)\s+bytes\s+spill\s+stores,\s+(\d+)\s+bytes\s+spill\s+loads")


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled kernel.

    Attributes:
      key: what was compiled.
      source: where it came from.
      cubin: the device code.
      info: registers, local memory and parameters.
      spill_bytes: bytes of registers that are spilled: local memory per thread.
      serialized: ptxas made the warpgroup products wait for each other.
      seconds: time that it took.
    """

    key: KernelKey
    source: KernelSource
    cubin: bytes
    info: cubin_info.KernelInfo
    spill_bytes: int
    serialized: bool
    seconds: float


def prepare_process(arch: str) -> None:
    """Readies this process for one architecture. Must run before cutlass is first imported."""
    if "cutlass" in sys.modules and os.environ.get("CUTE_DSL_ARCH") != arch:
        raise RuntimeError(f"cutlass was imported before CUTE_DSL_ARCH={arch} was set")
    os.environ["CUTE_DSL_ARCH"] = arch
    os.environ["CUTE_DSL_DISABLE_FILE_CACHING"] = "1"


def compile_kernel(key: KernelKey) -> Compiled:
    """Compiles the kernel of a key.

    Raises:
      NotImplementedError: the key has no source.
      ValueError: the cubin does not hold exactly the kernel that was asked for.
    """
    prepare_process(key.arch)
    from kernels import sources

    start = time.perf_counter()
    source = sources.source(key)
    compiled, output = compile_source(source, key.arch)
    cubin: bytes = compiled.__cubin__
    kernels = cubin_info.read(cubin)
    if len(kernels) != 1:
        raise ValueError(f"{key.name}: one kernel expected in the cubin, found {sorted(kernels)}")
    (info,) = kernels.values()
    if not info.symbol.startswith(source.symbol_prefix):
        raise ValueError(f"{key.name}: symbol {info.symbol}, expected {source.symbol_prefix}*")
    if len(info.param_bytes) != len(source.launch.params):
        raise ValueError(
            f"{key.name}: the cubin takes {len(info.param_bytes)} parameters, "
            f"its Launch names {len(source.launch.params)}"
        )
    stores = sum(int(match[1]) for match in _SPILLS.finditer(output))
    return Compiled(
        key=key,
        source=source,
        cubin=cubin,
        info=info,
        spill_bytes=max(info.stack_bytes, stores, 4 * min(info.local_accesses, 1)),
        serialized=_SERIALIZED.search(output) is not None,
        seconds=time.perf_counter() - start,
    )


def compile_source(source: KernelSource, arch: str) -> tuple[Any, str]:
    """Runs CuTe-DSL. Returns its compiled function and what the compiler printed."""
    import cutlass.cute as cute

    with tempfile.TemporaryDirectory() as folder:
        options = f"--gpu-arch {arch} --keep-cubin --dump-dir {folder} remarks{{ptx}}"
        with _captured_output() as read:
            compiled = cute.compile(source.host, *source.arguments, options=options)
        return compiled, read()


@contextlib.contextmanager
def _captured_output() -> Iterator[Any]:
    """Collects what is written to both output descriptors, by C++ code too."""
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryFile() as file:
        saved = os.dup(1), os.dup(2)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)

        def read() -> str:
            return text

        text = ""
        try:
            yield read
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for descriptor, target in zip(saved, (1, 2), strict=True):
                os.dup2(descriptor, target)
                os.close(descriptor)
            file.seek(0)
            text = file.read().decode(errors="replace")
