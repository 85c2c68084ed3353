"""Formulas that need no contour: Gaussian, one sampled step, one finite law, Laplace's Renyi divergence."""
