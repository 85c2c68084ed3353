"""Amplification by iteration: the privacy of the last iterate of noisy projected gradient descent."""

from jaxdp.iteration.published import (
    LossConstants,
    contraction,
    contractive_iteration_rdp,
    cyclic_mu,
    feldman_rdp_at_index,
    full_batch_mu,
    logistic_regression,
    noisy_sgd_rdp_at_index,
    shifted_rdp,
    shifted_rdp_optimum,
    shifted_rdp_path,
    softmax_regression,
)
from jaxdp.iteration.schedule import (
    Schedule,
    append_noise_only,
    cyclic_participation,
    gdp_mu,
    participation_mu,
    per_index_mu,
    quadratic_mu,
)

__all__ = [
    "LossConstants", "Schedule", "append_noise_only", "contraction", "contractive_iteration_rdp", "cyclic_mu",
    "cyclic_participation", "feldman_rdp_at_index", "full_batch_mu", "gdp_mu", "logistic_regression",
    "noisy_sgd_rdp_at_index", "participation_mu", "per_index_mu", "quadratic_mu", "shifted_rdp", "shifted_rdp_optimum",
    "shifted_rdp_path", "softmax_regression",
]  # fmt: skip
