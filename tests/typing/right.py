"""What users write. `mypy --strict` must accept every line; the file is checked and never run."""

import functools
import math
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

import jaxdp
from jaxdp import Bounds, Mechanism
from jaxdp.domains import POSITIVE, field
from jaxdp.typing import Array, Bound, RealField, Relation

# Values of fields: numbers, lists, NumPy and JAX arrays, and results of verbs.
jaxdp.Gaussian(1)
jaxdp.Gaussian(noise_multiplier=1.5)
jaxdp.Gaussian([1.0, 2.0])
jaxdp.Gaussian((1, 2, 4))
jaxdp.Gaussian(np.float32(1.0))
jaxdp.Gaussian(np.linspace(1.0, 2.0, 5)[:, None])
jaxdp.Gaussian(jnp.array([1.0, 2.0]))
jaxdp.Gaussian([jaxdp.epsilon(jaxdp.Laplace(b), 1e-6) for b in (1.0, 2.0)])
jaxdp.DiscreteGaussian(2.0)
jaxdp.DiscreteGaussian(2.0, sensitivity=3)
jaxdp.DiscreteLaplace(scale=1.0, sensitivity=np.array([1, 2]))
jaxdp.RandomizedResponse(1.0)
jaxdp.RandomizedResponse([1.0, 2.0], num_categories=10)
jaxdp.DiscretePair([0.6, 0.4], [[0.5, 0.5], [0.4, 0.6]])
jaxdp.DiscretePair(p=np.array([0.6, 0.4]), q=np.array([0.4, 0.6]))
jaxdp.NoisyIteration(contraction=[0.9] * 10, noise_std=np.ones(10), shift=jnp.ones(10))
jaxdp.PureDP(0.1)
jaxdp.ApproximateDP(0.1, 1e-9)
jaxdp.FiniteRandomizer([[0.9, 0.1], [0.1, 0.9]])
jaxdp.FiniteRandomizer(np.full((5, 2, 2), 0.5))
jaxdp.UnaryEncoding(2.0, 16, optimized=False)
jaxdp.SubsetSelection(2.0, 16)
jaxdp.SubsetSelection(2.0, 16, subset_size=[1, 2])
jaxdp.LocalHashing(2.0, num_buckets=None, collision_probability=0.5)

# Records hold records.
randomizer = jaxdp.LocalRandomizer(4.0, delta=1e-9)
shuffled = jaxdp.Shuffled(randomizer, num_users=100_000, bound="stronger")
named = [jaxdp.LocalLaplace(1.0), jaxdp.HadamardResponse(1.0)]
by_name = [jaxdp.Shuffled(each, 1000) for each in named]
sampled = jaxdp.PoissonSampled(jaxdp.Gaussian(1.0), sampling_probability=0.01)
training = jaxdp.repeat(sampled, 10_000)
several = jaxdp.repeat(jaxdp.FixedSizeSampled(jaxdp.Laplace(1.0), 0.01), np.arange(1, 5))
both = jaxdp.compose(training, shuffled, *by_name)
epochs = jaxdp.repeat(jaxdp.RandomAllocation(jaxdp.Gaussian([1.0, 2.0]), num_steps=100), 10)
always = jaxdp.RandomAllocation.same_in_every_epoch(jaxdp.Gaussian(1.0), 100, num_epochs=[1, 2])
assert jaxdp.from_json(jaxdp.to_json(both)) == both

# A field reads as a number or an array: a list has become an array.
gaussian = jaxdp.Gaussian([1.0, 2.0])
variance = gaussian.noise_multiplier**2
half = jaxdp.Gaussian(gaussian.noise_multiplier / 2)
local_epsilon = float(randomizer.epsilon)
outcomes = jaxdp.DiscretePair([0.6, 0.4], [0.4, 0.6]).p.shape[-1]
users = np.asarray(shuffled.num_users)

# Verbs: every kind of argument, and arithmetic with the results.
eps = jaxdp.epsilon(training, 1e-5)
eps = jaxdp.epsilon(training, delta=[1e-6, 1e-5], gap=1e-9)
eps = jaxdp.epsilon(training, jnp.array(1e-5), relation="add_or_remove")
delta: Array = jaxdp.delta(training, np.linspace(0.1, 3.0, 5), relation=None)
print(f"epsilon = {eps:.3f}, delta = {delta}, {100 * delta.max():.1e} percent")
number: float = float(eps)
total = 2 * eps + math.log(1 / float(delta)) - np.sqrt(eps) + eps[0]
chosen = np.where(eps < 1.0, eps, np.inf).tolist()
if jaxdp.epsilon(training, 1e-5) > 3.0:
    raise SystemExit(f"over budget: {float(eps):.2f}")
curve = jaxdp.renyi(training, order=[2, 4, 8.5, math.inf])
best = float(np.min(curve))
false_negatives = jaxdp.tradeoff(training, false_positive_rate=np.linspace(0, 1, 11))
moments = jaxdp.log_mgf(training, 0.5 + 1j).real + jaxdp.log_mgf(training, [1j, 2.0]).imag + jaxdp.log_mgf(training, 3)

# Bounds hold arrays.
lower, upper = jaxdp.epsilon_bounds(shuffled, 1e-6)
gap = (upper - lower) / upper
bounds: Bounds[Array] = jaxdp.delta_bounds(shuffled, 0.5, relation="replace_one")
numpy_bounds: Bounds[np.ndarray] = Bounds(np.zeros(2), np.ones(2))
bounds = numpy_bounds
print(f"{bounds.lower:.3g} <= delta <= {bounds.upper:.3g}")

# Calibration, with a lambda, a function and a class.
sigma = jaxdp.calibrate(lambda s: jaxdp.repeat(jaxdp.Gaussian(s), 100), epsilon=1.0, delta=1e-6, bracket=(1, 100.0))
sigma = jaxdp.calibrate(jaxdp.Gaussian, epsilon=[0.5, 1.0], delta=1e-6)
print(f"noise multiplier {float(sigma[0]):.4f}", jaxdp.Gaussian(sigma), sigma * 2)


def shuffling(eps0: float) -> Mechanism:
    return jaxdp.Shuffled(jaxdp.LocalRandomizer(eps0), 100_000)


eps0 = jaxdp.calibrate(shuffling, epsilon=0.1, delta=1e-6, bracket=(0.1, 4.0), unreachable="nan")

# The literal types in a user's own signatures.
all_relations: tuple[Relation, ...] = ("add", "remove", "add_or_remove")
worst = max(float(jaxdp.epsilon(training, 1e-5, relation=relation)) for relation in all_relations)


def report(eps0: float, bounds: tuple[Bound, ...] = ("clones", "stronger")) -> dict[Bound, float]:
    local = jaxdp.LocalRandomizer(eps0)
    return {bound: float(jaxdp.epsilon(jaxdp.Shuffled(local, 1000, bound), 1e-6)) for bound in bounds}


# jit, vmap and grad.
@jax.jit
def loss(noise: jax.Array) -> jax.Array:
    return jnp.square(jaxdp.epsilon(jaxdp.Gaussian(noise), 1e-5))


slope: Callable[..., jax.Array] = jax.grad(lambda noise: jaxdp.epsilon(jaxdp.Gaussian(noise), 1e-5))
many = jax.vmap(functools.partial(jaxdp.delta, jaxdp.Gaussian(1.0)))(jnp.linspace(0.0, 1.0, 5))


# A user's own mechanism.
@jaxdp.record
class TwoGaussians(Mechanism):
    """Two Gaussian releases, one of them with the default noise."""

    first: RealField = field(POSITIVE)
    second: RealField = field(POSITIVE, default=1.0)
    symmetric: ClassVar[bool] = True

    def log_mgf(self, z: jax.Array) -> jax.Array:
        return z * (z + 1) * jnp.asarray(1 / self.first**2 + 1 / self.second**2) / 2


own = jaxdp.epsilon(jaxdp.repeat(TwoGaussians([1.0, 2.0]), 10), 1e-5)

# Sweeps and plots.
dataset = jaxdp.sweep(
    lambda eps0, n, bound: jaxdp.epsilon_bounds(jaxdp.Shuffled(jaxdp.LocalRandomizer(eps0), n, bound), 1e-6),
    eps0=[1.0, 2.0],
    n=np.logspace(2, 4, 3).round(),
    bound=["clones", "stronger"],
    batch_size=100,
)
table = jaxdp.sweep(
    lambda n, relation, delta: {"shown": jaxdp.epsilon_bounds(jaxdp.Gaussian(n), delta, relation=relation), "n": n},
    n=range(1, 5),
    relation=[None, "add"],
    delta=1e-6,
)
axes = Figure().subplots()
jaxdp.plot.curves(axes, dataset.sel(bound="clones"), "n", y="upper", color="black").set_title("Shuffling")
