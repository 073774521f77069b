"""Where the kernels for tangents find each row's LSE, and where they leave its tangent."""

import dataclasses

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kernels.common.softmax import LOG2_E, select
from kernels.interface import Sizes


@dataclasses.dataclass(frozen=True)
class Statistics:
    """LSE of all rows, and its tangent: [batch, heads, query_length]."""

    lse: cute.Pointer
    tangent: cute.Pointer

    def of_head(self, batch: Int32, head: Int32, sizes: Sizes) -> tuple[cute.Tensor, cute.Tensor]:
        """Returns both of a head, [query_length]."""
        first = (Int64(batch) * sizes.heads + head) * sizes.query_length
        rows = cute.make_layout(sizes.query_length)
        own = (cute.make_tensor(x + first, rows) for x in (self.lse, self.tangent))
        lse, tangent = own
        return lse, tangent


def lse_log2(lse: Float32) -> Float32:
    """Returns a row's LSE in units of log2; inf if it sees no key, so that its P is 0."""
    own = lse * LOG2_E
    return select(own == -Float32.inf, Float32.inf, own)
