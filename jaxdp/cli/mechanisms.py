"""The mechanisms of the command line: their options, the parsers, and the records made of parsed options."""

import argparse
import dataclasses
import functools
import itertools
import pathlib
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

import jaxdp
from jaxdp import validate
from jaxdp.cli.text import RANGE_HELP, parse_range
from jaxdp.mechanisms.shuffled import BOUNDS
from jaxdp.runtime.extras import pieces
from jaxdp.typing import Relation


@dataclasses.dataclass(frozen=True)
class Option:
    """One numeric parameter of the command line, ``--name``.

    whole: whether its values are whole numbers. default: None makes it required; "" leaves the value to the record.
    """

    name: str
    help: str
    whole: bool = False
    default: str | None = None
    aliases: tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        """The name of the option as typed: ``--num-users``."""
        return "--" + self.name.replace("_", "-")


_STEPS = Option("steps", "number of compositions, >= 0", whole=True, default="1", aliases=("--times", "--rounds"))


class Maker(NamedTuple):
    """How to make a record: ``record`` takes the values of ``parameters`` in this order."""

    help: str
    record: Callable[..., Any]
    parameters: tuple[Option, ...]
    compositions: Option = _STEPS

    @property
    def options(self) -> tuple[Option, ...]:
        """The parameters and the number of compositions."""
        return (*self.parameters, self.compositions)

    def build(self, values: Mapping[str, Any]) -> Any:
        """The record at values by name of option; None stands for an option that was not given."""
        return self.record(*(values.get(option.name) for option in self.parameters))


_EPS0 = Option("eps0", "local epsilon, nats, >= 0")
_DELTA0 = Option("delta0", "delta of the local guarantee, in [0, 1]", default="0")
_CATEGORIES = Option("num_categories", "number of categories k >= 2", whole=True, default="2", aliases=("--k",))
_NOISE = Option("noise_multiplier", "standard deviation over the L2 norm of one record, > 0", aliases=("--sigma",))
_SCALE = Option("noise_multiplier", "scale over the L1 norm of one record, > 0", aliases=("--b",))
_USERS = Option("num_users", "number of users n >= 1", whole=True, aliases=("--n",))
_RATE = Option("sampling_probability", "Poisson sampling probability, in [0, 1]", aliases=("--q",))
_BATCH = dataclasses.replace(_RATE, help="batch size over the size of the larger data set, in [0, 1]")
_SENSITIVITY = Option("sensitivity", "bound of one record's contribution, whole, >= 1", whole=True, default="1")
_SIGMA = Option("sigma", "sigma of the noise, > 0", aliases=("--scale",))
_DECAY = Option("scale", "scale of the noise, > 0", aliases=("--b",))
_PARTS = Option("participations", "steps of an epoch in which a person takes part, 1..T", True, "1", ("--times",))
_SUBSET = Option("subset_size", "subset size w, 1 <= w <= k - 1 (default: that of least variance)", True, "", ("--w",))
_BUCKETS = Option("num_buckets", "number of buckets g >= 2 (default: round(e^eps0) + 1)", True, "", ("--g",))
_COLLISION = Option(
    "collision_probability",
    "least collision probability of two values under the hash family, in [0, 1]; 0 is safe for all",
    default="0",
)
_SYMMETRIC = functools.partial(jaxdp.UnaryEncoding, optimized=False)
RANDOMIZERS = {
    "local": Maker("any (eps0, delta0)-DP randomizer", jaxdp.LocalRandomizer, (_EPS0, _DELTA0)),
    "krr": Maker("k-ary randomized response", jaxdp.RandomizedResponse, (_EPS0, _CATEGORIES)),
    "unary": Maker("optimized unary encoding, OUE", jaxdp.UnaryEncoding, (_EPS0, _CATEGORIES)),
    "symmetric-unary": Maker("symmetric unary encoding, one-time basic RAPPOR", _SYMMETRIC, (_EPS0, _CATEGORIES)),
    "subset": Maker("subset selection", jaxdp.SubsetSelection, (_EPS0, _CATEGORIES, _SUBSET)),
    "hashing": Maker("optimal local hashing, OLH", jaxdp.LocalHashing, (_EPS0, _BUCKETS, _COLLISION)),
    "binary-hashing": Maker(
        "binary local hashing, BLH", lambda eps0, least: jaxdp.LocalHashing(eps0, 2.0, least), (_EPS0, _COLLISION)
    ),
    "hadamard": Maker("Hadamard response", jaxdp.HadamardResponse, (_EPS0,)),
    "laplace": Maker("Laplace noise on a number in [0, 1]", jaxdp.LocalLaplace, (_EPS0,)),
}
_ALSO_CALLED = {"oue": "unary", "rappor": "symmetric-unary", "olh": "hashing", "blh": "binary-hashing"}
MECHANISMS = {
    "gaussian": Maker("Gaussian noise", jaxdp.Gaussian, (_NOISE,)),
    "laplace": Maker("Laplace noise", jaxdp.Laplace, (_SCALE,)),
    "dpsgd": Maker(
        "Poisson-sampled Gaussian noise, composed over steps",
        lambda noise, rate: jaxdp.PoissonSampled(jaxdp.Gaussian(noise), rate),
        (_NOISE, _RATE),
    ),
    "shuffle": Maker(
        "shuffled reports of num-users local randomizers",
        jaxdp.Shuffled,
        (_EPS0, _USERS, _DELTA0, _CATEGORIES, _SUBSET, _BUCKETS, _COLLISION),
    ),
    "fixed-size": Maker(
        "Gaussian noise on batches of fixed size, composed over steps",
        lambda noise, rate: jaxdp.FixedSizeSampled(jaxdp.Gaussian(noise), rate),
        (_NOISE, _BATCH),
    ),
    "allocation": Maker(
        "random allocation (balls and bins): Gaussian noise, everyone in some of num-steps steps, composed over epochs",
        lambda noise, steps, parts: jaxdp.RandomAllocation(jaxdp.Gaussian(noise), steps, parts),
        (_NOISE, Option("num_steps", "steps T >= 1 of an epoch", whole=True), _PARTS),
        dataclasses.replace(_STEPS, name="epochs", help="number of epochs, >= 0", aliases=()),
    ),
    "discrete-gaussian": Maker(
        "discrete Gaussian noise on a whole number", jaxdp.DiscreteGaussian, (_SIGMA, _SENSITIVITY)
    ),
    "discrete-laplace": Maker(
        "discrete Laplace (geometric) noise on a whole number", jaxdp.DiscreteLaplace, (_DECAY, _SENSITIVITY)
    ),
    "rr": Maker("k-ary randomized response, not shuffled", jaxdp.RandomizedResponse, (_EPS0, _CATEGORIES)),
    "pure": Maker("any eps0-DP mechanism", jaxdp.PureDP, (_EPS0,)),
    "approximate": Maker(
        "any (eps0, delta0)-DP mechanism", jaxdp.ApproximateDP, (_EPS0, dataclasses.replace(_DELTA0, default=None))
    ),
}


def _users(option: Option) -> list[str]:
    """Names of the randomizers that use the option; [] for an option that is the same for all of them."""
    users = [name for name, each in RANDOMIZERS.items() if option in each.parameters]
    return users if len(users) < len(RANDOMIZERS) else []


def build(name: str, values: Mapping[str, Any]) -> Any:
    """The record of a mechanism at the given values, composed ``steps`` times; other options have their defaults."""
    entry = MECHANISMS[name]
    values = {option.name: float(option.default) for option in entry.options if option.default} | dict(values)
    if name == "shuffle":
        randomizer = RANDOMIZERS[values["randomizer"]].build(values)
        mechanism = jaxdp.Shuffled(randomizer, values["num_users"], values["bound"])
    else:
        mechanism = entry.build(values)
    steps = values[entry.compositions.name]
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
    """The record in a file that `jaxdp.to_json` wrote. Raises ValueError, naming the file."""
    wrong = f"--from must be a file that jaxdp.to_json wrote, got {path!r}"
    try:
        return jaxdp.from_json(pathlib.Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{wrong} ({(error.strerror or '').lower()}).") from None
    except UnicodeDecodeError:
        raise ValueError(f"{wrong}, which is not a text file.") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


class _Once(argparse.Action):
    """Stores the value of an option; an error where the option is given twice, also under different names."""

    def __call__(self, parser: object, namespace: argparse.Namespace, values: object, _: object = None) -> None:
        """Store the value; argparse calls this for each option that was typed."""
        first = getattr(namespace, self.dest)
        if first is not None:
            raise argparse.ArgumentError(self, f"must be given once, got {first!r} and {values!r}.")
        setattr(namespace, self.dest, values)


def chosen(arguments: argparse.Namespace) -> dict[str, list[str]]:
    """{"randomizer": [...], "bound": [...]} of a shuffled mechanism, with defaults filled in; {} for any other."""
    if arguments.mechanism != "shuffle":
        return {}
    bounds = _listed("--bound", arguments.bound, BOUNDS)
    randomizers = _listed("--randomizer", arguments.randomizer, tuple(RANDOMIZERS))
    randomizers = randomizers or ["krr" if "blanket" in bounds else "local"]
    if not bounds and "local" in randomizers and len(randomizers) > 1:
        raise ValueError(
            "--bound must be given if --randomizer names local and others, whose default bounds differ, got none."
        )
    return {"randomizer": randomizers, "bound": bounds or ["clones" if "local" in randomizers else "blanket"]}


def _listed(name: str, text: str | None, allowed: tuple[str, ...]) -> list[str]:
    names = [] if text is None else [_ALSO_CALLED.get(each.lower(), each) for each in text.split(",")]
    return [validate.choice(name, each, allowed) for each in names]


def axes_of(arguments: argparse.Namespace, solved_for: str = "") -> dict[str, np.ndarray]:
    """The values of the given options, by name, as arrays. ``solved_for`` is left out.

    Raises ValueError for an option that is not used, and for a missing one.
    """
    axes, given = {}, chosen(arguments).get("randomizer", [])
    for option in MECHANISMS[arguments.mechanism].options:
        text = getattr(arguments, option.name)
        solved = option.name == solved_for
        if solved and text is not None:
            raise ValueError(f"{option.flag} must be left out, because --solve-for names it, got {text!r}.")
        users = _users(option)
        used = not (users and given) or bool(set(users) & set(given))
        if (solved or text is not None) and not used:
            raise ValueError(
                f"{option.flag} is not used with --randomizer {','.join(given)}: leave it out, or ask for --randomizer "
                f"{' or '.join(users)}."
            )
        if text is None and option is _CATEGORIES and used:
            text = option.default  # the answer depends on it, so the table shows it
        if solved or (text is None and option.default is not None):
            continue
        if text is None:
            raise ValueError(f"{option.flag} must be given unless --solve-for names it.")
        axes[option.name] = parse_range(option.name, text, option.whole)
    return axes


def points_of(
    arguments: argparse.Namespace, axes: dict[str, np.ndarray]
) -> Iterator[tuple[dict[str, np.ndarray], dict[str, str]]]:
    """(columns of the product of the axes, randomizer and bound), for every randomizer and bound.

    The product comes in pieces where a progress bar is shown, else in one.
    """
    columns = [a.ravel() for a in np.meshgrid(*axes.values(), indexing="ij")]
    static = chosen(arguments)
    for values in itertools.product(*static.values()):
        for piece in pieces(columns[0].size, arguments.progress):
            rows = {name: column[piece] for name, column in zip(axes, columns, strict=True)}
            yield rows, dict(zip(static, values, strict=True))


def add_command(commands: Any, name: str, text: str) -> argparse.ArgumentParser:
    """Adds a command with the description ``text``. Returns its parser."""
    return commands.add_parser(name, help=text, description=text.capitalize() + ".", epilog=RANGE_HELP)


def progress_option(parser: argparse.ArgumentParser) -> None:
    """Adds --progress, for commands that may take minutes."""
    what = "show a bar of finished rows (needs the sweep extra); last digits may differ, as rows are computed apart"
    parser.add_argument("--progress", action="store_true", help=what)


def add_mechanism_command(
    commands: Any,
    verb: str,
    text: str,
    options: Callable[[argparse.ArgumentParser, bool], None],
    run: Callable[[argparse.Namespace], None],
    *,
    table: bool = True,
    solved_for: bool = False,
    from_file: bool = False,
) -> None:
    """Adds a command with one parser per mechanism, which has the mechanism's options.

    options: called with a parser and whether its options are required; adds the options of the command. run: called
    with the parsed arguments. table: the command prints a table. solved_for: calibrate solves for one of the
    mechanism's options, so none is required. from_file: the mechanism may also be given by ``--from FILE.json``
    instead of its name (then ``source`` is the file, else None), which makes the command's options optional.
    """
    command = add_command(commands, verb, text)
    command.set_defaults(run=run, verb=verb)
    choices = command.add_subparsers(required=not from_file, metavar="MECHANISM")
    added = [command] if from_file else []
    for name, entry in MECHANISMS.items():
        parser = choices.add_parser(name, help=entry.help, description=entry.help + ".", epilog=RANGE_HELP)
        parser.set_defaults(mechanism=name)
        added.append(parser)
        for option in entry.options:
            text = option.help + (f" (default {option.default})" if option.default else "")
            if name == "shuffle" and (users := _users(option)):
                text += f" (randomizer {', '.join(users)})"
            needed = option.default is None and not solved_for
            names = (option.flag, *option.aliases)
            parser.add_argument(*names, dest=option.name, action=_Once, required=needed, metavar="RANGE", help=text)
        if name == "shuffle":
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
    for parser in added:
        options(parser, parser is not command)
        text = "how neighbouring data sets differ (default: the mechanism's natural relation)"
        parser.add_argument("--relation", choices=typing.get_args(Relation), help=text)
        if table:
            text = (
                'print JSON instead of a table, with all digits; infinity and NaN are the strings "inf", "-inf", "nan"'
            )
            parser.add_argument("--json", action="store_true", help=text)
    if from_file:
        command.add_argument("--from", dest="source", metavar="FILE.json", help="a mechanism that jaxdp.to_json wrote")


def require_full(arguments: argparse.Namespace, complete: bool, needed: str) -> None:
    """ValueError unless the mechanism is given, by name or file, and all other needed options are (``complete``)."""
    if arguments.source is None and "mechanism" not in arguments:
        raise ValueError(f"give a MECHANISM (see --help), or --from FILE.json {needed}; got neither.")
    if not complete:
        raise ValueError(f"give --from FILE.json {needed}; got only some of them.")
