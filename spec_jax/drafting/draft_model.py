"""An independent draft model with its own cache (https://arxiv.org/abs/2211.17192, https://arxiv.org/abs/2302.01318)."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spec_jax import cache as kv
from spec_jax.drafting.base import BaseDrafter, Draft, DraftProbs, draft_chain
from spec_jax.kernels.attention import chain_ancestors
from spec_jax.models.layers import RowBlocks


@flax.struct.dataclass
class DraftModelState:
    """The draft model's own cache.

    Invariant between steps: cache.length slots hold the K/V of the leading committed tokens, and at most the last two
    committed tokens are missing: the newest, which no model has seen, and after a full acceptance the one before it,
    which was the drafter's last proposal and was never fed to it.

    Attributes:
      cache: K and V of the draft model.
      tail: int32 [batch], the newest token that `commit` was told of, position (target's length - 1).
    """

    cache: kv.KVCache
    tail: jax.Array


@dataclasses.dataclass(frozen=True)
class DraftModelDrafter(BaseDrafter):
    """Drafts with any model that shares the target's vocabulary.

    Attributes:
      num_nodes: K.
      module: the draft model's Linen module; its parameters are the drafter's `params`.
      vocab_size: usable ids, the same as the target's; either embedding may be padded beyond them.
      target_vocab: rows of the target's head, the width of q.
      max_positions: the draft model's context; a row that has outgrown it gets no proposals.
      rows: canonical row blocks of the draft model's forward passes.
      sample: draw drafts from the processed distribution and keep it as q.
    """

    num_nodes: int
    module: Any
    vocab_size: int
    target_vocab: int
    max_positions: int
    rows: RowBlocks = RowBlocks()
    sample: bool = False

    def init(self, params, target, batch, capacity):
        c = self.module.config
        cache = kv.init_cache(c.num_layers, batch, c.num_kv_heads, capacity, c.head_dim, self.module.dtype)
        return DraftModelState(cache, jnp.zeros(batch, jnp.int32))

    def for_prefill(self):
        rows = self.rows if self.rows.any_width else RowBlocks()  # as `Decoder.for_prefill` does
        return dataclasses.replace(self, num_nodes=1, sample=False, rows=rows)

    def grow(self, state, capacity):
        return state.replace(cache=state.cache.grow(capacity))

    def _forward(self, params, tokens, cache, with_logits=False):
        width = tokens.shape[1]
        depth, ancestors = np.arange(width, dtype=np.int32), chain_ancestors(width)
        return self.module.apply(
            {"params": params},
            tokens,
            cache,
            depth=depth,
            ancestors=ancestors,
            rows=self.rows,
            with_logits=with_logits,
        )

    def commit(self, params, state, seen):
        """Rolls back to the committed tokens, and feeds those that `propose` has not fed already."""
        live = seen.count > 0
        end = jnp.where(live, seen.start + seen.count, jnp.minimum(state.cache.length, seen.start))
        newest = jnp.take_along_axis(seen.tokens, jnp.maximum(seen.count - 1, 0)[:, None], axis=1)[:, 0]
        tail = jnp.where(live, newest, state.tail)
        if seen.prefill:
            fed = self._forward(params, seen.tokens, state.cache.replace(length=seen.start)).cache
            return DraftModelState(fed.replace(length=jnp.where(live, end, state.cache.length)), tail)
        kept = jnp.minimum(state.cache.length, end)

        def feed(cache):  # the run, and the token before it, which may be missing too
            first = (seen.start == 0)[:, None]
            padding = jnp.zeros_like(seen.tokens[:, :1])
            tokens = jnp.where(
                first,
                jnp.concatenate([seen.tokens, padding], axis=1),
                jnp.concatenate([state.tail[:, None], seen.tokens], axis=1),
            )
            fed = self._forward(params, tokens, cache.replace(length=jnp.maximum(seen.start - 1, 0))).cache
            return fed.replace(length=end)

        # The next `propose` feeds two tokens by itself; more are missing only after a step without a draft.
        behind = live & (end - kept > 1)
        cache = lax.cond(behind.any(), feed, lambda c: c.replace(length=kept), state.cache)
        return DraftModelState(cache, tail)

    def propose(self, params, state, view):
        """Feeds two tokens per step: the newest, and the one before it, which a full acceptance leaves unfed."""
        index = jnp.arange(view.length.shape[0])
        before = jnp.where(view.length > 1, view.tokens[index, jnp.maximum(view.length - 2, 0)], 0)

        def next_logits(carry, token, step):
            cache, before = carry
            end = view.length + step  # tokens of text and draft so far; `token` is the last of them
            start = jnp.maximum(end - 2, 0)
            first = end < 2  # a single token so far: it stands in front, and the row behind it is padding
            pair = jnp.stack([jnp.where(first, token, before), jnp.where(first, 0, token)], axis=1)
            out = self._forward(params, pair, cache.replace(length=start), with_logits=True)
            logits = out.logits[index, end - 1 - start]
            return self._fit(logits), (out.cache, token)

        proposal, (cache, _) = draft_chain(
            next_logits, (state.cache, before), view.last, view, self.num_nodes, self.sample, self.vocab_size
        )
        q = None if proposal.probs is None else DraftProbs(proposal.probs)
        # Step j (from 0) feeds the token at position length - 1 + j, which must lie in the draft model's context.
        count = jnp.clip(self.max_positions - view.length + 1, 0, self.num_nodes)
        fed = view.length - 1 + self.num_nodes
        return Draft(proposal.tokens, count, q), DraftModelState(cache.replace(length=fed), state.tail)

    def _fit(self, logits: jax.Array) -> jax.Array:
        """Logits [batch, draft vocab] cut or padded to the target's rows; no id beyond the vocabulary is drawn."""
        have = logits.shape[-1]
        if have >= self.target_vocab:
            return logits[:, : self.target_vocab]
        return jnp.pad(logits, ((0, 0), (0, self.target_vocab - have)), constant_values=-jnp.inf)
