"""Differentially private training with optax: gradient transformations, their batches, and their accounting."""

from jaxdp.mechanisms.truncated import truncation_delta
from jaxdp.training.batches import (
    Batch,
    balls_in_bins_batch,
    band_rounds,
    bin_overflow_chance,
    cyclic_batch,
    poisson_batch,
    reshuffled_batch,
    truncated_poisson_batch,
)
from jaxdp.training.checkpoint import Checkpoints, RewoundError, refuse_rewind
from jaxdp.training.dpsgd import DPSGD, ClippedSum
from jaxdp.training.noise import NoisyState
from jaxdp.training.projected import NoisyProjectedSGD, StronglyConvexLoss, float32_rounding
from jaxdp.training.schedule import CyclicIteration, IteratedRelease
from jaxdp.training.shuffled_pass import ShuffledSGD

__all__ = [
    "DPSGD", "Batch", "Checkpoints", "ClippedSum", "CyclicIteration", "IteratedRelease", "NoisyProjectedSGD",
    "NoisyState", "RewoundError", "ShuffledSGD", "StronglyConvexLoss", "balls_in_bins_batch", "band_rounds",
    "bin_overflow_chance", "cyclic_batch", "float32_rounding", "poisson_batch", "refuse_rewind", "reshuffled_batch",
    "truncated_poisson_batch", "truncation_delta",
]  # fmt: skip
