"""`Rows` lets NumPy compute many points at once: the results equal those of one point at a time."""

import jax
import numpy as np
import pytest

import jaxdp
from jaxdp.interval import Bounds
from jaxdp.iteration import isotonic
from jaxdp.mechanisms.composition import normal_form
from jaxdp.runtime.arrays import on_host, xp
from jaxdp.runtime.precision import expecting
from jaxdp.runtime.rows import Rows
from jaxdp.shuffle import bounds, law
from jaxdp.shuffle.law import Law
from jaxdp.sources import contour, renyi

NUMBERS = np.random.default_rng(1)
X, Y = NUMBERS.uniform(0.1, 2.0, (2, 7, 5))
SQUARE = NUMBERS.uniform(0.1, 2.0, (7, 5, 5))
ONE = NUMBERS.uniform(0.1, 2.0, 7)
PLACE = NUMBERS.integers(0, 5, 7)
PLACES = NUMBERS.integers(0, 5, (7, 3))
SAME = np.arange(1.0, 6.0)


def halved(limit, x):
    """x halved until it is at most ``limit``, plus 100 times the number of halvings, which differs between points."""
    state = xp.while_loop(lambda s: s[0] > limit, lambda s: (s[0] / 2, s[1] + 1), (x, xp.zeros(())))
    return state[0] + 100 * state[1]


CASES = {
    "axes of length 1 come after that of the points": lambda: (lambda x, one: one * x + SAME * one, X, ONE),
    "a matrix beside a vector": lambda: (lambda s, x: s * x + x[:, None] - SAME, SQUARE, X),
    "comparisons and choices": lambda: (lambda x, y, one: xp.where((x > y) & (x > one), x, -SAME), X, Y, ONE),
    "sums": lambda: (lambda s: xp.sum(s) + xp.sum(s, axis=-1) * xp.max(s, axis=0) + xp.min(s, keepdims=True), SQUARE),
    "sums over two axes": lambda: (lambda s: xp.sum(s[None], axis=(1, 2)), SQUARE),
    "running sums": lambda: (lambda s: xp.cumsum(s, axis=1) + xp.cumprod(s, axis=0) + xp.cummax(s, axis=1), SQUARE),
    "one place each": lambda: (lambda x, place: x[place] + x[1 - place % 2], X, PLACE),
    "some places each": lambda: (lambda x, places: x[places] + x[0], X, PLACES),
    "a table of constants": lambda: (lambda place: xp.lookup(SAME, place), PLACE),
    "the largest": lambda: (lambda x: x[xp.argmax(x)] - x[xp.argmin(x)] + x[xp.argsort(-x)[:3]][2], X),
    "in order": lambda: (lambda x: x[xp.argsort(-x)], X),
    "sorted, and differences": lambda: (lambda s: xp.diff(xp.sort(s, axis=-1)[0]), SQUARE),
    "padded": lambda: (
        lambda x, s: xp.sum(xp.pad(s, ((0, 1), (2, 0))), axis=0)[1:-1] + xp.pad(x, (1, 0))[0],
        X,
        SQUARE,
    ),
    "broadcast": lambda: (lambda x, one: xp.stack(xp.broadcast_arrays(x, one, SAME)), X, ONE),
    "joined": lambda: (lambda x, y: xp.concatenate([x, SAME, y]) * xp.append(xp.append(x, y), SAME), X, Y),
    "stacked": lambda: (lambda x, y: xp.stack([x, y, SAME], axis=1), X, Y),
    "unpacked": lambda: (lambda x: sum(part for part in x) + len(x.shape), X),
    "weights": lambda: (lambda s, x: xp.exact_matmul(s, SAME) + xp.exact_matmul(x, SAME), SQUARE, X),
    "products of matrices": lambda: (lambda s, x: xp.exact_matmul(s, s) + xp.exact_matmul(SAME, x), SQUARE, X),
    "shapes": lambda: (
        lambda s: s.reshape(-1)[3] * xp.reshape(s.T, (25, 1)) + xp.moveaxis(s, -1, 0).reshape(25, 1),
        SQUARE,
    ),
    "one value for each": lambda: (lambda x, one: xp.full_like(x, one) + xp.broadcast_to(one, x.shape), X, ONE),
    "along an axis": lambda: (lambda s: xp.take_along_axis(s, xp.argmin(s, axis=1)[:, None], 1), SQUARE),
    "along an axis of a table": lambda: (lambda place: xp.take_along_axis(SAME[None], place[None, None], 1), PLACE),
    "between two ends": lambda: (lambda x, one: xp.linspace(0.0, x, 4, axis=-1) * xp.linspace(one, 3.0, 4), X, ONE),
    "complex numbers": lambda: (
        lambda x, one: xp.real(xp.complex(x, one) ** 2) + xp.imag(xp.complex(x, 0.0)) + xp.iscomplexobj(x),
        X,
        ONE,
    ),
    "parts": lambda: (lambda x: xp.split(x, [2])[1], X),
    "one place changed": lambda: (lambda x, one: xp.set_at(x, -1, one), X, ONE),
    "one place each changed": lambda: (lambda x, place, one: xp.set_at(x, place, one), X, PLACE, ONE),
    "a place each of the same changed": lambda: (lambda place, x: xp.set_at(xp.zeros(5), place, x[0]), PLACE, X),
    "a place of their own each": lambda: (lambda x, place: xp.lookup(x, place), X, PLACE),
    "a scan": lambda: (lambda x: xp.scan(lambda s, a: (s + a, s * a), xp.zeros(()), x, reverse=True)[1], X),
    "functions": lambda: (
        lambda x: xp.erf(x) + xp.round(x) + xp.zeros_like(x) + xp.logsumexp(x, axis=0) + xp.bits(x) % 7,
        X,
    ),
    "loops": lambda: (lambda one, x: halved(0.05 * one, xp.max(x)), ONE, X),
    "loops of as many turns": lambda: (lambda one: halved(0.5, one) + xp.fori_loop(0, 3, lambda i, s: s + i, one), ONE),
    "branches": lambda: (lambda one, x: xp.cond(one > 1, lambda a: a + 1, lambda a: -a, x), ONE, X),
    "a map over an axis": lambda: (
        lambda s, x: xp.vmap(lambda a, b: a * xp.sum(b), in_axes=(0, None))(s, x),
        SQUARE,
        X,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_code_of_one_point_computes_all_of_them(name):
    function, *arguments = CASES[name]()
    with on_host(many=True):
        together = function(*(Rows(argument) for argument in arguments))
    with on_host():
        each = [function(*(argument[i] for argument in arguments)) for i in range(7)]
    np.testing.assert_allclose(together.data, np.stack(each), rtol=1e-14)
    assert together.shape == np.shape(each[0]) and together.ndim == np.ndim(each[0])


def test_what_is_not_known_of_many_points_is_refused():
    with on_host(many=True):
        for wrong in (
            lambda x: np.fft.fft(x),
            lambda x: SAME[x],
            lambda x: bool(x > 1),
            lambda x: np.add.outer(x, SAME),
        ):
            with pytest.raises((TypeError, IndexError)):
                wrong(Rows(X))


def random_laws(kind):
    """(local epsilons, their laws of one report, stacked); kind "any": random tables, whatever the epsilon."""
    NUMBERS.bit_generator.state = np.random.default_rng(3).bit_generator.state  # independent of earlier draws
    eps0 = NUMBERS.uniform(0.2, 3.0, 40)
    with on_host():
        laws = [law.clones(x, "clones") if kind == "clones" else other_law(kind, x) for x in eps0]
    return eps0, jax.tree_util.tree_map(lambda *parts: np.stack(parts), *laws)


def other_law(kind, eps0):
    if kind == "two":
        return Law(*(np.asarray(part)[1] for part in law.two_point(eps0)))
    table = NUMBERS.dirichlet(np.ones(5), 3)
    return law.finite_law(table, 0, 1)


CLOSE = ("13 nodes", "clones"), ("13 nodes", "any"), ("counts", "clones"), ("two", "two")


@pytest.mark.parametrize(
    ("source", "kind", "verb"),
    [("nodes", "any", "log_delta"), *((*each, verb) for each in CLOSE for verb in ("log_delta", "epsilon"))],
)
def test_kernels_have_the_same_bounds_for_many_points_as_for_one(source, kind, verb):
    eps0, laws = random_laws(kind)
    users = np.floor(10 ** NUMBERS.uniform(1, 7, eps0.size))
    wanted = (
        10 ** NUMBERS.uniform(-14, -2, eps0.size) if verb == "epsilon" else eps0 * NUMBERS.uniform(0, 0.7, eps0.size)
    )
    arguments = [laws, users, wanted]
    if verb == "epsilon":
        arguments.append(Bounds(0 * wanted, np.inf + wanted))
    if source == "nodes":
        arguments.append(0 * wanted + 512.0)
    kernel = bounds._KERNELS[source][verb]
    with expecting(1):
        found = kernel(*arguments)
        each = [kernel(*jax.tree_util.tree_map(lambda a, i=i: a[i : i + 1], arguments)) for i in range(eps0.size)]
    for i, side in enumerate(found):
        one = np.concatenate([both[i] for both in each])
        assert np.array_equal(np.isfinite(side), np.isfinite(one)) and np.isfinite(one).mean() > 0.1
        np.testing.assert_allclose(side, one, rtol=1e-9 if source == "nodes" else 1e-12)


def test_schedules_of_no_step_and_of_many_points_have_an_answer():
    nothing = np.ones((40, 0))
    assert np.array_equal(isotonic.allocation(nothing, nothing, nothing), np.zeros(40))


SIGMAS, COUNTS = np.linspace(0.8, 3.0, 9), np.arange(1.0, 10.0)
SAMPLED = jaxdp.repeat(jaxdp.PoissonSampled(jaxdp.Gaussian(SIGMAS), 0.02), 100 * COUNTS)
WITHOUT_FINITE_LAW = {
    "sampled": (SAMPLED, contour.SAMPLED_LADDER[0]),
    "sampled with another": (jaxdp.compose(SAMPLED, jaxdp.Gaussian(3.0)), contour.SAMPLED_LADDER[1]),
    "smooth": (jaxdp.repeat(jaxdp.Laplace(2 * SIGMAS), COUNTS), contour.PLAIN_LADDER[0]),
    "lattice": (jaxdp.repeat(jaxdp.DiscreteGaussian(SIGMAS), COUNTS), contour.LATTICE_LADDER[0]),
    "different lattices": (
        jaxdp.compose(jaxdp.DiscreteGaussian(SIGMAS), jaxdp.DiscreteLaplace(2.0)),
        contour.PLAIN_LADDER[0],
    ),
}


@pytest.mark.parametrize("name", WITHOUT_FINITE_LAW)
@pytest.mark.parametrize("verb", ["epsilon", "delta", "renyi", "log_mgf"])
def test_contours_and_moments_are_the_same_for_many_points_as_for_one(name, verb):
    mechanism, effort = WITHOUT_FINITE_LAW[name]
    stacks = normal_form(mechanism, (9,))
    directions = ("forward", "reverse", "replace") if name == "sampled" else ("forward",)
    for direction in directions:
        kernel, static = contour.contour_bounds, {"verb": verb, "effort": effort, "direction": direction}
        arguments = [stacks, np.full(9, 1e-6) if verb == "epsilon" else np.linspace(0.1, 2.0, 9), np.full(9, np.inf)]
        if verb in ("renyi", "log_mgf"):
            kernel, static = getattr(renyi, f"{verb}_kernel"), {"direction": direction}
            orders = np.linspace(1.5, 20.0, 9)
            arguments = [stacks, orders + 2j if verb == "log_mgf" else orders]
        with on_host(many=True):
            together = kernel.point(*jax.tree.map(Rows, arguments), **static)
        with expecting(0):
            each = [kernel(*jax.tree.map(lambda a, i=i: a[i : i + 1], arguments), **static) for i in range(9)]
        for found, one in zip(jax.tree.leaves(together), zip(*map(jax.tree.leaves, each), strict=True), strict=True):
            assert np.isfinite(found.data).all()
            # a search for epsilon ends within 1e-9 of the root
            np.testing.assert_allclose(found.data, np.concatenate(one), rtol=1e-8 if verb == "epsilon" else 1e-12)
