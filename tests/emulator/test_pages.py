"""The forward of many rows from pages: the kernels alone under adversarial timing.

They take about a minute of a core: a cover, `make proof` runs all.
test_decode_end_to_end.py calls the same kernels by `decode`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Hashable, Iterable

import numpy as np
import pytest

from fa4_jax import catalogue
from fa4_jax.conformance.cases import Case
from fa4_jax.conformance.oracle import make_inputs
from fa4_jax.key import KernelKey, Pass
from kernels.emulator import Policy
from tests import sampling
from tests.emulator import attention
from tests.emulator.kernel_conformance import ADVERSARIES, Problem, judged
from tests.emulator.split_launches import in_pages

if importlib.util.find_spec("cutlass") is None:
    pytest.skip("the PTX comes from CuTe-DSL, which is not here", allow_module_level=True)

KERNELS = [key for key in catalogue.all_keys() if key.kernel is Pass.FORWARD and key.paged]
LENGTHS = (400, 130, 0)


def _case(key: KernelKey, page: int) -> Case:
    """Entries have many blocks, few, and none; the last page and the last block are not full."""
    return Case(
        dtype=key.dtype,
        head_dim=key.head_dim,
        batch=3,
        heads=(2, 1),
        query_length=100,
        key_length=-(-max(LENGTHS) // page) * page,
        is_causal=True,
        window=(200, None) if page == 64 else None,
        query_offset=tuple(x - 100 for x in LENGTHS),
        key_lengths=LENGTHS,
        poison=True,
    )


TARGETS = [(_case(key, page), key, page) for key in KERNELS for page in (16, 48, 64, 128)]


def _features(case: Case, key: KernelKey, page: int) -> Iterable[Hashable]:
    return {sampling.alike(key), page, (case.head_dim, page % 64 == 0)}


def test_every_architecture_has_them() -> None:
    assert {key.arch for key in KERNELS} == set(catalogue.ARCHITECTURES)


@pytest.mark.parametrize(("case", "key", "page"), sampling.sampled(TARGETS, _features))
def test_conforms(case: Case, key: KernelKey, page: int, seed: int) -> None:
    """Pages are in random order; what lies past a length is NaN, table entries there nonsense."""
    launches = attention.attention(case, make_inputs(case, seed % 2), False, key.arch)
    paged = in_pages(launches, LENGTHS, page, np.random.default_rng(seed))
    assert paged.keys == (key,)
    results = paged.run(ADVERSARIES[seed % len(ADVERSARIES)], seed)
    found = judged(Problem(case, Pass.FORWARD, key.arch, seed % 2), results)
    assert len(found) == 2
    assert not [verdict for verdict in found if verdict.failure]
    beside = launches.run(Policy())
    if launches.keys[0].short == key.short:  # The same tiles: the same bits.
        for name in ("output", "lse"):
            assert np.array_equal(results[name], beside[name], True)
