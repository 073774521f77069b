"""Defines a measurement: a PTX program with two timed loops, its launch, its constant.

Both loops of a program run `repeats` times. One iteration holds `copies` copies of what is measured
in the first loop and twice as many in the second, so the difference of their times is that of
`repeats * copies` copies and of nothing else: no loop counter, no drain, no clock read. Both loops
run twice; the second time, with instructions and data in the caches, counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np

ENTRY = "microbenchmark"
HOPPER, BLACKWELL = "sm_90a", "sm_100f"
PASSES = 2
FIELDS = 5
"""The words of 64 bits that a warp leaves: clock before and after both loops, multiprocessor."""
PER_SM = 0
"""A value of `Launch.ctas`: one CTA on each multiprocessor."""
ALONE_BYTES = 120 * 1024
"""The shared memory of which a multiprocessor has room for one CTA only."""

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
.maxntid {threads}, 1, 1{cluster}
.pragma "nounroll";
{{
.reg .pred %looping, %leader, %elected, %done;
.reg .b32 %thread, %lane, %warp, %cta, %shared, %repeats, %iteration, %pass, %word, %count, %chosen;
.reg .b64 %results, %data, %map, %clock<4>, %place, %wide;
{registers}
mov.u32 %thread, %tid.x;
and.b32 %lane, %thread, 31;
shr.u32 %warp, %thread, 5;
mov.u32 %cta, %ctaid.x;
mov.b32 %shared, shared_memory;
mov.b64 %map, tensor_map;
cvta.param.u64 %map, %map;
ld.param.b64 %results, [results];
ld.param.b64 %data, [data];
ld.param.b32 %repeats, [repeats];
setp.eq.b32 %leader, %thread, 0;
{setup}
mov.b32 %pass, {passes};
PASS:
{loops}
sub.s32 %pass, %pass, 1;
setp.ne.b32 %looping, %pass, 0;
@%looping bra PASS;
{finish}
mov.u32 %word, %nctaid.x;
mov.u32 %count, %ntid.x;
shr.u32 %iteration, %count, 5;
mul.lo.s32 %word, %word, %iteration;
mul.wide.u32 %place, %word, {bytes};
add.s64 %place, %results, %place;
mad.lo.s32 %word, %cta, %count, %thread;
mul.wide.u32 %wide, %word, 4;
add.s64 %place, %place, %wide;
mov.b32 %word, 0;
{sinks}
st.global.b32 [%place], %word;
setp.ne.b32 %looping, %lane, 0;
@%looping bra DONE;
mad.lo.s32 %word, %cta, %iteration, %warp;
mul.wide.u32 %place, %word, {bytes};
add.s64 %place, %results, %place;
st.global.b64 [%place], %clock0;
st.global.b64 [%place+8], %clock1;
st.global.b64 [%place+16], %clock2;
st.global.b64 [%place+24], %clock3;
mov.u32 %word, %smid;
cvt.u64.u32 %wide, %word;
st.global.b64 [%place+32], %wide;
DONE:
ret;
}}
"""

_CLUSTER = "\n.explicitcluster\n.reqnctapercluster {}, 1, 1"

_LOOP = """\
bar.sync 0;
{meet}
mov.u64 %clock{before}, %clock64;
mov.b32 %iteration, %repeats;
LOOP{copies}:
{body}
sub.s32 %iteration, %iteration, 1;
setp.ne.b32 %looping, %iteration, 0;
@%looping bra LOOP{copies};
{drain}
mov.u64 %clock{after}, %clock64;"""


_MEET = """\
add.s32 %expected, %expected, %ctas;
@!%leader bra MET{copies};
red.release.gpu.global.add.u32 [%meeting], 1;
MEET{copies}:
ld.acquire.gpu.global.u32 %arrived, [%meeting];
setp.lt.u32 %looping, %arrived, %expected;
@%looping bra MEET{copies};
MET{copies}:
bar.sync 0;"""
_MEETING_PLACE = f"""\
.reg .b32 %ctas, %expected, %arrived;
.reg .b64 %meeting;
mov.u32 %ctas, %nctaid.x;
mov.u32 %count, %ntid.x;
shr.u32 %count, %count, 5;
mul.lo.s32 %count, %count, {8 * FIELDS + 4 * 32};
mul.lo.s32 %count, %count, %ctas;
cvt.u64.u32 %meeting, %count;
add.s64 %meeting, %meeting, %results;
mov.b32 %expected, 0;"""
"""A counter after the words that the warps leave (`result_bytes`)."""


class Source(Protocol):
    """A maker of a module's text."""

    def ptx(self, target: str = HOPPER) -> str:
        """Returns the text for an architecture."""
        ...


@dataclasses.dataclass(frozen=True)
class Program:
    """A PTX program in pieces.

    Attributes:
      body: PTX of this many copies of what is measured; called for each of the two loops.
      copies: number of copies in the first loop; the second has twice as many.
      counts: instructions of one copy, by mnemonic: what a warp issues.
      registers: declarations in addition to the frame's.
      setup: PTX before everything.
      drain: PTX between a loop's last iteration and the clock read after it.
      finish: PTX after the loops.
      sinks: 32-bit registers whose values leave the kernel, so that nothing is dead code.
      most_threads: the most threads of a CTA.
      together: whether all CTAs, which must fit on the device at a time, begin each loop together.
      cluster: number of CTAs of a cluster.
    """

    body: Callable[[int], str]
    copies: int
    counts: Mapping[str, int]
    registers: str = ""
    setup: str = ""
    drain: str = ""
    finish: str = ""
    sinks: tuple[str, ...] = ()
    most_threads: int = 512
    together: bool = False
    cluster: int = 1

    @property
    def instructions(self) -> int:
        """Returns the warp instructions of one copy that are counted."""
        return sum(self.counts.values())

    def ptx(self, target: str = HOPPER) -> str:
        """Returns the module's text for an architecture."""
        loops = "\n".join(
            _LOOP.format(
                before=2 * i,
                after=2 * i + 1,
                copies=copies,
                body=self.body(copies),
                drain=self.drain,
                meet=_MEET.format(copies=copies) if self.together else "",
            )
            for i, copies in enumerate((self.copies, 2 * self.copies))
        )
        return _FRAME.format(
            entry=ENTRY,
            target=target,
            threads=self.most_threads,
            cluster=_CLUSTER.format(self.cluster) if self.cluster > 1 else "",
            registers=self.registers,
            setup=f"{_MEETING_PLACE}\n{self.setup}" if self.together else self.setup,
            passes=PASSES,
            loops=loops,
            finish=self.finish,
            sinks="\n".join(f"xor.b32 %word, %word, {name};" for name in self.sinks),
            bytes=8 * FIELDS,
        )


def each(copy: Callable[[int], str]) -> Callable[[int], str]:
    """Makes a program's body from the PTX of each copy."""
    return lambda copies: "\n".join(copy(i) for i in range(copies))


@dataclasses.dataclass(frozen=True)
class Tensor:
    """The description of a TMA program's tensor map: bf16, contiguous dimension first.

    Attributes:
      sizes: elements of each dimension.
      byte_strides: bytes between neighbours along every dimension but the first.
      box: elements of a tile, by dimension.
    """

    sizes: tuple[int, ...]
    byte_strides: tuple[int, ...]
    box: tuple[int, ...]

    @property
    def tile_bytes(self) -> int:
        """Returns the bytes of a tile."""
        return 2 * int(np.prod(self.box))


@dataclasses.dataclass(frozen=True)
class Chase:
    """A ring of pointers in a random order, at the start of `data`."""

    stride_bytes: int
    region_bytes: int

    def words(self, address: int) -> np.ndarray:
        """Returns the region's contents, in words of 64 bits, where it starts at this address."""
        count = self.region_bytes // self.stride_bytes
        places = address + self.stride_bytes * np.arange(count, dtype=np.uint64)
        ring = np.concatenate([[0], 1 + np.random.default_rng(0).permutation(count - 1)])
        words = np.zeros(self.region_bytes // 8, np.uint64)
        words[ring * (self.stride_bytes // 8)] = np.roll(places[ring], -1)
        return words


@dataclasses.dataclass(frozen=True)
class Launch:
    """How a program runs.

    Attributes:
      threads: threads of a CTA.
      repeats: iterations of either loop.
      ctas: number of CTAs, or PER_SM.
      shared_bytes: bytes of dynamic shared memory.
      tensor: what the tensor map describes.
      chase: what `data` starts with; 64 KB of zeros otherwise.
      cold: whether L2 is filled with other data before each launch.
      in_a_row: number of launches back to back, of which the first runs `head_start` times as many
        repeats, so that the others wait in the stream before it ends.
    """

    threads: int
    repeats: int
    ctas: int = 1
    shared_bytes: int = 0
    tensor: Tensor | None = None
    chase: Chase | None = None
    cold: bool = False
    in_a_row: int = 1
    head_start: int = 1


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One constant.

    Attributes:
      name: parts separated by slashes.
      unit: unit of the constant.
      program: what runs.
      launch: how it runs.
      constant: function to the constant from the words that the launches leave, of shape
        [launches in a row, CTAs, warps, FIELDS], and the launch.
    """

    name: str
    unit: str
    program: Source
    launch: Launch
    constant: Callable[[np.ndarray, Launch], float]


def result_bytes(ctas: int, threads: int) -> int:
    """Returns the bytes of what a grid's warps leave (words, then 32 bits per thread), and its
    counter.
    """
    return ctas * threads // 32 * (8 * FIELDS + 4 * 32) + 8


def cycles_of_copy(words: np.ndarray, launch: Launch, copies: int) -> float:
    """Returns the cycles that the slowest CTA takes for one copy, its slowest warp counting.

    It is not the median of the CTAs: where they share something, the fast ones would leave it to
    the others, and their joint rate would be overstated.
    """
    before, after = words[..., 0:4:2].min(axis=-2), words[..., 1:4:2].max(axis=-2)
    short, long = np.moveaxis((after - before).max(axis=-2), -1, 0)
    return float(np.median(long - short)) / (launch.repeats * copies)


def latency(name: str, program: Program, launch: Launch, events: float = 1.0) -> Measurement:
    """Returns the cycles of an event; a copy has `events` of them, one after the other."""

    def constant(words: np.ndarray, launch: Launch) -> float:
        return cycles_of_copy(words, launch, program.copies) / events

    return Measurement(name, "cycles", program, launch, constant)


def rate(
    name: str, unit: str, program: Program, launch: Launch, per_instruction: float
) -> Measurement:
    """Returns what a multiprocessor does in a cycle, given what each warp instruction does."""

    def constant(words: np.ndarray, launch: Launch) -> float:
        amount = per_instruction * program.instructions * launch.threads / 32
        return amount / cycles_of_copy(words, launch, program.copies)

    return Measurement(name, f"{unit}/cycle/SM", program, launch, constant)


def fill_shared(size: int) -> str:
    """Returns PTX that fills shared memory with bf16 ones, for both proxies; a CTA barrier must
    follow.
    """
    return f"""\
shl.b32 %word, %thread, 4;
FILL:
setp.ge.u32 %looping, %word, {size};
@%looping bra FILLED;
add.s32 %count, %shared, %word;
mov.b32 %iteration, 0x3F803F80;
st.shared.v4.b32 [%count], {{%iteration, %iteration, %iteration, %iteration}};
mov.u32 %count, %ntid.x;
shl.b32 %count, %count, 4;
add.s32 %word, %word, %count;
bra FILL;
FILLED:
fence.proxy.async.shared::cta;"""


def init_barriers(count: int, arrivals: int = 1) -> str:
    """Returns PTX that makes mbarriers at the start of shared memory."""
    inits = "\n".join(
        f"@%leader mbarrier.init.shared.b64 [%shared+{8 * i}], {arrivals};" for i in range(count)
    )
    return f"{inits}\nfence.mbarrier_init.release.cluster;\nbar.sync 0;"


def elected(*instructions: str) -> str:
    """Returns PTX of instructions that one lane of each warp executes, elected as in kernels."""
    return "\n".join(
        ["elect.sync %chosen|%elected, -1;", *(f"@%elected {text}" for text in instructions)]
    )


def wait(barrier: str, parity: int, label: str) -> str:
    """Returns PTX that waits for a phase of an mbarrier."""
    return (
        f"{label}:\n"
        f"mbarrier.try_wait.parity.shared.b64 %done, [{barrier}], {parity};\n"
        f"@!%done bra {label};"
    )
