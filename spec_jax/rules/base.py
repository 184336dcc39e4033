"""What verification rules share: the draft tree, the verdict, and the laws p of the target and q of the draft."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

from spec_jax.drafting.base import DraftProbs


@flax.struct.dataclass
class Verification:
    """The outcome of one step.

    Attributes:
      tokens: int32 [batch, width], the accepted draft tokens and then the next token; columns beyond it are padding.
      num_accepted: int32 [batch], draft tokens accepted; tokens[:, num_accepted] is the bonus or residual token.
      path: int32 [batch, width], the rows in flight along the accepted path; path[:, 0] = 0 is the last token.
      gaps: float32 [batch, width], lead of each chosen token over the runner-up; inf where the rule has none
        (sampled rows under `standard`).
    """

    tokens: jax.Array
    num_accepted: jax.Array
    path: jax.Array
    gaps: jax.Array


@flax.struct.dataclass
class Tree:
    """The draft of one step as rules see it; a chain is the trivial tree. Node i is the row in flight i + 1.

    Attributes:
      tokens: int32 [batch, nodes].
      q: the laws they were drawn from; None where all were chosen deterministically.
      present: bool [batch, nodes], proposals: neither padding nor auxiliary.
      known: bool [batch, nodes], tokens inside the vocabulary. The others are drafts too, which the target refuses.
      row_parents: int32 [batch, nodes], the row that each node is a child of.
      depth: int32 [batch, width] depth of every row.
      length: int32 [batch], committed tokens: the position of the first token to emit.
    """

    tokens: jax.Array
    q: DraftProbs | None
    present: jax.Array
    known: jax.Array
    row_parents: jax.Array
    depth: jax.Array
    length: jax.Array

    @property
    def valid(self) -> jax.Array:
        """bool [batch, nodes], proposals that can be accepted."""
        return self.present & self.known


def acceptance_probability(p: jax.Array, q: jax.Array) -> jax.Array:
    """min(1, p(x)/q(x)) of a token with target probability p and draft probability q; 1 where q is 0 and p is not."""
    return jnp.where(q > 0, jnp.minimum(1.0, p / jnp.where(q > 0, q, 1.0)), jnp.where(p > 0, 1.0, 0.0))


def residual(p: jax.Array, q: jax.Array) -> jax.Array:
    """The unnormalised residual max(p - q, 0) [..., vocab], or p itself where rounding left nothing of it."""
    rest = jnp.maximum(p - q, 0.0)
    return jnp.where(rest.sum(axis=-1, keepdims=True) > 0, rest, p)


def draft_probability(draft: Tree) -> jax.Array:
    """q(x_i) of every node of a chain, float32 [batch, nodes]; 1 where the node was chosen deterministically."""
    batch, nodes = draft.tokens.shape
    q = draft.q
    if q is None:
        return jnp.ones((batch, nodes), jnp.float32)
    if q.ids is None:
        prob = jnp.take_along_axis(q.probs[:, :nodes], draft.tokens[..., None], axis=-1)[..., 0]
    else:
        hit = q.ids[:, :nodes] == draft.tokens[..., None]
        prob = jnp.where(hit, q.probs[:, :nodes], 0.0).sum(-1)
    return prob if q.one_hot is None else jnp.where(q.one_hot[:, :nodes], 1.0, prob)


def row_law(q: DraftProbs, row: jax.Array, column: jax.Array, vocab: int) -> tuple[jax.Array, jax.Array]:
    """The law q [vocab] of the children of the row in flight `column` of sequence `row`, and whether they were not
    drawn from it but chosen deterministically."""
    column = jnp.minimum(column, q.probs.shape[1] - 1)
    law = q.probs[row, column]
    if q.ids is not None:
        law = jnp.zeros(vocab, jnp.float32).at[q.ids[row, column]].add(law, mode="drop")
    return law, jnp.bool_(False) if q.one_hot is None else q.one_hot[row, column]


def child_law(q: DraftProbs | None, row: jax.Array, column: jax.Array, token: jax.Array, vocab: int) -> jax.Array:
    """The law q [vocab] that the child `token` of the row in flight `column` of sequence `row` was drawn from."""
    point = jax.nn.one_hot(token, vocab, dtype=jnp.float32)
    if q is None:
        return point
    law, one_hot = row_law(q, row, column, vocab)
    return jnp.where(one_hot, point, law)
