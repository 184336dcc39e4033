"""The likeliest next tokens of rows in flight, for drafters that learn from the target's own logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from spec_jax.rows import over_rows
from spec_jax.sampling import BLOCK, mask_padding


def likeliest_tokens(
    logits: jax.Array, columns: jax.Array, wanted: jax.Array, count: int, vocab_size: int
) -> jax.Array:
    """The `count` likeliest ids of some rows, the likeliest first (ties: the lowest id), int32 [batch, rows, count].

    Args:
      logits: float32 [batch, width, vocab], raw.
      columns: int32 [batch, rows], the rows in flight.
      wanted: bool [batch, rows]; the others get -1, and cost nothing on a CPU. So does what the vocabulary lacks.
    """
    batch, rows = columns.shape

    def look(row, column, logits):
        x = mask_padding(logits.astype(jnp.float32), vocab_size)
        # The best `count` lie in the `count` blocks with the best maxima, whose scores are few.
        blocks = jnp.pad(x, (0, -x.shape[0] % BLOCK), constant_values=-jnp.inf).reshape(-1, BLOCK)
        _, best = lax.top_k(blocks.max(axis=1), min(count, blocks.shape[0]))
        best = jnp.sort(best)  # so that of equal scores the lowest id comes first
        values, at = lax.top_k(blocks[best].reshape(-1), min(count, best.shape[0] * BLOCK))
        ids = jnp.where(values > -jnp.inf, best[at // BLOCK] * BLOCK + at % BLOCK, -1)
        return jnp.pad(ids, (0, count - ids.shape[0]), constant_values=-1).astype(jnp.int32)

    where = jnp.repeat(jnp.arange(batch), rows), columns.reshape(-1)
    nothing = jnp.full(count, -1, jnp.int32)
    return over_rows(look, logits, *where, wanted=wanted.reshape(-1), nothing=nothing).reshape(batch, rows, count)
