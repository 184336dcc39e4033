"""Verification attention: a few query rows per sequence against a ragged KV cache, under an ancestor mask.

The rows in flight (the last committed token and the draft nodes) are already written to the cache behind the
committed ones, so that one softmax covers both and a row's bits do not depend on where a draft began.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spec_jax.cache import BLOCK, round_up

MASKED = -1e30  # finite: a row whose whole block is masked must not make exp(-inf - -inf)
WORD = 32  # ancestor bits per word


def chain_ancestors(width: int) -> np.ndarray:
    """Ancestor bits of a chain, uint32 [1, width, words]: row w sees the rows in flight 0..w."""
    return pack_ancestors(np.tril(np.ones((1, width, width), bool)))


def pack_ancestors(mask: np.ndarray | jax.Array) -> np.ndarray | jax.Array:
    """Packs a boolean ancestor mask [batch or 1, width, width] into uint32 words [batch or 1, width, words]."""
    xp = np if isinstance(mask, np.ndarray) else jnp
    width = mask.shape[-1]
    words = -(-width // WORD)
    mask = xp.pad(mask, ((0, 0), (0, 0), (0, words * WORD - width)))
    mask = mask.reshape(*mask.shape[:-1], words, WORD).astype(xp.uint32)
    return (mask << xp.arange(WORD, dtype=xp.uint32)).sum(-1, dtype=xp.uint32)


def visible(ancestors: jax.Array, start: jax.Array, slots: jax.Array) -> jax.Array:
    """Which cache slots each query row may see, bool [batch, width, slots].

    Args:
      ancestors: uint32 [batch or 1, width, words], bit j of row w set where row w sees the in-flight row j.
      start: int32 [batch], the committed slots; in-flight row j stands in slot start + j.
      slots: int32 [slots], absolute slot numbers.
    """
    flight = slots[None, None, :] - start[:, None, None]  # [batch, 1, slots]
    bit = (flight % WORD).astype(jnp.uint32)
    seen = flight < 0
    for word in range(ancestors.shape[-1]):
        inside = (flight >= word * WORD) & (flight < (word + 1) * WORD)
        seen = seen | (inside & (((ancestors[:, :, word, None] >> bit) & 1) == 1))
    return seen


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    start: jax.Array,
    ancestors: jax.Array,
    *,
    tile_rows: int | None = None,
) -> jax.Array:
    """Softmax attention of the rows in flight over committed and in-flight slots, float32 accumulation.

    Blocks of `BLOCK` slots stand at absolute positions and are combined in order with the online softmax; a block
    beyond a row's length is an exact no-op for it. So a row's bits depend neither on the capacity nor on how long
    its batch mates are, and blocks beyond the longest row are never read.

    Args:
      q: [batch, width, heads, head_dim], rotated.
      k, v: [batch, kv_heads, capacity, head_dim], in-flight rows written from slot `start` on.
      start: int32 [batch], committed slots.
      ancestors: uint32 [batch or 1, width, words], see `pack_ancestors`.
      tile_rows: run in tiles of this many query rows (tokens times query group), one sequence at a time, so that bits
        depend neither on the width nor on the batch. None: all rows at once.

    Returns:
      [batch, width, heads, head_dim] in q's dtype.
    """
    batch, width, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    if heads % kv_heads:
        raise ValueError(f"heads={heads} must be a multiple of kv_heads={kv_heads}")
    if k.shape[2] % BLOCK:
        raise ValueError(f"the cache capacity {k.shape[2]} must be a multiple of {BLOCK}")
    ancestors = jnp.broadcast_to(ancestors, (batch, *ancestors.shape[1:]))
    if tile_rows is None:
        return _attend(q, k, v, start, ancestors, width)
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
    out = lax.map(lambda x: _attend(x[1], k, v, start[x[0]][None], x[2], width, x[0]), split)
    return out.reshape(batch, padded, heads, head_dim)[:, :width]


def _attend(q, k, v, start, ancestors, in_flight, sequence=None):
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
    scale = head_dim**-0.5
    origin = jnp.int32(0) if sequence is None else sequence

    def block(index, carry):
        peak, total, weighted = carry
        first = index * BLOCK
        slots = first + jnp.arange(BLOCK)
        place, size = (origin, jnp.int32(0), first, jnp.int32(0)), (batch, kv_heads, BLOCK, head_dim)
        k_block, v_block = lax.dynamic_slice(k, place, size), lax.dynamic_slice(v, place, size)
        # A zero weight does not silence a NaN left in a slot that nobody has written yet.
        written = slots < start[:, None] + in_flight
        v_block = jnp.where(written[:, None, :, None], v_block, 0)
        scores = jnp.einsum("bkrh,bksh->bkrs", packed, k_block, preferred_element_type=jnp.float32) * scale
        seen = visible(ancestors, start, slots)  # [b, w, s]
        seen = jnp.broadcast_to(seen[:, None, :, None], (batch, 1, width, group, BLOCK)).reshape(batch, 1, rows, BLOCK)
        scores = jnp.where(seen, scores, MASKED)
        new_peak = jnp.maximum(peak, scores.max(axis=-1))
        weights = jnp.where(seen, jnp.exp(scores - new_peak[..., None]), 0.0)
        shrink = jnp.exp(peak - new_peak)
        total = total * shrink + weights.sum(axis=-1)
        part = jnp.einsum("bkrs,bksh->bkrh", weights.astype(v.dtype), v_block, preferred_element_type=jnp.float32)
        return new_peak, total, weighted * shrink[..., None] + part

    blocks = (jnp.max(start) + in_flight + BLOCK - 1) // BLOCK
    blocks = jnp.minimum(blocks, k.shape[2] // BLOCK)
    zero = jnp.zeros((batch, kv_heads, rows), jnp.float32)
    carry = (zero + MASKED, zero, jnp.zeros((batch, kv_heads, rows, head_dim), jnp.float32))
    _, total, weighted = lax.fori_loop(0, blocks, block, carry)
    out = weighted / total[..., None]
    out = out.reshape(batch, kv_heads, width, group, head_dim).transpose(0, 2, 1, 3, 4)
    return out.reshape(batch, width, heads, head_dim).astype(q.dtype)
