"""Checkpoints of training: a restored run continues exactly; rewound counts, other keys and shapes are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp.training import Checkpoints, NoisyProjectedSGD, RewoundError, StronglyConvexLoss, refuse_rewind

pytest.importorskip("orbax.checkpoint")
pytestmark = pytest.mark.filterwarnings("default")  # elsewhere warnings are errors; orbax has warnings of its own

SGD = NoisyProjectedSGD(
    loss=StronglyConvexLoss.logistic_regression(1.0, 0.02),
    learning_rate=1.0,
    noise_std=0.1,
    batch_size=2,
    num_examples=6,
)
KEY = jax.random.key(3)
PARAMS = {"w": jnp.zeros((4,)), "b": jnp.zeros(())}


def train(params, state, steps, tx):
    for _ in range(steps):
        grads = jax.tree.map(lambda p: 0.02 * p + 0.1, params)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def test_a_restored_run_ends_where_the_uninterrupted_one_does(tmp_path):
    tx = SGD.optimizer(KEY)
    whole, whole_state = train(PARAMS, tx.init(PARAMS), 7, tx)
    half, half_state = train(PARAMS, tx.init(PARAMS), 3, tx)
    Checkpoints(tmp_path).save(half, half_state)

    fresh = SGD.optimizer(KEY)
    params, state = Checkpoints(tmp_path).restore(PARAMS, fresh.init(PARAMS))
    assert int(state.count) == 3 and state.count.dtype == jnp.int32 and state.key.dtype == jnp.uint32
    params, state = train(params, state, 4, fresh)
    jax.tree.map(np.testing.assert_array_equal, params, whole)
    assert jaxdp.epsilon(SGD.after(state.count), 1e-5) == jaxdp.epsilon(SGD.after(whole_state.count), 1e-5)


def test_a_restored_run_draws_noise_that_was_not_drawn_before(tmp_path):
    tx = SGD.optimizer(KEY)
    state, drawn = tx.init(PARAMS), []
    zero = jax.tree.map(jnp.zeros_like, PARAMS)
    for interrupted in (False, False, True, False):
        if interrupted:
            Checkpoints(tmp_path).save(PARAMS, state)
            _, state = Checkpoints(tmp_path).restore(PARAMS, tx.init(PARAMS))
        updates, state = tx.update(zero, state, PARAMS)
        drawn += [np.ravel(u) for u in jax.tree.leaves(updates)]
    assert np.unique(np.concatenate(drawn)).size == 20


def test_a_rewound_count_is_refused_on_saving_and_on_restoring(tmp_path):
    tx = SGD.optimizer(KEY)
    early, early_state = train(PARAMS, tx.init(PARAMS), 2, tx)
    late, late_state = train(early, early_state, 3, tx)
    store = Checkpoints(tmp_path)
    store.save(early, early_state)
    store.save(late, late_state)
    assert store.furthest() == 5
    with pytest.raises(RewoundError, match="at least 5, which this run has reached, got 2"):
        store.save(early, early_state)
    with pytest.raises(RewoundError, match="at least 5"):
        store.restore(PARAMS, tx.init(PARAMS), count=2)
    _, further = train(late, late_state, 1, tx)
    with pytest.raises(RewoundError, match="at least 6"):
        store.restore(PARAMS, further)
    assert int(store.restore(PARAMS, tx.init(PARAMS))[1].count) == 5


def test_another_key_or_an_empty_directory_is_refused(tmp_path):
    tx = SGD.optimizer(KEY)
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        Checkpoints(tmp_path).restore(PARAMS, tx.init(PARAMS))
    Checkpoints(tmp_path).save(PARAMS, tx.init(PARAMS))
    with pytest.raises(ValueError, match="state.key must be the key of the checkpoint"):
        Checkpoints(tmp_path).restore(PARAMS, SGD.optimizer(jax.random.key(4)).init(PARAMS))


def test_the_check_alone_needs_no_orbax():
    state = SGD.optimizer(KEY).init(PARAMS)
    refuse_rewind(state, 0)
    with pytest.raises(RewoundError, match="at least 1"):
        refuse_rewind(state, 1)


def test_the_state_of_a_chain_is_refused_by_name(tmp_path):
    state = optax.chain(SGD.optimizer(jax.random.key(4)), optax.identity()).init(PARAMS)
    for call in (Checkpoints(tmp_path).save, Checkpoints(tmp_path).restore):
        with pytest.raises(TypeError, match="state must be a NoisyState, got tuple"):
            call(PARAMS, state)
    refuse_rewind(state, 0)
    with pytest.raises(RewoundError):
        refuse_rewind(state, 1)


@pytest.mark.parametrize("other", [{"w": jnp.zeros((5,)), "b": jnp.zeros(())}, {"w": jnp.zeros((4,))}])
def test_other_parameters_than_those_saved_are_one_sentence(other, tmp_path):
    tx = SGD.optimizer(KEY)
    Checkpoints(tmp_path).save(PARAMS, tx.init(PARAMS))
    with pytest.raises(ValueError, match="params must have the structure and shapes of those saved at"):
        Checkpoints(tmp_path).restore(other, tx.init(other))


def test_a_place_for_checkpoints_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    for wrong in (None, tmp_path / "file"):
        with pytest.raises(ValueError, match="directory must be a folder, or one that can be made"):
            Checkpoints(wrong)
