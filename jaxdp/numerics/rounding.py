"""The unit in which all bounds of rounding errors are stated, and the rounding error of a product."""

import numpy as np

ULP = 2.0**-53
"""Largest relative error when float64 rounds to nearest, 2^-53. The next number after 1 is 1 + 2 ULP; 1 + ULP == 1."""

_SPLIT = 2.0**27 + 1  # splits a double into two halves, whose products are exact


def product_error(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """x y minus the rounded product x * y, exactly (Dekker); NaN where an intermediate number overflows."""
    x_high, y_high = (a * _SPLIT - (a * _SPLIT - a) for a in (x, y))
    x_low, y_low = x - x_high, y - y_high
    return ((x_high * y_high - x * y) + x_high * y_low + x_low * y_high) + x_low * y_low
