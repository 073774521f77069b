"""The one place that calls the FFI: a kernel launch, described entirely by its manifest record."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.ffi
import jax.numpy as jnp
import numpy as np

from fa4_jax import mesh_types, runtime
from fa4_jax.manifest import Result, evaluate_size
from fa4_jax.plan import Kernel

_DTYPES = {"bf16": jnp.bfloat16, "fp16": jnp.float16, "f32": jnp.float32, "i32": jnp.int32}
_SCALARS = {"i32": np.int32, "f32": np.float32}


def launch(
    kernel: Kernel, buffers: Mapping[str, jax.Array], attributes: Mapping[str, float]
) -> dict[str, jax.Array]:
    """Launches one kernel.

    Args:
      kernel: which, and its operands, results and parameters.
      buffers: at least the kernel's operands, by name; all varying over the same manual axes.
      attributes: at least the kernel's runtime scalars, by name.

    Returns:
      The kernel's results by name. A result that is also an operand overwrites it.
    """
    description = kernel.launch
    operands = [buffers[name] for name in description.operands]
    shapes = {name: buffers[name].shape for name in description.operands}

    def struct(result: Result) -> jax.ShapeDtypeStruct:
        shape = tuple(evaluate_size(size, shapes) for size in result.shape)
        return mesh_types.struct(shape, _DTYPES[result.dtype], operands)

    scalars = {
        param.name: _SCALARS[param.kind](attributes[param.name])
        for param in description.params
        if param.kind in _SCALARS
    }
    aliases = {
        description.operands.index(result.name): index
        for index, result in enumerate(description.results)
        if result.name in description.operands
    }
    results = [struct(result) for result in description.results]
    call = jax.ffi.ffi_call(runtime.TARGET, results, input_output_aliases=aliases)
    outputs = call(*operands, kernel=kernel.key.name, **scalars)
    return {r.name: x for r, x in zip(description.results, outputs, strict=True)}
