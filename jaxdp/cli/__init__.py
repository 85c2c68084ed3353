"""The command line: ``jaxdp epsilon | delta | tradeoff | calibrate | sweep | plot | report``."""

import argparse
import os
import re
import sys
from collections.abc import Sequence

import jaxdp
from jaxdp.cli import commands, grids, mechanisms


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Exit status: 0; 2 for bad input, with one sentence on standard error; 130 when interrupted."""
    argv = sys.argv[1:] if argv is None else argv
    words = zip(argv, argv[1:], strict=False)
    named = next((word for before, word in words if word in mechanisms.MECHANISMS and before != "--from"), None)
    argv = _spelled(argv)
    options = [word.partition("=")[0] for word in argv]
    wrong = ""
    if named and "--from" in options and argv[0] not in ("calibrate", "sweep"):  # these two have no --from
        wrong = f"give a MECHANISM or --from FILE.json, got both ({named})."
    elif named and argv[1].startswith("--") and argv[1] != "--help":  # the mechanism's defaults would overwrite it
        wrong = f"{options[1]} must come after {named}, the name of the mechanism."
    if wrong:
        print(f"jaxdp: error: {wrong}", file=sys.stderr)
        return 2
    arguments, unknown = make_parser().parse_known_args(argv)
    if unknown:
        command = f"jaxdp {argv[0]} {named}" if named else f"jaxdp {argv[0]}"
        print(f"jaxdp: error: {command} has no option {unknown[0]}: see {command} --help.", file=sys.stderr)
        return 2
    try:
        arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of the pipe has closed it, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, TypeError, ImportError, OSError, jaxdp.BackendError) as error:
        print(f"jaxdp: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        print(f"jaxdp: interrupted. {interrupt}", file=sys.stderr)
        return 130
    return 0


def _spelled(argv: Sequence[str]) -> list[str]:
    """The words. Underscores in the name of an option become hyphens.

    An option and its negative value are joined by "=": argparse takes -1,0 or -inf for an option.
    """
    joined: list[str] = []
    for word in argv:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            word = name.replace("_", "-") + equals + value
        negative = re.match(r"-(\d|\.|inf)", word) and joined and joined[-1].startswith("--") and "=" not in joined[-1]
        joined = [*joined[:-1], f"{joined[-1]}={word}"] if negative else [*joined, word]
    return joined


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands. It sets ``run`` in the namespace to the function that runs the command."""
    parser = argparse.ArgumentParser(prog="jaxdp", description="Certified differential-privacy accounting.")
    parser.add_argument("--version", action="version", version=f"jaxdp {jaxdp.__version__}")
    chosen = parser.add_subparsers(required=True, metavar="COMMAND")
    commands.add_parsers(chosen)
    grids.add_parsers(chosen)
    return parser
