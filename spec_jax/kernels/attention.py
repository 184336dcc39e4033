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
      tile_rows: at most this many query rows (tokens times query group) enter one product; None: all of them.

    Returns:
      [batch, width, heads, head_dim] in q's dtype.
    """
    batch, width, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    if heads % kv_heads:
        raise ValueError(f"heads={heads} must be a multiple of kv_heads={kv_heads}")
    if k.shape[2] % BLOCK:
        raise ValueError(f"the cache capacity {k.shape[2]} must be a multiple of {BLOCK}")
    group = heads // kv_heads
    if tile_rows is None:
        return _attention_tile(q, k, v, start, ancestors, width)
    # Always whole tiles: XLA's products of one row, and its softmax sums of few rows, round differently from those of
    # many, so a narrow flight is padded rather than run at its own row count.
    tile = max(tile_rows // group, 1)
    padded = round_up(width, tile)
    ancestors = jnp.broadcast_to(ancestors, (ancestors.shape[0], width, ancestors.shape[2]))
    q = jnp.pad(q, ((0, 0), (0, padded - width), (0, 0), (0, 0)))
    # A padding row sees what row 0 of the ancestors sees: committed slots at the least, so its softmax is finite.
    ancestors = jnp.pad(ancestors, ((0, 0), (0, padded - width), (0, 0)), mode="edge")
    if padded == tile:
        out = _attention_tile(q, k, v, start, ancestors, width)
    else:
        tiles = padded // tile
        split_q = jnp.moveaxis(q.reshape(batch, tiles, tile, heads, head_dim), 1, 0)
        split_a = jnp.moveaxis(ancestors.reshape(ancestors.shape[0], tiles, tile, -1), 1, 0)
        out = lax.map(lambda qa: _attention_tile(qa[0], k, v, start, qa[1], width), (split_q, split_a))
        out = jnp.moveaxis(out, 0, 1).reshape(batch, padded, heads, head_dim)
    return out[:, :width]


def _attention_tile(q, k, v, start, ancestors, in_flight):
    """`attention` for the query rows of one tile, of `in_flight` rows that stand behind `start`."""
    batch, width, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    rows = width * group
    # [b, w, (k g), h] -> [b, k, (w g), h]: the query group is packed with the tokens into the rows of one product.
    packed = q.reshape(batch, width, kv_heads, group, head_dim).transpose(0, 2, 1, 3, 4)
    packed = packed.reshape(batch, kv_heads, rows, head_dim)
    scale = head_dim**-0.5

    def block(index, carry):
        peak, total, weighted = carry
        first = index * BLOCK
        k_block = lax.dynamic_slice_in_dim(k, first, BLOCK, axis=2)
        v_block = lax.dynamic_slice_in_dim(v, first, BLOCK, axis=2)
        # A zero weight does not silence a NaN left in a slot that nobody has written yet.
        written = first + jnp.arange(BLOCK) < start[:, None] + in_flight
        v_block = jnp.where(written[:, None, :, None], v_block, 0)
        scores = jnp.einsum("bkrh,bksh->bkrs", packed, k_block, preferred_element_type=jnp.float32) * scale
        seen = visible(ancestors, start, first + jnp.arange(BLOCK))  # [b, w, s]
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
