"""log(1 + x) and log(e^x - 1) for complex x, as (log of the modulus, angle), without cancellation near x = 0."""

import jax

from jaxdp.runtime.arrays import xp


def _log_modulus(re: jax.Array, im: jax.Array) -> jax.Array:
    """log|re + i im|, at least log(1e-300)."""
    size, other = xp.maximum(xp.abs(re), xp.abs(im)), xp.minimum(xp.abs(re), xp.abs(im))
    return xp.log(xp.maximum(size, 1e-300)) + 0.5 * xp.log1p((other / xp.where(size > 0, size, 1.0)) ** 2)


def log_one_plus(re: jax.Array, im: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(log|1 + x|, angle of 1 + x), x = re + i im. Near x = -1 the error is relative to |x|, not to |1 + x|."""
    excess = re * (2 + re) + im * im  # |1 + x|^2 - 1
    near = xp.abs(excess) < 0.25
    log_abs = xp.where(near, 0.5 * xp.log1p(xp.where(near, excess, 0.0)), _log_modulus(1 + re, im))
    return log_abs, xp.arctan2(im, 1 + re)


def log_expm1_complex(re: jax.Array, im: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(log|e^x - 1|, angle of e^x - 1), x = re + i im."""
    big = re > 40
    a = xp.where(big, 0.0, xp.maximum(re, -700.0))
    half = xp.sin(0.5 * im)
    real = xp.expm1(a) * xp.cos(im) - 2 * half * half
    imag = xp.exp(a) * xp.sin(im)
    return xp.where(big, re, _log_modulus(real, imag)), xp.where(big, im, xp.arctan2(imag, real))
