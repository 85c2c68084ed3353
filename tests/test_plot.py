"""Plots: the axes that come in go out with the numbers drawn, labelled, and nothing computed."""

import matplotlib

matplotlib.use("Agg")

import numpy as np
import pytest
import xarray
from matplotlib.figure import Figure

from jaxdp import plot


def axes():
    return Figure(figsize=(6, 4)).subplots()


@pytest.fixture
def dataset():
    eps0, users, bounds = np.linspace(0.1, 8, 12), np.geomspace(1e3, 1e9, 7), ["clones", "stronger"]
    upper = eps0[:, None, None] / np.sqrt(users)[None, :, None] * np.array([100.0, 80.0])
    dims = ("eps0", "num_users", "bound")
    return xarray.Dataset(
        {"epsilon": (dims, upper, {"long_name": "epsilon", "units": "nats"}), "lower": (dims, upper / 2)},
        {
            "eps0": ("eps0", eps0, {"long_name": "local epsilon", "units": "nats"}),
            "num_users": ("num_users", users, {"long_name": "number of users", "units": "1"}),
            "bound": ("bound", bounds),
        },
    )


def test_curves_draw_the_numbers_as_they_are(dataset):
    ax = axes()
    assert plot.curves(ax, dataset, "num_users", y="epsilon") is ax
    assert len(ax.lines) == 24
    drawn = {line.get_label(): line for line in ax.lines}["local epsilon 8, stronger".replace(", ", ", bound ")]
    np.testing.assert_array_equal(drawn.get_xdata(), dataset.num_users)
    np.testing.assert_array_equal(drawn.get_ydata(), dataset.epsilon.sel(eps0=8.0, bound="stronger"))


def test_labels_hold_units_and_the_legend_stands_outside(dataset):
    ax = plot.curves(axes(), dataset.isel(eps0=[3]), "num_users", y="epsilon")
    assert ax.get_xlabel() == "number of users"
    assert ax.get_ylabel() == "epsilon [nats]"
    assert ax.get_xscale() == ax.get_yscale() == "log"
    assert "local epsilon" in ax.get_title()
    ax.figure.canvas.draw()
    assert ax.get_legend().get_window_extent().x0 >= ax.get_window_extent().x1


def test_a_short_span_stays_linear_and_a_single_curve_needs_no_legend(dataset):
    ax = plot.curves(axes(), dataset.isel(num_users=[0], bound=[0], eps0=slice(6, None)), "eps0", y="epsilon")
    assert ax.get_xscale() == ax.get_yscale() == "linear"
    assert ax.get_legend() is None


def test_infinite_values_leave_a_gap_and_not_a_line_to_the_edge(dataset):
    dataset.epsilon[2, :, 0] = np.inf
    line = plot.curves(axes(), dataset.isel(num_users=[0], bound=[0]), "eps0", y="epsilon").lines[0]
    assert np.isnan(line.get_ydata()[2]) and np.isfinite(np.delete(line.get_ydata(), 2)).all()


def test_a_band_is_shaded_between_the_bounds(dataset):
    ax = plot.band(axes(), dataset.isel(eps0=[3], bound=[0]), "num_users", upper="epsilon")
    corners = ax.collections[0].get_paths()[0].vertices
    expected = dataset.isel(eps0=3, bound=0)
    assert corners[:, 1].max() == pytest.approx(expected.epsilon.max().item())
    assert corners[:, 1].min() == pytest.approx(expected.lower.min().item())


def test_a_heat_map_has_contours_and_a_labelled_colour_bar(dataset):
    ax = plot.heat_map(axes(), dataset.isel(bound=[0]), "eps0", "num_users", value="epsilon")
    expected = dataset.epsilon.isel(bound=0).transpose("num_users", "eps0")
    np.testing.assert_array_equal(np.ravel(ax.collections[0].get_array()), np.ravel(expected))
    assert len(ax.collections) > 1  # contour lines on top of the mesh
    assert ax.figure.axes[1].get_ylabel() == "epsilon [nats]"
    assert (ax.get_xlabel(), ax.get_yscale()) == ("local epsilon [nats]", "log")


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda d: plot.curves(axes(), d, "sigma", y="epsilon"), "axis must be one of 'eps0'"),
        (lambda d: plot.curves(axes(), d, "eps0", y="delta"), "one of 'epsilon', 'lower', got 'delta'"),
        (lambda d: plot.curves(axes(), d, "eps0"), "variable must be one of"),
        (lambda d: plot.heat_map(axes(), d, "eps0", "num_users", value="epsilon"), "choose with dataset.sel"),
        (lambda d: plot.heat_map(axes(), 0 * d.isel(bound=[0]), "eps0", "num_users", value="epsilon"), "no positive"),
    ],
)
def test_what_cannot_be_drawn_is_one_sentence(dataset, draw, message):
    with pytest.raises(ValueError, match=message):
        draw(dataset)
