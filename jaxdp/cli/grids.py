"""``jaxdp sweep | plot``: grids of certified values, and pictures of them."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import numpy as np

import jaxdp
from jaxdp.cli.mechanisms import axes_of, build, chosen
from jaxdp.cli.parser import add_command, mechanism_parsers
from jaxdp.cli.ranges import parse_range
from jaxdp.cli.table import make_folders, print_table
from jaxdp.sweep import sweep


def add_parsers(commands: Any) -> None:
    """The two commands."""
    _sweep_parser(commands)
    _plot_parser(commands)


def _sweep_parser(commands: Any) -> None:
    command = add_command(commands, "sweep", "a grid of certified values: data set, picture and table")
    for parser in mechanism_parsers(command):
        group = parser.add_mutually_exclusive_group(required=True)
        group.add_argument("--delta", metavar="RANGE", help="sweep epsilon at these deltas")
        group.add_argument("--epsilon", metavar="RANGE", help="sweep delta at these epsilons")
        parser.add_argument("--out", metavar="FILE", help=".nc or .zarr; an interrupted sweep goes on from its parts")
        parser.add_argument("--plot", metavar="FILE", help="picture of the sweep (.png, .pdf, .svg)")
        parser.add_argument("--batch-size", type=int, metavar="N", help="grid points evaluated at once")
        parser.add_argument("--quiet", action="store_true", help="no progress bar")
        parser.set_defaults(run=_sweep)


def _plot_parser(commands: Any) -> None:
    command = add_command(commands, "plot", "a picture of a data set written by sweep")
    command.add_argument("dataset", help="a .nc or .zarr file")
    command.add_argument("--out", required=True, metavar="FILE")
    command.set_defaults(run=_plot)


class _Grid:
    """The function that a sweep evaluates: a verb of one mechanism, from named values."""

    def __init__(self, mechanism: str, verb: str, relation: str | None, fixed: dict[str, str]) -> None:
        self.mechanism, self.verb, self.relation, self.fixed = mechanism, verb, relation, fixed

    def __call__(self, **values: Any) -> dict[str, Any]:
        verb = jaxdp.epsilon if self.verb == "epsilon" else jaxdp.delta
        target = values["delta" if self.verb == "epsilon" else "epsilon"]
        return {self.verb: verb(build(self.mechanism, self.fixed | values), target, relation=self.relation)}


def _sweep(arguments: argparse.Namespace) -> None:
    verb, target = ("epsilon", "delta") if arguments.delta is not None else ("delta", "epsilon")
    axes: dict[str, Any] = axes_of(arguments) | {target: parse_range(target, getattr(arguments, target))}
    static = chosen(arguments)
    fixed = {name: values[0] for name, values in static.items() if name == "randomizer" and len(values) == 1}
    axes |= {name: values for name, values in static.items() if name not in fixed}
    make_folders(arguments.out, arguments.plot)
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
    print_table({name: frame[name].tolist() for name in varying}, verb, arguments.json)
    for name in filter(None, (arguments.out, arguments.plot)):
        print(f"written: {name}", file=sys.stderr)


def _plot(arguments: argparse.Namespace) -> None:
    try:
        import xarray
    except ImportError as error:
        raise ImportError('plot needs xarray: pip install "jaxdp-accounting[sweep,plot]".') from error
    make_folders(arguments.out)
    opened = xarray.open_zarr if arguments.dataset.rstrip("/").endswith(".zarr") else xarray.open_dataset
    with opened(arguments.dataset) as dataset:
        _picture(dataset.load(), arguments.out)
    print(f"written: {arguments.out}", file=sys.stderr)


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
