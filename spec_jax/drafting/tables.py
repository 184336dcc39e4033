"""The embedding and the output head of a learned drafter: its own, or the target's arrays under the same names.

Most drafters use the target's tables and their checkpoints hold none. `with_tables` puts the target's arrays where the
drafter's own would stand, so that nothing else has to know.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from spec_jax.drafting.heads import Head
from spec_jax.models import layers
from spec_jax.models.layers import RowBlocks
from spec_jax.models.model import Model


def with_tables(head: Head, params: dict[str, Any], target: Model) -> tuple[Head, dict[str, Any]]:
    """The head with an embedding and an output head: those that it lacks are the target's arrays, not copied.

    Args:
      head: as its checkpoint describes it, in the layout of the target (`packed`).
      params: the head's parameters.
      target: the model it drafts for.
    """
    if head.packed != target.module.packed:
        raise ValueError(f"the drafter's packed={head.packed} must be the target's, {target.module.packed}")
    rows, more = target.config.vocab_size, {}
    if not head.own_embedding:
        more["embedding"] = target.params["embedding"]
        head = dataclasses.replace(head, own_embedding=True, embedding_rows=rows)
    if not head.own_head:
        if head.mapped:
            raise ValueError("the drafter has ids of its own but no output head for them: lm_head is absent")
        more["lm_head"] = target.params[target.config.head_table]
        config = dataclasses.replace(head.config, vocab_size=rows)
        head = dataclasses.replace(head, own_head=True, config=config)
    return head, params | more


def embed_tokens(head: Head, params: dict[str, Any], tokens: jax.Array) -> jax.Array:
    """Embeddings [..., hidden] of the target's ids; what is no id (negative) is taken for 0."""
    rows = layers.rows_for(head.packed, RowBlocks())
    return layers.embed(jnp.maximum(tokens, 0), params["embedding"], rows).astype(head.dtype)


def head_logits(
    head: Head,
    params: dict[str, Any],
    hidden: jax.Array,
    rows: RowBlocks,
    active: jax.Array | None = None,
) -> jax.Array:
    """float32 logits of the drafter's ids, [batch, width, draft vocab], of hidden [batch, width, hidden].

    `active` bool [batch, width]: rows that are wanted, others may hold anything; None: all.
    """
    flat, size = hidden.reshape(-1, hidden.shape[-1]), head.config.vocab_size
    rows, active = layers.rows_for(head.packed, rows), layers.flat_active(active, len(flat))
    return layers.unembed(flat, params["lm_head"], rows, size, active).reshape(*hidden.shape[:-1], size)


def to_target_logits(head: Head, params: dict[str, Any], logits: jax.Array, target_vocab: int) -> jax.Array:
    """Logits [..., draft vocab] as logits of the target's ids, [..., target_vocab]; -inf where there is no draft id."""
    if head.mapped:
        full = jnp.full((*logits.shape[:-1], target_vocab), -jnp.inf, logits.dtype)
        return full.at[..., params["draft_ids"]].set(logits, unique_indices=True)
    short = target_vocab - logits.shape[-1]
    if short <= 0:
        return logits[..., :target_vocab]
    return jnp.pad(logits, [(0, 0)] * (logits.ndim - 1) + [(0, short)], constant_values=-jnp.inf)
