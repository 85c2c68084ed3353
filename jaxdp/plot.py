"""Pictures of computed numbers: each function draws on matplotlib axes and returns them.

The arguments are the axes, then an xarray.Dataset such as `jaxdp.sweep` returns. Labels and units of the axes are read
from the variables' ``long_name`` and ``units``. Several calls may draw on the same axes: a point of the grid keeps its
colour, there is one legend, and a title that the axes have already stays. Without matplotlib, importing this module is
an ImportError that names the extra.
"""

from __future__ import annotations

import functools
import textwrap
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxdp import validate
from jaxdp.runtime.extras import require

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from xarray import DataArray, Dataset

__all__ = ["band", "curves", "heat_map"]

cbook, colors, lines, patches, ticker = (
    require(f"matplotlib.{name}", "plot", "plot") for name in ("cbook", "colors", "lines", "patches", "ticker")
)
_COLORS = 10
_TARGETS = "delta", "epsilon", "order"  # attributes of a data set that the title shows
_DASHES = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 3)))


def curves(
    ax: Axes,
    dataset: Dataset,
    x: str,
    *,
    y: str | None = None,
    dash: str | None = None,
    label: str = "",
    legend: str | None = "outside",
    **style: object,
) -> Axes:
    """Lines of variable ``y`` against coordinate ``x``, one per point of the remaining dimensions.

    y: default the only variable, or "upper".
    dash: the dimension whose values are distinguished by the dashes of the lines; colours distinguish all others.
        Default, if there is another dimension for the colours: a dimension of names (such as "bound"), or else the
        shortest dimension of at most six values.
    label: what the legend says of these lines, such as "upper bound". Needed where several calls share the axes.
    legend: "outside" (right of the axes), a place that ``Axes.legend`` knows ("best", "upper left", ...), or None for
        no legend. A single curve gets no legend.
    style: keywords of ``Axes.plot`` (``color``, ``linestyle``, ``marker``, ``linewidth``, ...), for all lines drawn.

    The title shows the values of dimensions of length 1 and the delta, epsilon or order that all points share, unless
    the axes have a title. Coordinates spaced by factors get a logarithmic axis, as do values that span more than a
    factor of 30, but not false negative rates. Infinite and NaN values are left out. A
    figure without a layout engine gets the constrained one, which keeps subplots and legends apart.
    Returns ax. Raises ValueError for an unknown x, y or dash, or nothing finite to show.

    >>> from matplotlib.figure import Figure
    >>> data = jaxdp.sweep(lambda sigma: jaxdp.epsilon(jaxdp.Gaussian(sigma), 1e-6), sigma=[1.0, 2.0, 4.0])
    >>> jaxdp.plot.curves(Figure().subplots(), data, "sigma", marker="o").get_ylabel()
    'epsilon [nats]'
    """
    name, values, fixed = _variable(dataset, y, x)
    if dash is not None:
        validate.choice("dash", dash, tuple(d for d in dataset.dims if d != x))
    elif values.ndim > 2:
        few = [str(d) for d in values.dims if d != x and values.sizes[d] <= len(_DASHES)]
        names = [d for d in few if not np.issubdtype(values[d].dtype, np.number)]
        dash = next(reversed(names or sorted(few, key=lambda d: -values.sizes[d])), None)
    key, given = _key(ax), cbook.normalize_kwargs(style, lines.Line2D)
    key.implied |= set() if label else {_title(dataset, name)}
    for choice, line in _lines(values, x):
        look = key.look(*_texts(dataset, choice, dash, label, _title(dataset, name)), given)
        ax.plot(line[x].values, line.values, **({"marker": "o"} if line.size == 1 else {}) | look)
    _finish(ax, key, dataset, x, name, fixed, values)
    key.draw(ax, legend)
    return ax


def band(
    ax: Axes,
    dataset: Dataset,
    x: str,
    *,
    lower: str = "lower",
    upper: str = "upper",
    label: str = "",
    legend: str | None = "outside",
    **style: object,
) -> Axes:
    """Shaded bands of the interval [lower, upper] against coordinate ``x``, one per point of the other dimensions.

    label, legend: as in `curves`. style: keywords of ``Axes.fill_between`` (``color``, ``alpha``, ``hatch``, ...).
    Returns ax. Raises ValueError for an unknown x, lower or upper.

    >>> from matplotlib.figure import Figure
    >>> data = jaxdp.sweep(lambda sigma: jaxdp.epsilon_bounds(jaxdp.Gaussian(sigma), 1e-6), sigma=[1.0, 2.0, 4.0])
    >>> len(jaxdp.plot.band(Figure().subplots(), data, "sigma").collections)
    1
    """
    (_, low, _), (_, high, fixed) = _variable(dataset, lower, x), _variable(dataset, upper, x)
    key, given = _key(ax), {"alpha": 0.3, "linewidth": 1.0} | cbook.normalize_kwargs(style, patches.Patch)
    key.implied |= set() if label else {"certified interval"}
    for (choice, top), (_, bottom) in zip(_lines(high, x), _lines(low, x), strict=True):
        look = key.look(*_texts(dataset, choice, None, label, "certified interval"), given, filled=True)
        ax.fill_between(top[x].values, bottom.values, top.values, **look)
    for name, values in ((lower, low), (upper, high)):
        _finish(ax, key, dataset, x, name, fixed, values)
    key.draw(ax, legend)
    return ax


def heat_map(ax: Axes, dataset: Dataset, x: str, y: str, *, value: str | None = None, **style: object) -> Axes:
    """A map of variable ``value`` over coordinates ``x`` and ``y``, with labelled contour lines and a colour bar.

    value: default the only variable, or "upper". style: keywords of ``Axes.pcolormesh`` (``cmap``, ``norm``, ...).

    The remaining dimensions must have length 1 (choose with ``dataset.sel``). The title shows their values and the
    chosen ones, unless the axes have a title. The colour scale is logarithmic; points that are not finite and above 0
    stay white.
    Returns ax. Raises ValueError for unknown names, further dimensions, or nothing positive to show.

    >>> from matplotlib.figure import Figure
    >>> verb = lambda sigma, delta: jaxdp.epsilon(jaxdp.Gaussian(sigma), delta)
    >>> data = jaxdp.sweep(verb, sigma=[1.0, 2.0, 4.0], delta=[1e-6, 1e-5])
    >>> jaxdp.plot.heat_map(Figure().subplots(), data, "sigma", "delta", cmap="magma").get_ylabel()
    'delta'
    """
    key = _key(ax)
    name, values, fixed = _variable(dataset, value, x, y)
    left = [d for d in values.dims if d not in (x, y)]
    if left:
        raise ValueError(f"heat_map shows two dimensions, got also {left}; choose with dataset.sel(...).")
    table = values.transpose(y, x)
    shown = np.ma.masked_where(~np.isfinite(table.values) | (table.values <= 0), table.values)
    if shown.count() == 0:
        raise ValueError(f"{name} has no positive finite value to show.")
    low, high = float(shown.min()), float(shown.max())
    norm = colors.LogNorm(low, max(high, low * 1.001))
    look: dict[str, Any] = {"norm": norm, "shading": "nearest", "rasterized": True} | style
    mesh = ax.pcolormesh(table[x].values, table[y].values, shown, **look)
    _scale(ax, table[x].values, "x")  # the scale must be set before the labels of the contour lines are placed
    _scale(ax, table[y].values, "y")
    if min(table.shape) > 1 and high > low * 1.5:
        round_numbers = ticker.LogLocator(subs=(1.0,) if high > 1e4 * low else (1.0, 2.0, 5.0), numticks=1000)
        levels = [v for v in round_numbers.tick_values(low, high) if 3 * low < v < high]
        contours = ax.contour(table[x].values, table[y].values, shown, levels=levels, colors="white", linewidths=0.8)
        ax.clabel(contours, fmt="{:g}".format, fontsize=7)
    _keep_apart(ax)
    bar = ax.figure.colorbar(mesh, ax=ax, label=_title(dataset, name))
    bar.ax.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
    ax.set(xlabel=_wrapped(ax, _title(dataset, x)), ylabel=_wrapped(ax, _title(dataset, y), upright=True))
    _head(ax, key, dataset, fixed)
    return ax


class _Key:
    """The legend entries of one axes: the text of each colour and each dash pattern, over all calls on these axes.

    implied: texts that name the quantity, not the caller's label. fixed: what all calls have in common, for the title.
    """

    def __init__(self) -> None:
        self.colors: dict[str, Any] = {}
        self.dashes: dict[str, Any] = {}
        self.handles: dict[str, Artist] = {}
        self.implied: set[str] = set()
        self.fixed: list[str] | None = None
        self.title = ""

    def look(self, color: str, dash: str, given: dict[str, Any], *, filled: bool = False) -> dict[str, Any]:
        """Style of one line or band: the colour and dashes of its texts; the keywords ``given`` override them."""
        look = {"color": self.colors.setdefault(color, given.get("color", f"C{len(self.colors) % _COLORS}"))} | given
        if not filled:
            free = [d for d in _DASHES if d not in self.dashes.values()] or _DASHES
            look["linestyle"] = given.get("linestyle", self.dashes.setdefault(dash, free[0]))
            self.dashes[dash] = look["linestyle"]
        make = patches.Patch if filled else functools.partial(lines.Line2D, [], [])
        if color:
            style = look if not dash or filled else look | {"linestyle": "-"}
            self.handles.setdefault(color, make(**style))
        if dash:
            self.handles.setdefault(dash, make(**look | {"color": given.get("color", "0.35")}))
        return look | {"label": ", ".join(filter(None, [color, dash]))}

    def draw(self, ax: Axes, place: str | None) -> None:
        """Draws one legend for all calls so far, colours before dashes. A single entry gets no legend."""
        order = [text for text in (*self.colors, *self.handles) if text in self.handles]
        handles = {text: self.handles[text] for text in dict.fromkeys(order)}
        if len(handles.keys() - self.colors) == 1:  # only colours distinguish the lines: leave out implied texts
            handles = {text: handle for text, handle in handles.items() if text not in self.implied}
        if place is None or len(handles) < 2:
            return
        outside = {"loc": "center left", "bbox_to_anchor": (1.02, 0.5), "ncols": 1 + (len(handles) - 1) // 20}
        where: dict[str, Any] = outside if place == "outside" else {"loc": place}
        ax.legend(list(handles.values()), list(handles), fontsize="small", **where)


_KEYS: weakref.WeakKeyDictionary[Axes, _Key] = weakref.WeakKeyDictionary()


def _key(ax: Axes) -> _Key:
    if not hasattr(ax, "has_data"):
        raise TypeError(f"ax must be the axes of a figure, such as plt.subplots()[1], got {type(ax).__name__}.")
    if ax not in _KEYS or not ax.has_data():  # new axes, or axes cleared since the last call
        _KEYS[ax] = _Key()
    return _KEYS[ax]


def _variable(dataset: Dataset, name: str | None, *kept: str) -> tuple[str, DataArray, dict[str, Any]]:
    """A variable's name, its values squeezed except for the dimensions ``kept``, and its scalar coordinates."""
    if not hasattr(dataset, "data_vars"):
        raise TypeError(f"dataset must be an xarray.Dataset, such as sweep returns, got {type(dataset).__name__}.")
    names = [str(n) for n in dataset.data_vars]
    if name is None:
        name = next((n for n in names if n == "upper" or n.endswith("_upper")), names[0] if len(names) == 1 else None)
    found: str = validate.choice("variable", name, tuple(names))
    values = dataset[found]
    for axis, dimension in zip("xy", kept, strict=False):
        validate.choice(axis, dimension, values.dims)
    if not np.isfinite(values.values).any():
        raise ValueError(f"{found} has no finite value to show.")
    values = values.squeeze([d for d in values.dims if values.sizes[d] == 1 and d not in kept])
    fixed = {name: dataset.attrs[name] for name in _TARGETS if name in dataset.attrs and name not in dataset.variables}
    fixed = {name: float(value) for name, value in fixed.items() if "," not in value}
    return found, values, fixed | {str(c): values[c].values[()] for c in values.coords if values[c].ndim == 0}


def _lines(values: DataArray, x: str) -> Iterator[tuple[dict[str, Any], DataArray]]:
    others = [str(d) for d in values.dims if d != x]
    values = values.where(np.isfinite(values))  # infinite values become NaN, a gap in the line
    for index in np.ndindex(*(values.sizes[d] for d in others)):
        where = dict(zip(others, index, strict=True))
        yield {d: values[d].values[i] for d, i in where.items()}, values.isel(where)


def _texts(dataset: Dataset, choice: dict[str, Any], dash: str | None, label: str, otherwise: str) -> tuple[str, str]:
    """Legend texts of one line: for its colour and for its dashes. otherwise: the text of a line that has no other."""
    color = _describe(dataset, {d: v for d, v in choice.items() if d != dash})
    dashes = _describe(dataset, {d: v for d, v in choice.items() if d == dash})
    if color:
        return color, ", ".join(filter(None, [label, dashes])) or otherwise
    return (label, dashes) if dashes else (label or otherwise, "")


def _describe(dataset: Dataset, choice: dict[str, Any]) -> str:
    parts = []
    for name, value in choice.items():
        long_name = dataset[name].attrs.get("long_name", name) if name in dataset.coords else name
        parts.append(value if isinstance(value, str) else f"{long_name.split(' (')[0]} = {_number(float(value))}")
    return ", ".join(parts)


def _number(value: float) -> str:
    return f"{value:.0f}" if value == np.round(value) and 1e3 <= abs(value) < 1e6 else f"{value:.4g}"


def _title(dataset: Dataset, name: str) -> str:
    attrs = dataset[name].attrs
    units = attrs.get("units", "")
    return attrs.get("long_name", name) + (f" [{units}]" if units not in ("", "1") else "")


def _scale(ax: Axes, values: np.ndarray, which: str) -> None:
    """Makes the axis logarithmic where the coordinates are spaced by factors rather than by steps."""
    if not np.issubdtype(values.dtype, np.number) or values.size < 3 or not (values > 0).all():
        return
    steps, factors = np.abs(np.diff(values)), np.abs(np.diff(np.log(values)))
    if np.ptp(factors) * steps.mean() < np.ptp(steps) * factors.mean():
        (ax.set_xscale if which == "x" else ax.set_yscale)("log")
        _few_ticks(ax.xaxis if which == "x" else ax.yaxis, values)


def _few_ticks(axis: Axis, values: np.ndarray) -> None:
    """Sets ticks 1, 2, 5, 10, ... on a logarithmic axis of less than two decades, where matplotlib's labels overlap."""
    if values.max() < 100 * values.min():
        axis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
        axis.set_minor_formatter(ticker.NullFormatter())


def _finish(ax: Axes, key: _Key, dataset: Dataset, x: str, y: str, fixed: dict[str, Any], values: DataArray) -> None:
    _scale(ax, values[x].values, "x")
    shown = values.values[np.isfinite(values.values) & (values.values > 0)]
    if shown.size and shown.max() > 30 * shown.min() and "tradeoff" not in (y, dataset.attrs.get("verb")):
        ax.set_yscale("log")
        _few_ticks(ax.yaxis, shown)
    quantity = _shared(ax.get_ylabel().replace("\n", " "), _title(dataset, y))
    ax.set(xlabel=_wrapped(ax, _title(dataset, x)), ylabel=_wrapped(ax, quantity, upright=True))
    _head(ax, key, dataset, fixed)
    _keep_apart(ax)


def _shared(before: str, title: str) -> str:
    """The label of the y axis: ``title``, or "epsilon [nats]" where it shows an upper and a lower bound of epsilon."""
    quantity, units = title.split(", ")[0].split(" [")[0], title.partition(" [")[2]
    if not before or before == title:
        return title
    if not before.startswith(quantity):
        return before
    return f"{quantity} [{units}" if units else quantity


def _head(ax: Axes, key: _Key, dataset: Dataset, fixed: dict[str, Any]) -> None:
    """Sets the title, no wider than the axes, to the values that all calls have in common. The caller's title stays."""
    parts = [_describe(dataset, {name: value}) for name, value in fixed.items()]
    key.fixed = parts if key.fixed is None else [part for part in key.fixed if part in parts]
    if ax.get_title() == key.title:
        key.title = _wrapped(ax, ", ".join(key.fixed))
        ax.set_title(key.title, fontsize="medium")


def _wrapped(ax: Axes, text: str, *, upright: bool = False) -> str:
    """The text in lines no longer than the axes are wide (or high: ``upright``), at 6 points per character."""
    inches = (ax.bbox.height if upright else ax.bbox.width) / ax.figure.dpi
    return textwrap.fill(text, max(16, int(72 * inches / 6)))


def _keep_apart(ax: Axes) -> None:
    """Gives a figure without layout engine the constrained one. A colour bar fixes the layout: call this before it."""
    whole = ax.figure.figure
    if whole.get_layout_engine() is None:
        whole.set_layout_engine("constrained")
