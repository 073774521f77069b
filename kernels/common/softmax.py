"""The arithmetic of online softmax that both architectures share: values in, values out.

Exponents are in units of log2, so that exp is one exp2.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32

LN_2 = 0.6931471805599453
LOG2_E = 1.4426950408889634


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


TANH_NEAR = 1.0
TANH_ODD = (-0.3333028, 0.1328849, -0.051768284, 0.016906409, -0.0031265775)
"""tanh(x) = x (1 + c0 x^2 + c1 x^4 + ...) up to TANH_NEAR; relative error 6.6e-7.

Least maximum of the relative error, by iteratively reweighted least squares.
"""


def near_tanh(x: Float32) -> Float32:
    """Returns tanh(x) for |x| <= TANH_NEAR, without the special-function unit."""
    square = x * x
    factor = Float32(TANH_ODD[-1])
    for coefficient in reversed((1.0, *TANH_ODD[:-1])):
        factor = factor * square + coefficient
    return factor * x


def tanh(x: Float32) -> Float32:
    """Returns tanh(x), from two instructions of the special-function unit.

    1 - 2 / (1 + e^2x) cancels for small x, where the polynomial stands in.
    """
    far = 1.0 - 2.0 * cute.arch.rcp_approx(1.0 + exp2(x * (2 * LOG2_E)))
    return select(cute.math.absf(x) <= TANH_NEAR, near_tanh(x), far)


def slope_of_cap(t: Float32) -> Float32:
    """Returns 1 - t^2, the derivative of tanh; t: its value, or -inf where the score is hidden."""
    t = fmax(t, Float32(-1.0))
    return 1.0 - t * t


def rescale_factor(old: Float32, new: Float32, scale_log2: Float32) -> Float32:
    """Returns the factor that moves sums from reference `old` to `new`: 0 before the first key."""
    return exp2((old - finite_reference(new)) * scale_log2)


def with_sink(
    reference_log2: Float32, total: Float32, sink_log2: Float32
) -> tuple[Float32, Float32]:
    """Returns a row's factor of its output and its LSE, its sink included.

    Args:
      reference_log2, total: of its scores: -inf and 0 if it sees no key.
      sink_log2: -inf where there is none.
    """
    keep, total, lse = join_sink(reference_log2, total, sink_log2)
    return select(total != 0.0, keep / total, Float32(0.0)), lse


def join_sink(
    reference_log2: Float32, total: Float32, sink_log2: Float32
) -> tuple[Float32, Float32, Float32]:
    """Returns the factor of a row's weights, their sum with the sink's, and LSE; as `with_sink`."""
    top = fmax(reference_log2, sink_log2)
    safe = finite_reference(top)
    keep = exp2(reference_log2 - safe)
    total = total * keep + exp2(sink_log2 - safe)
    lse = select(total != 0.0, (top + cute.math.log2(total, fastmath=True)) * LN_2, -Float32.inf)
    return keep, total, lse
