"""``jaxdp report``: one page on one mechanism."""

from __future__ import annotations

import argparse
import pathlib
import sys
from typing import Any

import jaxdp
from jaxdp.cli.mechanisms import read, single
from jaxdp.cli.parser import (
    add_command,
    common_options,
    destination,
    from_option,
    mechanism_parsers,
    progress_option,
    refuse_misplaced,
)
from jaxdp.cli.ranges import parse_range
from jaxdp.cli.table import check_file


def add_parser(commands: Any) -> None:
    """The command."""
    command = add_command(commands, "report", "one HTML page on a mechanism, for a privacy review board")
    for mechanism in mechanism_parsers(command, required=False, table=False):
        _options(mechanism)
        mechanism.set_defaults(run=_from_options)
    _options(command, before=True)
    common_options(command, before=True, table=False)
    from_option(command)
    command.set_defaults(run=_from_file)


def _options(parser: argparse.ArgumentParser, before: bool = False) -> None:
    group = parser.add_mutually_exclusive_group(required=not before)
    for name, other in (("delta", "epsilon"), ("epsilon", "delta")):
        text = f"{name} at which {other} is certified; the first one is the headline"
        group.add_argument(f"--{name}", dest=destination(name, before), metavar="RANGE", help=text)
    progress_option(parser, before)
    text = "the page"
    parser.add_argument("--out", dest=destination("out", before), required=not before, metavar="FILE.html", help=text)


def _from_options(arguments: argparse.Namespace) -> None:
    refuse_misplaced(arguments)
    check_file("out", arguments.out, (".html", ".htm"))
    _write(single(arguments), arguments.delta, arguments.epsilon, arguments.relation, arguments.out, arguments.progress)


def _from_file(arguments: argparse.Namespace) -> None:
    delta, epsilon, out = arguments.before_delta, arguments.before_epsilon, arguments.before_out
    if arguments.before_from is None or out is None or (delta is None) == (epsilon is None):
        raise ValueError(
            "give a MECHANISM (see --help), or --from FILE.json with --out FILE.html and --delta or --epsilon; got "
            "neither in full."
        )
    check_file("out", out, (".html", ".htm"))
    _write(read(arguments.before_from), delta, epsilon, arguments.before_relation, out, arguments.before_progress)


def _write(mechanism: Any, delta: str | None, epsilon: str | None, relation: Any, out: str, progress: bool) -> None:
    targets = {"delta": delta, "epsilon": epsilon}
    given = {name: parse_range(name, text) for name, text in targets.items() if text is not None}
    page = jaxdp.report(mechanism, **given, relation=relation, progress=progress)
    pathlib.Path(out).write_text(page, encoding="utf-8")
    print(f"written: {out}", file=sys.stderr)
