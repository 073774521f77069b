"""Tests the first day's orchestrator, with parts that hang, fault, die and write garbage."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.day_one import __main__ as day_one
from benchmarks.day_one import constants, report, verdicts
from benchmarks.day_one import parts as day_parts
from benchmarks.day_one.__main__ import command
from benchmarks.day_one.assumptions import ASSUMPTIONS, Assumption
from benchmarks.day_one.note import note, summary
from benchmarks.day_one.outcome import Finding, Verdict, read
from benchmarks.day_one.parts import INJECTED, ROOT, Target, injections, parts, programs, selected
from benchmarks.day_one.process import Part, Runner

WORKER = """
import json, os, signal, sys, time
record, items = sys.argv[1], sys.argv[2:]

def write(line):
    with open(record, "a") as file:
        file.write(line + "\\n")

for item in items:
    write(json.dumps({"event": "begin", "item": item}))
    if item == "hang":
        time.sleep(600)
    if item == "segv":
        os.kill(os.getpid(), signal.SIGSEGV)
    if item == "exit":
        sys.exit(7)
    if item == "silent":
        sys.exit(0)
    if item == "garbage":
        write("not JSON at all")
        write(json.dumps({"event": "end", "item": "nobody", "verdict": "holds"}))
    verdict = "fault" if item == "raised" else "holds"
    write(json.dumps({"event": "end", "item": item, "verdict": verdict, "text": "fine",
                      "seconds": 0.5, "data": {}}))
    if item == "raised":
        sys.exit(3)
    if item == "stuck":
        time.sleep(600)
if "late" in items:
    sys.exit(9)
"""


class Desk:
    """A runner of the worker above; the GPU is usable until it has been looked at some times."""

    def __init__(self, folder: Path, usable_looks: int = 1000):
        self.starts: list[tuple[str, ...]] = []
        self.looks, self._usable_looks = 0, usable_looks
        worker = folder / "worker.py"
        worker.write_text(textwrap.dedent(WORKER))

        def command(part: Part, items: Sequence[str], record: Path) -> list[str]:
            self.starts.append(tuple(items))
            return [sys.executable, str(worker), str(record), *items]

        self.runner = Runner(command, self._probe, folder, say=lambda _: None)

    def _probe(self) -> str | None:
        self.looks += 1
        return None if self.looks <= self._usable_looks else "a tiny kernel did not end"

    def verdicts(self, part: Part) -> dict[str, Verdict]:
        """Returns the verdicts of a part's items."""
        return {finding.item: finding.verdict for finding in self.runner.run(part)}


def part(*items: str, limit_s: float = 20, **options) -> Part:
    return Part("fake", items, limit_s, **options)


def test_all_items_of_a_good_part_run_in_one_process(tmp_path: Path):
    desk = Desk(tmp_path)
    found = desk.runner.run(part("a", "b"))
    assert [x.item for x in found] == ["a", "b"]
    assert {x.verdict for x in found} == {Verdict.HOLDS}
    assert found[0].seconds == 0.5 and found[0].text == "fine"
    assert desk.starts == [("a", "b")] and desk.looks == 1


def test_a_hang_is_killed_and_the_items_after_it_run(tmp_path: Path):
    desk, start = Desk(tmp_path), time.monotonic()
    found = desk.verdicts(part("a", "hang", "b", limit_s=1.5))
    assert found == {"a": Verdict.HOLDS, "hang": Verdict.HANG, "b": Verdict.HOLDS}
    assert desk.starts == [("a", "hang", "b"), ("b",)]
    assert desk.looks == 2 and time.monotonic() - start < 15


@pytest.mark.parametrize(
    ("item", "verdict", "text"),
    [
        ("segv", Verdict.FAULT, "SIGSEGV"),
        ("exit", Verdict.FAULT, "status 7"),
        ("silent", Verdict.ERROR, "ended without a result"),
    ],
)
def test_a_death_is_blamed_on_the_item_that_ran(
    tmp_path: Path, item: str, verdict: Verdict, text: str
):
    desk = Desk(tmp_path)
    found = desk.runner.run(part("a", item, "b"))
    assert [x.verdict for x in found] == [Verdict.HOLDS, verdict, Verdict.HOLDS]
    assert text in found[1].text
    assert desk.starts[1] == ("b",)


def test_an_item_that_raised_gets_a_fresh_process_for_the_next(tmp_path: Path):
    desk = Desk(tmp_path)
    found = desk.verdicts(part("raised", "b"))
    assert found == {"raised": Verdict.FAULT, "b": Verdict.HOLDS}
    assert desk.starts == [("raised", "b"), ("b",)]


def test_a_process_that_is_stuck_after_an_item_is_not_held_against_the_next(tmp_path: Path):
    desk = Desk(tmp_path)
    found = desk.runner.run(part("stuck", "b", limit_s=1.5))
    assert [(x.item, x.verdict) for x in found] == [
        ("stuck", Verdict.HOLDS),
        ("b", Verdict.HOLDS),
        ("exit", Verdict.ERROR),
    ]
    assert "after stuck its process ended with a kill" in found[2].text


def test_garbage_in_a_record_and_a_death_after_the_last_item_are_reported(tmp_path: Path):
    found = Desk(tmp_path).runner.run(part("garbage", "late"))
    assert [x.item for x in found] == ["garbage", "late", "record", "exit"]
    assert [x.verdict for x in found[2:]] == [Verdict.ERROR, Verdict.ERROR]
    assert "not JSON" in found[2].text and "status 9" in found[3].text


def test_a_process_that_cannot_start_its_work_is_an_error_not_a_loop(tmp_path: Path):
    def command(part: Part, items: Sequence[str], record: Path) -> list[str]:
        return [sys.executable, "-c", "raise SystemExit('no such module')"]

    runner = Runner(command, lambda: None, tmp_path, say=lambda _: None)
    found = runner.run(part("a", "b"))
    assert [x.verdict for x in found] == [Verdict.ERROR, Verdict.ERROR]
    assert "no such module" in found[0].text


def test_nothing_runs_on_a_gpu_that_is_not_usable_any_more(tmp_path: Path):
    desk = Desk(tmp_path, usable_looks=0)
    found = desk.runner.run(part("segv", "b"))
    assert [x.verdict for x in found] == [Verdict.FAULT, Verdict.NOT_RUN]
    assert "not usable after fake: segv" in found[1].text
    assert desk.verdicts(part("c")) == {"c": Verdict.NOT_RUN}
    assert desk.starts == [("segv", "b")]


def test_a_part_stops_when_its_time_is_over(tmp_path: Path):
    found = Desk(tmp_path).runner.run(part("a", "hang", "b", total_s=1.5))
    assert [x.verdict for x in found] == [Verdict.HOLDS, Verdict.NOT_RUN, Verdict.NOT_RUN]
    assert "were over" in found[2].text


def test_a_part_with_a_reason_does_not_run(tmp_path: Path):
    desk = Desk(tmp_path)
    found = desk.runner.run(part("a", reason="it needs hardware"))
    assert found == [Finding("fake", "a", Verdict.NOT_RUN, "it needs hardware")]
    assert not desk.starts and not desk.looks


def test_a_line_that_is_still_being_written_is_not_garbage(tmp_path: Path):
    record = tmp_path / "record"
    record.write_text('{"event": "begin", "item": "a"}\n{"event": "en')
    progress = read(record, "fake", ("a",))
    assert progress.running == "a" and not progress.garbage


def test_injected_items_come_first_in_parts_that_run():
    found = parts(Target("sm_100f", emulated=True))
    deed = injections("hang:litmus,fault:bitwise", found)
    assert deed == {"litmus": "hang", "bitwise": "fault"}
    (litmus,) = selected(found, ["litmus"])
    assert day_parts.with_injected(litmus, "hang").items == (INJECTED, *litmus.items)
    with pytest.raises(ValueError, match="'hang:speed'"):
        injections("hang:speed", found)
    with pytest.raises(ValueError, match="'burn:litmus'"):
        injections("burn:litmus", found)
    with pytest.raises(ValueError, match="no part is called 'nonsense'"):
        selected(found, ["nonsense"])


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100f"])
def test_parts_come_in_the_order_that_finds_the_simplest_fault_first(arch: str):
    names = [x.name for x in parts(Target(arch))]
    families = [x.removeprefix("selftest: ") for x in names if x.startswith("selftest")]
    assert names[:2] == ["doctor", "litmus"] and names[-1] == "controls"
    assert names.index("bitwise") > names.index(f"selftest: {families[-1]}")
    assert names.index("constants") < names.index("speed")
    expected = ["forward", "backward, fast", "backward, deterministic"]
    if arch == "sm_100f":
        kinds = ("one CTA", "pairs of CTAs")
        expected = [f"{family}, {kind}" for family in expected for kind in kinds]
        for place in (5, 3, 0):  # The forward's other design is the pair, the backward's one CTA.
            expected.insert(place + 1, f"{expected[place]}: the other design")
    assert families == expected


def test_every_part_of_the_emulator_either_runs_or_says_why_not():
    found = {x.name: x.reason for x in parts(Target("sm_100f", emulated=True))}
    assert [name for name, reason in found.items() if reason] == [
        "constants",
        "speed",
        "designs",
        "controls",
    ]
    assert {program.archs[-1] for program in programs().values()} == {"sm_100f"}


EXAMPLE = (
    Finding("doctor", "doctor", Verdict.HOLDS, "kernels: 206"),
    Finding("litmus", INJECTED, Verdict.HANG, "no progress in 45 s; its process was killed", 45),
    Finding("litmus", "reuse", Verdict.HOLDS, "0 of 9 comparisons wrong", 1.0),
    Finding("litmus", "remote-store-read", Verdict.FALLS, "3 of 9 comparisons wrong", 1.0),
    Finding("litmus", "registers", Verdict.FAULT, "GpuError: CUDA_ERROR_LAUNCH_FAILED", 1.0),
    Finding("litmus", "cubins", Verdict.NOT_RUN, "it needs hardware"),
    Finding("selftest: forward, one CTA", "bf16-d64", Verdict.HOLDS, "largest error 0.4", 2.0),
    Finding("selftest: backward, fast, one CTA", "bf16-d96", Verdict.FALLS, "dq: too large", 2.0),
    Finding("bitwise", "d64", Verdict.HOLDS, "the same bits in 30 runs", 3.0),
    Finding("constants", "clock", Verdict.MEASURED, "1905 MHz", 1.0, {"mhz": 1905.0}),
    Finding("constants", "ld.global/latency/L2", Verdict.MEASURED, "", 1.0, {"value": 400.0}),
    Finding("constants", "fma.rn.f32/latency", Verdict.MEASURED, "", 1.0, {"value": 4.01}),
    Finding(
        "speed",
        "grid-d128-causal-b4-s8192",
        Verdict.MEASURED,
        "",
        9.0,
        {"forward": {"fa4_jax": 1000.0, "jax.nn cudnn": 800.0}},
    ),
    Finding("controls", "reuse", Verdict.MEASURED, "", 1.0, {"seen": True}),
    Finding("controls", "remote-store-read", Verdict.MEASURED, "", 1.0, {"seen": False}),
)


def a_day(findings: tuple[Finding, ...] = EXAMPLE, **options) -> report.Day:
    """Makes a day on an invented Blackwell GPU."""
    facts = {"arch": "sm_100f", "emulated": False, "device": "B200", "date": "2026-12-01"}
    return report.Day(**facts, commit="abc", seconds=100.0, findings=findings, **options)


def test_the_report_says_what_falls_and_what_to_change_first():
    changes = verdicts.changes("sm_100f", EXAMPLE)
    assert changes[0].startswith("litmus, registers (fault)")
    fallen = [x for x in changes if x.startswith("assumption")]
    assert [x.split()[1] for x in fallen] == ["remote-store", "registers"]
    assert "kernels/sm100/backward_pair_rows.py" in fallen[0]
    assert "selftest: backward, fast, one CTA, bf16-d96 (falls): dq: too large" in changes
    assert changes[-1] == "kernels/emulator/timing/rates.py: BLACKWELL.global_latency 271.8 -> 400"
    assert not any(INJECTED in x or "arithmetic_latency" in x for x in changes)


def test_the_report_has_every_verdict():
    text = report.markdown(a_day())
    assert "| remote-store | **falls** | remote-store-read: 3 of 9 comparisons wrong |" in text
    assert "remote-store-read: not seen" in text and "reuse: seen" in text
    assert "| reuse | holds | reuse |" in text and "| pair-layout | not run |" in text
    assert f"- litmus: hang, {EXAMPLE[1].text} (45 s)" in text
    assert "| global_latency | 271.8 | 400 | **1.47** | assumed |" in text
    assert "| arithmetic_latency | 4 | 4 | 1.00 | assumed |" in text
    assert "| 1000 |" in text and "| 1.25 |" in text
    assert "Clock 1905 MHz; the table has 1.85 GHz." in text
    assert "- litmus, 1 items: it needs hardware" in text
    assert "emulator" not in text.split("##")[0]


def test_an_assumption_holds_only_where_all_its_programs_ran():
    """A Hopper, for example, has no products in tensor memory."""
    ran = (
        Finding("litmus", "remote-store-read", Verdict.HOLDS, "0 of 9 comparisons wrong"),
        Finding("bitwise", "d64", Verdict.HOLDS),
    )
    judged = {x.assumption.id: x for x in verdicts.judgements(ran)}
    assert judged["remote-store"].verdict == Verdict.PARTLY
    assert "not run: remote-operand, remote-operand-fenced" in judged["remote-store"].why
    assert judged["accumulation"].verdict == Verdict.PARTLY
    assert judged["product-order"].verdict == Verdict.NOT_RUN


def test_a_good_day_has_nothing_to_change():
    good = tuple(x for x in EXAMPLE if x.verdict == Verdict.HOLDS)
    assert verdicts.changes("sm_100f", good) == []
    assert "Nothing." in report.markdown(a_day(good)) and not report.bad(good)
    assert len(report.bad(EXAMPLE)) == 3


def test_an_unusable_gpu_is_said_at_the_top():
    text = report.markdown(a_day(unusable="the GPU was not usable after litmus: it hangs"))
    assert "the GPU was not usable after litmus: it hangs" in text.split("##")[0]


def test_the_json_has_everything():
    document = json.loads(json.dumps(report.to_json(a_day())))
    assert len(document["findings"]) == len(EXAMPLE)
    by_id = {x["id"]: x for x in document["assumptions"]}
    assert by_id["remote-store"]["verdict"] == "falls" and by_id["reuse"]["verdict"] == "holds"
    assert by_id["accumulation"]["verdict"] == "falls", "a case of the selftest fails"
    latency = next(x for x in document["constants"] if x["field"] == "global_latency")
    assert latency["assumed"] and latency["measured"] == 400.0


def test_every_assumption_has_a_program_or_says_what_decides_it():
    known = programs()
    tested = [name for assumption in ASSUMPTIONS for name in assumption.litmus]
    assert set(tested) == set(known), "a program without an assumption, or the other way round"
    for assumption in ASSUMPTIONS:
        assert bool(assumption.litmus) != bool(assumption.instead)
        assert bool(assumption.instead) == bool(assumption.parts)
        informs = assumption.litmus and all(known[x].informs for x in assumption.litmus)
        assert bool(assumption.relied) != bool(informs)
    assert len({assumption.id for assumption in ASSUMPTIONS}) == len(ASSUMPTIONS)
    assert all(litmus.refuted and litmus.broken.startswith("with") for litmus in known.values())


@pytest.mark.parametrize("assumption", ASSUMPTIONS, ids=lambda x: x.id)
def test_files_and_names_of_an_assumption_exist(assumption: Assumption):
    text = f"{assumption.relied} {assumption.change} {assumption.evidence}"
    for path in re.findall(r"\b(?:kernels|fa4_jax|docs|benchmarks)/[\w/]+\.\w+", text):
        assert (ROOT / path).exists(), path
    sources = "".join(x.read_text() for x in (ROOT / "kernels").rglob("*.py"))
    sources += "".join(x.read_text() for x in (ROOT / "fa4_jax").rglob("*.py"))
    for name in re.findall(r"`(\w+)`", f"{assumption.relied} {assumption.change}"):
        assert re.search(rf"\b{name}\b", sources), name


def test_the_list_of_assumptions_is_made_of_the_table():
    assert (ROOT / "benchmarks" / "results" / "assumptions.md").read_text() == note()
    assert f"\n{summary()}\n" in (ROOT / "docs" / "emulator" / "rules.md").read_text()


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100f"])
def test_every_assumed_constant_has_a_microbenchmark_or_a_reason(arch: str):
    own = constants.table(arch)
    known = constants.sources(arch)
    assert own.assumed <= known.keys() | constants.NOT_MEASURED.keys()
    assert not known.keys() & constants.NOT_MEASURED.keys()
    names = {name for needed, _ in known.values() for name in needed}
    measured = constants.measurements(arch).keys()
    assert names <= measured
    if arch == "sm_100f":
        assert not any("wgmma" in name for name in measured), "Blackwell has no wgmma"
    else:
        assert names == measured


def test_products_that_take_longer_than_the_model_says_are_named():
    """128 x 64 x 16 takes the 48 cycles of its operands, a pair's 256 x 256 x 16 the 128 of its
    FLOPs.
    """
    found = tuple(
        Finding("constants", f"{name}/throughput", Verdict.MEASURED, "", 1.0, {"value": value})
        for name, value in (
            ("tcgen05.mma/m128n64k16", 63.0),
            ("tcgen05.mma/pair/m256n256k16", 130.0),
        )
    )
    text = report.markdown(a_day(found))
    assert "| tcgen05.mma/m128n64k16 | 48 | 63.0 | **1.31** |" in text
    assert "| tcgen05.mma/pair/m256n256k16 | 128 | 130.0 | 1.02 |" in text
    (line,) = verdicts.changes("sm_100f", found)
    assert "1 shapes of products take longer" in line and "63 cycles instead of 48" in line
    assert constants.shapes("sm_90a", {}) == []


def test_constants_of_an_h200_are_the_table():
    """From the file that the table is based on, every field comes out as in the table.

    The arrival of the CTA's scope is younger than that file; the table has a published value.
    """
    path = ROOT / "benchmarks" / "results" / "nvidia-h200-microbenchmarks.json"
    values = {x["name"]: x["value"] for x in json.loads(path.read_text())["measurements"]}
    found = constants.constants("sm_90a", values)
    assert {constant.field for constant in found if constant.measured is None} == {
        "cluster_latency"
    }
    for constant in found:
        if constant.measured is None:
            continue
        assert abs((constant.ratio or 0) - 1) < 0.02, constant
    missing = constants.constants("sm_90a", {})
    assert all(x.measured is None and x.why.startswith("no value of") for x in missing)


def test_the_emulator_needs_no_compiler_of_kernels():
    """The machine with the GPU has no CuTe-DSL."""
    script = """
import sys
sys.modules["cutlass"] = None
from benchmarks.day_one import __main__, child, bitwise, constants, families, speed
from kernels import emulator
assert not [name for name in sys.modules if name.startswith("kernels.build")]
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_real_part_survives_a_fault_made_on_purpose(tmp_path: Path):
    """The command's processes run on the emulator: the injected item dies, the next one runs."""
    target = Target("sm_100f", emulated=True, seed=3)
    litmus = Part("litmus", (INJECTED, "reuse", "cubins"), limit_s=60)

    def line(part: Part, items: Sequence[str], record: Path) -> list[str]:
        words = command(target, {"litmus": "fault"}, part)
        return [*words, "--record", str(record), *items]

    runner = Runner(line, lambda: None, tmp_path, lambda _: None, target.environment())
    found = runner.run(litmus)
    assert [x.verdict for x in found] == [Verdict.FAULT, Verdict.HOLDS, Verdict.NOT_RUN]
    assert "SIGSEGV" in found[0].text and "under 3 policies" in found[1].text


def test_the_command_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(day_one, "STAND_IN", ROOT / "build" / "nowhere")
    with pytest.raises(SystemExit):
        day_one.main(["--arch-emulated", "sm_100f"])
    assert "build/nowhere/libemulated_cuda.so is missing: run make emulated" in (
        capsys.readouterr().err
    )
    monkeypatch.setattr(day_one, "look", lambda _: (None, "cuInit: CUDA_ERROR_NO_DEVICE"))
    with pytest.raises(SystemExit):
        day_one.main([])
    assert "no GPU that works: cuInit: CUDA_ERROR_NO_DEVICE" in capsys.readouterr().err
    for capability, text in (([8, 0], "8.0: 9.0 or 10.x is needed"), ([12, 0], "12.0: 9.0")):
        answer = {"device": "other", "capability": capability}
        monkeypatch.setattr(day_one, "look", lambda _, answer=answer: (answer, ""))
        with pytest.raises(SystemExit):
            day_one.main([])
        assert text in capsys.readouterr().err


def test_a_whole_day_writes_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Two parts of the command run, with their processes replaced by the worker above."""
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)

    class Faked(Runner):
        def __init__(self, line, probe, folder, environment):
            def swapped(part: Part, items: Sequence[str], record: Path) -> list[str]:
                assert "--seed" in line(part, items, record)
                return [sys.executable, str(worker), str(record), *items]

            super().__init__(swapped, lambda: None, folder, lambda _: None)

    monkeypatch.setattr(day_one, "Runner", Faked)
    monkeypatch.setattr(day_one, "parts", lambda _: [part("doctor"), Part("litmus", ("segv",))])
    found = Target("sm_100f", seed=5), "B200"
    monkeypatch.setattr(day_one, "find_target", lambda *_: found)
    assert day_one.main(["--output", str(tmp_path / "day")]) == 1
    text = (tmp_path / "day" / "report.md").read_text()
    assert text.startswith("# First day: B200") and "--seed 5" in text
    assert "litmus, segv (fault): its process ended with SIGSEGV" in text
    document = json.loads((tmp_path / "day" / "report.json").read_text())
    assert [x["verdict"] for x in document["findings"]] == ["holds", "fault"]
    assert len(json.loads((tmp_path / "day" / "findings.json").read_text())) == 2
