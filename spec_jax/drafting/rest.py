"""Retrieval-based drafting: what has followed the longest known suffix in a corpus, as a tree (no weights).

He et al., REST (https://arxiv.org/abs/2311.08252), which retrieves up to a number of continuations and prunes their
trie. The index has exact counts of all of them, so that the likeliest nodes are taken as they come.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from spec_jax.drafting.base import BaseDrafter, Draft
from spec_jax.drafting.index_walks import grow, longest_in_index


@dataclasses.dataclass(frozen=True)
class RestDrafter(BaseDrafter):
    """Drafts from the texts of its parameters, a `SuffixIndex`.

    Attributes:
      num_nodes: K, nodes of the tree or tokens of the path.
      longest, shortest: suffix lengths looked up, the longest that occurs counts.
      dynamic_tree: a tree of the K likeliest texts; False: one path.
    """

    num_nodes: int
    longest: int = 16
    shortest: int = 2
    dynamic_tree: bool = True

    @property
    def priors(self):
        """One kind per length of the matching suffix, up to 8."""
        return (0.2, 0.2, 0.3, 0.4, 0.5, 0.6, 0.6, 0.7, 0.7)

    def propose(self, params, state, view):
        def walk(tokens, length):
            place, size = longest_in_index(params, tokens, length, self.longest)
            limit = jnp.where(size >= self.shortest, self.num_nodes, 0)
            return grow(params, place, size, limit, self.num_nodes, 0.0, self.dynamic_tree)

        found = jax.vmap(walk)(view.tokens, view.length)
        parents = found.parents if self.dynamic_tree else None
        kind = jnp.minimum(found.matched, len(self.priors) - 1)
        return Draft(found.tokens, found.count, parents=parents, kind=kind), state
