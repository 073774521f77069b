"""README shows the support table that the key list gives, and names that exist."""

from __future__ import annotations

import inspect
import pathlib
import re
import textwrap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fa4_jax
from benchmarks import parallel_projection
from fa4_jax import autodiff, bias, parallel, support

ROOT = pathlib.Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_support_table_is_the_key_lists():
    shown = re.search(r"<!-- support table:.*?-->\n(.*?)\n<!-- end", README, re.DOTALL)
    assert shown and shown.group(1).strip() == support.table().strip()


def test_every_parameter_of_attention_is_shown():
    call = README.split("out = fa4_jax.attention(")[1].split("\n    )")[0]
    shown = {"query", "key", "value"} | set(re.findall(r"^ +(\w+)=", call, re.MULTILINE))
    shown |= set(re.findall(r"(\w+)=None, mask", call)) | set(re.findall(r", (\w+)=None,", call))
    assert shown == set(inspect.signature(fa4_jax.attention).parameters)


def run(title: str) -> dict[str, Any]:
    """Runs an example of README as it is printed; returns the names that it defines."""
    shown = re.search(rf"<!-- {title}:.*?-->\n(.*?)\n<!-- end", README, re.DOTALL)
    assert shown
    names: dict[str, Any] = {}
    exec(textwrap.dedent(shown.group(1)), names)
    return names


def assert_close(found: Any, expected: Any) -> None:
    """Checks equality up to bfloat16's rounding."""
    found, expected = (np.asarray(x, np.float32) for x in (found, expected))
    np.testing.assert_allclose(found, expected, rtol=2e-2, atol=2e-2)


def test_the_first_example_runs_as_shown(capsys):
    names = run("first example")
    q, k, v = (names[x] for x in "qkv")
    assert_close(names["out"], jax.nn.dot_product_attention(q, k, v, is_causal=True))
    assert "(2, 512, 8, 64)\nforward: " in capsys.readouterr().out


def test_masks_run_as_shown():
    names = run("masks")
    assert names["out"].shape == (2, 512, 8, 64) and names["max_logit"].shape == (2, 8)
    q, ids = names["q"], np.asarray(names["ids"])
    chunks = np.arange(512) // 200
    seen = (ids[:, :, None] == ids[:, None]) & (ids[:, None] >= 0)
    seen &= np.tril(chunks[:, None] == chunks)
    out = fa4_jax.attention(q, q, q, mask=names["table"], is_causal=True)
    assert_close(out, fa4_jax.attention(q, q, q, mask=seen[:, None]))


def test_biases_run_as_shown():
    names = run("biases")
    q, i = names["q"], np.arange(512)
    assert names["dtable"].shape == (32, 8) and np.abs(names["dtable"]).max() > 0
    causal = jnp.asarray(names["slopes"])[:, None, None] * (i - i[:, None])[None]
    out = fa4_jax.attention(q, q, q, causal, is_causal=True)
    assert_close(fa4_jax.attention(q, q, q, bias.alibi(names["slopes"]), is_causal=True), out)
    scale = np.where(np.eye(512, dtype=bool), 2, 1)[None, None]
    scores = jnp.einsum("btnh,bsnh->bnts", q, q, preferred_element_type=jnp.float32) / 8
    shares = jax.nn.softmax(scores * scale, axis=-1)
    assert_close(names["out"], jnp.einsum("bnts,bsnh->btnh", shares, q.astype(jnp.float32)))


def test_context_parallelism_runs_as_shown(capsys):
    names = run("context parallelism")
    q, k, v = (parallel.from_zigzag(names[x], 4) for x in "qkv")
    assert_close(names["out"], fa4_jax.attention(q, k, v, is_causal=True))
    assert "all-gather" in capsys.readouterr().out


def test_decoding_runs_as_shown():
    names = run("decoding")
    cache, out = names["cache"], names["out"]
    assert cache.lengths.tolist() == [11, 7, 9] and out.shape == (3, 1, 8, 64)
    q, k, v = (names[x] for x in "qkv")
    for entry, length in enumerate((6, 2, 4)):
        key, value = (
            np.concatenate([x[entry, :length], *([x[entry, :1]] * 5)])[None] for x in (k, v)
        )
        expected = fa4_jax.attention(q[entry : entry + 1, :1], key, value)
        assert_close(out[entry : entry + 1], expected)


def test_the_names_for_checkpoints_are_shown():
    for name in (autodiff.OUTPUT_NAME, autodiff.LSE_NAME):
        assert f"`{name}`" in README


def test_the_note_shows_the_cost_models_table():
    note = (ROOT / "docs/notes/parallel.md").read_text()
    shown = re.search(r"<!-- table on paper:.*?-->\n(.*?)\n<!-- end", note, re.DOTALL)
    assert shown and shown.group(1).strip() == parallel_projection.table()
