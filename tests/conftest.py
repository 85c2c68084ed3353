"""Settings of every test: strict promotion, the x64 flag untouched, the same hypothesis examples on every run."""

import collections
import gc
import json
import os
import pathlib
import weakref

import hypothesis
import jax
import pytest
from jax._src import compiler  # programs that are not ours: no public name sets the options of all of them

from jaxdp.runtime import backend, precision

# What the tests compile under their own jit is refused otherwise. (An empty XLA_FLAGS leaves it so.)
RELEASE = tuple(map(int, jax.lib.__version__.split(".")[:3]))
if RELEASE > (0, 10, 1):
    os.environ.setdefault("XLA_FLAGS", backend.CURE)

# Silent promotion hides float32 in a float64 sum. Only jaxdp's own code is strict about types: jax's library functions
# promote internally, and are not ours to fix.
jax.config.update("jax_numpy_rank_promotion", "raise")

# Tracing makes millions of objects that live on: to search them for cycles was a fifth of its time.
gc.set_threshold(100_000, 50, 100)

# No deadline: the first example of a property compiles.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=50)
hypothesis.settings.load_profile("repeatable")

OPTIONS = backend.CPU_OPTIONS
# To split a program for threads to compile takes a sixth longer in all.
QUICK_OPTIONS = {**OPTIONS, "xla_backend_optimization_level": 0, "xla_cpu_parallel_codegen_split_count": 1}


CACHED_FROM = 0.03  # seconds of compiling: reading a program takes a few milliseconds


def pytest_configure(config):
    """Share compiled kernels between test files, workers and runs: compiling is most of the suite's time.

    Entries are keyed by the program, its options and the jaxlib release, so a changed kernel is compiled anew.
    """
    if hasattr(config, "cache"):
        directory = str(config.cache.mkdir("jax"))
        jax.config.update("jax_compilation_cache_dir", directory)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", CACHED_FROM)
        os.environ["JAX_COMPILATION_CACHE_DIR"] = directory  # for the processes that tests start
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = str(CACHED_FROM)
        # Every load from the cache otherwise logs that tuning preferences are not features of the machine.
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


STARTED = pytest.StashKey[float]()
BUDGETS = json.loads((pathlib.Path(__file__).parent / "data" / "time_budgets.json").read_text())


def _cpu_seconds():
    """Of this process, its threads and the processes it has waited for."""
    return sum(os.times()[:4])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item):
    """Note when a test starts."""
    item.stash[STARTED] = _cpu_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item):
    """Note what a test of `make test` took, its fixtures included."""
    try:
        return (yield)
    finally:
        spent = 0.0 if item.get_closest_marker("thorough") else _cpu_seconds() - item.stash[STARTED]
        item.user_properties.append(("cpu_seconds", spent))


def pytest_terminal_summary(terminalreporter):
    """Name files that took more than twice the CPU seconds that data/time_budgets.json records."""
    spent = collections.Counter()
    for report in (each for kind in terminalreporter.stats.values() for each in kind if hasattr(each, "when")):
        if report.when == "teardown":
            spent[pathlib.PurePath(report.nodeid.split("::")[0]).name] += dict(report.user_properties)["cpu_seconds"]
    for name, seconds in spent.most_common():
        budget = BUDGETS.get(name, BUDGETS["default"])
        if seconds > 2 * budget:
            terminalreporter.write_line(
                f"{name} took {seconds:.0f} CPU seconds, more than twice its {budget} s", yellow=True
            )


@pytest.fixture(autouse=True)
def x64_flag_is_left_as_found():
    """No verb, sweep or kernel may change the user's flag."""
    before = jax.config.jax_enable_x64
    yield
    assert jax.config.jax_enable_x64 == before


@pytest.fixture(autouse=True, scope="module")
def kernels_are_compiled_quickly(request):
    """Without optimisation, to save time; those of files marked `as_users_compile` with the options that users get."""
    quick = request.node.get_closest_marker("as_users_compile") is None
    _compile_with(QUICK_OPTIONS if quick else OPTIONS)


@pytest.fixture
def compiled_as_for_users():
    """The options that users get for one test of a file whose other tests are compiled quickly."""
    before = backend.CPU_OPTIONS
    _compile_with(OPTIONS)
    yield
    _compile_with(before)


@pytest.fixture
def compiled_quickly():
    """Without optimisation for one test of a file whose other tests are compiled as for users."""
    before = backend.CPU_OPTIONS
    _compile_with(QUICK_OPTIONS)
    yield
    _compile_with(before)


FOR_LARGE = backend._FOR_LARGE
PLAIN = compiler.get_compile_options


def _quick_plain(*args, env_options_overrides=None, **rest):
    """For programs that are not ours: half the time of compiling."""
    generator = FOR_LARGE if RELEASE < (0, 11) else {}  # later releases have one alone
    quick = {"xla_cpu_parallel_codegen_split_count": 1, **generator}
    return PLAIN(*args, env_options_overrides={**quick, **(env_options_overrides or {})}, **rest)


SET_ASIDE = weakref.WeakKeyDictionary()  # of each kernel: what it has compiled with the other options


def _compile_with(options):
    if backend.CPU_OPTIONS != options:
        backend.CPU_OPTIONS = options
        jax.config.update("jax_disable_most_optimizations", options is QUICK_OPTIONS)  # of what is not ours
        compiler.get_compile_options = _quick_plain if options is QUICK_OPTIONS else PLAIN
        backend._FOR_LARGE = {} if options is QUICK_OPTIONS else FOR_LARGE  # quickly: small kernels too
        backend.compiler_options.cache_clear()
        for one in list(precision.all_kernels):
            one._jitted, SET_ASIDE[one] = SET_ASIDE.get(one, {}), one._jitted


@pytest.fixture(autouse=True)
def the_first_points_are_numpys():
    """In every test as in a new process, whatever tests before it have asked for."""
    for one in precision.all_kernels:
        one._answered.clear()


@pytest.fixture
def compiled(monkeypatch):
    """All points by compiled programs."""
    monkeypatch.setattr(precision, "_COMPILE_AFTER", 0)


@pytest.fixture(autouse=True, scope="module")
def compiled_programs_leave_room():
    """They take memory maps, of which a process may have 65530; the kernels' own limit does not see users' jits."""
    yield
    if precision.memory_maps() > 0.3:
        precision.forget_compiled()
        SET_ASIDE.clear()
        jax.clear_caches()
