"""Distributes train_lm.py's work among devices: the processes, the mesh, and what lies where.

data     the rows of a batch
seq      their bytes, in the order of the scheme's layout; attention is `fa4_jax.parallel`'s
tensor   attention's heads and the perceptron's hidden features
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import fa4_jax
from fa4_jax import parallel
from fa4_jax.parallel.layout import Layout
from language_model import Attend, AttendWithin, Rows

AXES = ("data", "seq", "tensor")
"""The axes, major first: neighbours along the last have the fastest links."""

VIRTUAL_DEVICES = 8
"""The CPU devices of all processes together, where there is no GPU."""

SCHEMES = {"ring": parallel.Ring, "all-gather": parallel.AllGather, "ulysses": parallel.Ulysses}

COLUMNS, ROWS = P(None, "tensor"), P("tensor", None)
KERNELS = {"project_in": COLUMNS, "project_out": ROWS, "widen": COLUMNS, "narrow": ROWS}
"""The axis of the weights [in, out] of layers with these names that is sharded along tensor."""


@dataclasses.dataclass(frozen=True)
class Processes:
    """The processes of one training run; each calls `start` before anything else of JAX.

    Attributes:
      coordinator: host and port of process 0, "host:port".
      count: number of all processes.
      index: number of this one.
    """

    coordinator: str | None = None
    count: int = 1
    index: int = 0

    def start(self) -> None:
        """Joins the other processes, and makes virtual devices in case there is no GPU."""
        flagged = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
        if not flagged and jax.config.values["jax_num_cpu_devices"] < 1:
            jax.config.update("jax_num_cpu_devices", max(1, VIRTUAL_DEVICES // self.count))
        if self.coordinator is not None:
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
            jax.distributed.initialize(self.coordinator, self.count, self.index)


def make_mesh(text: str) -> Mesh:
    """Makes a mesh from its description, "data=2,seq=4".

    Raises:
      ValueError: it is none, or there are too few devices.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = part.partition("=")
        if axis not in AXES or axis in sizes or not size.isdecimal() or int(size) < 1:
            raise ValueError("write sizes of data, seq or tensor, such as data=2,seq=4")
        sizes[axis] = int(size)
    names = tuple(axis for axis in AXES if axis in sizes)
    shape = tuple(sizes[axis] for axis in names)
    devices, count = jax.devices(), math.prod(shape)
    if count > len(devices):
        raise ValueError(f"there are {len(devices)} devices")
    if count < len(devices) and jax.process_count() > 1:
        raise ValueError(f"several processes use all of their {len(devices)} devices")
    auto = (AxisType.Auto,) * len(shape)
    return jax.make_mesh(shape, names, auto, devices=devices[:count])


@dataclasses.dataclass(frozen=True)
class Sharing:
    """A mesh, and how sequences are sharded on it."""

    mesh: Mesh
    scheme: str = "ring"
    layout: Layout = "zigzag"

    def check(self, batch: int, length: int, heads: int) -> None:
        """Raises ValueError where a size cannot be sharded."""
        chunks = self.size("seq") * (2 if self.layout == "zigzag" else 1)
        for name, value, parts in (
            ("--batch", batch, self.size("data")),
            ("--length", length, chunks if self.size("seq") > 1 else 1),
            ("--heads", heads, self.size("tensor")),
        ):
            if value % parts:
                raise ValueError(f"{name} {value} is no multiple of {parts}")

    def size(self, axis: str) -> int:
        """Returns the number of devices along an axis; 1 if the mesh has none of this name."""
        return self.mesh.shape.get(axis, 1)

    def spec(self, *axes: str | None) -> P:
        """Returns the spec of those axes that the mesh has."""
        return P(*(axis if axis in self.mesh.shape else None for axis in axes))

    @property
    def tokens(self) -> NamedSharding:
        """Returns the sharding of [B, T]."""
        return NamedSharding(self.mesh, self.spec("data", "seq"))

    def order(self, length: int) -> np.ndarray | None:
        """Returns the positions of a row's bytes in the order in which devices hold them."""
        if "seq" not in self.mesh.shape or self.layout == "contiguous":
            return None
        return np.asarray(parallel.to_zigzag(jax.numpy.arange(length), self.size("seq"), axis=0))

    def attend_within(self, implementation: Any) -> AttendWithin:
        """Computes causal attention of [B, T, heads, head_dim] within documents, on the mesh."""

        def within(documents: jax.Array) -> Attend:
            settings = {
                "segment_ids": documents,
                "is_causal": True,
                "implementation": implementation,
            }
            if "seq" not in self.mesh.shape:
                return functools.partial(fa4_jax.attention, **settings)
            return functools.partial(
                parallel.attention,
                scheme=SCHEMES[self.scheme]("seq", self.layout),
                mesh=self.mesh,
                specs=self.spec("data", "seq", "tensor"),
                **settings,
            )

        return within

    def put(self, x: np.ndarray, spec: P) -> jax.Array:
        """Places an array that every process has on the devices of all."""
        sharding = NamedSharding(self.mesh, spec)
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    def put_rows(self, rows: Rows) -> Rows:
        """Places [B, T + 1], whole along the length: that is odd, so no axis divides it."""
        return Rows(*(self.put(np.asarray(x), self.spec("data")) for x in rows))

    def put_state(self, state: Any) -> Any:
        """Places weights and the optimizer's state: kernels along the tensor axis, the rest
        everywhere.
        """

        def put(path: Any, x: jax.Array) -> jax.Array:
            names = jax.tree_util.keystr(path)
            found = [spec for name, spec in KERNELS.items() if f"'{name}'" in names]
            return self.put(np.asarray(x), self.spec(*found[0]) if found and x.ndim == 2 else P())

        return jax.tree_util.tree_map_with_path(put, state)

    def gather_state(self, state: Any) -> Any:
        """Returns the whole state on this process's first device."""
        whole = jax.jit(lambda x: x, out_shardings=NamedSharding(self.mesh, P()))(state)
        return jax.tree.map(lambda x: jax.numpy.asarray(x.addressable_data(0)), whole)
