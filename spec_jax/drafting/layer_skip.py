"""Self-speculation: the target's own first layers, or a chosen set of them, and its head draft for the whole target.

Draft & Verify (https://arxiv.org/abs/2309.08168), LayerSkip (https://arxiv.org/abs/2404.16710). The drafted rows are
written to the target's own cache beyond `length`, and verification writes them again with all layers.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np

from spec_jax.drafting.base import BaseDrafter, Draft, DraftProbs, draft_chain
from spec_jax.kernels.attention import chain_ancestors


@dataclasses.dataclass(frozen=True)
class LayerSkipDrafter(BaseDrafter):
    """Drafts with a subset of the target's layers.

    Attributes:
      num_nodes: K.
      layers: ids of the layers that run, ascending.
      sample: draw drafts from the processed distribution and keep it as q.
    """

    num_nodes: int
    layers: tuple[int, ...]
    sample: bool = False

    def propose(self, params, state, view):
        target = view.target
        module, variables = target.module, {"params": target.params}
        stop = self.layers[-1] + 1
        skip = tuple(i for i in range(stop) if i not in self.layers)
        committed = view.cache.length

        def partial_forward(bound, tokens, cache):
            flight = bound.flight(cache, 1, np.zeros(1, np.int32), chain_ancestors(1), view.live)
            x, cache, _ = bound.layers(bound.embed(tokens), cache, flight, target.rows, stop=stop, skip=skip)
            return bound.head(bound.final_norm(x, target.rows), target.rows)[:, 0], cache

        def next_logits(cache, token, step):
            logits, cache = module.apply(
                variables, token[:, None], cache, method=lambda m, t, c: partial_forward(m, t, c)
            )
            return logits, cache.replace(length=cache.length + 1)

        proposal, cache = draft_chain(
            next_logits, view.cache, view.last, view, self.num_nodes, self.sample, target.vocab_size
        )
        q = None if proposal.probs is None else DraftProbs(proposal.probs)
        count = jnp.full(view.length.shape, self.num_nodes, jnp.int32)
        return Draft(proposal.tokens, count, q, target_cache=cache.replace(length=committed)), state
