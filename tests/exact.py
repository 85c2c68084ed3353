"""Exact values that several test files compare with: golden files and closed forms."""

import json
import pathlib

import mpmath
import numpy as np
from scipy import stats


def stored(name):
    """The cases of a golden file in tests/data; its "about" says where the values come from."""
    return json.loads((pathlib.Path(__file__).parent / "data" / f"{name}.json").read_text())["cases"]


def column(cases, key):
    return np.array([float(case[key]) for case in cases])


def hockey_stick(p, q, eps):
    """Hockey-stick divergence of two vectors of masses at e^eps, for each eps."""
    return np.array([np.maximum(p - np.exp(e) * q, 0.0).sum() for e in np.ravel(eps)]).reshape(np.shape(eps))[()]


def gaussian_delta(eps, mu):
    """Delta of N(mu, 1) against N(0, 1) in float64 (Balle and Wang 2018, Theorem 8)."""
    eps = np.asarray(eps, float)
    return np.maximum(stats.norm.sf(eps / mu - mu / 2) - np.exp(eps) * stats.norm.sf(eps / mu + mu / 2), 0.0)


def gaussian_delta_in_digits(eps, mu):
    """`gaussian_delta` at mpmath's precision where it is called."""
    eps, mu = mpmath.mpf(eps), mpmath.mpf(mu)
    return mpmath.ncdf(mu / 2 - eps / mu) - mpmath.exp(eps) * mpmath.ncdf(-mu / 2 - eps / mu)


def encloses(bounds, exact):
    """Whether the exact value, a number of mpmath, lies between the two float64 bounds."""
    return mpmath.mpf(float(bounds[0])) <= exact <= mpmath.mpf(float(bounds[1]))


def laplace_delta(eps, scale, shift=1.0):
    return np.where(eps < shift / scale, -np.expm1(np.minimum((eps - shift / scale) / 2, 0.0)), 0.0)
