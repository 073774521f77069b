"""The arithmetic of online softmax that both architectures share: values in, values out.

Exponents are in units of log2, so that exp is one exp2.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32


def select(condition, if_true: Float32, if_false: Float32) -> Float32:
    """Returns condition ? if_true : if_false, without a branch."""
    return Float32(cutlass.select_(condition, if_true, if_false))


def fmax(a: Float32, b: Float32) -> Float32:
    """Returns the maximum, or NaN if either is NaN, so that a NaN score makes its whole row NaN."""
    return cute.arch.fmax(a, b, nan=True)


def finite_reference(reference: Float32) -> Float32:
    """Returns 0 for a row that has seen no key (-inf), so that no exponent is inf - inf."""
    return select(reference == -Float32.inf, Float32(0.0), reference)


def exp2(x: Float32) -> Float32:
    """Returns 2^x, from the special-function unit."""
    return cute.math.exp2(x, fastmath=True)


def rescale_factor(old: Float32, new: Float32, scale_log2: Float32) -> Float32:
    """Returns the factor that moves sums from reference `old` to `new`: 0 before the first key."""
    return exp2((old - finite_reference(new)) * scale_log2)
