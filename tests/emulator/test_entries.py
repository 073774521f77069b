"""The table of instructions: each has one entry, and what adds entries up knows no mnemonic."""

from __future__ import annotations

import ast
import pathlib

import pytest

from kernels.emulator.instructions import binding
from kernels.emulator.ptx import arithmetic
from kernels.emulator.ptx.costs import QUANTITIES
from kernels.emulator.timing import plans

EMULATOR = pathlib.Path(binding.__file__).parents[1]
GENERAL = (EMULATOR / "ptx/costs.py", *sorted((EMULATOR / "timing").glob("*.py")))
"""Files that know instructions by their costs alone."""


def of_a_mnemonic(text: str) -> list[str]:
    """Expressions by which a file reads an instruction's mnemonic instead of counting it."""
    return [
        ast.unparse(node)
        for node in ast.walk(ast.parse(text))
        if (isinstance(node, ast.Attribute) and node.attr in ("opcode", "words"))
        or (isinstance(node, ast.Compare) and ".mnemonic" in ast.unparse(node))
    ]


@pytest.mark.parametrize("path", GENERAL, ids=lambda path: path.stem)
def test_what_adds_up_costs_reads_no_mnemonic(path: pathlib.Path) -> None:
    assert of_a_mnemonic(path.read_text()) == []


@pytest.mark.parametrize(
    "text", ["x.opcode", "x.words[0] == 'ld'", "x.mnemonic in table", "x.mnemonic == 'ret'"]
)
def test_a_mnemonic_that_is_read_is_noticed(text: str) -> None:
    assert of_a_mnemonic(text)


@pytest.mark.parametrize(
    ("mnemonic", "entry"),
    [
        ("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32", "st.async.*"),
        ("st.shared.b32", "st.*"),
        ("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group", "cp.async.bulk.tensor.*"),
        ("cp.async.bulk.wait_group.read", "cp.async.bulk.wait_group.read"),
        ("cp.async.bulk.global.shared::cta.bulk_group", "cp.async.bulk.*"),
        ("bar.sync", "bar.sync.*"),
        ("bar.warp.sync", "bar.warp.sync"),
        ("mov.b128", "mov.b128"),
        ("tcgen05.wait::st.sync.aligned", "tcgen05.wait::st.sync.aligned"),
        ("tcgen05.wait::st.sync.aligned.more", None),
        ("frobnicate.b32", None),
    ],
)
def test_the_entry_that_names_most_words_is_found(mnemonic: str, entry: str | None) -> None:
    found = binding.entry_of(tuple(mnemonic.replace("::", ":").split(".")))
    assert (found and found.mnemonic) == entry


def test_the_table_holds_the_entries_of_every_file() -> None:
    written = [
        ast.unparse(node.args[0])
        for path in (EMULATOR / "instructions").glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Entry"
    ]
    found = {entry.mnemonic for entry in binding.ENTRIES.values()}
    assert {ast.literal_eval(mnemonic) for mnemonic in written} == found


def test_costs_of_arithmetic_are_of_quantities_and_pipes_that_exist() -> None:
    costs = [operation.cost for operation in arithmetic.OPERATIONS.values()]
    assert {name for cost in costs for name in (*cost.per_lane, *cost.per_warp)} <= set(QUANTITIES)
    assert {cost.demand.pipe for cost in costs} - {"free"} <= plans.PIPES.keys()
