"""The command line: ``jaxdp epsilon | delta | calibrate | sweep | plot``."""

from __future__ import annotations

import argparse
import csv
import decimal
import functools
import itertools
import json
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

import jaxdp
from jaxdp.calibration import calibrate
from jaxdp.cli_mechanisms import MECHANISMS, add_options, build, chosen, parse_range
from jaxdp.mechanisms.composition import batch_shape
from jaxdp.serialization import strict
from jaxdp.sweep import sweep
from jaxdp.typing import Relation

_RANGE_HELP = (
    "RANGE is a number, a comma list (0.5,1,2), START:STOP:COUNT (linear) or START:STOP:COUNT:log. Whole-number "
    "options round the values of a range and drop duplicates."
)
# A table longer than this shows its two ends; --json and --out hold everything.
_ROWS = 24
_TARGETS = {"epsilon": "delta", "delta": "epsilon"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status is 0, or 2 after one sentence on standard error about bad input."""
    arguments = _parser().parse_args(argv)
    try:
        arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, TypeError, ImportError, OSError, jaxdp.BackendError) as error:
        print(f"jaxdp: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("jaxdp: interrupted; finished chunks of a sweep with --out are kept.", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="jaxdp", description="Certified differential-privacy accounting.")
    parser.add_argument("--version", action="version", version=f"jaxdp {jaxdp.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, target in _TARGETS.items():
        command = _command(commands, name, f"certified {name} at a {target}")
        for mechanism in _mechanisms(command, required=False):
            _target_options(mechanism, target)
            mechanism.set_defaults(run=_verb)
        # destinations of their own: those of a mechanism would overwrite what was given before its name
        _target_options(command, target, before=True)
        _common(command, before=True)
        command.add_argument("--from", dest="before_from", metavar="FILE.json", help="what jaxdp.to_json wrote")
        command.set_defaults(run=_from_file, verb=name)
    _calibrate_parser(commands)
    _sweep_parser(commands)
    _plot_parser(commands)
    return parser


def _command(commands: Any, name: str, text: str) -> argparse.ArgumentParser:
    return commands.add_parser(name, help=text, description=text.capitalize() + ".", epilog=_RANGE_HELP)


def _common(parser: argparse.ArgumentParser, before: bool = False) -> None:
    prefix = "before_" if before else ""
    relations = ("add", "remove", "add_or_remove", "replace_one")
    parser.add_argument("--relation", dest=prefix + "relation", choices=relations)
    parser.add_argument("--json", dest=prefix + "json", action="store_true", help="print JSON instead of a table")


def _target_options(parser: argparse.ArgumentParser, target: str, before: bool = False) -> None:
    prefix = "before_" if before else ""
    parser.add_argument(f"--{target}", dest=prefix + "target", required=not before, metavar="RANGE")
    parser.add_argument("--out", dest=prefix + "out", metavar="FILE.csv", help="write all rows with all their digits")


def _mechanisms(
    command: argparse.ArgumentParser, solved_for: bool = False, required: bool = True
) -> list[argparse.ArgumentParser]:
    choices = command.add_subparsers(required=required, metavar="MECHANISM")
    parsers = []
    for name, entry in MECHANISMS.items():
        parser = choices.add_parser(name, help=entry.help, description=entry.help + ".", epilog=_RANGE_HELP)
        add_options(parser, entry, solved_for)
        _common(parser)
        parser.set_defaults(mechanism=name)
        parsers.append(parser)
    return parsers


def _calibrate_parser(commands: Any) -> None:
    command = _command(commands, "calibrate", "the parameter value that meets a target epsilon and delta")
    for parser in _mechanisms(command, solved_for=True):
        parser.add_argument("--solve-for", required=True, metavar="OPTION", help="noise-multiplier, --sigma, ...")
        where = "where the value is sought (default: outward from 1; a probability needs it)"
        parser.add_argument("--bracket", metavar="LOW:HIGH", help=where)
        parser.add_argument("--epsilon", required=True, metavar="RANGE")
        parser.add_argument("--delta", required=True, metavar="RANGE")
        parser.set_defaults(run=_calibrate)


def _sweep_parser(commands: Any) -> None:
    command = _command(commands, "sweep", "a grid of certified values: data set, picture and table")
    for parser in _mechanisms(command):
        group = parser.add_mutually_exclusive_group(required=True)
        group.add_argument("--delta", metavar="RANGE", help="sweep epsilon at these deltas")
        group.add_argument("--epsilon", metavar="RANGE", help="sweep delta at these epsilons")
        parser.add_argument("--out", metavar="FILE", help=".nc or .zarr; an interrupted sweep goes on from its parts")
        parser.add_argument("--plot", metavar="FILE", help="picture of the sweep (.png, .pdf, .svg)")
        parser.add_argument("--batch-size", type=int, metavar="N", help="grid points evaluated at once")
        parser.add_argument("--quiet", action="store_true", help="no progress bar")
        parser.set_defaults(run=_sweep)


def _plot_parser(commands: Any) -> None:
    command = _command(commands, "plot", "a picture of a data set written by sweep")
    command.add_argument("dataset", help="a .nc or .zarr file")
    command.add_argument("--out", required=True, metavar="FILE")
    command.set_defaults(run=_plot)


def _verb(arguments: argparse.Namespace) -> None:
    for name, value in vars(arguments).items():
        if name.startswith("before_") and value:
            option = "--" + name.removeprefix("before_").replace("target", _TARGETS[arguments.verb])
            raise ValueError(f"{option} must come after {arguments.mechanism}, the name of the mechanism.")
    _check_table(arguments.out)
    target_name = _TARGETS[arguments.verb]
    axes = _axes(arguments) | {target_name: parse_range(target_name, arguments.target)}
    bounds_of = jaxdp.epsilon_bounds if arguments.verb == "epsilon" else jaxdp.delta_bounds
    columns: dict[str, list[Any]] = {name: [] for name in (*axes, *chosen(arguments), "lower", arguments.verb)}
    for case in _cases(arguments):
        points = dict(zip(axes, (a.ravel() for a in np.meshgrid(*axes.values(), indexing="ij")), strict=True))
        mechanism = build(arguments.mechanism, points | case)
        lower, upper = bounds_of(mechanism, points[target_name], relation=arguments.relation)
        rows = points | {name: [value] * upper.size for name, value in case.items()}
        rows |= {"lower": lower, arguments.verb: upper}
        for name, column in columns.items():
            column.extend(np.asarray(rows[name]).tolist())
    _report(columns, arguments.verb, arguments.json, arguments.out)


def _from_file(arguments: argparse.Namespace) -> None:
    target = _TARGETS[arguments.verb]
    if arguments.before_from is None or arguments.before_target is None:
        raise ValueError(f"give a MECHANISM (see --help), or --from FILE.json and --{target}; got neither in full.")
    _check_table(arguments.before_out)
    mechanism = jaxdp.from_json(pathlib.Path(arguments.before_from).read_text())
    bounds_of = jaxdp.epsilon_bounds if arguments.verb == "epsilon" else jaxdp.delta_bounds
    points = parse_range(target, arguments.before_target).reshape(-1, *[1] * len(batch_shape(mechanism)))
    lower, upper = bounds_of(mechanism, points, relation=arguments.before_relation)
    rows = {target: points, "lower": lower, arguments.verb: upper}
    columns = {name: np.broadcast_to(values, upper.shape).ravel().tolist() for name, values in rows.items()}
    _report(columns, arguments.verb, arguments.before_json, arguments.before_out)


def _calibrate(arguments: argparse.Namespace) -> None:
    names = {name: option.name for option in MECHANISMS[arguments.mechanism].options for name in option.names}
    wanted = names.get(arguments.solve_for.lstrip("-").replace("-", "_"), "")
    if not wanted:
        raise ValueError(f"solve-for must be one of {', '.join(map(repr, names))}, got {arguments.solve_for!r}.")
    axes = _axes(arguments, solved_for=wanted)
    axes |= {name: parse_range(name, getattr(arguments, name)) for name in ("epsilon", "delta")}
    points = dict(zip(axes, (a.ravel() for a in np.meshgrid(*axes.values(), indexing="ij")), strict=True))
    columns: dict[str, list[Any]] = {name: [] for name in (*axes, *chosen(arguments), wanted)}
    bracket = _bracket(arguments.bracket)
    for case in _cases(arguments):
        values = calibrate(
            functools.partial(_at, arguments.mechanism, points | case, wanted),
            epsilon=points["epsilon"],
            delta=points["delta"],
            bracket=bracket,
            relation=arguments.relation,
        )
        # in full: a value rounded for display might miss the target
        rows = points | {name: [value] * values.size for name, value in case.items()}
        rows |= {wanted: [repr(float(v)) for v in values]}
        for name, column in columns.items():
            column.extend(np.asarray(rows[name]).tolist())
    if arguments.json:
        columns[wanted] = [float(v) for v in columns[wanted]]
    _report(columns, "", arguments.json)


def _bracket(text: str | None) -> tuple[float, float] | None:
    if text is None:
        return None
    try:
        low, high = map(float, text.split(":"))
    except ValueError:
        raise ValueError(f"bracket must be LOW:HIGH, got {text!r}.") from None
    return low, high


def _at(mechanism: str, fixed: dict[str, Any], name: str, value: Any) -> Any:
    return build(mechanism, fixed | {name: value})


class _Grid:
    """The function that a sweep evaluates: a verb of one mechanism, from named values."""

    def __init__(self, mechanism: str, verb: str, relation: Relation | None, fixed: dict[str, str]) -> None:
        self.mechanism, self.verb, self.relation, self.fixed = mechanism, verb, relation, fixed

    def __call__(self, **values: Any) -> dict[str, Any]:
        verb = jaxdp.epsilon if self.verb == "epsilon" else jaxdp.delta
        target = values["delta" if self.verb == "epsilon" else "epsilon"]
        return {self.verb: verb(build(self.mechanism, self.fixed | values), target, relation=self.relation)}


def _sweep(arguments: argparse.Namespace) -> None:
    verb, target = ("epsilon", "delta") if arguments.delta is not None else ("delta", "epsilon")
    axes: dict[str, Any] = _axes(arguments) | {target: parse_range(target, getattr(arguments, target))}
    static = chosen(arguments)
    fixed = {name: values[0] for name, values in static.items() if name == "randomizer" and len(values) == 1}
    axes |= {name: values for name, values in static.items() if name not in fixed}
    _make_folders(arguments.out, arguments.plot)
    dataset = sweep(
        _Grid(arguments.mechanism, verb, arguments.relation, fixed),
        batch_size=arguments.batch_size,
        progress=not arguments.quiet and sys.stderr.isatty(),
        path=arguments.out,
        **axes,
    )
    if arguments.plot:
        _picture(dataset, arguments.plot)
    frame = dataset.to_dataframe().reset_index().assign(**fixed)
    always = (*static, target, verb)
    varying = [name for name in (*axes, *fixed, verb) if name in always or len(axes[name]) > 1]
    _report({name: frame[name].tolist() for name in varying}, verb, arguments.json)
    for name in filter(None, (arguments.out, arguments.plot)):
        print(f"written: {name}", file=sys.stderr)


def _plot(arguments: argparse.Namespace) -> None:
    try:
        import xarray
    except ImportError as error:
        raise ImportError('plot needs xarray: pip install "jaxdp-accounting[sweep,plot]".') from error
    _make_folders(arguments.out)
    opened = xarray.open_zarr if arguments.dataset.rstrip("/").endswith(".zarr") else xarray.open_dataset
    with opened(arguments.dataset) as dataset:
        _picture(dataset.load(), arguments.out)
    print(f"written: {arguments.out}", file=sys.stderr)


def _make_folders(*paths: str | None) -> None:
    """The folders of what will be written, before anything is computed."""
    for path in filter(None, paths):
        pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)


def _picture(dataset: Any, path: str) -> None:
    """Heat maps, one per bound, where two axes are long; curves otherwise. Further axes show their first value."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('plot needs matplotlib: pip install "jaxdp-accounting[plot]".') from error
    from jaxdp import plot

    shown = next(iter(dataset.data_vars))
    numeric = [d for d in dataset.dims if np.issubdtype(dataset[d].dtype, np.number)]
    long = sorted((d for d in numeric if dataset.sizes[d] > 1), key=lambda d: -dataset.sizes[d])
    if len(long) >= 2 and dataset.sizes[long[1]] > 8:
        x, y = sorted(long[:2], key=list(dataset[shown].dims).index)
        panels = dataset.isel({d: [0] for d in long[2:]})
        static = [d for d in dataset.dims if d not in numeric]
        panels = panels.stack(panel=static) if static else panels.expand_dims("panel")
        count = panels.sizes["panel"]
        figure = Figure(figsize=(6.4 * count, 4.8), layout="constrained")
        for i, ax in enumerate(np.ravel(figure.subplots(1, count, squeeze=False))):
            panel = panels.isel(panel=i)
            names = ", ".join(str(panel[d].values) for d in static)
            plot.heat_map(ax, panel.drop_vars(["panel", *static], errors="ignore"), x, y, value=str(shown))
            ax.set_title(", ".join(filter(None, [names, ax.get_title()])), fontsize="medium")
    else:
        figure = Figure(figsize=(8, 4.8), layout="constrained")
        plot.curves(figure.subplots(), dataset, str(long[0] if long else numeric[0]), y=str(shown))
    figure.savefig(path, dpi=150)


def _axes(arguments: argparse.Namespace, solved_for: str = "") -> dict[str, np.ndarray]:
    """The options that were given, as arrays; ValueError for one that is not used."""
    entry = MECHANISMS[arguments.mechanism]
    axes = {}
    for option in entry.options:
        text = getattr(arguments, option.name)
        solved = option.name == solved_for
        if solved and text is not None:
            raise ValueError(f"{option.flag} must be left out: it is what is solved for, got {text!r}.")
        given = chosen(arguments).get("randomizer", [])
        if (solved or text is not None) and option.randomizers and not set(option.randomizers) & set(given):
            raise ValueError(
                f"{option.flag} is not used with --randomizer {','.join(given)}: leave it out, or ask for --randomizer "
                f"{' or '.join(option.randomizers)}."
            )
        if solved or (text is None and option.default is not None):
            continue
        if text is None:
            raise ValueError(f"{option.flag} is needed unless it is solved for.")
        axes[option.name] = parse_range(option.name, text, option.whole)
    return axes


def _cases(arguments: argparse.Namespace) -> list[dict[str, str]]:
    """Every combination of randomizer and bound, one empty one for mechanisms that have neither."""
    static = chosen(arguments)
    return [dict(zip(static, values, strict=True)) for values in itertools.product(*static.values())]


def _check_table(path: str | None) -> None:
    """Before anything is computed: a table is written as CSV only."""
    if path is not None and not path.endswith(".csv"):
        raise ValueError(f"out must be a file that ends in .csv, got {path!r}.")
    _make_folders(path)


def _report(columns: dict[str, list[Any]], upper: str, as_json: bool, table: str | None = None) -> None:
    """The columns as a table or JSON, and in the CSV file ``table``.

    upper: the name of the column of certified upper bounds, "" where there is none.
    """
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    if table is not None:
        with open(table, "w", newline="") as file:
            csv.writer(file).writerows([list(columns), *(list(row.values()) for row in rows)])
    if as_json:
        print(json.dumps([{k: strict(v) for k, v in row.items()} for row in rows], allow_nan=False))
        return
    shown = rows if len(rows) <= _ROWS else rows[: _ROWS // 2] + [dict.fromkeys(columns, "...")] + rows[-_ROWS // 2 :]
    outward = {"lower": decimal.ROUND_FLOOR, upper: decimal.ROUND_CEILING}
    cells = [[_cell(row[name], outward.get(name)) for name in columns] for row in shown]
    widths = [max(len(name), *(len(row[i]) for row in cells)) for i, name in enumerate(columns)]
    for line in ([*columns], *cells):
        print("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)))
    if len(shown) < len(rows):
        print(f"{len(rows)} rows; --json or --out give all of them.")


def _cell(value: Any, rounding: str | None) -> str:
    """Nine digits; a certified bound is rounded outward, so that the printed number is still one."""
    if not isinstance(value, float) or not np.isfinite(value):
        return str(value)
    if value.is_integer() and abs(value) < 1e15:
        return f"{value:.0f}"
    if rounding is None:
        return f"{value:.9g}"
    return f"{float(decimal.Context(prec=9, rounding=rounding).create_decimal(value)):.9g}"
