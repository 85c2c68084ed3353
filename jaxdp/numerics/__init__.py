"""Ground floor: special functions, rounding, root finding, samplers. Knows nothing of privacy."""
