"""Rules that one program each shows: deadlocks, registers, first values, order of reductions."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from kernels.emulator import EmulationError, Policy
from tests.emulator import programs
from tests.emulator.test_litmus import INIT_FENCED, POLICIES, WAIT_0


def test_deadlock_names_what_is_missing() -> None:
    """The message names the warp that waits, its barrier and phase, and the warps that arrived."""
    body = INIT_FENCED.replace("], 1;", "], 2;") + (
        "setp.ne.u32 %p4, %r1, 0; @%p4 bra BEHIND;"
        "mbarrier.arrive.shared.b64 %rd9, [%r2], 1; BEHIND:" + WAIT_0
    )
    with pytest.raises(EmulationError) as caught:
        programs.run(body, np.zeros(1024, np.uint8), programs.Launch(threads=64))
    text = str(caught.value)
    assert "warp 0 at line" in text and "warp 1 at line" in text
    assert "phase 0 lacks 1 of 2 arrivals and 0 bytes (arrived: warp 0)" in text


def test_shared_memory_starts_as_nan() -> None:
    data = np.zeros(64, np.float32)
    body = """
    ld.shared.b32 %r5, [%r2];
    shl.b32 %r6, %r1, 2; cvt.u64.u32 %rd2, %r6; add.s64 %rd3, %rd1, %rd2;
    st.global.b32 [%rd3], %r5;
    """
    programs.run(body, data, programs.Launch(threads=64))
    assert np.isnan(data).all()


def _handed_over(change: str, count: int, raised: int, warps: int = 4) -> str:
    """The first warps change their registers to a count, all others raise theirs."""
    return f"""
    setp.ge.u32 %p1, %r1, {32 * warps};
    @%p1 bra MORE;
    setmaxnreg.{change}.sync.aligned.u32 {count};
    ret;
    MORE:
    setmaxnreg.inc.sync.aligned.u32 {raised};
    """


def test_register_file_is_shared_by_all_warps() -> None:
    """16 warps have 128 registers a thread; more for all of them there is only if some give."""
    launch = programs.Launch(threads=512)
    with pytest.raises(EmulationError, match=r"(?s)deadlock.*of which 0 are free"):
        programs.run("setmaxnreg.inc.sync.aligned.u32 136;", np.zeros(64, np.uint8), launch)
    body = _handed_over("dec", 120, 136, warps=8)
    programs.run(body, np.zeros(64, np.uint8), launch)


def test_a_thread_starts_with_no_more_registers_than_the_largest_raise() -> None:
    """384 threads could have 168 registers each; ptxas gives them what setmaxnreg.inc names."""
    launch = programs.Launch(threads=384)
    body = "setmaxnreg.inc.sync.aligned.u32 128;"
    programs.run(body, np.zeros(64, np.uint8), launch)
    programs.run(_handed_over("dec", 96, 128), np.zeros(64, np.uint8), launch)
    with pytest.raises(EmulationError, match=r"setmaxnreg\.dec 136 from 128"):
        programs.run(_handed_over("dec", 136, 128), np.zeros(64, np.uint8), launch)
    with pytest.raises(EmulationError, match=r"setmaxnreg\.inc 128 from 144"):
        programs.run(_handed_over("inc", 144, 128), np.zeros(64, np.uint8), launch)


def test_a_raise_takes_no_registers_that_the_cta_was_not_launched_with() -> None:
    """384 threads start with 168 each: 1024 of the multiprocessor's are left, and never given.

    A kernel with 32, 240 and 240 registers hung on an H200 (2026-11-24); with 24 it runs.
    """
    launch = programs.Launch(threads=384)
    programs.run(_handed_over("dec", 24, 240), np.zeros(64, np.uint8), launch)
    with pytest.raises(EmulationError, match="deadlock"):
        programs.run(_handed_over("dec", 32, 240), np.zeros(64, np.uint8), launch)


def test_ctas_beside_each_other_share_the_register_file() -> None:
    """Three of 256 threads have 80 registers a thread each, 160 for a pair of warpgroups."""
    launch = programs.Launch(threads=256, least_ctas=3)
    programs.run(_handed_over("dec", 24, 136), np.zeros(64, np.uint8), launch)
    with pytest.raises(EmulationError, match="deadlock"):
        programs.run(_handed_over("dec", 24, 144), np.zeros(64, np.uint8), launch)


TURNS = """
setp.ne.u32 %p1, %r1, 0;
@%p1 bra DONE;
mov.u32 %r5, %ctaid.x;
setp.eq.u32 %p2, %r5, 0;
@%p2 bra ADD;
TURN:
ld.{load}.gpu.global.s32 %r6, [%rd1+64];
setp.ne.u32 %p3, %r6, %r5;
@%p3 bra TURN;
ADD:
mov.b32 %r7, 0f3F800000;
red.relaxed.gpu.global.add.f32 [%rd1], %r7;
red.{reduce}.gpu.global.add.s32 [%rd1+64], 1;
DONE:
"""


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: f"{p.schedule}-{p.asynchronous}")
@pytest.mark.parametrize(
    ("load", "reduce", "legal"),
    [("acquire", "release", True), ("relaxed", "release", False), ("acquire", "relaxed", False)],
)
def test_order_of_reductions(
    load: str, reduce: str, legal: bool, policy: Policy, seed: int
) -> None:
    """CTAs that add in turn: only a release that the next one acquires orders the additions."""
    policy = dataclasses.replace(policy, ordered_reductions=True)
    launch = programs.Launch(grid=3, policy=policy, seed=seed)
    data = np.zeros(64, np.uint32)
    body = TURNS.format(load=load, reduce=reduce)
    if legal:
        programs.run(body, data, launch)
        assert data.view(np.float32)[0] == 3
        return
    with pytest.raises(EmulationError) as caught:
        programs.run(body, data, launch)
    assert caught.value.rule == "reduction-order"


@pytest.mark.parametrize(
    ("operation", "one", "result"),
    [
        ("add.u32", "1", 3),
        ("max.s32", "1", 1),
        ("min.u32", "1", 0),
        ("add.f32", "0f3F800000", None),
    ],
)
def test_integers_are_reduced_in_any_order(
    operation: str, one: str, result: int | None, seed: int
) -> None:
    policy = Policy("random", ordered_reductions=True)
    body = f"""
setp.ne.u32 %p1, %r1, 0;
mov.b32 %r7, {one};
@!%p1 red.relaxed.gpu.global.{operation} [%rd1], %r7;
"""
    launch, data = programs.Launch(grid=3, policy=policy, seed=seed), np.zeros(64, np.uint32)
    if result is not None:
        programs.run(body, data, launch)
        assert data[0] == result
        return
    with pytest.raises(EmulationError, match="reduction-order"):
        programs.run(body, data, launch)
