"""Sweeps: the grid and its attributes, one shape for every call of the function, and resuming interrupted runs."""

import errno
import functools
import math
import os
import sys
import threading
import time
import tracemalloc
import types

import jax
import numpy as np
import pytest
import xarray
from refusal import refused_in_one_line

import jaxdp
from jaxdp.mechanisms import provenance
from jaxdp.runtime.fingerprint import fingerprint
from jaxdp.sweep import sweep

pytestmark = pytest.mark.as_users_compile

SIGMA, DELTA = np.linspace(0.5, 4, 7), np.array([1e-5, 1e-7, 1e-9])


def plain(a, b):
    return 10.0 * a + b


class Counted:
    """A function that records its arguments, and raises ``error`` at the point ``fail_at``.

    The fingerprint does not read slots: two instances have the same fingerprint, like the function in two processes.
    """

    __slots__ = ("calls", "error", "fail_at")

    def __init__(self, fail_at=None, error=None):
        self.calls, self.fail_at, self.error = [], fail_at, error

    def __call__(self, a):
        if self.fail_at is not None and self.fail_at in a:
            raise self.error
        self.calls.append(a.copy())
        return a**2


def same_function(a):
    return a**2


def test_a_sweep_is_the_verb_at_every_point_of_the_product():
    dataset = sweep(
        lambda sigma, delta: jaxdp.epsilon(jaxdp.Gaussian(sigma), delta), sigma=SIGMA, delta=DELTA, batch_size=4
    )
    (values,) = dataset.data_vars.values()
    assert values.dims == ("sigma", "delta")
    np.testing.assert_array_equal(values, jaxdp.epsilon(jaxdp.Gaussian(SIGMA[:, None]), DELTA))
    np.testing.assert_array_equal(dataset.sigma, SIGMA)


def test_the_result_does_not_depend_on_the_batch_size():
    whole = sweep(plain, a=[1, 2, 3], b=[0.5, 1.5])
    for batch_size in (1, 2, 4, 5, 6, 100):
        xarray.testing.assert_identical(sweep(plain, a=[1, 2, 3], b=[0.5, 1.5], batch_size=batch_size), whole)


def test_every_call_has_the_same_shape_so_that_a_jitted_function_is_traced_once():
    traces = []

    @jax.jit
    def traced(a):
        traces.append(a.shape)
        return a * 2

    dataset = sweep(lambda a: traced(a.astype(np.float32)), a=np.arange(10.0), batch_size=4)
    assert traces == [(4,)]
    np.testing.assert_array_equal(dataset.value, 2 * np.arange(10.0))


def test_attributes_name_the_default_bound_and_shuffled_rounds_inside_compositions():
    def one(eps0):
        return jaxdp.Shuffled(jaxdp.RandomizedResponse(eps0, 4), 10**6)

    dataset = sweep(lambda eps0: jaxdp.epsilon(one(eps0), 1e-6), eps0=[1.0, 2.0])
    assert (dataset.attrs["bound"], dataset.attrs["randomizer"]) == ("blanket", "RandomizedResponse")
    other = jaxdp.Shuffled(jaxdp.LocalRandomizer(1.0), 10**6, "stronger")
    with provenance.observe() as calls:
        mixed = jaxdp.compose(jaxdp.repeat(one(1.0), 3), jaxdp.Gaussian(2.0), other)
        provenance.note("epsilon", mixed, "replace_one", "delta", np.array(1e-6))
        provenance.note("epsilon", other, "replace_one", "delta", np.array([1e-6]))
        provenance.note("epsilon", jaxdp.Gaussian(1.0), "replace_one", "delta", np.array([1e-6]))
    made_by = provenance.summary(calls)
    assert made_by["bound"] == "blanket, stronger"
    assert made_by["randomizer"] == "RandomizedResponse, LocalRandomizer"
    assert "bound" not in provenance.summary(calls[2:])


def test_a_sweep_of_calibrations_is_not_labelled_as_epsilon():
    def noise(delta):
        return jaxdp.calibrate(jaxdp.Gaussian, epsilon=1.0, delta=delta, bracket=(0.5, 50.0))

    data = jaxdp.sweep(noise, delta=[1e-6, 1e-5])
    assert list(data) == ["noise"] and data.attrs["verb"] == "calibrate"
    assert list(jaxdp.sweep(lambda delta: noise(delta), delta=[1e-6, 1e-5])) == ["value"]


def test_bounds_and_dicts_become_several_variables():
    dataset = sweep(lambda sigma: jaxdp.epsilon_bounds(jaxdp.Gaussian(sigma), 1e-6), sigma=SIGMA)
    assert set(dataset.data_vars) == {"lower", "upper"}
    assert (dataset.lower <= dataset.upper).all()
    named = sweep(lambda a: {"double": 2 * a, "both": jaxdp.Bounds(a, a + 1)}, a=[1.0, 2.0])
    assert set(named.data_vars) == {"double", "both_lower", "both_upper"}


def test_strings_are_looped_over_and_keep_their_place_among_the_dimensions():
    seen = set()

    def by_name(a, which, b):
        assert isinstance(which, str)
        seen.add(which)
        return a + b + (100 if which == "y" else 0)

    dataset = sweep(by_name, a=[1.0, 2.0], which=["x", "y"], b=[0.0, 0.5, 0.75], batch_size=4)
    assert seen == {"x", "y"}
    assert dataset.by_name.dims == ("a", "which", "b")
    assert dataset.by_name.sel(a=2.0, which="y", b=0.5) == 102.5


def test_only_static_axes_are_a_sweep_too():
    dataset = sweep(lambda which: {"value": float(len(which))}, which=["x", "long"])
    np.testing.assert_array_equal(dataset.value, [1, 4])


def test_coordinates_carry_units_and_the_dataset_its_provenance():
    dataset = sweep(lambda eps0: eps0 / 2, eps0=[1.0, 2.0])
    assert dataset.eps0.attrs == {"long_name": "local epsilon", "units": "nats"}
    assert {"version", "jax_version", "accuracy"} <= set(dataset.attrs)


def test_observed_calls_are_summed_up_as_attributes():
    with provenance.observe() as calls:
        provenance.note("epsilon", jaxdp.Gaussian(1.0), "add_or_remove", "delta", np.array(1e-6))
        provenance.note("epsilon", jaxdp.Laplace(1.0), "add_or_remove", "delta", np.array([1e-6, 1e-5]))
    assert provenance.summary(calls) == {
        "verb": "epsilon",
        "mechanism": "Gaussian, Laplace",
        "relation": "add_or_remove",
        "delta": "1e-06",  # of the first call only: a target with axes belongs to a grid
    }
    many = [{"delta": str(i)} for i in range(30)]
    assert provenance.summary(many)["delta"].endswith("18, 19, ...")
    provenance.note("epsilon", jaxdp.Gaussian(1.0), "add", "delta", np.array(1e-6))
    assert len(calls) == 2  # nothing is kept when nobody observes


@pytest.mark.parametrize("suffix", [".nc", ".zarr"])
def test_a_finished_file_is_read_and_not_computed_again(tmp_path, suffix):
    path = tmp_path / f"grid{suffix}"
    function = Counted()
    first = sweep(function, a=np.arange(10.0), batch_size=3, path=path)
    calls, function.calls = len(function.calls), []
    assert calls >= 4
    assert list(tmp_path.iterdir()) == [path]  # no parts, no drafts
    fresh = Counted()
    second = sweep(fresh, a=np.arange(10.0), batch_size=3, path=path)
    assert fresh.calls == []
    xarray.testing.assert_identical(first, second)


@pytest.mark.parametrize("suffix", [".nc", ".zarr"])
@pytest.mark.parametrize("wrap", [lambda f: f, lambda f: functools.partial(f, delta=1e-6)])
def test_a_function_without_a_name_has_its_result_stored_too(wrap, suffix, tmp_path):
    unnamed = wrap(lambda sigma, delta=1e-6: jaxdp.epsilon(jaxdp.Gaussian(sigma), delta))
    made = sweep(unnamed, sigma=[1.0, 2.0], path=tmp_path / f"grid{suffix}")
    np.testing.assert_array_equal(made.epsilon, jaxdp.epsilon(jaxdp.Gaussian([1.0, 2.0]), 1e-6))


def test_an_interrupted_sweep_goes_on_without_computing_a_chunk_twice(tmp_path):
    path = tmp_path / "grid.nc"
    axis = np.arange(1000.0)
    function = Counted(fail_at=700.0, error=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        sweep(function, a=axis, batch_size=100, path=path)
    assert not path.exists()
    again = Counted()
    dataset = sweep(again, a=axis, batch_size=100, path=path)
    np.testing.assert_array_equal(np.concatenate(again.calls), axis[700:])
    np.testing.assert_array_equal(dataset.value, axis**2)


def test_a_tile_whose_file_is_damaged_is_computed_again(tmp_path):
    axis = np.arange(50.0)
    with pytest.raises(KeyboardInterrupt):
        sweep(Counted(fail_at=40.0, error=KeyboardInterrupt()), a=axis, batch_size=10, path=tmp_path / "grid.nc")
    files = sorted((tmp_path / "grid.nc.parts").glob("*.npz"))
    files[0].write_bytes(b"")
    files[1].write_bytes(files[1].read_bytes()[:100])
    again = Counted()
    dataset = sweep(again, a=axis, batch_size=10, path=tmp_path / "grid.nc")
    np.testing.assert_array_equal(np.concatenate(again.calls), [*axis[:20], *axis[40:]])
    np.testing.assert_array_equal(dataset.value, axis**2)


def test_a_full_disk_keeps_what_was_written_and_leaves_no_half_file(tmp_path, monkeypatch):
    path, axis = tmp_path / "grid.nc", np.arange(50.0)
    real, written = os.fsync, []

    def fsync(file):
        if len(written) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(file)
        real(file)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="No space left"):
        sweep(Counted(), a=axis, batch_size=10, path=path)
    monkeypatch.undo()
    assert sorted(p.name for p in (tmp_path / "grid.nc.parts").glob("0*")) == [f"{i:08d}.npz" for i in range(3)]
    assert not list((tmp_path / "grid.nc.parts").glob("*.draft"))
    again = Counted()
    sweep(again, a=axis, batch_size=10, path=path)
    assert len(again.calls) == 2


def test_another_computation_at_the_same_path_is_an_error(tmp_path):
    path = tmp_path / "grid.nc"
    sweep(same_function, a=[1.0, 2.0], path=path)
    with pytest.raises(ValueError, match="another computation"):
        sweep(same_function, a=[1.0, 3.0], path=path)
    with pytest.raises(ValueError, match="another computation"):
        sweep(lambda a: a**3, a=[1.0, 2.0], path=path)
    with pytest.raises(ValueError, match=".nc or .zarr"):
        sweep(same_function, a=[1.0], path=tmp_path / "grid.csv")
    (tmp_path / "folder.nc").mkdir()
    with pytest.raises(ValueError, match=r"folder\.nc is not a data set that a sweep wrote"):
        sweep(same_function, a=[1.0], path=tmp_path / "folder.nc")


def test_a_function_that_fails_at_once_leaves_its_path_free(tmp_path):
    path = tmp_path / "grid.zarr"
    with pytest.raises(ZeroDivisionError):
        sweep(lambda a: 1 / 0, a=np.arange(5.0), batch_size=1, path=path)
    assert not list(tmp_path.iterdir())
    np.testing.assert_array_equal(
        sweep(lambda a: a + 1, a=np.arange(5.0), batch_size=1, path=path).value, np.arange(1.0, 6)
    )


def test_variables_have_names_of_their_own_and_the_same_everywhere():
    with pytest.raises(ValueError, match="the name of an axis, got 'a'"):
        sweep(lambda a: {"a": a}, a=[1.0])
    with pytest.raises(ValueError, match=r"the same variables at every grid point, got \['y'\] beside \['x'\]"):
        sweep(lambda a: {"x" if a[0] < 3 else "y": a}, a=np.arange(5.0), batch_size=1)


def test_the_fingerprint_sees_code_constants_closures_and_globals():
    def with_closure(value):
        return lambda a: a * value

    assert fingerprint(lambda a: a + 1) != fingerprint(lambda a: a + 2)
    assert fingerprint(with_closure(1.0)) != fingerprint(with_closure(2.0))
    assert fingerprint(with_closure(np.arange(3))) == fingerprint(with_closure(np.arange(3)))
    assert fingerprint(jaxdp.Gaussian(1.0)) != fingerprint(jaxdp.Gaussian(2.0))
    assert fingerprint(jaxdp.Gaussian(1.0)) == fingerprint(jaxdp.Gaussian(1.0))
    scope: dict = {"__name__": "__main__", "rate": 1.0}
    exec("def f(a):\n    return a * rate", scope)
    before = fingerprint(scope["f"])
    scope["rate"] = 2.0
    assert fingerprint(scope["f"]) != before


def test_the_fingerprint_sees_which_values_are_the_same_and_how_lists_nest():
    def total(*three):
        return lambda a: a + three[0] + three[1] * three[2]

    one, two = np.array([1.0]), np.array([2.0])
    assert fingerprint(total(one, two, one)) != fingerprint(total(one, two, two))
    assert fingerprint([[1], 2]) != fingerprint([[1, 2]])


def test_the_fingerprint_sees_the_users_modules():
    """`settings.RATE` and `settings.scaled(a)`: another rate or formula is another computation."""

    def of(source, function):
        settings = types.ModuleType("settings")
        settings.__file__ = "settings.py"
        exec(source, vars(settings))
        return fingerprint(eval(function, {"__name__": "__main__", "settings": settings, "np": np}))

    rate, scaled = "lambda a: np.exp(a * settings.RATE)", "lambda a: settings.scaled(a)"
    assert of("RATE = 1.0", rate) == of("RATE = 1.0; OTHER = 2.0", rate) != of("RATE = 2.0", rate)
    assert of("def scaled(a): return 2 * a", scaled) != of("def scaled(a): return 3 * a", scaled)


def test_a_bad_value_at_the_end_of_the_grid_is_refused_before_the_long_run():
    evaluated = []

    def guarded(sigma, delta):
        evaluated.append(len(sigma))
        return jaxdp.epsilon(jaxdp.Gaussian(sigma), delta)

    with pytest.raises(ValueError, match="delta must be in"):
        sweep(guarded, sigma=np.linspace(1, 2, 50), delta=[1e-6] * 19 + [2.0], batch_size=100)
    assert len(evaluated) == 1


def test_an_error_inside_the_grid_names_its_chunk():
    def cornered(a, b):
        if np.any((a == 2) & (b == 2)):
            raise ValueError("the corner is bad")
        return a + b

    with pytest.raises(ValueError, match="the corner is bad") as caught:
        sweep(cornered, a=[0.0, 1.0, 2.0], b=[0.0, 1.0, 2.0], batch_size=2)
    assert any("in tile 5 of 6: a = 2.0, b = 2.0" in note for note in caught.value.__notes__)


def test_several_devices_share_the_chunks_and_agree_with_one():
    threads = set()

    def watched(a):
        threads.add(threading.get_ident())
        time.sleep(0.03)  # otherwise the first thread might finish all tiles before the second one starts
        return jaxdp.epsilon(jaxdp.Gaussian(a), 1e-6)

    axis = np.linspace(1, 5, 64)
    device = jax.devices("cpu")[0]
    several = sweep(watched, a=axis, batch_size=8, devices=[device, device])
    seen = set(threads)
    alone = sweep(watched, a=axis, batch_size=8, devices=[device])  # same batch size: other programs round differently
    np.testing.assert_array_equal(several.watched, alone.watched)
    np.testing.assert_allclose(alone.watched, jaxdp.epsilon(jaxdp.Gaussian(axis), 1e-6), rtol=1e-14)
    assert threading.get_ident() not in seen and len(seen) == 2


def test_a_failure_on_one_device_ends_the_sweep(tmp_path):
    function = Counted(fail_at=500.0, error=ArithmeticError("broken"))
    device = jax.devices("cpu")[0]
    with pytest.raises(ArithmeticError, match="broken"):
        sweep(function, a=np.arange(1000.0), batch_size=10, devices=[device] * 3, path=tmp_path / "grid.nc")


def test_memory_is_set_by_the_batch_and_not_by_the_grid():
    def hungry(a, b):
        return np.sum(a[:, None] + b[:, None] * np.ones(200), axis=1)  # the whole grid at once would take 1.6 GB

    tracemalloc.start()
    sweep(hungry, a=np.arange(1000.0), b=np.arange(1000.0), batch_size=5000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100e6  # 40 MB for the result and a copy of it, and 8 MB for a tile; the rest is reserve


def test_progress_counts_every_point(capsys):
    sweep(same_function, a=np.arange(10.0), batch_size=4, progress=True)
    assert "10.0/10.0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("axes", "options", "message"),
    [
        ({}, {}, "at least one axis"),
        ({"a": []}, {}, "axis a must be a number or a non-empty 1-D sequence"),
        ({"a": [[1.0, 2.0]]}, {}, "axis a must be a number or a non-empty 1-D sequence"),
        ({"a": [1j]}, {}, "axis a must hold real numbers"),
        ({"a": [1.0]}, {"batch_size": 0}, "batch_size must be a whole number >= 1"),
        ({"a": [1.0]}, {"batch_size": 1.5}, "batch_size must be a whole number >= 1"),
    ],
)
def test_bad_axes_and_options_are_one_line(axes, options, message):
    with refused_in_one_line(ValueError, message):
        sweep(same_function, **options, **axes)


def test_a_function_that_returns_another_shape_is_told_so():
    with pytest.raises(ValueError, match=r"one value per grid point, shape \(3,\), got \(2,\)"):
        sweep(lambda a: np.ones(2), a=[1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match="real values"):
        sweep(lambda a: a * 1j, a=[1.0, 2.0, 3.0])


def test_without_xarray_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "xarray", None)
    with pytest.raises(ImportError, match=r"jaxdp-accounting\[sweep\]"):
        sweep(same_function, a=[1.0])


@pytest.mark.parametrize("fn", [lambda eps0: math.exp(eps0), lambda eps0: eps0 if eps0 > 1 else 1.0])
def test_a_function_of_single_numbers_only_is_refused_with_the_remedy(fn):
    with pytest.raises(TypeError, match=r"fn must accept arrays, .* arrays of 3 grid points.*np\.vectorize\(fn\)"):
        sweep(fn, eps0=[0.5, 1.0, 2.0])
    dataset = sweep(np.vectorize(fn), eps0=[0.5, 1.0, 2.0])
    assert dataset.sizes == {"eps0": 3}


def test_a_bad_value_of_an_axis_is_not_taken_for_a_function_of_single_numbers():
    with pytest.raises(ValueError, match="noise_multiplier must be finite and > 0, got -1"):
        sweep(lambda sigma: jaxdp.epsilon(jaxdp.Gaussian(sigma), 1e-6), sigma=[1.0, 2.0, -1.0])
    with pytest.raises(ValueError, match="one of the grid points is bad"):
        sweep(_of_a_bad_point, sigma=[1.0, 2.0, -1.0])


def _of_a_bad_point(sigma):
    if np.any(np.asarray(sigma) < 0):
        raise ValueError("one of the grid points is bad")
    return sigma


@pytest.mark.parametrize("value", [None, "a", 1j])
def test_a_function_without_a_number_is_refused_by_what_it_returned(value):
    with pytest.raises(ValueError, match=f"fn must return real values, got {value!r} for"):
        sweep(lambda a: value, a=np.arange(3.0))


def test_the_fingerprint_sees_the_methods_of_the_users_classes():
    """A resumed sweep must not mix numbers of two formulas of one class."""

    def sweep_of(formula):
        scope = {"__name__": "user", "jaxdp": jaxdp}
        code = f"@jaxdp.record\nclass Mine(jaxdp.Mechanism):\n    x: object\n    log_mgf = lambda self, z: {formula}\n"
        exec(code + "def f(x): return jaxdp.epsilon(Mine(x), 1e-5)\nmine = Mine(1.0)", scope)
        return [fingerprint(scope[name]) for name in ("f", "mine")]

    def class_of(kind, factor):
        return type("Scale", (), {"__module__": "user", "of": kind(lambda *x: factor * x[-1])})

    for kind in (staticmethod, classmethod, property):
        assert fingerprint(class_of(kind, 2)) == fingerprint(class_of(kind, 2)) != fingerprint(class_of(kind, 3))
    assert sweep_of("z * (z + 1)") == sweep_of("z * (z + 1)")
    assert all(a != b for a, b in zip(sweep_of("z * (z + 1)"), sweep_of("z * (z + 1) / 2"), strict=True))
