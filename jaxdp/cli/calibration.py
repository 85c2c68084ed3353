"""``jaxdp calibrate``: the parameter value that meets a target."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from jaxdp.calibration import calibrate
from jaxdp.cli.mechanisms import MECHANISMS, axes_of, build, chosen, points_of
from jaxdp.cli.parser import add_command, mechanism_parsers, progress_option
from jaxdp.cli.ranges import parse_bracket, parse_range
from jaxdp.cli.table import print_table


def add_parser(commands: Any) -> None:
    """The command."""
    command = add_command(commands, "calibrate", "the parameter value that meets a target epsilon and delta")
    for parser in mechanism_parsers(command, solved_for=True):
        parser.add_argument("--solve-for", required=True, metavar="OPTION", help="noise-multiplier, --sigma, ...")
        where = "where the value is sought (default: outward from 1; a probability needs it)"
        parser.add_argument("--bracket", metavar="LOW:HIGH", help=where)
        parser.add_argument("--epsilon", required=True, metavar="RANGE")
        parser.add_argument("--delta", required=True, metavar="RANGE")
        progress_option(parser)
        parser.set_defaults(run=_calibrate)


def _calibrate(arguments: argparse.Namespace) -> None:
    names = {name: option.name for option in MECHANISMS[arguments.mechanism].options for name in option.names}
    wanted = names.get(arguments.solve_for.lstrip("-").replace("-", "_"), "")
    if not wanted:
        raise ValueError(f"solve-for must be one of {', '.join(map(repr, names))}, got {arguments.solve_for!r}.")
    axes = axes_of(arguments, solved_for=wanted)
    axes |= {name: parse_range(name, getattr(arguments, name)) for name in ("epsilon", "delta")}
    columns: dict[str, list[Any]] = {name: [] for name in (*axes, *chosen(arguments), wanted)}
    bracket = parse_bracket(arguments.bracket)
    for rows, case in points_of(arguments, axes):
        values = calibrate(
            lambda value, fixed=rows | case: build(arguments.mechanism, fixed | {wanted: value}),
            epsilon=rows["epsilon"],
            delta=rows["delta"],
            bracket=bracket,
            relation=arguments.relation,
        )
        # in full: a value rounded for display might miss the target
        made = {wanted: values.tolist() if arguments.json else [repr(float(v)) for v in values]}
        for name, column in (rows | {n: [v] * values.size for n, v in case.items()} | made).items():
            columns[name].extend(np.asarray(column).tolist())
    print_table(columns, {}, arguments.json)
