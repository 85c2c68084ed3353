"""``jaxdp epsilon | delta``: certified bounds at given points."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

import jaxdp
from jaxdp.cli.mechanisms import axes_of, build, cases, chosen, read
from jaxdp.cli.parser import (
    add_command,
    common_options,
    destination,
    from_option,
    mechanism_parsers,
    refuse_misplaced,
)
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
        _target_options(command, target, before=True)
        common_options(command, before=True)
        from_option(command)
        command.set_defaults(run=_from_file, verb=name)


def _target_options(parser: argparse.ArgumentParser, target: str, before: bool = False) -> None:
    parser.add_argument(f"--{target}", dest=destination(target, before), required=not before, metavar="RANGE")
    text = "write all rows with all their digits"
    parser.add_argument("--out", dest=destination("out", before), metavar="FILE.csv", help=text)


def _verb(arguments: argparse.Namespace) -> None:
    refuse_misplaced(arguments)
    check_table(arguments.out)
    target_name = _TARGETS[arguments.verb]
    axes = axes_of(arguments) | {target_name: parse_range(target_name, getattr(arguments, target_name))}
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
    points_text = getattr(arguments, destination(target, True))
    if arguments.before_from is None or points_text is None:
        raise ValueError(f"give a MECHANISM (see --help), or --from FILE.json and --{target}; got neither in full.")
    check_table(arguments.before_out)
    mechanism = read(arguments.before_from)
    bounds_of = jaxdp.epsilon_bounds if arguments.verb == "epsilon" else jaxdp.delta_bounds
    points = parse_range(target, points_text).reshape(-1, *[1] * len(batch_shape(mechanism)))
    lower, upper = bounds_of(mechanism, points, relation=arguments.before_relation)
    rows = {target: points, "lower": lower, arguments.verb: upper}
    columns = {name: np.broadcast_to(values, upper.shape).ravel().tolist() for name, values in rows.items()}
    print_table(columns, arguments.verb, arguments.before_json, arguments.before_out)
