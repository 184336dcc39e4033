"""What kernels for Hopper GPUs are made of: buffers and products of wgmma, and float32 in parts that it takes."""

from __future__ import annotations

import inspect
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


def tiled(shape, dtype, beside=0):
    """Shared memory that wgmma and TMA both take: tiles of 8 rows, swizzled as wide as the columns allow, and the
    `beside` columns of the other operand."""
    bits = 8 * jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(math.gcd(shape[-1], beside) * bits)
    transforms = plgpu.TilingTransform((8, 8 * swizzle // bits)), plgpu.SwizzleTransform(swizzle)
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def parts(x: jax.Array) -> list[jax.Array]:
    """bfloat16 arrays that sum to x, exactly: the upper 8 bits of float32, the next, the last."""
    if x.dtype == jnp.bfloat16:
        return [x]
    parts = []
    for _ in range(3):
        # Cut, not rounded: compilers may take a way to bfloat16 and back for nothing.
        upper = lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFF0000)
        upper = lax.bitcast_convert_type(upper, jnp.float32)
        parts.append(upper.astype(jnp.bfloat16))
        x = x - upper
    return parts


def product(x, y, shape):
    """x times y, lists of parts for wgmma, accumulated in float32 from zero, small products first."""

    def multiply(acc):
        pairs = [(i, n - i) for n in reversed(range(len(x))) for i in range(n + 1)]  # the rest is below float32's bits
        for i, j in pairs:
            plgpu.wgmma(acc, x[i], y[j])
        return acc[...]

    return pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))


def across(x, shape):
    """[rows] as [rows, n]."""
    return lax.broadcast_in_dim(x, shape, [0])


_INDEX = ((),) if "idx" in inspect.signature(plgpu.load).parameters else ()
"""jax 0.11 took the index out of `plgpu.load`."""


def load(ref, layout):
    """`ref` in registers."""
    return plgpu.load(ref, *_INDEX, layout=layout, optimized=False)
