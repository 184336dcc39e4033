"""Compiles for TPUs under the compiler's linter: `python linted.py kernel`, `waits` or `forgets_to_wait`.

A process of its own, for the flags of `test_tpu_linter` are read when the compiler is loaded. Where it ends with status
0, nothing was found.
"""

import sys

import jax
import jax.numpy as jnp
import programs
import test_tpu
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from spec_jax.kernels import block_sizes, tpu

NAME = "verification_attention"


def kernel():
    """With one KV head per step, whole registers and whole blocks.

    The linter takes for uninitialised what a copy with a stride has filled, lanes beyond a head size of 64, and slots
    of the last block beyond the cache, which the kernel loads and masks.
    """
    options = {"scale": 1.0, "window": None, "soft_cap": None}
    for generation in ("v5e", "v6e", "v7x"):
        for width, head_dim, rows in ((16, 128, 128), (1, 128, 16), (20, 256, 160)):
            sizes = block_sizes.BlockSizes(rows, block=1024, heads=1)
            function = lambda *x, sizes=sizes: tpu.attention(*x, **options, sizes=sizes)  # noqa: E731
            shapes = programs.operands(width, 32, 4, head_dim, 4096, jnp.bfloat16)
            text = programs.compiled(test_tpu.device(generation), function, *shapes).as_text()
            assert NAME in text  # or the linter's filter would pass it by


def planted(wait):
    """A copy into a buffer that is read with or without waiting for it."""

    def body(x_ref, out_ref, buffer, semaphore):
        copy = pltpu.make_async_copy(x_ref, buffer, semaphore)
        copy.start()
        if wait:
            copy.wait()
        out_ref[...] = buffer[...] * 2

    x = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    call = pl.pallas_call(
        body,
        name=NAME,
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        out_specs=pl.BlockSpec(memory_space=pltpu.VMEM),
        out_shape=x,
        scratch_shapes=[pltpu.VMEM(x.shape, x.dtype), pltpu.SemaphoreType.DMA],
    )
    programs.compiled(test_tpu.device("v5e"), lambda x: call(x), x)


if __name__ == "__main__":
    {"kernel": kernel, "waits": lambda: planted(True), "forgets_to_wait": lambda: planted(False)}[sys.argv[1]]()
