"""Which kernels `make test` builds: enough of them for its tests, in a few minutes of two cores.

`make cover`, `make proof` and wheels build all. Of what is left out somebody has built every kernel
from the same sources by the same compiler, and recorded its text (texts.py). So the sample has all
kernels that no record speaks of, and of the others those that tests call through JAX, and kernels
that have every flag of every module between them.
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
    "sm_90a_*_bf16_d64",
    "sm_90a_*_bf16_d64_deterministic",
    "sm_90a_bias_grad_bf16_d64_band",
    "sm_90a_bwd_bf16_d64_band_bias_deterministic",
    "sm_90a_bwd_bf16_d64_band_deterministic",
    "sm_90a_bwd_bf16_d64_band_ranges",
    "sm_90a_fwd_bf16_d64_band_bias_short",
    "sm_90a_fwd_bf16_d64_band_narrow",
    "sm_90a_fwd_bf16_d64_band_ranges_short",
    "sm_90a_fwd_bf16_d64_band_ranges_soft_cap_short",
    "sm_90a_fwd_bf16_d64_band_short",
    "sm_90a_fwd_split_bf16_d64_paged",
    "sm_90a_tangent_bf16_d64_band",
    "sm_90a_*_bf16_d128",
    "sm_90a_bwd_bf16_d128_band",
    "sm_90a_fwd_bf16_d128_band",
    "sm_90a_hessian_*_bf16_d128_band",
    "sm_90a_tangent_bf16_d128_band",
    "sm_90a_bwd*_bf16_d256",
    "sm_90a_fwd_bf16_d256",
    "sm_90a_tangent_bf16_d256",
    "sm_100f_b*_bf16_d64",
    "sm_100f_bias_grad_bf16_d64_band",
    "sm_100f_bwd_bf16_d64_band_bias_deterministic",
    "sm_100f_bwd_bf16_d64_band_ranges",
    "sm_100f_bwd_pre_bf16_d64_deterministic",
    "sm_100f_fwd_bf16_d64_band_bias",
    "sm_100f_fwd_bf16_d64_band_ranges_polynomial_exp2*",
    "sm_100f_fwd_bf16_d64_polynomial_exp2",
    "sm_100f_fwd_join_bf16_d64",
    "sm_100f_fwd_split_bf16_d64_paged",
    "sm_100f_tangent_bf16_d64",
    "sm_100f_bwd_fp16_d192x128_pair",
    "sm_100f_bwd_post_fp16_d192x128",
    "sm_100f_fwd_fp16_d192",
    "sm_100f_tangent_fp16_d192",
)
"""Kernels that tests call through JAX on an emulated GPU, by name; `*` stands for anything.

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
    called = {key for key in every if any(fnmatch.fnmatch(key.name, name) for name in CALLED)}
    return with_companions(with_every_feature(called, every) | texts.unknown())


def with_companions(keys: Iterable[KernelKey]) -> set[KernelKey]:
    """Returns keys and those of the kernels that tests of theirs need.

    A test compares each fp16 kernel with its bf16 one, and one launches a kernel after another.
    """
    found = set(keys)
    found |= {dataclasses.replace(key, dtype="bf16") for key in found}
    return found | {
        dataclasses.replace(key, kernel=_BEFORE[key.kernel], **_PLAIN)
        for key in found
        if key.kernel in _BEFORE
    }


def with_every_feature(chosen: Iterable[KernelKey], keys: Iterable[KernelKey]) -> set[KernelKey]:
    """Returns what was chosen and, for each feature that it lacks, the plainest kernel with it."""
    found = set(chosen)
    held = {feature for key in found for feature in features(key)}
    for key in sorted(keys, key=lambda key: (key.dtype, len(features(key)), key)):
        if not features(key) <= held:
            found.add(key)
            held |= features(key)
    return found


def features(key: KernelKey) -> frozenset[tuple[str, Pass, str]]:
    """Returns the flags of a kernel, each with the module that it is a flag of, and the pass.

    Modules are apart, since backwards of two head dims may be two programs. A dense kernel has a
    feature, too: it is the plain one of its module.
    """
    flags = [field.name for field in dataclasses.fields(key) if getattr(key, field.name) is True]
    names = flags if key.band else [*flags, "dense"]
    return frozenset((sources.module(key), key.kernel, name) for name in names)
