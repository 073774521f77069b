"""The descriptions of all kernels: budgets, places that do not overlap, names that exist."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import pathlib
import subprocess
import sys

import pytest

from fa4_jax import catalogue
from fa4_jax.key import KernelKey, Pass
from kernels import description as parts
from kernels.build import cache
from kernels.common import launches
from kernels.description import Description
from kernels.descriptions import describe, warps_of_roles

REPOSITORY = pathlib.Path(__file__).parents[2]
KEYS = [key for key in catalogue.all_keys() if key.dtype == "bf16"]
TENSOR_MEMORY = {
    Pass.FORWARD: ("softmax", "correction"),
    Pass.TANGENT: ("softmax",),
    Pass.BACKWARD: ("reduce", "compute"),
}
"""The roles that reach tensor memory."""
EVERY = pytest.mark.parametrize("key", KEYS, ids=lambda key: key.name)


@EVERY
def test_every_warp_has_one_role(key: KernelKey) -> None:
    description = describe(key)
    warps = [warp for role in description.roles for warp in role.all_warps]
    assert sorted(warps) == list(range(description.threads // parts.LANES))
    assert len({role.name for role in description.roles}) == len(description.roles)


@EVERY
def test_registers_fit(key: KernelKey) -> None:
    """setmaxnreg is a warpgroup's: its roles agree on a multiple of 8, from 24 to 240."""
    description = describe(key)
    if not any(role.registers for role in description.roles):
        return
    budgets = collections.defaultdict[int, set[int]](set)
    for role in description.roles:
        for warp in role.all_warps:
            budgets[warp // parts.WARPS_PER_WARPGROUP].add(role.registers)
    assert all(len(counts) == 1 for counts in budgets.values())
    counts = [count for (count,) in budgets.values()]
    assert all(count % 8 == 0 and 24 <= count <= 240 for count in counts)
    # A CTA has the registers that it is launched with, a multiple of 8 for each thread. A raise
    # beyond them never ends, even if the multiprocessor has some left (seen on an H200).
    launched = parts.REGISTERS_PER_SM // description.threads // 8 * 8
    assert sum(counts) <= launched * len(counts)


@EVERY
def test_barriers_name_roles(key: KernelKey) -> None:
    description = describe(key)
    roles = {role.name for role in description.roles} - {"idle"}
    for barrier in description.barriers:
        assert {signal.role for signal in barrier.signals} | set(barrier.waits) <= roles
        assert barrier.signals and barrier.waits and barrier.count > 0
        assert description.arrivals(barrier) >= 1
        assert not barrier.of_pair or description.ctas == 2
    names = [barrier.name for barrier in description.barriers]
    assert len(names) == len(set(names))


@EVERY
def test_named_barriers_are_apart(key: KernelKey) -> None:
    """Number 0 is the CTA's own."""
    description = describe(key)
    numbers = [
        number
        for barrier in description.named_barriers
        for number in range(barrier.first, barrier.first + barrier.count)
    ]
    assert len(numbers) == len(set(numbers))
    assert all(0 < number < parts.NAMED_BARRIERS for number in numbers)
    for barrier in description.named_barriers:
        meeting = [description.role(name) for name in barrier.roles]
        assert barrier.threads <= sum(len(role.all_warps) for role in meeting) * parts.LANES


@EVERY
def test_shared_memory_fits(key: KernelKey) -> None:
    description = describe(key)
    assert description.shared_bytes <= parts.MAX_SHARED_BYTES
    own = [region for region in description.regions if not region.shares]
    ends = [(description.offsets[r.name], r.num_bytes) for r in own]
    first = 8 * description.barrier_count
    for begin, num_bytes in ends:
        assert begin >= first
        first = begin + num_bytes
    for region in description.regions:
        assert description.offsets[region.name] % region.alignment == 0
        if region.shares:
            (whole,) = (other for other in own if other.name == region.shares)
            assert region.num_bytes <= whole.num_bytes
            assert not region.transposed or region.shape[:2] == whole.shape[1::-1]
        if region.span_bytes:
            columns = region.shape[0] if region.transposed else region.shape[1]
            assert columns * 2 % region.span_bytes == 0


@EVERY
def test_tensor_memory_fits(key: KernelKey) -> None:
    """Columns are apart, but for those that say whose they share; two that share may be apart."""
    tensor_memory = describe(key).tensor_memory
    on_blackwell = key.arch == "sm_100f" and key.kernel in TENSOR_MEMORY
    assert bool(tensor_memory) == on_blackwell
    places = {
        columns.name: {
            column for first in columns.firsts for column in range(first, first + columns.width)
        }
        for columns in tensor_memory
    }
    for columns in tensor_memory:
        assert len(places[columns.name]) == columns.count * columns.width
        assert places[columns.name] <= set(range(parts.TENSOR_MEMORY_COLUMNS))
        assert columns.end == max(places[columns.name]) + 1
    for a, b in itertools.combinations(tensor_memory, 2):
        shared = places[a.name] & places[b.name]
        aliased = bool({a.name, a.shares} & {b.name, b.shares} - {""})
        named = a.name == b.shares or b.name == a.shares
        assert named <= bool(shared) <= aliased, (a.name, b.name)


@EVERY
def test_maps_are_of_whole_spans(key: KernelKey) -> None:
    for wanted in describe(key).maps:
        assert wanted.columns * 2 % wanted.span_bytes == 0
        assert wanted.rows % 8 == 0 and wanted.rows <= 256


@pytest.mark.each_kernel
@EVERY
def test_the_kernel_is_what_the_description_says(key: KernelKey) -> None:
    """Its launch is the description's, and so are the initialisations in its text."""
    entry = cache.find(key)
    assert entry is not None, f"run python -m kernels.build for {key.name}"
    description, launch = describe(key), entry.cubin.launch
    assert launch.block == (description.threads, 1, 1)
    assert launch.dynamic_smem_bytes == description.shared_bytes
    assert launch.cluster == (description.ctas, 1, 1)
    assert launch == launches.launch(key, description)
    assert entry.ptx.count("mbarrier.init.shared") == description.barrier_count


@EVERY
def test_tickets_are_of_persistent_kernels_and_count_from_zero(key: KernelKey) -> None:
    """The handler zeroes the counter of a forward, of tangents or of a bias's gradient.

    The kernel before a backward zeroes that one's.
    """
    division, launch = describe(key).division, launches.launch(key, describe(key))
    by_tiles = key.kernel in (Pass.FORWARD, Pass.TANGENT, Pass.BIAS_GRADIENT)
    zeroed = [result.name for result in launch.results if result.zeroed]
    assert zeroed == (["tile_ticket"] if division.by_ticket and by_tiles else [])
    counts = "dq_ticket" in {result.name for result in launch.results}
    backwards = (Pass.BACKWARD_PRE, Pass.BACKWARD)
    assert counts == (key.kernel in backwards and (division.by_ticket or key.deterministic))
    takes_tickets = by_tiles and key.band
    if key.kernel in backwards:
        main = describe(dataclasses.replace(key, kernel=Pass.BACKWARD))
        assert division.by_ticket == main.division.by_ticket
        takes_tickets = True
    assert division.by_ticket == (key.arch == "sm_90a" and takes_tickets)
    assert division.persistent or not division.by_ticket or key.kernel is Pass.BACKWARD_PRE


def test_launches_need_no_cute_dsl() -> None:
    """Environments without it run the tests that use them, by `tests.fakes`."""
    code = "import sys, tests.fakes as f; f.fake_manifest(); sys.exit('cutlass' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=REPOSITORY)


@pytest.mark.parametrize(
    "key",
    [key for key in KEYS if key.arch == "sm_100f" and key.kernel in TENSOR_MEMORY],
    ids=lambda key: key.name,
)
def test_warps_reach_the_lanes_of_their_place(key: KernelKey) -> None:
    """A warp reaches the quarter of tensor memory of its index modulo 4."""
    for name in TENSOR_MEMORY[key.kernel]:
        role = describe(key).role(name)
        assert role.warps == 4 and role.first_warp % 4 == 0


def _tiny(ctas: int = 2) -> Description:
    roles = (parts.Role("a", 0, 4, "computes", groups=2), parts.Role("b", 8, 1, "loads"))
    barriers = (
        parts.Barrier("g", (parts.group("a"), parts.one("b")), ("b",), "step", 2, of_pair=True),
        parts.Barrier("w", (parts.warps("a"),), ("b",), "step"),
    )
    regions = (
        parts.Region("x", (3,), "", "f32"),
        parts.operand("y", (8, 64, 2), 128, ""),
        parts.operand("z", (8, 128), 128, "", shares="y"),
    )
    return Description(roles, barriers, (), regions, parts.Division(1), ctas=ctas)


def test_arrivals_count_warps_and_ctas() -> None:
    description = _tiny()
    of_group, of_all = description.barriers
    assert [description.arrivals(of_group, even) for even in (True, False)] == [10, 5]
    assert [description.arrivals(of_all, even) for even in (True, False)] == [8, 8]
    assert [first for _, first in description.first_barriers()] == [0, 2]


def test_regions_follow_each_other() -> None:
    description = _tiny()
    assert description.offsets == {"x": 24, "y": 1024, "z": 1024}
    assert description.shared_bytes == 1024 + 2048
    assert description.threads == 9 * 32


def test_groups_have_names_of_their_own() -> None:
    named = warps_of_roles(_tiny())
    assert named == {"a0": (0, 1, 2, 3), "a1": (4, 5, 6, 7), "b": (8,)}
    assert list(itertools.chain(*named.values())) == list(range(9))
