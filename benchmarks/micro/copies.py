"""Measures TMA: latency of one tile, bandwidth with several in flight; bulk copies of a row."""

from __future__ import annotations

import dataclasses

import numpy as np

from benchmarks.micro.program import (
    ALONE_BYTES,
    PER_SM,
    Launch,
    Measurement,
    Program,
    Tensor,
    cycles_of_copy,
    each,
    elected,
    fill_shared,
    init_barriers,
    latency,
    wait,
)

COLUMNS = 64
"""The width of a tile: 128 bytes of bf16, one span of the swizzle."""
ROW_BYTES = 2 * COLUMNS
DATA_BYTES = 1 << 30
_HEADS, _HEAD_DIM, _LENGTH = 16, 128, 32768
_ROWS_OF_CTA = 32768
_ROWS_IN_L2 = 1024  # 128 KB a CTA are 17 MB of 132 CTAs, which L2 keeps even if both its halves do
_TILES = 1024  # where tiles start in shared memory, after the barriers
_STREAM_COPIES = 2
_LATENCY_COPIES = 4

_REGISTERS = """\
.reg .b32 %x, %y, %row, %head, %batch, %first_row;
.reg .b64 %state, %source;"""


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Tiles [rows, 64] of bf16, and the memory that they come from.

    Attributes:
      rows: rows of a tile.
      rank: 2 is [rows, 64], row after row; 4 is [batch, length, head, head_dim], as in attention,
        where CTAs process the heads and halves of head_dim in turn.
      in_l2: whether the tiles come from L2; otherwise they come from DRAM.
      every_sm: whether all multiprocessors run at once, each with rows of its own, or one alone.
    """

    rows: int
    rank: int = 2
    in_l2: bool = True
    every_sm: bool = False

    @property
    def tensor(self) -> Tensor:
        """Returns what the tensor map describes."""
        if self.rank == 2:
            return Tensor((COLUMNS, DATA_BYTES // ROW_BYTES), (ROW_BYTES,), (COLUMNS, self.rows))
        pitch = 2 * _HEADS * _HEAD_DIM
        return Tensor(
            (_HEAD_DIM, _LENGTH, _HEADS, DATA_BYTES // (pitch * _LENGTH)),
            (pitch, 2 * _HEAD_DIM, pitch * _LENGTH),
            (COLUMNS, self.rows, 1, 1),
        )

    @property
    def tile_bytes(self) -> int:
        """Returns the bytes of a tile."""
        return self.tensor.tile_bytes

    @property
    def place(self) -> str:
        """Returns the part of a measurement's name that says where the tiles come from."""
        return f"{'L2' if self.in_l2 else 'DRAM'}/{'all SMs' if self.every_sm else '1 SM'}"

    def setup(self) -> str:
        """Returns PTX of a CTA's first coordinates."""
        if self.rank == 2:
            places = [f"mul.lo.s32 %first_row, %cta, {_ROWS_OF_CTA};", "mov.b32 %x, 0;"]
        else:
            places = [
                "mov.b32 %first_row, 0;",
                f"and.b32 %head, %cta, {_HEADS - 1};",
                "shr.u32 %x, %cta, 4;",
                "and.b32 %x, %x, 1;",
                f"mul.lo.s32 %x, %x, {COLUMNS};",
                "shr.u32 %batch, %cta, 5;",
            ]
        return "\n".join([*places, "mov.b32 %row, 0;"])

    def next(self) -> str:
        """Returns PTX of the next tile's coordinates."""
        within = _ROWS_IN_L2 if self.in_l2 else _ROWS_OF_CTA
        alone = not self.in_l2 and not self.every_sm  # they must not reach the same rows again
        if alone and self.rank == 2:
            within = DATA_BYTES // ROW_BYTES
        lines = [
            f"and.b32 %y, %row, {within - 1};",
            "add.s32 %y, %y, %first_row;",
            f"shr.u32 %head, %row, {within.bit_length() - 1};" if alone else "",
            f"add.s32 %row, %row, {self.rows};",
        ]
        return "\n".join(lines)

    @property
    def coordinates(self) -> str:
        """Returns the operands."""
        return "{%x, %y}" if self.rank == 2 else "{%x, %y, %head, %batch}"

    @property
    def load_mnemonic(self) -> str:
        """Returns the instruction that fetches a tile."""
        return (
            f"cp.async.bulk.tensor.{self.rank}d.shared::cta.global.tile"
            ".mbarrier::complete_tx::bytes"
        )

    @property
    def store_mnemonic(self) -> str:
        """Returns the instruction that writes a tile."""
        return f"cp.async.bulk.tensor.{self.rank}d.global.shared::cta.tile.bulk_group"

    def load(self, stage: int) -> str:
        """Returns PTX that fetches the next tile into a stage."""
        barrier, target = f"[%shared+{8 * stage}]", f"[%shared+{_TILES + stage * self.tile_bytes}]"
        issue = elected(
            f"mbarrier.arrive.expect_tx.shared.b64 %state, {barrier}, {self.tile_bytes};",
            f"{self.load_mnemonic} {target}, [%map, {self.coordinates}], {barrier};",
        )
        return f"{self.next()}\n{issue}"

    def store(self, stage: int) -> str:
        """Returns PTX that writes a stage's tile, in a group of its own."""
        source = f"[%shared+{_TILES + stage * self.tile_bytes}]"
        issue = elected(
            f"{self.store_mnemonic} [%map, {self.coordinates}], {source};",
            "cp.async.bulk.commit_group;",
        )
        return f"{self.next()}\n{issue}"

    def launch(self, repeats: int, stages: int) -> Launch:
        """Returns how a program with these tiles runs."""
        return Launch(
            threads=32,
            repeats=repeats,
            ctas=PER_SM if self.every_sm else 1,
            shared_bytes=max(ALONE_BYTES, _TILES + stages * self.tile_bytes),
            tensor=self.tensor,
            cold=not self.in_l2,
        )


def _one_load(tiles: Tiles) -> Program:
    """Fetches a tile, waits for it, fetches the next."""

    def body(copies: int) -> str:
        return "\n".join(
            f"{tiles.load(0)}\n{wait('%shared', k % 2, f'WAIT_{copies}_{k}')}"
            for k in range(copies)
        )

    return Program(
        body=body,
        copies=_LATENCY_COPIES,
        counts={tiles.load_mnemonic: 1},
        registers=_REGISTERS,
        setup=f"{init_barriers(1)}\n{tiles.setup()}",
    )


def _load_stream(tiles: Tiles, stages: int) -> Program:
    """Keeps a ring of stages full: as soon as one is full, it fetches the next tile. A copy is one
    round.
    """

    def wait_for(stage: int, parity: int, label: str) -> str:
        return wait(f"%shared+{8 * stage}", parity, f"WAIT_{label}_{stage}")

    def body(copies: int) -> str:
        return "\n".join(
            f"{wait_for(stage, k % 2, f'{copies}_{k}')}\n{tiles.load(stage)}"
            for k in range(copies)
            for stage in range(stages)
        )

    first = "\n".join(tiles.load(stage) for stage in range(stages))
    return Program(
        body=body,
        copies=_STREAM_COPIES,
        together=tiles.every_sm,
        counts={tiles.load_mnemonic: stages},
        registers=_REGISTERS,
        setup=f"{init_barriers(stages)}\n{tiles.setup()}\n{first}",
        finish="\n".join(wait_for(stage, 0, "END") for stage in range(stages)),
    )


def _one_store(tiles: Tiles, read_only: bool) -> Program:
    """Writes a tile and waits until it is written, or until its shared memory has been read."""
    end = elected(f"cp.async.bulk.wait_group{'.read' if read_only else ''} 0;")
    return Program(
        body=each(lambda _: f"{tiles.store(0)}\n{end}"),
        copies=_LATENCY_COPIES,
        counts={tiles.store_mnemonic: 1},
        registers=_REGISTERS,
        setup=f"{fill_shared(_TILES + tiles.tile_bytes)}\n{tiles.setup()}",
        finish=elected("cp.async.bulk.wait_group 0;"),
    )


def _store_stream(tiles: Tiles, stages: int) -> Program:
    """Writes tiles from a ring of stages, each of which is free again once it has been read."""
    free = elected(f"cp.async.bulk.wait_group.read {stages - 1};")

    def body(copies: int) -> str:
        return "\n".join(
            f"{free}\n{tiles.store(stage)}" for _ in range(copies) for stage in range(stages)
        )

    return Program(
        body=body,
        copies=_STREAM_COPIES,
        together=tiles.every_sm,
        counts={tiles.store_mnemonic: stages},
        registers=_REGISTERS,
        setup=f"{fill_shared(_TILES + stages * tiles.tile_bytes)}\n{tiles.setup()}",
        drain=elected("cp.async.bulk.wait_group 0;"),
    )


def _row_load(size: int) -> Program:
    """Copies one contiguous row by bulk, such as a tile's statistics."""
    mnemonic = "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes"

    def body(copies: int) -> str:
        issue = elected(
            f"mbarrier.arrive.expect_tx.shared.b64 %state, [%shared], {size};",
            f"{mnemonic} [%shared+{_TILES}], [%data], {size}, [%shared];",
        )
        return "\n".join(
            f"{issue}\n{wait('%shared', k % 2, f'WAIT_{copies}_{k}')}" for k in range(copies)
        )

    return Program(
        body=body,
        copies=_LATENCY_COPIES,
        counts={mnemonic: 1},
        registers=_REGISTERS,
        setup=init_barriers(1),
    )


def _bandwidth(name: str, program: Program, tiles: Tiles, launch: Launch) -> Measurement:
    moved = tiles.tile_bytes * program.instructions

    def constant(words: np.ndarray, launch: Launch) -> float:
        return moved / cycles_of_copy(words, launch, program.copies)

    return Measurement(name, "bytes/cycle/SM", program, launch, constant)


def _load_latencies() -> list[Measurement]:
    found = []
    for rank in (2, 4):
        for in_l2 in (True, False):
            for rows in (64, 128, 256):
                tiles = Tiles(rows, rank, in_l2)
                size = f"{tiles.tile_bytes // 1024} KB"
                name = f"tma load/{rank}d/{size}/latency/{tiles.place}"
                found.append(latency(name, _one_load(tiles), tiles.launch(16, 1)))
    row = Launch(threads=32, repeats=16, shared_bytes=ALONE_BYTES)
    found.append(latency("bulk load/512 bytes/latency/L2/1 SM", _row_load(512), row))
    return found


def _load_bandwidths() -> list[Measurement]:
    rings = [(128, 2), (128, 4), (128, 8), (64, 8), (256, 4)]
    found = []
    for rank, every_sm, in_l2 in (
        (rank, every_sm, in_l2)
        for rank in (2, 4)
        for every_sm in (False, True)
        for in_l2 in (True, False)
    ):
        for rows, stages in rings:
            tiles = Tiles(rows, rank, in_l2, every_sm)
            size = f"{tiles.tile_bytes // 1024} KB x {stages}"
            name = f"tma load/{rank}d/{size}/bandwidth/{tiles.place}"
            launch = tiles.launch(32 if every_sm else 16, stages)
            found.append(_bandwidth(name, _load_stream(tiles, stages), tiles, launch))
    return found


def _stores() -> list[Measurement]:
    found = []
    for rows in (64, 128, 256):
        tiles = Tiles(rows)
        for read_only, until in ((False, "written"), (True, "read")):
            name = f"tma store/2d/{tiles.tile_bytes // 1024} KB/latency until {until}"
            found.append(latency(name, _one_store(tiles, read_only), tiles.launch(16, 1)))
    for rank, every_sm, in_l2 in (
        (2, False, True),
        (2, True, True),
        (4, True, True),
        (4, True, False),
    ):
        tiles = Tiles(128, rank, in_l2, every_sm)
        for stages in (2, 4):
            name = f"tma store/{rank}d/16 KB x {stages}/bandwidth/{tiles.place}"
            launch = tiles.launch(32, stages)
            found.append(_bandwidth(name, _store_stream(tiles, stages), tiles, launch))
    return found


def measurements() -> list[Measurement]:
    """Measures cycles from issue to completion, and bytes per cycle and multiprocessor."""
    return [*_load_latencies(), *_load_bandwidths(), *_stores()]
