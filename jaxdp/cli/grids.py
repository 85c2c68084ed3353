"""``jaxdp sweep | plot``: grids of certified values, and pictures of them."""

import argparse
import functools
import os
import sys
from typing import Any

import numpy as np

import jaxdp
from jaxdp import validate
from jaxdp.cli.mechanisms import add_command, add_mechanism_command, axes_of, build, chosen
from jaxdp.cli.text import check_ending, check_file, make_folder, parse_pair, parse_range, print_table
from jaxdp.runtime.extras import require
from jaxdp.sweep import sweep
from jaxdp.typing import Relation

_DATASETS = (".nc", ".zarr")
_PICTURES = (".png", ".pdf", ".svg")
_FEW = 8  # most values of an axis for which one curve each is drawn


def add_parsers(commands: Any) -> None:
    """Adds sweep and plot."""
    text = "a grid of certified values: data set, picture and table"
    add_mechanism_command(commands, "sweep", text, _sweep_options, _sweep)
    command = add_command(commands, "plot", "a picture of a data set written by sweep")
    command.add_argument("dataset", help="a .nc or .zarr file")
    command.add_argument("--out", required=True, metavar="FILE", help=f"the picture ({', '.join(_PICTURES)})")
    command.add_argument("--x", metavar="AXIS", help="draw curves along this axis (default: the longest)")
    text = "draw one curve per value of these axes, comma separated (default: those of at most 8 values); others show "
    command.add_argument("--lines", metavar="AXES", help=text + "their first value")
    command.add_argument("--size", metavar="WIDTHxHEIGHT", help="size of the picture in inches, such as 6x4")
    command.set_defaults(run=_plot)


def _value(name: str, verb: str, relation: Relation | None, fixed: dict[str, str], **values: Any) -> dict[str, Any]:
    """The function that a sweep evaluates: {verb: the verb of the mechanism at the named values}."""
    evaluate = jaxdp.epsilon if verb == "epsilon" else jaxdp.delta
    target = values["delta" if verb == "epsilon" else "epsilon"]
    return {verb: evaluate(build(name, fixed | values), target, relation=relation)}


def _sweep_options(parser: argparse.ArgumentParser, required: bool) -> None:
    group = parser.add_mutually_exclusive_group(required=required)
    group.add_argument("--delta", metavar="RANGE", help="sweep epsilon at these deltas")
    group.add_argument("--epsilon", metavar="RANGE", help="sweep delta at these epsilons")
    parser.add_argument("--out", metavar="FILE", help=".nc or .zarr; an interrupted sweep goes on from its parts")
    parser.add_argument(
        "--plot", metavar="FILE", help="picture (.png, .pdf, .svg), at the first values of axes not drawn"
    )
    parser.add_argument("--batch-size", type=int, metavar="N", help="grid points evaluated at once")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def _sweep(arguments: argparse.Namespace) -> None:
    verb, target = ("epsilon", "delta") if arguments.delta is not None else ("delta", "epsilon")
    axes: dict[str, Any] = axes_of(arguments) | {target: parse_range(target, getattr(arguments, target))}
    static = chosen(arguments)
    fixed = {name: values[0] for name, values in static.items() if name == "randomizer" and len(values) == 1}
    axes |= {name: values for name, values in static.items() if name not in fixed}
    if arguments.out is not None:
        check_ending("--out", arguments.out, _DATASETS)
        if not os.path.exists(arguments.out):  # a finished sweep is only read, which needs no write access
            make_folder("--out", arguments.out)
    if arguments.plot is not None:
        check_file("--plot", arguments.plot, _PICTURES)
    dataset = sweep(
        functools.partial(_value, arguments.mechanism, verb, arguments.relation, fixed),
        batch_size=arguments.batch_size,
        progress=not arguments.quiet and sys.stderr.isatty(),
        path=arguments.out,
        **axes,
    )
    if arguments.plot:
        _save(_picture(dataset), arguments.plot, None)
    frame = dataset.to_dataframe().reset_index().assign(**fixed)
    always = (*static, target, verb)
    varying = [name for name in (*axes, *fixed, verb) if name in always or len(axes[name]) > 1]
    print_table(frame[varying].to_dict("records"), {verb: "up"}, arguments.json)
    for name in filter(None, (arguments.out, arguments.plot)):
        print(f"written: {name}", file=sys.stderr)


def _plot(arguments: argparse.Namespace) -> None:
    xarray = require("xarray", "plot", "sweep,plot")
    source = arguments.dataset.rstrip("/")
    check_ending("dataset", source, _DATASETS)
    check_file("--out", arguments.out, _PICTURES)
    allowed = "WIDTHxHEIGHT in inches from 1 to 100, such as 6x4"
    size = parse_pair("--size", arguments.size, "x", allowed)
    if size is not None and not 1 <= min(size) <= max(size) <= 100:
        raise ValueError(f"--size must be {allowed}, got {arguments.size!r}.")
    if not os.path.exists(source):
        raise ValueError(f"dataset must be what sweep wrote, got {source!r}: there is no such file.")
    try:
        loaded = xarray.load_dataset(source)
    except Exception as error:  # netCDF, HDF5 and zarr raise different errors for a file that they cannot read
        raise ValueError(f"dataset must be what sweep wrote, got {source!r}, which cannot be read.") from error
    if not loaded.data_vars or not _numeric_axes(loaded):
        raise ValueError(f"dataset must be what sweep wrote, got {source!r}, which has no values on numeric axes.")
    if arguments.x is None and arguments.lines is None:
        figure = _picture(loaded)
    else:
        figure = _curves(loaded, *_chosen_axes(loaded, arguments.x, arguments.lines))
    _save(figure, arguments.out, size)
    print(f"written: {arguments.out}", file=sys.stderr)


def _save(figure: Any, path: str, size: tuple[float, float] | None) -> None:
    if size is not None:
        figure.set_size_inches(size)
    figure.savefig(path, dpi=150)


def _figure(width: float) -> Any:
    return require("matplotlib.figure", "plot", "plot").Figure(figsize=(width, 4.8), layout="constrained")


def _numeric_axes(dataset: Any) -> list[str]:
    """Names of the axes that hold numbers, the longest first."""
    numeric = [str(d) for d in dataset.dims if np.issubdtype(dataset[d].dtype, np.number)]
    return sorted(numeric, key=lambda d: -dataset.sizes[d])


def _chosen_axes(dataset: Any, x: str | None, lines: str | None) -> tuple[str, list[str]]:
    """The axis to draw along, and the axes with one curve per value."""
    names = [] if lines is None else lines.split(",")
    numeric = _numeric_axes(dataset)
    along = next((d for d in numeric if d not in names), "") if x is None else x
    validate.choice("--x", along, tuple(d for d in numeric if d not in names))
    for name in names:
        validate.choice("--lines", name, tuple(str(d) for d in dataset.dims if d != along))
    if lines is None:
        names = [str(d) for d in dataset.dims if d != along and dataset.sizes[d] <= _FEW]
    return along, names


def _curves(dataset: Any, x: str, lines: list[str]) -> Any:
    shown = str(next(iter(dataset.data_vars)))
    first = {d: [0] for d in dataset.dims if d not in (x, *lines)}
    figure = _figure(8.0)
    jaxdp.plot.curves(figure.subplots(), dataset.isel(first), x, y=shown)
    return figure


def _picture(dataset: Any) -> Any:
    """Heat maps over the two longest numeric axes where both are long, one per combination of names; else curves.

    A heat map shows the first value of each further numeric axis.
    """
    long = [d for d in _numeric_axes(dataset) if dataset.sizes[d] > 1]
    if len(long) < 2 or dataset.sizes[long[1]] <= _FEW:
        return _curves(dataset, _numeric_axes(dataset)[0], [str(d) for d in dataset.dims])
    shown = str(next(iter(dataset.data_vars)))
    x, y = sorted(long[:2], key=list(dataset[shown].dims).index)
    panels = dataset.isel({d: [0] for d in long[2:]})
    static = [d for d in dataset.dims if d not in _numeric_axes(dataset)]
    panels = panels.stack(panel=static) if static else panels.expand_dims("panel")
    count = panels.sizes["panel"]
    figure = _figure(6.4 * count)
    for i, ax in enumerate(np.ravel(figure.subplots(1, count, squeeze=False))):
        panel = panels.isel(panel=i)
        names = ", ".join(str(panel[d].values) for d in static)
        jaxdp.plot.heat_map(ax, panel.drop_vars(["panel", *static], errors="ignore"), x, y, value=shown)
        ax.set_title(", ".join(filter(None, [names, ax.get_title()])), fontsize="medium")
    return figure
