"""Measures shared memory through loads, stores and stmatrix, and the cost of the proxy fence."""

from __future__ import annotations

import dataclasses

from benchmarks.micro.program import Launch, Measurement, Program, each, fill_shared, latency, rate

WARPS = (1, 4, 8, 16)
_VECTORS = {1: "b32", 2: "v2.b32", 4: "v4.b32"}
_COPIES = 8
_REPEATS = 32
_LATENCY_COPIES = 32
_MOST_THREADS = 512
_BYTES = 2 * _COPIES * _MOST_THREADS * 16

_FENCE = "fence.proxy.async.shared::cta"
_REGISTERS = ".reg .b32 %at, %s<4>, %v<64>;"


def _list(names: list[str]) -> str:
    return names[0] if len(names) == 1 else "{" + ", ".join(names) + "}"


def _setup(bytes_per_thread: int) -> str:
    sums = "\n".join(f"add.s32 %s{i}, %thread, {i};" for i in range(4))
    return f"{fill_shared(_BYTES)}\nmad.lo.s32 %at, %thread, {bytes_per_thread}, %shared;\n{sums}"


def _turn(body: str, size: int) -> str:
    """Neighbouring lanes exchange places in each iteration: no load is the same as one before."""
    return f"xor.b32 %at, %at, {size};\n{body}"


def _loads(words: int) -> Program:
    """Loads without bank conflicts, and uses every word."""
    size, mnemonic = 4 * words, f"ld.shared.{_VECTORS[words]}"

    def copy(k: int) -> str:
        names = [f"%v{4 * k + i}" for i in range(words)]
        offset = k * _MOST_THREADS * size
        uses = [f"xor.b32 %s{i}, %s{i}, {name};" for i, name in enumerate(names)]
        return "\n".join([f"{mnemonic} {_list(names)}, [%at+{offset}];", *uses])

    return Program(
        body=lambda copies: _turn(each(copy)(copies), size),
        copies=_COPIES,
        counts={mnemonic: 1},
        registers=_REGISTERS,
        setup=_setup(size),
        sinks=tuple(f"%s{i}" for i in range(4)),
        most_threads=_MOST_THREADS,
    )


def _stores(words: int) -> Program:
    size, mnemonic = 4 * words, f"st.shared.{_VECTORS[words]}"
    names = _list([f"%s{i}" for i in range(words)])

    def copy(k: int) -> str:
        return f"{mnemonic} [%at+{k * _MOST_THREADS * size}], {names};"

    return Program(
        body=each(copy),
        copies=_COPIES,
        counts={mnemonic: 1},
        registers=_REGISTERS,
        setup=f"{_setup(size)}\nbar.sync 0;",
        most_threads=_MOST_THREADS,
    )


def _stmatrix() -> Program:
    """Stores four 8x8 matrices of 16 bits, rows one after the other: no bank conflicts."""
    mnemonic = "stmatrix.sync.aligned.m8n8.x4.shared.b16"

    def copy(k: int) -> str:
        return f"{mnemonic} [%at+{k * _MOST_THREADS * 16}], {{%s0, %s1, %s2, %s3}};"

    return Program(
        body=each(copy),
        copies=_COPIES,
        counts={mnemonic: 1},
        registers=_REGISTERS,
        setup=f"{_setup(16)}\nbar.sync 0;",
        most_threads=_MOST_THREADS,
    )


def _conflicting_loads(ways: int) -> Program:
    """Loads a word of which `ways` lanes of a warp hit the same bank."""
    program = _loads(1)
    # The lanes of a warp are 4 * ways bytes apart; warps read the same words.
    setup = f"{_setup(4)}\nmad.lo.s32 %at, %lane, {4 * ways}, %shared;"
    return dataclasses.replace(program, setup=setup)


def _loads_of_one_address(words: int) -> Program:
    """Loads the same words by all lanes of a warp."""
    program = _loads(words)
    setup = f"{_setup(4 * words)}\nmad.lo.s32 %at, %warp, {4 * words}, %shared;"
    return dataclasses.replace(program, setup=setup)


def _pointer_chase(words: int) -> Program:
    """Every thread's slot holds the slot's own address, which the next load uses."""
    mnemonic = f"ld.shared.{_VECTORS[words]}"

    def copy(k: int) -> str:
        others = [f"%v{3 * (k % 2) + i}" for i in range(words - 1)]
        uses = [f"xor.b32 %s{i}, %s{i}, {name};" for i, name in enumerate(others)]
        return "\n".join([f"{mnemonic} {_list([*others, '%at'])}, [%at];", *uses])

    slot = "\n".join(f"st.shared.b32 [%at+{4 * i}], %at;" for i in range(words))
    return Program(
        body=each(copy),
        copies=_LATENCY_COPIES,
        counts={mnemonic: 1},
        registers=_REGISTERS,
        setup=f"{_setup(4 * words)}\nbar.sync 0;\n{slot}",
        sinks=("%at", *(f"%s{i}" for i in range(words - 1))),
        most_threads=_MOST_THREADS,
    )


def _store_then_load() -> Program:
    """Stores a word and loads it again; the loaded value is stored next."""

    def copy(_: int) -> str:
        return "st.volatile.shared.b32 [%at], %s0;\nld.volatile.shared.b32 %s0, [%at];"

    return Program(
        body=each(copy),
        copies=_LATENCY_COPIES // 2,
        counts={"st.volatile.shared.b32": 1, "ld.volatile.shared.b32": 1},
        registers=_REGISTERS,
        setup=f"{_setup(4)}\nbar.sync 0;",
        sinks=("%s0",),
        most_threads=_MOST_THREADS,
    )


def _store_then_fence() -> Program:
    """Measures how long a warp waits in a fence towards the async proxy after one store."""

    def copy(k: int) -> str:
        offset = k * _MOST_THREADS * 16
        return f"st.shared.v4.b32 [%at+{offset}], {{%s0, %s1, %s2, %s3}};\n{_FENCE};"

    return Program(
        body=each(copy),
        copies=_COPIES,
        counts={_FENCE: 1},
        registers=_REGISTERS,
        setup=f"{_setup(16)}\nbar.sync 0;",
        most_threads=_MOST_THREADS,
    )


def measurements() -> list[Measurement]:
    """Measures bytes per cycle with 1 to 16 warps, and latencies of one warp."""

    def launch(warps: int) -> Launch:
        return Launch(threads=32 * warps, repeats=_REPEATS, shared_bytes=_BYTES)

    wide = [
        (mnemonic, size, program)
        for programs in (
            {f"ld.shared.{_VECTORS[n]}": (4 * n, _loads(n)) for n in _VECTORS},
            {f"st.shared.{_VECTORS[n]}": (4 * n, _stores(n)) for n in _VECTORS},
            {"stmatrix.x4": (16, _stmatrix())},
            {f"ld.shared.b32 of {n}-way conflicts": (4, _conflicting_loads(n)) for n in (2, 8)},
            {
                f"ld.shared.{_VECTORS[n]} of one address": (4 * n, _loads_of_one_address(n))
                for n in _VECTORS
            },
        )
        for mnemonic, (size, program) in programs.items()
    ]
    found = [
        rate(f"{name}/throughput/{warps} warps", "bytes", program, launch(warps), 32 * size)
        for name, size, program in wide
        for warps in WARPS
    ]
    found += [
        latency(f"ld.shared.{_VECTORS[n]}/latency", _pointer_chase(n), launch(1)) for n in _VECTORS
    ]
    found.append(latency("st.shared+ld.shared/latency", _store_then_load(), launch(1)))
    found.append(latency("st.shared.v4+fence.proxy.async/latency", _store_then_fence(), launch(1)))
    found.append(
        latency("st.shared.v4+fence.proxy.async/latency/8 warps", _store_then_fence(), launch(8))
    )
    return found
