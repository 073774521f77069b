"""The first day's litmus programs: right on the emulator, which notices their broken variants,
and accepted by ptxas for every architecture that runs them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.day_one.gpu import Shape
from benchmarks.day_one.litmus import Emulated, Kernel, Litmus, control, emulated, judge
from benchmarks.day_one.litmus_text import OWN
from benchmarks.day_one.outcome import Verdict
from benchmarks.day_one.parts import programs
from kernels.emulator import EmulationError

PROGRAMS = programs()
EMULATED = [litmus for litmus in PROGRAMS.values() if litmus.on_emulator]
TOLD = [litmus for litmus in EMULATED if litmus.noticed and not litmus.informs]
KERNELS = [
    (litmus, litmus.play, arch)
    for litmus in PROGRAMS.values()
    if isinstance(litmus.play, Kernel)
    for arch in litmus.archs
]
PTXAS = shutil.which("ptxas")


def name(value: object) -> str:
    return value.name if isinstance(value, Litmus) else ""


@pytest.mark.parametrize("litmus", EMULATED, ids=name)
def test_a_program_is_right(litmus: Litmus, seed: int):
    for machine in emulated(litmus, seed):
        result = judge(litmus, machine)
        expected = Verdict.MEASURED if litmus.informs else Verdict.HOLDS
        assert result.verdict == expected, result.text
        assert result.data["checks"] == result.data["expected"] > 0


@pytest.mark.parametrize("litmus", TOLD, ids=name)
def test_its_broken_variant_is_noticed(litmus: Litmus, seed: int):
    for machine in emulated(litmus, seed):
        try:
            how = "right" if litmus.play(machine, True).right else "wrong"
        except EmulationError as error:
            how = error.rule
        assert how in litmus.noticed.split("|")


def test_what_the_emulator_cannot_notice_has_a_reason():
    unnoticed = {litmus.name for litmus in PROGRAMS.values() if not litmus.noticed}
    assert unnoticed == {"cubins", "dependent-launch"}
    assert all(PROGRAMS[name].unnoticed for name in unnoticed)


def test_commits_in_any_order_are_seen(seed: int):
    """The one program that only informs sees a later commit before an earlier one, and none where
    the emulator keeps the order."""
    from kernels.emulator import Policy

    litmus = PROGRAMS["commit-order"]
    counts = [
        litmus.play(machine, False).wrong for s in range(3) for machine in emulated(litmus, s)
    ]
    assert max(counts) > 0
    kept = Emulated("sm_100f", Policy(unordered_commits=False), seed)
    assert litmus.play(kept, False).right


@pytest.mark.parametrize(
    ("litmus", "kernel", "arch"), KERNELS, ids=[f"{x.name}-{arch}" for x, _, arch in KERNELS]
)
def test_ptxas_takes_it_without_spilling(litmus: Litmus, kernel: Kernel, arch: str, tmp_path: Path):
    if PTXAS is None:
        pytest.skip("no ptxas on the PATH")
    for broken in (False, True):
        (tmp_path / "text.ptx").write_text(kernel.text(arch, broken))
        command = [PTXAS, f"-arch={arch}", "-v", "text.ptx", "-o", "text.cubin"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "0 bytes spill stores" in done.stderr
        assert not (litmus.name == "registers" and "ignored" in done.stderr)


def test_a_program_that_compares_nothing_does_not_hold():
    litmus = PROGRAMS["reuse"]
    kernel = litmus.play
    assert isinstance(kernel, Kernel)
    text = kernel.text("sm_90a", False).replace("red.relaxed.gpu.global.add.u32 [%data+4]", "//")

    class Mute(Emulated):
        whole = text

        def launch(self, text: str, shape: Shape, values: Sequence[int]) -> None:
            super().launch(self.whole, shape, values)

    count = litmus.play(Mute("sm_90a"), False)
    assert count.wrong == 0 and not count.right
    assert judge(litmus, Mute("sm_90a")).verdict == Verdict.FALLS


def test_a_wrong_word_is_shown_beside_the_right_one():
    kernel = PROGRAMS["tensor-base"].play
    count = kernel(Emulated("sm_100f"), True)
    assert count.wrong == count.checks and count.example == "0x100 instead of 0x0"
    assert OWN % 16 == 0


def test_programs_do_not_run_where_they_cannot():
    hopper = Emulated("sm_90a")
    assert judge(PROGRAMS["remote-operand"], hopper).verdict == Verdict.NOT_RUN
    assert judge(PROGRAMS["cubins"], hopper).verdict == Verdict.NOT_RUN
    assert control(PROGRAMS["registers"], hopper).text == "it may never end"
    seen = control(PROGRAMS["tensor-base"], Emulated("sm_100f"))
    assert seen.verdict == Verdict.MEASURED and seen.data["seen"]
