"""Wrong calls. `mypy --strict` must refuse every line marked "error"; the file is checked and never run."""
# ruff: noqa: B015, B018

import jaxdp
from jaxdp.typing import Bound, Relation

gaussian = jaxdp.Gaussian(1.0)
local = jaxdp.LocalRandomizer(1.0)

# Fields of records.
jaxdp.Gaussian("hello")  # error
jaxdp.Gaussian(["1.0", "2.0"])  # error
jaxdp.Gaussian()  # error
jaxdp.Gaussian(None)  # error
jaxdp.Gaussian(1.0, 1e-5)  # error
jaxdp.Gaussian(sigma=1.0)  # error
jaxdp.Gaussian(gaussian)  # error
jaxdp.Laplace(1.0 + 1j)  # error
jaxdp.DiscreteGaussian(1.0, "2")  # error
jaxdp.ApproximateDP(1.0)  # error
jaxdp.DiscretePair([0.5, 0.5])  # error
jaxdp.RandomizedResponse(1.0, categories=10)  # error
jaxdp.SubsetSelection(1.0, 10, subset_size="best")  # error
jaxdp.UnaryEncoding(1.0, 10, optimized="no")  # error
jaxdp.NoisyIteration([0.9], [1.0])  # error
gaussian.noise_multiplier = 2.0  # error
text: str = gaussian.noise_multiplier  # error
gaussian.sigma  # error

# Records in records.
jaxdp.Shuffled(local)  # error
jaxdp.Shuffled(1.0, 1000)  # error
jaxdp.Shuffled(jaxdp.PureDP(1.0), 1000)  # error
jaxdp.Shuffled(gaussian, 1000)  # error
jaxdp.Shuffled(local, 1000, bound="strong")  # error
jaxdp.Shuffled(local, "1000")  # error
jaxdp.PoissonSampled(gaussian)  # error
jaxdp.PoissonSampled(0.01, gaussian)  # error
jaxdp.FixedSizeSampled(1.0, 0.01)  # error
jaxdp.RandomAllocation(1.0, num_steps=10)  # error
jaxdp.RandomAllocation.same_in_every_epoch(gaussian, 10, "5")  # error
jaxdp.repeat("x", 3)  # error
jaxdp.repeat(gaussian)  # error
jaxdp.repeat(gaussian, "3")  # error
jaxdp.compose([gaussian, gaussian])  # error
jaxdp.to_json({"noise_multiplier": 1.0})  # error
jaxdp.from_json(b"{}")  # error

# Verbs.
jaxdp.epsilon(1.0, 1e-5)  # error
jaxdp.epsilon(gaussian)  # error
jaxdp.epsilon(gaussian, "1e-5")  # error
jaxdp.epsilon(gaussian, 1e-5, "add")  # error
jaxdp.epsilon(gaussian, 1e-5, relation="replace")  # error
jaxdp.epsilon(gaussian, 1e-5, relation=True)  # error
jaxdp.epsilon(gaussian, 1e-5, gap="small")  # error
jaxdp.epsilon(jaxdp.Gaussian, 1e-5)  # error
jaxdp.delta(gaussian, eps=1.0)  # error
jaxdp.delta(gaussian, 1j)  # error
jaxdp.delta_bounds(gaussian, 1.0, relation="swap")  # error
jaxdp.renyi(gaussian, alpha=2.0)  # error
jaxdp.renyi(gaussian, 2j)  # error
jaxdp.log_mgf(gaussian, "1j")  # error
jaxdp.tradeoff(gaussian)  # error
y: str = jaxdp.epsilon(gaussian, 1e-5)  # error
lower, middle, upper = jaxdp.epsilon_bounds(gaussian, 1e-5)  # error
jaxdp.epsilon_bounds(gaussian, 1e-5) < 1.0  # error
jaxdp.epsilon_bounds(gaussian, 1e-5).middle  # error
pair: jaxdp.Bounds[str] = jaxdp.epsilon_bounds(gaussian, 1e-5)  # error
relation: Relation = "replace"  # error
bound: Bound = "clone"  # error

# Calibration and sweeps.
jaxdp.calibrate(gaussian, epsilon=1.0, delta=1e-5)  # error
jaxdp.calibrate(lambda sigma: 1.0, epsilon=1.0, delta=1e-5)  # error
jaxdp.calibrate(jaxdp.Gaussian, epsilon=1.0)  # error
jaxdp.calibrate(jaxdp.Gaussian, epsilon=1.0, delta=1e-5, bracket=1.0)  # error
jaxdp.calibrate(jaxdp.Gaussian, epsilon="1.0", delta=1e-5)  # error
jaxdp.calibrate(jaxdp.Gaussian, epsilon=1.0, delta=1e-5, unreachable="skip")  # error
jaxdp.sweep(gaussian, sigma=[1.0, 2.0])  # error
jaxdp.sweep(lambda sigma: jaxdp.delta(jaxdp.Gaussian(sigma), 1.0), sigma=[1.0, 2.0], batch_size="10")  # error
jaxdp.sweep(jaxdp.Gaussian, noise_multiplier=[1.0, 2.0])  # error
jaxdp.sweep(lambda sigma: jaxdp.delta(jaxdp.Gaussian(sigma), 1.0), sigma={"from": 1.0})  # error

# Names.
jaxdp.gaussian(1.0)  # error
jaxdp.Gausian(1.0)  # error
jaxdp.plotting  # error
