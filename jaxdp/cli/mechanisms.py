"""The mechanisms of the command line: their options, and how options become records."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

import jaxdp
from jaxdp import validate
from jaxdp.cli.ranges import parse_range
from jaxdp.mechanisms.shuffled import BOUNDS
from jaxdp.runtime.progress import pieces


@dataclasses.dataclass(frozen=True)
class Option:
    """One numeric parameter: ``--name``, whole or real, with a default or required.

    default: None makes the option required; "" leaves the value to the record.
    """

    name: str
    help: str
    whole: bool = False
    default: str | None = None
    aliases: tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        """The option as typed."""
        return "--" + self.name.replace("_", "-")

    @property
    def names(self) -> tuple[str, ...]:
        """What ``--solve-for`` calls it: the name and every alias, in Python's spelling."""
        return (self.name, *(alias.lstrip("-").replace("-", "_") for alias in self.aliases))


class Maker(NamedTuple):
    """A record, made of the values of the named options in the order of its fields."""

    help: str
    record: Callable[..., Any]
    names: tuple[str, ...]

    def build(self, values: Mapping[str, Any]) -> Any:
        """The record from values by option; None for those that were not given."""
        return self.record(*(values.get(name) for name in self.names))


_SYMMETRIC = functools.partial(jaxdp.UnaryEncoding, optimized=False)
RANDOMIZERS = {
    "local": Maker("any (eps0, delta0)-DP randomizer", jaxdp.LocalRandomizer, ("eps0", "delta0")),
    "krr": Maker("k-ary randomized response", jaxdp.RandomizedResponse, ("eps0", "num_categories")),
    "unary": Maker("optimized unary encoding, OUE", jaxdp.UnaryEncoding, ("eps0", "num_categories")),
    "symmetric-unary": Maker("symmetric unary encoding, one-time basic RAPPOR", _SYMMETRIC, ("eps0", "num_categories")),
    "subset": Maker("subset selection", jaxdp.SubsetSelection, ("eps0", "num_categories", "subset_size")),
    "hashing": Maker(
        "optimal local hashing, OLH", jaxdp.LocalHashing, ("eps0", "num_buckets", "collision_probability")
    ),
    "binary-hashing": Maker(
        "binary local hashing, BLH",
        lambda eps0, collision: jaxdp.LocalHashing(eps0, 2.0, collision),
        ("eps0", "collision_probability"),
    ),
    "hadamard": Maker("Hadamard response", jaxdp.HadamardResponse, ("eps0",)),
    "laplace": Maker("Laplace noise on a number in [0, 1]", jaxdp.LocalLaplace, ("eps0",)),
}


@dataclasses.dataclass(frozen=True)
class Entry:
    """A mechanism of the command line: the record of its parameters, composed over steps.

    record: takes the parameters in order, None where the record holds shuffled reports of a randomizer.
    """

    help: str
    parameters: tuple[Option, ...]
    record: Callable[..., Any] | None

    @property
    def options(self) -> tuple[Option, ...]:
        """The parameters and the number of compositions."""
        return (*self.parameters, _STEPS)

    @property
    def shuffles(self) -> bool:
        """Whether the mechanism has a randomizer and a bound."""
        return self.record is None

    def randomizers(self, option: Option) -> list[str]:
        """The randomizers that use an option; empty where all do, or where it is no option of theirs."""
        users = [name for name, each in RANDOMIZERS.items() if option.name in each.names] if self.shuffles else []
        return users if len(users) < len(RANDOMIZERS) else []

    def build(self, values: Mapping[str, Any]) -> Any:
        """One run of the mechanism."""
        if self.record is None:
            return jaxdp.Shuffled(RANDOMIZERS[values["randomizer"]].build(values), values["num_users"], values["bound"])
        return self.record(*(values[option.name] for option in self.parameters))


def _dpsgd(noise_multiplier: Any, sampling_probability: Any) -> Any:
    return jaxdp.PoissonSampled(jaxdp.Gaussian(noise_multiplier), sampling_probability)


_EPS0 = Option("eps0", "local epsilon, nats, >= 0")
_DELTA0 = Option("delta0", "delta of the local guarantee, in [0, 1]", default="0")
_CATEGORIES = Option("num_categories", "number of categories k >= 2", whole=True, default="2", aliases=("--k",))
_NOISE = Option("noise_multiplier", "standard deviation over the L2 norm of one record, > 0", aliases=("--sigma",))
_SCALE = Option("noise_multiplier", "scale over the L1 norm of one record, > 0", aliases=("--b",))
_USERS = Option("num_users", "number of users n >= 1", whole=True, aliases=("--n",))
_RATE = Option("sampling_probability", "Poisson sampling probability, in [0, 1]", aliases=("--q",))
_STEPS = Option("steps", "number of compositions, >= 0", whole=True, default="1", aliases=("--times",))
_SUBSET = Option("subset_size", "subset size w, 1 <= w <= k - 1 (default: that of least variance)", True, "", ("--w",))
_BUCKETS = Option("num_buckets", "number of buckets g >= 2 (default: round(e^eps0) + 1)", True, "", ("--g",))
_COLLISION = Option(
    "collision_probability",
    "least collision probability of two values under the hash family, in [0, 1]; 0 is safe for all",
    default="0",
)
MECHANISMS = {
    "gaussian": Entry("Gaussian noise", (_NOISE,), jaxdp.Gaussian),
    "laplace": Entry("Laplace noise", (_SCALE,), jaxdp.Laplace),
    "dpsgd": Entry("Poisson-sampled Gaussian noise, composed over steps", (_NOISE, _RATE), _dpsgd),
    "shuffle": Entry(
        "shuffled reports of num-users local randomizers",
        (_EPS0, _USERS, _DELTA0, _CATEGORIES, _SUBSET, _BUCKETS, _COLLISION),
        None,
    ),
    "rr": Entry("k-ary randomized response, not shuffled", (_EPS0, _CATEGORIES), jaxdp.RandomizedResponse),
    "pure": Entry("any eps0-DP mechanism", (_EPS0,), jaxdp.PureDP),
    "approximate": Entry(
        "any (eps0, delta0)-DP mechanism", (_EPS0, dataclasses.replace(_DELTA0, default=None)), jaxdp.ApproximateDP
    ),
}


def build(name: str, values: Mapping[str, Any]) -> Any:
    """The record of a mechanism at the given parameter values, composed ``steps`` times; defaults fill the rest."""
    entry = MECHANISMS[name]
    values = {option.name: float(option.default) for option in entry.options if option.default} | dict(values)
    mechanism, steps = entry.build(values), values["steps"]
    return mechanism if np.all(np.asarray(steps) == 1) else jaxdp.repeat(mechanism, steps)


def single(arguments: argparse.Namespace) -> Any:
    """The one record that the options describe; ValueError where they describe several."""
    values: dict[str, Any] = {}
    for name, each in (axes_of(arguments) | chosen(arguments)).items():
        if len(each) != 1:
            raise ValueError(f"--{name.replace('_', '-')} must be one value here, got {getattr(arguments, name)!r}.")
        values[name] = each[0]
    whole = [option.name for option in MECHANISMS[arguments.mechanism].options if option.whole]
    return build(arguments.mechanism, values | {n: int(v) for n, v in values.items() if n in whole and v % 1 == 0})


def read(path: str) -> Any:
    """The record in a file that `jaxdp.to_json` wrote."""
    try:
        return jaxdp.from_json(pathlib.Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        reason = (error.strerror or "").lower()
        raise ValueError(f"from must be a file that jaxdp.to_json wrote, got {path!r} ({reason}).") from None
    except UnicodeDecodeError:
        raise ValueError(f"from must be a file that jaxdp.to_json wrote, got {path!r}, which is no text.") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def add_options(parser: argparse.ArgumentParser, entry: Entry, solved_for: bool = False) -> None:
    """The options of a mechanism; none is required when one of them is solved for."""
    for option in entry.options:
        needed = option.default is None and not solved_for
        text = option.help + (f" (default {option.default})" if option.default else "")
        if users := entry.randomizers(option):
            text += f" (randomizer {', '.join(users)})"
        names = (option.flag, *option.aliases)
        parser.add_argument(*names, dest=option.name, required=needed, metavar="RANGE", help=text)
    if entry.shuffles:
        known = "; ".join(f"{name}: {each.help}" for name, each in RANDOMIZERS.items())
        parser.add_argument(
            "--randomizer",
            help=f"what each person runs, comma separated (default local; krr with --bound blanket). {known}",
        )
        parser.add_argument(
            "--bound",
            help=f"theorems of the upper bound, comma separated: {', '.join(BOUNDS)} (default clones for local, "
            "blanket, the privacy blanket, for the other randomizers)",
        )


def chosen(arguments: argparse.Namespace) -> dict[str, list[str]]:
    """Randomizers and bounds in use, by option name; empty for mechanisms that have neither."""
    if not MECHANISMS[arguments.mechanism].shuffles:
        return {}
    bounds = _listed("bound", arguments.bound, BOUNDS)
    randomizers = _listed("randomizer", arguments.randomizer, tuple(RANDOMIZERS))
    randomizers = randomizers or ["krr" if "blanket" in bounds else "local"]
    if not bounds and "local" in randomizers and len(randomizers) > 1:
        raise ValueError("bound must be given with --randomizer local and others: its default is not theirs, got none.")
    return {"randomizer": randomizers, "bound": bounds or ["clones" if "local" in randomizers else "blanket"]}


def _listed(name: str, text: str | None, allowed: tuple[str, ...]) -> list[str]:
    return [] if text is None else [validate.choice(name, each, allowed) for each in text.split(",")]


def axes_of(arguments: argparse.Namespace, solved_for: str = "") -> dict[str, np.ndarray]:
    """The options that were given, as arrays; ValueError for one that is not used."""
    entry = MECHANISMS[arguments.mechanism]
    axes = {}
    for option in entry.options:
        text = getattr(arguments, option.name)
        solved = option.name == solved_for
        if solved and text is not None:
            raise ValueError(f"{option.flag} must be left out: it is what is solved for, got {text!r}.")
        given, users = chosen(arguments).get("randomizer", []), entry.randomizers(option)
        if (solved or text is not None) and users and not set(users) & set(given):
            raise ValueError(
                f"{option.flag} is not used with --randomizer {','.join(given)}: leave it out, or ask for --randomizer "
                f"{' or '.join(users)}."
            )
        if solved or (text is None and option.default is not None):
            continue
        if text is None:
            raise ValueError(f"{option.flag} is needed unless it is solved for.")
        axes[option.name] = parse_range(option.name, text, option.whole)
    return axes


def points_of(
    arguments: argparse.Namespace, axes: dict[str, np.ndarray]
) -> Iterator[tuple[dict[str, np.ndarray], dict[str, str]]]:
    """The product of the axes, in pieces where a bar is shown, for every combination of randomizer and bound."""
    columns = [a.ravel() for a in np.meshgrid(*axes.values(), indexing="ij")]
    static = chosen(arguments)
    for values in itertools.product(*static.values()):
        for piece in pieces(columns[0].size, arguments.progress):
            yield (
                {name: column[piece] for name, column in zip(axes, columns, strict=True)},
                dict(zip(static, values, strict=True)),
            )
