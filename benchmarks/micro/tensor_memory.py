"""Measures tensor memory and tcgen05 products of one CTA (sm_100f alone)."""

from __future__ import annotations

import dataclasses

import numpy as np

from benchmarks.micro.program import (
    ALONE_BYTES,
    Launch,
    Measurement,
    Program,
    cycles_of_copy,
    elected,
    fill_shared,
    init_barriers,
    latency,
    wait,
)

WIDTHS = (64, 96, 128, 192, 256)
PAIR_WIDTHS = (64, 128, 256)
_LOADED = 32
_REPEATS = 64
_ROWS = 128
_A_BYTES, _B_BYTES = _ROWS * 128, 256 * 128
_TILES = 1024  # where operands start in shared memory, after barrier and address
_LAYOUT = 1 << 62 | 1 << 46 | 1024 // 16 << 32 | 1 << 16
"""The layout of rows of 128 bytes, swizzled: all operands are ones, wherever they lie."""

_ALLOCATE = """\
setp.eq.b32 %first, %warp, 0;
@%first tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%shared+64], 512;
@%first tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
bar.sync 0;
ld.shared.b32 %tensor, [%shared+64];
and.b32 %lanes, %warp, 3;
shl.b32 %lanes, %lanes, 21;
add.s32 %lanes, %lanes, %tensor;"""
_FREE = """\
bar.sync 0;
@%first tcgen05.dealloc.cta_group::1.sync.aligned.b32 %tensor, 512;"""
_REGISTERS = ".reg .b32 %tensor, %lanes;\n.reg .pred %first;"


def _load(columns: int, first: int) -> str:
    values = ", ".join(f"%v{first + i}" for i in range(columns))
    return f"tcgen05.ld.sync.aligned.32x32b.x{columns}.b32 {{{values}}}, [%column+{first}];"


def _loads(columns: int, of_one_wait: int, copies: int, chained: bool) -> Program:
    """A copy consists of some loads, the wait for them, and a use of all values, or ptxas drops the
    loads: each address is the one before it plus the value found there, which is 0, or stores that
    are jumped over.
    """
    values = columns * of_one_wait
    zeros = ", ".join(["%zero"] * columns)
    fill = "\n".join(
        f"tcgen05.st.sync.aligned.32x32b.x{columns}.b32 [%lanes+{columns * i}], {{{zeros}}};"
        for i in range(of_one_wait)
    )
    loads = "\n".join(_load(columns, columns * i) for i in range(of_one_wait))
    stores = "\n".join(f"st.volatile.shared.b32 [%shared+{4 * i}], %v{i};" for i in range(values))

    def copy(label: str) -> str:
        use = f"@!%never bra {label};\n{stores}\n{label}:"
        if chained:
            use = "add.s32 %column, %column, %v0;"
        return f"{loads}\ntcgen05.wait::ld.sync.aligned;\n{use}"

    return Program(
        body=lambda copies: "\n".join(copy(f"SKIP_{copies}_{k}") for k in range(copies)),
        copies=copies,
        counts={"tcgen05.ld": of_one_wait},
        registers=f"{_REGISTERS}\n.reg .b32 %v<{values}>, %zero, %column;\n.reg .pred %never;",
        setup=f"{_ALLOCATE}\nmov.b32 %zero, 0;\nmov.b32 %column, %lanes;\n"
        f"setp.eq.u32 %never, %repeats, 0;\n{fill}\ntcgen05.wait::st.sync.aligned;",
        finish=_FREE,
        sinks=("%column",),
        most_threads=128,
    )


def _throughput() -> Measurement:
    program, threads = _loads(_LOADED, 4, 4, chained=False), 128

    def constant(words: np.ndarray, launch: Launch) -> float:
        num_bytes = program.instructions * threads // 32 * _LOADED * 128
        return num_bytes / cycles_of_copy(words, launch, program.copies)

    launch = Launch(threads=threads, repeats=_REPEATS, shared_bytes=ALONE_BYTES)
    return Measurement(
        "tcgen05.ld/x32/throughput/4 warps", "bytes/cycle/SM", program, launch, constant
    )


@dataclasses.dataclass(frozen=True)
class Product:
    """The product D [m, n] (+)= A [m, 16] B [16, n], operands in shared memory, by one CTA or a
    pair.
    """

    m: int
    n: int
    ctas: int = 1

    @property
    def name(self) -> str:
        """Returns its name in the list of measurements."""
        return f"tcgen05.mma/{'pair/' if self.ctas == 2 else ''}m{self.m}n{self.n}k16"

    @property
    def flops(self) -> int:
        """Returns the FLOPs of one instruction."""
        return 2 * self.m * self.n * 16

    @property
    def shared_bytes(self) -> int:
        """Returns the bytes that one instruction reads from shared memory."""
        return (self.m + self.n) * 16 * 2

    def instruction(self, k: int) -> str:
        """Returns PTX of one product."""
        descriptor = 1 << 4 | 1 << 7 | 1 << 10 | self.n // 8 << 17 | self.m // 16 << 24
        return (
            f"tcgen05.mma.cta_group::{self.ctas}.kind::f16 [%tensor], %a{k % 4}, %b{k % 4}, "
            f"{descriptor}, %more;"
        )

    def commit(self) -> str:
        """Returns PTX of an arrival when products are complete; a pair's even CTA alone waits for
        it.
        """
        name = f"tcgen05.commit.cta_group::{self.ctas}.mbarrier::arrive::one.shared::cluster"
        return f"{name}.b64 [%shared];"

    def program(self, alone: bool, copies: int) -> Program:
        """Issues products one after the other, or each with a commit that is waited for."""
        return Program(
            body=self._alone if alone else self._together,
            copies=copies,
            counts={"tcgen05.mma": 1},
            registers=f"{_REGISTERS}\n.reg .b64 %a<4>, %b<4>;\n.reg .pred %more, %even;",
            setup=self._setup(),
            finish=_of(_FREE, self.ctas),
            cluster=self.ctas,
        )

    def _setup(self) -> str:
        # The operands are filled from the start of shared memory, before anything else is there.
        lines = [fill_shared(_TILES + _A_BYTES + _B_BYTES), "bar.sync 0;"]
        lines += [_of(_ALLOCATE, self.ctas), init_barriers(1)]
        lines += ["mov.u32 %word, %cluster_ctarank;", "setp.eq.b32 %even, %word, 0;"]
        lines += ["mov.b32 %word, 1;", "setp.ne.b32 %more, %word, 0;"]
        for k in range(4):
            for name, offset in (("a", _TILES + 32 * k), ("b", _TILES + _A_BYTES + 32 * k)):
                lines += [
                    f"add.s32 %word, %shared, {offset};",
                    "shr.u32 %word, %word, 4;",
                    "cvt.u64.u32 %wide, %word;",
                    f"or.b64 %{name}{k}, %wide, {_LAYOUT};",
                ]
        if self.ctas == 2:
            lines += ["barrier.cluster.arrive.aligned;", "barrier.cluster.wait.aligned;"]
        return "\n".join(lines)

    def _alone(self, copies: int) -> str:
        return "\n".join(
            f"{elected(self.instruction(k), self.commit())}\n"
            f"{wait('%shared', k % 2, f'WAIT_{copies}_{k}')}"
            for k in range(copies)
        )

    def _together(self, copies: int) -> str:
        """Commits and waits twice an iteration in either loop, so that the parities are constants.

        The odd CTA of a pair has nothing to do: it would miss phases that the even one passes.
        """
        products = elected(*(self.instruction(k) for k in range(copies)), self.commit())
        text = (
            f"{products}\n{wait('%shared', 0, f'WAIT_{copies}_0')}\n{elected(self.commit())}\n"
            f"{wait('%shared', 1, f'WAIT_{copies}_1')}"
        )
        if self.ctas == 2:
            text = f"@!%even bra ODD_{copies};\n{text}\nODD_{copies}:"
        return text


def _of(text: str, ctas: int) -> str:
    """Allocates or releases for a CTA or for a pair."""
    if ctas == 1:
        return text
    together = "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;"
    return text.replace("cta_group::1", "cta_group::2").replace("bar.sync 0;", together)


def products() -> list[Product]:
    """Returns the shapes that our kernels use."""
    single = [Product(128, n) for n in WIDTHS]
    return single + [Product(m, n, 2) for m in (128, 256) for n in PAIR_WIDTHS]


def measurements() -> list[Measurement]:
    """Measures what of Blackwell could not be measured on a Hopper GPU."""
    launch = Launch(threads=32, repeats=_REPEATS, shared_bytes=ALONE_BYTES)
    chain = _loads(1, 1, 8, chained=True)
    found = [_throughput(), latency("tcgen05.ld/x1/latency", chain, launch)]
    for product in products():
        of_product = dataclasses.replace(launch, ctas=product.ctas)
        program = product.program(alone=False, copies=16)
        found.append(latency(f"{product.name}/throughput", program, of_product))
    shortest = Product(128, 64)
    program = shortest.program(alone=True, copies=4)
    return [*found, latency(f"{shortest.name}/latency", program, launch)]
