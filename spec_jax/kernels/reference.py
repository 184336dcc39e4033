"""Verification attention in jax.numpy: what the kernels are held to, and what runs where there is none."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from spec_jax.cache import BLOCK, round_up
from spec_jax.kernels.masks import MASKED, lowest_slots, visible


def precision(x: jax.Array) -> lax.Precision | None:
    """float32 means float32: accelerators would otherwise multiply it in bfloat16 or TF32 passes."""
    return lax.Precision.HIGHEST if x.dtype == jnp.float32 else None


def attention(q, k, v, start, ancestors, *, scale, window, soft_cap, tile_rows) -> jax.Array:
    """See `spec_jax.kernels.attention.attention`, which checks the arguments.

    Blocks of `BLOCK` slots stand at absolute positions and are combined in order with the online softmax; a block
    beyond a row's length is an exact no-op for it. So a row's bits depend neither on the capacity nor on how long
    its batch mates are, and blocks beyond the longest row are never read.
    """
    batch, width, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    ancestors = jnp.broadcast_to(ancestors, (batch, *ancestors.shape[1:]))
    options = {"scale": scale, "window": window, "soft_cap": soft_cap, "in_flight": width}
    if tile_rows is None:
        return _attend(q, k, v, start, ancestors, **options)
    # Always whole tiles of one sequence, one after another: XLA's products of one row, its softmax sums of few rows and
    # its products without a batch all round differently from the rest, so every flight of every batch runs the very
    # same body.
    tile = max(tile_rows * kv_heads // heads, 1)
    padded = round_up(width, tile)
    q = jnp.pad(q, ((0, 0), (0, padded - width), (0, 0), (0, 0)))
    # A padding row sees what the last row sees: committed slots at the least, so its softmax is finite.
    ancestors = jnp.pad(ancestors, ((0, 0), (0, padded - width), (0, 0)), mode="edge")
    tiles = padded // tile
    split = (
        jnp.repeat(jnp.arange(batch), tiles),
        q.reshape(batch * tiles, 1, tile, heads, head_dim),
        ancestors.reshape(batch * tiles, 1, tile, -1),
    )
    out = lax.map(lambda x: _attend(x[1], k, v, start[x[0]][None], x[2], sequence=x[0], **options), split)
    return out.reshape(batch, padded, heads, head_dim)[:, :width]


def _attend(q, k, v, start, ancestors, *, scale, window, soft_cap, in_flight, sequence=None):
    """`attention` of query rows that share one product per KV head; `in_flight` rows stand behind `start`.

    `sequence` picks one row of the cache for a batch of one; None: q's batch is the cache's.
    """
    batch, width, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    rows = width * group
    # [b, w, (k g), h] -> [b, k, (w g), h]: the query group is packed with the tokens into the rows of one product.
    packed = q.reshape(batch, width, kv_heads, group, head_dim).transpose(0, 2, 1, 3, 4)
    packed = packed.reshape(batch, kv_heads, rows, head_dim)
    origin = jnp.int32(0) if sequence is None else sequence
    lowest = lowest_slots(ancestors, start, window)  # [b, w]

    def product(equation, x, y):
        return jnp.einsum(equation, x, y, preferred_element_type=jnp.float32, precision=precision(y))

    def block(index, carry):
        peak, total, weighted = carry
        first = index * BLOCK
        slots = first + jnp.arange(BLOCK)
        place, size = (origin, jnp.int32(0), first, jnp.int32(0)), (batch, kv_heads, BLOCK, head_dim)
        k_block, v_block = lax.dynamic_slice(k, place, size), lax.dynamic_slice(v, place, size)
        # A zero weight does not silence a NaN left in a slot that nobody has written yet.
        written = slots < start[:, None] + in_flight
        v_block = jnp.where(written[:, None, :, None], v_block, 0)
        scores = product("bkrh,bksh->bkrs", packed, k_block) * scale
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        seen = visible(ancestors, start, slots)  # [b, w, s]
        if window is not None:
            seen = seen & (slots >= lowest[:, :, None])
        seen = jnp.broadcast_to(seen[:, None, :, None], (batch, 1, width, group, BLOCK)).reshape(batch, 1, rows, BLOCK)
        scores = jnp.where(seen, scores, MASKED)
        new_peak = jnp.maximum(peak, scores.max(axis=-1))
        weights = jnp.where(seen, jnp.exp(scores - new_peak[..., None]), 0.0)
        shrink = jnp.exp(peak - new_peak)
        total = total * shrink + weights.sum(axis=-1)
        part = product("bkrs,bksh->bkrh", weights.astype(v.dtype), v_block)
        return new_peak, total, weighted * shrink[..., None] + part

    blocks = (jnp.max(start) + in_flight + BLOCK - 1) // BLOCK
    blocks = jnp.minimum(blocks, k.shape[2] // BLOCK)
    first = jnp.int32(0) if window is None else jnp.min(lowest) // BLOCK
    zero = jnp.zeros((batch, kv_heads, rows), jnp.float32)
    carry = (zero + MASKED, zero, jnp.zeros((batch, kv_heads, rows, head_dim), jnp.float32))
    _, total, weighted = lax.fori_loop(first, blocks, block, carry)
    out = weighted / total[..., None]
    out = out.reshape(batch, kv_heads, width, group, head_dim).transpose(0, 2, 1, 3, 4)
    return out.reshape(batch, width, heads, head_dim).astype(q.dtype)
