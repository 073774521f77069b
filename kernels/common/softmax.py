"""The arithmetic of online softmax that both architectures share: values in, values out.

Exponents are in units of log2, so that exp is one exp2.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

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


TANH_UNIT = 4.0
"""Arguments of tanh are multiples of 1 / TANH_UNIT: below 1/2 bit 30 of such a float32 is 0."""

TANH_ODD = (-0.3332816, 0.1320536, -0.044750646)
"""tanh(x) = x (1 + c0 x^2 + c1 x^4 + ...) up to 1/2; relative error 6.4e-7.

Least maximum of the relative error, by Remez's exchange.
"""


def near_coefficients() -> list[float]:
    """Returns factors of y, y^3, y^5 ... whose sum is tanh(y / TANH_UNIT), last one first."""
    factors = [c / TANH_UNIT ** (2 * i + 1) for i, c in enumerate((1.0, *TANH_ODD))]
    return factors[::-1]


def odd_polynomial(y: Float32, factors: list[Any]) -> Float32:
    """Returns the sum of factors times y, y^3, y^5 ..., last one first."""
    square, (factor, *others) = y * y, factors
    for coefficient in others:
        factor = factor * square + coefficient
    return factor * y


def near_tanh(y: Float32) -> Float32:
    """Returns tanh(y / TANH_UNIT) up to 1/2, without the special-function unit."""
    return odd_polynomial(y, near_coefficients())


def factors_of_products(
    coefficients: list[float], before_cap: Float32, scale: Float32 | float = 1.0
) -> list[Float32]:
    """Returns the factors of a product's powers for those of y = before_cap times the product.

    coefficients: of `odd_polynomial`, whose result is then multiplied with scale.
    """
    power, factors = before_cap * scale, []
    for coefficient in reversed(coefficients):
        factors.append(power * coefficient)
        power = power * before_cap * before_cap
    return factors[::-1]


def has_powers(before_cap: Float32) -> Boolean:
    """Whether powers of it up to the seventh are normal numbers, which may be factors."""
    magnitude = cute.math.absf(before_cap)
    return (magnitude >= 2.0**-17) & (magnitude <= 2.0**17)


def tanh(y: Float32) -> Float32:
    """Returns tanh(y / TANH_UNIT), from two instructions of the special-function unit.

    1 - 2 / (1 + e^2x) cancels for small x, where the polynomial stands in.
    """
    far = 1.0 - 2.0 * cute.arch.rcp_approx(1.0 + exp2(y * (2 * LOG2_E / TANH_UNIT)))
    return select(cute.math.absf(y) <= TANH_UNIT / 2, near_tanh(y), far)


def are_near(values: list[Float32]) -> Boolean:
    """Whether `near_tanh` is enough for all values of all threads of a warp.

    Their bits are combined, three words an instruction, where a maximum takes two. Bit 30 is 1 also
    of infinities and NaN.
    """
    bits = Int32(0)
    for value in values:
        bits = bits | value.bitcast(Int32)
    return cute.arch.vote_all_sync((bits & 1 << 30) == 0)


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
