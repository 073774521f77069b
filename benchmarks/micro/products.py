"""Measures warpgroup products m64nNk16 of bf16 into float32."""

from __future__ import annotations

import dataclasses

import numpy as np

from benchmarks.micro.program import (
    ALONE_BYTES,
    Launch,
    Measurement,
    Program,
    cycles_of_copy,
    fill_shared,
    latency,
)

WIDTHS = (32, 48, 64, 80, 96, 128, 192, 256)
TRANSPOSED_WIDTHS = (64, 128, 256)
WARPGROUPS = (1, 2, 3)
_COPIES = 16
_REPEATS = 16
_K_STEPS = 4
_A_BYTES = 64 * 128
_SWIZZLE_128 = 1 << 62


@dataclasses.dataclass(frozen=True)
class Product:
    """The product D [64, n] += A [64, 16] B [16, n].

    Attributes:
      n: width.
      a_in_registers: whether A is in registers; otherwise it is in shared memory, K-major.
      b_transposed: whether B is N-major; otherwise it is K-major.
    """

    n: int
    a_in_registers: bool = False
    b_transposed: bool = False

    @property
    def name(self) -> str:
        """Returns its name in the list of measurements."""
        kind = "rs" if self.a_in_registers else "ss"
        return f"wgmma/m64n{self.n}k16/{kind}{' n-major b' if self.b_transposed else ''}"

    @property
    def mnemonic(self) -> str:
        """Returns the instruction."""
        return f"wgmma.mma_async.sync.aligned.m64n{self.n}k16.f32.bf16.bf16"

    @property
    def b_bytes(self) -> int:
        """Returns the bytes of B in shared memory, 64 deep: four steps of 16."""
        return -(-self.n // 64) * 64 * 128

    def setup(self) -> str:
        """Returns PTX that makes the descriptors of the four steps along K."""
        eight_rows = 1024 // 16 << 32
        columns = (
            64 * 128 // 16 << 16
        )  # the distance from one span of 64 columns to the next, where N-major
        a_layout, b_layout = _SWIZZLE_128 | eight_rows | 1 << 16, _SWIZZLE_128 | eight_rows
        b_layout |= columns if self.b_transposed else 1 << 16
        b_step = 16 * 128 if self.b_transposed else 32
        lines = [fill_shared(_A_BYTES + self.b_bytes)]
        for step in range(_K_STEPS):
            for name, layout, offset in (
                ("a", a_layout, 32 * step),
                ("b", b_layout, _A_BYTES + b_step * step),
            ):
                lines += [
                    f"add.s32 %word, %shared, {offset};",
                    "shr.u32 %word, %word, 4;",
                    "and.b32 %word, %word, 16383;",
                    "cvt.u64.u32 %wide, %word;",
                    f"or.b64 %{name}{step}, %wide, {layout};",
                ]
        # They are loaded: ptxas makes constants anew for every product, in registers that it lacks.
        lines.append("bar.sync 0;")
        lines += [f"ld.shared.b32 %f{i}, [%shared+{4 * i}];" for i in range(4)]
        lines += [f"mov.f32 %d{i}, 0f00000000;" for i in range(self.n // 2)]
        return "\n".join([*lines, "mov.b32 %word, 1;", "setp.ne.b32 %accumulate, %word, 0;"])

    def instruction(self, step: int) -> str:
        """Returns PTX of one product."""
        d = "{" + ", ".join(f"%d{i}" for i in range(self.n // 2)) + "}"
        a = "{%f0, %f1, %f2, %f3}" if self.a_in_registers else f"%a{step}"
        transposes = f"{int(self.b_transposed)}" if self.a_in_registers else "0, "
        if not self.a_in_registers:
            transposes += f"{int(self.b_transposed)}"
        return f"{self.mnemonic} {d}, {a}, %b{step}, %accumulate, 1, 1, {transposes};"

    def program(self, copies: int, alone: bool, stores: int = 0) -> Program:
        """Issues products in one group, or each in a group of its own that is waited for.

        After each, every thread stores 16 bytes `stores` times, to memory that is no operand.
        """
        own = _A_BYTES + self.b_bytes  # the address of each thread's stores
        begin = "wgmma.fence.sync.aligned;"
        end = "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;"

        store = "st.volatile.shared.v4.b32 [%own], {%own, %own, %own, %own};"

        def body(copies: int) -> str:
            products = [
                "\n".join([self.instruction(k % _K_STEPS), *[store] * stores])
                for k in range(copies)
            ]
            if alone:
                return "\n".join(f"{begin}\n{product}\n{end}" for product in products)
            return "\n".join([begin, *products, end])

        return Program(
            body=body,
            copies=copies,
            counts={self.mnemonic: 1} | ({"st.volatile.shared": stores} if stores else {}),
            registers=f"""\
.reg .b32 %own;
.reg .f32 %d<{self.n // 2}>;
.reg .b32 %f<4>, %bits;
.reg .b64 %a<{_K_STEPS}>, %b<{_K_STEPS}>;
.reg .pred %accumulate;""",
            setup=f"{self.setup()}\nshl.b32 %own, %thread, 4;\nadd.s32 %own, %own, {own};\n"
            "add.s32 %own, %own, %shared;",
            finish="mov.b32 %bits, %d0;",
            sinks=("%bits",),
            most_threads=128 * WARPGROUPS[-1],
        )


def _rate(product: Product, warpgroups: int, stores: int = 0) -> Measurement:
    program = product.program(_COPIES, alone=False, stores=stores)
    stored = f" + {stores} st.shared.v4" if stores else ""
    name = f"{product.name}{stored}/throughput/{warpgroups} warpgroups"

    def constant(words: np.ndarray, launch: Launch) -> float:
        return cycles_of_copy(words, launch, program.copies) / warpgroups

    return Measurement(name, "cycles/instruction/SM", program, _launch(warpgroups), constant)


def _launch(warpgroups: int) -> Launch:
    return Launch(threads=128 * warpgroups, repeats=_REPEATS, shared_bytes=ALONE_BYTES)


def products() -> list[Product]:
    """Returns the products that are measured."""
    return [
        *(Product(n, in_registers) for n in WIDTHS for in_registers in (False, True)),
        *(Product(n, b_transposed=True) for n in TRANSPOSED_WIDTHS),
    ]


def measurements() -> list[Measurement]:
    """Measures cycles of the tensor cores per product, and of one product from its fence to its
    wait.
    """
    found = []
    for product in products():
        found += [_rate(product, warpgroups) for warpgroups in WARPGROUPS]
        single = product.program(2, alone=True)
        found.append(latency(f"{product.name}/latency", single, _launch(1)))
    # The question is whether the products' operands and stores share one port.
    found += [
        _rate(Product(n, in_registers), 1, stores)
        for n, in_registers in ((64, False), (128, False), (128, True))
        for stores in (1, 2, 4)
    ]
    return found
