"""Compiles the sample kernels in a process that may import cutlass; see compile.prepare_process.

This module imports nothing of CuTe-DSL, so that a test can name its functions.
"""

from __future__ import annotations

from fa4_jax.key import KernelKey
from kernels.build import cache, compile, package


def compile_scale() -> cache.Entry:
    """Compiles the kernel that is fit for use."""
    from tests.build import sample_kernels

    return package.entry(compile.compile_source(sample_kernels.KEY, sample_kernels.scale_source()))


def compile_spilling() -> cache.Entry:
    """Compiles the kernel that spills, which is refused."""
    from tests.build import sample_kernels

    source = sample_kernels.spilling_source()
    return package.entry(compile.compile_source(sample_kernels.KEY, source))


def resources_of_spilling() -> tuple[int, int, int]:
    """Its local memory in bytes, its local memory instructions, and what counts as spills."""
    from tests.build import sample_kernels

    compiled = compile.compile_source(sample_kernels.KEY, sample_kernels.spilling_source())
    return compiled.info.stack_bytes, compiled.info.local_accesses, compiled.spill_bytes


def digest_of(key: KernelKey) -> str:
    """SHA-256 of a real kernel's cubin, compiled anew."""
    return package.entry(compile.compile_kernel(key)).cubin.sha256
