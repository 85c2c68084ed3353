"""From a public training schedule to the Gaussian-DP parameter of the last iterate, in float64 on the host.

In cyclic order an example takes part in one step of every epoch, and its schedule shrinks from all steps to one entry
per epoch (`jaxdp.iteration.isotonic.participation_steps`). Examples of one batch share their schedule. With constant
kappa <= 1, s and d the slopes of these stretches do not increase, except at the last, shorter one: the optimal
allocation has one or two blocks, in closed form.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import numpy as np

from jaxdp.domains import NONNEGATIVE_OR_INFINITE, SMALLEST_MU, field
from jaxdp.iteration.isotonic import participation_allocation, participation_steps
from jaxdp.mechanisms.base import record
from jaxdp.mechanisms.basic import NoisyIteration
from jaxdp.mechanisms.gaussian import GaussianMechanism
from jaxdp.typing import Number, RealField, Relation

# Relative slack on mu: the closed form has a few dozen roundings with exponents below 700, each at most 1e-13.
_SLACK = 1 + 1e-12
# Smaller contractions are replaced by this one. mu increases in the contraction, so that the bound stays valid.
_LOG_SMALLEST_CONTRACTION = -70.0


@record
class IteratedRelease(GaussianMechanism):
    """Last iterate of a private training run, as a mu-Gaussian-DP mechanism. Made by `NoisyProjectedSGD.after`.

    mu: upper bound of the parameter of the optimal shift allocation, >= 0, any shape (one entry per example).
    The only relation is replace_one: without a record those after it move to other places of the order, and the two
    runs differ in every step.

    Assumes: what `NoisyProjectedSGD` assumes, from which mu was computed: nothing but the last iterate is released; the
    loss has the stated constants (Lipschitz, smooth, strongly convex); batches in the stated order, steps and noise as
    stated, x_0 and all settings independent of the data; real noise, of a secret key.

    >>> import jaxdp
    >>> from jaxdp import training
    >>> f"{jaxdp.epsilon(training.IteratedRelease(0.5), 1e-5):.4f}"
    '1.9931'
    """

    mu: RealField = field(NONNEGATIVE_OR_INFINITE)
    relations: ClassVar[tuple[Relation, ...]] = ("replace_one",)
    fixed_order: ClassVar[bool] = True

    def gaussian_mu(self) -> Number:
        """The field itself."""
        return self.mu


@record
class CyclicIteration(NoisyIteration):
    """The steps of one example of `NoisyProjectedSGD`: a `jaxdp.NoisyIteration` under replace_one alone.

    Its fields are those. Made by `NoisyProjectedSGD.iteration`.

    Assumes: what `NoisyIteration` assumes, above all that nothing but the last iterate is released; the shifts are
    those of one example, replaced, in batches of a fixed order.

    >>> import jaxdp
    >>> from jaxdp import training
    >>> f"{jaxdp.epsilon(training.CyclicIteration([0.9, 0.9], 1.0, [0.1, 0.1]), 1e-5):.4f}"
    '0.4962'
    """

    relations: ClassVar[tuple[Relation, ...]] = ("replace_one",)
    fixed_order: ClassVar[bool] = True

    def __post_init__(self) -> None:
        NoisyIteration.__post_init__(self)


class Steps(NamedTuple):
    """One entry per step, float64: log contraction (<= 0), noise std, distance between the two maps."""

    log_contraction: np.ndarray
    noise_std: np.ndarray
    shift: np.ndarray


def cyclic_constant_mu(
    log_contraction: float, ratio: float, period: int, data_steps: Any, steps: Any, slot: Any, diameter: float = np.inf
) -> np.ndarray:
    """Mu of an example in slot 0..period-1 of a cyclic order with constant kappa <= 1 and d/s = ratio.

    data_steps: steps that see data (later ones are noise only); steps: steps in all. Arrays broadcast. diameter: of
    the ball the iterates stay in, in units of one shift; the history before any participation may be replaced by it.
    """
    steps, data_steps, slot = (np.asarray(a, np.float64) for a in (steps, data_steps, slot))
    limit = np.minimum(steps, data_steps)
    visits = np.floor((limit - 1 - slot) / period) + 1
    visits = np.where(slot < limit, np.maximum(visits, 0), 0)
    earlier = np.maximum(visits - 1, 0)
    tail = np.maximum(steps - 1 - (slot + earlier * period), 0)
    rate = -2 * max(log_contraction, _LOG_SMALLEST_CONTRACTION)
    # frame of the last participation: one step of noise has variance 1, the shift has length 1
    with np.errstate(over="ignore"):
        last_v = np.minimum(_geometric(rate, tail + 1), 1e300)  # less noise than there is: still an upper bound
    mu2 = _two_blocks(*_earlier_block(rate, period, earlier), 1.0, last_v)
    if np.isfinite(diameter):
        mu2 = np.minimum(mu2, _restarted_mu2(rate, period, earlier, last_v, diameter))
    return np.where(visits > 0, np.maximum(ratio * np.sqrt(mu2) * _SLACK, SMALLEST_MU), 0.0)


def _earlier_block(rate: float, period: int, visits: Any) -> tuple[Any, Any]:
    """Distance and noise variance of that many whole periods before the last participation, in its frame."""
    d = np.exp(-rate * period / 2) * _geometric(-rate * period / 2, visits)
    return d, np.exp(-rate) * _geometric(-rate, visits * period)


def _restarted_mu2(rate: float, period: int, earlier: np.ndarray, last_v: np.ndarray, diameter: float) -> np.ndarray:
    """Least mu^2 over restarts at an earlier participation with the distance set to the diameter.

    The first stretch after a restart is the steepest, so the earlier stretches are still one block. Every restart
    gives a bound; those tried are spread geometrically, then finer around the best.
    """
    kappa = np.exp(-rate / 2)

    def bound(back: np.ndarray) -> np.ndarray:
        d, v = _earlier_block(rate, period, back)
        d = d + diameter * kappa * np.exp(-rate * period / 2 * back)
        value = np.where(back > 0, _two_blocks(d, v, 1.0, last_v), (1 + diameter * kappa) ** 2 / last_v)
        return np.where(back < earlier, value, np.inf)

    best_back = np.zeros_like(earlier)
    best = bound(best_back)
    for factors in (np.geomspace(1, 2**31, 64), np.linspace(0.7, 1.4, 32), np.linspace(0.98, 1.02, 32)):
        centre = best_back if factors[0] < 1 else np.ones_like(best_back)
        for factor in factors:
            back = np.rint(centre * factor)
            value = bound(back)
            best_back, best = np.where(value < best, back, best_back), np.minimum(value, best)
    return best


def _geometric(rate: float, count: Any) -> Any:
    """sum_{k < count} e^{rate k}."""
    return np.expm1(rate * count) / np.expm1(rate) if rate else count


def _two_blocks(d1: Any, v1: Any, d2: Any, v2: Any) -> Any:
    """Sum over blocks of d^2 / v for two stretches, merged where the first is the steeper; v1 = 0: only one."""
    alone = d2 * d2 / v2
    safe = np.where(v1 > 0, v1, 1.0)
    merged = (d1 + d2) ** 2 / (v1 + v2)
    apart = d1 * d1 / safe + alone
    return np.where(v1 > 0, np.where(d1 * v2 > d2 * safe, merged, apart), alone)


def mu_of_slots(schedule: Steps, period: int, data_steps: int) -> np.ndarray:
    """Mu of every slot, (period,), for any public schedule with contractions <= 1, 1 <= data_steps <= its length."""
    times = np.arange(-(-data_steps // period) * period).reshape(-1, period).T
    return _mu_of_rows(schedule, np.where(times < data_steps, times, schedule.shift.shape[0]))


def reshuffled_mu(schedule: Steps, period: int, data_steps: int) -> np.ndarray:
    """Mu of the worst example when the order is drawn anew for every epoch, a scalar; data_steps as in `mu_of_slots`.

    The example counts as last in its epoch, with the size max_j d_j prod_{k=j+1..e} kappa_k over the steps j of
    the epoch: never less than for any place in it.
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
    """Mu of every row of the steps in which an example takes part, filled up with the number of all steps."""
    log_k = np.maximum(schedule.log_contraction, _LOG_SMALLEST_CONTRACTION)
    # few widths, few compilations
    missing = (1 << max(4, (rows.shape[1] - 1).bit_length())) - rows.shape[1]
    rows = np.pad(rows, ((0, 0), (0, missing)), constant_values=schedule.shift.shape[0])
    with np.errstate(divide="ignore"):
        logs = participation_steps(log_k, np.log(schedule.noise_std), np.log(schedule.shift), rows)
    mu2 = participation_allocation(*logs)
    log_size = np.abs(np.sum(schedule.log_contraction)) + schedule.shift.shape[0] + 16
    return np.sqrt(mu2) * (1 + 1e-15 * log_size) * _SLACK
