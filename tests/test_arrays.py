"""The functions of `xp` that NumPy lacks give the numbers of JAX's functions, and exact ones."""

import threading

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest

import jaxdp
from jaxdp.runtime import precision
from jaxdp.runtime.arrays import on_host, xp
from jaxdp.runtime.backend import x64
from jaxdp.sources import contour

# name: (exact function in mpmath, arguments, relative tolerance)
EXACT = {
    "erf": (mpmath.erf, [-3.0, -0.1, 0.0, 1e-8, 0.5, 5.0], 1e-15),
    "erfcx": (lambda x: mpmath.exp(x * x) * mpmath.erfc(x), [-2.0, 0.0, 0.3, 5.1234567, 19.7654321, 26.0], 1e-14),
    # the exponent x^2/2, up to 648, multiplies the argument's rounding, as in jax's ndtr
    "ndtr": (mpmath.ncdf, [-36.0, -5.5, -1e-9, 0.0, 2.0, 9.0], 1e-13),
    "softplus": (lambda x: mpmath.log1p(mpmath.exp(x)), [-700.0, -30.0, 0.0, 1e-9, 40.0, 800.0], 2e-15),
}


@pytest.mark.parametrize("name", EXACT)
def test_special_functions_of_numpys_side_are_exact(name):
    function, places, tolerance = EXACT[name]
    with on_host(), mpmath.workdps(40):
        computed = getattr(xp, name)(np.array(places))
        exact = [float(function(mpmath.mpf(x))) for x in places]
    np.testing.assert_allclose(computed, exact, rtol=tolerance)


@pytest.mark.parametrize(
    "shape", [(0, 5, 3), (1, 1, 300_000), (1, 300_000, 1), (193, 79, 256), (65, 4097, 65), (600, 1, 600), (3, 2, 2)]
)
def test_no_product_of_matrices_is_large_enough_for_several_threads(shape, monkeypatch):
    rows, depth, columns = shape
    rng = np.random.default_rng(0)
    left, right = rng.normal(size=(rows, depth)), rng.normal(size=(depth, columns))
    expected, plain, sizes = left @ right, np.matmul, []

    def counted(left, right):
        sizes.append(np.prod(left.shape[-2:]) * right.shape[-1])
        return plain(left, right)

    monkeypatch.setattr(np, "matmul", counted)
    with on_host():
        product = xp.exact_matmul(left, right)
    np.testing.assert_allclose(product, expected, rtol=1e-9, atol=1e-9)
    assert max(sizes) <= max(2**18, columns)


def _sums(xs):
    def body(carry, x):
        return carry + x, carry * x

    total, products = xp.scan(body, xp.zeros(()), xs)
    backward = xp.scan(body, xp.zeros(()), xs, reverse=True)[1]
    powers = xp.fori_loop(0, 5, lambda i, v: v * 2 + i, xp.ones(()))
    root = xp.while_loop(lambda v: v * v > 2 + 1e-9, lambda v: 0.5 * (v + 2 / v), xs[3])
    rows = xp.vmap(lambda a, b: {"sum": xp.sum(a) + b, "pair": (a, b)}, in_axes=(0, None))(xp.stack([xs, 2 * xs]), 3.0)
    chosen = xp.cond(total > 1, lambda v: v + 1, lambda v: v - 1, total)
    least = (
        xp.cummin(xp.stack([xs[::-1], xs]), axis=1),
        xp.cummax(xs[::-1]),
    )
    exponents = xp.stack([xs, xp.where(xs > 1, -xp.inf, xs)])
    log_sums = xp.logsumexp(exponents), xp.logsumexp(exponents, axis=1, keepdims=True)
    nothing = xp.logsumexp(xp.full_like(xs, -xp.inf))
    placed = xp.set_at(xs, 1, -1.0)
    product = xp.exact_matmul(xp.stack([xs, xs]), xs)
    return (
        total, products, backward, powers, root, rows, chosen, least, log_sums, nothing, placed, product,
        xp.complex(xs, -xs), xp.lax_map(lambda x: x * x, xs), xp.bits(xs),
    )  # fmt: skip


def test_control_flow_is_that_of_jax():
    xs = np.array([0.5, 1.5, 0.25, 3.0])
    with x64():
        compiled = jax.jit(_sums)(xs)
    with on_host():
        plain = _sums(xs)
    leaves = zip(jax.tree_util.tree_leaves(plain), jax.tree_util.tree_leaves(compiled), strict=True)
    for ours, theirs in leaves:
        assert not isinstance(ours, jax.Array)
        np.testing.assert_allclose(ours, np.asarray(theirs), rtol=1e-15)
    assert jax.tree_util.tree_structure(plain) == jax.tree_util.tree_structure(compiled)


def test_numpys_side_is_this_thread_s_alone_and_ends_with_the_block():
    in_thread = []
    with on_host():
        assert xp.exp is np.exp
        other = threading.Thread(target=lambda: in_thread.append(xp.exp))
        other.start()
        other.join()
        with on_host():
            pass
        assert xp.exp is np.exp
        assert np.isnan(np.log(np.array(-1.0)))  # no warning: kernels choose valid values afterwards
    with pytest.warns(RuntimeWarning, match="invalid value"):
        np.log(np.array(-1.0))
    assert in_thread == [jnp.exp] and xp.exp is jnp.exp
    with pytest.raises(ZeroDivisionError), on_host():
        raise ZeroDivisionError
    assert xp.exp is jnp.exp


def _two_noises(noise, rate, times):
    """Two distinct sampled Gaussians: they form one stack, which has an axis of its own in every kernel."""
    one, other = (jaxdp.PoissonSampled(jaxdp.Gaussian(np.array(noise) * factor), rate) for factor in (1.0, 1.5))
    return jaxdp.compose(jaxdp.repeat(one, times), jaxdp.repeat(other, 2 * times))


MECHANISMS = {
    "Gaussian": jaxdp.Gaussian(np.array([0.3, 1.0, 20.0])),
    "sampled Gaussian": _two_noises([0.8, 1.0, 4.0], 0.01, 1000),
    "Laplace": jaxdp.repeat(jaxdp.Laplace(np.array([1.0, 3.0, 10.0])), 20),
    "randomized response": jaxdp.repeat(jaxdp.RandomizedResponse(np.array([0.1, 0.2, 0.5]), 4), 100),
    "one finite pair": jaxdp.DiscretePair([[0.7, 0.3], [0.5, 0.5], [0.6, 0.4]], [0.3, 0.7]),
    "discrete Gaussian": jaxdp.repeat(jaxdp.DiscreteGaussian(np.array([1.0, 2.0, 5.0])), 10),
    "shuffled k-RR": jaxdp.Shuffled(jaxdp.RandomizedResponse(np.array([0.5, 1.0, 2.0]), 4), 10**5),
    "shuffled Laplace": jaxdp.Shuffled(jaxdp.LocalLaplace(np.array([1.1, 2.2])), np.array([20, 2000])),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.thorough] * (n == "shuffled Laplace")) for n in MECHANISMS]
)
def test_numpy_and_the_compiled_kernels_give_the_same_bounds(name, monkeypatch):
    ran, by_programs = [], precision.Kernel._by_programs
    monkeypatch.setattr(precision.Kernel, "_by_programs", lambda *args: ran.append(args[0]) or by_programs(*args))
    relation = "remove" if name == "sampled Gaussian" else None
    ours = jaxdp.epsilon_bounds(MECHANISMS[name], 1e-6, relation=relation)
    assert not ran
    monkeypatch.setattr(precision, "_COMPILE_AFTER", 0)
    theirs = jaxdp.epsilon_bounds(MECHANISMS[name], 1e-6, relation=relation)
    assert ran
    np.testing.assert_allclose(ours.upper, theirs.upper, rtol=1e-7)
    assert np.all(ours.lower <= theirs.upper) and np.all(theirs.lower <= ours.upper)
    if name == "sampled Gaussian":  # new values do not recompile
        before = contour.contour_bounds.traces
        jaxdp.epsilon_bounds(_two_noises([1.1, 1.5, 1.9], 0.012, 900), 1e-7, relation=relation)
        assert contour.contour_bounds.traces == before


@pytest.mark.parametrize(
    ("direction", "bands"), [("forward", 0), ("reverse", 0), ("replace", 0), ("forward", 4), ("replace", 4)]
)
def test_a_stack_of_distinct_sampled_gaussians_can_be_traced(direction, bands):
    effort = contour.SAMPLED_LADDER[0]._replace(bands=bands)
    sampled = jaxdp.PoissonSampled(jaxdp.Gaussian(np.array([1.0, 1.5, 2.0])), np.array([0.01, 0.01, 0.02]))
    point = ((sampled, np.array([10.0, 20.0, 0.0])),), np.array(1e-6), np.array(3.0)
    with x64(), jax.numpy_rank_promotion("allow"):
        shapes = jax.eval_shape(
            lambda *args: contour.contour_bounds.point(*args, verb="epsilon", direction=direction, effort=effort),
            *point,
        )
    assert [each.shape for each in shapes] == [(), ()]
