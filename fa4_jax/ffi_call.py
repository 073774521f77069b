"""The one place that calls the FFI: kernel launches, described entirely by their records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
    kernels: Sequence[Kernel], buffers: Mapping[str, jax.Array], attributes: Mapping[str, float]
) -> dict[str, jax.Array]:
    """Launches kernels one after another, in one call.

    A kernel reads results of earlier ones by their names, and overwrites those that it has as
    operand and result. XLA sees one operation: whatever the kernels leave is held until it ends.

    Args:
      kernels: which, each with its operands, results and parameters.
      buffers: at least the operands that no earlier kernel results in, by name; all varying over
        the same manual axes.
      attributes: at least the kernels' runtime scalars, by name.

    Returns:
      The kernels' results by name, of results of the same name the last one. A result that is also
      an operand overwrites it.
    """
    operands: list[str] = []
    results: list[Result] = []
    structs: list[jax.ShapeDtypeStruct] = []
    aliases: dict[int, int] = {}
    shapes: dict[str, tuple[int, ...]] = {}  # of all that the next kernel may read
    scalars: dict[str, np.generic] = {}
    made: set[str] = set()
    for description in (kernel.launch for kernel in kernels):
        operands += [name for name in description.operands if name not in shapes]
        shapes |= {name: buffers[name].shape for name in operands if name not in shapes}
        own = {
            result.name: tuple(evaluate_size(size, shapes) for size in result.shape)
            for result in description.results
        }
        for result in description.results:
            if result.name in description.operands:
                if result.name in made:
                    continue  # It is the earlier result.
                aliases[operands.index(result.name)] = len(results)
            results.append(result)
            of_call = [buffers[name] for name in operands]
            structs.append(mesh_types.struct(own[result.name], _DTYPES[result.dtype], of_call))
        shapes |= own
        made |= set(own)
        scalars |= {
            param.name: _SCALARS[param.kind](attributes[param.name])
            for param in description.params
            if param.kind in _SCALARS
        }
    call = jax.ffi.ffi_call(runtime.TARGET, structs, input_output_aliases=aliases)
    names = ",".join(kernel.key.name for kernel in kernels)
    outputs = call(*(buffers[name] for name in operands), kernel=names, **scalars)
    return {result.name: x for result, x in zip(results, outputs, strict=True)}
