"""Certified inversion of the log moment generating function: one parameter point, pure, float64."""
