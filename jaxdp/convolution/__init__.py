"""Repeated noise addition: the privacy of a value hidden by a sum of independent noises."""

from jaxdp.convolution.laplace_sum import (
    laplace_sum_delta,
    laplace_sum_delta_bounds,
    laplace_sum_epsilon,
    laplace_sum_epsilon_bounds,
    laplace_sum_log_density,
    laplace_sum_rdp,
)
from jaxdp.convolution.shift_bounds import (
    discrete_laplace_bound,
    gaussian_bound,
    grouped_laplace_bound,
    laplace_bound,
    laplace_rdp,
    repeated_noise_bound,
)

__all__ = [
    "discrete_laplace_bound", "gaussian_bound", "grouped_laplace_bound", "laplace_bound", "laplace_rdp",
    "laplace_sum_delta", "laplace_sum_delta_bounds", "laplace_sum_epsilon", "laplace_sum_epsilon_bounds",
    "laplace_sum_log_density", "laplace_sum_rdp", "repeated_noise_bound",
]  # fmt: skip
