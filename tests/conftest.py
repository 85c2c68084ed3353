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

from jaxdp.runtime import arrays, backend, precision

# Later jaxlibs miscompile plain programs, and a verb under a test's own jit is then refused: CURE avoids that.
# A value of XLA_FLAGS that is set already stays. .ci/run sets it to "" to test the refusal.
RELEASE = tuple(map(int, jax.lib.__version__.split(".")[:3]))
if RELEASE > (0, 10, 1):
    os.environ.setdefault("XLA_FLAGS", backend.CURE)

# Silent promotion hides float32 in a float64 sum. Only jaxdp's own code is strict about types: jax's library functions
# promote internally, and are not ours to fix.
jax.config.update("jax_numpy_rank_promotion", "raise")

# Tracing makes millions of long-lived objects: searching them for cycles at the default rate takes a fifth of its time.
gc.set_threshold(100_000, 50, 100)

# No deadline: the first example of a property compiles.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=50)
hypothesis.settings.load_profile("repeatable")

OPTIONS = backend.CPU_OPTIONS
# Splitting a program among compiling threads costs a sixth more CPU time in all: the count is 1.
QUICK_OPTIONS = {**OPTIONS, "xla_backend_optimization_level": 0, "xla_cpu_parallel_codegen_split_count": 1}


CACHED_FROM = 0.03  # seconds: programs that compile faster are not cached; reading one takes a few milliseconds


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
    """CPU seconds so far of this process, its threads and the child processes that it has waited for."""
    return sum(os.times()[:4])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item):
    """Note the CPU seconds at which a test starts."""
    item.stash[STARTED] = _cpu_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item):
    """Note the CPU seconds of a test and its fixtures; 0 for `thorough` tests, which the budgets leave out."""
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
    """No verb, sweep or kernel may change the user's x64 flag."""
    before = jax.config.jax_enable_x64
    yield
    assert jax.config.jax_enable_x64 == before


@pytest.fixture(autouse=True, scope="module")
def kernels_are_compiled_quickly(request):
    """Compile without optimisation, to save time; files marked `as_users_compile` get the options that users get."""
    quick = request.node.get_closest_marker("as_users_compile") is None
    _compile_with(QUICK_OPTIONS if quick else OPTIONS)


@pytest.fixture
def compiled_as_for_users():
    """Compile one test with the options that users get, in a file whose other tests are compiled quickly."""
    before = backend.CPU_OPTIONS
    _compile_with(OPTIONS)
    yield
    _compile_with(before)


@pytest.fixture
def compiled_quickly():
    """Compile one test without optimisation, in a file whose other tests are compiled as for users."""
    before = backend.CPU_OPTIONS
    _compile_with(QUICK_OPTIONS)
    yield
    _compile_with(before)


FOR_LARGE = backend._FOR_LARGE
PLAIN = compiler.get_compile_options


def _quick_plain(*args, env_options_overrides=None, **rest):
    """Compiler options of programs that are not jaxdp's; they halve the time of compiling."""
    generator = FOR_LARGE if RELEASE < (0, 11) else {}  # jaxlib 0.11 and later have a single code generator
    quick = {"xla_cpu_parallel_codegen_split_count": 1, **generator}
    return PLAIN(*args, env_options_overrides={**quick, **(env_options_overrides or {})}, **rest)


SET_ASIDE = weakref.WeakKeyDictionary()  # kernel: the programs that it has compiled with the other options


def _compile_with(options):
    if backend.CPU_OPTIONS != options:
        backend.CPU_OPTIONS = options
        jax.config.update("jax_disable_most_optimizations", options is QUICK_OPTIONS)  # of other programs
        compiler.get_compile_options = _quick_plain if options is QUICK_OPTIONS else PLAIN
        backend._FOR_LARGE = {} if options is QUICK_OPTIONS else FOR_LARGE  # {}: for all kernels
        backend.compiler_options.cache_clear()
        for kernel in list(precision.all_kernels):
            kernel._jitted, SET_ASIDE[kernel] = SET_ASIDE.get(kernel, {}), kernel._jitted


@pytest.fixture(autouse=True)
def the_first_points_are_numpys():
    """NumPy answers the first points of every test, as in a new process, whatever earlier tests have asked for."""
    for kernel in precision.all_kernels:
        kernel._patience_used.clear()


@pytest.fixture(autouse=True)
def rows_are_computed_together(monkeypatch):
    """NumPy computes the rows of a call one by one if a kernel calls a function that `Rows` lacks: ten times slower.

    Only for an `EnclosingPair` it has to: the two pairs that enclose a row have different lengths.
    """
    plain = arrays._in_turn_after_all

    def refuse(function, args, *rest):
        if "EnclosingPair" not in repr(args):
            pytest.fail(f"{function} calls a function that Rows lacks")
        return plain(function, args, *rest)

    monkeypatch.setattr(arrays, "_in_turn_after_all", refuse)


@pytest.fixture
def compiled(monkeypatch):
    """Compiled programs answer all points; NumPy answers none."""
    monkeypatch.setattr(precision, "_COMPILE_AFTER", 0)


@pytest.fixture(autouse=True, scope="module")
def compiled_programs_leave_room():
    """Programs take memory maps (65530 a process). The kernels' own limit does not drop programs of the tests' jits."""
    yield
    if precision.memory_maps() > 0.3:
        precision.forget_compiled()
        SET_ASIDE.clear()
        jax.clear_caches()
