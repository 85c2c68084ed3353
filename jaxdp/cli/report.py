"""``jaxdp report``: one page on one mechanism."""

from __future__ import annotations

import argparse
import pathlib
import sys
from typing import Any

import jaxdp
from jaxdp.cli.mechanisms import read, single
from jaxdp.cli.parser import add_target_command, progress_option, require_full
from jaxdp.cli.ranges import parse_range
from jaxdp.cli.table import check_file


def add_parser(commands: Any) -> None:
    """The command."""
    text = "one HTML page on a mechanism, for a privacy review board"
    add_target_command(commands, "report", text, _options, _report, table=False)


def _options(parser: argparse.ArgumentParser, required: bool) -> None:
    group = parser.add_mutually_exclusive_group(required=required)
    for name, other in (("delta", "epsilon"), ("epsilon", "delta")):
        text = f"{name} at which {other} is certified; the first one is the headline"
        group.add_argument(f"--{name}", metavar="RANGE", help=text)
    progress_option(parser)
    parser.add_argument("--out", required=required, metavar="FILE.html", help="the page")


def _report(arguments: argparse.Namespace) -> None:
    given = {name: getattr(arguments, name) for name in ("delta", "epsilon") if getattr(arguments, name) is not None}
    complete = arguments.out is not None and len(given) == 1
    require_full(arguments, complete, "with --out FILE.html and --delta or --epsilon")
    check_file("out", arguments.out, (".html", ".htm"))
    page = jaxdp.report(
        single(arguments) if arguments.source is None else read(arguments.source),
        **{name: parse_range(name, text) for name, text in given.items()},
        relation=arguments.relation,
        progress=arguments.progress,
    )
    pathlib.Path(arguments.out).write_text(page, encoding="utf-8")
    print(f"written: {arguments.out}", file=sys.stderr)
