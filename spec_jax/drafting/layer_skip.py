"""Self-speculation: the target's own first layers, or a chosen set of them, and its head draft for the whole target.

Draft & Verify (https://arxiv.org/abs/2309.08168), LayerSkip (https://arxiv.org/abs/2404.16710). The drafted rows are
written to the target's own cache beyond `length`. Where the layers are the first ones, verification goes on from their
outputs, as LayerSkip does; else it writes the rows again with all layers.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np

from spec_jax import tree as tree_lib
from spec_jax.drafting.base import Draft, DraftProbs, ExitStates, draft_chain
from spec_jax.drafting.tree_drafting import DynamicTree, StaticTree, TreeDrafter
from spec_jax.kernels.masks import chain_ancestors, pack_ancestors


@dataclasses.dataclass(frozen=True)
class LayerSkipDrafter(TreeDrafter):
    """Drafts with a subset of the target's layers.

    Attributes:
      num_nodes: K, or the nodes of the tree.
      layers: ids of the layers that run, ascending.
      sample: draw drafts from the processed distribution and keep it as q.
      tree: None: a chain.
      reuse: whether verification may go on from the outputs of the first layers.
    """

    num_nodes: int
    layers: tuple[int, ...]
    sample: bool = False
    tree: StaticTree | DynamicTree | None = None
    reuse: bool = True

    def propose(self, params, state, view):
        committed, vocab = view.cache.length, view.target.vocab_size
        if self.tree is not None:

            def next_of_rows(cache, tokens, mask, active):
                depth, ancestors = tree_lib.depths(mask), pack_ancestors(mask)
                logits, cache, _ = self._forward(view, tokens, cache, depth, ancestors, active)
                return logits, cache

            found, cache = self.tree.draft(next_of_rows, view.cache, view, self.sample, vocab)
            return Draft(found.tokens, found.count, found.q, found.parents, target_cache=cache), state

        exit_layer = len(self.layers)
        reuse = self.reuse and self.layers == tuple(range(exit_layer)) and view.target.reusable

        def run(carry, token, step, head=True):
            cache, hidden = carry
            shape = np.zeros(1, np.int32), chain_ancestors(1)
            logits, cache, x = self._forward(view, token[:, None], cache, *shape, head=head)
            hidden = hidden.at[:, step].set(x[:, 0]) if reuse else hidden
            return logits, (cache.replace(length=cache.length + 1), hidden)

        def next_logits(carry, token, step):
            logits, carry = run(carry, token, step)
            return logits[:, 0], carry

        size = (len(view.last), self.num_nodes + 1, view.target.module.config.hidden_size)
        hidden = jnp.zeros(size, view.target.module.dtype) if reuse else ()
        proposal, carry = draft_chain(
            next_logits, (view.cache, hidden), view.last, view, self.num_nodes, self.sample, vocab
        )
        states = None
        if reuse:  # of the last draft token too, which nothing was drafted behind
            newest = proposal.tokens[:, jnp.maximum(proposal.steps - 1, 0)]
            newest = jnp.where(proposal.steps > 0, jnp.maximum(newest, 0), view.last)
            _, carry = run(carry, newest, proposal.steps, head=False)
            states = ExitStates(carry[1], jnp.bool_(True), exit_layer)
        cache = carry[0].replace(length=committed)
        q = None if proposal.probs is None else DraftProbs(proposal.probs)
        return Draft(proposal.tokens, proposal.count, q, target_cache=cache, exit=states), state

    def _forward(self, view, tokens, cache, depth, ancestors, active=None, head=True):
        """Logits float32 [batch, rows, vocab] of the chosen layers and the head, the cache written by them, and their
        output [batch, rows, embed]; `head`: else no logits."""
        target = view.target
        stop = self.layers[-1] + 1
        skip = tuple(i for i in range(stop) if i not in self.layers)

        def run(bound, tokens, cache):
            flight = bound.flight(cache, tokens.shape[1], depth, ancestors, view.live, active)
            x, cache, _ = bound.layers(bound.embed(tokens), cache, flight, target.rows, stop=stop, skip=skip)
            if not head:
                return None, cache, x
            return bound.head(bound.final_norm(x, target.rows, flight.active), target.rows, flight.active), cache, x

        return target.module.apply({"params": target.params}, tokens, cache, method=run)
