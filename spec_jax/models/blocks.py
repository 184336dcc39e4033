"""The two halves of a transformer layer over rows in flight: attention through the cache, and the gated feed-forward.

Models are made of them, and so are the layers of learned drafters, which differ in what goes in and what is added up.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from spec_jax import cache as kv
from spec_jax.kernels import cpu
from spec_jax.kernels.attention import attention
from spec_jax.models.config import LlamaConfig
from spec_jax.models.layers import RowBlocks, gated_linear, joined_linear, rms_norm
from spec_jax.models.rope import RopeConfig, rope_table, rotate


@flax.struct.dataclass
class Flight:
    """Where the rows in flight stand: the same for every layer of one forward pass.

    Attributes:
      start: int32 [batch], the slot that row 0 is written to, which is the number of committed slots.
      positions: int32 [batch, width], rotary positions (start + depth).
      ancestors: uint32 [batch or 1, width, words], the packed ancestor mask.
      write: bool [batch], False for finished rows, which no longer write to the cache.
      active: bool [batch, width], rows whose results are wanted; a packed model leaves the others out.
    """

    start: jax.Array
    positions: jax.Array
    ancestors: jax.Array
    write: jax.Array
    active: jax.Array


def flight_behind(
    cache: kv.KVCache,
    width: int,
    depth: jax.Array,
    ancestors: jax.Array,
    write: jax.Array | None = None,
    active: jax.Array | None = None,
) -> Flight:
    """Describes `width` rows in flight behind the committed slots of `cache`; see `Flight`. None: all rows."""
    batch = cache.length.shape[0]
    depth = jnp.broadcast_to(jnp.asarray(depth, jnp.int32), (batch, width))
    write = jnp.ones(batch, bool) if write is None else write
    active = jnp.ones((batch, width), bool) if active is None else active
    return Flight(cache.length, cache.length[:, None] + depth, jnp.asarray(ancestors), write, active)


def rotations(rope: RopeConfig, head_dim: int, positions: jax.Array, packed: bool) -> tuple[jax.Array, jax.Array]:
    """The rope table of positions [batch, width]."""

    def table(positions):
        # Nothing is fused with the sines: jax 0.12.1 computes those of one row otherwise when it fuses a rotation.
        return lax.optimization_barrier(rope_table(rope, head_dim, positions))

    if not packed:
        return table(positions)
    # A loop over rows, because XLA fuses the table into every layer otherwise and computes its sines thirty times.
    tables = lax.map(table, positions.reshape(-1, 1))
    return jax.tree.map(lambda x: x.reshape(*positions.shape, x.shape[-1]), tables)


def self_attention(
    x: jax.Array,
    w: dict[str, jax.Array],
    config: LlamaConfig,
    k_slots: jax.Array,
    v_slots: jax.Array,
    flight: Flight,
    rotation: tuple[jax.Array, jax.Array],
    rows: RowBlocks,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Attention of rows in flight over the committed slots and each other, whose K and V it writes behind them.

    Args:
      x: [batch * width, inputs], normed.
      w: the layer's weights.
      config: its sizes.
      k_slots, v_slots: [batch, kv_heads, capacity, head_dim].
      flight: where the rows stand.
      rotation: of `rotations`.
      rows: the row blocks, independent ones where the weights are packed.

    Returns:
      What is to be added to the residual, [batch * width, hidden], and the slots.
    """
    (batch, width), active = flight.positions.shape, flight.active.reshape(-1)
    heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
    sizes = (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
    q, k, v = joined_linear(x, w, ("q", "k", "v"), sizes, rows, active)
    q, k = q.reshape(-1, heads, head_dim), k.reshape(-1, kv_heads, head_dim)
    v = v.reshape(batch, width, kv_heads, head_dim)
    if config.qk_norm:
        q = rms_norm(q, w["q_norm"], config.rms_norm_eps, rows, active)
        k = rms_norm(k, w["k_norm"], config.rms_norm_eps, rows, active)
    q = rotate(q.reshape(batch, width, heads, head_dim), *rotation)
    k = rotate(k.reshape(batch, width, kv_heads, head_dim), *rotation)
    seen, k_slots, v_slots = _attend(q, k, v, k_slots, v_slots, flight, rows)
    seen = seen.reshape(batch * width, heads * head_dim)
    (out,) = joined_linear(seen, w, ("o",), (config.hidden_size,), rows, active)
    return out, k_slots, v_slots


def feed_forward(
    x: jax.Array, w: dict[str, jax.Array], config: LlamaConfig, rows: RowBlocks, active: jax.Array
) -> jax.Array:
    """The gated feed-forward of normed x [rows, hidden]: what is to be added to the residual."""
    hidden_rows = gated_linear(x, w, config.intermediate_size, rows, active)
    (out,) = joined_linear(hidden_rows, w, ("down",), (config.hidden_size,), rows, active)
    return out


def _attend(q, k, v, k_slots, v_slots, flight, rows):
    """Writes k and v behind the committed slots and attends: what was seen, and the slots."""
    if rows.independent:
        return cpu.attention(q, k, v, k_slots, v_slots, flight.start, flight.ancestors, flight.active, flight.write)
    slot = jnp.where(flight.write, flight.start, k_slots.shape[2])  # beyond the capacity: dropped
    k_slots = kv.write_rows(k_slots, k.transpose(0, 2, 1, 3), slot)
    v_slots = kv.write_rows(v_slots, v.transpose(0, 2, 1, 3), slot)
    if rows.canonical:
        q = lax.optimization_barrier(q)
    seen = attention(q, k_slots, v_slots, flight.start, flight.ancestors, tile_rows=rows.tile)
    return (lax.optimization_barrier(seen) if rows.canonical else seen), k_slots, v_slots
