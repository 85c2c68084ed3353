"""A page for a privacy review board: the guarantee, its assumptions, its curves, and how to compute it again."""

from __future__ import annotations

from jaxdp import validate
from jaxdp.accounting import check_mechanism
from jaxdp.mechanisms.base import Mechanism
from jaxdp.mechanisms.composition import batch_shape, natural_relation
from jaxdp.report.facts import Facts
from jaxdp.report.page import page_of
from jaxdp.typing import Real, Relation


def report(
    mechanism: Mechanism,
    *,
    epsilon: Real | None = None,
    delta: Real | None = None,
    relation: Relation | None = None,
    progress: bool = False,
) -> str:
    """One self-contained HTML page on the privacy of a mechanism, for readers who do not run jaxdp.

    The page holds the guarantee in words, certified bounds, what the best attack achieves (beside randomized response
    with the same epsilon, and perfect privacy), the privacy profile, the trade-off curve, the mechanism and the
    "Assumes" sections of its records, the Python call and the versions. It loads nothing from elsewhere and runs no
    script.

    mechanism: one setting: its fields are numbers, not arrays of settings. Give either delta, in [0, 1], at which
    epsilon is certified, or epsilon, finite, >= 0, nats, at which delta is certified: one number or a list, whose first
    one is the headline. relation: as for `jaxdp.epsilon`. progress: show a tqdm bar that counts points of the profile;
    these are then computed one by one, so their last digits may differ.

    Accuracy: bounds are those of `jaxdp.epsilon_bounds` and `jaxdp.delta_bounds`, printed rounded outward. The attack's
    accuracy is (1 + delta(0)) / 2, where delta(0) is the total variation distance. The trade-off curve is that of
    `conversions.tradeoff_from_delta` on 33 certified points of the profile (65 for "add" and "remove"). Computing these
    points takes most of the time of a page.
    Returns the HTML text. Raises ValueError, TypeError, UnsupportedMechanismError; ImportError where tqdm is missing.

    >>> page = jaxdp.report(jaxdp.Gaussian(2.0), delta=1e-6)
    >>> page.startswith("<!DOCTYPE html>")
    True
    """
    check_mechanism(mechanism)
    if validate.is_traced(mechanism, epsilon, delta):
        raise TypeError("report takes concrete numbers: call it outside jit, vmap and grad.")
    if batch_shape(mechanism):
        raise ValueError(
            f"mechanism must be one setting, got arrays of settings of shape {batch_shape(mechanism)}: write one "
            "report for each of them."
        )
    if (epsilon is None) == (delta is None):
        raise ValueError(f"give either epsilon or delta, got epsilon={epsilon!r} and delta={delta!r}.")
    return page_of(Facts.of(mechanism, relation or natural_relation(mechanism), epsilon, delta, progress))
