"""Settings of every test: strict promotion, the x64 flag untouched, the same hypothesis examples on every run."""

import hypothesis
import jax
import pytest

# Silent promotion hides float32 in a float64 sum. Only jaxdp's own code is strict about types: jax's library functions
# promote internally, and are not ours to fix.
jax.config.update("jax_numpy_rank_promotion", "raise")

# No deadline: the first example of a property compiles.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=50)
hypothesis.settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def x64_flag_is_left_as_found():
    """No verb, sweep or kernel may change the user's flag."""
    before = jax.config.jax_enable_x64
    yield
    assert jax.config.jax_enable_x64 == before
