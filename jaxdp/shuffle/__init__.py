"""Privacy amplification by shuffling, one function for each theorem. The mechanism itself is `jaxdp.Shuffled`."""

from jaxdp.shuffle.approximate import approximate_ldp
from jaxdp.shuffle.closed_form import clones_epsilon_closed_form, krr_epsilon_closed_form, lower_bound_epsilon
from jaxdp.shuffle.comparison import blanket_bennett, blanket_hoeffding, cheu_2019, erlingsson_2019, girgis_2021_renyi
from jaxdp.shuffle.inverse import local_epsilon_for, num_users_for
from jaxdp.shuffle.noisy_sgd import noisy_sgd_one_pass_epsilon

__all__ = [
    "approximate_ldp",
    "blanket_bennett",
    "blanket_hoeffding",
    "cheu_2019",
    "clones_epsilon_closed_form",
    "erlingsson_2019",
    "girgis_2021_renyi",
    "krr_epsilon_closed_form",
    "local_epsilon_for",
    "lower_bound_epsilon",
    "noisy_sgd_one_pass_epsilon",
    "num_users_for",
]
