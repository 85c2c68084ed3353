"""Parts of the parser that commands share."""

from __future__ import annotations

import argparse
from typing import Any

from jaxdp.cli.mechanisms import MECHANISMS, add_options
from jaxdp.cli.ranges import RANGE_HELP


def add_command(commands: Any, name: str, text: str) -> argparse.ArgumentParser:
    """A command of the parser, described by ``text``."""
    return commands.add_parser(name, help=text, description=text.capitalize() + ".", epilog=RANGE_HELP)


def common_options(parser: argparse.ArgumentParser, before: bool = False) -> None:
    """Options that every command with a mechanism has; before: those that stand before the mechanism's name."""
    prefix = "before_" if before else ""
    relations = ("add", "remove", "add_or_remove", "replace_one")
    parser.add_argument("--relation", dest=prefix + "relation", choices=relations)
    parser.add_argument("--json", dest=prefix + "json", action="store_true", help="print JSON instead of a table")


def mechanism_parsers(
    command: argparse.ArgumentParser, solved_for: bool = False, required: bool = True
) -> list[argparse.ArgumentParser]:
    """One parser per mechanism, with its options; none is required when one of them is solved for."""
    choices = command.add_subparsers(required=required, metavar="MECHANISM")
    parsers = []
    for name, entry in MECHANISMS.items():
        parser = choices.add_parser(name, help=entry.help, description=entry.help + ".", epilog=RANGE_HELP)
        add_options(parser, entry, solved_for)
        common_options(parser)
        parser.set_defaults(mechanism=name)
        parsers.append(parser)
    return parsers
