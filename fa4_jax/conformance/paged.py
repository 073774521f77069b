"""The conformance cases of `decode`: random caches in pages, judged by the float64 oracle."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import ml_dtypes
import numpy as np

from fa4_jax.api import find_target
from fa4_jax.conformance.cases import Case
from fa4_jax.conformance.compare import Verdict, compare
from fa4_jax.conformance.oracle import REFERENCE_SHIFTS, STORAGE, Inputs, oracle, ordinary
from fa4_jax.key import DTYPES
from fa4_jax.paged import decode
from fa4_jax.paged.arguments import DecodeCall, canonicalise
from fa4_jax.paged.call import make_plan


@dataclasses.dataclass(frozen=True)
class PagedCase:
    """Sizes and arguments of `decode`.

    Attributes:
      heads: query and KV heads.
      lengths, query_lengths: of each entry; the latter may be None.
      table_pages: page numbers of an entry, M.
      shared: pages that all entries have in common, from the first.
      scales: axes of the scales of float8_e4m3fn pages: "K" or "PK"; None for pages of dtype.
    """

    dtype: str = "f32"
    head_dim: int = 16
    value_dim: int | None = None
    heads: tuple[int, int] = (4, 2)
    rows: int = 1
    page: int = 16
    table_pages: int = 5
    lengths: tuple[int, ...] = (70, 17, 0)
    query_lengths: tuple[int, ...] | None = None
    window: Any = None
    soft_cap: float | None = None
    sinks: bool = False
    shared: int = 0
    scales: str | None = None

    @property
    def batch(self) -> int:
        """Entries."""
        return len(self.lengths)

    @property
    def has_kernel(self) -> bool:
        """Whether kernels of every architecture take this case."""
        return self.dtype in DTYPES and self.head_dim % 8 == 0

    @property
    def id(self) -> str:
        """Readable name: "paged", then every field that is not the default."""
        parts = ["paged"]
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                text = "_".join(map(str, value)) if isinstance(value, tuple) else str(value)
                parts.append(field.name + text)
        return "-".join(parts)

    @property
    def contiguous(self) -> Case:
        """The same as a case of `attention`."""
        keys = tuple(min(x, self.table_pages * self.page) for x in self.lengths)
        rows = self.query_lengths or (self.rows,) * self.batch
        left = self.window[0] if isinstance(self.window, tuple) else self.window
        return Case(
            dtype=self.dtype,
            head_dim=self.head_dim,
            value_dim=self.value_dim,
            batch=self.batch,
            heads=self.heads,
            query_length=self.rows,
            key_length=self.table_pages * self.page,
            is_causal=True,
            window=(left, None),
            query_offset=tuple(s - t for s, t in zip(keys, rows, strict=True)),
            query_lengths=rows,
            key_lengths=keys,
            soft_cap=self.soft_cap,
            sinks=self.sinks,
        )


@dataclasses.dataclass(frozen=True)
class Cache:
    """The arrays of a case: those that `decode` takes, and the oracle's."""

    query: np.ndarray
    key_pages: np.ndarray
    value_pages: np.ndarray
    page_table: np.ndarray
    lengths: np.ndarray
    options: dict[str, Any]
    inputs: Inputs

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """The positional arguments of `decode`."""
        return self.query, self.key_pages, self.value_pages, self.page_table, self.lengths


def make_cache(case: PagedCase, seed: int) -> Cache:
    """A random cache. Pages and tokens that nobody may look at hold NaN, table entries nonsense."""
    rng = np.random.default_rng([seed, 21])
    b, (n, k), h, page = case.batch, case.heads, case.head_dim, case.page
    entries = case.table_pages
    pages = b * entries + 3
    storage = STORAGE[case.dtype]
    page_type = ml_dtypes.float8_e4m3fn if case.scales else storage
    table = rng.permutation(pages)[: b * entries].reshape(b, entries).astype(np.int32)
    table[:, : case.shared] = table[:1, : case.shared]
    widths = h, case.value_dim or h
    # What is cached, by entry; shared pages hold the same.
    used = -(-np.minimum(case.lengths, entries * page) // page)
    drawn = [rng.normal(size=(pages, page, k, width)).astype(page_type) for width in widths]
    stored = [np.full(x.shape, np.nan).astype(page_type) for x in drawn]
    for entry, length in enumerate(case.lengths):
        for i in range(used[entry]):
            valid = min(page, length - i * page)
            for source, target in zip(drawn, stored, strict=True):
                target[table[entry, i], :valid] = source[table[entry, i], :valid]
    scales: dict[str, np.ndarray] = {}
    if case.scales:
        shape = (k,) if case.scales == "K" else (pages, k)
        scales = {
            name: np.exp(rng.normal(size=shape)).astype(np.float32)
            for name in ("key_scale", "value_scale")
        }
    numbers = drawn
    if case.scales:
        numbers = [
            (x.astype(np.float32) * np.broadcast_to(scale, (pages, k))[:, None, :, None]).astype(
                storage
            )
            for x, scale in zip(drawn, scales.values(), strict=True)
        ]
    key, value = (x[table].reshape(b, entries * page, k, -1) for x in numbers)
    table = np.where(np.arange(entries) < used[:, None], table, 2**31 - 1).astype(np.int32)
    query = rng.normal(size=(b, case.rows, n, h)).astype(storage)
    for entry, length in enumerate(case.query_lengths or ()):
        query[entry, length:] = np.nan
    sinks = rng.normal(size=n).astype(storage) * 2 if case.sinks else None
    options: dict[str, Any] = {
        "local_window_size": case.window,
        "logits_soft_cap": case.soft_cap,
        "sinks": sinks,
        "query_lengths": None
        if case.query_lengths is None
        else np.asarray(case.query_lengths, np.int32),
        **scales,
    }
    inputs = Inputs(
        query,
        key,
        value,
        output_bar=np.zeros((b, case.rows, n, widths[1]), storage),
        lse_bar=np.zeros((b, n, case.rows), np.float32),
        sinks=sinks,
    )
    lengths = np.asarray(case.lengths, np.int32)
    return Cache(query, stored[0], stored[1], table, lengths, options, inputs)


def verdicts(
    case: PagedCase, inputs: Inputs, output: Any, lse: Any, polynomial: bool = False
) -> list[Verdict]:
    """How output and log-sum-exp compare with the oracle's; polynomial: as of `compare`."""
    whole = case.contiguous
    # Padding holds Inf and NaN on purpose.
    with np.errstate(all="ignore"):
        truth = oracle(whole, inputs)
        usual = [ordinary(whole, inputs, shift) for shift in REFERENCE_SHIFTS]
        return [
            compare(
                *(name, case.dtype, np.asarray(x), truth[name], [y[name] for y in usual]),
                polynomial=polynomial,
            )
            for name, x in (("output", output), ("lse", lse))
        ]


def run_paged_case(case: PagedCase, seed: int, implementation: Any = None) -> list[Verdict]:
    """Verdicts on output and log-sum-exp of one case, with the arguments of `run_case`."""
    cache = make_cache(case, seed)
    _, problem = canonicalise(DecodeCall(*cache.arrays, **cache.options))
    kernels = make_plan(problem, implementation, find_target(None)).kernels
    polynomial = kernels is not None and any(x.key.polynomial_exp2 for x in kernels.forward)
    # A GPU's default for float32 products is TF32: three digits, which is JAX's choice, not ours.
    with jax.default_matmul_precision("highest"):
        found = decode(
            *cache.arrays, return_residual=True, implementation=implementation, **cache.options
        )
    return verdicts(case, cache.inputs, *found, polynomial)


_DRAFT = functools.partial(PagedCase, rows=4, lengths=(70, 19, 3, 0))

PAGED_CASES = (
    PagedCase(),
    PagedCase(dtype="bf16", head_dim=64, heads=(8, 1)),
    PagedCase(dtype="fp16", head_dim=40, heads=(3, 3), page=24, lengths=(120, 1, 24)),
    PagedCase(lengths=(500, 81, 80)),  # beyond the table
    PagedCase(window=20),
    PagedCase(window=(0, 7), lengths=(70, 1)),
    PagedCase(window=(33, None), sinks=True, soft_cap=2.0, dtype="bf16"),
    PagedCase(sinks=True),
    PagedCase(soft_cap=0.7, heads=(6, 2)),
    PagedCase(value_dim=24, dtype="bf16"),
    PagedCase(shared=2, lengths=(70, 41, 50), dtype="bf16"),
    PagedCase(query_lengths=(1, 0, 1)),
    _DRAFT(),
    _DRAFT(dtype="bf16", heads=(8, 2), shared=1, lengths=(70, 19, 16, 33)),
    _DRAFT(window=18, sinks=True),
    _DRAFT(query_lengths=(4, 1, 3, 0), sinks=True),
    _DRAFT(query_lengths=(2, 4, 4, 2), window=(3, 0), soft_cap=3.0),
    PagedCase(rows=70, lengths=(70, 75, 12), query_lengths=(70, 30, 12), dtype="bf16"),
    PagedCase(page=1, table_pages=40, lengths=(40, 3), rows=2),
    PagedCase(page=256, table_pages=2, lengths=(300, 5), dtype="bf16"),
    PagedCase(sinks=True, soft_cap=2.0, heads=(8, 1), dtype="bf16", head_dim=64),
    _DRAFT(sinks=True, query_lengths=(4, 1, 3, 0), dtype="bf16", head_dim=128, heads=(8, 2)),
    _DRAFT(soft_cap=20.0, window=18, dtype="fp16", page=32, table_pages=3, value_dim=24),
    PagedCase(dtype="bf16", head_dim=96, lengths=(500, 81, 80), heads=(2, 2)),
    PagedCase(dtype="fp16", head_dim=256, page=64, table_pages=3, lengths=(190, 0, 64)),
    PagedCase(
        dtype="bf16",
        head_dim=128,
        heads=(8, 2),
        table_pages=40,
        lengths=(640, 333, 1),
        window=200,
        shared=3,
    ),
    _DRAFT(
        dtype="bf16",
        head_dim=192,
        value_dim=128,
        heads=(16, 1),
        page=32,
        lengths=(160, 100, 3, 0),
    ),
    PagedCase(scales="K", dtype="bf16"),
    PagedCase(scales="PK", dtype="fp16", rows=3, window=30),
    PagedCase(scales="PK", dtype="bf16", rows=1, value_dim=8),
    PagedCase(rows=40, lengths=(75, 40, 0, 300), dtype="fp16", head_dim=64, sinks=True),
    PagedCase(rows=33, lengths=(80, 20), dtype="bf16", window=20, soft_cap=2.0, shared=1),
    PagedCase(rows=70, page=10, table_pages=30, lengths=(299, 75), dtype="bf16", window=90),
)
"""Every case, each once."""
