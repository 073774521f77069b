"""The tables hold nothing that a Blackwell GPU refuses, and the machine code is what they say."""

from __future__ import annotations

import ast
import pathlib
import re

import numpy as np
import pytest

from fa4_jax import catalogue
from fa4_jax.conformance.compare import POLYNOMIAL_ERROR, POLYNOMIAL_SHARE
from fa4_jax.key import KernelKey, Pass
from kernels.build import cache, cubin_info
from kernels.sm100 import backward_description, forward_description, tiles

OPCODES = {
    "UTCHMMA": (0x5EA, 0x9EA),  # A from shared memory, from tensor memory
    "LDTM": (0x9EE,),
    "STTM": (0x9ED,),
    "UTMALDG": (0x5B4,),
    "UTMASTG": (0x3B5,),
}
BACKWARD_OPCODES = OPCODES | {
    "UTCBAR": (0x3E9,),
    "UBLKCP": (0x3BA,),
    "RED": (0x9A6,),  # vectors of fp32
    "RED.release": (0x98E,),
}
MUFU, EX2 = 0x308, 2


@pytest.mark.parametrize(("head_dim", "pair"), tiles.FORWARD_TILES)
def test_forward_tile_fits(head_dim: int, pair: bool) -> None:
    tile = tiles.FORWARD_TILES[head_dim, pair]
    assert tile.ctas == 2 or not pair
    assert tile.columns_of_v(head_dim) % tile.span == 0 and tile.span % 32 == 0
    assert tile.ctas in (1, 2) and tile.keys % 8 == 0
    assert tile.n % 16 == 0 and tile.n <= 256
    assert all(keys % 32 == 0 for keys in tile.p_splits) and tile.p_splits[-1] == tile.n
    assert list(tile.p_splits) == sorted(set(tile.p_splits)) and len(tile.p_splits) > 1


@pytest.mark.parametrize(("head_dim", "pair"), tiles.FORWARD_TILES)
def test_the_forward_has_columns_for_its_products(head_dim: int, pair: bool) -> None:
    """S has its buffers, O its query tiles, and P, 16 bits each, lies inside its own S."""
    tile = tiles.FORWARD_TILES[head_dim, pair]
    key = KernelKey("sm_100f", Pass.FORWARD, "bf16", head_dim, pair=pair)
    columns = forward_description.of_key(key).columns
    s, p, o = columns("s"), columns("p"), columns("o")
    assert (s.count, s.width) == (tiles.BUFFERS, tile.n)
    assert (p.count, p.width, p.shares) == (tiles.BUFFERS, tile.n // 2, "s")
    assert (o.count, o.width) == (tile.query_tiles, head_dim)
    for of_s, of_p in zip(s.firsts, p.firsts, strict=True):
        assert of_s <= of_p and of_p + p.width <= of_s + s.width


KEYS = [key for key in catalogue.keys("sm_100f") if key.kernel is Pass.FORWARD]


@pytest.mark.each_kernel
@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.name)
def test_machine_code_is_what_the_design_says(key: KernelKey) -> None:
    """Products, tensor-memory moves, copies and exponentials, counted in the cubin.

    There is one body of softmax for each kind of block (masked or not, or by tags), which computes
    its first exponentials again where a reference moves, and one of the correction warps'
    rescaling. The MMA warp has a body for a tile's first scores, one for steps that compute scores,
    too, and one for the last steps, which compute the next tile's first scores if there are two
    query tiles. Q and O move by tiles and, where a tile has several heads, by units; O is written
    and stored span by span. In a pair both CTAs run the same code. A row's sink takes two
    exponentials, a soft cap one for each score that is loaded. Pages are copied by 64 keys or by
    16, for which the load warp has a body each.
    """
    assert counted(key, OPCODES) == expected(key)


def counted(key: KernelKey, opcodes: dict[str, tuple[int, ...]]) -> dict[str, int]:
    """Counts a cubin's instructions of these kinds, and its exponentials."""
    entry = cache.find(key)
    assert entry is not None, f"run python -m kernels.build for {key.name}"
    code = cubin_info.instructions(entry.code, entry.cubin.symbol)
    found = dict.fromkeys((*opcodes, "MUFU.EX2"), 0)
    for word in code:
        number = cubin_info.opcode(word)
        for name, numbers in opcodes.items():
            found[name] += number in numbers
        found["MUFU.EX2"] += number == MUFU and word[1] >> 10 & 0xF == EX2
    return found


def expected(key: KernelKey) -> dict[str, int]:
    """Counts the instructions that the design gives the forward kernel of a key."""
    tile, d = tiles.FORWARD_TILES[key.head_dim, key.pair], key.head_dim
    bodies = 4 if key.ranges else 3 if key.band else 2
    spans = d * 2 // tile.span_bytes
    loads_of_k = tile.buffers_per_tile + 1  # a tile's first ones, and those in the loop
    scores = loads_of_k + (tile.query_tiles == 2)
    later = tile.n // 32 - 1
    pairs = min(tile.polynomial_pairs, tiles.RANGES_POLYNOMIAL_PAIRS if key.ranges else 16)
    polynomial = 2 * pairs * later if key.polynomial_exp2 else 0
    copies = [(tile.keys // rows, tile.n // rows) for rows in (64, 16)] if key.paged else [(1, 1)]
    loads = [
        spans * (2 * tile.query_tiles + loads_of_k * of_k) + of_v * spans // tile.ctas
        for of_k, of_v in copies
    ]
    loaded = tiles.SPECULATIVE_KEYS + tile.n
    capped = bodies * loaded if key.reads_cap else 0
    return {
        "UTCHMMA": tile.query_tiles * (scores * d // 16 + 2 * tile.n // 16),
        "LDTM": bodies * (tile.n // 32 + 1) + tile.query_tiles * (d // 32 + tile.span // 32),
        "STTM": bodies * tile.n // 32 + tile.query_tiles * d // 32,
        "UTMALDG": sum(loads),
        "UTMASTG": 2 * tile.query_tiles,
        "MUFU.EX2": bodies * (loaded - polynomial + 1) + capped + 2 * key.ranges,
    }


def cubic() -> tuple[float, ...]:
    """Reads the coefficients in `softmax.py`, which cannot be imported without CuTe-DSL."""
    path = pathlib.Path(tiles.__file__).with_name("softmax.py")
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CUBIC":
            return ast.literal_eval(node.value)
    raise AssertionError(f"no CUBIC in {path}")


def test_what_polynomials_add_to_the_tolerance_follows_from_the_kernels() -> None:
    """The largest error of the cubic, and the largest share of a block that it computes."""
    a, b, c = cubic()
    f = np.linspace(0, 1, 100_001)[:-1]
    error = np.abs((1 + f * (a + f * (b + f * c))) / np.exp2(f) - 1).max()
    shares = [
        tile.polynomial_pairs / 16 * (tile.n - 32) / tile.n for tile in tiles.FORWARD_TILES.values()
    ]
    assert pytest.approx(error, rel=0.01) == POLYNOMIAL_ERROR
    assert max(shares) == POLYNOMIAL_SHARE


@pytest.mark.parametrize("of", tiles.BACKWARD_TILES, ids=str)
def test_backward_tile_fits(of: tuple[int, int, bool]) -> None:
    tile, (head_dim, value_dim, _) = tiles.BACKWARD_TILES[of], of
    assert tile.head_dim >= head_dim and tile.value_dim >= value_dim
    assert tile.head_dim * 2 % tile.span_bytes == tile.value_dim * 2 % tile.span_bytes == 0
    if isinstance(tile, tiles.BackwardPairTile):
        assert tile.part * 2 % tile.span_bytes == 0
        # A row of a tile of dS is a swizzle span of 64 bytes, which the kernel writes by hand.
        assert tile.queries * 2 == 64 and tile.part == tiles.LANES
    elif isinstance(tile, tiles.BackwardM256Tile):
        assert tile.part * 2 % tile.part_span_bytes == tile.value_part * 2 % tile.span_bytes == 0
        # A row of a tile of dS is a swizzle span, too.
        assert tile.queries * 2 in (64, 128) and tile.queries == tile.parts * tile.chunk
        # A warp of the reduce warps has columns of one block of 128, and lanes past kt read V's.
        beyond = (tiles.LANES - tile.part) * tile.n
        assert not tile.dq_transposed or tile.part % 32 == 0
        assert not tile.dq_transposed or beyond <= tile.keys * tile.value_dim
    else:
        # A last product past K's columns reads V's.
        beyond = tile.dq_products * tiles.LANES - tile.head_dim
        assert not tile.dq_transposed or beyond <= tile.value_dim


@pytest.mark.parametrize("of", tiles.BACKWARD_TILES, ids=str)
def test_the_backward_has_columns_for_its_products(of: tuple[int, int, bool]) -> None:
    """S, dP, dV, dK, dQ have their sizes; a warpgroup writes P and dS over columns it has read."""
    tile, (head_dim, value_dim, pair) = tiles.BACKWARD_TILES[of], of
    columns = backward_description.description(head_dim, value_dim, False, pair).columns
    widths = {"s": tile.m, "dp": tile.m, "dv": tile.value_dim, "dk": tile.head_dim}
    if isinstance(tile, tiles.BackwardPairTile):
        widths |= {"dv": tile.part, "dk": tile.part, "dq": tiles.BUFFERS * tile.m}
    else:
        products = 1 if isinstance(tile, tiles.BackwardM256Tile) else tile.dq_products
        widths["dq"] = products * tile.dq_width
        own = tile.m // 2 if isinstance(tile, tiles.BackwardTile) else tile.chunk
        for scores, of_16_bits in (("s", "p"), ("dp", "ds")):
            written = columns(of_16_bits)
            assert written.shares == scores and written.count * written.width == tile.m // 2
            assert written.width <= own
            assert written.firsts == tuple(columns(scores).first + own * i for i in range(2))
    for name, width in widths.items():
        assert columns(name).count * columns(name).step == width


def test_dq_of_a_pair_spares_p() -> None:
    """Where dQ takes columns of S, it does not take those of P, which dV still reads."""
    for (head_dim, value_dim, pair), tile in tiles.BACKWARD_TILES.items():
        if isinstance(tile, tiles.BackwardM256Tile):
            columns = backward_description.description(head_dim, value_dim, False, pair).columns
            dq, p = columns("dq"), columns("p")
            assert dq.shares in ("", "s") and dq.first >= p.end


def test_the_odd_lanes_of_a_transposed_dq_read_values() -> None:
    """V lies right behind kt: nothing writes there while products read it."""
    description = backward_description.description(192, 128, False, True)
    regions = {region.name: region for region in description.regions}
    behind = description.offsets["kt"] + regions["kt"].num_bytes
    assert description.offsets["v"] == behind


BACKWARD_KEYS = [key for key in catalogue.keys("sm_100f") if key.kernel is Pass.BACKWARD]


@pytest.mark.each_kernel
@pytest.mark.parametrize("key", BACKWARD_KEYS, ids=lambda key: key.name)
def test_machine_code_of_the_backward_is_what_the_design_says(key: KernelKey) -> None:
    """Products, commits, tensor-memory moves, copies, additions and exponentials of the cubin.

    S, dP, dV of the first step stand before the loop, and so do its loads. A compute warp has half
    of the queries, a reduce warp a row (or column) of dQ; dV and dK are read in a loop each.
    """
    tile = tiles.BACKWARD_TILES[key.head_dim, key.value_dim, key.pair]
    if isinstance(tile, tiles.BackwardPairTile):
        assert counted(key, BACKWARD_OPCODES) == expected_of_pair(tile, key)
        return
    if isinstance(tile, tiles.BackwardM256Tile):
        assert counted(key, BACKWARD_OPCODES) == expected_of_m256(tile, key)
        return
    m, n, columns = tile.m, tile.n, tile.head_dim + tile.value_dim
    spans = columns * 2 // tile.span_bytes
    dq_columns = tile.dq_products * tile.dq_width
    assert counted(key, BACKWARD_OPCODES) == {
        "UTCHMMA": (2 * columns + 3 * m + tile.dq_products * n) // 16,
        "UTCBAR": 2 + 2 + 2 + 1 + 1 + 1,  # S, dP, dV, dK, dQ, everything
        "LDTM": (m // 2 + m // 2 + dq_columns) // 32 + 2,
        # P, with ranges or a bias by 32 queries, and dS.
        "STTM": (m // 2 // 32 if key.ranges or key.bias else 1) + m // 2 // 32,
        "UTMALDG": spans * (1 + 2),  # K, V; Q, dO
        "UBLKCP": 2 * 2,  # lse_log2, delta
        "UTMASTG": spans,
        "RED": dq_columns // 4,
        "RED.release": int(key.deterministic),
        "MUFU.EX2": m // 2 * exponentials(key),
    }


def exponentials(key: KernelKey) -> int:
    """Counts a pair's exponentials: P with and without a soft cap, and the score with one."""
    return 3 if key.reads_cap else 1


def expected_of_pair(tile: tiles.BackwardPairTile, key: KernelKey) -> dict[str, int]:
    """Both CTAs run the same code. S, dP and loads of q, do stand before the loop and in it."""
    m, n, d = tile.m, tile.n, tile.head_dim
    spans, spans_of_part = (columns * 2 // tile.span_bytes for columns in (d, tile.part))
    return {
        "UTCHMMA": (2 * 2 * d + 2 * m + n) // 16,
        "UTCBAR": 2 + 2 + 1 + 1 + 1 + 1,  # S, dP, dV, dK, dQ, everything
        "LDTM": (2 * tile.queries + m) // 32 + 2,
        "STTM": 0,
        "UTMALDG": spans * (2 + 2 * 2) + spans_of_part * 3,  # k, v, q, do; kt, qt, dot
        "UBLKCP": 2 * 2,  # lse_log2, delta
        "UTMASTG": 2 * spans,
        "RED": m // 4,
        "RED.release": int(key.deterministic),
        "MUFU.EX2": tile.queries * exponentials(key),
    }


def expected_of_m256(tile: tiles.BackwardM256Tile, key: KernelKey) -> dict[str, int]:
    """Both CTAs run the same code. S, dP, dV and loads of q, do, dot stand before the loop and in
    it."""
    m, n, columns = tile.m, tile.n, tile.head_dim + tile.value_dim
    spans = columns * 2 // tile.span_bytes  # of k and v, of q and do
    of_part = tile.part * 2 // tile.part_span_bytes
    of_values = tile.value_part * 2 // tile.span_bytes
    return {
        "UTCHMMA": (2 * columns + 2 * m + m + n) // 16,
        "UTCBAR": 2 + 2 + 2 + 1 + 1 + 1,  # S, dP, dV, dK, dQ, everything
        "LDTM": (m // 2 + m // 2 + tile.dq_width) // 32 + 2,
        "STTM": 2 * tile.parts,  # P, dS
        "UTMALDG": spans * (1 + 2) + of_part * 2 + of_values * 2,  # k v, q do; kt, qt; dot
        "UBLKCP": 2 * 2,  # lse_log2, delta
        "UTMASTG": spans,
        "RED": tile.dq_width // 4,
        "RED.release": int(key.deterministic),
        "MUFU.EX2": m // 2 * exponentials(key),
    }


_SPLIT = (Pass.FORWARD_SPLIT, Pass.FORWARD_JOIN)
_STARTED_EARLY = (*_SPLIT, Pass.BACKWARD_PRE, Pass.BACKWARD, Pass.BACKWARD_POST)


@pytest.mark.each_kernel
@pytest.mark.parametrize(
    "key",
    [
        key
        for key in (*catalogue.keys("sm_100f"), *catalogue.keys("sm_90a"))
        if key.kernel in (_STARTED_EARLY if key.arch == "sm_100f" else _SPLIT)
    ],
    ids=lambda key: key.name,
)
def test_programmatic_launches_wait_before_they_touch_global_memory(key: KernelKey) -> None:
    """Results of earlier launches are there for a thread only once it has waited."""
    entry = cache.find(key)
    assert entry is not None, f"run python -m kernels.build for {key.name}"
    # These are ordinary launches, which let the next one start.
    programmatic = key.kernel not in (Pass.BACKWARD_PRE, Pass.FORWARD_SPLIT)
    assert entry.cubin.launch.programmatic == programmatic
    lets_next_start = key.kernel is not Pass.FORWARD_JOIN
    assert entry.ptx.count("griddepcontrol.launch_dependents") == lets_next_start
    body = entry.ptx[entry.ptx.index("{\n", entry.ptx.index(".entry")) :]
    *waits, _ = body.split("griddepcontrol.wait")
    assert len(waits) == programmatic * (
        2 if key.kernel is Pass.BACKWARD and key.deterministic else 1
    )
    if programmatic:
        before = "".join(waits)
        first, *ticket = waits
        assert "global" not in first
        assert all(text.count("global") == text.count("atom.relaxed.gpu") == 1 for text in ticket)
        # Every thread passes it: no branch before it goes beyond it.
        assert not set(re.findall(r"bra\S*\s+(\$L\w+)", before)) - set(
            re.findall(r"(\$L\w+):", before)
        )
