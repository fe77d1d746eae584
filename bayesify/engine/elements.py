"""Functions of one number, for the formulas of one element that kernels run in a loop.

They are plain Python that a compiler turns into vector instructions: no branch, no call into a library. NaN stays NaN.
Constants are float32, since a Python float would lift everything to double precision. In a loop over float64 `exp`,
`log1p` and `log` are the library's, and what is made of them follows.
"""

import numpy as np

f32 = np.float32
i32 = np.int32
ZERO, ONE = f32(0), f32(1)
LN_2 = f32(0.6931471805599453)
LN_2_HIGH, LN_2_LOW = f32(0.693359375), f32(-2.12194440e-4)  # the first has few bits: exact times a whole number
LOG2_E = f32(1.4426950408889634)
ROUND = f32(12582912.0)  # 1.5 * 2**23: adding it rounds to a whole number, which is then in the lowest bits
EXP_LEAST, EXP_MOST = f32(-87.3), f32(88.7)
SQRT_HALF = i32(0x3F3504F3)
E0, E1, E2, E3, E4, E5 = (
    f32(c)
    for c in (
        1.000000071654367,
        0.9999996919773643,
        0.4999889485334902,
        0.16667574776860541,
        0.04191538181333573,
        0.008297651842933393,
    )
)
A0, A1, A2, A3, A4 = (
    f32(c)
    for c in (2.0000000079209395, 0.6666631468503942, 0.4002491014466255, 0.27960604732240046, 0.28178326010559573)
)


def bits(x: f32) -> i32:
    """Return the bits of a float."""
    return f32(x).view(np.int32)


def from_bits(n: i32) -> f32:
    """Return the float of some bits."""
    return i32(n).view(np.float32)


def like(x: float, y: f32) -> f32:
    """Return the constant x in the precision of y."""
    return type(y)(x)


def exp(x: f32) -> f32:
    """Return e^x = 2^k e^r, within what float32 holds: at least e^-87.3, at most e^88.7."""
    x = EXP_LEAST if x < EXP_LEAST else x
    x = EXP_MOST if x > EXP_MOST else x
    shifted = x * LOG2_E + ROUND
    k = shifted - ROUND
    r = (x - k * LN_2_HIGH) - k * LN_2_LOW
    p = E0 + r * (E1 + r * (E2 + r * (E3 + r * (E4 + r * E5))))
    return from_bits(i32(bits(p) + i32(bits(shifted) << i32(23))))


def log1p(y: f32) -> f32:
    """Return log(1 + y) for y between 0 and 1: 2 atanh(y/(2 + y))."""
    z = y / (ONE + ONE + y)
    w = z * z
    return z * (A0 + w * (A1 + w * (A2 + w * (A3 + w * A4))))


def log(x: f32) -> f32:
    """Return the logarithm of a normal positive x: k log 2 + 2 atanh((m - 1)/(m + 1)) with x = m 2^k, m near 1."""
    n = bits(x)
    k = i32(i32(n - SQRT_HALF) >> i32(23))
    f = from_bits(i32(n - i32(k << i32(23)))) - ONE
    z = f / (ONE + ONE + f)
    w = z * z
    return f32(k) * LN_2 + z * (A0 + w * (A1 + w * (A2 + w * (A3 + w * A4))))


def softplus(x: f32) -> f32:
    """Return log(1 + e^x) = max(x, 0) + log(1 + e^-|x|)."""
    return (x if x > ZERO else ZERO) + log1p(exp(-abs(x)))


def sigmoid(x: f32) -> f32:
    """Return 1/(1 + e^-x), by e^-|x| only."""
    e = exp(-abs(x))
    return (ONE if x > ZERO else e) / (ONE + e)
