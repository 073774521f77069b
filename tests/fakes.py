"""A manifest of the whole key list: the contract of docs/architecture.md, without any code."""

from __future__ import annotations

import pathlib

from fa4_jax import catalogue
from fa4_jax.key import KernelKey, Pass
from fa4_jax.manifest import Cubin, Factor, Launch, Manifest, Param, Result, Size
from fa4_jax.plan import Target

TILE = 128

_OPERANDS = {
    Pass.FORWARD: ("q", "k", "v", "extents"),
    Pass.BACKWARD_PRE: ("o", "do", "lse", "dlse", "extents"),
    Pass.BACKWARD: ("q", "k", "v", "do", "lse_log2", "delta", "extents", "dq_acc"),
    Pass.BACKWARD_POST: ("dq_acc", "do"),
}

_SCALARS = {
    Pass.FORWARD: ("scale_log2", "rescale_threshold_log2"),
    Pass.BACKWARD_PRE: (),
    Pass.BACKWARD: ("scale_log2", "scale"),
    Pass.BACKWARD_POST: ("scale",),
}


def _like(buffer: str, axes: tuple[int, ...]) -> tuple[Size, ...]:
    return tuple((Factor(buffer=buffer, axis=axis),) for axis in axes)


def _results(key: KernelKey) -> tuple[Result, ...]:
    whole = (0, 1, 2, 3)
    if key.kernel is Pass.FORWARD:
        return (
            Result("o", key.dtype, _like("q", whole)),
            Result("lse", "f32", _like("q", (0, 2, 1))),
        )
    if key.kernel is Pass.BACKWARD_POST:
        return (Result("dq", key.dtype, _like("do", whole)),)
    heads = _like("do", (0, 2))
    rows: Size = (Factor(buffer="do", axis=1, divisor=TILE, multiple=TILE),)
    tiles: Size = (Factor(buffer="do", axis=1, divisor=TILE),)
    accumulator = [Result("dq_acc", "f32", (*heads, rows, *_like("do", (3,))))]
    if key.deterministic:
        accumulator.append(Result("dq_order", "i32", (*heads, tiles)))
    if key.kernel is Pass.BACKWARD_PRE:
        vectors = [Result(name, "f32", (*heads, rows)) for name in ("lse_log2", "delta")]
        return (*vectors, *accumulator)
    gradients = [Result(f"d{x}", key.dtype, _like(x, whole)) for x in ("k", "v")]
    return (*gradients, *accumulator)


def _launch(key: KernelKey) -> Launch:
    operands = _OPERANDS[key.kernel]
    if key.deterministic and key.kernel is Pass.BACKWARD:
        operands += ("dq_order",)
    params = [Param(name, "f32") for name in _SCALARS[key.kernel]]
    if key.band:
        params += [Param(name, "i32") for name in ("window_left", "window_right")]
    one: Size = (Factor(),)
    return Launch(operands, _results(key), tuple(params), (one, one, one), (TILE, 1, 1), 0)


def fake_manifest(keys: tuple[KernelKey, ...] = catalogue.all_keys()) -> Manifest:
    """Records of the given kernels, without files."""
    records = {
        key: Cubin(key, _launch(key), key.name, f"{key.name}.cubin", "", 0, 0, {"m": TILE})
        for key in keys
    }
    return Manifest(records, {}, pathlib.Path())


def fake_target(keys: tuple[KernelKey, ...] = catalogue.all_keys()) -> Target:
    """A Hopper GPU with the given kernels."""
    return Target("sm_90a", fake_manifest(keys))
