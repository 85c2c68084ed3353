"""Parts of the parser that commands share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from jaxdp.cli.mechanisms import MECHANISMS, add_options
from jaxdp.cli.ranges import RANGE_HELP


def add_command(commands: Any, name: str, text: str) -> argparse.ArgumentParser:
    """A command of the parser, described by ``text``."""
    return commands.add_parser(name, help=text, description=text.capitalize() + ".", epilog=RANGE_HELP)


def common_options(parser: argparse.ArgumentParser, prefix: str = "", table: bool = True) -> None:
    """Options that every command with a mechanism has.

    prefix: "before_" for those that stand before the mechanism's name, whose own would overwrite them.
    """
    relations = ("add", "remove", "add_or_remove", "replace_one")
    parser.add_argument("--relation", dest=prefix + "relation", choices=relations)
    if table:
        text = 'print JSON instead of a table, with all digits; infinity and NaN are the strings "inf", "-inf", "nan"'
        parser.add_argument("--json", dest=prefix + "json", action="store_true", help=text)


def progress_option(parser: argparse.ArgumentParser, prefix: str = "") -> None:
    """A bar, for commands that may take minutes."""
    text = (
        "show a bar of finished rows (needs the sweep extra); their last digits may differ, as rows are computed apart"
    )
    parser.add_argument("--progress", dest=prefix + "progress", action="store_true", help=text)


def add_target_command(
    commands: Any,
    verb: str,
    text: str,
    options: Callable[[argparse.ArgumentParser, str], None],
    run: Callable[[argparse.Namespace], None],
    table: bool = True,
) -> None:
    """A command on a mechanism, which its name and its options give, or ``--from FILE.json`` in place of a name.

    options: adds those of the command, also before the name (prefix "before_"). run: takes what was parsed, with the
    file, or None, as ``source``.
    """

    def by_name(arguments: argparse.Namespace) -> None:
        for name, value in vars(arguments).items():
            if name.startswith("before_") and value:
                option = "--" + name.removeprefix("before_").replace("_", "-")
                raise ValueError(f"{option} must come after {arguments.mechanism}, the name of the mechanism.")
        arguments.source = None
        run(arguments)

    def by_file(arguments: argparse.Namespace) -> None:
        given = {name.removeprefix("before_"): value for name, value in vars(arguments).items()}
        run(argparse.Namespace(**given, source=given["from"]))

    command = add_command(commands, verb, text)
    for mechanism in mechanism_parsers(command, required=False, table=table):
        options(mechanism, "")
        mechanism.set_defaults(run=by_name)
    options(command, "before_")
    common_options(command, "before_", table)
    command.add_argument("--from", dest="before_from", metavar="FILE.json", help="what jaxdp.to_json wrote")
    command.set_defaults(run=by_file, verb=verb)


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
        add_options(parser, entry, solved_for)
        common_options(parser, table=table)
        parser.set_defaults(mechanism=name)
        parsers.append(parser)
    return parsers
