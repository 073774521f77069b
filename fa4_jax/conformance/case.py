"""A conformance case: one attention problem, and which kernels take it."""

from __future__ import annotations

import dataclasses
import functools

from fa4_jax import bands, catalogue
from fa4_jax.conformance import biases
from fa4_jax.conformance.row_masks import KINDS
from fa4_jax.key import HEAD_DIM_TILES, HESSIAN_PASSES, KernelKey, Pass
from fa4_jax.plan import kernel_keys, no_hessian, no_tangent, unread_mask, unsupported
from fa4_jax.problem import Problem, default_scale

DenseShape = tuple[int, int, int, int]

OF_BACKWARD = (Pass.BACKWARD_PRE, Pass.BACKWARD, Pass.BACKWARD_POST, Pass.BIAS_GRADIENT)


@functools.cache
def _built() -> frozenset[KernelKey]:
    return frozenset(catalogue.all_keys())


@dataclasses.dataclass(frozen=True)
class Case:
    """One attention problem. The fields are sizes and arguments of `fa4_jax.attention`.

    Attributes:
      heads: (query heads, key heads).
      value_dim: head dim of value and output, if it is not head_dim.
      query_offset: an int, or one per batch entry.
      magnitude: of query and key; large ones make the softmax nearly one-hot.
      growing: key magnitudes grow along the sequence, so that every block moves the row maximum.
      opposed: keys point away from queries, so that all scores are far below 0.
      poison: padding and other rows that must not matter hold NaN and Inf.
      bias: a shape, broadcastable to [B, N, T, S], or a name of `biases.KINDS`.
      mask: a shape, likewise.
      masks: names of `row_masks.KINDS`, which all apply.
      sinks: random ones. max_logit: the largest scores are returned.
    """

    dtype: str = "bf16"
    head_dim: int = 64
    batch: int = 2
    heads: tuple[int, int] = (2, 2)
    query_length: int = 128
    key_length: int = 128
    is_causal: bool = False
    window: int | tuple[int | None, int | None] | None = None
    query_offset: int | tuple[int, ...] = 0
    query_lengths: tuple[int, ...] | None = None
    key_lengths: tuple[int, ...] | None = None
    scale: float | None = None
    numerics: str = "fast"
    deterministic: bool = False
    magnitude: float = 1.0
    growing: bool = False
    opposed: bool = False
    poison: bool = False
    bias: DenseShape | str | None = None
    mask: DenseShape | None = None
    value_dim: int | None = None
    masks: tuple[str, ...] = ()
    soft_cap: float | None = None
    sinks: bool = False
    max_logit: bool = False

    @property
    def has_kernel(self) -> bool:
        """Whether kernels of every architecture take this case, both ways."""
        widths = (self.head_dim, self.value_dim or self.head_dim)
        fits = all(width % 8 == 0 and width <= HEAD_DIM_TILES[-1] for width in widths)
        extra = self.bias or self.mask or self.masks or self.soft_cap or self.sinks
        return fits and self.dtype != "f32" and not (extra or self.max_logit)

    def has_kernels(self, arch: str, kernel: Pass) -> bool:
        """Whether an architecture's kernels take a pass, and all that come before it.

        To them what a mask alone hides must be finite.
        """
        if unsupported(self.problem) is not None or (self.masks and self.poison):
            return False
        of_derivatives = (Pass.TANGENT, *HESSIAN_PASSES)
        if kernel in of_derivatives and no_tangent(self.problem) is not None:
            return False
        if kernel in HESSIAN_PASSES and no_hessian(self.problem, arch) is not None:
            return False
        forward, backward = kernel_keys(self.problem, arch)
        if kernel is Pass.BIAS_GRADIENT and self.bias is None:
            return False
        needed = forward + backward if kernel in OF_BACKWARD else forward
        return unread_mask(self.problem, needed) is None and set(needed) <= _built()

    @property
    def bias_kind(self) -> str | None:
        """The bias's name in `biases.KINDS`, if it is by positions."""
        return self.bias if isinstance(self.bias, str) else None

    @property
    def bias_form(self) -> str | None:
        """`Problem.bias`."""
        return biases.form_of(self.bias, self.key_length)

    @property
    def problem(self) -> Problem:
        """The case as `fa4_jax.attention` understands it."""
        sides = self.window if isinstance(self.window, tuple) else (self.window, self.window)
        return Problem(
            batch=self.batch,
            query_length=self.query_length,
            key_length=self.key_length,
            query_heads=self.heads[0],
            kv_heads=self.heads[1],
            head_dim=self.head_dim,
            dtype=self.dtype,
            scale=default_scale(self.head_dim) if self.scale is None else self.scale,
            window=bands.limits(*sides, self.is_causal),
            has_lengths=not (self.query_lengths is None and self.key_lengths is None),
            bias=self.bias_form,
            bias_first=biases.first_of(self.bias),
            has_mask=self.mask is not None or any(KINDS[name].of_pairs for name in self.masks),
            has_ranges=any(not KINDS[name].of_pairs for name in self.masks),
            has_tags=any(KINDS[name].has_tags for name in self.masks),
            soft_cap=self.soft_cap,
            has_soft_cap=self.soft_cap is not None,
            has_sinks=self.sinks,
            returns_max_logit=self.max_logit,
            deterministic=self.deterministic,
            numerics=self.numerics,
            value_dim=None if self.value_dim == self.head_dim else self.value_dim,
        )

    @property
    def extents(self) -> list[tuple[int, int, int, int]]:
        """Query length, key length, query offset and 0 of every batch entry."""
        offset = self.query_offset
        offsets = offset if isinstance(offset, tuple) else (offset,) * self.batch
        rows = self.query_lengths or (self.query_length,) * self.batch
        keys = self.key_lengths or (self.key_length,) * self.batch
        return [(t, s, o, 0) for t, s, o in zip(rows, keys, offsets, strict=True)]

    @property
    def id(self) -> str:
        """Readable name: the sizes, then every argument that is not the default."""
        n, k = self.heads
        parts = [
            self.dtype,
            f"d{self.head_dim}" + (f"x{self.value_dim}" if self.value_dim else ""),
            f"b{self.batch}",
            f"h{n}" if n == k else f"h{n}over{k}",
            f"t{self.query_length}",
            f"s{self.key_length}",
        ]
        if self.is_causal:
            parts.append("causal")
        parts += self.masks
        for name in ("query_offset", "window", "query_lengths", "key_lengths", "scale", "soft_cap"):
            value = getattr(self, name)
            if value is not None and value != 0:
                text = "_".join(map(str, value)) if isinstance(value, tuple) else f"{value:g}"
                parts.append(name.replace("query_", "q").replace("key_", "k") + text)
        if self.numerics != "fast":
            parts.append(self.numerics)
        if self.magnitude != 1.0:
            parts.append(f"magnitude{self.magnitude:g}")
        flags = ("deterministic", "growing", "opposed", "poison", "sinks", "max_logit")
        parts += [name for name in flags if getattr(self, name)]
        for name in ("bias", "mask"):
            if (shape := getattr(self, name)) is not None:
                parts.append(shape if isinstance(shape, str) else name + "x".join(map(str, shape)))
        return "-".join(parts)
