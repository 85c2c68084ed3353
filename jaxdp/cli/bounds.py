"""``jaxdp epsilon | delta``: certified bounds at given points."""

from __future__ import annotations

import argparse
import pathlib
from typing import Any

import numpy as np

import jaxdp
from jaxdp.cli.mechanisms import axes_of, build, cases, chosen
from jaxdp.cli.parser import add_command, common_options, mechanism_parsers
from jaxdp.cli.ranges import parse_range
from jaxdp.cli.table import check_table, print_table
from jaxdp.mechanisms.composition import batch_shape

_TARGETS = {"epsilon": "delta", "delta": "epsilon"}


def add_parsers(commands: Any) -> None:
    """The two commands."""
    for name, target in _TARGETS.items():
        command = add_command(commands, name, f"certified {name} at a {target}")
        for mechanism in mechanism_parsers(command, required=False):
            _target_options(mechanism, target)
            mechanism.set_defaults(run=_verb)
        # destinations of their own: those of a mechanism would overwrite what was given before its name
        _target_options(command, target, before=True)
        common_options(command, before=True)
        command.add_argument("--from", dest="before_from", metavar="FILE.json", help="what jaxdp.to_json wrote")
        command.set_defaults(run=_from_file, verb=name)


def _target_options(parser: argparse.ArgumentParser, target: str, before: bool = False) -> None:
    prefix = "before_" if before else ""
    parser.add_argument(f"--{target}", dest=prefix + "target", required=not before, metavar="RANGE")
    parser.add_argument("--out", dest=prefix + "out", metavar="FILE.csv", help="write all rows with all their digits")


def _verb(arguments: argparse.Namespace) -> None:
    for name, value in vars(arguments).items():
        if name.startswith("before_") and value:
            option = "--" + name.removeprefix("before_").replace("target", _TARGETS[arguments.verb])
            raise ValueError(f"{option} must come after {arguments.mechanism}, the name of the mechanism.")
    check_table(arguments.out)
    target_name = _TARGETS[arguments.verb]
    axes = axes_of(arguments) | {target_name: parse_range(target_name, arguments.target)}
    bounds_of = jaxdp.epsilon_bounds if arguments.verb == "epsilon" else jaxdp.delta_bounds
    columns: dict[str, list[Any]] = {name: [] for name in (*axes, *chosen(arguments), "lower", arguments.verb)}
    for case in cases(arguments):
        points = dict(zip(axes, (a.ravel() for a in np.meshgrid(*axes.values(), indexing="ij")), strict=True))
        mechanism = build(arguments.mechanism, points | case)
        lower, upper = bounds_of(mechanism, points[target_name], relation=arguments.relation)
        rows = points | {name: [value] * upper.size for name, value in case.items()}
        rows |= {"lower": lower, arguments.verb: upper}
        for name, column in columns.items():
            column.extend(np.asarray(rows[name]).tolist())
    print_table(columns, arguments.verb, arguments.json, arguments.out)


def _from_file(arguments: argparse.Namespace) -> None:
    target = _TARGETS[arguments.verb]
    if arguments.before_from is None or arguments.before_target is None:
        raise ValueError(f"give a MECHANISM (see --help), or --from FILE.json and --{target}; got neither in full.")
    check_table(arguments.before_out)
    mechanism = jaxdp.from_json(pathlib.Path(arguments.before_from).read_text())
    bounds_of = jaxdp.epsilon_bounds if arguments.verb == "epsilon" else jaxdp.delta_bounds
    points = parse_range(target, arguments.before_target).reshape(-1, *[1] * len(batch_shape(mechanism)))
    lower, upper = bounds_of(mechanism, points, relation=arguments.before_relation)
    rows = {target: points, "lower": lower, arguments.verb: upper}
    columns = {name: np.broadcast_to(values, upper.shape).ravel().tolist() for name, values in rows.items()}
    print_table(columns, arguments.verb, arguments.before_json, arguments.before_out)
