"""Parts of the parser that commands share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from jaxdp.cli.mechanisms import MECHANISMS, add_options, read
from jaxdp.cli.ranges import RANGE_HELP


def add_command(commands: Any, name: str, text: str) -> argparse.ArgumentParser:
    """A command of the parser, described by ``text``."""
    return commands.add_parser(name, help=text, description=text.capitalize() + ".", epilog=RANGE_HELP)


def common_options(parser: argparse.ArgumentParser, before: bool = False, table: bool = True) -> None:
    """Options that every command with a mechanism has; before: those that stand before the mechanism's name."""
    relations = ("add", "remove", "add_or_remove", "replace_one")
    parser.add_argument("--relation", dest=destination("relation", before), choices=relations)
    if table:
        text = 'print JSON instead of a table, with all digits; infinity and NaN are the strings "inf", "-inf", "nan"'
        parser.add_argument("--json", dest=destination("json", before), action="store_true", help=text)


def progress_option(parser: argparse.ArgumentParser, before: bool = False) -> None:
    """A bar, for commands that may take minutes."""
    text = (
        "show a bar of finished rows (needs the sweep extra); their last digits may differ, as rows are computed apart"
    )
    parser.add_argument("--progress", dest=destination("progress", before), action="store_true", help=text)


def destination(name: str, before: bool) -> str:
    """Where an option's value is kept: what stands before a mechanism's name would be overwritten by its own."""
    return ("before_" if before else "") + name


def add_target_command(
    commands: Any,
    verb: str,
    text: str,
    options: Callable[[argparse.ArgumentParser, bool], None],
    run: Callable[[argparse.Namespace, Any], None],
    table: bool = True,
) -> None:
    """A command on a mechanism, which its name and its options give, or ``--from FILE.json`` in place of a name.

    options: adds those of the command, also before the name (True). run: takes what was parsed and the record of the
    file, or None.
    """

    def by_name(arguments: argparse.Namespace) -> None:
        for name, value in vars(arguments).items():
            if name.startswith("before_") and value:
                option = "--" + name.removeprefix("before_").replace("_", "-")
                raise ValueError(f"{option} must come after {arguments.mechanism}, the name of the mechanism.")
        run(arguments, None)

    def by_file(arguments: argparse.Namespace) -> None:
        given = argparse.Namespace(**{n.removeprefix("before_"): value for n, value in vars(arguments).items()})
        run(given, None if given.source is None else read(given.source))

    command = add_command(commands, verb, text)
    for mechanism in mechanism_parsers(command, required=False, table=table):
        options(mechanism, False)
        mechanism.set_defaults(run=by_name)
    options(command, True)
    common_options(command, before=True, table=table)
    command.add_argument("--from", dest="before_source", metavar="FILE.json", help="what jaxdp.to_json wrote")
    command.set_defaults(run=by_file, verb=verb)


def mechanism_parsers(
    command: argparse.ArgumentParser, solved_for: bool = False, required: bool = True, table: bool = True
) -> list[argparse.ArgumentParser]:
    """One parser per mechanism, with its options; none is required when one of them is solved for."""
    choices = command.add_subparsers(required=required, metavar="MECHANISM")
    parsers = []
    for name, entry in MECHANISMS.items():
        parser = choices.add_parser(name, help=entry.help, description=entry.help + ".", epilog=RANGE_HELP)
        add_options(parser, entry, solved_for)
        common_options(parser, table=table)
        parser.set_defaults(mechanism=name)
        parsers.append(parser)
    return parsers
