"""Measures latency and throughput of arithmetic, by instruction."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from benchmarks.micro.program import Launch, Measurement, Program, each, latency, rate

WARPS = (1, 4, 8, 16)
_CHAINS = 8
_COPIES = 8
_REPEATS = 64
_LATENCY_COPIES = 32

_REGISTERS = """\
.reg .b32 %a<8>, %b<8>, %c<8>;
.reg .pred %q<8>;"""

# Operands whose values ptxas does not know, near 1.0 as floats.
_SETUP = "\n".join(
    [
        *(f"mad.lo.s32 %a{i}, %thread, 24, {0x3F800000 + i};" for i in range(8)),
        *(f"mad.lo.s32 %b{i}, %thread, 40, {0x3F810000 + i};" for i in range(8)),
        *(f"mad.lo.s32 %c{i}, %thread, 56, {0x3F820000 + i};" for i in range(8)),
        *(f"and.b32 %word, %thread, {1 << i};\nsetp.ne.b32 %q{i}, %word, 0;" for i in range(4)),
    ]
)


@dataclasses.dataclass(frozen=True)
class Operation:
    """An instruction that is measured in chains, each link of which depends on the one before.

    Attributes:
      mnemonic: the instruction's mnemonic.
      write: PTX of link `copy` of chain `chain`. Operands change from link to link where ptxas
        could otherwise shorten the chain.
      label: the name, where it is not the mnemonic.
      chains: number of independent chains for throughput; predicates allow four.
      sinks_predicates: the chains run through %q instead of %a.
    """

    mnemonic: str
    write: Callable[[int, int], str]
    label: str = ""
    chains: int = _CHAINS
    sinks_predicates: bool = False

    @property
    def name(self) -> str:
        """Returns its name in the list of measurements."""
        return self.label or self.mnemonic


def _reciprocal(chain: int, copy: int) -> str:
    # ptxas would leave out a reciprocal's reciprocal that has nothing else in its chain.
    a = f"%a{chain}"
    return f"rcp.approx.ftz.f32 {a}, {a};\nadd.f32 {a}, {a}, %b{copy % 8};"


def _add_integers(chain: int, copy: int) -> str:
    a, c = f"%a{chain}", f"%c{chain}"
    return f"add.s32 {c}, {c}, {a};" if copy % 2 else f"add.s32 {a}, {a}, {c};"


def _binary(mnemonic: str) -> Operation:
    def write(chain: int, copy: int) -> str:
        return f"{mnemonic} %a{chain}, %a{chain}, %b{copy % 8};"

    return Operation(mnemonic, write)


OPERATIONS = (
    Operation("fma.rn.f32", lambda i, k: f"fma.rn.f32 %a{i}, %a{i}, %b{k % 8}, %c{k % 8};"),
    _binary("add.f32"),
    _binary("mul.f32"),
    _binary("max.f32"),
    _binary("max.NaN.f32"),
    Operation("add.s32", _add_integers),
    Operation("lop3.b32", lambda i, k: f"lop3.b32 %a{i}, %a{i}, %b{k % 8}, %c{k % 8}, 0x6A;"),
    Operation("selp.b32", lambda i, k: f"selp.b32 %a{i}, %a{i}, %b{k % 8}, %q{k % 4};"),
    Operation(
        "setp.lt.and.f32",
        lambda i, k: f"setp.lt.and.f32 %q{i}, %a{i}, %b{k % 8}, %q{i};",
        chains=4,
        sinks_predicates=True,
    ),
    Operation("ex2.approx.ftz.f32", lambda i, _: f"ex2.approx.ftz.f32 %a{i}, %a{i};"),
    Operation("rcp.approx.ftz.f32", _reciprocal, label="rcp.approx.ftz.f32+add.f32"),
    Operation("lg2.approx.ftz.f32", lambda i, _: f"lg2.approx.ftz.f32 %a{i}, %a{i};"),
    _binary("cvt.rn.bf16x2.f32"),
    Operation(
        "shfl.sync.bfly.b32",
        lambda i, k: f"shfl.sync.bfly.b32 %a{i}, %a{i}, {1 << k % 5}, 31, -1;",
    ),
)

_BY_NAME = {operation.mnemonic: operation for operation in OPERATIONS}

MIXES = {
    # The question is whether two kinds of arithmetic overlap, or the issue of instructions binds.
    "fma+lop3": ("fma.rn.f32", "lop3.b32") * 4,
    "ex2+3 fma": ("ex2.approx.ftz.f32", *("fma.rn.f32",) * 3) * 2,
    "ex2+7 fma": ("ex2.approx.ftz.f32", *("fma.rn.f32",) * 7),
    "cvt+3 fma": ("cvt.rn.bf16x2.f32", *("fma.rn.f32",) * 3) * 2,
}
"""Instructions of eight chains that run side by side."""


def _program(kinds: tuple[Operation, ...], copies: int) -> Program:
    """Runs chains side by side; chain i consists of instruction kinds[i]."""
    finish, sinks = "", [f"%a{i}" for i in range(8)] + [f"%c{i}" for i in range(8)]
    if kinds[0].sinks_predicates:
        finish = "\n".join(f"selp.b32 %b{i}, 1, 0, %q{i};" for i in range(len(kinds)))
        sinks = [f"%b{i}" for i in range(len(kinds))]
    counts: dict[str, int] = {}
    for kind in kinds:
        counts[kind.mnemonic] = counts.get(kind.mnemonic, 0) + 1
    return Program(
        body=each(lambda k: "\n".join(kind.write(i, k) for i, kind in enumerate(kinds))),
        copies=copies,
        counts=counts,
        registers=_REGISTERS,
        setup=_SETUP,
        finish=finish,
        sinks=tuple(sinks),
    )


def _select_after_compare() -> Program:
    """Alternates a comparison and the selection that it decides, in one chain."""

    def copy(k: int) -> str:
        compare = f"setp.lt.f32 %q5, %a0, %b{k % 8};"
        return f"{compare}\nselp.b32 %a0, %c{k % 8}, %b{(k + 3) % 8}, %q5;"

    return Program(
        body=each(copy),
        copies=_LATENCY_COPIES // 2,
        counts={"setp.lt.f32": 1, "selp.b32": 1},
        registers=_REGISTERS,
        setup=_SETUP,
        sinks=("%a0",),
    )


def _moves() -> Program:
    """Rotates registers in a ring: the only moves that ptxas cannot leave out."""
    ring = 2 * 2 * _CHAINS

    def body(copies: int) -> str:
        moves = [f"mov.b32 %ring{i}, %ring{i + 1};" for i in range(copies)]
        return "\n".join(["mov.b32 %word, %ring0;", *moves, f"mov.b32 %ring{copies}, %word;"])

    return Program(
        body=body,
        copies=ring,
        counts={"mov.b32": 1},
        registers=f".reg .b32 %ring<{2 * ring + 1}>;",
        setup="\n".join(f"add.s32 %ring{i}, %thread, {i * i};" for i in range(2 * ring + 1)),
        sinks=tuple(f"%ring{i}" for i in range(2 * ring + 1)),
    )


def _throughputs(name: str, program: Program) -> list[Measurement]:
    return [
        rate(
            f"{name}/throughput/{warps} warps",
            "lanes",
            program,
            Launch(threads=32 * warps, repeats=_REPEATS),
            per_instruction=32,
        )
        for warps in WARPS
    ]


def measurements() -> list[Measurement]:
    """Measures the latency of each operation in one warp, and the throughput of 1 to 16 warps."""
    one_warp = Launch(threads=32, repeats=_REPEATS)
    found = []
    for operation in OPERATIONS:
        chain = _program((operation,), _LATENCY_COPIES)
        found.append(latency(f"{operation.name}/latency", chain, one_warp))
        wide = _program((operation,) * operation.chains, _COPIES)
        found += _throughputs(operation.name, wide)
    found.append(latency("setp+selp/latency", _select_after_compare(), one_warp))
    found += _throughputs("mov.b32", _moves())
    for name, kinds in MIXES.items():
        found += _throughputs(name, _program(tuple(_BY_NAME[kind] for kind in kinds), _COPIES))
    return found
