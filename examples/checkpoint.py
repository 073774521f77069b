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
    """Writes a model of these sizes, whose weights this process has, over what is in a folder."""
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sizes.json").write_text(json.dumps(dataclasses.asdict(sizes)))
    weights = jax.device_get(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    # Of several processes this one writes alone; Orbax would wait for the others.
    me = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=me, active_processes={me}, barrier_sync_key_prefix="save"
    )
    with ocp.StandardCheckpointer(multiprocessing_options=alone) as checkpointer:
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
