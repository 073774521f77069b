"""The descriptions of all kernels, by kernel key."""

from __future__ import annotations

from fa4_jax.key import HESSIAN_PASSES, KernelKey, Pass
from kernels.common import split_description
from kernels.description import BARRIER_BYTES, Description
from kernels.sm90 import backward_description as sm90_backward
from kernels.sm90 import bias_gradient_description as sm90_bias_gradient
from kernels.sm90 import forward_description as sm90_forward
from kernels.sm90 import hessian_description as sm90_hessian
from kernels.sm90 import tangent_description as sm90_tangent
from kernels.sm100 import backward_description as sm100_backward
from kernels.sm100 import bias_gradient_description as sm100_bias_gradient
from kernels.sm100 import forward_description as sm100_forward
from kernels.sm100 import tangent_description as sm100_tangent


def describe(key: KernelKey) -> Description:
    """Returns the description of a key's kernel.

    Raises:
      NotImplementedError: no kernel family has this key.
    """
    if key.arch not in ("sm_90a", "sm_100f"):
        raise NotImplementedError(f"no kernel description for {key.name}")
    if key.kernel is Pass.FORWARD_SPLIT:
        return split_description.split(key.arch, key.head_dim, key.paged)
    if key.kernel is Pass.FORWARD_JOIN:
        return split_description.join(key.head_dim)
    hopper = key.arch == "sm_90a"
    if key.kernel is Pass.BIAS_GRADIENT:
        of_arch = sm90_bias_gradient if hopper else sm100_bias_gradient
        return of_arch.description(key.head_dim)
    if key.kernel is Pass.TANGENT:
        return sm90_tangent.of_key(key) if hopper else sm100_tangent.description(key.head_dim)
    if key.kernel in HESSIAN_PASSES and hopper:
        return sm90_hessian.of_key(key)
    if key.kernel is Pass.BACKWARD_PRE and hopper:
        return sm90_backward.pre(key)
    if key.kernel is Pass.BACKWARD_PRE:
        return sm100_backward.pre(key.head_dim, key.value_dim)
    if key.kernel is Pass.BACKWARD_POST and hopper:
        return sm90_backward.post(key.head_dim, key.value_dim)
    if key.kernel is Pass.BACKWARD_POST:
        return sm100_backward.post(key.head_dim, key.value_dim)
    if key.kernel is Pass.BACKWARD and hopper:
        return sm90_backward.of_key(key)
    if key.kernel is Pass.BACKWARD:
        return sm100_backward.description(
            key.head_dim, key.value_dim, key.deterministic, key.pair, key.ranges
        )
    if hopper:
        return sm90_forward.of_key(key)
    return sm100_forward.of_key(key)


def warps_of_roles(description: Description) -> dict[str, tuple[int, ...]]:
    """Returns warp indices by role, and by group, "mma0", "mma1", where a role has several."""
    named = dict[str, tuple[int, ...]]()
    for role in description.roles:
        for group in range(role.groups):
            name = role.name if role.groups == 1 else f"{role.name}{group}"
            first = group * role.warps
            named[name] = tuple(role.all_warps[first : first + role.warps])
    return named


def names_of_barriers(description: Description) -> dict[int, str]:
    """Returns names of mbarriers by their first byte in shared memory.

    "kv_full[2]" is one of several.
    """
    names = dict[int, str]()
    for barrier, first in description.first_barriers():
        for i in range(barrier.count):
            name = barrier.name if barrier.count == 1 else f"{barrier.name}[{i}]"
            names[BARRIER_BYTES * (first + i)] = name
    return names
