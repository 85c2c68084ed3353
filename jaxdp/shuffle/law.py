"""Laws of X, the contribution of one report to delta(eps) = (1/n) E[(X_1 + ... + X_n)_+] of a shuffled round.

One user holds x or x'; R_x(y) is the probability of report y on input x. X = (R_x(y) - e^eps R_x'(y)) / m(y) with
"probability" m(y), and X = 0 with probability 1 - sum(m). For an upper bound m is a privacy blanket: m(y) <= R_z(y) for
every input z. For the exact delta of the data set in which all other users hold x0, m = R_x0. Proofs:
notebooks/proofs/shuffle.md, sections 1 to 4. Every function takes one parameter point and runs in a float64 scope.
"""

from typing import Any, NamedTuple, Self

import jax
import numpy as np

from jaxdp.runtime.arrays import in_float64, xp

LARGEST_EPS0 = 300.0  # e^(2 eps0) must not overflow; for a larger eps0 the bound of epsilon is eps0 itself


class Law(NamedTuple):
    """Law of one report: arrays with one entry for each outcome. Reports with equal likelihood ratios are one outcome.

    first, second, base: probabilities under R_x, R_x' and m. An outcome with base 0 and first > 0 identifies the user.
    loss: log(first / second), stored separately because the quotient loses digits. rest: 1 - sum(base), a scalar.
    """

    first: Any
    second: Any
    base: Any
    loss: Any
    rest: Any

    def largest_loss(self) -> Any:
        """Largest loss with positive mass, the local epsilon of x against x'; NaN if any part of the law is NaN."""
        unknown = sum((xp.any(xp.isnan(part)) for part in self), xp.zeros(()))
        return xp.where(unknown > 0, xp.nan, xp.max(xp.where(self.first > 0, self.loss, -xp.inf)))

    @in_float64
    def chi_square(self) -> Any:
        """The chi-square divergence; with many rounds the law of the largest one is the worst."""
        live = self.base > 0
        squares = (self.first - self.second) ** 2 / xp.where(live, self.base, 1.0)
        return xp.sum(xp.where(live, squares, 0.0), axis=-1)

    def given_away(self) -> Any:
        """Probability under R_x of reports that no other user can send; delta is at least this at every epsilon."""
        return xp.sum(xp.where((self.base == 0) & (self.loss == xp.inf), self.first, 0.0))

    def swapped(self) -> Self:
        """The law with x and x' exchanged."""
        return self._replace(first=self.second, second=self.first, loss=-self.loss)


def clones(eps0: Any, bound: str) -> Law:
    """Two outcomes: the clones pair, which dominates shuffled eps0-DP reports (notebooks/proofs/shuffle.md, section 2).

    bound: "clones" has clone rate e^-eps0 (Feldman, McMillan, Talwar 2021, Theorem 3.2), "stronger" 2/(e^eps0 + 1).
    """
    truth, lie = 1 / (1 + xp.exp(-eps0)), xp.exp(-eps0) / (1 + xp.exp(-eps0))
    rate, rest = (xp.exp(-eps0), -xp.expm1(-eps0)) if bound == "clones" else (2 * lie, xp.tanh(eps0 / 2))
    ones = xp.ones(2)
    return Law(xp.stack([truth, lie]), xp.stack([lie, truth]), rate / 2 * ones, xp.stack([eps0, -eps0]) * ones, rest)


def stacked(*laws: Law) -> Law:
    """The laws, stacked along a new leading axis."""
    return Law(*(xp.stack([xp.asarray(part) for part in parts]) for parts in zip(*laws, strict=True)))


def two_point(eps0: Any) -> Law:
    """Two-point randomized response; all other users hold x', or all hold x: the two laws on a leading axis."""
    pair = clones(eps0, "clones")
    pair = pair._replace(base=pair.second, rest=xp.zeros_like(pair.rest))
    return stacked(pair, pair.swapped())


# Rows are the 8 classes of reports, columns say whether the report names x, x', x0. Rows 0 to 3 do not name x0.
_NAMED = np.array([[a, b, c] for c in (0, 1) for a, b in ((1, 0), (0, 1), (0, 0), (1, 1))], bool)


class NamedSets(NamedTuple):
    """A randomizer whose report y names a set of inputs: R_x(y) = mu(y) e^eps0 / Z if y names x, mu(y) / Z if not.

    Z = 1 + (e^eps0 - 1) share. share: mu of the reports that name a given input. every: mu of the reports that name all
    inputs. named: mu of the four classes of reports that name only x, only x', neither, both. third: (2, 4), for each
    class the conditional probabilities that a report does not name and does name a third input x0; (1, 0) without x0.
    """

    eps0: Any
    named: Any
    third: Any
    share: Any
    every: Any

    def levels(self) -> tuple[Any, Any]:
        """(e^eps0 / Z, 1 / Z), without overflow."""
        high = 1 / (self.share + (1 - self.share) * xp.exp(-self.eps0))
        return high, high * xp.exp(-self.eps0)

    def blanket(self) -> Law:
        """The law for upper bounds: m = mu / Z, but m = e^eps0 mu / Z for the reports that name all inputs."""
        high, low = self.levels()
        both, neither = xp.arange(4) == 3, xp.arange(4) == 2
        mu = xp.where(both, xp.maximum(self.named - self.every, 0.0), self.named)
        # Reports that name all inputs have R_x = R_x' = m, like reports that name neither: they join that outcome.
        certain = xp.where(neither, high * self.every, 0.0)
        first, second = (mu * xp.where(_NAMED[:4, i], high, low) + certain for i in (0, 1))
        rest = -xp.expm1(-self.eps0) * high * xp.maximum(self.share - self.every, 0.0)
        return Law(first, second, low * mu + certain, self._losses()[:4], rest)

    def homogeneous(self, third: bool) -> Law:
        """The exact law if all other users hold one input: x0 if third is true and x0 exists, else x'."""
        high, low = self.levels()
        mu = (self.named * self.third).ravel()
        first, second, held = (mu * xp.where(_NAMED[:, i], high, low) for i in range(3))
        held = xp.where(third & xp.any(self.third[1] > 0), held, second)
        return Law(first, second, held, self._losses(), xp.zeros_like(high))

    def _losses(self) -> Any:
        return self.eps0 * (_NAMED[:, 0].astype(float) - _NAMED[:, 1])


def _representable(eps0: Any) -> Any:
    """eps0, or NaN where e^-eps0 underflows; NaN makes every bound vacuous."""
    return xp.where(eps0 <= 700.0, eps0, xp.nan)


def laplace_blanket(eps0: Any, cells: int) -> Law:
    """Law for upper bounds of a number in [0, 1] plus Laplace noise of scale 1/eps0, for the worst inputs 0 and 1.

    The reports are cut into cells; the mass of each cell moves to its two ends. The blanket has the density of the
    farther input. In a cell X is linear in e^L or e^-L, L the loss. A cell of width w (in L/2) moves the share
    1/(1 + e^w) to its end of larger |L|: this keeps its mass and the mean of X, so the law grows in convex order.
    Outcomes: L >= 0 in increasing order, then their mirror images.
    """
    half = cells // 2
    eps0 = _representable(eps0)
    width = eps0 / cells
    cell = 0.5 * xp.exp(-eps0 / 2 - width * xp.arange(half)) * -xp.expm1(-width)
    outward = cell / (1 + xp.exp(width))
    zero = xp.zeros(1)
    base = xp.concatenate([cell - outward, zero]) + xp.concatenate([zero, outward])
    base = xp.set_at(base, -1, base[-1] + 0.5 * xp.exp(-eps0))  # the reports beyond the input
    loss = 2 * width * xp.arange(half + 1)
    near = base * xp.exp(loss)
    return Law(
        xp.concatenate([near, base]),
        xp.concatenate([base, near]),
        xp.concatenate([base, base]),
        xp.concatenate([loss, -loss]),
        -xp.expm1(-eps0 / 2),
    )


def laplace_homogeneous(eps0: Any, cells: int) -> Law:
    """Law for lower bounds of the randomizer of `laplace_blanket`, if all other users hold 1.

    Each report is replaced by its cell. The law becomes smaller in convex order.
    """
    place = xp.arange(cells) / cells
    eps0 = _representable(eps0)
    width = eps0 / cells
    cell = 0.5 * xp.exp(-eps0 * place) * -xp.expm1(-width)
    first = xp.concatenate([xp.full(1, 0.5), cell, 0.5 * xp.exp(-eps0)[None]])
    loss = xp.concatenate([eps0[None], eps0 * (1 - 2 * place) - width, -eps0[None]])
    second = first[::-1]
    return Law(first, second, second, loss, xp.zeros_like(eps0))


def finite_law(table: Any, person: Any, other: Any, held: Any = None) -> Law:
    """The law of a table of report probabilities (inputs, reports) for x = person and x' = other, indices of inputs.

    held: None for the law for upper bounds, with the blanket m(y) = min over all inputs; else the input that all other
    users hold, for the exact law.
    """
    table = normalised(table)
    blanket = held is None
    first, second = xp.lookup(table, person), xp.lookup(table, other)
    base = xp.min(table, axis=0) if blanket else xp.lookup(table, held)
    live = (first > 0) & (second > 0)
    logs = [xp.log(xp.where(live, side, 1.0)) for side in (first, second)]
    # Rounding of the logarithms: |loss| is rounded up for upper bounds (from the largest loss on delta is taken as 0),
    # down for exact laws. Both signs move alike, which keeps mirror images; `sum_at` takes E X from the outcomes then.
    blur = (4e-16 if blanket else -4e-16) * (1 + xp.abs(logs[0]) + xp.abs(logs[1]))
    loss = logs[0] - logs[1]
    loss = loss + xp.sign(loss) * blur
    loss = xp.where(live, loss, xp.where(first > 0, xp.inf, -xp.inf))
    # 1 - sum(base), rounded up
    rest = xp.maximum(1 - xp.sum(base) + 4e-16 * base.size, 0.0) if blanket else xp.zeros(())
    return Law(first, second, base, loss, rest)


def normalised(table: Any) -> Any:
    """The table with rows of sum 1. Sorting makes rows with equal entries in another order have equal sums."""
    return table / xp.sum(xp.sort(table, axis=-1), axis=-1, keepdims=True)


def most_telling(table: Any, person: Any, other: Any) -> Any:
    """The input x0 with the largest sum over reports of (R_x - R_x')^2 / R_x0, where all other users hold x0."""
    apart = (xp.lookup(table, person) - xp.lookup(table, other)) ** 2 / xp.maximum(table, 1e-12)
    return xp.argmax(xp.sum(apart, axis=-1))


def distinct(laws: Law) -> Law:
    """The laws of a batch (rows, pairs of inputs, outcomes) without repetitions, NumPy in and out.

    Outcomes with equal probabilities are joined, and mirror images stand next to each other. Of equal laws of a row one
    is kept; a row with fewer laws than others repeats its last law.
    """
    order = np.lexsort((laws.base, laws.first, -laws.loss, -np.abs(laws.loss)), axis=-1)
    first, second, base, loss = (np.take_along_axis(side, order, axis=-1) for side in laws[:4])
    rows, pairs, size = first.shape
    is_new = np.ones(first.shape, bool)
    is_new[..., 1:] = (np.diff(first) != 0) | (np.diff(second) != 0) | (np.diff(base) != 0)
    place = np.arange(size)
    next_new = np.minimum.accumulate(np.where(is_new, place, size)[..., ::-1], axis=-1)[..., ::-1]  # from place on
    times = np.where(is_new, np.append(next_new[..., 1:], np.full_like(next_new[..., :1], size), axis=-1) - place, 0)
    joined = [side * times for side in (first, second, base)]
    key = np.concatenate([np.repeat(np.arange(rows), pairs)[:, None], *(x.reshape(-1, size) for x in joined)], axis=1)
    index = np.unique(key, axis=0, return_index=True)[1]
    num = np.bincount(index // pairs, minlength=rows)
    chosen = index[np.minimum(np.arange(num.max(initial=0)), num[:, None] - 1) + (np.cumsum(num) - num)[:, None]]
    first, second, base = joined
    return jax.tree_util.tree_map(
        lambda a: a.reshape(-1, *a.shape[2:])[chosen], Law(first, second, base, loss, laws.rest)
    )
