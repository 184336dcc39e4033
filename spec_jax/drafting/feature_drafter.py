"""Drafting from the target's features, token by token or as a tree: EAGLE 1 to 3 and multi-token prediction.

The slot of position t holds the K and V made of the target's feature at t and the token at t + 1. `commit` writes the
slots of a run with the true features, over whatever `propose` had written there from the head's own outputs, so that
what was accepted, or whose proposal was verified, never matters.
"""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import cache as kv
from spec_jax import tree as tree_lib
from spec_jax.drafting import feature_heads as heads
from spec_jax.drafting.base import Draft, DraftProbs, Needs, draft_chain
from spec_jax.drafting.heads import Eagle3Head, Head
from spec_jax.drafting.tables import embed_tokens, head_logits, to_target_logits
from spec_jax.drafting.tree_drafting import DynamicTree, StaticTree, TreeDrafter
from spec_jax.in_place import run_if
from spec_jax.kernels.masks import chain_ancestors, pack_ancestors
from spec_jax.models.blocks import flight_behind
from spec_jax.models.layers import RowBlocks


@flax.struct.dataclass
class FeatureState:
    """The head's cache and its newest output.

    Attributes:
      cache: `length` slots, one less than the committed tokens.
      output: [batch, hidden], the last layer's output at the newest slot, from which the first draft token follows.
    """

    cache: kv.KVCache
    output: jax.Array


@dataclasses.dataclass(frozen=True)
class FeatureDrafter(TreeDrafter):
    """Drafts with one of the heads of `feature_heads`; its parameters are the head's.

    Attributes:
      num_nodes: K, or the nodes of the tree.
      head: the head's description, with an embedding and an output head, see `tables.with_tables`.
      vocab_size: usable ids of the target.
      target_vocab: rows of the target's head, the width of q.
      rows: row blocks of the head's products.
      sample: draw drafts from the processed distribution and keep it as q.
      tree: None: a chain.
    """

    num_nodes: int
    head: Head
    vocab_size: int
    target_vocab: int
    rows: RowBlocks = RowBlocks()
    sample: bool = False
    tree: StaticTree | DynamicTree | None = None

    @property
    def needs(self):
        return Needs(features=self.head.features, slots=super().needs.slots)

    @property
    def at_once(self) -> bool:
        """Whether all tokens are drafted in one forward pass, as P-EAGLE does."""
        return isinstance(self.head, Eagle3Head) and self.head.mask_token is not None

    def init(self, params, target, batch, capacity):
        c = self.head.config
        cache = kv.init_cache(c, batch, capacity, self.head.dtype)
        return FeatureState(cache, jnp.zeros((batch, c.hidden_size), self.head.dtype))

    def for_prefill(self):
        return dataclasses.replace(self, num_nodes=1, sample=False, tree=None)

    def grow(self, state, capacity):
        return state.replace(cache=state.cache.grow(capacity))

    def commit(self, params, state, seen):
        width, live = seen.tokens.shape[1], seen.count > 0
        active = jnp.arange(width) < seen.count[:, None]
        depth, ancestors = np.arange(width, dtype=np.int32), chain_ancestors(width)
        cache = state.cache.replace(length=seen.start)
        flight = flight_behind(cache, width, depth, ancestors, live, active)
        hidden = heads.fuse(self.head, params, seen.features, self.rows, active)
        embedded = embed_tokens(self.head, params, seen.next_tokens)
        output, cache = heads.step(self.head, params, hidden, embedded, cache, flight, self.rows)
        newest = jnp.take_along_axis(output, jnp.maximum(seen.count - 1, 0)[:, None, None], axis=1)[:, 0]
        length = jnp.where(live, seen.start + seen.count, state.cache.length)
        return FeatureState(cache.replace(length=length), jnp.where(live[:, None], newest, state.output))

    def propose(self, params, state, view):
        if self.tree is not None:
            return self._propose_tree(params, state, view)
        if self.at_once:
            return self._propose_at_once(params, state, view)
        return self._propose_chain(params, state, view)

    def _propose_chain(self, params, state, view):
        def next_logits(carry, token, step):
            def feed(carry):  # the token behind the newest output, in the slot behind it
                cache, output, token = carry
                cache = cache.replace(length=view.length - 2 + step)
                flight = flight_behind(cache, 1, np.zeros(1, np.int32), chain_ancestors(1), view.live)
                hidden = heads.next_hidden(self.head, params, output[:, None], self.rows)
                embedded = embed_tokens(self.head, params, token[:, None])
                output, cache = heads.step(self.head, params, hidden, embedded, cache, flight, self.rows)
                return cache, output[:, 0], token

            cache, output, _ = run_if(step > 0, feed, (*carry, token))
            return self._logits(params, output[:, None])[:, 0], (cache, output)

        draft, (cache, _) = self._draft_chain(next_logits, (state.cache, state.output), view)
        return draft, state.replace(cache=cache.replace(length=state.cache.length))

    def _propose_at_once(self, params, state, view):
        """One forward pass of mask rows behind the newest slot: row j stands for the hidden state of draft token j."""
        cache, outputs, rows = state.cache, state.output[:, None], self.num_nodes - 1
        if rows:
            cache = cache.replace(length=view.length - 1)
            depth = np.arange(rows, dtype=np.int32)
            flight = flight_behind(cache, rows, depth, chain_ancestors(rows), view.live)
            shape = (view.last.shape[0], rows)
            hidden = jnp.broadcast_to(heads.mask_hidden(self.head, params, self.rows), (*shape, outputs.shape[-1]))
            embedded = embed_tokens(self.head, params, jnp.full(shape, self.head.mask_token, jnp.int32))
            more, cache = heads.step(self.head, params, hidden, embedded, cache, flight, self.rows)
            outputs = jnp.concatenate([outputs, more], axis=1)
        logits = self._logits(params, outputs)

        def next_logits(carry, token, step):
            return jax.lax.dynamic_index_in_dim(logits, step, axis=1, keepdims=False), carry

        draft, _ = self._draft_chain(next_logits, (), view)
        return draft, state.replace(cache=cache.replace(length=state.cache.length))

    def _draft_chain(self, next_logits, carry, view):
        """The chain that `base.draft_chain` drafts, as far as the head's context reaches, and the carry."""
        proposal, carry = draft_chain(next_logits, carry, view.last, view, self.num_nodes, self.sample, self.vocab_size)
        q = None if proposal.probs is None else DraftProbs(proposal.probs)
        return Draft(proposal.tokens, jnp.minimum(proposal.count, self._reach(view)), q), carry

    def _propose_tree(self, params, state, view):
        """Row 0 of the flight is the last committed token, whose output `commit` has left; nodes stand behind it."""
        rows, batch = self.tree.rows, view.last.shape[0]

        def next_logits(carry, tokens, mask, active):
            mask = jnp.asarray(mask)

            def feed(carry):
                cache, outputs = carry
                behind = mask & ~jnp.eye(rows, dtype=bool)  # a parent is the last row in front that a row sees
                parent = rows - 1 - jnp.argmax(behind[..., ::-1], axis=-1)
                parent = jnp.broadcast_to(parent, (batch, rows))[:, 1:, None]
                hidden = heads.next_hidden(self.head, params, jnp.take_along_axis(outputs, parent, axis=1), self.rows)
                depth, ancestors = tree_lib.depths(mask)[..., 1:] - 1, pack_ancestors(mask[..., 1:, 1:])
                flight = flight_behind(cache, rows - 1, depth, ancestors, view.live, active[:, 1:])
                embedded = embed_tokens(self.head, params, tokens[:, 1:])
                found, cache = heads.step(self.head, params, hidden, embedded, cache, flight, self.rows)
                outputs = outputs.at[:, 1:].set(jnp.where(active[:, 1:, None], found, outputs[:, 1:]))
                return cache, outputs

            cache, outputs = run_if(active[:, 1:].any(), feed, carry) if rows > 1 else carry
            return self._logits(params, outputs, active), (cache, outputs)

        outputs = jnp.zeros((batch, rows, state.output.shape[-1]), state.output.dtype).at[:, 0].set(state.output)
        carry = state.cache.replace(length=view.length - 1), outputs
        found, (cache, _) = self.tree.draft(next_logits, carry, view, self.sample, self.vocab_size)
        real = jnp.arange(self.num_nodes) < found.count[:, None]
        count = (real & (found.depth <= self._reach(view)[:, None])).sum(axis=1)
        draft = Draft(found.tokens, count, found.q, found.parents)
        return draft, state.replace(cache=cache.replace(length=state.cache.length))

    def _reach(self, view):
        """How deep a draft may be: nothing follows a text of one token, behind which no feature stands yet.

        A token at depth d follows the slot at position length - 3 + d, which must lie in the head's context.
        """
        room = self.head.config.max_position_embeddings - view.length + 2
        return jnp.where(view.length > 1, jnp.maximum(room, 0), 0)

    def _logits(self, params, output, active=None):
        """float32 logits of the target's ids, [batch, width, target_vocab], of outputs of the head's layers."""
        normed = heads.head_input(self.head, params, output, self.rows, active)
        logits = head_logits(self.head, params, normed, self.rows, active)
        return to_target_logits(self.head, params, logits, self.target_vocab)
