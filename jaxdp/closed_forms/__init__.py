"""Closed formulas: Gaussian mechanism, one sampled Gaussian step, one finite law, Laplace noise's Renyi divergence."""
