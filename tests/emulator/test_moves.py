"""Where synchronising instructions move, and what stays as it was."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from kernels import emulator
from kernels.emulator import EmulationError, Policy
from kernels.emulator.ptx.parser import parse
from tests.emulator import programs
from tests.emulator.moves import moves

WAIT = """
{ .reg .pred over; WAIT: mbarrier.try_wait.parity.shared.b64 over, [%r2], 0; @!over bra WAIT; }
"""
LEADER = "elect.sync _|%p1, -1; @!%p1 bra L; mbarrier.arrive.shared.b64 _, [%r2]; L:"
LOOP = """
AGAIN: st.shared.b32 [%r2+8], %r1; add.s32 %r5, %r5, 1; setp.lt.s32 %p1, %r5, 4; @%p1 bra AGAIN;
"""
COPY = """
shl.b32 %r5, %r1, 2; add.s32 %r6, %r5, %r2;
st.shared.b32 [%r6], %r1;
fence.proxy.async.shared::cta;
bar.sync 0;
setp.ne.u32 %p1, %r1, 0;
@%p1 bra DONE;
cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r2], 128;
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;
DONE:
"""


def program(body: str) -> str:
    """A kernel of one warp, for Blackwell if it has to be."""
    target = "sm_100a" if "tcgen05" in body else "sm_90a"
    head = programs.HEAD.format(threads=32).replace("sm_90a", target)
    return head + body + programs.TAIL


def moved(body: str) -> list[tuple[str, str]]:
    """What moves, and how."""
    return [(move.instruction.mnemonic, move.change) for move in moves(program(body))]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        pytest.param(
            "st.shared.b32 [%r2], %r1; bar.sync 0; ld.shared.b32 %r3, [%r2];",
            [
                ("bar.sync", "moved up over st.shared.b32"),
                ("bar.sync", "moved down over ld.shared.b32"),
            ],
            id="both sides",
        ),
        pytest.param(
            "fence.proxy.async; add.s32 %r3, %r2, %r1; bar.sync 0;",
            [("fence.proxy.async", "moved down over bar.sync")],
            id="neighbours change places once",
        ),
        pytest.param(
            "bar.sync 0; ld.global.b32 %r3, [%rd1]; mbarrier.arrive.shared.b64 _, [%r3];",
            [("bar.sync", "moved down over ld.global.b32")],
            id="an operand that the neighbour loads",
        ),
        pytest.param(
            "mbarrier.init.shared.b64 [%r2], 1; mbarrier.init.shared.b64 [%r2+8], 1;",
            [],
            id="initialisations",
        ),
        pytest.param("bar.sync 0; add.s32 %r3, %r2, %r1;", [], id="arithmetic is no neighbour"),
        pytest.param(
            "add.f32 %r4, %r3, %r3; wgmma.wait_group.sync.aligned 0; mul.f32 %r5, %r3, %r3;",
            [
                ("wgmma.wait_group.sync.aligned", "moved up over arithmetic"),
                ("wgmma.wait_group.sync.aligned", "moved down over arithmetic"),
            ],
            id="but of what orders registers",
        ),
        pytest.param(
            f"{WAIT} ld.shared.b32 %r3, [%r2+8];",
            [("mbarrier.try_wait.parity.shared.b64", "moved down over ld.shared.b32")],
            id="a wait with its loop",
        ),
        pytest.param(
            f"{WAIT} {WAIT.replace('%r2', '%r3')} tcgen05.fence::after_thread_sync;",
            [
                (
                    "mbarrier.try_wait.parity.shared.b64",
                    "moved down over tcgen05.fence::after_thread_sync",
                )
            ],
            id="a wait over a fence, but not over another wait",
        ),
        pytest.param(
            f"ld.shared.b32 %r3, [%r2+8]; {LEADER}",
            [("mbarrier.arrive.shared.b64", "moved up over ld.shared.b32")],
            id="an arrival with its branch",
        ),
        pytest.param(
            f"{LOOP} fence.proxy.async;",
            [("fence.proxy.async", "moved up over st.shared.b32")],
            id="over a loop",
        ),
        pytest.param(
            "@%p1 bra L; fence.proxy.async; L: bar.sync 0; @%p2 bra L;",
            [],
            id="not over a label that others branch to",
        ),
    ],
)
def test_what_moves(body: str, expected: list[tuple[str, str]]) -> None:
    assert moved(body) == expected


@pytest.mark.parametrize(
    ("body", "order"),
    [
        pytest.param(
            f"ld.shared.b32 %r3, [%r2+8];\nadd.s32 %r4, %r1, 1;\n{LEADER}",
            ["elect", "bra", "mbarrier", "ld", "add"],
            id="up, with the arithmetic that it needs alone",
        ),
        pytest.param(
            "ld.shared.b32 %r3, [%r2];\nadd.s32 %r4, %r2, 8;\nmbarrier.arrive.shared.b64 _, [%r4];",
            ["add", "mbarrier", "ld"],
            id="up, with its address",
        ),
        pytest.param(
            "ld.acquire.gpu.b32 %r3, [%rd1];\nadd.s64 %rd1, %rd1, 8;\nst.shared.b32 [%r2], %r1;",
            ["st", "ld", "add"],
            id="down, with what changes its address",
        ),
    ],
)
def test_registers_stay_defined(body: str, order: list[str]) -> None:
    (move,) = moves(program(body))
    text = move.text(program(body))
    kernel = parse(text).kernels["test"]
    opcodes = [instruction.opcode for instruction in kernel.instructions]
    assert opcodes[3:-1] == order
    assert text.count("\n") == program(body).count("\n")


def test_instructions_stay_the_same() -> None:
    """Each move changes the order of the text, and nothing else."""
    body = f"{WAIT} st.shared.b32 [%r2+8], %r1; fence.proxy.async; bar.sync 0; {LEADER} {LOOP}"
    found = [move.text(program(body)) for move in moves(program(body))]
    before = parse(program(body)).kernels["test"].instructions
    assert len(found) == 4
    for text in found:
        after = parse(text).kernels["test"].instructions
        assert Counter(i.text for i in after) == Counter(i.text for i in before)
        assert [i.text for i in after] != [i.text for i in before]


def rule(text: str) -> str:
    """What a launch of one warp breaks, or ""."""
    try:
        emulator.launch(
            text,
            "test",
            grid=(1, 1, 1),
            block=(32, 1, 1),
            dynamic_smem=1024,
            params=[programs.ADDRESS.to_bytes(8, "little")],
            memory={programs.ADDRESS: np.zeros(32, np.uint32)},
            policy=Policy(),
        )
    except EmulationError as error:
        return error.rule
    return ""


def test_a_moved_fence_is_noticed() -> None:
    """The store must come before the fence, and the fence before the barrier of the writers."""
    text = program(COPY)
    assert not rule(text)
    rules = {
        move.change: rule(move.text(text))
        for move in moves(text)
        if move.instruction.opcode == "fence"
    }
    assert rules == {
        "moved up over st.shared.b32": "proxy-fence",
        "moved down over bar.sync": "proxy-fence",
    }
