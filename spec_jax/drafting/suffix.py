"""Suffix decoding: what followed the current suffix most often before, for as long as that is likely (no weights).

Oliaro et al., SuffixDecoding (https://arxiv.org/abs/2411.04975), which walks a trie of all substrings and their counts.
Here the trie is a view: a node is the set of positions at which its string ends in the committed text, and a child
narrows it to those that are followed by one token. So nothing is built, nothing has to be rolled back, and the counts
are exact.
"""

from __future__ import annotations

import dataclasses
import math

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spec_jax.drafting.base import BaseDrafter, Draft


@flax.struct.dataclass
class Walk:
    """A path down the trie.

    Attributes:
      tokens: int32 [K].
      count: int32, leading tokens of it that are drafted.
      prob: float32, the product of the shares that the tokens have of what followed.
      score: float32, the sum of these products: expected accepted tokens, by frequency.
      matched: int32, the longest suffix that leads to where the path begins; 0 without a path.
    """

    tokens: jax.Array
    count: jax.Array
    prob: jax.Array
    score: jax.Array
    matched: jax.Array


def limits(depth: int, factor: float, most: int) -> np.ndarray:
    """Draft tokens at most behind a suffix of m tokens, int32 [depth]: `factor` times m, and as deep as the trie."""
    return np.array([min(most, math.floor(factor * m + 1e-6), depth - m) for m in range(depth)], np.int32)


def suffix_lengths(tokens: jax.Array, length: jax.Array, longest: int) -> jax.Array:
    """How many tokens ending at each position equal the suffix of the text, int32 [capacity]; at most `longest`, and
    `longest` + 1 at the suffix itself, 0 behind it."""
    index = jnp.arange(tokens.shape[0])
    matched, running = jnp.zeros(tokens.shape, jnp.int32), index < length - 1
    for back in range(min(longest, tokens.shape[0])):
        at = length - 1 - back
        have = jnp.pad(tokens[: tokens.shape[0] - back], (back, 0))
        running = running & (have == tokens[jnp.maximum(at, 0)]) & (index >= back) & (at >= 0)
        matched = matched + running
    return jnp.where(index == length - 1, longest + 1, matched)


def best_walk(tokens: jax.Array, length: jax.Array, most: int, depth: int, factor: float, min_prob: float, vocab: int):
    """The walk with the best score behind any suffix of one text.

    Args:
      tokens: int32 [capacity]; length: int32, committed tokens.
      most: K. depth, factor, min_prob: see `SuffixDrafter`.
    """
    capacity, index = tokens.shape[0], jnp.arange(tokens.shape[0])
    table = limits(depth, factor, most)
    # Between two lengths that occur all suffixes end at the same positions, and the one that may draft most is as good
    # as any: [shorter, longer] -> its limit. A walk's score is at most its limit.
    between = np.array([[max(table[low + 1 : high + 1], default=0) for high in range(depth)] for low in range(depth)])
    upto = jnp.asarray(np.maximum.accumulate(table))
    between = jnp.asarray(between, jnp.int32)

    matched = suffix_lengths(tokens, length, depth - 1)
    # Tokens by where they first stand, so that counting takes as many bins as there are tokens in the text.
    first = jnp.full(vocab, capacity).at[jnp.where(index < length, tokens, vocab)].min(index, mode="drop")
    ids = jnp.where(index < length, first[jnp.minimum(tokens, vocab - 1)], capacity)

    def narrow(carry):
        """Goes on to the most frequent next token; of equally frequent ones the one that was last followed."""
        ends, limit, walk = carry
        following = jnp.pad(ends[:-1], (1, 0)) & (index < length)
        counts = jnp.zeros(capacity, jnp.int32).at[ids].add(following, mode="drop")
        often = jnp.where(following, counts[jnp.minimum(ids, capacity - 1)], 0)
        most_often = often.max()
        chosen = capacity - 1 - jnp.argmax(often[::-1])
        prob = walk.prob * (most_often.astype(jnp.float32) / ends.sum().astype(jnp.float32))
        goes_on = (most_often > 0) & (prob >= min_prob) & (walk.count < limit)
        walk = Walk(
            jnp.where(goes_on, walk.tokens.at[walk.count].set(tokens[chosen]), walk.tokens),
            walk.count + goes_on,
            jnp.where(goes_on, prob, 0.0),
            walk.score + jnp.where(goes_on, prob, 0.0),
            walk.matched,
        )
        return following & (ids == ids[chosen]) & goes_on, limit, walk

    def look(carry):
        """Walks behind the suffix of `longest` tokens, and goes on to the next shorter one that ends elsewhere too."""
        longest, best = carry
        shorter = jnp.where(matched < longest, matched, 0).max()
        blank = Walk(jnp.zeros(most, jnp.int32), jnp.int32(0), jnp.float32(1), jnp.float32(0), longest)
        start = matched >= longest, between[shorter, longest], blank
        _, _, walk = lax.while_loop(lambda c: (c[2].prob > 0) & (c[2].count < c[1]), narrow, start)
        better = walk.score > best.score
        return shorter, jax.tree.map(lambda x, y: jnp.where(better, x, y), walk, best)

    nothing = Walk(jnp.zeros(most, jnp.int32), jnp.int32(0), jnp.float32(0), jnp.float32(0), jnp.int32(0))
    start = jnp.where(matched <= depth - 1, matched, 0).max(), nothing
    _, best = lax.while_loop(lambda c: (c[0] > 0) & (upto[c[0]] > c[1].score), look, start)
    return best


@dataclasses.dataclass(frozen=True)
class SuffixDrafter(BaseDrafter):
    """Suffix decoding over prompt and output.

    Attributes:
      num_nodes: K, draft tokens at most.
      depth: of the trie: tokens of a suffix and of the draft behind it together.
      factor: draft tokens at most per token of the matching suffix.
      min_prob: the product of shares at which a draft ends.
    """

    num_nodes: int
    depth: int = 24
    factor: float = 1.0
    min_prob: float = 0.1

    @property
    def priors(self):
        """One kind per length of the matching suffix, up to 8."""
        return (0.25, 0.25, 0.5, 0.7, *(0.8,) * 5)

    def propose(self, params, state, view):
        options = self.num_nodes, self.depth, self.factor, self.min_prob, view.target.vocab_size

        def in_sequence(tokens, length):  # so that a row's loops end with its own walk
            return lax.map(lambda row: best_walk(*row, *options), (tokens, length))

        def side_by_side(tokens, length):
            return jax.vmap(lambda *row: best_walk(*row, *options))(tokens, length)

        walk = lax.platform_dependent(view.tokens, view.length, cpu=in_sequence, default=side_by_side)
        return Draft(walk.tokens, walk.count, kind=jnp.minimum(walk.matched, len(self.priors) - 1)), state
