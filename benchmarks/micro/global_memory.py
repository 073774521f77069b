"""Measures ordinary instructions on global memory: loads, reductions, signals between SMs."""

from __future__ import annotations

import itertools

from benchmarks.micro.program import (
    ALONE_BYTES,
    PER_SM,
    Chase,
    Launch,
    Measurement,
    Program,
    each,
    latency,
    rate,
)

_COPIES = 8
_REPEATS = 16
_REDUCING_THREADS = (128, 256, 384)
_BYTES_OF_CTA = 1 << 17
_STREAM_BYTES_OF_CTA = 1 << 22  # one ring is read, one is written: 1 GB of 132 CTAs
_STREAM_PITCH = 31 << 17  # the distance from the one to the other, so that all fit
_STREAM_THREADS = 512
_STREAM_LOADS = 4
_POINTER = ".reg .b64 %pointer;\n.reg .b32 %low;"
_STREAM = ".reg .b64 %begin;\n.reg .b32 %offset, %sum, %w<16>;"


def _pointer_chase(mnemonic: str) -> Program:
    """Loads, each time from the address that the load before returned."""
    return Program(
        body=each(lambda _: f"{mnemonic} %pointer, [%pointer];"),
        copies=_COPIES,
        counts={mnemonic: 1},
        registers=_POINTER,
        setup="mov.b64 %pointer, %data;",
        finish="cvt.u32.u64 %low, %pointer;",
        sinks=("%low",),
    )


def _acquire_poll() -> Program:
    """Loads one word with acquire, one load after the other."""
    return Program(
        body=each(
            lambda _: "ld.acquire.gpu.global.b32 %seen, [%data];\nxor.b32 %sum, %sum, %seen;"
        ),
        copies=_COPIES,
        counts={"ld.acquire.gpu.global.b32": 1},
        registers=".reg .b32 %seen, %sum;",
        setup="mov.b32 %sum, %thread;",
        sinks=("%sum",),
    )


def _reductions(words: int, every_sm: bool, sharing: int = 1) -> Program:
    """Adds floats into 128 KB, which stay in L2, from a number of CTAs at a time."""
    mnemonic = f"red.relaxed.gpu.global.add.{'v4.' if words == 4 else ''}f32"
    threads = max(_REDUCING_THREADS)
    values = "{%one, %one, %one, %one}" if words == 4 else "%one"

    def copy(k: int) -> str:
        return f"{mnemonic} [%pointer+{k * threads * 4 * words}], {values};"

    return Program(
        body=each(copy),
        copies=_COPIES,
        counts={mnemonic: 1},
        registers=f"{_POINTER}\n.reg .f32 %one;",
        setup=f"""\
mov.f32 %one, 0f3F800000;
div.u32 %low, %cta, {sharing};
mul.wide.u32 %pointer, %low, {_BYTES_OF_CTA};
mul.wide.u32 %wide, %thread, {4 * words};
add.s64 %pointer, %pointer, %wide;
add.s64 %pointer, %pointer, %data;""",
        drain="fence.acq_rel.gpu;",
        together=every_sm,
    )


def _loads() -> list[str]:
    """Returns a thread's loads of a copy."""
    return [
        f"ld.global.cg.v4.b32 {{%w{4 * k}, %w{4 * k + 1}, %w{4 * k + 2}, %w{4 * k + 3}}}, "
        f"[%pointer+{k * 16 * _STREAM_THREADS}];"
        for k in range(_STREAM_LOADS)
    ]


def _stream(stores: int) -> Program:
    """Threads read 16 bytes each, four times, and write as much `stores` times, all from DRAM."""
    pitch = 16 * _STREAM_THREADS
    writes = [
        f"st.global.v4.b32 [%pointer+{_STREAM_PITCH + k * pitch}], "
        f"{{%w{4 * k}, %w{4 * k + 1}, %w{4 * k + 2}, %w{4 * k + 3}}};"
        for k in range(stores)
    ]
    copy = "\n".join(
        [
            "cvt.u64.u32 %wide, %offset;",
            "add.s64 %pointer, %begin, %wide;",
            *_loads(),
            *writes,
            *(f"xor.b32 %sum, %sum, %w{4 * k};" for k in range(stores, _STREAM_LOADS)),
            f"add.s32 %offset, %offset, {_STREAM_LOADS * pitch};",
            f"and.b32 %offset, %offset, {_STREAM_BYTES_OF_CTA - 1};",
        ]
    )
    counts = {"ld.global.cg.v4.b32": _STREAM_LOADS}
    return Program(
        body=each(lambda _: copy),
        copies=4,
        counts=counts | ({"st.global.v4.b32": stores} if stores else {}),
        registers=f"{_POINTER}\n{_STREAM}",
        setup=f"""\
mul.wide.u32 %begin, %cta, {2 * _STREAM_PITCH};
mul.wide.u32 %wide, %thread, 16;
add.s64 %begin, %begin, %wide;
add.s64 %begin, %begin, %data;
mov.b32 %offset, 0;
mov.b32 %sum, %thread;""",
        sinks=("%sum",),
        together=True,
    )


def _region(megabytes: int, readers: int) -> Program:
    """Every CTA reads its part of a region again and again; several CTAs may have the same part."""
    pitch = 16 * _STREAM_THREADS * _STREAM_LOADS
    part = (megabytes << 20) * readers // (132 * pitch) * pitch
    loads = _loads()
    copy = "\n".join(
        [
            "cvt.u64.u32 %wide, %offset;",
            "add.s64 %pointer, %begin, %wide;",
            *loads,
            *(f"xor.b32 %sum, %sum, %w{4 * k};" for k in range(_STREAM_LOADS)),
            f"add.s32 %offset, %offset, {pitch};",
            f"setp.ge.u32 %over, %offset, {part};",
            f"@%over sub.s32 %offset, %offset, {part};",
        ]
    )
    return Program(
        body=each(lambda _: copy),
        copies=4,
        counts={"ld.global.cg.v4.b32": _STREAM_LOADS},
        registers=f"{_POINTER}\n{_STREAM}\n.reg .pred %over;",
        setup=f"""\
div.u32 %low, %cta, {readers};
mul.wide.u32 %begin, %low, {part};
mul.wide.u32 %wide, %thread, 16;
add.s64 %begin, %begin, %wide;
add.s64 %begin, %begin, %data;
mov.b32 %offset, 0;
mov.b32 %sum, %thread;""",
        sinks=("%sum",),
        together=True,
    )


def _signal(send: str) -> Program:
    """Two CTAs pass a token through global memory; a copy is a round trip.

    Flags are 4 KB apart. Each CTA waits until its own has grown, then makes the other's grow; CTA 0
    begins, so its flag is one ahead.
    """

    def body(copies: int) -> str:
        return "\n".join(
            f"""\
POLL_{copies}_{k}:
ld.acquire.gpu.global.b32 %seen, [%own];
setp.lt.u32 %again, %seen, %expected;
@%again bra POLL_{copies}_{k};
add.s32 %next, %expected, %cta;
@%leader {send}
add.s32 %expected, %expected, 1;"""
            for k in range(copies)
        )

    return Program(
        body=body,
        copies=_COPIES,
        counts={send.split()[0]: 1},
        registers="""\
.reg .pred %again;
.reg .b32 %seen, %expected, %next;
.reg .b64 %own, %theirs;""",
        setup="""\
mul.wide.u32 %wide, %cta, 4096;
add.s64 %own, %data, %wide;
xor.b32 %word, %cta, 1;
mul.wide.u32 %wide, %word, 4096;
add.s64 %theirs, %data, %wide;
mov.b32 %expected, 1;
or.b32 %word, %cta, %thread;
setp.eq.b32 %again, %word, 0;
@%again st.relaxed.gpu.global.b32 [%own], 1;""",
        most_threads=32,
    )


def measurements() -> list[Measurement]:
    """Measures latencies in cycles, and reductions in bytes per cycle and multiprocessor."""
    chases = {
        "ld.global/latency/L1": ("ld.global.ca.b64", Chase(128, 1 << 13), False),
        "ld.global/latency/L2": ("ld.global.cg.b64", Chase(4224, 1 << 21), False),
        "ld.global/latency/DRAM": ("ld.global.cg.b64", Chase(8320, 1 << 24), True),
    }
    found = [
        latency(
            name,
            _pointer_chase(mnemonic),
            Launch(threads=32, repeats=_REPEATS, chase=chase, cold=cold),
        )
        for name, (mnemonic, chase, cold) in chases.items()
    ]
    found += [
        rate(
            f"red.global.add.{kind}/throughput/{threads} threads/{place}",
            "bytes",
            _reductions(words, ctas == PER_SM),
            Launch(threads, repeats=32, ctas=ctas, shared_bytes=ALONE_BYTES),
            per_instruction=128 * words,
        )
        for words, kind in ((1, "f32"), (4, "v4.f32"))
        for threads in _REDUCING_THREADS
        for ctas, place in ((1, "1 SM"), (PER_SM, "all SMs"))
    ]
    found += [
        rate(
            f"red.global.add.v4.f32/throughput/256 threads/all SMs, {sharing} to the same",
            "bytes",
            _reductions(4, True, sharing),
            Launch(256, repeats=32, ctas=PER_SM, shared_bytes=ALONE_BYTES),
            per_instruction=512,
        )
        for sharing in (2, 8, 32)
    ]
    streams = Launch(_STREAM_THREADS, repeats=32, ctas=PER_SM, shared_bytes=ALONE_BYTES, cold=True)
    found += [
        rate(
            f"stream/{_STREAM_LOADS} ld.global + {stores} st.global/bandwidth/DRAM/all SMs",
            "bytes",
            _stream(stores),
            streams,
            per_instruction=512,
        )
        for stores in (0, 1, 2, 4)
    ]
    found += [
        rate(
            f"ld.global.cg.v4/bandwidth/{megabytes} MB, {readers} SMs to a part/all SMs",
            "bytes",
            _region(megabytes, readers),
            Launch(
                _STREAM_THREADS,
                repeats=max(megabytes * readers // 8, 8),
                ctas=PER_SM,
                shared_bytes=ALONE_BYTES,
            ),
            per_instruction=512,
        )
        for readers, megabytes in itertools.product((1, 4), (16, 24, 32, 40, 48, 56, 64, 80))
    ]
    one = Launch(threads=32, repeats=_REPEATS)
    found.append(latency("ld.acquire.gpu/latency", _acquire_poll(), one))
    sends = {
        "red.release": "red.release.gpu.global.add.u32 [%theirs], 1;",
        "st.release": "st.release.gpu.global.b32 [%theirs], %next;",
    }
    pair = Launch(threads=32, repeats=_REPEATS, ctas=2, shared_bytes=ALONE_BYTES)
    for name, send in sends.items():
        found.append(latency(f"signal/{name} to ld.acquire", _signal(send), pair, events=2))
    return found
