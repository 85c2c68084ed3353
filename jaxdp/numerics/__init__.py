"""Ground floor: special functions, rounding, root finding. Knows nothing of privacy."""
