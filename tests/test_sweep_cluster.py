"""Sweeps by several processes: the same bits, no tile computed twice, no result lost when a worker is killed."""

import concurrent.futures
import functools
import multiprocessing
import os
import pathlib
import runpy
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

import jaxdp
from jaxdp.runtime import backend
from jaxdp.sweep import sweep, work

ROOT = pathlib.Path(jaxdp.__file__).parents[1]
ENVIRONMENT = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "JAX_PLATFORMS": "cpu"}
SIGMA, EPSILON = np.linspace(0.5, 4, 30), np.linspace(0.1, 8, 10)  # enough points for a compiled program


def shuffled(eps0, users):
    return jaxdp.epsilon_bounds(jaxdp.Shuffled(jaxdp.LocalRandomizer(eps0), users), 1e-6)


def gaussian(sigma, epsilon):
    """A verb whose program compiles quickly, and differs from NumPy in the last digit of two of three results."""
    return jaxdp.delta_bounds(jaxdp.Gaussian(sigma), epsilon)


def compile_with(options):
    """Give a worker process the compiler options of this process; other options may change the last bit."""
    backend.CPU_OPTIONS, backend._FOR_LARGE = options, {}


@pytest.fixture(scope="module")
def processes():
    context = multiprocessing.get_context("spawn")
    given = dict(initializer=compile_with, initargs=(backend.CPU_OPTIONS,))
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=context, **given) as pool:
        yield pool


@pytest.fixture(scope="module")
def cluster():
    import distributed  # imported here, because the worker processes import this file

    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=":0", worker_dashboard_address=":0"
        ) as local,
        distributed.Client(local) as client,
    ):
        client.register_worker_callbacks(functools.partial(compile_with, backend.CPU_OPTIONS))
        yield client


@pytest.mark.parametrize("suffix", ["", ".nc", ".zarr"])
def test_two_processes_give_the_same_bits_as_one(processes, tmp_path, suffix):
    given = dict(sigma=SIGMA, epsilon=EPSILON, batch_size=50)
    alone = sweep(gaussian, **given)
    path = tmp_path / f"grid{suffix}" if suffix else None
    shared = sweep(gaussian, executor=processes, path=path, **given)
    for name in ("lower", "upper"):
        np.testing.assert_array_equal(shared[name], alone[name])
    assert shared.attrs["verb"] == "delta" and shared.epsilon.attrs["units"] == "nats"
    if path:
        assert list(tmp_path.iterdir()) == [path]


def test_numbers_do_not_depend_on_what_a_process_has_answered_before():
    few, many = dict(sigma=SIGMA[:3], epsilon=EPSILON[:4]), dict(sigma=SIGMA, epsilon=EPSILON)
    fresh = sweep(gaussian, batch_size=4, **few)
    sweep(gaussian, **many)  # so many points that the kernel would be compiled from here on
    jaxdp.delta(jaxdp.Gaussian(SIGMA), 1.0)
    np.testing.assert_array_equal(sweep(gaussian, batch_size=4, **few).upper, fresh.upper)


class DiesOnce:
    """Square of a, which logs its calls and kills its process the first time that it is asked for a = 20."""

    def __init__(self, folder):
        self.folder = folder

    def __call__(self, a):
        with open(self.folder / "log", "a") as log:
            log.write(f"{a[0]:.0f}\n")
        mark = self.folder / "died"
        if a[0] == 20 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return {"square": a**2}


@pytest.mark.slow
def test_a_killed_worker_of_a_dask_cluster_loses_its_running_tile_only(cluster, tmp_path):
    made = sweep(
        DiesOnce(tmp_path), a=np.arange(80.0), batch_size=10, executor=cluster.get_executor(), path=tmp_path / "a.zarr"
    )
    np.testing.assert_array_equal(made.square, np.arange(80.0) ** 2)
    seen = (tmp_path / "log").read_text().split()
    assert (tmp_path / "died").exists()
    probe, tiles = seen[0], seen[1:]
    assert probe == "0" and set(tiles) == {str(10 * i) for i in range(8)}
    assert tiles.count("20") == 2
    assert len(tiles) <= 10  # a tile that the killed worker had written but not reported may be computed again


@pytest.mark.slow
def test_dask_gives_the_same_bits_and_sends_any_function(cluster):
    few = dict(eps0=[0.5, 2.0, 4.0], users=[1e3, 1e8], batch_size=2)
    shared = sweep(lambda eps0, users: shuffled(eps0, users), executor=cluster.get_executor(), **few)
    np.testing.assert_array_equal(shared.upper, sweep(shuffled, **few).upper)
    assert (shared.attrs["verb"], shared.attrs["bound"]) == ("epsilon", "clones")
    assert shared.eps0.attrs["units"] == "nats" and shared.upper.attrs["units"] == "nats"


@pytest.mark.slow
def test_a_worker_of_another_release_is_refused_by_name_before_any_work(cluster, monkeypatch, tmp_path):
    real = work.versions()
    monkeypatch.setattr(sys.modules["jaxdp.sweep"], "versions", lambda: real | {"jaxlib": "0.0.1"})
    with pytest.raises(RuntimeError, match=r"worker process \d+ on .* has jaxlib .* \(expected 0.0.1\)"):
        sweep(DiesOnce(tmp_path), a=np.arange(80.0), batch_size=10, executor=cluster.get_executor())
    with pytest.raises(RuntimeError, match="install the same releases on every worker"):
        sweep(DiesOnce(tmp_path), a=np.arange(80.0), batch_size=10, executor=concurrent.futures.ThreadPoolExecutor(1))
    assert not (tmp_path / "log").exists()


@pytest.mark.slow
def test_what_is_not_an_executor_is_refused(cluster, processes):
    with pytest.raises(TypeError, match=r"concurrent\.futures.*got int"):
        sweep(shuffled, executor=3, eps0=[1.0], users=[1e4])
    with pytest.raises(TypeError, match=r"got Client; for dask pass Client\(...\)\.get_executor"):
        sweep(shuffled, executor=cluster, eps0=[1.0], users=[1e4])
    with pytest.raises(ValueError, match="devices must be None where an executor is given"):
        sweep(shuffled, executor=processes, devices=[None], eps0=[1.0], users=[1e4])
    with pytest.raises(TypeError, match="define it at the top level of a module"):
        sweep(lambda a: a, executor=processes, a=[1.0])


JOB = textwrap.dedent("""
    import sys, time
    import numpy as np
    from jaxdp.sweep import sweep

    def square(a):
        with open(sys.argv[2], "a") as log:
            print(a[0], file=log)
        time.sleep(0.1)
        return a**2

    print(float(sweep(square, a=np.arange(100.0), batch_size=10, path=sys.argv[1]).square.sum()))
""")


@pytest.mark.parametrize("suffix", [".nc", ".zarr"])
@pytest.mark.thorough
def test_several_sweeps_to_one_path_compute_every_tile_once(tmp_path, suffix):
    (tmp_path / "job.py").write_text(JOB)
    command = [sys.executable, str(tmp_path / "job.py"), str(tmp_path / f"grid{suffix}"), str(tmp_path / "log")]
    jobs = [
        subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    results = [job.communicate(timeout=120) for job in jobs]
    assert [(float(out), error) for out, error in results] == [(328350.0, "")] * 3
    assert sorted(map(float, (tmp_path / "log").read_text().split())) == [0.0, *range(0, 100, 10)]  # 0 twice: the probe
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([f"grid{suffix}", "job.py", "log"])


@pytest.mark.slow
def test_a_killed_sweep_frees_its_path_for_the_next(tmp_path, monkeypatch, capsys):
    (tmp_path / "job.py").write_text(JOB)
    command = [str(tmp_path / "job.py"), str(tmp_path / "grid.zarr"), str(tmp_path / "log")]
    job = subprocess.Popen([sys.executable, *command], env=ENVIRONMENT)
    parts = tmp_path / "grid.zarr.parts"
    while len(list(parts.glob("0*.npz"))) < 3:
        assert job.poll() is None
        time.sleep(0.02)
    job.kill()
    job.wait()
    monkeypatch.setattr(sys, "argv", command)
    runpy.run_path(command[0], run_name="__main__")
    again = capsys.readouterr()
    assert (float(again.out), again.err) == (328350.0, "")
    assert len((tmp_path / "log").read_text().split()) <= 12  # ten tiles, the probe, and the interrupted tile again


def test_an_interrupt_says_what_is_kept(tmp_path):
    def interrupted(a):
        if 70 in a:
            raise KeyboardInterrupt
        return a

    path = tmp_path / "grid.zarr"
    with pytest.raises(KeyboardInterrupt, match=r"70 of 100 points are kept in .*\.parts; the same call"):
        sweep(interrupted, a=np.arange(100.0), batch_size=10, path=path)
    with pytest.raises(KeyboardInterrupt, match="Nothing is kept; give path="):
        sweep(interrupted, a=np.arange(100.0), batch_size=10)


def test_a_resumed_bar_starts_where_it_stopped(tmp_path, capsys):
    stop = tmp_path / "stop"
    stop.touch()

    def square(a):
        if stop.exists() and 70 in a:
            raise KeyboardInterrupt
        return a**2

    path = tmp_path / "grid.zarr"
    with pytest.raises(KeyboardInterrupt):
        sweep(square, a=np.arange(100.0), batch_size=10, path=path)
    stop.unlink()
    sweep(square, a=np.arange(100.0), batch_size=10, path=path, progress=True)
    assert "70%" in capsys.readouterr().err.split("\r")[1]


@pytest.mark.slow
def test_a_large_zarr_result_is_not_read_before_it_is_used(tmp_path):
    made = sweep(lambda a, b: a + b, a=np.arange(200.0), b=np.arange(300.0), path=tmp_path / "grid.zarr")
    assert not made.value._in_memory
    np.testing.assert_array_equal(made.value, np.add.outer(np.arange(200.0), np.arange(300.0)))
    import xarray

    stored = xarray.open_dataset(tmp_path / "grid.zarr", engine="zarr")
    assert stored.value.encoding["chunks"] == (13, 300)
    assert stored.attrs["fingerprint"] == made.attrs["fingerprint"]


@pytest.mark.thorough
def test_eight_devices_of_one_process_give_the_same_bits_as_one():
    """A program is compiled for each device, so all batches have one size, and nothing is optimised, to save time."""
    code = """
import jax, numpy as np, jaxdp
def f(sigma, delta): return jaxdp.epsilon(jaxdp.Gaussian(sigma), delta)
axes = dict(sigma=np.linspace(0.5, 4, 40), delta=np.geomspace(1e-9, 1e-3, 32))
one, eight = (jaxdp.sweep(f, batch_size=8, devices=devices, **axes) for devices in (None, jax.devices()))
assert len(jax.devices()) == 8
print((one.f == eight.f).all().item())
"""
    flags = ["force_host_platform_device_count=8", "backend_optimization_level=0", "cpu_use_fusion_emitters=false"]
    environment = ENVIRONMENT | {"XLA_FLAGS": " ".join(f"--xla_{flag}" for flag in flags)}
    made = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert made.stdout == "True\n", made.stderr
