"""Walks over a `SuffixIndex`: what has followed the current suffixes in other texts, as a path or a tree."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from spec_jax.drafting.suffix_text import Walk
from spec_jax.suffix_index import Place, SuffixIndex, child, find


def grow(index: SuffixIndex, root: Place, matched: jax.Array, limit: jax.Array, most: int, min_prob: float, tree: bool):
    """The `Walk` behind one string: the next token is always the one whose text is the likeliest, by its frequency.

    Args:
      root: where the string stands in the index.
      matched: int32, its length.
      limit: int32, tokens at most; most: the same, static.
      min_prob: a token whose text is less likely is not drafted.
      tree: False: only the most frequent continuation of the newest token.
    """

    def put(x, at, value):
        return x.at[at].set(value, mode="drop")

    def offer(node, number, prob):
        """The next child of some nodes, its token and the probability of its text."""
        place, token = child(index, node, number)
        share = place.width.astype(jnp.float32) / jnp.maximum(node.width, 1).astype(jnp.float32)
        return place, token, prob * share

    def add(_, carry):
        walk, nodes, probs, number, places, tokens, offers = carry
        best = jnp.argmax(offers)
        prob = offers[best]
        goes_on = (prob > 0) & (prob >= min_prob) & (walk.count < limit)
        slot = jnp.where(goes_on, walk.count, most)  # of the walk; its node is one further; beyond both: dropped
        nodes = jax.tree.map(lambda x, y: put(x, slot + 1, y[best]), nodes, places)
        probs = put(probs, slot + 1, prob)
        number = number.at[best].add(goes_on)
        walk = walk.replace(
            tokens=put(walk.tokens, slot, tokens[best]),
            parents=put(walk.parents, slot, best - 1),
            count=walk.count + goes_on,
            prob=jnp.where(goes_on, prob, walk.prob),
            score=walk.score + jnp.where(goes_on, prob, 0.0),
        )
        two = jnp.stack([best, slot + 1])
        read = jnp.minimum(two, most)
        found = offer(jax.tree.map(lambda x: x[read], nodes), number[read], probs[read])
        place, token, prob = found[0], found[1], found[2] * jnp.array([1.0 if tree else 0.0, 1.0])
        two = jnp.where(goes_on, two, most + 1)
        places = jax.tree.map(lambda x, y: put(x, two, y), places, place)
        return walk, nodes, probs, number, places, put(tokens, two, token), put(offers, two, prob)

    nothing = jnp.zeros(most + 1, jnp.int32)
    nodes = jax.tree.map(lambda x: nothing.at[0].set(x), root)
    probs = jnp.zeros(most + 1).at[0].set(1.0)
    places, tokens, offers = offer(nodes, nothing, probs)
    offers = jnp.where(jnp.arange(most + 1) == 0, offers, 0.0)
    carry = Walk.blank(most, matched), nodes, probs, nothing, places, tokens, offers
    return lax.fori_loop(0, most, add, carry)[0]


def best_in_index(
    index: SuffixIndex, tokens: jax.Array, length: jax.Array, limits: jax.Array, most: int, min_prob: float, tree: bool
) -> Walk:
    """The walk with the best score behind any suffix of one text; of equal ones that of the longest suffix.

    Args:
      tokens: int32 [capacity]; length: int32, committed tokens.
      limits: int32 [depth], tokens at most behind a suffix of m tokens.
    """
    places = find(index, tokens, length)
    sizes = places.depth

    def walk(place, size):
        return grow(index, place, size, jnp.where(place.width > 0, limits[size], 0), most, min_prob, tree)

    walks = jax.vmap(walk)(places, sizes)
    best = walks.score.shape[0] - 1 - jnp.argmax(walks.score[::-1])
    return jax.tree.map(lambda x: x[best], walks)


def longest_in_index(index: SuffixIndex, tokens: jax.Array, length: jax.Array, longest: int) -> tuple[Place, jax.Array]:
    """Where the longest suffix of up to `longest` tokens stands that occurs at all, and its length; 0: none does."""
    places = find(index, tokens, length)
    size = jnp.where((places.width > 0) & (places.depth <= longest), places.depth, 0).max()
    return jax.tree.map(lambda x: x[jnp.maximum(size - 1, 0)], places), size
