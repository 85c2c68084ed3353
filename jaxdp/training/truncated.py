"""Poisson samples cut to a static size: what the cut adds to the guarantee of a step."""

from __future__ import annotations

import math

from jaxdp import validate
from jaxdp.domains import SMALLEST
from jaxdp.numerics.rounding import ULP


def truncation_delta(num_examples: int, sampling_probability: float, truncated_batch_size: int) -> float:
    """q P[Binomial(n, q) >= B], rounded up: the chance that an example is sampled and n others fill the batch.

    The delta that a cut of the Poisson sample to B examples adds to one step. q: sampling_probability; B:
    truncated_batch_size. It covers data sets of at most n = num_examples records and their neighbours under add, remove
    and replace_one.
    Accuracy: that of `binomial_tail`. Proof: notebooks/proofs/truncated_sampling.md, sections 2 and 3.

    >>> from jaxdp import training
    >>> f"{training.truncation_delta(10_000, 0.01, 160):.1e}"
    '1.7e-10'
    """
    n = int(validate.integer("num_examples", num_examples, 1))
    rate = float(validate.probability("sampling_probability", sampling_probability))
    tail = binomial_tail(n, rate, int(validate.integer("truncated_batch_size", truncated_batch_size, 1)))
    return min(max(rate * tail * (1 + 4 * ULP), SMALLEST), 1.0) if tail else 0.0


def binomial_tail(num_trials: int, probability: float, least: int) -> float:
    """Upper bound of P[Binomial(num_trials, probability) >= least], at most 1.

    num_trials, least: whole numbers, num_trials >= 1; probability: in [0, 1]. Stirling's bound of the first term times
    a geometric series: notebooks/proofs/truncated_sampling.md, section 3. 1 where least is not above the mean.
    """
    n, b = int(validate.integer("num_trials", num_trials, 1)), int(validate.integer("least", least, 0))
    p = float(validate.probability("probability", probability))
    if b > n or (p == 0 and b > 0):
        return 0.0
    p = max(p, SMALLEST)
    ratio = (n - b) * p / ((b + 1) * (1 - p)) * (1 + 8 * ULP) if p < 1 else 1.0
    if ratio >= 1 or b == 0:
        return 1.0
    inside = b * math.log(b / (n * p))
    outside = (n - b) * math.log((n - b) / (n * (1 - p))) if b < n else 0.0
    root = 0.5 * math.log(n / (2 * math.pi * b * (n - b))) if b < n else 0.0
    # the logarithms are of numbers with a few roundings, times b and n - b
    exponent = root - inside - outside + 16 * ULP * (n + abs(inside) + abs(outside) + 1)
    return min(1.0, max(math.exp(min(exponent, 0.0)) / (1 - ratio) * (1 + 8 * ULP), SMALLEST))
