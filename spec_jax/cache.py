"""The functional key/value cache. Rolling back rejected tokens is a smaller `length`; nothing is copied.

One K and one V array per layer: scanning or carrying one stacked array makes XLA copy it whole. Slots at and beyond
`length` hold rejected or stale rows that no query may see; the attention mask, not the cache, keeps them out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import flax.struct
import jax
import jax.numpy as jnp

if TYPE_CHECKING:  # which layers import in turn
    from spec_jax.models.config import LlamaConfig

BLOCK = 128
"""Slots per KV block: attention walks blocks at absolute positions and capacity is a multiple of it."""


@flax.struct.dataclass
class KVCache:
    """K and V of the committed tokens of every row.

    Attributes:
      k, v: one array per layer, [batch, kv_heads, capacity, head_dim], in the model's dtype.
      length: int32 [batch], how many leading slots of a row hold committed tokens.
    """

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]
    length: jax.Array

    @property
    def capacity(self) -> int:
        return self.k[0].shape[2]

    def grow(self, capacity: int) -> KVCache:
        """The same cache with room for `capacity` slots, a multiple of BLOCK."""
        more = ((0, 0), (0, 0), (0, capacity - self.capacity), (0, 0))
        return self.replace(k=tuple(jnp.pad(x, more) for x in self.k), v=tuple(jnp.pad(x, more) for x in self.v))


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def power_of_two(value: int) -> int:
    """The smallest power of two that is at least `value`; 0 for 0."""
    return 0 if value == 0 else 1 << (value - 1).bit_length()


def init_cache(config: LlamaConfig, batch: int, capacity: int, dtype) -> KVCache:
    """An empty cache of a model of this config. `capacity` is rounded up to a whole number of KV blocks.

    Zeros, not `empty`: a masked slot is multiplied by a zero weight, and 0 * NaN would still poison the sum.
    """
    if capacity < 1:
        raise ValueError(f"cache capacity={capacity} must be at least 1 slot")
    shape = (batch, config.num_kv_heads, round_up(capacity, BLOCK), config.head_dim)
    return KVCache(
        k=tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers)),
        v=tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers)),
        length=jnp.zeros(batch, jnp.int32),
    )


def write_rows(slots: jax.Array, rows: jax.Array, start: jax.Array) -> jax.Array:
    """Writes `rows` [batch, kv_heads, count, head_dim] into `slots` from slot `start` [batch] on, per batch row.

    A scatter that drops what lies beyond the capacity: `dynamic_update_slice` would move an overlong write back to
    fit and so overwrite committed slots in silence.
    """
    batch, kv_heads, count, _ = rows.shape
    at = start[:, None, None] + jnp.arange(count)
    batch_index = jnp.arange(batch)[:, None, None]
    head_index = jnp.arange(kv_heads)[None, :, None]
    return slots.at[batch_index, head_index, at].set(rows.astype(slots.dtype), mode="drop", unique_indices=True)


def move_path(cache: KVCache, path: jax.Array) -> KVCache:
    """Gathers an accepted tree path into contiguous slots: slot length + i takes what slot length + path[:, i] holds.

    `path` is int32 [batch, count] with path[:, i] >= i, so that no source is overwritten before it is read.
    """
    source = cache.length[:, None] + path  # [batch, count]
    batch, kv_heads = cache.k[0].shape[:2]
    rows, heads = jnp.arange(batch)[:, None, None], jnp.arange(kv_heads)[None, :, None]

    def gather(slots):
        # Indexed as `write_rows` does: `take_along_axis` makes a TPU keep the cache in another layout, and copy it.
        return write_rows(slots, slots.at[rows, heads, source[:, None]].get(mode="clip"), cache.length)

    return cache.replace(k=tuple(map(gather, cache.k)), v=tuple(map(gather, cache.v)))
