"""Conversions between descriptions of a privacy guarantee; theorems of Zhu, Dong, Wang 2022 unless stated otherwise.

| from -> to | function |
|---|---|
| (P, Q) -> (Q, P) | `swapped_delta` |
| delta -> F | `loss_tail_from_delta` |
| F -> delta | `delta_from_cdfs` |
| phi -> F | `levy_cdf` (an estimate; `jaxdp.delta` and `jaxdp.epsilon` use a certified contour sum instead) |
| f -> delta | `delta_from_tradeoff` |
| delta -> f | `tradeoff_from_delta` |
| f -> phi | `pair_from_tradeoff`, then log_mgf(1j t) of the pair |
| delta -> pair, phi | `pair_from_profile`, then log_mgf of the pair |
| delta -> Renyi | `renyi_from_profile` |
| Renyi -> (eps, delta) | `epsilon_from_rdp`, `delta_from_rdp` (one order at a time); `optimal_...` (all at once) |
| Renyi -> f | `tradeoff_from_rdp` |
| delta -> mu-GDP | `gdp_mu_from_profile` |

(P, Q): a dominating pair; delta: the privacy profile; F, phi: distribution and characteristic function of the loss; f:
trade-off function. Every function but `levy_cdf`, `levy_delta` and `quadrature_log_characteristic` returns a certified
bound, and says whether its arguments must be upper or lower bounds.
"""

from jaxdp.conversions.dominating_pair import (
    GridPairs,
    grid_pairs,
    pair_from_profile,
    pair_from_tradeoff,
    renyi_from_profile,
    sampled_delta,
    sampled_pair,
)
from jaxdp.conversions.profile import (
    delta_from_cdfs,
    delta_from_tradeoff,
    gdp_mu_from_profile,
    levy_cdf,
    levy_delta,
    loss_tail_from_delta,
    quadrature_log_characteristic,
    swapped_delta,
    tradeoff_from_delta,
)
from jaxdp.conversions.rdp import cut_mass, cut_renyi, cut_renyi_epsilon, delta_from_rdp, epsilon_from_rdp
from jaxdp.conversions.rdp_tradeoff import optimal_delta_from_rdp, optimal_epsilon_from_rdp, tradeoff_from_rdp

__all__ = [
    "GridPairs", "cut_mass", "cut_renyi", "cut_renyi_epsilon", "delta_from_cdfs", "delta_from_rdp",
    "delta_from_tradeoff", "epsilon_from_rdp", "gdp_mu_from_profile", "grid_pairs", "levy_cdf", "levy_delta",
    "loss_tail_from_delta", "optimal_delta_from_rdp", "optimal_epsilon_from_rdp", "pair_from_profile",
    "pair_from_tradeoff", "quadrature_log_characteristic", "renyi_from_profile", "sampled_delta", "sampled_pair",
    "swapped_delta", "tradeoff_from_delta", "tradeoff_from_rdp",
]  # fmt: skip
