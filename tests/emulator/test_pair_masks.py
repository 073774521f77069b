"""Kernels that read masks of pairs: bits in partial tiles, and which tiles they visit.

The cases of `fa4_jax.conformance` with such masks, random boxes, and calls from end to end.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Hashable

import numpy as np
import pytest

from fa4_jax.conformance.cases import CASES, Case
from fa4_jax.conformance.oracle import Inputs, make_inputs, names
from fa4_jax.key import Pass
from kernels.emulator import Policy
from tests.emulator import attention, emulated_gpu
from tests.emulator.processes import HOW, Gpu
from tests.emulator.test_row_ranges import POLICIES, check, check_same_bits
from tests.sampling import features, sampled

if importlib.util.find_spec("cutlass") is None:
    pytest.skip("the PTX comes from CuTe-DSL, which is not here", allow_module_level=True)

ARCHITECTURES = ("sm_90a", "sm_100f")
MASKED = tuple(
    case for case in CASES if case.problem.has_mask and case.has_kernels("sm_90a", Pass.FORWARD)
)
PAIRS = tuple(
    next(case for case in MASKED if name in case.id)
    for name in ("d64-b2-h2-t300-s420-function", "t90-s391-function", "deterministic-mask2x4")
)
"""Cases of the head dims that have both designs on Blackwell, one with packed heads."""


def features_of(case: Case, arch: str, design: str | None) -> frozenset[Hashable]:
    """Each kind of mask on either architecture, each head dim and order of sums on both."""
    of_kernel = (case.deterministic, case.head_dim, case.heads[0] != case.heads[1])
    return features(case) | {(arch, design, x) for x in of_kernel}


@pytest.mark.parametrize(
    ("case", "arch", "design"),
    sampled(
        [
            *((case, arch, None) for case in MASKED for arch in ARCHITECTURES),
            *((case, "sm_100f", design) for case in PAIRS for design in ("single", "pair")),
        ],
        features_of,
    ),
    ids=lambda x: x.id if isinstance(x, Case) else x,
)
def test_masks(case: Case, arch: str, design: str | None) -> None:
    seed = sum(map(ord, case.id)) % 1000
    inputs = make_inputs(case, seed)
    launch = attention.attention(case, inputs, True, arch, design)
    main = [key for key in launch.keys if key.kernel in (Pass.FORWARD, Pass.BACKWARD)]
    assert all(key.reads_mask for key in main)
    check(case, inputs, launch.run(POLICIES[seed % len(POLICIES)], seed), launch)


def boxes(case: Case, rng: np.random.Generator) -> np.ndarray:
    """Random pairs [B, N, T, S]: a third of the boxes of 64 x 128 empty, a third full."""
    shape = case.batch, case.heads[0], case.query_length, case.key_length
    of_box = rng.integers(0, 3, (*shape[:2], -(-shape[2] // 64), -(-shape[3] // 128)))
    kind = np.repeat(np.repeat(of_box, 64, 2), 128, 3)[:, :, : shape[2], : shape[3]]
    return (kind == 1) | ((kind == 2) & (rng.random(shape) < 0.5))


def with_mask(case: Case, seed: int) -> tuple[Case, Inputs]:
    """The case with random boxes as its mask, which every head has its own of."""
    seen = boxes(case, np.random.default_rng(seed))
    case = dataclasses.replace(case, mask=seen.shape)
    return case, dataclasses.replace(make_inputs(case, seed), mask=seen)


@pytest.mark.parametrize(
    ("arch", "head_dim"),
    [
        ("sm_90a", 96),
        *(pytest.param(*x, marks=pytest.mark.slow) for x in (("sm_100f", 128), ("sm_90a", 256))),
        *(pytest.param("sm_90a", d, marks=pytest.mark.every_case) for d in (64, 128, 192)),
    ],
)
def test_whole_boxes_are_skipped_or_read_without_a_mask(
    arch: str, head_dim: int, seed: int
) -> None:
    """Heads of a group differ, so that a backward visits what any of them sees."""
    case = Case(
        batch=1, heads=(2, 1), head_dim=head_dim, query_length=260, key_length=400, growing=True
    )
    case, inputs = with_mask(case, seed)
    launch = attention.attention(case, inputs, True, arch)
    check(case, inputs, launch.run(Policy("random", "late"), seed), launch)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_fewer_blocks_are_loaded_than_there_are(arch: str, seed: int) -> None:
    """A tile that is read would give NaN. The widest one is a pair's: 256 keys."""
    case = Case(batch=1, heads=(1, 1), head_dim=128, query_length=256, key_length=768)
    seen = np.zeros((1, 1, 256, 768), bool)
    seen[..., :256], seen[..., 512:] = True, True
    case = dataclasses.replace(case, mask=seen.shape)
    inputs = dataclasses.replace(make_inputs(case, seed), mask=seen)
    launch = attention.attention(case, inputs, True, arch)
    key, value = inputs.key.copy(), inputs.value.copy()
    key[:, 256:512], value[:, 256:512] = np.nan, np.inf
    arrays = launch.arrays | {"k": key, "v": value}
    results = dataclasses.replace(launch, arrays=arrays).run(POLICIES[0], seed)
    check(case, inputs, results, launch)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "head_dim"),
    [
        *(("sm_90a", 64), ("sm_100f", 128)),
        *(pytest.param("sm_90a", d, marks=pytest.mark.every_case) for d in (128, 256)),
    ],
)
def test_the_deterministic_backward_gives_the_same_bits(arch: str, head_dim: int) -> None:
    case = Case(
        batch=1,
        heads=(2, 1),
        head_dim=head_dim,
        query_length=200,
        key_length=600 if arch == "sm_100f" else 300,  # Three tiles: the order of two is no matter.
        deterministic=True,
    )
    case, inputs = with_mask(case, 3)
    launch = attention.attention(case, inputs, True, arch)
    check_same_bits(case, inputs, launch)


END_TO_END = (
    Case(batch=1, heads=(2, 1), query_length=150, key_length=200, mask=(1, 2, 150, 200)),
    Case(
        batch=2, heads=(2, 1), head_dim=128, query_length=150, key_length=150, masks=("function",)
    ),
)


@pytest.mark.parametrize("case", END_TO_END, ids=lambda case: case.id)
def test_from_end_to_end(gpu: Gpu, case: Case, seed: int) -> None:
    """fa4_jax.attention(mask=...), XLA's bits, the FFI handler and the kernels."""
    ways = HOW[:-1]  # The last asks for one order of additions, which no case here is bound to.
    verdicts = gpu(emulated_gpu.verdicts, case, seed, ways[seed % len(ways)])
    assert [verdict.name for verdict in verdicts] == list(names(case))
    assert not [verdict for verdict in verdicts if verdict.failure]
