"""Input and output as text: numbers, lists and ranges as typed; tables, JSON and CSV; checks of output paths."""

import csv
import json
import os
import pathlib
from typing import Any

import numpy as np

from jaxdp.report.text import outward
from jaxdp.serialization import strict

RANGE_HELP = (
    "RANGE is a number or a quotient (1/235), a comma list (0.5,1,2), START:STOP:COUNT (linear) or "
    "START:STOP:COUNT:log. Whole-number "
    "options round the values of a range and drop duplicates. Tables, CSV and JSON write infinity and NaN as inf, -inf "
    "and nan (in JSON as strings, because it has no such numbers); options read the same words."
)

_LARGEST_COUNT = 10_000_000  # most values of a range


def parse_range(name: str, text: str, whole: bool = False) -> np.ndarray:
    """The values of ``a:b:count`` (linear), ``a:b:count:log``, or a comma list of these and of numbers.

    whole: the values of a range are rounded to whole numbers, sorted, without duplicates.
    """
    pieces = [(piece, _piece(name, piece)) for piece in text.split(",")]
    values = np.concatenate([np.rint(found) if whole and ":" in piece else found for piece, found in pieces])
    return np.unique(values) if whole and ":" in text else values


def _number(name: str, text: str, allowed: str = "a number, a comma list or START:STOP:COUNT[:log]") -> float:
    top, slash, bottom = text.partition("/")
    try:
        return float(top) / float(bottom) if slash else float(text)
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"{name} must be {allowed}, got {text!r}, which is not a number.") from None


def _piece(name: str, text: str) -> np.ndarray:
    parts = text.split(":")
    if len(parts) == 1:
        return np.array([_number(name, text)])
    if len(parts) not in (3, 4) or parts[3:] not in ([], ["log"]):
        raise ValueError(f"{name} must be START:STOP:COUNT or START:STOP:COUNT:log where it is a range, got {text!r}.")
    start, stop = (_number(name, end) for end in parts[:2])
    count = int(parts[2]) if parts[2].strip().isdecimal() else 0
    if not 1 <= count <= _LARGEST_COUNT:
        raise ValueError(f"{name} must have a COUNT of 1..{_LARGEST_COUNT}, a whole number, got {text!r}.")
    if not np.isfinite(stop - start):
        raise ValueError(f"{name} must have finite ends, got {text!r}.")
    if len(parts) == 3:
        return np.linspace(start, stop, count)
    if not min(start, stop) > 0:
        raise ValueError(f"{name} must have ends above 0 to be spaced by its logarithm, got {text!r}.")
    return np.geomspace(start, stop, count)


def parse_pair(name: str, text: str | None, between: str, allowed: str) -> tuple[float, float] | None:
    """The two numbers of a text such as ``6x4``, with "x" as ``between``; None for None."""
    if text is None:
        return None
    ends = text.split(between)
    if len(ends) != 2:
        raise ValueError(f"{name} must be {allowed}, got {text!r}.")
    first, second = (_number(name, end, allowed) for end in ends)
    return first, second


_ROWS = 24  # most rows of a printed table; a longer one shows its first and last rows


def check_file(name: str, path: str, endings: tuple[str, ...]) -> None:
    """Makes the folder of an output file. ValueError for a wrong ending or a path that cannot be written."""
    check_ending(name, path, endings)
    make_folder(name, path)
    if pathlib.Path(path).is_dir():
        raise ValueError(f"{name} must be a file, got the folder {path!r}.")


def check_ending(name: str, path: str, endings: tuple[str, ...]) -> None:
    """ValueError where the path has none of the endings."""
    if not path.lower().endswith(endings):
        raise ValueError(f"{name} must be a file that ends in {' or '.join(endings)}, got {path!r}.")


def make_folder(name: str, path: str) -> None:
    """Makes the folder of an output path. ValueError where the path cannot be written."""
    folder = pathlib.Path(path).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = (error.strerror or "").lower()
        raise ValueError(f"{name} must be in a folder that can be made, got {path!r} ({reason}).") from None
    for place in (pathlib.Path(path), folder):
        if place.exists() and not os.access(place, os.W_OK):
            raise ValueError(f"{name} must be a place to write to, got {path!r}: {str(place)!r} is write-protected.")


def print_table(rows: list[dict[str, Any]], roundings: dict[str, str], as_json: bool, path: str | None = None) -> None:
    """Prints the rows as a table or as JSON; writes all of them to the CSV file ``path``, unless it is None.

    roundings: "up" or "down" for columns of certified bounds: the table shows them rounded in this direction.
    """
    names = list(rows[0])
    if path is not None:
        with open(path, "w", newline="") as file:
            csv.writer(file).writerows([names, *(row.values() for row in rows)])
    if as_json:
        print(json.dumps([{k: strict(v) for k, v in row.items()} for row in rows], allow_nan=False))
        return
    shown = rows if len(rows) <= _ROWS else rows[: _ROWS // 2] + [dict.fromkeys(names, "...")] + rows[-_ROWS // 2 :]
    cells = [names, *([_cell(row[name], roundings.get(name)) for name in names] for row in shown)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        print("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)))
    if len(shown) < len(rows):
        print(f"{len(rows)} rows; --json or --out give all of them.")


def _cell(value: Any, rounding: str | None) -> str:
    """A certified bound in nine digits, rounded outward, so that it is a bound too; another number with all digits.

    The bounds of a row hold at its own parameters: at parameters rounded to nine digits they may be wrong.
    """
    if not isinstance(value, float) or not np.isfinite(value):
        return str(value)
    if value.is_integer() and abs(value) < 1e15:
        return f"{value:.0f}"
    short = f"{value:.9g}"
    if rounding is None:
        return short if float(short) == value else repr(value).removesuffix(".0")
    return outward(value, rounding == "up", 9)
