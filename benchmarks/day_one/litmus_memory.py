"""Litmus programs without tensor memory: shared and global memory, registers, launches.

All of them run on Hopper, too.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from benchmarks.day_one import litmus_text as ptx
from benchmarks.day_one.gpu import GpuError, Shape
from benchmarks.day_one.litmus import (
    BOTH,
    SHARED_BYTES,
    Count,
    Kernel,
    Litmus,
    Machine,
    OnGpu,
    counted,
)
from benchmarks.day_one.litmus_tensor import statistics

_FULL, _COPIED, _EMPTY = 0, 8, 16
_TARGET_AT, _COPY_AT = 2048, 4096


def _remote_store_read(target: str, broken: bool) -> str:
    """The odd CTA stores into the even one's memory, where a bulk copy reads it (through the async
    proxy, as a product does); broken: without the writer's proxy fence.
    """
    store = ptx.wait(_EMPTY, "%t13", ptx.CLUSTER) + ptx.jitter(1)
    store += "shl.b32 %t9, %thread, 2;\nadd.s32 %t9, %t9, %smem;\n"
    store += "mapa.shared::cluster.u32 %t9, %t9, 0;\nmad.lo.u32 %t10, %i, 1000, %thread;\n"
    store += f"st.shared::cluster.b32 [%t9+{_TARGET_AT}], %t10;\n"
    store += "" if broken else "fence.proxy.async.shared::cluster;\n"
    store += ptx.arrive_at_even(_FULL)
    copy = ptx.wait(_FULL, scope=ptx.CLUSTER) + ptx.expect(_COPIED, 512)
    copy += f"add.s32 %t2, %smem, {_COPY_AT};\nmapa.shared::cluster.u32 %t2, %t2, %rank;\n"
    copy += f"add.s32 %t3, %smem, {_TARGET_AT};\nadd.s32 %t4, %smem, {_COPIED};\n"
    copy += (
        "mapa.shared::cluster.u32 %t4, %t4, %rank;\n"
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
        "[%t2], [%t3], 512, [%t4];\n"
    )
    read = ptx.one(0, copy) + ptx.wait(_COPIED)
    read += "shl.b32 %t9, %thread, 2;\nadd.s32 %t9, %t9, %smem;\n"
    read += f"ld.shared::cta.b32 %t11, [%t9+{_COPY_AT}];\nmad.lo.u32 %t10, %i, 1000, %thread;\n"
    read += ptx.check("%t11", "%t10") + ptx.WARP_MEETS + "bar.sync 1, 128;\n"
    # The odd CTA may store again: the copy is over and read.
    back = f"add.s32 %t1, %smem, {_EMPTY};\nmapa.shared::cluster.u32 %t1, %t1, 1;\n"
    back += "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%t1];"
    read += ptx.one(0, back)
    odd, end = ptx.label("ODD"), ptx.label("END")
    body = f"xor.b32 %t13, %parity, 1;\nsetp.ne.u32 %p3, %rank, 0;\n@%p3 bra {odd};\n"
    body += f"{read}bra {end};\n{odd}:\n{store}{end}:\n"
    last = "sub.s32 %t13, %repeats, 1;\nand.b32 %t13, %t13, 1;\nsetp.eq.u32 %p3, %rank, 0;\n"
    ended = ptx.label("ENDED")
    last += f"@%p3 bra {ended};\n{ptx.wait(_EMPTY, '%t13', ptx.CLUSTER)}{ended}:\n"
    before = ptx.barriers(4, 1, 1, cluster=True)
    return ptx.module(target, body, 128, before=before, after=last + ptx.MEET_PAIR, cluster=2)


def _reuse(target: str, broken: bool) -> str:
    """A bulk copy overwrites what ordinary loads have read, ordered by arrivals alone; broken:
    warps arrive before they read.
    """
    load = ptx.wait(_EMPTY, "%t13") + "and.b32 %t9, %i, 7;\nmul.wide.u32 %d1, %t9, 512;\n"
    load += f"add.s64 %d1, %data, %d1;\nadd.s64 %d1, %d1, {ptx.OWN};\n"
    load += ptx.bulk_load(_TARGET_AT, "%d1", 512, _FULL)
    read = "shl.b32 %t9, %thread, 2;\nadd.s32 %t9, %t9, %smem;\nand.b32 %t10, %i, 7;\n"
    read += f"mad.lo.u32 %t10, %t10, 1000, %thread;\nld.shared::cta.b32 %t11, [%t9+{_TARGET_AT}];\n"
    read += ptx.check("%t11", "%t10")
    body = "xor.b32 %t13, %parity, 1;\n" + ptx.warps(4, 1, ptx.when("eq.u32 %mine, %lane, 0", load))
    order = (ptx.arrive(_EMPTY) + ptx.jitter(3), read) if broken else (read, ptx.arrive(_EMPTY))
    body += ptx.warps(0, 4, ptx.wait(_FULL) + "".join(order))
    return ptx.module(target, body, 160, before=ptx.barriers(1, 1, 4))


_HELD = 160
_MIX = 33


def _registers(target: str, broken: bool) -> str:
    """Two warpgroups raise their threads to 192 registers and hold 160 values across a barrier;
    broken: the other two do not release theirs.
    """
    values = "".join(f"ld.volatile.global.b32 %v{i}, [%d1+{4 * i}];\n" for i in range(_HELD))
    inc = "setmaxnreg.inc.sync.aligned.u32 192;\n"
    hold = f"add.s64 %d1, %data, {ptx.OWN};\n" + values + "bar.sync 1, 256;\nmov.b32 %t9, 0;\n"
    for i in reversed(range(_HELD)):
        hold += f"mad.lo.u32 %t9, %t9, {_MIX}, %v{i};\n"
    hold += f"ld.volatile.global.b32 %t10, [%d1+{4 * _HELD}];\n" + ptx.check("%t9", "%t10")
    give = "" if broken else "setmaxnreg.dec.sync.aligned.u32 {};\n"
    # The warps that release registers leave at once: on a common path ptxas would spill for all.
    before = "".join(
        ptx.warps(first, 4, f"{give.format(count)}bra LEAVE;")
        for first, count in ((8, 80), (12, 48))
    )
    return ptx.module(target, hold, 512, before=before + inc, values=_HELD, registers=128)


def _held() -> np.ndarray:
    """Returns the values, and what the kernel computes from them."""
    values = np.random.default_rng(1).integers(0, 1 << 32, _HELD, np.uint32)
    mixed = 0
    for value in reversed(values.tolist()):
        mixed = (mixed * _MIX + value) % (1 << 32)
    return np.append(values, np.uint32(mixed))


_STEPS, _COLUMNS = 8, 512


def _ordered(target: str, broken: bool) -> str:
    """CTAs draw tickets; at each step the one with ticket t adds after t others have added, in
    fp32, where the order shows in the last bits. Warp 4 waits for the turn and releases it. Broken:
    it does not wait for the turn.

    The data: a ticket, then a counter and 512 sums of each step.
    """
    take = f"add.s64 %d1, %data, {ptx.OWN};\natom.relaxed.gpu.global.add.u32 %t9, [%d1], 1;\n"
    take += "st.shared::cta.b32 [%smem+64], %t9;\n"
    before = ptx.barriers(1, 4) + ptx.one(0, take) + ptx.MEET
    before += "ld.shared::cta.b32 %t12, [%smem+64];\n"
    # The ticket's number is spread so that sums round differently in another order.
    before += "mul.lo.u32 %t11, %t12, 2654435769;\nand.b32 %t10, %t12, 7;\n"
    before += "add.u32 %t10, %t10, 8;\nshr.u32 %t11, %t11, %t10;\n"
    before += "cvt.rn.f32.u32 %f2, %t11;\nmul.f32 %f2, %f2, 0f34800000;\n"
    step = f"mul.wide.u32 %d2, %i, {4 * (_COLUMNS + 4)};\nadd.s64 %d2, %d2, %data;\n"
    step += f"add.s64 %d2, %d2, {ptx.OWN + 16};\n"
    again = ptx.label("TURN")
    turn = f"{again}:\nld.acquire.gpu.global.u32 %t9, [%d2];\nsetp.lt.u32 %p3, %t9, %t12;\n"
    turn = "" if broken else turn + f"@%p3 bra {again};\n"
    turn += "mbarrier.arrive.shared::cta.b64 _, [%smem];\n" + ptx.wait(8)
    turn += "red.release.gpu.global.add.u32 [%d2], 1;\n"
    add = ptx.wait(0) + "shl.b32 %t9, %thread, 4;\ncvt.u64.u32 %d3, %t9;\n"
    add += "add.s64 %d3, %d3, %d2;\nadd.s64 %d3, %d3, 16;\n"
    add += "red.relaxed.gpu.global.add.v4.f32 [%d3], {%f2, %f2, %f2, %f2};\n" + ptx.arrive(8)
    body = step + ptx.warps(4, 1, ptx.when("eq.u32 %mine, %lane, 0", turn))
    body += ptx.warps(0, 4, add)
    return ptx.module(target, body, 160, before=before)


def _play_ordered(machine: Machine, broken: bool) -> Count:
    """Runs many more CTAs than fit; every sum must have the bits of the sequential one."""
    ctas = 24 if machine.emulated else 8 * machine.multiprocessors
    steps, launches = (2, 1) if machine.emulated else (_STEPS, 20)
    tickets = np.arange(ctas, dtype=np.uint32)
    values = tickets * np.uint32(2654435769) >> (tickets & np.uint32(7)) + np.uint32(8)
    expected = np.float32(0)
    for value in values.astype(np.float32) * np.float32(2.0**-22):
        expected = np.float32(expected + value)
    wrong, example = 0, ""
    for _ in range(launches):
        words = np.zeros(ptx.OWN // 4 + 4 + steps * (_COLUMNS + 4), np.uint32)
        address = machine.buffer(words)
        shape = Shape(ctas, 160, SHARED_BYTES)
        machine.launch(_ordered(machine.arch, broken), shape, (address, steps))
        machine.read(address, words)
        of_steps = words[ptx.OWN // 4 + 4 :].reshape(steps, _COLUMNS + 4)
        bad = of_steps[:, 4:] != expected.view(np.uint32)
        if bad.any():
            value = of_steps[:, 4:][bad][0]
            example = f"{value:#x} instead of {expected.view(np.uint32):#x}"
        wrong += int(bad.sum()) + int((of_steps[:, 0] != ctas).sum())
    checks = launches * steps * (_COLUMNS + 1)
    return Count(checks, checks, wrong, example)


def _storing(target: str, broken: bool) -> str:
    """A CTA fills 16 KB of shared memory, stores it by bulk and exits once it has been read;
    broken: it changes the memory instead of waiting. Word w of CTA c is 65536 (seed + c) + w.
    """
    fill = f"ld.global.b32 %t12, [%data+{ptx.OWN}];\nmov.u32 %t10, %ctaid.x;\n"
    fill += "add.s32 %t12, %t12, %t10;\nshl.b32 %t12, %t12, 16;\n"
    fill += "shl.b32 %t9, %thread, 2;\nadd.s32 %t9, %t9, %smem;\nadd.s32 %t12, %t12, %thread;\n"
    words = "".join(
        f"add.s32 %t11, %t12, {128 * k};\nst.shared::cta.b32 [%t9+{_TARGET_AT + 512 * k}], %t11;\n"
        for k in range(32)
    )
    send = "mov.u32 %t10, %ctaid.x;\nmul.wide.u32 %d1, %t10, 16384;\nadd.s64 %d1, %d1, %data;\n"
    send += f"add.s64 %d1, %d1, {ptx.OWN + 64};\nadd.s32 %t2, %smem, {_TARGET_AT};\n"
    send += "cp.async.bulk.global.shared::cta.bulk_group [%d1], [%t2], 16384;\n"
    send += "cp.async.bulk.commit_group;\n"
    send += "" if broken else "cp.async.bulk.wait_group.read 0;\n"
    body = fill + words + "fence.proxy.async.shared::cta;\n" + ptx.MEET + ptx.one(0, send)
    if broken:
        body += ptx.MEET + "mov.b32 %t12, 0;\n" + words
    return ptx.module(target, body, 128)


def _looking(target: str, broken: bool) -> str:
    """The launch after it checks what has arrived."""
    body = f"ld.global.b32 %t12, [%data+{ptx.OWN}];\nmov.u32 %t10, %ctaid.x;\n"
    body += "add.s32 %t12, %t12, %t10;\nshl.b32 %t12, %t12, 16;\nadd.s32 %t12, %t12, %thread;\n"
    body += "mul.wide.u32 %d1, %t10, 16384;\nadd.s64 %d1, %d1, %data;\n"
    body += f"add.s64 %d1, %d1, {ptx.OWN + 64};\nmul.wide.u32 %d2, %thread, 4;\n"
    body += "add.s64 %d1, %d1, %d2;\n"
    for k in range(32):
        body += f"ld.global.b32 %t9, [%d1+{512 * k}];\nadd.s32 %t11, %t12, {128 * k};\n"
        body += ptx.check("%t9", "%t11")
    return ptx.module(target, body, 128)


def _play_store_at_exit(machine: Machine, broken: bool) -> Count:
    """Stores and checks, round by round, each with another seed in a buffer of its own."""
    ctas = 2 if machine.emulated else 4 * machine.multiprocessors
    rounds = 1 if machine.emulated else 20
    shape = Shape(ctas, 128, SHARED_BYTES)
    words = np.zeros(ptx.OWN // 4 + 16 + ctas * 4096, np.uint32)
    found = np.zeros(4, np.uint32)
    total = np.zeros(4, np.uint64)
    for number in range(rounds):
        words[ptx.OWN // 4] = number + 1
        address = machine.buffer(words)
        for text in (_storing(machine.arch, broken), _looking(machine.arch, False)):
            machine.launch(text, shape, (address, 1))
        machine.read(address, found)
        total += found
    return counted(total.astype(np.uint32), rounds * ctas * 4096)


def _first(target: str, broken: bool) -> str:
    """Lets the next launch start, sleeps and writes 128 words for each CTA: seed + word."""
    before = "griddepcontrol.launch_dependents;\n" + ptx.jitter(7) * 4
    body = f"ld.global.b32 %t12, [%data+{ptx.OWN}];\nmov.u32 %t10, %ctaid.x;\n"
    body += "mad.lo.u32 %t9, %t10, 128, %thread;\nadd.s32 %t12, %t12, %t9;\n"
    body += "mul.wide.u32 %d1, %t9, 4;\nadd.s64 %d1, %d1, %data;\n"
    body += f"st.global.b32 [%d1+{ptx.OWN + 64}], %t12;\n"
    return ptx.module(target, body, 128, before=before)


def _second(target: str, broken: bool) -> str:
    """Starts early, waits for the launch before, loads its words by bulk copy, checks them and adds
    them to a second array; broken: it does not wait."""
    before = ("" if broken else "griddepcontrol.wait;\n") + "griddepcontrol.launch_dependents;\n"
    before += ptx.barriers(1)
    place = "mov.u32 %t10, %ctaid.x;\nmul.wide.u32 %d1, %t10, 512;\nadd.s64 %d1, %d1, %data;\n"
    place += f"add.s64 %d1, %d1, {ptx.OWN + 64};\n"
    body = place + ptx.one(0, ptx.bulk_load(_TARGET_AT, "%d1", 512, 0)) + ptx.wait(0)
    body += f"ld.global.b32 %t12, [%data+{ptx.OWN}];\nmad.lo.u32 %t9, %t10, 128, %thread;\n"
    body += "mov.u32 %t11, %nctaid.x;\nmul.wide.u32 %d2, %t11, 512;\nadd.s64 %d2, %d2, %d1;\n"
    body += "add.s32 %t12, %t12, %t9;\nshl.b32 %t9, %thread, 2;\nadd.s32 %t11, %t9, %smem;\n"
    body += f"ld.shared::cta.b32 %t10, [%t11+{_TARGET_AT}];\n" + ptx.check("%t10", "%t12")
    body += "cvt.u64.u32 %d3, %t9;\nadd.s64 %d2, %d2, %d3;\n" + ptx.jitter(9)
    body += "red.relaxed.gpu.global.add.u32 [%d2], %t10;\n"
    return ptx.module(target, body, 128, before=before)


def _third(target: str, broken: bool) -> str:
    """Starts early, waits, and checks the second array."""
    before = "griddepcontrol.wait;\ngriddepcontrol.launch_dependents;\n"
    body = f"ld.global.b32 %t12, [%data+{ptx.OWN}];\nmov.u32 %t10, %ctaid.x;\n"
    body += "mov.u32 %t11, %nctaid.x;\nadd.s32 %t11, %t11, %t10;\n"
    body += "mad.lo.u32 %t9, %t10, 128, %thread;\nadd.s32 %t12, %t12, %t9;\n"
    body += "mad.lo.u32 %t11, %t11, 128, %thread;\nmul.wide.u32 %d1, %t11, 4;\n"
    body += "add.s64 %d1, %d1, %data;\n"
    body += f"ld.global.b32 %t9, [%d1+{ptx.OWN + 64}];\n" + ptx.check("%t9", "%t12")
    return ptx.module(target, body, 128, before=before)


def _play_dependent(machine: Machine, broken: bool) -> Count:
    """Runs an ordinary launch and two programmatic ones, as a backward's three, many times in a
    row.
    """
    ctas = 2 if machine.emulated else 4 * machine.multiprocessors
    rounds = 1 if machine.emulated else 40
    texts = [part(machine.arch, broken) for part in (_first, _second, _third)]
    words = np.zeros(ptx.OWN // 4 + 16 + 2 * ctas * 128, np.uint32)
    found, total = np.zeros(4, np.uint32), np.zeros(4, np.uint64)
    addresses = []
    for number in range(rounds):
        words[ptx.OWN // 4] = 100_000 * (number + 1)
        addresses.append(machine.buffer(words))
    for address in addresses:
        for number, text in enumerate(texts):
            shape = Shape(ctas, 128, SHARED_BYTES, programmatic=number > 0)
            machine.launch(text, shape, (address, 1))
    for address in addresses:
        machine.read(address, found)
        total += found
    return counted(total.astype(np.uint32), rounds * 2 * ctas * 128)


CUBINS = Path(__file__).parents[2] / "fa4_jax" / "_cubins"


def _play_cubins(machine: Machine, broken: bool) -> Count:
    """Loads every kernel of the architecture; broken: those of the other one, which the driver must
    refuse. A check: the kernel is loaded, with the registers that the manifest says.
    """
    assert isinstance(machine, OnGpu)
    arch = machine.arch if not broken else next(x for x in BOTH if x != machine.arch)
    kernels = [
        kernel
        for kernel in json.loads((CUBINS / "manifest.json").read_text())["kernels"]
        if kernel["key"]["arch"] == arch
    ]
    wrong, example = 0, ""
    for kernel in kernels:
        image = (CUBINS / kernel["file"]).read_bytes()
        try:
            function = machine.gpu.load(image, kernel["symbol"])
            registers = machine.gpu.registers(function)
            failure = "" if registers == kernel["registers"] else f"{registers} registers"
        except GpuError as error:
            failure = str(error)
        if failure:
            wrong, example = wrong + 1, f"{kernel['file']}: {failure}"
    return Count(len(kernels), max(len(kernels), 1), wrong, example)


PROGRAMS = (
    Litmus(
        "cubins",
        _play_cubins,
        refuted="a kernel that the driver refuses, or another number of registers",
        broken="with kernels of the other architecture",
        noticed="",
        unnoticed="the emulator loads no cubins; on a GPU the other architecture's are refused",
        archs=BOTH,
        on_emulator=False,
    ),
    Litmus(
        "remote-store-read",
        Kernel(_remote_store_read, 128, 64, (100_000, 6), ctas=(132, 2), cluster=2),
        refuted="a word of another repetition than the one that was stored last",
        broken="without the writer's fence.proxy.async.shared::cluster",
        noticed="proxy-fence",
        archs=BOTH,
    ),
    Litmus(
        "reuse",
        Kernel(_reuse, 160, 128, (100_000, 6), ctas=(132, 1), data=statistics()),
        refuted="a word of a later copy",
        broken="with the arrival before the reads",
        noticed="race|wrong",
        archs=BOTH,
    ),
    Litmus(
        "registers",
        Kernel(_registers, 512, 256, (5_000, 1), ctas=(264, 1), data=_held()),
        refuted="a changed register, or warps that wait for registers for ever",
        broken="without setmaxnreg.dec",
        noticed="deadlock",
        hangs=True,
        archs=BOTH,
    ),
    Litmus(
        "ordered-additions",
        _play_ordered,
        refuted="a sum with other bits than in the tickets' order, or CTAs that wait for ever",
        broken="without the turn",
        noticed="wrong|reduction-order",
        rules=("ordered_reductions",),
        archs=BOTH,
    ),
    Litmus(
        "store-at-exit",
        _play_store_at_exit,
        refuted="a word that the next launch does not find",
        broken="without the wait for the store's reads",
        noticed="race|outstanding|wrong",
        archs=BOTH,
    ),
    Litmus(
        "dependent-launch",
        _play_dependent,
        refuted="a word that a launch before it has not written yet",
        broken="without griddepcontrol.wait",
        noticed="",
        unnoticed="the emulator runs one launch after the other",
        archs=BOTH,
    ),
)
