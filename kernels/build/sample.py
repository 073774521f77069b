"""Which kernels `make test` builds: enough of them for its tests, in a few minutes of two cores.

`make cover`, `make proof` and wheels build all. Of what is left out somebody has built every kernel
from the same sources by the same compiler, and recorded its text (texts.py). So the sample has all
kernels that no record speaks of, and of the others those that tests call through JAX, and one of
each kind.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Iterable

from fa4_jax import catalogue
from fa4_jax.key import KernelKey, Pass
from kernels import sources
from kernels.build import texts

CALLED = (
    "sm_90a_*_bf16_d128",
    "sm_90a_bwd_bf16_d128_band",
    "sm_90a_fwd_bf16_d128_band",
    "sm_90a_hessian_*_bf16_d128_band",
    "sm_90a_tangent_bf16_d128_band",
    "sm_90a_*_bf16_d256",
    "sm_100f_bwd_fp16_d192x128_pair",
    "sm_100f_bwd_post_fp16_d192x128",
    "sm_100f_fwd_fp16_d192",
    "sm_100f_tangent_fp16_d192",
)
"""Kernels that tests call through JAX on an emulated GPU, beside one of each kind.

A test whose kernel is not there fails and names it. One that runs PTX alone compiles what it lacks.
"""

_BEFORE = {
    Pass.FORWARD_JOIN: Pass.FORWARD_SPLIT,
    Pass.BACKWARD: Pass.BACKWARD_PRE,
    Pass.BACKWARD_POST: Pass.BACKWARD_PRE,
    Pass.BIAS_GRADIENT: Pass.BACKWARD_PRE,
}
_PLAIN = dict.fromkeys(("band", "ranges", "soft_cap", "bias", "pair"), False)


def kernels() -> set[KernelKey]:
    """Returns the keys of the sample."""
    every = catalogue.all_keys()
    chosen = {key for key in every if any(fnmatch.fnmatch(key.name, name) for name in CALLED)}
    chosen |= one_of_each_kind(every) | texts.unknown()
    # A test compares each fp16 kernel with its bf16 one, and one launches a kernel after another.
    chosen |= {dataclasses.replace(key, dtype="bf16") for key in chosen}
    return chosen | {
        dataclasses.replace(key, kernel=_BEFORE[key.kernel], **_PLAIN)
        for key in chosen
        if key.kernel in _BEFORE
    }


def one_of_each_kind(keys: Iterable[KernelKey]) -> set[KernelKey]:
    """Returns the first kernel of each kind, which is one of bf16 and of the least head dim."""
    return set({kind(key): key for key in sorted(keys, reverse=True)}.values())


def kind(key: KernelKey) -> tuple[str, KernelKey]:
    """Returns what kernels have in common that differ in head dims and storage type alone.

    Their module is a part of it: backwards of two head dims may be two programs.
    """
    return sources.module(key), dataclasses.replace(key, dtype="bf16", head_dim=0, value_dim=0)
