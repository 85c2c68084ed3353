"""Numerical functions that do not depend on privacy: special functions, sums of exponentials, rounding, root search."""
