"""The command line: ``jaxdp epsilon | delta | tradeoff | calibrate | sweep | plot | report``."""

import argparse
import os
import re
import sys
from collections.abc import Sequence

import jaxdp
from jaxdp.cli import commands, grids, mechanisms


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status is 0, or 2 after one sentence on standard error about bad input."""
    argv = sys.argv[1:] if argv is None else argv
    named = next((word for word in argv[1:] if word in mechanisms.MECHANISMS), None)
    argv = _with_negative_values([_spelled(word) for word in argv])
    options = [word.partition("=")[0] for word in argv]
    wrong = ""
    if named and "--from" in options and argv[0] not in ("calibrate", "sweep"):  # which have no such option
        wrong = f"give a MECHANISM or --from FILE.json, got both ({named})."
    elif named and argv[1].startswith("--") and argv[1] != "--help":  # the mechanism's options would overwrite these
        wrong = f"{options[1]} must come after {named}, the name of the mechanism."
    if wrong:
        print(f"jaxdp: error: {wrong}", file=sys.stderr)
        return 2
    arguments, unknown = make_parser().parse_known_args(argv)
    if unknown:
        of = f"jaxdp {argv[0]} {named}" if named else f"jaxdp {argv[0]}"
        print(f"jaxdp: error: {of} has no option {unknown[0]}: see {of} --help.", file=sys.stderr)
        return 2
    try:
        arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, TypeError, ImportError, OSError, jaxdp.BackendError) as error:
        print(f"jaxdp: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        print(f"jaxdp: interrupted. {interrupt}", file=sys.stderr)
        return 130
    return 0


def _with_negative_values(argv: list[str]) -> list[str]:
    """Joins an option and a value such as -1,0 or -inf, which would be taken for an option."""
    made: list[str] = []
    for word in argv:
        negative = re.match(r"-(\d|\.|inf)", word) and made and made[-1].startswith("--") and "=" not in made[-1]
        made = [*made[:-1], f"{made[-1]}={word}"] if negative else [*made, word]
    return made


def _spelled(word: str) -> str:
    """An option with hyphens, as it may be typed with underscores."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if word.startswith("--") else word


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands; ``run`` of what it parses is the function to call."""
    parser = argparse.ArgumentParser(prog="jaxdp", description="Certified differential-privacy accounting.")
    parser.add_argument("--version", action="version", version=f"jaxdp {jaxdp.__version__}")
    chosen = parser.add_subparsers(required=True, metavar="COMMAND")
    commands.add_parsers(chosen)
    grids.add_parsers(chosen)
    return parser
