"""The soft cross-entropy of drafters against the target's law, fused so that logits never leave a chunk of rows.

The head is the target's and frozen, so a loss needs the gradient with respect to the hidden states alone. One pass over
chunks computes the target's law, the drafter's logits, the loss and that gradient; nothing of [rows, vocabulary] lives
longer than its chunk. Several drafter rows may be held to the same law, which is then computed once.
"""

from __future__ import annotations

import functools

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from spec_jax.kernels.reference import precision


@flax.struct.dataclass
class FrozenHead:
    """The target's output rows that a drafter can draft, in the dtype that products run in.

    Attributes:
      weight: [draft ids, hidden].
      transposed: [hidden, draft ids], the same numbers.
      index_of: int32 [target ids], the place of a target's id among the draft ids, -1: it cannot be drafted.
    """

    weight: jax.Array
    transposed: jax.Array
    index_of: jax.Array


def frozen_head(weight: jax.Array, draft_ids: jax.Array | None, dtype: str) -> FrozenHead:
    """The head for these ids (None: all) of the target's head [target ids, hidden]."""
    count = weight.shape[0]
    ids = jnp.arange(count) if draft_ids is None else jnp.asarray(draft_ids)
    index_of = jnp.full(count, -1, jnp.int32).at[ids].set(jnp.arange(ids.shape[0], dtype=jnp.int32))
    rows = weight[ids].astype(dtype)
    return FrozenHead(rows, rows.T.copy(), index_of)


@flax.struct.dataclass
class Pairs:
    """Which rows of the drafter are held to which of the target's laws; entries that count stand in front.

    Attributes:
      count: int32 scalar, entries that count.
      law: int32 [entries], the target's position whose law it is.
      label: int32 [entries], the id that follows this position in the text.
      rows: int32 [entries, slots], the drafter's rows held to it; -1: none.
      weight: float32 [entries, slots], of each row's loss; 0 where there is none.
    """

    count: jax.Array
    law: jax.Array
    label: jax.Array
    rows: jax.Array
    weight: jax.Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def soft_cross_entropy(
    hidden: jax.Array, target_hidden: jax.Array, head: FrozenHead, pairs: Pairs, chunk: int = 256
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The weighted sum over pairs of -sum(p log q), where p is the target's law over the draft ids.

    Args:
      hidden: float32 [rows, hidden], behind the drafter's last norm: logits are their products with the head.
      target_hidden: float32 [positions, hidden], behind the target's last norm. No gradient reaches it.
      head: the rows that can be drafted.
      pairs: what is compared with what.
      chunk: entries at a time.

    Returns:
      The loss; float32 [slots], the unweighted sums of each slot; bool [rows], whether the label of a row's pair is its
      likeliest id.
    """
    total, sums, right, _ = _over_chunks(hidden, target_hidden, head, pairs, chunk, False)
    return total, sums, right


def _forward(hidden, target_hidden, head, pairs, chunk):
    total, sums, right, slope = _over_chunks(hidden, target_hidden, head, pairs, chunk, True)
    return (total, sums, right), slope


def _backward(chunk, slope, cotangents):
    return slope * cotangents[0], None, None, None


soft_cross_entropy.defvjp(_forward, _backward)


def _over_chunks(hidden, target_hidden, head, pairs, chunk, with_slope):
    dtype, (entries, slots) = head.weight.dtype, pairs.rows.shape
    count = hidden.shape[0]
    padding = -entries % chunk
    law = jnp.pad(pairs.law, (0, padding))
    label = jnp.pad(head.index_of[pairs.label], (0, padding), constant_values=-1)
    rows = jnp.pad(pairs.rows, ((0, padding), (0, 0)), constant_values=-1)
    weight = jnp.pad(pairs.weight, ((0, padding), (0, 0)))
    target_hidden, narrow = target_hidden.astype(dtype), hidden.astype(dtype)

    def product(x, w):
        return jnp.dot(x, w, preferred_element_type=jnp.float32, precision=precision(x))

    def body(i, carry):
        total, sums, right, slope = carry
        at = i * chunk
        law_i, label_i = (lax.dynamic_slice_in_dim(x, at, chunk) for x in (law, label))
        rows_i, weight_i = (lax.dynamic_slice_in_dim(x, at, chunk) for x in (rows, weight))
        scores = product(target_hidden[law_i], head.transposed)
        p = jnp.exp(scores - scores.max(axis=1, keepdims=True))
        p = p / p.sum(axis=1, keepdims=True)
        for s in range(slots):
            row, w = rows_i[:, s], weight_i[:, s]
            logits = product(narrow[jnp.maximum(row, 0)], head.transposed)
            best = logits.max(axis=1)
            e = jnp.exp(logits - best[:, None])
            z = e.sum(axis=1)
            loss = best + jnp.log(z) - (p * logits).sum(axis=1)
            loss = jnp.where(row >= 0, loss, 0)
            total, sums = total + (loss * w).sum(), sums.at[s].add(loss.sum())
            found = jnp.take_along_axis(logits, jnp.maximum(label_i, 0)[:, None], axis=1)[:, 0]
            place = jnp.where(row >= 0, row, count)  # beyond the end: dropped
            right = right.at[place].set((label_i >= 0) & (found >= best), mode="drop")
            if with_slope:
                g = (e * (w / z)[:, None] - p * w[:, None]).astype(dtype)
                slope = slope.at[place].set(product(g, head.weight), mode="drop")
        return total, sums, right, slope

    start = (
        jnp.float32(0),
        jnp.zeros(slots),
        jnp.zeros(count, bool),
        jnp.zeros(hidden.shape if with_slope else (0, 0)),
    )
    chunks = (jnp.minimum(pairs.count, entries) + chunk - 1) // chunk
    return lax.fori_loop(0, chunks, body, start)
