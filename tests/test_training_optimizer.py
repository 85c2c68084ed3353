"""The optax transformation of the plug-in: its step, noise and state, and other transformations around it."""

import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp.training import NoisyProjectedSGD, StronglyConvexLoss, poisson_batch

# A few float32 roundings of numbers of size one.
FLOAT32 = 2e-6
LOSS = StronglyConvexLoss.logistic_regression(feature_norm=1.0, l2=0.02)
KEY = jax.random.key(7)


def make(**changes):
    settings = {"loss": LOSS, "learning_rate": 1.0, "noise_std": 0.1, "batch_size": 4, "num_examples": 16}
    return NoisyProjectedSGD(**(settings | changes))


def tree(value=0.5, dtype=jnp.float32):
    return {"w": jnp.full((3, 2), value, dtype), "b": jnp.full((2,), value, dtype)}


def norm(params):
    return float(optax.tree.norm(params))


def test_a_step_is_the_projection_of_the_noisy_gradient_step():
    grads = tree(2.0)
    free, inside = make().optimizer(KEY), make(radius=1.0).optimizer(KEY)
    params = tree()
    moved, _ = free.update(grads, free.init(params), params)
    moved = optax.apply_updates(params, moved)
    noise = jax.tree.map(lambda m, p, g: p - g - m, moved, params, grads)
    draws = np.concatenate([np.ravel(n) for n in jax.tree.leaves(noise)]) / 0.1
    assert np.unique(draws).size == draws.size and 0.3 < draws.std() < 2
    projected, _ = inside.update(grads, inside.init(params), params)
    projected = optax.apply_updates(params, projected)
    assert norm(moved) > 1 and norm(projected) == pytest.approx(1.0, rel=FLOAT32)
    expected = optax.projections.projection_l2_ball(moved, 1.0)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=FLOAT32), projected, expected)


def test_the_noise_has_the_stated_standard_deviation():
    # 1e6 normal draws: the sample deviation misses by 0.5% with probability below 1e-11
    sgd = make(noise_std=0.3, learning_rate=2.0)
    params = {"w": jnp.zeros(10**6)}
    tx = sgd.optimizer(KEY)
    updates, _ = tx.update(params, tx.init(params), params)
    assert float(jnp.std(updates["w"])) == pytest.approx(0.6, rel=5e-3)


def test_a_users_own_projection_replaces_the_ball():
    tx = make(projection=lambda p: jax.tree.map(lambda x: jnp.clip(x, -0.1, 0.1), p)).optimizer(KEY)
    params = tree()
    updates, _ = tx.update(tree(), tx.init(params), params)
    assert all(float(jnp.abs(p).max()) <= 0.1 + FLOAT32 for p in jax.tree.leaves(optax.apply_updates(params, updates)))


def test_schedules_reach_the_step():
    sgd = make(learning_rate=lambda t: jnp.where(t == 0, 1.0, 0.5), noise_std=lambda t: 0.2 + 0.0 * t)
    tx = sgd.optimizer(KEY)
    params, state = tree(), tx.init(tree())
    zero = jax.tree.map(jnp.zeros_like, params)
    first, state = tx.update(zero, state, params)
    plain = make(noise_std=0.2).optimizer(KEY)
    expected, _ = plain.update(zero, plain.init(params), params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=FLOAT32), first, expected)
    second, _ = tx.update(zero, state, params)
    assert not np.allclose(second["w"], 0.5 * first["w"])


def test_noise_is_new_at_every_step_and_leaf_and_the_same_for_the_same_key():
    tx = make().optimizer(KEY)
    params = {"a": jnp.zeros((4,)), "b": jnp.zeros((4,))}
    state = tx.init(params)
    draws = []
    for _ in range(5):
        updates, state = tx.update(params, state, params)
        draws += [np.asarray(u) for u in jax.tree.leaves(updates)]
    assert np.unique(np.concatenate(draws)).size == 40
    again, _ = tx.update(params, tx.init(params), params)
    np.testing.assert_array_equal(again["a"], draws[0])
    other = make().optimizer(jax.random.key(8))
    changed, _ = other.update(params, other.init(params), params)
    assert not np.array_equal(changed["a"], draws[0])


def run_scan(sgd, key, steps):
    tx = sgd.optimizer(key)
    params = {"w": jnp.zeros((3,))}

    def step(carry, _):
        params, state = carry
        updates, state = tx.update(jax.tree.map(lambda p: 0.1 * p + 0.2, params), state, params)
        return (optax.apply_updates(params, updates), state), None

    return jax.lax.scan(step, (params, tx.init(params)), None, length=steps)[0]


def test_a_python_loop_a_jitted_loop_and_scan_agree():
    sgd = make()
    tx = sgd.optimizer(KEY)
    update = jax.jit(tx.update)
    params, slow = {"w": jnp.zeros((3,))}, {"w": jnp.zeros((3,))}
    state, slow_state = tx.init(params), tx.init(params)
    for _ in range(6):
        updates, state = update(jax.tree.map(lambda p: 0.1 * p + 0.2, params), state, params)
        params = optax.apply_updates(params, updates)
        updates, slow_state = tx.update(jax.tree.map(lambda p: 0.1 * p + 0.2, slow), slow_state, slow)
        slow = optax.apply_updates(slow, updates)
    scanned, scan_state = jax.jit(lambda: run_scan(sgd, KEY, 6))()
    np.testing.assert_allclose(params["w"], slow["w"], atol=FLOAT32)
    np.testing.assert_allclose(params["w"], scanned["w"], atol=FLOAT32)
    assert int(state.count) == int(slow_state.count) == int(scan_state.count) == 6
    assert jaxdp.epsilon(sgd.after(scan_state.count), 1e-5) == jaxdp.epsilon(sgd.after(6), 1e-5)


def test_vmap_over_seeds_gives_independent_runs():
    keys = jax.random.split(KEY, 3)
    params, state = jax.vmap(lambda key: run_scan(make(), key, 4))(keys)
    alone, _ = run_scan(make(), keys[1], 4)
    np.testing.assert_allclose(params["w"][1], alone["w"], atol=FLOAT32)
    assert np.unique(np.asarray(params["w"])).size == 9
    np.testing.assert_array_equal(state.count, [4, 4, 4])


def test_a_chain_of_it_alone_is_the_same_transformation():
    tx = optax.chain(make(radius=1.0).optimizer(KEY))
    params = tree()
    updates, state = jax.jit(tx.update)(tree(), tx.init(params), params)
    assert norm(optax.apply_updates(params, updates)) <= 1 + FLOAT32
    assert int(state[-1].count) == 1


def test_multi_steps_counts_and_draws_once_per_emitted_update():
    inner = make().optimizer(KEY)
    tx = optax.MultiSteps(inner, every_k_schedule=2)
    params, grads = tree(), tree(0.25)
    state = tx.init(params)
    nothing, state = tx.update(grads, state, params)
    assert norm(nothing) == 0 and int(state.inner_opt_state.count) == 0
    updates, state = tx.update(grads, state, params)
    expected, _ = inner.update(grads, inner.init(params), params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=FLOAT32), updates, expected)
    assert int(state.inner_opt_state.count) == 1


def test_bfloat16_gradients_move_float32_parameters():
    tx = make().optimizer(KEY)
    params = tree()
    state = tx.init(params)
    updates, state = tx.update(tree(0.25, jnp.bfloat16), state, params)
    expected, _ = tx.update(tree(0.25), tx.init(params), params)
    assert {u.dtype for u in jax.tree.leaves(updates)} == {jnp.dtype("float32")}
    jax.tree.map(np.testing.assert_array_equal, updates, expected)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_sixteen_bit_parameters_are_refused(dtype):
    with pytest.raises(TypeError, match="params must be float32 or float64.*rounding errors"):
        make().optimizer(KEY).init(tree(dtype=dtype))


def test_the_state_holds_integers_only_under_either_flag():
    for flag in (False, True):
        with jax.enable_x64(flag):
            dtype = jnp.float64 if flag else jnp.float32
            params = tree(dtype=dtype)
            tx = make().optimizer(jax.random.key(1))
            updates, state = tx.update(tree(dtype=dtype), tx.init(params), params)
            assert {leaf.dtype for leaf in jax.tree.leaves(state)} == {jnp.dtype("int32"), jnp.dtype("uint32")}
            assert {leaf.dtype for leaf in jax.tree.leaves(updates)} == {jnp.dtype(dtype)}


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_broken_entry_becomes_zero_and_the_noise_is_still_added(bad):
    tx = make().optimizer(KEY)
    params = tree()
    broken = tree(1.0) | {"b": jnp.array([1.0, bad])}
    updates, state = jax.jit(tx.update)(broken, tx.init(params), params)
    repaired = tree(1.0) | {"b": jnp.array([1.0, 0.0])}
    expected, clean = tx.update(repaired, tx.init(params), params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=FLOAT32), updates, expected)
    assert (int(state.nonfinite), int(clean.nonfinite), int(state.count)) == (1, 0, 1)


def test_settings_of_few_bits_are_exact_and_gradients_of_other_shapes_are_refused():
    loss = StronglyConvexLoss(1.0, 1.0)
    given = dict(learning_rate=1.0, noise_std=1.0, batch_size=1, num_examples=10)
    for name in ("radius", "rounding"):
        mu = [NoisyProjectedSGD(loss, **given, **{name: value}).after(10**6).mu for value in (np.int8(100), 100.0)]
        assert mu[0] == mu[1]
    tx = make().optimizer(KEY)
    with pytest.raises(ValueError, match="grads must have the shapes of the parameters"):
        tx.update(jax.tree.map(lambda p: jnp.stack([p, p]), tree()), tx.init(tree()), tree())


def test_a_missing_key_or_missing_parameters_is_an_error():
    with pytest.raises(ValueError, match="key must be a JAX random key, got None"):
        make().optimizer(None)
    for wrong in (3, jnp.zeros(2)):
        with pytest.raises(TypeError, match="key must be a JAX random key"):
            make().optimizer(wrong)
    with pytest.raises(ValueError, match="key must be one key"):
        make().optimizer(jax.random.split(KEY, 2))
    # With these keys leaf 1 at step 0 and leaf 0 at step 1 get equal noise, and under vmap all keys give the first's.
    for impl in ("unsafe_rbg", "rbg"):
        for call in (make().optimizer, lambda key: poisson_batch(0, key, num_examples=3, probability=0.5, size=3)):
            with pytest.raises(ValueError, match=f"key must be of impl 'threefry2x32', .* got '{impl}'"):
                call(jax.random.key(0, impl=impl))
    tx = make().optimizer(jax.random.PRNGKey(0))
    with pytest.raises(ValueError, match="params must be given"):
        tx.update(tree(), tx.init(tree()))
    with pytest.raises(TypeError, match="params must be floating"):
        tx.init({"w": jnp.arange(3)})


def logistic(w, example):
    x, y = example
    return jax.nn.softplus(-y * jnp.vdot(w, x))


def test_the_gradient_helper_is_the_gradient_of_the_fixed_divisor_objective():
    rng = np.random.default_rng(0)
    x, y = jnp.asarray(rng.normal(size=(4, 3)), jnp.float32), jnp.array([1.0, -1.0, 1.0, 1.0])
    w, mask = jnp.array([0.3, -0.2, 0.1]), jnp.array([True, True, True, False])

    def objective(w):
        losses = jax.vmap(logistic, (None, 0))(w, (x, y))
        return jnp.sum(jnp.where(mask, losses, 0.0)) / 4 + 0.01 * jnp.vdot(w, w)

    got = make().gradient(logistic, w, (x, y), mask)
    np.testing.assert_allclose(got, jax.grad(objective)(w), atol=FLOAT32)
    nothing = make().gradient(logistic, w, (x, y), jnp.zeros(4, bool))
    np.testing.assert_allclose(nothing, 0.02 * w, atol=FLOAT32)


def test_the_gradient_helper_leaves_out_a_broken_example_and_clips_when_told_to():
    x, y = jnp.array([[3.0, 0.0], [jnp.nan, 0.0]]), jnp.array([1.0, 1.0])
    w, mask = jnp.zeros(2), jnp.ones(2, bool)
    np.testing.assert_allclose(make().gradient(logistic, w, (x, y), mask), [-1.5 / 4, 0.0], atol=FLOAT32)
    clipped = make(clip=True).gradient(logistic, w, (x, y), mask)
    np.testing.assert_allclose(clipped, [-1.0 / 4, 0.0], rtol=2e-5)


def covered(sgd, steps, key=None):
    batches = [sgd.batch(t, key) for t in range(steps)]
    return [np.asarray(b.indices)[np.asarray(b.mask)] for b in batches]


def test_cyclic_batches_are_the_slots_that_are_accounted_for():
    sgd = make(num_examples=18, remainder="short", data_steps=6)
    rows = covered(sgd, 8)
    np.testing.assert_array_equal(np.concatenate(rows[:5]), np.arange(18))
    np.testing.assert_array_equal(rows[5], rows[0])
    assert [len(r) for r in rows] == [4, 4, 4, 4, 2, 4, 0, 0]
    assert np.concatenate(covered(make(num_examples=18), 4)).max() == 15


def test_reshuffled_batches_visit_everyone_once_an_epoch_in_a_new_order():
    rows = covered(make(order="reshuffled"), 8, jax.random.key(1))
    first, second = np.concatenate(rows[:4]), np.concatenate(rows[4:])
    np.testing.assert_array_equal(np.sort(first), np.arange(16))
    np.testing.assert_array_equal(np.sort(second), np.arange(16))
    assert not np.array_equal(first, second) and not np.array_equal(first, np.arange(16))
    with pytest.raises(ValueError, match="key must be"):
        make(order="reshuffled").batch(0)


MESH_PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import PartitionSpec as P
from jaxdp.training import DPSGD, NoisyProjectedSGD, StronglyConvexLoss

assert jax.device_count() == 8
mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
sgd = NoisyProjectedSGD(loss=StronglyConvexLoss(1.0, 1.0, 0.5), learning_rate=1.0, noise_std=1.0, batch_size=1,
                        num_examples=1, radius=2.0)
specs = {"whole": P(), "cut": P("d")}
params = {"whole": jnp.zeros((4,)), "cut": jnp.zeros((32,))}
key = jax.random.key(0)

def step(params, partition):
    tx = sgd.optimizer(key, partition=partition)
    updates, state = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
    updates["norm_flag"] = state.nonfinite
    return updates

def run(partition, whole_spec):
    out = {"whole": whole_spec, "cut": P("d"), "norm_flag": P()}
    f = jax.shard_map(lambda p: step(p, partition), mesh=mesh, in_specs=(specs,), out_specs=out, check_vma=False)
    return jax.jit(f)(params)

# replicated: every device's copy, stacked, must be the same four numbers; sharded: 32 different ones
result = run(specs, P("d"))
copies = np.asarray(result["whole"]).reshape(8, 4)
assert (copies == copies[0]).all() and np.unique(copies[0]).size == 4
assert np.unique(np.asarray(result["cut"])).size == 32
total = np.sqrt(np.sum(copies[0] ** 2) + np.sum(np.asarray(result["cut"]) ** 2))
assert abs(total - 2.0) < 1e-5, total
# without the partition every shard would draw the same block
try:
    run(None, P("d"))
except ValueError as error:
    assert "partition must give" in str(error)
else:
    raise AssertionError
# the checked mode accepts it too, and replicated outputs are known to be replicated
f = jax.shard_map(lambda p: step(p, specs), mesh=mesh, in_specs=(specs,), out_specs=specs | {"norm_flag": P()})
checked = jax.jit(f)(params)
np.testing.assert_array_equal(np.asarray(checked["cut"]), np.asarray(result["cut"]))
# under plain jit with sharded arrays the global draw is one draw
placed = jax.device_put(params, jax.tree.map(lambda s: jax.sharding.NamedSharding(mesh, s), specs,
                                             is_leaf=lambda s: isinstance(s, P)))
auto = jax.jit(lambda p: step(p, None))(placed)
assert np.unique(np.asarray(auto["cut"])).size == 32
# a gradient is clipped over all shards together, and a bad number in one of them leaves the example out everywhere
dpsgd = DPSGD(clip_norm=1.0, noise_multiplier=1e-9, sampling_probability=1.0)
data = {"whole": jnp.full((3, 4), 1e30), "cut": jnp.full((3, 32), 1e30).at[1, 5].set(jnp.nan)}

def clipped(params, data, by_hand, partition=specs):
    loss = lambda p, x: sum(jnp.sum(p[name] * x[name]) for name in p)
    if not by_hand:
        made = dpsgd.clipped_sum(loss, params, data, 0, key, microbatch=2, partition=partition)
        return made.total, made.nonfinite
    tx = dpsgd.optimizer(key, learning_rate=1.0, partition=partition)
    return tx.update(data, tx.init(params), params)[0], jnp.int32(1)

rows = {"whole": P(), "cut": P(None, "d")}
split = {"whole": P("d"), "cut": P("d")}
for by_hand in (False, True):
    for vma, partition, cut, why in ((True, specs, rows, ""), (False, specs, rows, "must have check_vma=True"),
                                     (True, P(), rows, "partition must say"), (True, specs, split, "")):
        f = jax.shard_map(lambda p, x: clipped(p, x, by_hand, partition), mesh=mesh, in_specs=(specs, cut),
                          out_specs=(specs, P()), check_vma=vma)
        if why:
            try:
                jax.jit(f)(params, data)
            except ValueError as error:
                assert why in str(error), error
            else:
                raise AssertionError((by_hand, why))
        elif cut is rows:
            total, bad = jax.jit(f)(params, data)
            norm = np.sqrt(sum(np.sum(np.asarray(each, np.float64) ** 2) for each in jax.tree.leaves(total)))
            assert 1.9999 < norm <= 2 and bad == 1, (by_hand, norm, bad)
# examples that are split over devices would be sampled by the same draw on each
f = jax.shard_map(lambda p, x: dpsgd.clipped_sum(lambda w, e: jnp.vdot(w, e), p, x, 0, key, partition=P()).total,
                  mesh=mesh, in_specs=(P(), P("d")), out_specs=P())
try:
    jax.jit(f)(jnp.zeros(4), jnp.ones((16, 4)))
except ValueError as error:
    assert "data must hold all examples" in str(error), error
else:
    raise AssertionError
print("eight devices agree")
"""


@pytest.mark.slow
def test_eight_devices_share_replicated_noise_never_repeat_sharded_noise_and_clip_together():
    flags = "--xla_force_host_platform_device_count=8"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    root = pathlib.Path(jaxdp.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", MESH_PROGRAM], env=environment, cwd=root, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "eight devices agree" in done.stdout
