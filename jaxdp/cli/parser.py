"""Parts of the parser that commands share."""

from __future__ import annotations

import argparse
import typing
from collections.abc import Callable
from typing import Any

from jaxdp.cli.mechanisms import MECHANISMS, add_options
from jaxdp.cli.ranges import RANGE_HELP
from jaxdp.typing import Relation


def add_command(commands: Any, name: str, text: str) -> argparse.ArgumentParser:
    """A command of the parser, described by ``text``."""
    return commands.add_parser(name, help=text, description=text.capitalize() + ".", epilog=RANGE_HELP)


def common_options(parser: argparse.ArgumentParser, table: bool = True) -> None:
    """Options that every command with a mechanism has."""
    parser.add_argument("--relation", choices=typing.get_args(Relation))
    if table:
        text = 'print JSON instead of a table, with all digits; infinity and NaN are the strings "inf", "-inf", "nan"'
        parser.add_argument("--json", action="store_true", help=text)


def progress_option(parser: argparse.ArgumentParser) -> None:
    """A bar, for commands that may take minutes."""
    text = (
        "show a bar of finished rows (needs the sweep extra); their last digits may differ, as rows are computed apart"
    )
    parser.add_argument("--progress", action="store_true", help=text)


def add_target_command(
    commands: Any,
    verb: str,
    text: str,
    options: Callable[[argparse.ArgumentParser, bool], None],
    run: Callable[[argparse.Namespace], None],
    table: bool = True,
) -> None:
    """A command on a mechanism, which its name and its options give, or ``--from FILE.json`` in place of a name.

    options: adds those of the command, which are required (or not, as beside ``--from``). run: takes what was parsed,
    with the file, or None, as ``source``.
    """
    command = add_command(commands, verb, text)
    for parser in (*mechanism_parsers(command, required=False, table=table), command):
        options(parser, parser is not command)
    common_options(command, table)
    command.add_argument("--from", dest="source", metavar="FILE.json", help="what jaxdp.to_json wrote")
    command.set_defaults(run=run, verb=verb)


def require_full(arguments: argparse.Namespace, complete: bool, needed: str) -> None:
    """ValueError unless there is a mechanism, by name or in a file, and what the command needs besides."""
    if not complete or (arguments.source is None and "mechanism" not in arguments):
        raise ValueError(f"give a MECHANISM (see --help), or --from FILE.json {needed}; got neither in full.")


def mechanism_parsers(
    command: argparse.ArgumentParser, solved_for: bool = False, required: bool = True, table: bool = True
) -> list[argparse.ArgumentParser]:
    """One parser per mechanism, with its options; none is required when one of them is solved for."""
    choices = command.add_subparsers(required=required, metavar="MECHANISM")
    parsers = []
    for name, entry in MECHANISMS.items():
        parser = choices.add_parser(name, help=entry.help, description=entry.help + ".", epilog=RANGE_HELP)
        add_options(parser, name, solved_for)
        common_options(parser, table=table)
        parser.set_defaults(mechanism=name)
        parsers.append(parser)
    return parsers
