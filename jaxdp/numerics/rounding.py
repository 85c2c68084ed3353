"""The unit in which all bounds of rounding errors are stated."""

ULP = 2.0**-53
"""Largest relative error when float64 rounds to nearest, 2^-53. The next number after 1 is 1 + 2 ULP; 1 + ULP == 1."""
