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
from spec_jax import tree as tree_lib
from spec_jax.drafting.base import Draft, DraftProbs, draft_chain
from spec_jax.drafting.tree_drafting import DynamicTree, StaticTree, TreeDrafter
from spec_jax.kernels.masks import chain_ancestors, pack_ancestors
from spec_jax.models.layers import RowBlocks


@flax.struct.dataclass
class DraftModelState:
    """The draft model's own cache.

    Invariant between steps: cache.length slots hold the K/V of the leading committed tokens, and at most the last two
    committed tokens are missing: the newest, which no model has seen, and after a full acceptance the one before it,
    which was the drafter's last proposal (a leaf of its tree) and was never fed to it.

    Attributes:
      cache: K and V of the draft model.
      tail: int32 [batch], the newest token that `commit` was told of, position (target's length - 1).
      slots: of a tree, between `propose` and `commit`: int32 [batch, 1 + nodes], the slot in which the K/V of the last
        committed token and of every node stand, -1 for a node that was not fed. None: nothing to be moved.
    """

    cache: kv.KVCache
    tail: jax.Array
    slots: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class DraftModelDrafter(TreeDrafter):
    """Drafts with any model that shares the target's vocabulary.

    Attributes:
      num_nodes: K, or the nodes of the tree.
      module: the draft model's Linen module; its parameters are the drafter's `params`.
      vocab_size: usable ids, the same as the target's; either embedding may be padded beyond them.
      target_vocab: rows of the target's head, the width of q.
      max_positions: the draft model's context; a row that has outgrown it gets no proposals.
      rows: canonical row blocks of the draft model's forward passes.
      sample: draw drafts from the processed distribution and keep it as q.
      tree: None: a chain.
      mapped: the vocabularies differ; the parameters are a pair of the model's own and a `VocabularyMap`.
    """

    num_nodes: int
    module: Any
    vocab_size: int
    target_vocab: int
    max_positions: int
    rows: RowBlocks = RowBlocks()
    sample: bool = False
    tree: StaticTree | DynamicTree | None = None
    mapped: bool = False

    def init(self, params, target, batch, capacity):
        c = self.module.config
        cache = kv.init_cache(c, batch, capacity, self.module.dtype)
        return DraftModelState(cache, jnp.zeros(batch, jnp.int32))

    def for_prefill(self):
        rows = self.rows if self.rows.any_width else RowBlocks()  # as `Decoder.for_prefill` does
        return dataclasses.replace(self, num_nodes=1, sample=False, tree=None, rows=rows)

    def grow(self, state, capacity):
        return state.replace(cache=state.cache.grow(capacity))

    def forward(self, params, tokens, cache, with_logits=False, **shape):
        """A forward pass of a chain, unless `shape` says otherwise; the logits are those of the target's ids."""
        width = tokens.shape[1]
        if self.mapped:
            params, table = params
            tokens = table.feed[tokens]
        shape = {"depth": np.arange(width, dtype=np.int32), "ancestors": chain_ancestors(width), **shape}
        out = self.module.apply({"params": params}, tokens, cache, rows=self.rows, with_logits=with_logits, **shape)
        if not with_logits:
            return out
        if self.mapped:
            known = out.logits[..., jnp.maximum(table.shared, 0)]
            return out.replace(logits=jnp.where(table.shared >= 0, known, -jnp.inf))
        return out.replace(logits=self._fit(out.logits))

    def commit(self, params, state, seen):
        """Rolls back to the committed tokens, and feeds those that `propose` has not fed already."""
        live = seen.count > 0
        end = jnp.where(live, seen.start + seen.count, jnp.minimum(state.cache.length, seen.start))
        newest = jnp.take_along_axis(seen.tokens, jnp.maximum(seen.count - 1, 0)[:, None], axis=1)[:, 0]
        tail = jnp.where(live, newest, state.tail)
        if seen.prefill:
            fed = self.forward(params, seen.tokens, state.cache.replace(length=seen.start)).cache
            return DraftModelState(fed.replace(length=jnp.where(live, end, state.cache.length)), tail)
        if state.slots is not None:
            cache = self._keep_path(state, seen, live)
        else:  # of a foreign draft only the token in front of it may be here
            known = end if seen.own is None else jnp.where(seen.own, end, jnp.minimum(end, seen.start + 1))
            cache = state.cache.replace(length=jnp.minimum(state.cache.length, known))
        if state.slots is not None and seen.own is None:
            return DraftModelState(cache, tail)

        def feed(cache):  # the run, and the token before it, which may be missing too
            first = (seen.start == 0)[:, None]
            padding = jnp.zeros_like(seen.tokens[:, :1])
            tokens = jnp.where(
                first,
                jnp.concatenate([seen.tokens, padding], axis=1),
                jnp.concatenate([state.tail[:, None], seen.tokens], axis=1),
            )
            fed = self.forward(params, tokens, cache.replace(length=jnp.maximum(seen.start - 1, 0))).cache
            return fed.replace(length=end)

        # The next `propose` feeds two tokens by itself; more are missing only after a step without a draft.
        behind = live & (end - cache.length > 1)
        return DraftModelState(lax.cond(behind.any(), feed, lambda c: c, cache), tail)

    def _keep_path(self, state, seen, live):
        """The cache with the accepted path of a tree in contiguous slots: all of it but a leaf, which was never fed."""
        path = seen.path[:, : self.tree.depth + 1]
        source = jnp.take_along_axis(state.slots, path, axis=1)
        fed = (source >= 0) & (jnp.arange(path.shape[1]) < seen.count[:, None])
        if seen.own is not None:  # of a foreign draft only the token in front of it is here
            fed = fed & (seen.own[:, None] | (jnp.arange(path.shape[1]) == 0))
        start = jnp.where(live, seen.start, state.cache.capacity)  # rows that stand still move nothing
        cache = kv.move_path(state.cache.replace(length=start), source - start[:, None])
        kept = jnp.minimum(state.cache.length, seen.start)  # the host may have cut a row that ended
        return cache.replace(length=jnp.where(live, seen.start + fed.sum(axis=1), kept))

    def propose(self, params, state, view):
        if self.tree is not None:
            return self._propose_tree(params, state, view)
        return self._propose_chain(params, state, view)

    def _propose_tree(self, params, state, view):
        """The flight is the token before the last one, which may be missing, and the rows of the tree."""
        index, rows = jnp.arange(view.length.shape[0]), self.tree.rows
        start = jnp.maximum(view.length - 2, 0)
        before = view.tokens[index, start]
        alone = view.length < 2  # a text of one token: the row in front of it is padding that no other row sees

        def next_logits(cache, tokens, mask, active):
            behind = jnp.broadcast_to(mask, (index.shape[0], rows, rows))
            behind = jnp.concatenate([jnp.broadcast_to(~alone[:, None, None], (*active.shape, 1)), behind], axis=2)
            mask = jnp.concatenate([jnp.zeros_like(behind[:, :1]).at[:, :, 0].set(True), behind], axis=1)
            # It goes in front of the last token, and with it.
            active = jnp.concatenate([active[:, :1] & ~alone[:, None], active], axis=1)
            out = self.forward(
                params,
                jnp.concatenate([before[:, None], tokens], axis=1),
                cache,
                with_logits=True,
                depth=tree_lib.depths(mask),
                ancestors=pack_ancestors(mask),
                write=view.live,
                active=active,
            )
            return out.logits, out.cache

        cache = state.cache.replace(length=start)
        found, cache = self.tree.draft(next_logits, cache, view, self.sample, self.vocab_size)
        # A node at depth d follows a row at position length - 2 + d, which must lie in the draft model's context.
        real = jnp.arange(self.num_nodes) < found.count[:, None]
        inside = (real & (found.depth <= (self.max_positions - view.length + 1)[:, None])).sum(axis=1)
        fed = jnp.pad(jnp.broadcast_to(found.fed, found.tokens.shape), ((0, 0), (1, 0)))  # the last token in row 0
        slots = jnp.where(fed >= 0, start[:, None] + 1 + fed, -1)
        draft = Draft(found.tokens, inside, found.q, found.parents)
        return draft, DraftModelState(cache.replace(length=state.cache.length), state.tail, slots)

    def _propose_chain(self, params, state, view):
        """Feeds two tokens per step: the newest, and the one before it, which a full acceptance leaves unfed."""
        index = jnp.arange(view.length.shape[0])
        before = jnp.where(view.length > 1, view.tokens[index, jnp.maximum(view.length - 2, 0)], 0)

        def next_logits(carry, token, step):
            cache, before = carry
            end = view.length + step  # tokens of text and draft so far; `token` is the last of them
            start = jnp.maximum(end - 2, 0)
            first = end < 2  # a single token so far: it stands in front, and the row behind it is padding
            pair = jnp.stack([jnp.where(first, token, before), jnp.where(first, 0, token)], axis=1)
            out = self.forward(params, pair, cache.replace(length=start), with_logits=True)
            logits = out.logits[index, end - 1 - start]
            return logits, (out.cache, token)

        proposal, (cache, _) = draft_chain(
            next_logits, (state.cache, before), view.last, view, self.num_nodes, self.sample, self.vocab_size
        )
        q = None if proposal.probs is None else DraftProbs(proposal.probs)
        # Step j (from 0) feeds the token at position length - 1 + j, which must lie in the draft model's context.
        count = jnp.minimum(proposal.count, jnp.maximum(self.max_positions - view.length + 1, 0))
        # Where nothing ran, the cache is as it was; it holds no more than the text in front of the last token.
        fed = jnp.where(proposal.steps > 0, view.length - 1 + proposal.steps, state.cache.length)
        return Draft(proposal.tokens, count, q), DraftModelState(cache.replace(length=fed), state.tail)

    def _fit(self, logits: jax.Array) -> jax.Array:
        """Logits [..., draft vocab] cut or padded to the target's rows; no id beyond the vocabulary is drawn."""
        have = logits.shape[-1]
        if have >= self.target_vocab:
            return logits[..., : self.target_vocab]
        more = [(0, 0)] * (logits.ndim - 1) + [(0, self.target_vocab - have)]
        return jnp.pad(logits, more, constant_values=-jnp.inf)
