"""Suffix decoding: what followed the current suffix most often before, for as long as that is likely (no weights).

Oliaro et al., SuffixDecoding (https://arxiv.org/abs/2411.04975), which walks tries of all substrings and their counts:
one of the request's own text, and, where a history is given, one of other texts.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from spec_jax.drafting.base import BaseDrafter, Draft
from spec_jax.drafting.index_walks import best_in_index
from spec_jax.drafting.suffix_text import Walk, best_in_text, limits
from spec_jax.rows import each_row, select_rows
from spec_jax.suffix_index import SuffixIndex


@dataclasses.dataclass(frozen=True)
class SuffixDrafter(BaseDrafter):
    """Suffix decoding over prompt and output, and over the texts of its parameters: a `SuffixIndex` of this depth, or
    nothing.

    Attributes:
      num_nodes: K, draft tokens at most.
      depth: of the trie: tokens of a suffix and of the draft behind it together.
      factor: draft tokens at most per token of the matching suffix.
      min_prob: the product of shares at which a draft ends.
      dynamic_tree: draft the K likeliest texts as a tree; False: one path.
    """

    num_nodes: int
    depth: int = 24
    factor: float = 1.0
    min_prob: float = 0.1
    dynamic_tree: bool = False

    @property
    def priors(self):
        """One kind per length of the matching suffix, up to 8."""
        return (0.25, 0.25, 0.5, 0.7, *(0.8,) * 5)

    def propose(self, params, state, view):
        walk = self.walks(params, view.tokens, view.length, view.target.vocab_size)
        parents = walk.parents if self.dynamic_tree else None
        kind = jnp.minimum(walk.matched, len(self.priors) - 1)
        return Draft(walk.tokens, walk.count, parents=parents, kind=kind, score=walk.score), state

    def walks(self, index: SuffixIndex | tuple, tokens: jax.Array, length: jax.Array, vocab: int) -> Walk:
        """The best `Walk` of every row, of equally good ones that of its own text.

        Args:
          index: of other texts; () for none.
          tokens: int32 [batch, capacity]; length: int32 [batch].
        """
        options = self.num_nodes, self.depth, self.factor, self.min_prob, vocab, self.dynamic_tree
        own = each_row(lambda *row: best_in_text(*row, *options), tokens, length)
        if not isinstance(index, SuffixIndex):
            return own
        table = jnp.asarray(limits(self.depth, self.factor, self.num_nodes))

        def other(tokens, length):
            return best_in_index(index, tokens, length, table, self.num_nodes, self.min_prob, self.dynamic_tree)

        others = jax.vmap(other)(tokens, length)
        better = others.score > own.score
        return jax.tree.map(lambda x, y: select_rows(better, x, y), others, own)
