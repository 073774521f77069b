"""The tables hold nothing that a Blackwell GPU refuses, and the machine code is what they say."""

from __future__ import annotations

import ast
import pathlib
import re

import numpy as np
import pytest

from fa4_jax import catalogue
from fa4_jax.conformance.compare import POLYNOMIAL_ERROR, POLYNOMIAL_SHARE
from fa4_jax.key import HEAD_DIM_TILES, KernelKey, Pass
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


@pytest.mark.parametrize("head_dim", HEAD_DIM_TILES)
def test_forward_tile_fits(head_dim: int) -> None:
    tile = tiles.FORWARD_TILES[head_dim]
    assert tile.columns_of_v(head_dim) % tile.span == 0 and tile.span % 32 == 0
    assert tile.ctas in (1, 2) and tile.keys % 8 == 0
    assert tile.n % 16 == 0 and tile.n <= 256
    assert all(keys % 32 == 0 for keys in tile.p_splits) and tile.p_splits[-1] == tile.n
    assert list(tile.p_splits) == sorted(set(tile.p_splits)) and len(tile.p_splits) > 1


@pytest.mark.parametrize("head_dim", HEAD_DIM_TILES)
def test_the_forward_has_columns_for_its_products(head_dim: int) -> None:
    """S has its buffers, O its query tiles, and P, 16 bits each, lies inside its own S."""
    tile, columns = tiles.FORWARD_TILES[head_dim], forward_description.description(head_dim).columns
    s, p, o = columns("s"), columns("p"), columns("o")
    assert (s.count, s.width) == (tiles.BUFFERS, tile.n)
    assert (p.count, p.width, p.shares) == (tiles.BUFFERS, tile.n // 2, "s")
    assert (o.count, o.width) == (tile.query_tiles, head_dim)
    for of_s, of_p in zip(s.firsts, p.firsts, strict=True):
        assert of_s <= of_p and of_p + p.width <= of_s + s.width


KEYS = [key for key in catalogue.keys("sm_100f") if key.kernel is Pass.FORWARD]


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.name)
def test_machine_code_is_what_the_design_says(key: KernelKey) -> None:
    """Products, tensor-memory moves, copies and exponentials, counted in the cubin.

    There is one body of softmax for each kind of block (masked or not), which computes its first
    exponentials again where a reference moves, and one of the correction warps' rescaling. The MMA
    warp has a body for a tile's first scores, one for steps that compute scores, too, and one for
    the last steps, which compute the next tile's first scores if there are two query tiles. Q and O
    move by tiles and, where a tile has several heads, by units; O is written and stored span by
    span. In a pair both CTAs run the same code.
    """
    assert counted(key, OPCODES) == expected(key)


def counted(key: KernelKey, opcodes: dict[str, tuple[int, ...]]) -> dict[str, int]:
    """Counts a cubin's instructions of these kinds, and its exponentials."""
    entry = cache.find(key)
    assert entry is not None, "run python -m kernels.build"
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
    tile, d = tiles.FORWARD_TILES[key.head_dim], key.head_dim
    bodies = 3 if key.band else 2
    spans = d * 2 // tile.span_bytes
    loads_of_k = tile.buffers_per_tile + 1  # a tile's first ones, and those in the loop
    scores = loads_of_k + (tile.query_tiles == 2)
    middle = max(tile.n // 32 - 2, 0)
    polynomial = 2 * tile.polynomial_pairs * middle if key.polynomial_exp2 else 0
    return {
        "UTCHMMA": tile.query_tiles * (scores * d // 16 + 2 * tile.n // 16),
        "LDTM": bodies * (tile.n // 32 + 1) + tile.query_tiles * (d // 32 + tile.span // 32),
        "STTM": bodies * tile.n // 32 + tile.query_tiles * d // 32,
        "UTMALDG": spans * (2 * tile.query_tiles + loads_of_k) + spans // tile.ctas,
        "UTMASTG": 2 * tile.query_tiles,
        "MUFU.EX2": bodies * (tiles.SPECULATIVE_KEYS + tile.n - polynomial + 1),
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
        tile.polynomial_pairs / 16 * max(tile.n - 64, 0) / tile.n
        for tile in tiles.FORWARD_TILES.values()
    ]
    assert pytest.approx(error, rel=0.01) == POLYNOMIAL_ERROR
    assert max(shares) == POLYNOMIAL_SHARE


@pytest.mark.parametrize("head_dims", tiles.BACKWARD_TILES)
def test_backward_tile_fits(head_dims: tuple[int, int]) -> None:
    tile = tiles.BACKWARD_TILES[head_dims]
    assert tile.head_dim >= head_dims[0] and tile.value_dim >= head_dims[1]
    if isinstance(tile, tiles.BackwardPairTile):
        assert tile.part * 2 % tile.span_bytes == 0
        # A row of a tile of dS is a swizzle span of 64 bytes, which the kernel writes by hand.
        assert tile.queries * 2 == 64 and tile.part == tiles.LANES
    else:
        assert tile.head_dim * 2 % tile.span_bytes == tile.value_dim * 2 % tile.span_bytes == 0
        # A last product past K's columns reads V's.
        beyond = tile.dq_products * tiles.LANES - tile.head_dim
        assert not tile.dq_transposed or beyond <= tile.value_dim


@pytest.mark.parametrize("head_dims", tiles.BACKWARD_TILES)
def test_the_backward_has_columns_for_its_products(head_dims: tuple[int, int]) -> None:
    """S, dP, dV, dK, dQ have their sizes; P and dS, 16 bits each, begin the halves of S and dP."""
    tile = tiles.BACKWARD_TILES[head_dims]
    columns = backward_description.description(*head_dims, False).columns
    if isinstance(tile, tiles.BackwardPairTile):
        widths = {
            **{"s": tiles.BUFFERS * tile.queries, "dp": tiles.BUFFERS * tile.queries},
            **{"dv": tile.part, "dk": tile.part, "dq": tiles.BUFFERS * tile.m},
        }
    else:
        widths = {
            **{"s": tile.m, "dp": tile.m, "dv": tile.value_dim, "dk": tile.head_dim},
            **{"dq": tile.dq_products * tile.dq_width},
        }
        for scores, of_16_bits in (("s", "p"), ("dp", "ds")):
            written, half = columns(of_16_bits), tile.m // 2
            assert written.shares == scores and written.width == half // 2
            assert written.firsts == tuple(columns(scores).first + half * i for i in range(2))
    for name, width in widths.items():
        assert columns(name).count * columns(name).step == width


BACKWARD_KEYS = [key for key in catalogue.keys("sm_100f") if key.kernel is Pass.BACKWARD]


@pytest.mark.parametrize("key", BACKWARD_KEYS, ids=lambda key: key.name)
def test_machine_code_of_the_backward_is_what_the_design_says(key: KernelKey) -> None:
    """Products, commits, tensor-memory moves, copies, additions and exponentials of the cubin.

    S, dP, dV of the first step stand before the loop, and so do its loads. A compute warp has half
    of the queries, a reduce warp a row (or column) of dQ; dV and dK are read in a loop each.
    """
    tile = tiles.BACKWARD_TILES[key.head_dim, key.value_dim]
    if isinstance(tile, tiles.BackwardPairTile):
        assert counted(key, BACKWARD_OPCODES) == expected_of_pair(tile, key)
        return
    m, n, columns = tile.m, tile.n, tile.head_dim + tile.value_dim
    spans = columns * 2 // tile.span_bytes
    dq_columns = tile.dq_products * tile.dq_width
    assert counted(key, BACKWARD_OPCODES) == {
        "UTCHMMA": (2 * columns + 3 * m + tile.dq_products * n) // 16,
        "UTCBAR": 2 + 2 + 2 + 1 + 1 + 1,  # S, dP, dV, dK, dQ, everything
        "LDTM": (m // 2 + m // 2 + dq_columns) // 32 + 2,
        "STTM": 1 + m // 2 // 32,  # P, dS
        "UTMALDG": spans * (1 + 2),  # K, V; Q, dO
        "UBLKCP": 2 * 2,  # lse_log2, delta
        "UTMASTG": spans,
        "RED": dq_columns // 4,
        "RED.release": int(key.deterministic),
        "MUFU.EX2": m // 2,
    }


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
        "MUFU.EX2": tile.queries,
    }


@pytest.mark.parametrize(
    "key",
    [key for key in catalogue.keys("sm_100f") if key.kernel is not Pass.FORWARD],
    ids=lambda key: key.name,
)
def test_programmatic_launches_wait_before_they_touch_global_memory(key: KernelKey) -> None:
    """Results of earlier launches are there for a thread only once it has waited."""
    entry = cache.find(key)
    assert entry is not None, "run python -m kernels.build"
    programmatic = key.kernel is not Pass.BACKWARD_PRE  # an ordinary launch, which lets main start
    assert entry.cubin.launch.programmatic == programmatic
    assert entry.ptx.count("griddepcontrol.launch_dependents") == 1
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
