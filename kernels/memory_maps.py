"""Maps of a kernel's shared memory and tensor memory as pictures, from its description alone."""

from __future__ import annotations

import dataclasses
from xml.sax.saxutils import escape

from kernels.description import (
    BARRIER_BYTES,
    MAX_SHARED_BYTES,
    TENSOR_MEMORY_COLUMNS,
    Columns,
    Description,
    Region,
)

_KIB = 1024
_ROW, _TOP, _NAMES, _WIDTH, _NOTES = 22, 44, 110, 640, 150  # pixels
_OWN, _SHARED = "#5b8fd6", "#e0a458"
_LEAST = 2  # pixels of a bar, so that a single value can be seen


@dataclasses.dataclass(frozen=True)
class Bar:
    """One thing in a memory.

    Attributes:
      name: of it.
      spans: (begin, end) of its pieces, in the unit of the map.
      note: is written beside it.
      shares: it lies in memory that another one has, too.
    """

    name: str
    spans: tuple[tuple[int, int], ...]
    note: str
    shares: bool


@dataclasses.dataclass(frozen=True)
class MemoryMap:
    """A memory and what lies in it, a row each.

    Attributes:
      title: above the picture.
      size: of the memory.
      ticks: places that the scale names, with their labels.
    """

    title: str
    size: int
    ticks: tuple[tuple[int, str], ...]
    bars: tuple[Bar, ...]


def shared_memory(description: Description) -> MemoryMap:
    """The map of a CTA's shared memory, in bytes."""
    end = BARRIER_BYTES * description.barrier_count
    barriers = [Bar("mbarriers", ((0, end),), f"{end} B", False)] if end else []
    regions = [_region(description, region) for region in description.regions]
    ticks = tuple((kib * _KIB, f"{kib} KiB") for kib in (0, 64, 128, 192, MAX_SHARED_BYTES // _KIB))
    used = description.shared_bytes / _KIB
    title = f"Shared memory of a CTA: {used:.1f} of {MAX_SHARED_BYTES // _KIB} KiB"
    return MemoryMap(title, MAX_SHARED_BYTES, ticks, (*barriers, *regions))


def _region(description: Description, region: Region) -> Bar:
    begin, size = description.offsets[region.name], region.num_bytes
    note = f"{size // _KIB} KiB" if size % _KIB == 0 else f"{size} B"
    if region.shares:
        note += f", memory of {region.shares}"
    return Bar(region.name, ((begin, begin + size),), note, bool(region.shares))


def tensor_memory(description: Description) -> MemoryMap:
    """The map of a CTA's tensor memory, in columns of all 128 lanes."""
    bars = tuple(_columns(columns) for columns in description.tensor_memory)
    used = len({column for bar in bars for span in bar.spans for column in range(*span)})
    ticks = tuple((column, str(column)) for column in range(0, TENSOR_MEMORY_COLUMNS + 1, 64))
    title = f"Tensor memory of a CTA: {used} of {TENSOR_MEMORY_COLUMNS} columns"
    return MemoryMap(title, TENSOR_MEMORY_COLUMNS, ticks, bars)


def _columns(columns: Columns) -> Bar:
    note = f"{columns.count} x {columns.width}" if columns.count > 1 else str(columns.width)
    note += " columns"
    if columns.shares:
        note += f", some of {columns.shares}"
    spans = tuple((first, first + columns.width) for first in columns.firsts)
    return Bar(columns.name, spans, note, bool(columns.shares))


def svg(memory: MemoryMap) -> str:
    """The picture; the same map gives the same text."""
    height = _TOP + _ROW * len(memory.bars) + 10
    width = _NAMES + _WIDTH + _NOTES
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        _text(4, 14, memory.title, weight="bold"),
    ]
    for place, label in memory.ticks:
        x = _x(memory, place)
        lines.append(
            f'<line x1="{x:.1f}" y1="{_TOP - 8}" x2="{x:.1f}" y2="{height - 6}" stroke="#cccccc"/>'
        )
        lines.append(_text(x, _TOP - 12, label, anchor="middle"))
    for i, bar in enumerate(memory.bars):
        lines += _bar(memory, bar, _TOP + _ROW * i)
    return "\n".join([*lines, "</svg>", ""])


def _bar(memory: MemoryMap, bar: Bar, top: int) -> list[str]:
    """A row: the name, the pieces to scale, the note after the last one."""
    lines = [_text(_NAMES - 8, top + 15, bar.name, anchor="end")]
    right = 0.0
    for begin, end in bar.spans:
        x = _x(memory, begin)
        width = max(_x(memory, end) - x, _LEAST)
        right = max(right, x + width)
        lines.append(
            f'<rect x="{x:.1f}" y="{top + 3}" width="{width:.1f}" height="{_ROW - 6}" '
            f'fill="{_SHARED if bar.shares else _OWN}" stroke="white"/>'
        )
    return [*lines, _text(right + 6, top + 15, bar.note)]


def _x(memory: MemoryMap, place: int) -> float:
    return _NAMES + _WIDTH * place / memory.size


def _text(x: float, y: float, text: str, anchor: str = "start", weight: str = "normal") -> str:
    return (
        f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}" font-weight="{weight}" '
        f'fill="black">{escape(text)}</text>'
    )
