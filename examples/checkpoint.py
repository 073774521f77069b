"""The trained model in a folder: its sizes as JSON, its weights by Orbax."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import orbax.checkpoint as ocp
from flax import nnx

from language_model import LanguageModel, Sizes


def save(folder: Path, sizes: Sizes, model: LanguageModel) -> None:
    """Writes a model of these sizes to a folder, over what is there."""
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sizes.json").write_text(json.dumps(dataclasses.asdict(sizes)))
    with ocp.StandardCheckpointer() as checkpointer:
        weights = nnx.to_pure_dict(nnx.state(model, nnx.Param))
        checkpointer.save(folder / "weights", weights, force=True)


def load(folder: Path) -> tuple[Sizes, LanguageModel]:
    """Reads what `save` wrote, onto the first device.

    Raises:
      FileNotFoundError: it is not there.
    """
    folder = folder.absolute()
    sizes = Sizes(**json.loads((folder / "sizes.json").read_text()))
    model = nnx.eval_shape(lambda: LanguageModel(sizes, nnx.Rngs(0)))
    state = nnx.state(model, nnx.Param)
    where = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), nnx.to_pure_dict(state)
    )
    with ocp.StandardCheckpointer() as checkpointer:
        nnx.replace_by_pure_dict(state, checkpointer.restore(folder / "weights", shapes))
    nnx.update(model, state)
    return sizes, model
