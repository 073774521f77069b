"""Tests which kernels a problem gets: a pure function, so no device is needed."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

from fa4_jax import catalogue
from fa4_jax.bands import UNBOUNDED
from fa4_jax.designs import DESIGNS, TALL
from fa4_jax.key import KernelKey, Pass
from fa4_jax.plan import (
    Plan,
    Target,
    hessian_keys,
    kernel_keys,
    make_plan,
    no_tangent,
    tangent_key,
)
from fa4_jax.problem import Problem
from tests.fakes import fake_target

PROBLEM = Problem(2, 100, 120, 4, 2, 128, "bf16", 0.1)
CAUSAL = (UNBOUNDED, 0)


def names(plan: Plan) -> list[str]:
    return [kernel.key.name for kernel in plan.forward + plan.backward]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"query_length": 192},
            ["fwd_bf16_d128", "bwd_pre_bf16_d128", "bwd_bf16_d128", "bwd_post_bf16_d128"],
        ),
        (
            {"window": CAUSAL, "dtype": "fp16", "head_dim": 136},
            ["fwd_fp16_d192_band", "bwd_pre_fp16_d192", "bwd_fp16_d192_band", "bwd_post_fp16_d192"],
        ),
        (
            {"window": (3, 5), "deterministic": True, "head_dim": 8, "numerics": "exact"},
            [
                "fwd_bf16_d64_band_narrow",
                "bwd_pre_bf16_d64_deterministic",
                "bwd_bf16_d64_band_deterministic",
                "bwd_post_bf16_d64",
            ],
        ),
        (
            {"head_dim": 64, "query_length": 768},
            [
                "fwd_bf16_d64",
                "bwd_pre_bf16_d64",
                "bwd_bf16_d64",
                "bwd_post_bf16_d64",
            ],
        ),
    ],
)
def test_keys(changes: dict[str, Any], expected: list[str]):
    plan = make_plan(dataclasses.replace(PROBLEM, **changes), fake_target(), None)
    assert names(plan) == [f"sm_90a_{name}" for name in expected]
    assert plan.forward_reason is None and plan.backward_reason is None


def test_polynomial_exponentials_are_for_fast_forwards_of_some_tiles():
    for head_dim, numerics in ((40, "fast"), (64, "exact"), (200, "fast")):
        problem = dataclasses.replace(PROBLEM, head_dim=head_dim, numerics=numerics)
        forward, backward = kernel_keys(problem, "sm_100f")
        assert forward[0].polynomial_exp2 == (head_dim == 40)
        assert not any(key.polynomial_exp2 for key in backward)
        # It is not used where the special-function unit keeps up (10.3), nor on Hopper.
        for other in (
            kernel_keys(problem, "sm_100f", fast_exp2=True),
            kernel_keys(problem, "sm_90a"),
        ):
            assert not other[0][0].polynomial_exp2


@pytest.mark.parametrize(
    ("changes", "tile"),
    [
        ({"window": CAUSAL}, "tall"),
        ({"window": CAUSAL, "query_length": 1024, "key_length": 1024}, "short"),
        # One tile, or one of 192 in place of two of 128.
        ({"window": CAUSAL, "query_length": 64}, "short"),
        ({"window": CAUSAL, "query_length": 192}, "tall"),
        ({"window": CAUSAL, "query_length": 80, "key_length": 600}, "short"),
        ({"window": (127, 0)}, "narrow"),
        ({"window": (127, 0), "has_sinks": True}, "narrow"),
        ({"window": (127, 0), "has_ranges": True}, "narrow"),
        ({"window": (127, 256)}, "narrow"),
        ({"window": (511, 0)}, "short"),
        ({"window": (127, 0), "has_soft_cap": True}, "short"),
        ({"window": (127, 0), "has_mask": True}, "short"),
        ({"window": (127, 0), "bias": "dense"}, "short"),
        ({"window": (1023, 0)}, "tall"),
        ({}, "tall"),
        ({"key_length": 100}, "tall"),
        ({"has_soft_cap": True}, "short"),
        ({"window": (127, 0), "head_dim": 104}, "tall"),
        ({"window": (127, 0), "head_dim": 72}, "short"),
        ({"window": (1023, 0), "head_dim": 72}, "short"),
        ({"window": (4000, 0), "head_dim": 72}, "tall"),
        ({"window": CAUSAL, "has_ranges": True, "head_dim": 72}, "short"),
        ({"window": CAUSAL, "has_ranges": True}, "tall"),
        # Dense: 4 x 192 rows, 6 x 192 with an eighth of them empty.
        ({"query_length": 768, "head_dim": 72}, "tall"),
        ({"query_length": 1024, "head_dim": 72}, "short"),
    ],
)
def test_rows_that_see_few_keys_take_a_shorter_tile(changes: dict[str, Any], tile: str):
    # So many heads that the sum of the work decides.
    sizes = {"batch": 128, "query_length": 4096, "key_length": 4096, "head_dim": 64}
    problem = dataclasses.replace(PROBLEM, **(sizes | changes))
    (forward,), _ = kernel_keys(problem, "sm_90a")
    assert (forward.short, forward.narrow) == (tile == "short", tile == "narrow")
    assert forward.band or tile == "tall", "shorter tiles are built with a band"
    others = [key for keys in kernel_keys(problem, "sm_100f") for key in keys]
    assert not any(key.short or key.narrow for key in others)


@pytest.mark.parametrize("rows", [1, 64, 128, 129, 512, 1024, 1025, 4096])
def test_dense_calls_of_few_rows_take_the_shorter_tile_of_a_band(rows: int):
    problem = dataclasses.replace(PROBLEM, batch=128, query_length=rows)
    (forward,), _ = kernel_keys(problem, "sm_90a")
    # 129 rows are one tile of 192 or two of 128. 512 are three of 192, the last of which has two
    # warpgroups at work; of the six of 1024 rows the last has one.
    assert forward.band == (rows in (1, 64, 128, 512))
    assert not forward.short
    assert not kernel_keys(problem, "sm_100f")[0][0].band


@pytest.mark.parametrize("arch", catalogue.ARCHITECTURES)
def test_tickets_deal_the_tiles_of_a_dense_call_with_lengths_on_hopper(arch: str):
    problem = dataclasses.replace(PROBLEM, has_lengths=True)
    (forward,), backward = kernel_keys(problem, arch)
    assert forward.band == (arch == "sm_90a")
    assert not any(key.band for key in backward)


@pytest.mark.parametrize(
    ("head_dims", "tile"),
    [
        ((192, 128), "d192x128"),
        ((136, 8), "d192x128"),
        ((192, 136), "d192"),
        ((128, 192), "d192"),
        ((256, 128), "d256"),
        ((128, 64), "d128"),
    ],
)
@pytest.mark.parametrize("arch", catalogue.ARCHITECTURES)
def test_narrower_values_have_tiles_of_their_own(arch: str, head_dims: tuple[int, int], tile: str):
    head_dim, value_dim = head_dims
    problem = dataclasses.replace(PROBLEM, head_dim=head_dim, value_dim=value_dim)
    forward, backward = kernel_keys(problem, arch)
    names = [key.name.removesuffix("_pair") for key in backward]
    assert [name.split("_")[-1] for name in names] == [tile] * 3
    if arch == "sm_100f":  # Its forward has none.
        tile = tile.split("x")[0]
    assert forward[0].name.split("_")[4] == tile


@pytest.mark.parametrize("arch", catalogue.ARCHITECTURES)
def test_every_problem_that_kernels_take_finds_its_kernels_in_the_key_list(arch: str):
    used: set[KernelKey] = set()
    names = ("has_ranges", "has_sinks", "returns_max_logit", "has_soft_cap")
    asked = ({}, {"bias": "dense"}, *({name: True} for name in names))
    for design, asks, dtype, window, deterministic, numerics, value_dim in itertools.product(
        (*DESIGNS, TALL),
        asked,
        ("bf16", "fp16"),
        ((UNBOUNDED, UNBOUNDED), CAUSAL, (100, 0), (500, 0)),
        (False, True),
        ("fast", "exact"),
        (None, 8),
    ):
        for head_dim in range(8, 257, 8):
            problem = dataclasses.replace(
                PROBLEM,
                query_length=4096,
                key_length=4096,
                dtype=dtype,
                head_dim=head_dim,
                window=window,
                deterministic=deterministic,
                numerics=numerics,
                value_dim=value_dim,
                **asks,
            )
            short = dataclasses.replace(problem, query_length=1)
            paged = dataclasses.replace(problem, page_length=64)
            in_pages = (paged, dataclasses.replace(paged, query_length=1))
            for some in (problem, short, *(() if asks else in_pages)):
                forward, backward = kernel_keys(some, arch, design=design)
                used.update(forward + backward)
                if no_tangent(some) is None:
                    used.add(tangent_key(some, arch))
                    used.update(hessian_keys(some, arch))
    assert used == set(catalogue.keys(arch))  # and no kernel is built in vain


@pytest.mark.parametrize(
    ("asks", "forward", "backward_reason"),
    [
        ({"has_sinks": True}, "fwd_bf16_d128_band_ranges", None),
        ({"returns_max_logit": True}, "fwd_bf16_d128_band_ranges", None),
        (
            {"has_soft_cap": True, "has_sinks": True},
            "fwd_bf16_d128_band_ranges_soft_cap",
            "logits_soft_cap: it is traced",
        ),
        (
            {"has_ranges": True, "has_soft_cap": True},
            "fwd_bf16_d128_band_ranges_soft_cap",
            "logits_soft_cap: it is traced",
        ),
    ],
)
def test_what_comes_from_memory(asks: dict[str, bool], forward: str, backward_reason: str | None):
    """Sinks and largest scores leave the backward as it is; what it lacks is named."""
    plan = make_plan(dataclasses.replace(PROBLEM, **asks), fake_target(), None)
    assert names(plan)[0] == f"sm_90a_{forward}"
    if backward_reason is None:
        assert names(plan)[1:] == names(make_plan(PROBLEM, fake_target(), None))[1:]
    else:
        assert not plan.backward and str(plan.backward_reason).startswith(backward_reason)


def test_the_backward_of_a_cap_that_is_a_number_has_a_kernel():
    capped = dataclasses.replace(PROBLEM, has_soft_cap=True, soft_cap=30.0)
    kernels = names(make_plan(capped, fake_target(), None))
    assert kernels[2] == "sm_90a_bwd_bf16_d128_band_ranges_soft_cap"


def test_on_blackwell_caps_take_the_kernels_of_masks():
    capped = dataclasses.replace(PROBLEM, has_soft_cap=True, soft_cap=30.0)
    forward, backward = kernel_keys(capped, "sm_100f")
    for key in (*forward, backward[1]):
        assert key.ranges and key.reads_cap and not key.soft_cap


def test_a_missing_kernel_is_named_with_those_there_are():
    keys = tuple(k for k in catalogue.all_keys() if k.kernel is Pass.FORWARD and k.head_dim == 96)
    target = fake_target(keys)
    plan = make_plan(PROBLEM, target, None)
    assert not plan.forward and not plan.backward
    assert plan.forward_reason is not None
    assert "sm_90a_fwd_bf16_d128_band" in plan.forward_reason
    assert "sm_90a_fwd_bf16_d96_band" in plan.forward_reason
    with pytest.raises(NotImplementedError, match="sm_90a_fwd_bf16_d128_band is installed"):
        make_plan(PROBLEM, target, "kernel")


def test_a_forward_without_its_backward_runs_alone():
    keys = tuple(k for k in catalogue.all_keys() if k.kernel is Pass.FORWARD)
    plan = make_plan(PROBLEM, fake_target(keys), None)
    assert plan.forward and not plan.backward
    assert plan.backward_reason is not None and "bwd_pre" in plan.backward_reason


def test_without_a_device_the_reason_is_the_runtimes():
    target = Target(None, None, "no library")
    assert make_plan(PROBLEM, target, None).forward_reason == "no library"
    with pytest.raises(NotImplementedError, match="implementation='kernel': no library"):
        make_plan(PROBLEM, target, "kernel")


def test_plans_are_hashable():
    a, b = (make_plan(PROBLEM, fake_target(), None) for _ in range(2))
    assert a == b and hash(a) == hash(b)
