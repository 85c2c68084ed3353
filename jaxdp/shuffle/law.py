"""Laws of X: what one report contributes to delta(eps) = (1/n) E[(X_1 + ... + X_n)_+] of a shuffled round.

A report y contributes X = (R_x(y) - e^eps R_x'(y)) / m(y) with "probability" m(y), and 0 with the rest. For an upper
bound m is a measure below the report law of every input (a privacy blanket); for the exact delta of the data set in
which all others hold x0, m is the report law of x0. Proofs: notebooks/proofs/shuffle.md, sections 1 to 4.

Every function here is for one parameter point and runs in a float64 scope.
"""

from typing import Any, NamedTuple, Self

import jax
import numpy as np

from jaxdp.runtime.arrays import xp

LARGEST_EPS0 = 300.0  # e^(2 eps0) must not overflow; above it nothing but eps0 itself is returned


class Law(NamedTuple):
    """Outcomes of one report, those of equal likelihood ratios joined; one axis, the outcomes.

    first, second: probabilities under R_x and R_x'. base: under m; where it is 0, an outcome of positive ``first``
    gives the person away. loss: log(first / second), on its own because a quotient would lose its digits.
    rest: 1 - sum(base), a scalar.
    """

    first: Any
    second: Any
    base: Any
    loss: Any
    rest: Any

    def largest_loss(self) -> Any:
        """The local epsilon of this pair of inputs: the largest loss that has mass; NaN where anything is NaN."""
        unknown = sum((xp.any(xp.isnan(part)) for part in self), xp.zeros(()))
        return xp.where(unknown > 0, xp.nan, xp.max(xp.where(self.first > 0, self.loss, -xp.inf)))

    def given_away(self) -> Any:
        """The probability of the reports that nobody else can send, which delta is at every epsilon."""
        return xp.sum(xp.where((self.base == 0) & (self.loss == xp.inf), self.first, 0.0))

    def swapped(self) -> Self:
        """The law of the inputs in the other order."""
        return self._replace(first=self.second, second=self.first, loss=-self.loss)


def clones(eps0: Any, bound: str) -> Law:
    """Two outcomes, the clones of a pair of eps0-DP reports (notebooks/proofs/shuffle.md, section 2).

    bound: "clones", clone rate e^-eps0 (Feldman, McMillan, Talwar 2021, Theorem 3.2), or "stronger", 2/(e^eps0 + 1).
    """
    truth, lie = 1 / (1 + xp.exp(-eps0)), xp.exp(-eps0) / (1 + xp.exp(-eps0))
    rate, rest = (xp.exp(-eps0), -xp.expm1(-eps0)) if bound == "clones" else (2 * lie, xp.tanh(eps0 / 2))
    one_each = xp.ones(2)
    return Law(
        xp.stack([truth, lie]), xp.stack([lie, truth]), rate / 2 * one_each, xp.stack([eps0, -eps0]) * one_each, rest
    )


def stacked(*laws: Law) -> Law:
    """The laws on a new leading axis."""
    return Law(*(xp.stack([xp.asarray(part) for part in parts]) for parts in zip(*laws, strict=True)))


def two_point(eps0: Any) -> Law:
    """Two-point randomized response of one person, all others hold the other value: both orders, on a leading axis."""
    one = clones(eps0, "clones")
    one = one._replace(base=one.second, rest=xp.zeros_like(one.rest))
    return stacked(one, one.swapped())


# Which of (x, x', x0) a report names.
_NAMED = np.array([[a, b, c] for c in (0, 1) for a, b in ((1, 0), (0, 1), (0, 0), (1, 1))], bool)


class NamedSets(NamedTuple):
    """A randomizer whose report y names a set of inputs: R_x(y) = mu(y) e^eps0 / Z if y names x, mu(y) / Z if not.

    Z = 1 + (e^eps0 - 1) share. named: mu of the reports that name only x, only x', neither, both. third: the chances
    that such a report does not name a third input x0 and that it does, (2, 4); (1, 0) where there is no such input.
    share: mu of the reports that name a given input; every: of those that name all inputs.
    """

    eps0: Any
    named: Any
    third: Any
    share: Any
    every: Any

    def levels(self) -> tuple[Any, Any]:
        """e^eps0 / Z and 1 / Z; nothing overflows."""
        high = 1 / (self.share + (1 - self.share) * xp.exp(-self.eps0))
        return high, high * xp.exp(-self.eps0)

    def blanket(self) -> Law:
        """The law for upper bounds: m is mu / Z, and e^eps0 mu / Z for the reports that name all inputs."""
        high, low = self.levels()
        both, neither = xp.arange(4) == 3, xp.arange(4) == 2
        mu = xp.where(both, xp.maximum(self.named - self.every, 0.0), self.named)
        # of the reports that name all inputs, x and x' are as likely as the blanket says, as of those that name neither
        certain = xp.where(neither, high * self.every, 0.0)
        first, second = (mu * xp.where(_NAMED[:4, i], high, low) + certain for i in (0, 1))
        rest = -xp.expm1(-self.eps0) * high * xp.maximum(self.share - self.every, 0.0)
        return Law(first, second, low * mu + certain, self._losses()[:4], rest)

    def homogeneous(self, third: bool) -> Law:
        """The exact law where all others hold the same input: x', or x0 (``third``) where there is such an input."""
        high, low = self.levels()
        mu = (self.named * self.third).ravel()
        first, second, held = (mu * xp.where(_NAMED[:, i], high, low) for i in range(3))
        held = xp.where(third & xp.any(self.third[1] > 0), held, second)
        return Law(first, second, held, self._losses(), xp.zeros_like(high))

    def _losses(self) -> Any:
        return self.eps0 * (_NAMED[:, 0].astype(float) - _NAMED[:, 1])


def _representable(eps0: Any) -> Any:
    """NaN, which makes every bound vacuous, where e^-eps0 underflows."""
    return xp.where(eps0 <= 700.0, eps0, xp.nan)


def laplace_blanket(eps0: Any, cells: int) -> Law:
    """A number in [0, 1] plus Laplace noise of scale 1/eps0, inputs 0 and 1: each cell's mass moved to its two ends.

    The blanket has the density of the farther input, and in a cell X is linear in e^L or e^-L, L the loss. A cell of
    width w (in L/2) sends the share 1/(1 + e^w) to its end of larger |L|: that keeps its mass and the mean of X, so the
    law is larger in convex order. Outcomes: L >= 0 from 0 up, then their mirror images.
    """
    half = cells // 2
    eps0 = _representable(eps0)
    width = eps0 / cells
    cell = 0.5 * xp.exp(-eps0 / 2 - width * xp.arange(half)) * -xp.expm1(-width)
    outward = cell / (1 + xp.exp(width))
    nothing = xp.zeros(1)
    base = xp.concatenate([cell - outward, nothing]) + xp.concatenate([nothing, outward])
    base = xp.set_at(base, -1, base[-1] + 0.5 * xp.exp(-eps0))  # what lies beyond the input
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
    """The same randomizer where all others hold 1.

    Only the cell of a report is told, which is smaller in convex order.
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
    """The law of a matrix of report probabilities (inputs, outputs) for the inputs person and other.

    held: None for the blanket, the least probability of each report over all inputs; else what all others hold.
    """
    table = _normalised(table)
    blanket = held is None
    first, second, base = table[person], table[other], xp.min(table, axis=0) if blanket else table[held]
    live = (first > 0) & (second > 0)
    logs = [xp.log(xp.where(live, side, 1.0)) for side in (first, second)]
    # the logarithms' rounding, outward for upper bounds: from the largest loss on delta is 0. Alike for both signs, so
    # that outcomes that mirror each other still do; the mean of X is then that of the outcomes (`sum_at`).
    blur = (4e-16 if blanket else -4e-16) * (1 + xp.abs(logs[0]) + xp.abs(logs[1]))
    loss = logs[0] - logs[1]
    loss = loss + xp.sign(loss) * blur
    loss = xp.where(live, loss, xp.where(first > 0, xp.inf, -xp.inf))
    # a difference: up by its rounding
    rest = xp.maximum(1 - xp.sum(base) + 4e-16 * base.size, 0.0) if blanket else xp.zeros(())
    return Law(first, second, base, loss, rest)


def _normalised(table: Any) -> Any:
    """The table, rows of the same entries alike to the last bit."""
    return table / xp.sum(xp.sort(table, axis=-1), axis=-1, keepdims=True)


def most_telling(table: Any, person: Any, other: Any) -> Any:
    """The input that tells these two apart the most where all others hold it."""
    apart = (table[person] - table[other]) ** 2 / xp.maximum(table, 1e-12)
    return xp.argmax(xp.sum(apart, axis=-1))


def distinct(laws: Law) -> Law:
    """The laws of a batch (rows, pairs of inputs, outcomes) without repetitions, NumPy in and out.

    Outcomes of equal probabilities are joined, those that mirror each other side by side, and of equal laws of a row
    one is left; a row with fewer laws than others repeats one.
    """
    order = np.lexsort((laws.base, laws.first, -laws.loss, -np.abs(laws.loss)), axis=-1)
    first, second, base, loss = (np.take_along_axis(side, order, axis=-1) for side in laws[:4])
    rows, pairs, size = first.shape
    other = np.ones(first.shape, bool)
    other[..., 1:] = (np.diff(first) != 0) | (np.diff(second) != 0) | (np.diff(base) != 0)
    place = np.arange(size)
    after = np.minimum.accumulate(np.where(other, place, size)[..., ::-1], axis=-1)[..., ::-1]  # the next one from here
    times = np.where(other, np.append(after[..., 1:], np.full_like(after[..., :1], size), axis=-1) - place, 0)
    joined = [side * times for side in (first, second, base)]
    key = np.concatenate([np.repeat(np.arange(rows), pairs)[:, None], *(x.reshape(-1, size) for x in joined)], axis=1)
    index = np.unique(key, axis=0, return_index=True)[1]
    many = np.bincount(index // pairs, minlength=rows)
    chosen = index[np.minimum(np.arange(many.max(initial=0)), many[:, None] - 1) + (np.cumsum(many) - many)[:, None]]
    first, second, base = joined
    return jax.tree_util.tree_map(
        lambda a: a.reshape(-1, *a.shape[2:])[chosen], Law(first, second, base, loss, laws.rest)
    )
