"""How a kernel runs: NumPy or JAX, float64 scope, batches, compiler options, canary, provenance of a stored number."""
