"""README shows the support table that the key list gives, and names that exist."""

from __future__ import annotations

import inspect
import pathlib
import re
import textwrap
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import fa4_jax
from benchmarks import parallel_paper
from fa4_jax import support

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


def test_context_parallelism_runs_as_shown(capsys):
    shown = re.search(r"<!-- context parallelism:.*?-->\n(.*?)\n<!-- end", README, re.DOTALL)
    assert shown
    shapes = (2, 64, 4, 16), (2, 64, 2, 16), (2, 64, 2, 16)
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, x) for key, x in zip(keys, shapes, strict=True))
    names: dict[str, Any] = {"jax": jax, "AxisType": AxisType, "P": P, "q": q, "k": k, "v": v}
    exec(textwrap.dedent(shown.group(1)), names)
    expected = fa4_jax.attention(q, k, v, is_causal=True)
    np.testing.assert_allclose(names["out"], expected, rtol=1e-5, atol=1e-5)
    assert "all-gather" in capsys.readouterr().out


def test_the_note_shows_the_cost_models_table():
    note = (ROOT / "docs/notes/parallel.md").read_text()
    shown = re.search(r"<!-- table on paper:.*?-->\n(.*?)\n<!-- end", note, re.DOTALL)
    assert shown and shown.group(1).strip() == parallel_paper.table()
