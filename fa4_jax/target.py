"""What this process can run kernels on: the runtime's answers as one value for `make_plan`."""

from __future__ import annotations

import functools

from fa4_jax import runtime
from fa4_jax.plan import Target


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
