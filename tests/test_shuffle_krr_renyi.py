"""k-ary randomized response and Renyi kernels of the shuffle model against golden values."""

import json
from pathlib import Path

import numpy as np

from jaxdp.hockey_stick.clones import clones_delta_bounds
from jaxdp.hockey_stick.krr import krr_epsilon_bounds
from jaxdp.renyi.shuffled import clones_atoms, clones_renyi_bounds
from jaxdp.shuffle import krr_epsilon_closed_form

GOLDEN = json.loads((Path(__file__).parent / "data" / "shuffle.json").read_text())["cases"]
KRR_GAP = 2e-5  # at 512 x 128 blocks; the worst golden case is 5.5e-6
RENYI_GAP = 5e-3  # at 512 x 512 blocks; order 256 at n = 10000 is 3.7e-3, windows of single counts 1e-9


def column(cases, key):
    return np.array([float(case[key]) for case in cases])


def test_golden_krr_epsilon_is_enclosed_and_below_the_closed_form():
    cases = [case for case in GOLDEN if case["family"] == "krr"]
    users, eps0, kinds, delta, exact = (column(cases, key) for key in ("n", "eps0", "k", "delta", "eps"))
    bounds = krr_epsilon_bounds(users, eps0, kinds, delta, size=512, inner_size=128)
    assert (bounds.lower <= exact).all() and (exact <= bounds.upper).all()
    assert (bounds.upper - exact <= KRR_GAP * exact).all()
    assert (exact <= krr_epsilon_closed_form(eps0, kinds, users, delta)).all()


def test_golden_renyi_divergence_is_enclosed():
    cases = [case for case in GOLDEN if case["family"] == "renyi_clones"]
    bounds = clones_renyi_bounds(column(cases, "n"), column(cases, "eps0"), column(cases, "alpha"))
    exact = column(cases, "value")
    assert (bounds.lower <= exact).all() and (exact <= bounds.upper).all()
    assert (bounds.upper - exact <= RENYI_GAP * exact).all()


def test_atoms_dominate_the_pair_in_one_round():
    users, eps0, epsilon = np.array([1e3, 1e5]), np.array([2.0, 4.0]), np.array([0.5, 0.15])
    atoms = clones_atoms(users, eps0, np.log([1e-8, 1e-8]))
    gap = np.maximum(-np.expm1(epsilon[:, None] - atoms.losses), 0.0)
    assert (np.sum(np.exp(atoms.log_weights) * gap, axis=1) >= clones_delta_bounds(users, eps0, epsilon).lower).all()
