"""Walks over one text's own past: which tokens followed the current suffix how often, as a path or a tree.

Suffix decoding walks a trie of all substrings and their counts. Here the trie is a view: a node is the set of positions
at which its string ends in the committed text, and a child narrows it to those that are followed by one token. So
nothing is built, nothing has to be rolled back, and the counts are exact.
"""

from __future__ import annotations

import math

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@flax.struct.dataclass
class Walk:
    """A path down the trie, or a tree of paths.

    Attributes:
      tokens: int32 [K].
      parents: int32 [K], the token that each follows, -1 for the last committed one.
      count: int32, leading tokens of it that are drafted.
      prob: float32, of the last token: the product of the shares that the tokens up to it have of what followed.
      score: float32, the sum of these products: expected accepted tokens, by frequency.
      matched: int32, the longest suffix that leads to where the walk begins; 0 without a walk.
    """

    tokens: jax.Array
    parents: jax.Array
    count: jax.Array
    prob: jax.Array
    score: jax.Array
    matched: jax.Array

    @classmethod
    def blank(cls, most: int, matched: jax.Array) -> Walk:
        """No tokens yet, and a chain as long as nothing else is said."""
        chain = jnp.arange(-1, most - 1, dtype=jnp.int32)
        return cls(jnp.zeros(most, jnp.int32), chain, jnp.int32(0), jnp.float32(1), jnp.float32(0), matched)


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


def best_in_text(
    tokens: jax.Array,
    length: jax.Array,
    most: int,
    depth: int,
    factor: float,
    min_prob: float,
    vocab: int,
    tree: bool = False,
) -> Walk:
    """The walk with the best score behind any suffix of one text; of equal ones that of the longest suffix.

    Args:
      tokens: int32 [capacity]; length: int32, committed tokens.
      most: K. depth, factor, min_prob, tree: see `SuffixDrafter`.
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

    def behind(ends):
        return jnp.pad(ends[:-1], (1, 0)) & (index < length)

    def likeliest(following):
        """How often the most frequent token at these places is there, and its last place; ties: the last one's."""
        counts = jnp.zeros(capacity, jnp.int32).at[ids].add(following, mode="drop")
        often = jnp.where(following, counts[jnp.minimum(ids, capacity - 1)], 0)
        return often.max(), capacity - 1 - jnp.argmax(often[::-1])

    def share(count, ends):
        return count.astype(jnp.float32) / ends.sum().astype(jnp.float32)

    def path(ends, limit, walk):
        def narrow(carry):
            ends, walk = carry
            following = behind(ends)
            count, chosen = likeliest(following)
            prob = walk.prob * share(count, ends)
            goes_on = (count > 0) & (prob >= min_prob) & (walk.count < limit)
            walk = walk.replace(
                tokens=jnp.where(goes_on, walk.tokens.at[walk.count].set(tokens[chosen]), walk.tokens),
                count=walk.count + goes_on,
                prob=jnp.where(goes_on, prob, 0.0),
                score=walk.score + jnp.where(goes_on, prob, 0.0),
            )
            return following & (ids == ids[chosen]) & goes_on, walk

        return lax.while_loop(lambda c: (c[1].prob > 0) & (c[1].count < limit), narrow, (ends, walk))[1]

    def best_first(ends, limit, walk):
        """Adds the likeliest text that is not in the tree; per node the places that no child has taken yet are open."""

        def add(carry):
            _, walk, opened, sizes, probs, places, offers = carry
            best = jnp.argmax(offers)
            prob, token = offers[best], ids[places[best]]
            goes_on = (prob > 0) & (prob >= min_prob)
            taken = opened[best] & (ids == token)
            new = walk.count + 1
            walk = walk.replace(
                tokens=jnp.where(goes_on, walk.tokens.at[walk.count].set(tokens[places[best]]), walk.tokens),
                parents=jnp.where(goes_on, walk.parents.at[walk.count].set(best - 1), walk.parents),
                count=walk.count + goes_on,
                score=walk.score + jnp.where(goes_on, prob, 0.0),
            )
            two = jnp.stack([best, new])
            opened = opened.at[two].set(jnp.stack([opened[best] & ~taken, behind(taken)]))
            sizes, probs = sizes.at[new].set(taken.sum().astype(jnp.float32)), probs.at[new].set(prob)
            counts, chosen = zip(*(likeliest(opened[i]) for i in (best, new)), strict=True)
            places = places.at[two].set(jnp.stack(chosen))
            found = probs[two] * (jnp.stack(counts).astype(jnp.float32) / sizes[two])
            return goes_on, walk, opened, sizes, probs, places, offers.at[two].set(found)

        opened = jnp.zeros((most + 1, capacity), bool).at[0].set(behind(ends))
        count, chosen = likeliest(opened[0])
        zeros = jnp.zeros(most + 1)
        start = (
            jnp.bool_(True),
            walk,
            opened,
            zeros.at[0].set(ends.sum().astype(jnp.float32)),
            zeros.at[0].set(1.0),
            jnp.zeros(most + 1, jnp.int32).at[0].set(chosen),
            zeros.at[0].set(share(count, ends)),
        )
        return lax.while_loop(lambda c: c[0] & (c[1].count < limit), add, start)[1]

    def look(carry):
        """Walks behind the suffix of `longest` tokens, and goes on to the next shorter one that ends elsewhere too."""
        longest, best = carry
        shorter = jnp.where(matched < longest, matched, 0).max()
        follow = best_first if tree else path
        walk = follow(matched >= longest, between[shorter, longest], Walk.blank(most, longest))
        better = walk.score > best.score
        return shorter, jax.tree.map(lambda x, y: jnp.where(better, x, y), walk, best)

    start = jnp.where(matched <= depth - 1, matched, 0).max(), Walk.blank(most, jnp.int32(0))
    return lax.while_loop(lambda c: (c[0] > 0) & (upto[c[0]] > c[1].score), look, start)[1]
