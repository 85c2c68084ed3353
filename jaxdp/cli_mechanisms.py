"""The mechanisms of the command line: their options, and how options become records."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import jaxdp


@dataclasses.dataclass(frozen=True)
class Option:
    """One numeric parameter: ``--name``, whole or real, with a default or required; bounds: those that use it."""

    name: str
    help: str
    whole: bool = False
    default: str | None = None
    aliases: tuple[str, ...] = ()
    bounds: tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        """The option as typed."""
        return "--" + self.name.replace("_", "-")

    @property
    def names(self) -> tuple[str, ...]:
        """What ``--solve-for`` calls it: the name and every alias, in Python's spelling."""
        return (self.name, *(alias.lstrip("-").replace("-", "_") for alias in self.aliases))


@dataclasses.dataclass(frozen=True)
class Entry:
    """A mechanism of the command line."""

    help: str
    options: tuple[Option, ...]
    build: Callable[[Mapping[str, Any]], Any]
    bounds: tuple[str, ...] = ()


_EPS0 = Option("eps0", "local epsilon, nats, >= 0")
_DELTA0 = Option("delta0", "delta of the local guarantee, in [0, 1]", default="0")
_CATEGORIES = Option("num_categories", "number of categories k >= 2", whole=True, default="2", aliases=("--k",))
_NOISE = Option("noise_multiplier", "standard deviation over the L2 norm of one record, > 0", aliases=("--sigma",))
_USERS = Option("num_users", "number of users n >= 1", whole=True, aliases=("--n",))
_RATE = Option("sampling_probability", "Poisson sampling probability, in [0, 1]", aliases=("--q",))
_STEPS = Option("steps", "number of compositions, >= 0", whole=True, default="1", aliases=("--times",))


def _shuffle(v: Mapping[str, Any]) -> Any:
    randomizer: Any
    if v["bound"] == "blanket":
        if np.any(np.asarray(v["delta0"]) != 0):
            raise ValueError("delta0 must be 0 with bound 'blanket', which is exact for randomized response.")
        randomizer = jaxdp.RandomizedResponse(v["eps0"], v["num_categories"])
    else:
        randomizer = jaxdp.LocalRandomizer(v["eps0"], v["delta0"])
    return jaxdp.Shuffled(randomizer, v["num_users"], v["bound"])


def _dpsgd(v: Mapping[str, Any]) -> Any:
    return jaxdp.PoissonSampled(jaxdp.Gaussian(v["noise_multiplier"]), v["sampling_probability"])


MECHANISMS = {
    "gaussian": Entry("Gaussian noise", (_NOISE, _STEPS), lambda v: jaxdp.Gaussian(v["noise_multiplier"])),
    "laplace": Entry(
        "Laplace noise",
        (Option("noise_multiplier", "scale over the L1 norm of one record, > 0", aliases=("--b",)), _STEPS),
        lambda v: jaxdp.Laplace(v["noise_multiplier"]),
    ),
    "dpsgd": Entry("Poisson-sampled Gaussian noise, composed over steps", (_NOISE, _RATE, _STEPS), _dpsgd),
    "shuffle": Entry(
        "shuffled reports of num-users local randomizers",
        (
            _EPS0,
            _USERS,
            dataclasses.replace(_DELTA0, bounds=("clones", "stronger", "closed_form")),
            dataclasses.replace(_CATEGORIES, bounds=("blanket",)),
            _STEPS,
        ),
        _shuffle,
        ("clones", "stronger", "closed_form", "blanket"),
    ),
    "rr": Entry(
        "k-ary randomized response, not shuffled",
        (_EPS0, _CATEGORIES, _STEPS),
        lambda v: jaxdp.RandomizedResponse(v["eps0"], v["num_categories"]),
    ),
    "pure": Entry("any eps0-DP mechanism", (_EPS0, _STEPS), lambda v: jaxdp.PureDP(v["eps0"])),
    "approximate": Entry(
        "any (eps0, delta0)-DP mechanism",
        (_EPS0, dataclasses.replace(_DELTA0, default=None), _STEPS),
        lambda v: jaxdp.ApproximateDP(v["eps0"], v["delta0"]),
    ),
}


def build(name: str, values: Mapping[str, Any]) -> Any:
    """The record of a mechanism at the given parameter values, composed ``steps`` times; defaults fill the rest."""
    entry = MECHANISMS[name]
    values = {option.name: float(option.default) for option in entry.options if option.default} | dict(values)
    mechanism = entry.build(values)
    steps = values["steps"]
    return mechanism if np.all(np.asarray(steps) == 1) else jaxdp.repeat(mechanism, steps)


def add_options(parser: argparse.ArgumentParser, entry: Entry, solved_for: bool = False) -> None:
    """The options of a mechanism; none is required when one of them is solved for."""
    for option in entry.options:
        needed = option.default is None and not solved_for
        text = option.help + (f" (default {option.default})" if option.default else "")
        text += f" (bound {', '.join(option.bounds)})" if option.bounds else ""
        names = (option.flag, *option.aliases)
        parser.add_argument(*names, dest=option.name, required=needed, metavar="RANGE", help=text)
    if entry.bounds:
        parser.add_argument(
            "--bound",
            default=entry.bounds[0],
            help=f"theorems, comma separated: {', '.join(entry.bounds)} "
            f"(default {entry.bounds[0]}; blanket is exact for k-ary randomized response)",
        )


def parse_range(name: str, text: str, whole: bool = False) -> np.ndarray:
    """``a:b:count`` (linear), ``a:b:count:log``, or a comma list; whole values are rounded and made distinct."""
    try:
        values = np.concatenate([_piece(piece) for piece in text.split(",")])
    except ValueError:
        raise ValueError(f"{name} must be a number, a comma list or START:STOP:COUNT[:log], got {text!r}.") from None
    if whole and ":" in text:
        values = np.unique(np.rint(values))
    return values


def _piece(text: str) -> np.ndarray:
    parts = text.split(":")
    if len(parts) == 1:
        return np.array([float(text)])
    if len(parts) not in (3, 4):
        raise ValueError(text)
    start, stop, count = float(parts[0]), float(parts[1]), int(parts[2])
    if len(parts) == 3 and count >= 1:
        return np.linspace(start, stop, count)
    if parts[-1] == "log" and count >= 1 and start > 0 and stop > 0:
        values = np.geomspace(start, stop, count)
        values[0], values[-1] = start, stop if count > 1 else start
        return values
    raise ValueError(text)
