"""The cases that are timed, as data."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np

TOKENS = 32768
"""Batch times length of the grid's cases; all of them hold the same amount of data."""

WIDTH = 2048
"""Heads times head dim of the grid's cases."""

HEAD_DIMS = (64, 128, 256)
LENGTHS = (4096, 8192, 16384, 32768, 1024, 2048)
"""The lengths; long ones come first, so that a run that is cut short has them."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One problem: query [batch, query_length, heads[0], head_dim], key and value likewise with
    key_length and heads[1].

    Attributes:
      group: the part of the report it belongs to, one of GROUPS.
      heads: (query heads, KV heads).
      query_offset: position of query row 0 among the keys (causal only).
      dtype: "bfloat16" or "float16".
      value_dim: value's head dim, where it is not head_dim.
      window: (left, right): how many keys a row sees on either side of its own position. The right
        one is 0 in a causal case.
      lengths: length of the queries and keys of each batch entry, the same for both; the rest is
        padding.
      documents: lengths of the documents that fill each row of the batch, one after the other.
      sinks: each query head has a sink.
      soft_cap: of the scores.
      deviation: what normal queries are multiplied with, so about the scores' standard deviation.
      chained: calls of a program, each with the output before as its query, where one call is
        shorter than the host's time for it. Where it is not 1 the forward alone is timed.
    """

    group: str
    batch: int
    query_length: int
    key_length: int
    heads: tuple[int, int]
    head_dim: int
    is_causal: bool = False
    query_offset: int = 0
    dtype: str = "bfloat16"
    value_dim: int | None = None
    window: tuple[int, int] | None = None
    lengths: tuple[int, ...] | None = None
    documents: tuple[tuple[int, ...], ...] | None = None
    sinks: bool = False
    soft_cap: float | None = None
    deviation: int = 1
    chained: int = 1

    @property
    def output_dim(self) -> int:
        """Returns value's head dim, which is the output's."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def id(self) -> str:
        """Returns a readable and unique name, such as "grid-d128-causal-b4-s8192"."""
        values = "" if self.value_dim is None else f":{self.value_dim}"
        parts = [self.group, f"d{self.head_dim}{values}", "causal" if self.is_causal else "dense"]
        if self.window is not None:
            left, right = self.window
            parts.append(f"w{left}" if self.is_causal else f"w{left}:{right}")
        parts.append(f"b{self.batch}")
        if self.heads[0] != self.heads[1]:
            parts.append(f"h{self.heads[0]}:{self.heads[1]}")
        if self.query_length != self.key_length:
            parts.append(f"t{self.query_length}")
        parts.append(f"s{self.key_length}")
        if self.documents is not None:
            parts.append(f"{sum(map(len, self.documents))}docs")
        if self.soft_cap is not None:
            parts.append(f"cap{self.soft_cap:g}")
        if self.deviation != 1:
            parts.append(f"deviation{self.deviation}")
        if self.sinks:
            parts.append("sinks")
        return "-".join(parts)

    @property
    def hides_keys(self) -> bool:
        """Returns whether there are pairs of a row and a key that do not see each other."""
        others = (self.window, self.lengths, self.documents)
        return self.is_causal or any(x is not None for x in others)

    @property
    def pieces(self) -> tuple[tuple[int, ...], ...] | None:
        """Returns the lengths of what attends to itself alone, of each row of the batch."""
        if self.lengths is not None:
            return tuple((length,) for length in self.lengths)
        return self.documents

    def without_mask(self) -> Case:
        """Returns the case of the same shape in which every row sees every key."""
        return dataclasses.replace(
            self,
            is_causal=False,
            query_offset=0,
            window=None,
            lengths=None,
            documents=None,
            sinks=False,
            soft_cap=None,
        )


def self_attention(group: str, head_dim: int, length: int, is_causal: bool, dtype: str) -> Case:
    """Makes a case of the grid's size: TOKENS tokens of WIDTH features."""
    heads = WIDTH // head_dim
    return Case(
        group,
        TOKENS // length,
        length,
        length,
        (heads, heads),
        head_dim,
        is_causal=is_causal,
        dtype=dtype,
    )


GRID = tuple(
    self_attention("grid", head_dim, length, is_causal, "bfloat16")
    for length, head_dim, is_causal in itertools.product(LENGTHS, HEAD_DIMS, (False, True))
)

GQA = (
    Case("gqa", 2, 8192, 8192, (64, 8), 64, is_causal=True),
    Case("gqa", 2, 8192, 8192, (32, 8), 128, is_causal=True),
    Case("gqa", 2, 8192, 8192, (32, 8), 128),
    Case("gqa", 4, 8192, 8192, (16, 1), 128, is_causal=True),
    Case("gqa", 2, 8192, 8192, (16, 2), 256, is_causal=True),
    Case("gqa", 8, 2048, 2048, (32, 8), 128, is_causal=True),
    Case("gqa", 1, 32768, 32768, (32, 8), 128, is_causal=True),
)

VALUES = tuple(
    Case("values", TOKENS // s, s, s, (16, 16), 192, is_causal=is_causal, value_dim=128)
    for s, is_causal in itertools.product((8192, 2048, 4096, 16384), (False, True))
)
"""DeepSeek's head dims."""

D96 = tuple(
    Case("d96", TOKENS // s, s, s, (32, 32), 96, is_causal=is_causal)
    for s, is_causal in itertools.product((8192, 2048, 4096, 16384), (False, True))
)

ODD = tuple(
    self_attention("odd", head_dim, length, is_causal, "bfloat16")
    for length, head_dim, is_causal in itertools.product((5000, 1111), HEAD_DIMS, (False, True))
)
"""The lengths are multiples of no tile."""

WINDOW = (
    *(
        dataclasses.replace(
            self_attention("window", head_dim, 16384, True, "bfloat16"), window=(1024, 0)
        )
        for head_dim in HEAD_DIMS
    ),
    Case("window", 2, 16384, 16384, (32, 8), 128, is_causal=True, window=(1024, 0)),
    Case("window", 2, 16384, 16384, (16, 16), 128, window=(512, 512)),
)

BATCH_LENGTHS = (4096, 3839, 3000, 2500, 1777, 1024, 513, 65)
PADDED = tuple(
    dataclasses.replace(
        self_attention("lengths", head_dim, 4096, is_causal, "bfloat16"), lengths=BATCH_LENGTHS
    )
    for head_dim, is_causal in itertools.product(HEAD_DIMS, (False, True))
)

CROSS = (
    Case("cross", 4, 1024, 16384, (32, 8), 128, is_causal=True, query_offset=15360),
    Case("cross", 4, 1024, 16384, (32, 8), 128),
    Case("cross", 8, 4096, 1024, (16, 16), 128),
    Case("cross", 8, 4096, 1024, (32, 32), 64),
)

FP16 = tuple(
    self_attention("fp16", head_dim, length, is_causal, "float16")
    for length, head_dim, is_causal in itertools.product((16384, 4096), HEAD_DIMS, (False, True))
)

DOCUMENTS_PER_ROW = 8


def ragged(rows: int, length: int) -> tuple[tuple[int, ...], ...]:
    """Returns lengths of documents, DOCUMENTS_PER_ROW a row in the mean, cut anywhere."""
    rng = np.random.default_rng(0)
    found: list[tuple[int, ...]] = []
    for _ in range(rows):
        cuts = rng.choice(np.arange(1, length), rng.poisson(DOCUMENTS_PER_ROW - 1), replace=False)
        edges = [0, *sorted(int(x) for x in cuts), length]
        found.append(tuple(b - a for a, b in itertools.pairwise(edges)))
    return tuple(found)


def packed_documents() -> tuple[Case, ...]:
    """Rows of 8192 tokens with one document, with eight aligned ones, and with ragged ones."""
    found: list[Case] = []
    for head_dim in HEAD_DIMS:
        case = self_attention("documents", head_dim, 8192, True, "bfloat16")
        for documents in (((8192,),) * 4, ((1024,) * 8,) * 4, ragged(4, 8192)):
            found.append(dataclasses.replace(case, documents=documents))
    grouped = Case("documents", 4, 8192, 8192, (32, 8), 128, is_causal=True)
    return *found, dataclasses.replace(grouped, documents=ragged(4, 8192))


DOCUMENTS = packed_documents()

LAYERS = (
    # GPT-OSS: the layers with windows, two lengths; without sinks for the peers that have none.
    Case("layers", 4, 8192, 8192, (64, 8), 64, is_causal=True, window=(127, 0), sinks=True),
    Case("layers", 2, 16384, 16384, (64, 8), 64, is_causal=True, window=(127, 0), sinks=True),
    Case("layers", 4, 8192, 8192, (64, 8), 64, is_causal=True, window=(127, 0)),
    Case("layers", 4, 8192, 8192, (64, 8), 64, is_causal=True, sinks=True),
    # Gemma 2: layers with and without a window.
    Case("layers", 4, 8192, 8192, (16, 8), 256, is_causal=True, window=(4095, 0), soft_cap=50.0),
    Case("layers", 4, 8192, 8192, (16, 8), 256, is_causal=True, soft_cap=50.0),
    Case("layers", 4, 8192, 8192, (16, 8), 256, is_causal=True, window=(4095, 0)),
    # Each capability alone.
    *(
        dataclasses.replace(
            self_attention("layers", head_dim, 8192, is_causal, "bfloat16"), soft_cap=cap
        )
        for head_dim, is_causal, cap in itertools.product((64, 128, 256), (False, True), (50.0,))
    ),
    # The time of a soft cap depends on the scores. With a deviation of 3 some are above an eighth
    # of the cap, with 10 some are above half of it.
    *(
        dataclasses.replace(
            self_attention("layers", head_dim, 8192, True, "bfloat16"),
            soft_cap=50.0,
            deviation=deviation,
        )
        for head_dim, deviation in itertools.product((64, 128, 256), (3, 10))
    ),
    *(
        dataclasses.replace(self_attention("layers", head_dim, 8192, True, "bfloat16"), sinks=True)
        for head_dim in (64, 128)
    ),
)
"""Attention layers of models with soft caps or sinks."""

CHAINED = 20

DECODE = tuple(
    Case("decode", batch, rows, keys, heads, head_dim, chained=CHAINED)
    for batch, rows, keys, heads, head_dim in (
        (1, 1, 8192, (32, 8), 128),
        (1, 1, 65536, (32, 8), 128),
        (8, 1, 8192, (32, 8), 128),
        (32, 1, 8192, (32, 8), 128),
        (64, 1, 4096, (64, 8), 128),
        (1, 1, 131072, (16, 1), 128),
        (8, 4, 16384, (32, 8), 128),
        (128, 1, 2048, (32, 8), 64),
        (16, 1, 32768, (32, 4), 128),
        (32, 16, 8192, (32, 8), 128),
    )
)
"""Few query rows, as in decoding: the time is that of reading K and V once."""

FEW_HEADS = tuple(
    Case("few-heads", batch, s, s, heads, head_dim, is_causal=is_causal, chained=CHAINED)
    for batch, s, heads, head_dim, is_causal in (
        (1, 2048, (8, 8), 128, True),
        (1, 2048, (8, 8), 128, False),
        (1, 4096, (8, 2), 128, True),
        (2, 1536, (8, 8), 128, False),
        (1, 8192, (4, 1), 128, True),
        (1, 4096, (8, 8), 64, True),
        (1, 2048, (16, 16), 64, False),
        (2, 1024, (16, 4), 64, True),
        (1, 2048, (16, 16), 96, False),
    )
)
"""What one of several devices that share the heads has of a layer: few tiles a multiprocessor."""

GROUPS = {
    "grid": GRID,
    "gqa": GQA,
    "values": VALUES,
    "d96": D96,
    "odd": ODD,
    "window": WINDOW,
    "lengths": PADDED,
    "cross": CROSS,
    "fp16": FP16,
    "documents": DOCUMENTS,
    "layers": LAYERS,
    "decode": DECODE,
    "few-heads": FEW_HEADS,
}
"""The cases by group, in the order in which they are timed."""

ALL = tuple(itertools.chain.from_iterable(GROUPS.values()))

QUICK = (
    Case("grid", 2, 256, 256, (2, 2), 64),
    Case("grid", 2, 256, 256, (2, 2), 64, is_causal=True),
    Case("gqa", 1, 256, 256, (4, 2), 64, is_causal=True),
    Case("values", 1, 128, 128, (2, 2), 64, is_causal=True, value_dim=32),
    Case("d96", 1, 128, 128, (2, 2), 96, is_causal=True),
    Case("odd", 1, 111, 111, (2, 2), 64),
    Case("window", 1, 256, 256, (2, 2), 64, is_causal=True, window=(64, 0)),
    Case("lengths", 2, 128, 128, (2, 2), 64, is_causal=True, lengths=(128, 77)),
    Case("cross", 1, 128, 256, (2, 2), 64, is_causal=True, query_offset=128),
    Case("fp16", 1, 256, 256, (2, 2), 64, dtype="float16"),
    Case("documents", 2, 128, 128, (2, 2), 64, is_causal=True, documents=((100, 28), (128,))),
    Case("layers", 1, 128, 128, (2, 2), 64, is_causal=True, sinks=True, soft_cap=20.0),
    Case("decode", 2, 1, 256, (4, 2), 64, chained=2),
    Case("few-heads", 1, 256, 256, (2, 2), 64, is_causal=True, chained=2),
)
"""These show in seconds, also on a CPU, that everything runs; their times mean nothing."""

FIRST_CALL = self_attention("host", 128, 8192, True, "bfloat16")
FIRST_CALL_QUICK = Case("host", 1, 256, 256, (2, 2), 64, is_causal=True)
DISPATCH = Case("host", 1, 64, 64, (1, 1), 64, is_causal=True)
"""These are so small that the host sets the pace."""

MEMORY = tuple(self_attention("host", d, 8192, True, "bfloat16") for d in HEAD_DIMS)
MEMORY_QUICK = (FIRST_CALL_QUICK,)
