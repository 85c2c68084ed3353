"""Plots: each function returns the axes that it was given, with the numbers of the data set drawn and labelled."""

import matplotlib

matplotlib.use("Agg")

import numpy as np
import pytest
import xarray
from matplotlib.figure import Figure
from refusal import refused_in_one_line

import jaxdp
from jaxdp import plot, sweep
from jaxdp.cli.mechanisms import MECHANISMS


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
    drawn = {line.get_label(): line for line in ax.lines}["local epsilon = 8, stronger"]
    np.testing.assert_array_equal(drawn.get_xdata(), dataset.num_users)
    np.testing.assert_array_equal(drawn.get_ydata(), dataset.epsilon.sel(eps0=8.0, bound="stronger"))


def test_labels_hold_units_and_the_legend_stands_outside(dataset):
    ax = plot.curves(axes(), dataset.isel(eps0=[3]), "num_users", y="epsilon")
    assert ax.get_xlabel() == "number of users"
    assert ax.get_ylabel() == "epsilon [nats]"
    assert ax.get_xscale() == ax.get_yscale() == "log"
    assert "local epsilon" in ax.get_title()
    ax.figure.draw_without_rendering()
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


def legend_texts(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def test_colours_tell_one_axis_and_dashes_the_other_in_one_legend(dataset):
    ax = plot.curves(axes(), dataset.isel(eps0=[0, 5]), "num_users", y="epsilon")
    looks = {line.get_label(): (line.get_color(), line.get_linestyle()) for line in ax.lines}
    first, second = (f"local epsilon = {value:.4g}" for value in dataset.eps0.values[[0, 5]])
    assert looks == {
        f"{first}, clones": ("C0", "-"),
        f"{first}, stronger": ("C0", "--"),
        f"{second}, clones": ("C1", "-"),
        f"{second}, stronger": ("C1", "--"),
    }
    assert legend_texts(ax) == [first, second, "clones", "stronger"]


def test_the_caller_chooses_which_axis_the_dashes_tell(dataset):
    ax = plot.curves(axes(), dataset.isel(eps0=[0, 5]), "num_users", y="epsilon", dash="eps0")
    assert legend_texts(ax)[:2] == ["clones", "stronger"]


def test_a_second_call_keeps_colours_and_adds_dashes_to_the_same_legend(dataset):
    points = dataset.isel(eps0=[0, 5], bound=[0])
    ax = plot.curves(axes(), points, "num_users", y="epsilon", label="upper")
    plot.curves(ax, points, "num_users", y="lower", label="lower")
    assert [line.get_color() for line in ax.lines] == ["C0", "C1", "C0", "C1"]
    assert [line.get_linestyle() for line in ax.lines] == ["-", "-", "--", "--"]
    assert legend_texts(ax)[2:] == ["upper", "lower"]
    assert sum(type(child).__name__ == "Legend" for child in ax.get_children()) == 1


def test_the_title_says_only_what_holds_for_every_call(dataset):
    ax = axes()
    for bound in (0, 1):
        one = dataset.isel(eps0=[3], bound=[bound])
        plot.curves(ax, one, "num_users", y="epsilon", label=str(one.bound.values[0]))
    assert ax.get_title().startswith("local epsilon") and "clones" not in ax.get_title()
    assert legend_texts(ax) == ["clones", "stronger"]


def test_the_title_names_what_was_chosen(dataset):
    chosen = dataset.isel(eps0=3, bound=0)
    title = plot.curves(axes(), chosen, "num_users", y="epsilon").get_title()
    assert title.startswith("local epsilon = ") and "clones" in title
    assert "clones" in plot.heat_map(axes(), dataset.isel(bound=0), "eps0", "num_users", value="epsilon").get_title()


def test_the_band_of_bounds_that_meet_is_seen(dataset):
    ax = axes()
    plot.band(ax, dataset.isel(eps0=[3], bound=[0]), "num_users", upper="epsilon")
    assert ax.collections[0].get_linewidth() > 0


def test_the_title_names_the_delta_that_all_points_share():
    data = jaxdp.sweep(lambda sigma: jaxdp.epsilon(jaxdp.Gaussian(sigma), 1e-6), sigma=[1.0, 2.0, 4.0])
    assert plot.curves(axes(), data, "sigma").get_title() == "delta = 1e-06"
    some = jaxdp.sweep(lambda sigma, d: jaxdp.epsilon(jaxdp.Gaussian(sigma), d), sigma=[1.0, 2.0], d=[1e-6, 1e-5])
    assert "delta" not in plot.curves(axes(), some, "sigma").get_title()


def test_false_negative_rates_are_named_and_get_a_linear_axis():
    rates = np.linspace(0, 1, 11)
    data = jaxdp.sweep(lambda k, x: jaxdp.tradeoff(jaxdp.RandomizedResponse(1.0, k), x), k=[2, 3], x=rates)
    assert data.attrs["verb"] == "tradeoff" and list(data.data_vars) == ["tradeoff"]
    ax = plot.curves(axes(), data, "x")
    assert (ax.get_ylabel(), ax.get_yscale()) == ("false negative rate", "linear")

    def missed(k, x):
        return jaxdp.tradeoff(jaxdp.RandomizedResponse(1.0, k), x)

    assert plot.curves(axes(), jaxdp.sweep(missed, k=[2, 3], x=rates), "x").get_yscale() == "linear"


def test_a_title_of_the_callers_stays(dataset):
    ax = axes()
    ax.set_title("mine")
    assert plot.curves(ax, dataset.isel(eps0=[3]), "num_users", y="epsilon").get_title() == "mine"
    assert plot.heat_map(ax, dataset.isel(bound=[0]), "eps0", "num_users", value="epsilon").get_title() == "mine"


def test_cleared_axes_start_with_the_first_colour_and_a_new_title(dataset):
    ax = plot.curves(axes(), dataset.isel(eps0=[3]), "num_users", y="epsilon", label="old")
    ax.clear()
    plot.curves(ax, dataset.isel(eps0=[4], bound=[0]), "num_users", y="epsilon")
    assert ax.lines[0].get_color() == "C0" and "clones" in ax.get_title() and ax.get_legend() is None
    ax.clear()
    assert "stronger" in plot.heat_map(ax, dataset.isel(bound=[-1]), "eps0", "num_users", value="epsilon").get_title()


def test_keywords_reach_matplotlib_under_all_their_names(dataset):
    one = dataset.isel(eps0=[3], bound=[0])
    line = plot.curves(axes(), one, "num_users", y="epsilon", c="k", lw=3, ls=":", marker="o").lines[0]
    assert (line.get_color(), line.get_linewidth(), line.get_linestyle(), line.get_marker()) == ("k", 3, ":", "o")
    assert plot.band(axes(), one, "num_users", upper="epsilon", hatch="//").collections[0].get_hatch() == "//"
    drawn = plot.heat_map(axes(), dataset.isel(bound=[0]), "eps0", "num_users", value="epsilon", cmap="magma")
    assert drawn.collections[0].get_cmap().name == "magma"


def test_the_legend_is_placed_or_left_out(dataset):
    assert plot.curves(axes(), dataset, "num_users", y="epsilon", legend=None).get_legend() is None
    ax = plot.curves(axes(), dataset.isel(eps0=[3]), "num_users", y="epsilon", legend="upper right")
    ax.figure.draw_without_rendering()
    assert ax.get_legend().get_window_extent().x1 <= ax.get_window_extent().x1


def test_subplots_with_long_labels_titles_and_legends_do_not_overlap(dataset):
    dataset.num_users.attrs["long_name"] = "number of users, each of whom sends one report"
    figure = Figure(figsize=(12, 4))
    subplots = figure.subplots(1, 3)
    plot.curves(subplots[0], dataset.isel(eps0=[3]), "num_users", y="epsilon")
    plot.band(subplots[1], dataset.isel(eps0=[0, 3, 5], bound=[1]), "num_users", upper="epsilon", legend="best")
    plot.heat_map(subplots[2], dataset.isel(bound=[0]), "eps0", "num_users", value="epsilon")
    figure.draw_without_rendering()
    boxes = [ax.get_tightbbox() for ax in subplots]
    assert boxes[0].x1 <= boxes[1].x0 and boxes[1].x1 <= boxes[2].x0
    assert boxes[2].x1 <= figure.axes[3].get_tightbbox().x1 <= figure.bbox.x1


def test_axes_of_a_subfigure_are_drawn_on_like_others(dataset):
    figure = Figure(figsize=(12, 4))
    left, right = (part.subplots() for part in figure.subfigures(1, 2))
    title = plot.curves(left, dataset.isel(eps0=[3]), "num_users", y="epsilon").get_title()
    plot.heat_map(right, dataset.isel(bound=[0]), "eps0", "num_users", value="epsilon")
    assert title == plot.curves(axes(), dataset.isel(eps0=[3]), "num_users", y="epsilon").get_title()
    assert figure.get_layout_engine() is not None


def test_short_logarithmic_axes_have_a_label_at_one_two_and_five(dataset):
    dataset = dataset.assign_coords(num_users=("num_users", np.geomspace(1, 4, 7), dataset.num_users.attrs))
    ax = plot.curves(axes(), dataset.isel(eps0=[3]), "num_users", y="epsilon")
    ax.figure.draw_without_rendering()
    shown = [label.get_text() for label in ax.get_xticklabels(which="both") if label.get_text()]
    assert {"1", "2", "5"} <= set(shown) <= {"0.1", "0.2", "0.5", "1", "2", "5", "10"}


def test_every_number_of_the_command_line_has_a_unit():
    for mechanism in MECHANISMS.values():
        for option in mechanism.options:
            values = sweep(lambda **axes: sum(axes.values()), **{option.name: [1.0, 2.0]})
            assert values[option.name].attrs["units"], option.name


def test_two_sided_sweeps_say_whose_bounds_they_are():
    data = sweep(lambda sigma: jaxdp.epsilon_bounds(jaxdp.Gaussian(sigma), 1e-6), sigma=[1.0, 2.0])
    ax = plot.curves(axes(), data, "sigma")
    assert ax.get_ylabel().replace("\n", " ") == "epsilon, certified upper bound [nats]"
    assert plot.curves(ax, data, "sigma", y="lower").get_ylabel() == "epsilon [nats]"


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
        (lambda d: plot.curves(axes(), d, "sigma", y="epsilon"), "x must be one of 'eps0'"),
        (lambda d: plot.curves(axes(), d, "eps0", y="delta"), "one of 'epsilon', 'lower', got 'delta'"),
        (lambda d: plot.curves(axes(), d, "eps0"), "variable must be one of"),
        (lambda d: plot.curves(axes(), d + np.inf, "eps0", y="epsilon"), "epsilon has no finite value"),
        (lambda d: plot.curves(axes(), d.epsilon, "eps0"), "dataset must be an xarray.Dataset"),
        (lambda d: plot.curves(None, d, "eps0", y="epsilon"), "ax must be the axes of a figure"),
        (
            lambda d: plot.curves(axes(), d, "eps0", y="epsilon", dash="eps0"),
            "dash must be one of 'num_users', 'bound'",
        ),
        (lambda d: plot.heat_map(axes(), d, "eps0", "num_users", value="epsilon"), "choose with dataset.sel"),
        (lambda d: plot.heat_map(axes(), 0 * d.isel(bound=[0]), "eps0", "num_users", value="epsilon"), "no positive"),
    ],
)
def test_what_cannot_be_drawn_is_one_line(dataset, draw, message):
    with refused_in_one_line((ValueError, TypeError), message):
        draw(dataset)


def test_a_single_point_is_drawn_with_a_marker(dataset):
    ax = plot.curves(axes(), dataset.isel(eps0=[0], num_users=[0], bound=[0]), "eps0", y="epsilon")
    assert ax.lines[0].get_marker() == "o"


def test_more_lines_than_colours_are_told_apart_by_dashes():
    axes = dict(n=[1.0, 2.0], rounds=[1.0, 2.0, 3.0, 4.0], eps0=[0.5, 1.0, 2.0])
    data = xarray.Dataset({"upper": (tuple(axes), np.ones((2, 4, 3)))}, axes)
    ax = jaxdp.plot.curves(Figure().subplots(), data, "n")
    looks = {(line.get_color(), line.get_linestyle()) for line in ax.get_lines()}
    assert len(looks) == len(ax.get_lines()) == 12
