"""Attention for Equinox: a layer, a converter of models, and the function of a single head.

layer = fa4_jax.integrations.equinox.MultiheadAttention(8, 512, key=key)
model = fa4_jax.integrations.equinox.replace_attention(model)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp

from fa4_jax.api import attention

Model = TypeVar("Model")


def _refuse_dropout(dropout: eqx.nn.Dropout | None, inference: bool | None) -> None:
    """Raises NotImplementedError where Equinox would drop attention weights."""
    if dropout is None or (isinstance(dropout.p, int | float) and dropout.p == 0):
        return
    if not (dropout.inference if inference is None else inference):
        raise NotImplementedError(
            f"dropout p={dropout.p}: attention weights are not dropped; "
            "supported: p=0, or inference=True"
        )


def dot_product_attention(
    query: jax.Array,
    key_: jax.Array,
    value: jax.Array,
    mask: jax.Array | None = None,
    dropout: eqx.nn.Dropout | None = None,
    *,
    key: jax.Array | None = None,
    inference: bool | None = None,
) -> jax.Array:
    """Attention of one head, as `equinox.nn.MultiheadAttention` maps it over its heads.

    Args:
      query, key_, value: [T, H], [S, H] and [S, Hv], of one dtype.
      mask: boolean [T, S], True where a query may see a key. A row that sees no key is 0; Equinox
        takes the mean of all values there.
      dropout, inference: as in Equinox, if together they drop nothing.
      key: unused.

    Returns:
      [T, Hv], of query's dtype.

    Raises:
      NotImplementedError: dropout.
    """
    del key
    _refuse_dropout(dropout, inference)
    q, k, v = (x[:, None] for x in (query, key_, value))
    return attention(q, k, v, mask=mask)[:, 0]


class MultiheadAttention(eqx.nn.MultiheadAttention):
    """`equinox.nn.MultiheadAttention` with this library's attention for all heads at once.

    Fields, parameters and initial values are those of Equinox's layer.
    """

    def __call__(
        self,
        query: jax.Array,
        key_: jax.Array,
        value: jax.Array,
        mask: jax.Array | None = None,
        *,
        key: jax.Array | None = None,
        inference: bool | None = None,
        deterministic: bool | None = None,
        process_heads: Callable[..., tuple[jax.Array, jax.Array, jax.Array]] | None = None,
        deterministic_gradients: bool = False,
        **options: Any,
    ) -> jax.Array:
        """The layer's output [T, output_size].

        Args:
          query, key_, value: [T, query_size], [S, key_size], [S, value_size].
          mask: boolean [T, S] or [num_heads, T, S], True where a query may see a key. The
            kernels hold bits of it: prefer is_causal=True, or another option. A row that sees no
            key has attention 0; Equinox takes the mean of all values there.
          key: unused.
          inference, deterministic, process_heads: as in Equinox's layer.
          deterministic_gradients: `deterministic` of `fa4_jax.attention`.
          **options: other keyword arguments of `fa4_jax.attention`, return_residual excepted.

        Raises:
          ValueError: process_heads changes a shape, or an option is wrong.
          NotImplementedError: dropout outside of inference.
        """
        del key
        if options.get("return_residual"):
            raise ValueError(f"return_residual={options['return_residual']!r}: a layer has no use")
        _refuse_dropout(self.dropout, inference if deterministic is None else deterministic)
        projections = (self.query_proj, query), (self.key_proj, key_), (self.value_proj, value)
        heads = tuple(
            jax.vmap(proj)(x).reshape(x.shape[0], self.num_heads, -1) for proj, x in projections
        )
        if process_heads is not None:
            shapes = [x.shape for x in heads]
            heads = process_heads(*heads)
            if (found := [x.shape for x in heads]) != shapes:
                raise ValueError(f"process_heads changed the heads' shapes {shapes} to {found}")
        dtype = jnp.result_type(*heads)
        q, k, v = (x.astype(dtype) for x in heads)
        output = attention(q, k, v, mask=mask, deterministic=deterministic_gradients, **options)
        return jax.vmap(self.output_proj)(output.reshape(output.shape[0], -1))


def replace_attention(model: Model) -> Model:
    """The model with every `equinox.nn.MultiheadAttention` as a `MultiheadAttention` of ours.

    Parameters and fields are kept. Layers of other subclasses are left as they are.
    """

    def is_layer(x: Any) -> bool:
        return type(x) is eqx.nn.MultiheadAttention

    def convert(x: Any) -> Any:
        if not is_layer(x):
            return x
        layer = object.__new__(MultiheadAttention)
        for field in dataclasses.fields(x):
            object.__setattr__(layer, field.name, getattr(x, field.name))
        return layer

    return jax.tree.map(convert, model, is_leaf=is_layer)
