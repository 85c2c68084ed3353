"""The Gaussian-DP parameter mu of the last iterate, from a public training schedule, in float64 on the host.

In cyclic order an example takes part in one step of every epoch. Its schedule of all steps can be merged to one entry,
a stretch, per epoch (`jaxdp.iteration.isotonic.participation_steps`). Examples of one batch (one slot) have the same
schedule. With constant kappa <= 1, noise s and distance d, the slopes of the stretches do not increase, except at the
last, shorter stretch: the optimal allocation has one or two blocks, in closed form.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import numpy as np

from jaxdp.domains import NONNEGATIVE_OR_INFINITE, SMALLEST_MU, field
from jaxdp.iteration.isotonic import participation_allocation, participation_steps
from jaxdp.mechanisms.base import record
from jaxdp.mechanisms.basic import NoisyIteration
from jaxdp.mechanisms.gaussian import OfMu
from jaxdp.typing import RealField, Relation

# Relative margin on mu: the closed form has a few dozen roundings, with exponents below 700, each at most 1e-13.
_SLACK = 1 + 1e-12
# log kappa; smaller contractions are replaced by it. mu increases with kappa, so the bound stays valid.
_LOG_SMALLEST_CONTRACTION = -70.0


@record
class IteratedRelease(OfMu):
    """Last iterate of a private training run, as a mu-Gaussian-DP mechanism. Made by `NoisyProjectedSGD.after`.

    mu: upper bound of the mu of the optimal shift allocation, >= 0, any shape (one entry per example).
    The only relation is replace_one: if a record is removed, later records move to other places in the order, and the
    two runs differ in every later step.

    Assumes: what `NoisyProjectedSGD` assumes, from whose settings mu was computed: only the last iterate is released;
    the loss has the stated constants (Lipschitz, smoothness, strong convexity); batches, steps and noise are as stated;
    x_0 and all settings are independent of the data; the noise is real noise from a secret key.

    >>> import jaxdp
    >>> from jaxdp import training
    >>> f"{jaxdp.epsilon(training.IteratedRelease(0.5), 1e-5):.4f}"
    '1.9931'
    """

    mu: RealField = field(NONNEGATIVE_OR_INFINITE)
    relations: ClassVar[tuple[Relation, ...]] = ("replace_one",)
    fixed_order: ClassVar[bool] = True


@record
class CyclicIteration(NoisyIteration):
    """All steps of `NoisyProjectedSGD` for one replaced example: a `jaxdp.NoisyIteration` under replace_one alone.

    The fields are those of `NoisyIteration`. Made by `NoisyProjectedSGD.iteration`.

    Assumes: what `NoisyIteration` assumes, above all that only the last iterate is released; the shifts are caused by
    replacing one example, with batches in a fixed order.

    >>> import jaxdp
    >>> from jaxdp import training
    >>> f"{jaxdp.epsilon(training.CyclicIteration([0.9, 0.9], 1.0, [0.1, 0.1]), 1e-5):.4f}"
    '0.4962'
    """

    relations: ClassVar[tuple[Relation, ...]] = ("replace_one",)
    fixed_order: ClassVar[bool] = True


class Steps(NamedTuple):
    """One entry per step, float64: log contraction (<= 0), noise std, distance between the maps of the two runs."""

    log_contraction: np.ndarray
    noise_std: np.ndarray
    shift: np.ndarray


def cyclic_constant_mu(
    log_contraction: float, ratio: float, period: int, data_steps: int, steps: int, slot: Any, diameter: float = np.inf
) -> np.ndarray:
    """mu of an example in a cyclic order of batches, with constant kappa <= 1 and d/s = ratio.

    period: batches of an epoch. slot: place of the example's batch in the epoch, 0..period-1, or an array of places.
    data_steps: steps that use data, at most steps. steps: all steps. diameter of the ball that holds the iterates (inf:
    no ball), in units of one shift d; it bounds the distance of the two runs before any participation.
    """
    slot = np.asarray(slot, np.float64)
    visits = np.floor((data_steps - 1 - slot) / period) + 1
    earlier = np.maximum(visits - 1, 0)
    tail = np.maximum(steps - 1 - (slot + earlier * period), 0)
    rate = -2 * max(log_contraction, _LOG_SMALLEST_CONTRACTION)
    # in units of the last participation: noise of its step has variance 1, its shift length 1
    with np.errstate(over="ignore"):
        last_v = np.minimum(_geometric(rate, tail + 1), 1e300)  # less noise than there is: mu stays an upper bound
    mu2 = _two_blocks(*_earlier_block(rate, period, earlier), last_v)
    if np.isfinite(diameter):
        mu2 = np.minimum(mu2, _restarted_mu2(rate, period, earlier, last_v, diameter))
    return np.where(visits > 0, np.maximum(ratio * np.sqrt(mu2) * _SLACK, SMALLEST_MU), 0.0)


def _earlier_block(rate: float, period: int, visits: Any) -> tuple[Any, Any]:
    """Distance and noise variance of the ``visits`` periods before the last participation, in its units."""
    d = np.exp(-rate * period / 2) * _geometric(-rate * period / 2, visits)
    return d, np.exp(-rate) * _geometric(-rate, visits * period)


def _restarted_mu2(rate: float, period: int, earlier: np.ndarray, last_v: np.ndarray, diameter: float) -> np.ndarray:
    """Smallest mu^2 over restarts: at an earlier participation, the distance of the runs is set to the diameter.

    The first stretch after a restart is the steepest, so the earlier stretches are still one block. Every restart
    gives a valid bound. The optimum is that of (d + e u)^2 / (v - w u^2), u = kappa^(period back), for a block that is
    merged with the last stretch or for a block alone; the whole numbers next to both optima are tried.
    """
    reset = diameter * np.exp(-rate / 2)
    positive = max(rate, 1e-11)  # for kappa = 1 the optimum is a limit
    best = np.full(earlier.shape, np.inf)
    with np.errstate(all="ignore"):
        d, w = 1 / np.expm1(positive * period / 2), 1 / np.expm1(positive)
        for distance, variance in ((d + 1, w + last_v), (d, w)):
            u = np.clip((d - reset) / distance * (variance / w), 1e-300, 1.0)
            optimum = -2 * np.log(u) / (positive * period)
            for whole in (np.floor(optimum), np.ceil(optimum)):
                back = np.clip(whole, 0, np.maximum(earlier - 1, 0))
                moved, noise = _earlier_block(rate, period, back)
                moved = moved + reset * np.exp(-rate * period / 2 * back)
                best = np.fmin(best, _two_blocks(moved, noise, last_v))
    return best


def _geometric(rate: float, count: Any) -> Any:
    """sum_{k < count} e^{rate k}."""
    return np.expm1(rate * count) / np.expm1(rate) if rate else count


def _two_blocks(d: Any, v: Any, last_v: Any) -> Any:
    """Sum over blocks of d^2 / v for a stretch and the last one, whose d is 1; merged if d / v > 1 / last_v."""
    apart = d * d / np.where(v > 0, v, 1.0) + 1 / last_v
    return np.where(d * last_v > v, (d + 1) ** 2 / (v + last_v), apart)


def mu_of_slots(schedule: Steps, period: int, data_steps: int) -> np.ndarray:
    """mu of every slot, (period,), for any public schedule with contractions <= 1, data_steps <= its length."""
    times = np.arange(-(-data_steps // period) * period).reshape(-1, period).T
    return _mu_of_rows(schedule, np.where(times < data_steps, times, schedule.shift.shape[0]))


def reshuffled_mu(schedule: Steps, period: int, data_steps: int) -> np.ndarray:
    """mu of the worst example if the order is drawn anew for every epoch, a scalar; data_steps as in `mu_of_slots`.

    The example is placed in the last step e of every epoch, with distance max_j d_j prod_{k=j+1..e} kappa_k over the
    steps j of the epoch. No place in the epoch gives a larger mu.
    """
    starts = np.arange(0, data_steps, period)
    ends = np.minimum(starts + period, data_steps) - 1
    log_k = np.cumsum(schedule.log_contraction)
    with np.errstate(divide="ignore"):
        log_d = np.log(schedule.shift[:data_steps]) - log_k[:data_steps]
    largest = np.maximum.reduceat(log_d, starts) + log_k[ends]
    shift = np.array(schedule.shift)
    shift[ends] = np.exp(largest) * _SLACK
    return _mu_of_rows(schedule._replace(shift=shift), ends[None, :])[0]


def _mu_of_rows(schedule: Steps, rows: np.ndarray) -> np.ndarray:
    """mu for every row of ``rows``: the steps in which an example takes part, padded with the number of all steps."""
    log_k = np.maximum(schedule.log_contraction, _LOG_SMALLEST_CONTRACTION)
    # padded to powers of two, so that few widths are compiled
    missing = (1 << max(4, (rows.shape[1] - 1).bit_length())) - rows.shape[1]
    rows = np.pad(rows, ((0, 0), (0, missing)), constant_values=schedule.shift.shape[0])
    with np.errstate(divide="ignore"):
        logs = participation_steps(log_k, np.log(schedule.noise_std), np.log(schedule.shift), rows)
    mu2 = participation_allocation(*logs)
    log_size = np.abs(np.sum(schedule.log_contraction)) + schedule.shift.shape[0] + 16
    return np.sqrt(mu2) * (1 + 1e-15 * log_size) * _SLACK
