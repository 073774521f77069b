"""What a contender is: an attention, how its operands and results differ from the case's, or why it
is absent.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.shapes import Case

Inputs = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
"""Query, key, value and the output's cotangent."""

Results = list[jax.Array]
"""The output alone, or the gradients of query, key and value."""

Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


@runtime_checkable
class Foreign(Protocol):
    """Another framework's results, which `jax.block_until_ready` waits for as for JAX's own."""

    def block_until_ready(self) -> Any:
        """Waits until they are computed."""
        ...

    def arrays(self) -> Results:
        """Returns them as arrays of JAX."""
        ...


@dataclasses.dataclass(frozen=True)
class Eager:
    """An attention that JAX does not compile.

    Attributes:
      bind: returns a call of the "forward" or of the "backward" of some inputs; everything that
        belongs to the other direction is done when it returns.
    """

    bind: Callable[[Inputs, str], Callable[[], Foreign]]


def _same_inputs(inputs: Inputs) -> Inputs:
    return inputs


def _same_results(results: Results) -> Results:
    return results


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a contender's operands and results differ from the case's; neither step is timed.

    Attributes:
      enter: makes its inputs from the case's.
      leave: makes results that compare with ours from its own.
    """

    enter: Callable[[Inputs], Inputs] = _same_inputs
    leave: Callable[[Results], Results] = _same_results


AS_GIVEN = Layout()


def scaled_query(factor: float) -> Layout:
    """Returns the layout of an attention without a scale: `factor` is multiplied to the query."""

    def enter(inputs: Inputs) -> Inputs:
        query, *others = inputs
        return (query * factor).astype(query.dtype), *others  # type: ignore[return-value]

    def leave(results: Results) -> Results:
        if len(results) == 1:
            return results
        return [results[0] * factor, *results[1:]]

    return Layout(enter, leave)


def clipped(case: Case) -> Layout:
    """Returns the layout of an attention that may leave anything in the padding of its results."""
    lengths = case.lengths
    if lengths is None:
        return AS_GIVEN

    def leave(results: Results) -> Results:
        rows = jnp.arange(case.query_length)[None, :, None, None]
        kept = rows < jnp.asarray(lengths)[:, None, None, None]
        return [jnp.where(kept, x, 0) for x in results]

    return Layout(leave=leave)


def packed(case: Case, batch_axis: bool = False) -> Layout:
    """Returns the layout [sum of lengths, heads, head_dim], without padding.

    Args:
      case: its `lengths` are not None.
      batch_axis: whether there is a batch axis of size 1 in front.
    """
    if case.pieces is None:
        raise ValueError(f"{case.id} has neither lengths nor documents")
    lengths = [sum(row) for row in case.pieces]
    starts = list(itertools.accumulate(lengths, initial=0))

    def pack(x: jax.Array) -> jax.Array:
        rows = jnp.concatenate([x[i, :length] for i, length in enumerate(lengths)])
        return rows[None] if batch_axis else rows

    def unpack(x: jax.Array) -> jax.Array:
        rows = x[0] if batch_axis else x
        return jnp.stack(
            [
                jnp.pad(rows[first:past], ((0, case.query_length - past + first), (0, 0), (0, 0)))
                for first, past in itertools.pairwise(starts)
            ]
        )

    def enter(inputs: Inputs) -> Inputs:
        query, key, value, cotangent = inputs
        return pack(query), pack(key), pack(value), pack(cotangent)

    return Layout(enter, lambda results: [unpack(x) for x in results])


def starts(case: Case) -> list[int]:
    """Returns where each piece of a packed case begins, and where the last one ends.

    Args:
      case: it has lengths or documents.
    """
    if case.pieces is None:
        raise ValueError(f"{case.id} has neither lengths nor documents")
    return list(itertools.accumulate(itertools.chain(*case.pieces), initial=0))


def longest(case: Case) -> int:
    """Returns the length of the longest piece of a packed case."""
    return max(itertools.chain(*(case.pieces or ())))


def document_ids(case: Case) -> np.ndarray | None:
    """Returns the number of each token's document in its row, int32 [batch, length], if any."""
    if case.documents is None:
        return None
    rows = [np.repeat(np.arange(len(row)), row) for row in case.documents]
    return np.stack(rows).astype(np.int32)


def sinks(case: Case) -> np.ndarray | None:
    """Returns the sinks of a case, float32 [query heads], if it has any."""
    return np.linspace(-1, 2, case.heads[0], dtype=np.float32) if case.sinks else None


def as_batch(case: Case) -> Layout:
    """Returns the layout in which documents of one length are rows of a batch."""
    (length,) = set(itertools.chain(*(case.documents or ((case.query_length,),))))

    def enter(inputs: Inputs) -> Inputs:
        query, key, value, cotangent = (x.reshape(-1, length, *x.shape[2:]) for x in inputs)
        return query, key, value, cotangent

    def leave(results: Results) -> Results:
        return [x.reshape(case.batch, case.query_length, *x.shape[2:]) for x in results]

    return Layout(enter, leave)


@dataclasses.dataclass(frozen=True)
class Contender:
    """An attention of query, key and value in a layout of its own.

    Attributes:
      backward_only: whether its forward is another contender's.
      no_backward: why it has no backward, otherwise None.
      computes_the_case: False if it shows what another call costs, whose results differ.
    """

    name: str
    attend: Attention | Eager
    layout: Layout = AS_GIVEN
    backward_only: bool = False
    no_backward: str | None = None
    computes_the_case: bool = True


@dataclasses.dataclass(frozen=True)
class Absent:
    """A contender that cannot take part, and why."""

    name: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Abilities:
    """What a peer can do beside masks that start at the first key.

    Attributes:
      value_dim: value may have a head dim of its own.
      windows: it has windows with a limit on the left and on the right.
      lengths: it has a length for each batch entry.
      last_key: its masks are aligned to the last key, not to the first.
      documents: it takes documents, packed one after the other.
      sinks, soft_cap: it has them.
    """

    value_dim: bool = False
    windows: bool = False
    lengths: bool = False
    last_key: bool = False
    documents: bool = False
    sinks: bool = False
    soft_cap: bool = False

    def refusal(self, case: Case) -> str | None:
        """Returns why a peer with these abilities cannot do the case, or None if it can."""
        if case.value_dim is not None and not self.value_dim:
            return "it needs value's head dim to be query's"
        if case.window is not None and not self.windows:
            return "it has no windows"
        if case.lengths is not None and not self.lengths:
            return "it has no lengths of batch entries"
        if case.documents is not None and not self.documents:
            return "it takes no packed documents"
        if case.sinks and not self.sinks:
            return "it has no sinks"
        if case.soft_cap is not None and not self.soft_cap:
            return "it has no soft cap"
        if case.is_causal or case.window is not None:
            difference = case.key_length - case.query_length
            if case.query_offset != (difference if self.last_key else 0):
                aligned = "its masks are aligned to the last key"
                return aligned if self.last_key else "it has no query offset"
        return None
