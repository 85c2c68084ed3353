"""Privacy amplification by mixing: a private mechanism followed by a Markov kernel.

Theorem numbers: Balle, Barthe, Gaboardi, Geumlek 2019, "Privacy amplification by mixing and diffusion mechanisms".
"""

from jaxdp.mixing.amplification import (
    Guarantee,
    dobrushin_amplification,
    dobrushin_coefficient,
    doeblin_amplification,
    doeblin_coefficient,
    hockey_stick_amplification,
    hockey_stick_coefficient,
    local_privacy,
    pure_local_epsilon,
    required_level,
    ultra_mixing_amplification,
    ultra_mixing_coefficient,
)
from jaxdp.mixing.couplings import (
    IteratedLaplace,
    coupling_bound,
    gaussian_split,
    iterated_gaussian_rdp,
    iterated_laplace_pure_epsilon,
    iterated_laplace_rdp,
)

__all__ = [
    "Guarantee", "IteratedLaplace", "coupling_bound", "dobrushin_amplification", "dobrushin_coefficient",
    "doeblin_amplification", "doeblin_coefficient", "gaussian_split", "hockey_stick_amplification",
    "hockey_stick_coefficient", "iterated_gaussian_rdp", "iterated_laplace_pure_epsilon", "iterated_laplace_rdp",
    "local_privacy", "pure_local_epsilon", "required_level", "ultra_mixing_amplification", "ultra_mixing_coefficient",
]  # fmt: skip
