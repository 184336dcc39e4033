"""Which cache slots a query row may see: committed ones, and its ancestors among the rows in flight, as packed bits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

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


def flag_committed(ancestors: jax.Array, width: int) -> jax.Array:
    """The bit strings of `ancestors` one place up, with bit 0 set, which then stands for the committed slots.

    One test of bit max(slot - start + 1, 0) says what a row sees.
    """
    words = -(-(width + 1) // WORD)
    bits = jnp.pad(ancestors, ((0, 0), (0, 0), (0, words - ancestors.shape[-1])))
    carried = jnp.pad(bits[..., :-1] >> (WORD - 1), ((0, 0), (0, 0), (1, 0)), constant_values=1)
    return (bits << 1) | carried


def lowest_slots(ancestors: jax.Array, start: jax.Array, window: int | None) -> jax.Array:
    """The first slot of each row's sliding window, int32 [batch, width]; 0 without a window.

    A row's position is `start` plus its depth, and it sees `window` positions, its own included. Windows of at least
    the width reach over all ancestors in flight, whatever slots these have.
    """
    depth = lax.population_count(ancestors).sum(-1).astype(jnp.int32) - 1  # a row sees itself
    slots = start[:, None] + depth
    return jnp.zeros_like(slots) if window is None else jnp.maximum(slots - window + 1, 0)
