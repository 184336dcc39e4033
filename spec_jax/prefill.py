"""Prefill: a prompt is fed chunk by chunk to the target and, by the `commit` of every accepted run, to the drafter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spec_jax.decode_state import Prefilled
from spec_jax.drafting.base import Seen
from spec_jax.kernels.masks import pack_ancestors

if TYPE_CHECKING:
    from spec_jax.decode import Decoder


def prefill(
    decoder: Decoder,
    params: Any,
    drafter_params: Any,
    row: Prefilled,
    tokens: jax.Array,
    start: jax.Array,
    end: jax.Array,
) -> Prefilled:
    """Feeds tokens[:, start:end], chunk by chunk; rows share the chunks.

    Args:
      row: caches that hold the tokens in front of `start`, of as many prompts.
      tokens: int32 [batch, capacity].
      start, end: int32 [batch].
    """
    chunk = decoder.prefill_chunk
    depth = np.arange(chunk, dtype=np.int32)
    ancestors = pack_ancestors(np.tril(np.ones((1, chunk, chunk), bool)))
    padded = jnp.pad(tokens, ((0, 0), (0, chunk + 1)))
    needs = decoder.drafter.needs

    def body(carry):
        index, row = carry
        starts = jnp.minimum(start + index * chunk, tokens.shape[1])  # a row that is done writes beyond the end
        at = starts[:, None] + jnp.arange(chunk + 1)
        text = jnp.take_along_axis(padded, at, axis=1)
        inside = jnp.clip(end - starts, 0, chunk)
        fed, cache = lax.optimization_barrier((text[:, :-1], row.cache.replace(length=starts)))
        out = decoder.module.apply(
            {"params": params},
            fed,
            cache,
            depth=depth,
            ancestors=ancestors,
            rows=decoder.rows,
            active=jnp.arange(chunk) < inside[:, None],
            capture=needs.features,
            with_logits=needs.prefill_logits,
        )
        path = jnp.broadcast_to(depth, fed.shape)
        seen = Seen(fed, text[:, 1:], starts, inside, out.features, out.logits, path, prefill=True)
        return index + 1, Prefilled(out.cache, decoder.drafter.commit(drafter_params, row.drafter, seen))

    chunks = (jnp.max(end - start) + chunk - 1) // chunk
    _, row = lax.while_loop(lambda carry: carry[0] < chunks, body, (jnp.int32(0), row))
    return row.replace(cache=row.cache.replace(length=end))
