"""log(1 + x) and log(e^x - 1) of complex x, as modulus and angle, without cancellation next to 0."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def _log_modulus(re: jax.Array, im: jax.Array) -> jax.Array:
    """log|re + i im|, no less than log 1e-300."""
    size, other = jnp.maximum(jnp.abs(re), jnp.abs(im)), jnp.minimum(jnp.abs(re), jnp.abs(im))
    return jnp.log(jnp.maximum(size, 1e-300)) + 0.5 * jnp.log1p((other / jnp.where(size > 0, size, 1.0)) ** 2)


def log_one_plus(re: jax.Array, im: jax.Array) -> tuple[jax.Array, jax.Array]:
    """log(1 + x) of any complex x, as modulus and angle; next to -1 accurate to |x|, not to |1 + x|."""
    a, b = jnp.clip(re, -1.0, 1.0), jnp.clip(im, -1.0, 1.0)
    excess = a * (2 + a) + b * b
    near = (jnp.abs(excess) < 0.25) & (jnp.abs(re) < 1) & (jnp.abs(im) < 1)
    log_abs = jnp.where(near, 0.5 * jnp.log1p(jnp.where(near, excess, 0.0)), _log_modulus(1 + re, im))
    return log_abs, jnp.arctan2(im, 1 + re)


def log_expm1_complex(re: jax.Array, im: jax.Array) -> tuple[jax.Array, jax.Array]:
    """log|e^x - 1| and its angle, x = re + i im."""
    big = re > 40
    a = jnp.where(big, 0.0, jnp.maximum(re, -700.0))
    half = jnp.sin(0.5 * im)
    real = jnp.expm1(a) * jnp.cos(im) - 2 * half * half
    imag = jnp.exp(a) * jnp.sin(im)
    return jnp.where(big, re, _log_modulus(real, imag)), jnp.where(big, im, jnp.arctan2(imag, real))
