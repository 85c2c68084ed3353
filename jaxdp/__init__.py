"""jaxdp: certified differential-privacy accounting, vectorised in JAX."""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from jaxdp.accounting import delta, delta_bounds, epsilon, epsilon_bounds, log_mgf, renyi, tradeoff
from jaxdp.calibration import calibrate
from jaxdp.interval import Bounds
from jaxdp.mechanisms.allocation import RandomAllocation
from jaxdp.mechanisms.base import Mechanism, UnsupportedMechanismError, record
from jaxdp.mechanisms.basic import (
    ApproximateDP,
    DiscreteLaplace,
    DiscretePair,
    Gaussian,
    Laplace,
    NoisyIteration,
    PureDP,
    RandomizedResponse,
)
from jaxdp.mechanisms.composition import compose, repeat
from jaxdp.mechanisms.discrete_gaussian import DiscreteGaussian
from jaxdp.mechanisms.local_randomizers import (
    FiniteRandomizer,
    HadamardResponse,
    LocalHashing,
    LocalLaplace,
    SubsetSelection,
    UnaryEncoding,
)
from jaxdp.mechanisms.sampled import FixedSizeSampled, PoissonSampled
from jaxdp.mechanisms.shuffled import LocalRandomizer, Shuffled
from jaxdp.report import report
from jaxdp.runtime.backend import BackendError
from jaxdp.serialization import from_json, to_json
from jaxdp.sweep import sweep

__version__ = "0.1.0"

__all__ = [
    "ApproximateDP", "BackendError", "Bounds", "DiscreteGaussian", "DiscreteLaplace", "DiscretePair",
    "FiniteRandomizer", "FixedSizeSampled", "Gaussian", "HadamardResponse", "Laplace", "LocalHashing",
    "LocalLaplace", "LocalRandomizer", "Mechanism", "NoisyIteration", "PoissonSampled", "PureDP",
    "RandomAllocation", "RandomizedResponse", "Shuffled", "SubsetSelection", "UnaryEncoding",
    "UnsupportedMechanismError", "calibrate", "compose", "delta", "delta_bounds", "epsilon", "epsilon_bounds",
    "from_json", "log_mgf", "record", "renyi", "repeat", "report", "sweep", "to_json", "tradeoff",
]  # fmt: skip

# Modules imported at first use: `import jaxdp` stays fast, and some of them need optional packages (extras).
_LAZY_MODULES = (
    "conversions", "convolution", "diffusion", "domains", "interop", "iteration", "mixing", "plot", "shuffle",
    "training",
)  # fmt: skip

if TYPE_CHECKING:
    from jaxdp import conversions as conversions
    from jaxdp import convolution as convolution
    from jaxdp import diffusion as diffusion
    from jaxdp import domains as domains
    from jaxdp import interop as interop
    from jaxdp import iteration as iteration
    from jaxdp import mixing as mixing
    from jaxdp import plot as plot
    from jaxdp import shuffle as shuffle
    from jaxdp import training as training
else:  # hidden from type checkers, which would otherwise accept every misspelt name

    def __getattr__(name: str) -> ModuleType:
        if name in _LAZY_MODULES:
            return importlib.import_module(f"jaxdp.{name}")
        raise AttributeError(f"module 'jaxdp' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_LAZY_MODULES, "__version__"})
