"""The lines that docs/integrations.md shows run."""

from __future__ import annotations

import pathlib
import re
import textwrap
import types
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.integrations.packages import installed, normal, package

DOCS = (pathlib.Path(__file__).parents[2] / "docs/integrations.md").read_text()

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def packages_promote_ranks() -> Iterator[None]:
    with jax.numpy_rank_promotion("allow"):
        yield


def run(name: str, **names: Any) -> dict[str, Any]:
    """What an example leaves behind that is run as it is printed, with these names defined."""
    shown = re.search(rf"<!-- {name}: run.*?-->\n(.*?)\n<!-- end of {name} -->", DOCS, re.DOTALL)
    assert shown
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(textwrap.dedent(shown.group(1)), names)
    return names


def operands(rng: np.random.Generator) -> dict[str, jax.Array]:
    shapes = (2, 16, 4, 16), (2, 16, 2, 16), (2, 16, 2, 16)
    return dict(zip("qkv", normal(rng, *shapes), strict=True))


def assert_close(found: jax.Array, expected: jax.Array) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@installed("equinox")
def test_equinox(rng: np.random.Generator):
    eqx = package("equinox")
    (x,) = normal(rng, (16, 64))
    theirs = eqx.nn.MultiheadAttention(4, 64, key=jax.random.key(0))
    names = run("equinox", key=jax.random.key(0), model=theirs, x=x)
    expected = theirs(x, x, x, mask=jnp.tri(16, dtype=bool))
    assert_close(names["output"], expected)
    assert_close(names["model"](x, x, x, is_causal=True), expected)


@installed("tokamax")
def test_tokamax(rng: np.random.Generator):
    tokamax = package("tokamax")
    package("absl.flags").FLAGS(["tests"])  # tokamax would parse pytest's arguments
    arrays = operands(rng)
    names = run("tokamax", tokamax=tokamax, **arrays)
    expected = tokamax.dot_product_attention(
        *arrays.values(), is_causal=True, local_window_size=(128, 0), implementation="xla"
    )
    assert_close(names["output"], expected)


@installed("ejkernel")
def test_ejkernel(rng: np.random.Generator):
    ejkernel, modules = package("ejkernel"), package("ejkernel.modules")
    registry = package("ejkernel.kernels._registry").kernel_registry
    kept = registry.list_implementations("flash_attention")
    arrays = operands(rng)
    names = run("ejkernel", ejkernel=ejkernel, **arrays)
    expected = modules.flash_attention(*arrays.values(), causal=True, platform="xla")
    assert_close(names["output"], expected)
    registry._registry["flash_attention"] = kept


@installed("levanter")
def test_levanter(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch):
    hax, theirs = package("haliax"), package("levanter.layers.attention")
    monkeypatch.setattr(theirs, "_te_flash_attention", theirs._te_flash_attention)
    embed, position = hax.Axis("embed", 64), hax.Axis("position", 16)
    shown = {x: getattr(theirs, x) for x in ("Attention", "AttentionBackend", "AttentionConfig")}
    names = run("levanter", embed=embed, key=jax.random.key(0), **shown)
    x = hax.named(normal(rng, (16, 64))[0], (position, embed))
    mask = theirs.AttentionMask.causal()
    own = theirs.AttentionConfig(
        Embed=embed, num_heads=8, num_kv_heads=2, attn_backend=theirs.AttentionBackend.VANILLA
    )
    expected = theirs.Attention.init(own, key=jax.random.key(0))(x, mask)
    assert_close(names["layer"](x, mask).rearrange(expected.axes).array, expected.array)


@installed("maxtext")
def test_maxtext(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch):
    op = package("maxtext.layers.attention_op").AttentionOp
    monkeypatch.setattr(op, "apply_attention", op.apply_attention)
    run("maxtext")
    arrays = operands(rng)
    kinds = package("maxtext.common.common_types").AttentionType
    stand_in = types.SimpleNamespace(
        _context_parallel_size=lambda: 1,
        attention_kernel="cudnn_flash_jax",
        attention_type=kinds.GLOBAL,
        attn_logits_soft_cap=None,
        config=None,
        dropout_rate=0.0,
    )
    ids = jnp.ones((2, 16), jnp.int32)
    found, *_ = op.apply_attention(stand_in, *arrays.values(), ids, None, None, "train")
    expected = jax.nn.dot_product_attention(*arrays.values(), is_causal=True, scale=1.0)
    assert_close(found, expected)
