"""What this process can run kernels on: the runtime's answers as one value for `make_plan`."""

from __future__ import annotations

import functools

from fa4_jax import runtime
from fa4_jax.plan import Target


def named_target(arch: str) -> Target:
    """The installed kernels of an architecture, to lower a program for another machine's GPU."""
    current = current_target()
    if current.arch == arch:
        return current
    return Target(arch, runtime.manifest(), runtime.why_no_kernels() or "")


def has_kernels(arch: str | None) -> bool:
    """Whether kernels are installed for this machine's GPU, or for the architecture named."""
    target = current_target() if arch is None else named_target(arch)
    return target.arch is not None and target.manifest is not None


@functools.cache
def current_target() -> Target:
    """The GPU that JAX uses and the installed kernels. Starts JAX's backends at its first call."""
    unavailable = runtime.why_unavailable()
    return Target(
        arch=None if unavailable else runtime.device_arch(),
        manifest=runtime.manifest(),
        unavailable=unavailable or "",
        fast_exp2=not unavailable and runtime.compute_capability() == 103,
        platforms=("cuda", "cpu") if runtime.has_stand_in() else ("cuda",),
    )
