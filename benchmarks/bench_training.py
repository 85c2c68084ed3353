"""Overhead of the private step against optax.sgd with hand-added noise, and the cost of one epsilon per person.

Writes benchmarks/results/training.md. Run: python benchmarks/bench_training.py
"""

import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdp
from jaxdp.training import DPSGD, ClippedSum, NoisyProjectedSGD, StronglyConvexLoss

RESULTS = pathlib.Path(__file__).parent / "results" / "training.md"
SIZES = (1_000, 100_000, 1_000_000)
REPEATS = 31
BATCH = 64
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


def free_gradient(params, features, labels):
    """2% of the parameters: nearly free, so that the update alone is measured."""
    return jax.tree.map(lambda p: 0.02 * p, params)


def logistic_gradient(params, features, labels):
    """Mean gradient of L2-regularised logistic regression over one batch."""

    def loss(params):
        weights = jnp.concatenate([params["w"], params["b"]])
        ridge = 0.01 * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))
        return jnp.mean(jax.nn.softplus(-labels * (features @ weights))) + ridge

    return jax.grad(loss)(params)


def training_loop(tx, gradient, as_grads, steps, size):
    """A jitted scan of gradient, update and apply."""
    rng = np.random.default_rng(0)
    features = jnp.asarray(rng.standard_normal((BATCH, size)) / np.sqrt(size), jnp.float32)
    labels = jnp.asarray(rng.choice([-1.0, 1.0], BATCH), jnp.float32)

    def step(carry, _):
        params, state = carry
        updates, state = tx.update(as_grads(gradient(params, features, labels)), state, params)
        return (optax.apply_updates(params, updates), state), None

    def run(params):
        return jax.lax.scan(step, (params, tx.init(params)), None, length=steps)[0][0]

    return jax.jit(run)


def interleaved(loops, params):
    """(seconds of all runs, seconds of the first run with compiling) of each loop.

    The loops run in turn, so that a change of the machine's speed affects all alike.
    """
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


def overhead_rows(gradient):
    key = jax.random.key(0)
    dpsgd = DPSGD(clip_norm=1.0, noise_multiplier=0.05, sampling_probability=1.0)
    transformations = {
        HAND: by_hand(key),
        "NoisyProjectedSGD": private_sgd().optimizer(key),
        HAND_RADIUS: by_hand(key, 10.0),
        "NoisyProjectedSGD, radius 10": private_sgd(radius=10.0).optimizer(key),
        "DPSGD (sum given)": dpsgd.optimizer(key, learning_rate=1.0),
    }
    for size in SIZES:
        steps = max(10, min(5000, 10_000_000 // size))
        if gradient is logistic_gradient:
            steps = max(20, steps // 10)
        params = {"w": jnp.ones(size - 10), "b": jnp.ones(10)}
        loops = {}
        for name, tx in transformations.items():
            wrap = (lambda g: ClippedSum(g, jnp.int32(0))) if "DPSGD" in name else lambda g: g
            loops[name] = training_loop(tx, gradient, wrap, steps, size)
        times, compiled = interleaved(loops, params)
        for name, values in times.items():
            base = min(times[HAND_RADIUS if "radius" in name else HAND])
            best = min(values)
            yield (
                f"| {size:,} | {name} | {best / steps * 1e6:.1f} "
                f"| {100 * (best / base - 1):+.1f}% | {compiled[name]:.2f} |"
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
        f"Best of {REPEATS} interleaved runs, compiled and warmed up: the least disturbed by others.",
        "",
        "## One training step: microseconds, and overhead against optax.sgd with the same noise added by hand",
        "",
        f"L2-regularised logistic regression on a batch of {BATCH} examples: gradient, update, apply.",
        "",
        "| parameters | optimizer | us per step | overhead | first call, s |",
        "|---|---|---|---|---|",
        *overhead_rows(logistic_gradient),
        "",
        "## The update alone",
        "",
        "The gradient is 2% of the parameters, nearly free.",
        "",
        "| parameters | optimizer | us per step | overhead | first call, s |",
        "|---|---|---|---|---|",
        *overhead_rows(free_gradient),
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
