"""Overhead of the private step against optax.sgd with hand-added noise, and the cost of one epsilon per person.

Writes benchmarks/results/training.md. Run: python benchmarks/bench_training.py
"""

import pathlib
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdp
from jaxdp.training import DPSGD, ClippedSum, NoisyProjectedSGD, StronglyConvexLoss

RESULTS = pathlib.Path(__file__).parent / "results" / "training.md"
SIZES = (1_000, 100_000, 1_000_000)
REPEATS = 9
PEOPLE = 100_000
HAND, HAND_RADIUS = "optax.sgd, noise by hand", "optax.sgd, noise and radius 10 by hand"


def private_sgd(**changes):
    settings = {
        "loss": StronglyConvexLoss.logistic_regression(1.0, 0.02),
        "learning_rate": 1.0,
        "noise_std": 0.05,
        "batch_size": 100,
        "num_examples": PEOPLE,
    }
    return NoisyProjectedSGD(**(settings | changes))


def by_hand(key, radius=None):
    """optax.sgd behind hand-added noise: what a user would write without the plug-in, and without its checks."""
    sgd = optax.sgd(1.0)

    def init(params):
        return sgd.init(params), jnp.zeros((), jnp.int32)

    def update(grads, state, params):
        inner, count = state
        step_key = jax.random.fold_in(key, count)
        leaves, tree = jax.tree.flatten(grads)
        keys = [jax.random.fold_in(step_key, i) for i in range(len(leaves))]
        noisy = [g + 0.05 * jax.random.normal(k, g.shape) for g, k in zip(leaves, keys, strict=True)]
        updates, inner = sgd.update(jax.tree.unflatten(tree, noisy), inner, params)
        if radius is not None:
            moved = optax.projections.projection_l2_ball(optax.apply_updates(params, updates), radius)
            updates = jax.tree.map(jnp.subtract, moved, params)
        return updates, (inner, count + 1)

    return optax.GradientTransformation(init, update)


def training_loop(tx, as_grads, steps):
    """A jitted scan of update and apply; the gradient is 2% of the parameters, so that the step itself is measured."""

    def step(carry, _):
        params, state = carry
        updates, state = tx.update(as_grads(jax.tree.map(lambda p: 0.02 * p, params)), state, params)
        return (optax.apply_updates(params, updates), state), None

    def run(params):
        return jax.lax.scan(step, (params, tx.init(params)), None, length=steps)[0][0]

    return jax.jit(run)


def interleaved(loops, params):
    """Median seconds of each loop, measured in turns so that a drifting machine hurts all alike; compile first."""
    compile_times = {}
    for name, loop in loops.items():
        start = time.perf_counter()
        jax.block_until_ready(loop(params))
        compile_times[name] = time.perf_counter() - start
    times = {name: [] for name in loops}
    for _ in range(REPEATS):
        for name, loop in loops.items():
            start = time.perf_counter()
            jax.block_until_ready(loop(params))
            times[name].append(time.perf_counter() - start)
    return times, compile_times


def overhead_rows():
    key = jax.random.key(0)
    dpsgd = DPSGD(clip_norm=1.0, noise_multiplier=0.05, sampling_probability=1.0)
    for size in SIZES:
        steps = max(10, min(5000, 10_000_000 // size))
        params = {"w": jnp.ones(size - 10), "b": jnp.ones(10)}
        same = lambda g: g  # noqa: E731
        loops = {
            HAND: training_loop(by_hand(key), same, steps),
            "NoisyProjectedSGD": training_loop(private_sgd().optimizer(key), same, steps),
            HAND_RADIUS: training_loop(by_hand(key, 10.0), same, steps),
            "NoisyProjectedSGD, radius 10": training_loop(private_sgd(radius=10.0).optimizer(key), same, steps),
            "DPSGD (sum given)": training_loop(
                dpsgd.optimizer(key, learning_rate=1.0), lambda g: ClippedSum(g, jnp.int32(0)), steps
            ),
        }
        times, compiled = interleaved(loops, params)
        for name, values in times.items():
            base = times[HAND_RADIUS if "radius" in name else HAND]
            ratio = statistics.median(v / b for v, b in zip(values, base, strict=True))
            yield (
                f"| {size:,} | {name} | {statistics.median(values) / steps * 1e6:.1f} "
                f"| {100 * (ratio - 1):+.1f}% | {compiled[name]:.2f} |"
            )


def query_rows():
    everyone = np.arange(PEOPLE)
    cases = {
        "constant rate, 1 epoch": (private_sgd(), 1_000),
        "constant rate, 100 epochs": (private_sgd(), 100_000),
        "decaying rate, 100 epochs": (private_sgd(learning_rate=lambda t: 1.0 / (1.0 + 1e-3 * t)), 100_000),
    }
    for name, (sgd, steps) in cases.items():
        timings, slow = [], None
        for _ in range(4):
            start = time.perf_counter()
            record = sgd.after(steps, example=everyone)
            middle = time.perf_counter()
            epsilon = jaxdp.epsilon(record, 1e-5)
            end = time.perf_counter()
            timings.append((middle - start, end - middle))
        first, best = timings[0], min(timings[1:], key=sum)
        if steps <= 1_000:
            start = time.perf_counter()
            slow = jaxdp.epsilon(sgd.iteration(steps, example=PEOPLE - 1), 1e-5)
            slow_time = time.perf_counter() - start
        gap = "" if slow is None else f"{abs(epsilon[-1] / slow - 1):.1e} ({slow_time:.2f} s for one)"
        yield f"| {name} | {sum(first):.2f} | {best[0]:.3f} | {best[1]:.3f} | {sum(best):.3f} | {gap} |"


def main():
    lines = [
        "# Training plug-in",
        "",
        f"jax {jax.__version__}, {jax.devices()[0].device_kind} ({jax.default_backend()}), optax {optax.__version__}.",
        f"Medians of {REPEATS} interleaved runs, compiled and warmed up; the machine was shared.",
        "",
        "## One step: microseconds, and overhead against optax.sgd with the same noise added by hand",
        "",
        "| parameters | optimizer | us per step | overhead | first call, s |",
        "|---|---|---|---|---|",
        *overhead_rows(),
        "",
        "The gradient is nearly free here, so these are upper bounds on the overhead of a training step.",
        "",
        f"## One epsilon for each of {PEOPLE:,} people (seconds)",
        "",
        "| schedule | first call with compilation | schedule to mu | mu to epsilon | together "
        "| gap to the step-by-step route |",
        "|---|---|---|---|---|---|",
        *query_rows(),
        "",
    ]
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text("\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
