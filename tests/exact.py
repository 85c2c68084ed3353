"""Exact values that several test files compare with: golden files and closed forms."""

import json
import pathlib

import numpy as np
from scipy import stats


def stored(name):
    """The cases of a golden file in tests/data; its "about" says where the values come from."""
    return json.loads((pathlib.Path(__file__).parent / "data" / f"{name}.json").read_text())["cases"]


def column(cases, key):
    return np.array([float(case[key]) for case in cases])


def hockey_stick(p, q, eps):
    """Hockey-stick divergence of two vectors of masses at e^eps, for each eps."""
    return np.array([np.maximum(p - np.exp(e) * q, 0.0).sum() for e in np.ravel(eps)])


def gaussian_delta(eps, mu):
    return stats.norm.sf(eps / mu - mu / 2) - np.exp(eps) * stats.norm.sf(eps / mu + mu / 2)


def laplace_delta(eps, scale, shift=1.0):
    return np.where(eps < shift / scale, -np.expm1(np.minimum((eps - shift / scale) / 2, 0.0)), 0.0)
