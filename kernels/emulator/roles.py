"""Names for the warps of this project's kernels, by which a report adds up."""

from __future__ import annotations

from fa4_jax.key import KernelKey, Pass

_WARPGROUP = 4


def roles(key: KernelKey, block: tuple[int, int, int]) -> dict[str, tuple[int, ...]]:
    """Warp indices of a kernel's roles.

    Args:
      block: threads of a CTA, as in the kernel's `Launch`.

    Raises:
      NotImplementedError: the roles of the architecture are not known here.
    """
    if key.arch != "sm_90a":
        raise NotImplementedError(f"the warp roles of {key.name}")
    warps = block[0] * block[1] * block[2] // 32
    if key.kernel in (Pass.BACKWARD_PRE, Pass.BACKWARD_POST):
        return {"rows": tuple(range(warps))}
    named: dict[str, tuple[int, ...]] = {"load": (0,)}
    ordered = key.kernel is Pass.BACKWARD and key.deterministic
    if ordered:
        named["order"] = (1,)
    named["idle"] = tuple(range(2 if ordered else 1, _WARPGROUP))
    for group in range(warps // _WARPGROUP - 1):
        first = _WARPGROUP * (group + 1)
        named[f"mma{group}"] = tuple(range(first, first + _WARPGROUP))
    return named
