"""Measures the time from the end of a grid or CTA to the next start on the same multiprocessor."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np

from benchmarks.micro.program import (
    ALONE_BYTES,
    ENTRY,
    FIELDS,
    HOPPER,
    PER_SM,
    Launch,
    Measurement,
)

SPIN_CYCLES = 2000
_LAUNCHES = 12
_HEAD_START = 1000
_CTAS = 1056  # This gives eight to each of an H200's 132 multiprocessors.
_SM = FIELDS - 1

_FRAME = """\
.version 8.8
.target {target}
.address_size 64
.extern .shared .align 1024 .b8 shared_memory[];
.visible .entry {entry}(
  .param .align 64 .b8 tensor_map[128],
  .param .u64 results,
  .param .u64 data,
  .param .u32 repeats
)
.maxntid 1024, 1, 1
{{
.reg .pred %p;
.reg .b32 %thread, %cta, %warps, %word, %repeats;
.reg .b64 %results, %place, %start, %end, %spin;
mov.u64 %start, %clock64;
mov.u32 %thread, %tid.x;
mov.u32 %cta, %ctaid.x;
mov.u32 %warps, %ntid.x;
ld.param.b64 %results, [results];
ld.param.b32 %repeats, [repeats];
cvt.u64.u32 %spin, %repeats;
SPIN:
mov.u64 %end, %clock64;
sub.s64 %end, %end, %start;
setp.lt.u64 %p, %end, %spin;
@%p bra SPIN;
setp.ne.b32 %p, %thread, 0;
@%p bra DONE;
shr.u32 %warps, %warps, 5;
mul.lo.s32 %word, %cta, %warps;
mul.wide.u32 %place, %word, {bytes};
add.s64 %place, %results, %place;
mov.u32 %word, %smid;
cvt.u64.u32 %spin, %word;
st.global.b64 [%place+{sm}], %spin;
st.global.b64 [%place], %start;
mov.u64 %end, %clock64;
st.global.b64 [%place+8], %end;
DONE:
ret;
}}
"""


@dataclasses.dataclass(frozen=True)
class Spin:
    """A kernel that waits `repeats` cycles and leaves its first and last clock."""

    def ptx(self, target: str = HOPPER) -> str:
        """Returns the module's text for an architecture."""
        return _FRAME.format(entry=ENTRY, target=target, bytes=8 * FIELDS, sm=8 * _SM)


def between_grids(words: np.ndarray, launch: Launch) -> float:
    """Returns cycles from a CTA's end to the start of the next launch's CTA on its multiprocessor.

    The median over multiprocessors and launches, the one with the head start left out.
    """
    first_warps = words[:, :, 0]
    gaps = []
    for before, after in itertools.pairwise(first_warps[1:]):
        ends = {int(cta[_SM]): int(cta[1]) for cta in before}
        gaps += [int(cta[0]) - ends[int(cta[_SM])] for cta in after if int(cta[_SM]) in ends]
    return float(np.median(gaps))


def between_ctas(words: np.ndarray, launch: Launch) -> float:
    """Returns cycles from a CTA's end to the next one's start, where one at a time fits; the
    median.
    """
    ctas = words[0, :, 0]
    gaps: list[int] = []
    for sm in np.unique(ctas[:, _SM]):
        here = ctas[ctas[:, _SM] == sm]
        here = here[np.argsort(here[:, 0])]
        gaps += (here[1:, 0] - here[:-1, 1]).tolist()
    return float(np.median(gaps))


def measurements() -> list[Measurement]:
    """Measures cycles that a multiprocessor stands still between grids and between CTAs."""
    found = []
    for threads in (128, 384):
        alone = Launch(
            threads,
            repeats=SPIN_CYCLES,
            ctas=PER_SM,
            shared_bytes=ALONE_BYTES,
            in_a_row=_LAUNCHES,
            head_start=_HEAD_START,
        )
        name = f"grid/end to next start/{threads} threads"
        found.append(Measurement(name, "cycles", Spin(), alone, between_grids))
        many = Launch(threads, repeats=SPIN_CYCLES, ctas=_CTAS, shared_bytes=ALONE_BYTES)
        name = f"cta/end to next start/{threads} threads"
        found.append(Measurement(name, "cycles", Spin(), many, between_ctas))
    return found
