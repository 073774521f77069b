"""README shows the support table that the key list gives, and names that exist."""

from __future__ import annotations

import inspect
import pathlib
import re

import fa4_jax
from fa4_jax import support

README = (pathlib.Path(__file__).parents[2] / "README.md").read_text()


def test_support_table_is_the_key_lists():
    shown = re.search(r"<!-- support table:.*?-->\n(.*?)\n<!-- end", README, re.DOTALL)
    assert shown and shown.group(1).strip() == support.table().strip()


def test_every_parameter_of_attention_is_shown():
    call = README.split("out = fa4_jax.attention(")[1].split("\n    )")[0]
    shown = {"query", "key", "value"} | set(re.findall(r"^ +(\w+)=", call, re.MULTILINE))
    shown |= set(re.findall(r"(\w+)=None, mask", call)) | set(re.findall(r", (\w+)=None,", call))
    assert shown == set(inspect.signature(fa4_jax.attention).parameters)
