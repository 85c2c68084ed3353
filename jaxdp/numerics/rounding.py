"""The unit of every charge for rounding."""

ULP = 2.0**-53
"""Largest relative error of one rounding of float64 to nearest. The next number after 1 is 1 + 2 ULP; 1 + ULP is 1."""
