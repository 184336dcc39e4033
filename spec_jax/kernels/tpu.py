"""Verification attention on TPUs (Mosaic): a flight and its query group are one tile against each KV block.

One grid step computes one KV block for the packed rows of a few KV heads, which are independent of one another, so that
the compiler interleaves their chains of product, maximum, exponential and product. Pallas fetches the next block
meanwhile; past a row's last block the index stays where it is, and nothing is fetched.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from spec_jax.kernels.block_sizes import LANES, BlockSizes
from spec_jax.kernels.masks import MASKED
from spec_jax.kernels.packing import Packing
from spec_jax.kernels.reference import precision

LOG2E = math.log2(math.e)


# Traced and lowered once for all layers of a model.
@functools.partial(jax.jit, static_argnames=("scale", "window", "soft_cap", "sizes", "interpret"))
def attention(q, k, v, start, ancestors, *, scale, window, soft_cap, sizes: BlockSizes, interpret=False) -> jax.Array:
    """See `spec_jax.kernels.attention.attention`, which checks the arguments.

    A flight of more rows than a tile takes several, each with its own pass over the cache.
    """
    batch, width, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    packing = Packing(width, kv_heads, heads // kv_heads, sizes.rows)
    bits, lowest = packing.masks(ancestors, start, window)
    slots = start, lowest.min(axis=(1, 2, 3))
    options = {"in_flight": width, "scale": scale, "windowed": window is not None, "soft_cap": soft_cap}
    out = _tiles(packing.queries(q), bits, lowest, k, v, slots, **options, sizes=sizes, interpret=interpret)
    return packing.outputs(out)


@dataclasses.dataclass(frozen=True)
class _Known:
    """Stands for a prefetched scalar of every sequence whose value is known at compile time."""

    value: int

    def __getitem__(self, sequence):
        return np.int32(self.value)


def for_static_profile(q, bits, lowest, k, v, *, committed: int, in_flight: int, scale, sizes: BlockSizes) -> jax.Array:
    """The kernel alone, with as many committed slots in every sequence, fixed at compile time.

    The compiler's static profile cannot follow scalars that are prefetched at run time; it counts this instead. Nothing
    else uses it.

    Args:
      q: packed, [batch, kv_heads, tiles, rows, head_dim], with `bits` and `lowest` as `Packing.masks` makes them.
      k, v: [batch, kv_heads, capacity, head_dim].
      committed: slots of every sequence; `in_flight` rows stand behind them.
      sizes: with one KV head per step; of more the profile says 0 cycles, unless the cache is one block.

    Returns:
      What `Packing.outputs` takes.
    """
    options = {"in_flight": in_flight, "scale": scale, "windowed": False, "soft_cap": None, "interpret": False}
    return _tiles(q, bits, lowest, k, v, (_Known(committed), _Known(0)), sizes=sizes, **options)


def _tiles(q, bits, lowest, k, v, slots, *, in_flight, scale, windowed, soft_cap, sizes, interpret):
    """Packed queries [batch, kv_heads, tiles, rows, head_dim] to outputs of that shape.

    Args:
      slots: of every sequence, how many are committed and the first that any row sees: int32 [batch] each, which are
        prefetched, or `_Known`.
    """
    rows, block, step_heads = sizes.rows, sizes.block, sizes.heads
    batch, kv_heads, tiles, _, head_dim = q.shape
    capacity, words = k.shape[2], bits.shape[-1]
    known = tuple(x for x in slots if isinstance(x, _Known))
    prefetched = () if known else slots

    def blocks(b, start_ref, lowest_ref):
        last = jnp.minimum(start_ref[b] + in_flight - 1, capacity - 1) // block
        return jnp.minimum(lowest_ref[b] // block, last), last

    def at_kv(b, h, t, j, *refs):
        first, last = blocks(b, *known, *refs)
        return b, h, jnp.clip(j, first, last), 0

    kernel = functools.partial(
        _kernel,
        *known,
        blocks=blocks,
        in_flight=in_flight,
        capacity=capacity,
        scale=scale,
        windowed=windowed,
        soft_cap=soft_cap,
    )
    q_spec = pl.BlockSpec((1, step_heads, 1, rows, head_dim), lambda b, h, t, j, *_: (b, h, t, 0, 0))
    kv_spec = pl.BlockSpec((1, step_heads, block, head_dim), at_kv)
    return pl.pallas_call(
        kernel,
        name="verification_attention",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetched),
            grid=(batch, kv_heads // step_heads, tiles, -(-capacity // block)),
            in_specs=[
                q_spec,
                pl.BlockSpec((1, 1, rows, words), lambda b, h, t, j, *_: (b, t, 0, 0)),
                pl.BlockSpec((1, 1, rows, 1), lambda b, h, t, j, *_: (b, t, 0, 0)),
                kv_spec,
                kv_spec,
            ],
            out_specs=q_spec,
            scratch_shapes=[
                pltpu.VMEM((step_heads, rows, LANES), jnp.float32),
                pltpu.VMEM((step_heads, rows, LANES), jnp.float32),
                pltpu.VMEM((step_heads, rows, head_dim), jnp.float32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),
        interpret=interpret,
    )(*prefetched, q, bits, lowest, k, v)


def _kernel(
    start_ref,
    lowest_ref,
    q_ref,
    bits_ref,
    lowest_rows_ref,
    k_ref,
    v_ref,
    out_ref,
    peak_ref,
    total_ref,
    sum_ref,
    *,
    blocks,
    in_flight: int,
    capacity: int,
    scale: float,
    windowed: bool,
    soft_cap: float | None,
):
    b, j = pl.program_id(0), pl.program_id(3)
    start, block = start_ref[b], k_ref.shape[2]
    first, last = blocks(b, start_ref, lowest_ref)
    heads = range(q_ref.shape[1])
    # exp2 is what the hardware has: log2(e) joins the scale, and both the maximum's.
    factor = LOG2E if soft_cap else scale * LOG2E

    @pl.when(j == 0)
    def _():
        peak_ref[...] = jnp.full_like(peak_ref, MASKED)
        total_ref[...] = jnp.zeros_like(total_ref)
        sum_ref[...] = jnp.zeros_like(sum_ref)

    def add(seen, written):
        """Adds this block; `seen` [rows, block] and `written` [block, 1] are None where all of it counts."""
        for h in heads:
            v = v_ref[0, h]
            if written is not None:
                v = jnp.where(written, v, 0)  # a zero weight does not silence a NaN in a slot not yet written
            scores = _product(q_ref[0, h, 0], k_ref[0, h], 1)
            if soft_cap:
                scores = soft_cap * jnp.tanh(scores * (scale / soft_cap))
            if seen is not None:
                scores = jnp.where(seen, scores, MASKED)
            old = peak_ref[h, :, :1]
            peak = jnp.maximum(old, scores.max(axis=1, keepdims=True))
            weights = jnp.exp2(scores * factor - peak * factor)
            if seen is not None:
                weights = jnp.where(seen, weights, 0.0)
            shrink = jnp.exp2((old - peak) * factor)
            total_ref[h] = total_ref[h] * shrink + weights.sum(axis=1, keepdims=True)
            sum_ref[h] = sum_ref[h] * shrink + _product(weights.astype(v.dtype), v, 0)
            peak_ref[h] = jnp.broadcast_to(peak, peak_ref.shape[1:])

    # Most blocks hold committed slots alone, inside the window of all rows, and need no mask.
    whole = (j + 1) * block <= start
    if windowed:
        whole &= j * block >= jnp.max(lowest_rows_ref[0, 0])
    inside = (j >= first) & (j <= last)

    @pl.when(inside & whole)
    def _():
        add(None, None)

    @pl.when(inside & ~whole)
    def _():
        slots = j * block + lax.broadcasted_iota(jnp.int32, (1, block), 1)
        bit = jnp.maximum(slots - start + 1, 0)  # bit 0 stands for all committed slots
        hit = jnp.zeros((q_ref.shape[3], block), jnp.uint32)
        for word in range(bits_ref.shape[-1]):
            held = (bit // 32 == word) & (slots < capacity)  # the last block may reach beyond the cache
            one = jnp.where(held, jnp.uint32(1) << (bit % 32).astype(jnp.uint32), 0)
            hit |= bits_ref[0, 0, :, word : word + 1] & one
        seen = hit != 0
        if windowed:
            seen &= slots >= lowest_rows_ref[0, 0]
        down = j * block + lax.broadcasted_iota(jnp.int32, (block, 1), 0)
        add(seen, down < jnp.minimum(start + in_flight, capacity))

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        for h in heads:
            total = total_ref[h, :, :1]  # 0 where a row saw nothing at all
            out_ref[0, h, 0] = (sum_ref[h] / jnp.where(total == 0, 1.0, total)).astype(out_ref.dtype)


def _product(x: jax.Array, y: jax.Array, axis: int) -> jax.Array:
    """x [rows, n] times y over y's `axis`, accumulated in float32."""
    return lax.dot_general(
        x, y, (((1,), (axis,)), ((), ())), precision=precision(y), preferred_element_type=jnp.float32
    )
