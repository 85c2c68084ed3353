"""Pictures of numbers already computed: matplotlib axes in, the same axes out. Nothing here accounts for anything.

Each function takes the axes first, then an xarray.Dataset such as `jaxdp.sweep` returns. Axis labels and units are read
from the variables' ``long_name`` and ``units``; legends stand outside the curves.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

_LINES = ("-", "--", "-.", ":")


def curves(ax: Any, dataset: Any, x: str, *, y: str | None = None, label: str = "") -> Any:
    """Lines of variable ``y`` against coordinate ``x``, one per point of the remaining dimensions.

    y: default the only variable, or "upper". Dimensions of length 1 go into the title, longer ones into the legend.
    label: text put before the legend entries. A coordinate spaced by
    factors gets a logarithmic axis, as do values that span more than a factor of 30. Returns ax.
    """
    name, values = _variable(dataset, y)
    _check_dims(values, x)
    values, fixed = _squeeze(values, x)
    for i, (choice, line) in enumerate(_lines(values, x)):
        text = ", ".join(filter(None, [label, _describe(dataset, choice)]))
        ax.plot(line[x].values, _visible(line.values), _LINES[i // 10 % 4], label=text or _title(dataset, name))
    _finish(ax, dataset, x, name, fixed, values)
    return ax


def band(ax: Any, dataset: Any, x: str, *, lower: str = "lower", upper: str = "upper", label: str = "") -> Any:
    """The certified interval [lower, upper] against coordinate ``x``, shaded, one band per remaining point.

    Returns ax.
    """
    low, high = _variable(dataset, lower)[1], _variable(dataset, upper)[1]
    _check_dims(high, x)
    low, high = _squeeze(low, x)[0], _squeeze(high, x)
    high, fixed = high
    for (choice, top), (_, bottom) in zip(_lines(high, x), _lines(low, x), strict=True):
        text = ", ".join(filter(None, [label, _describe(dataset, choice)])) or "certified interval"
        ax.fill_between(top[x].values, _visible(bottom.values), _visible(top.values), alpha=0.35, label=text)
    _finish(ax, dataset, x, upper, fixed, high)
    return ax


def heat_map(ax: Any, dataset: Any, x: str, y: str, *, value: str | None = None) -> Any:
    """A map of variable ``value`` over coordinates ``x`` and ``y``, with labelled contour lines and a colour bar.

    The remaining dimensions must have length 1 (choose with ``dataset.sel``). The colour scale is logarithmic;
    points that are 0, infinite or NaN stay white. Returns ax.
    """
    colors, ticker = _require("matplotlib.colors"), _require("matplotlib.ticker")
    name, values = _variable(dataset, value)
    _check_dims(values, x, y)
    values, fixed = _squeeze(values, x, y)
    left = [d for d in values.dims if d not in (x, y)]
    if left:
        raise ValueError(f"heat_map shows two dimensions, got also {left}; choose with dataset.sel(...).")
    table = values.transpose(y, x)
    shown = np.ma.masked_where(~np.isfinite(table.values) | (table.values <= 0), table.values)
    if shown.count() == 0:
        raise ValueError(f"{name} has no positive finite value to show.")
    low, high = float(shown.min()), float(shown.max())
    norm = colors.LogNorm(low, max(high, low * 1.001))
    mesh = ax.pcolormesh(table[x].values, table[y].values, shown, norm=norm, shading="nearest", rasterized=True)
    if min(table.shape) > 1 and high > low * 1.5:
        levels = [v for v in _levels(low, high) if 3 * low < v < high]
        lines = ax.contour(table[x].values, table[y].values, shown, levels=levels, colors="white", linewidths=0.8)
        ax.clabel(lines, fmt=lambda level: f"{level:g}", fontsize=7)
    bar = ax.figure.colorbar(mesh, ax=ax, label=_title(dataset, name))
    bar.ax.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    _scale(ax, table[x].values, "x")
    _scale(ax, table[y].values, "y")
    ax.set(xlabel=_title(dataset, x), ylabel=_title(dataset, y))
    ax.set_title(_wrapped(_describe(dataset, fixed)), fontsize="medium")
    return ax


def _levels(low: float, high: float) -> list[float]:
    steps = (1.0,) if high > 1e4 * low else (1.0, 2.0, 5.0)
    decades = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    return [step * 10.0**decade for decade in decades for step in steps]


def _variable(dataset: Any, name: str | None) -> tuple[str, Any]:
    names = [str(n) for n in dataset.data_vars]
    if name is None:
        name = next((n for n in names if n == "upper" or n.endswith("_upper")), names[0] if len(names) == 1 else None)
    if name not in names:
        raise ValueError(f"variable must be one of {', '.join(map(repr, names))}, got {name!r}.")
    return name, dataset[name]


def _check_dims(values: Any, *names: str) -> None:
    for name in names:
        if name not in values.dims:
            raise ValueError(f"axis must be one of {', '.join(map(repr, values.dims))}, got {name!r}.")


def _squeeze(values: Any, *kept: str) -> tuple[Any, dict[str, Any]]:
    single = [d for d in values.dims if values.sizes[d] == 1 and d not in kept]
    return values.squeeze(single), {d: values[d].values[0] for d in single}


def _lines(values: Any, x: str) -> list[tuple[dict[str, Any], Any]]:
    others = [d for d in values.dims if d != x]
    shape = [values.sizes[d] for d in others]
    picked = []
    for index in np.ndindex(*shape):
        where = dict(zip(others, index, strict=True))
        picked.append(({d: values[d].values[i] for d, i in where.items()}, values.isel(where)))
    return picked


def _visible(values: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(values), values, np.nan)


def _describe(dataset: Any, choice: dict[str, Any]) -> str:
    parts = []
    for name, value in choice.items():
        text = value if isinstance(value, str) else f"{float(value):.4g}"
        parts.append(f"{dataset[name].attrs.get('long_name', name) if name in dataset.coords else name} {text}")
    return ", ".join(parts)


def _wrapped(text: str) -> str:
    return text.replace(", ", ",\n") if len(text) > 60 else text


def _title(dataset: Any, name: str) -> str:
    attrs = dataset[name].attrs
    units = attrs.get("units", "")
    return attrs.get("long_name", name) + (f" [{units}]" if units not in ("", "1") else "")


def _scale(ax: Any, values: np.ndarray, which: str) -> None:
    """A logarithmic axis where the coordinates are spaced by factors rather than by steps."""
    if not np.issubdtype(values.dtype, np.number) or values.size < 3 or not (values > 0).all():
        return
    steps, factors = np.abs(np.diff(values)), np.abs(np.diff(np.log(values)))
    if np.ptp(factors) * steps.mean() < np.ptp(steps) * factors.mean():
        (ax.set_xscale if which == "x" else ax.set_yscale)("log")


def _finish(ax: Any, dataset: Any, x: str, y: str, fixed: dict[str, Any], values: Any) -> None:
    _scale(ax, values[x].values, "x")
    shown = values.values[np.isfinite(values.values) & (values.values > 0)]
    if shown.size and shown.max() > 30 * shown.min():
        ax.set_yscale("log")
    ax.set(xlabel=_title(dataset, x), ylabel=_title(dataset, y))
    if fixed:
        ax.set_title(_wrapped(_describe(dataset, fixed)), fontsize="medium")
    count = len(ax.get_legend_handles_labels()[1])
    if count > 1:
        ax.legend(loc="center left", bbox_to_anchor=(1.02, 0.5), fontsize=8, ncols=1 + (count - 1) // 20)


def _require(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError('plot needs matplotlib: pip install "jaxdp-accounting[plot]".') from error
