"""How a kernel runs: NumPy or JAX, float64 scope, batches, compiler options, canary checks, code fingerprints."""
