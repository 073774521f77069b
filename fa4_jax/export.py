"""Exporting programs that call kernels."""

from __future__ import annotations

from typing import Any

import jax.export

from fa4_jax import runtime


def export_checks() -> list[Any]:
    """For jax.export.export(..., disabled_checks=export_checks()).

    JAX exports only custom calls that it knows to be stable; this lets ours through. Its name and
    attributes are stable within a release of this package. The exporting process picks the kernels
    for its GPU, or for the architecture that `attention(arch=...)` names; a program for CPU holds
    none and needs no check disabled. Batch and lengths may be symbolic.
    """
    return [jax.export.DisabledSafetyCheck.custom_call(runtime.TARGET)]
