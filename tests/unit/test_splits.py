"""When short queries run on the split forward, and into how many parts it divides the keys."""

from __future__ import annotations

import dataclasses

import pytest

from fa4_jax import splits
from fa4_jax.key import SPLIT_KEYS, Pass
from fa4_jax.plan import kernel_keys, make_plan
from fa4_jax.problem import Problem
from tests.fakes import fake_target

DECODE = Problem(8, 1, 8192, 32, 8, 128, "bf16", 1.0)


@pytest.mark.parametrize(
    ("changes", "short"),
    [
        ({}, True),
        ({"query_length": 16}, True),
        ({"query_length": 17}, False),
        ({"kv_heads": 1, "query_length": 2}, True),
        ({"kv_heads": 1, "query_length": 3}, False),
        ({"key_length": splits.LEAST_KEYS}, True),
        ({"key_length": splits.LEAST_KEYS - 1}, False),
        ({"window": (100, 0), "has_lengths": True, "deterministic": True}, True),
        ({"head_dim": 192, "value_dim": 128, "dtype": "fp16"}, True),
        ({"has_sinks": True, "has_soft_cap": True}, True),
        ({"has_ranges": True, "has_tags": True}, True),
        ({"returns_max_logit": True}, True),
        ({"has_mask": True}, False),
    ],
)
def test_the_forward_of_few_rows_is_split(changes: dict[str, object], short: bool) -> None:
    forward, backward = kernel_keys(dataclasses.replace(DECODE, **changes), "sm_90a")
    assert (forward[0].kernel is Pass.FORWARD_SPLIT) == short
    assert len(forward) == 1 + short
    assert [key.kernel for key in backward] == [
        Pass.BACKWARD_PRE,
        Pass.BACKWARD,
        Pass.BACKWARD_POST,
    ]


def test_no_forward_with_a_bias_is_split() -> None:
    (forward,), backward = kernel_keys(dataclasses.replace(DECODE, bias="dense"), "sm_90a")
    assert forward.kernel is Pass.FORWARD and forward.bias
    assert backward[-1].kernel is Pass.BIAS_GRADIENT


@pytest.mark.parametrize("arch", sorted(splits.MULTIPROCESSORS))
@pytest.mark.parametrize("batch", [1, 2, 8, 16, 64, 200])
@pytest.mark.parametrize("key_length", [300, 4096, 8192, 131072])
@pytest.mark.parametrize("kv_heads", [1, 8, 32])
def test_parts_keep_the_gpu_busy(arch: str, batch: int, key_length: int, kv_heads: int) -> None:
    """The longest wave takes at most a quarter longer than if all blocks were dealt out evenly."""
    problem = dataclasses.replace(DECODE, batch=batch, key_length=key_length, kv_heads=kv_heads)
    parts, *others = splits.parts(problem, arch)
    assert others == ([1, 0, 0, 1, 0] if parts == 1 else [1, 0, parts, 0, 0])
    blocks, slots = -(-key_length // SPLIT_KEYS), splits.MULTIPROCESSORS[arch]
    assert 1 <= parts <= blocks
    each = batch * kv_heads
    waves, longest = -(-each * parts // slots), -(-blocks // parts)
    assert waves * longest <= max(1.25 * each * blocks / slots + splits.COST_BLOCKS, 1)


def test_a_plan_follows_the_sizes_of_a_device() -> None:
    """Of a mesh's devices each has a part of the batch, and divides the keys the more for it."""
    plan = make_plan(DECODE, fake_target(), None)
    assert plan.parts == splits.parts(DECODE, "sm_90a") == splits.shape(2, 1, 0)
    assert plan.resized(batch=1).parts == splits.shape(16, 1, 0)
    assert plan.resized(query_heads=8 * 70).parts == splits.shape(1, 2, 0)
    assert (
        make_plan(dataclasses.replace(DECODE, query_length=512), fake_target(), None).parts is None
    )
    largest = dataclasses.replace(plan, problem=dataclasses.replace(DECODE, returns_max_logit=True))
    assert largest.parts == splits.shape(2, 1, 32)
    assert largest.resized(query_heads=16, kv_heads=4).parts == splits.shape(4, 1, 16)


def test_one_part_of_all_keys_is_not_joined() -> None:
    plan = make_plan(DECODE, fake_target(), None)
    assert len(plan.forward_launches) == len(plan.forward) == 2
    assert plan.resized(batch=64).forward_launches == plan.forward[:1]
