"""What the load warp of a bias's gradient publishes: tile after tile, and the visits of each.

It takes tiles by ticket and finds out what their work is, ahead of the MMA warpgroups: divisions
and loads of extents take a thousand cycles, in which they would wait.

    work_full   a tile's words are there, or the word that none is left
    work_empty  its sums have been stored

Buffers of words, and the word of the end, are those of `backward_tiles`. What a visit is lies
beside the parts of its operands, and is there when the first of them is.
"""

import dataclasses

import cutlass.cute as cute
from cutlass import Boolean, Int32

from fa4_jax import bands
from kernels.common.bias_gradient_work import Call, Visit, Work, visit_of
from kernels.interface import Window
from kernels.sm90.bias_gradient_description import VISIT_WORDS

_FIELDS = tuple(field.name for field in dataclasses.fields(Work))


@dataclasses.dataclass(frozen=True)
class SeenVisit:
    """A visit in which something is seen, as the MMA warpgroups know it.

    Attributes:
      plane: of the row statistics: batch * heads + head.
      is_last: of its tile.
    """

    plane: Int32
    first_row: Int32
    first_key: Int32
    band: bands.Band
    is_last: Boolean


def publish(work: Work, any_seen: Boolean, words: cute.Tensor):
    """Writes a tile's work; any_seen: whether any visit of it is published."""
    for i, name in enumerate(_FIELDS):
        words[i] = getattr(work, name)
    words[len(_FIELDS)] = Int32(any_seen)


def any_seen(words: cute.Tensor) -> Boolean:
    """Whether a tile has visits in which something is seen."""
    return cute.arch.make_warp_uniform(words[len(_FIELDS)]) != 0


def published(words: cute.Tensor) -> Work:
    """Reads a tile's work."""
    return Work(*(cute.arch.make_warp_uniform(words[i]) for i in range(len(_FIELDS))))


@cute.jit
def next_seen(call: Call, work: Work, first: Int32) -> Int32:
    """Returns the first visit from `first` on in which anything is seen; or how many there are."""
    index, seen = first, Boolean(False)
    while (index < work.visits()) & (seen == Boolean(False)):
        seen = visit_of(call, work, index).seen
        if seen == Boolean(False):
            index += 1
    return index


def publish_visit(visit: Visit, heads: Int32, is_last: Boolean, words: cute.Tensor):
    """Writes a visit; heads: of a batch element."""
    band = visit.band
    values = (
        *(visit.batch * heads + visit.head, visit.first_row, visit.first_key),
        *(band.query_length, band.key_length, band.offset),
        Int32(is_last),
    )
    for i, value in enumerate(values):
        words[i] = value


def published_visit(words: cute.Tensor, window: Window) -> SeenVisit:
    """Reads a visit."""
    plane, row, key, *extents, is_last = (
        cute.arch.make_warp_uniform(words[i]) for i in range(VISIT_WORDS)
    )
    band = bands.Band(*extents, window.left, window.right)
    return SeenVisit(plane, row, key, band, is_last != 0)
