"""Suffix-automaton lookup: copy what stood behind the longest match of the current suffix (no weights).

Hu et al., SAM Decoding (https://arxiv.org/abs/2411.10666), which keeps the match in a suffix automaton of the text and
one of a corpus. A state of the first is here what it stands for, the positions at which the suffix ends; of the second,
an interval of a suffix array.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from spec_jax.drafting.base import BaseDrafter, Draft
from spec_jax.drafting.index_walks import longest_in_index
from spec_jax.rows import each_row, select_rows
from spec_jax.suffix_index import SuffixIndex, node_of

BEHIND = 5
"""A match in the corpus must be longer by so many tokens than one in the text itself."""


def first_ends(tokens: jax.Array, length: jax.Array, longest: int) -> jax.Array:
    """Where the suffixes of 1, 2, ..., `longest` tokens of a text first end in it, int32 [longest]; -1: at its end.

    Args:
      tokens: int32 [capacity]; length: int32, committed tokens.
    """
    index = jnp.arange(tokens.shape[0])

    def longer(carry):
        back, running, found = carry
        at = length - 1 - back
        have = jnp.roll(tokens, back)
        running = running & (have == tokens[jnp.maximum(at, 0)]) & (index >= back) & (at >= 0)
        return back + 1, running, found.at[back].set(jnp.where(running.any(), jnp.argmax(running), -1))

    start = jnp.int32(0), index < length - 1, jnp.full(longest, -1, jnp.int32)
    return lax.while_loop(lambda c: (c[0] < longest) & c[1].any(), longer, start)[2]


def copied(tokens: jax.Array, length: jax.Array, most: int, longest: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What stands behind the first end of the longest suffix that has `most` tokens behind it, or the most of all.

    Returns:
      int32 [most], how many of them there are, and how long the suffix is; 0 where none occurred before.
    """
    ends = first_ends(tokens, length, longest)
    follow = jnp.where(ends < 0, 0, jnp.minimum(length - 1 - ends, most))
    best = longest - 1 - jnp.argmax(follow[::-1])
    source = jnp.minimum(ends[best] + 1 + jnp.arange(most), tokens.shape[0] - 1)
    return tokens[source], follow[best], jnp.where(follow[best] > 0, best + 1, 0)


def copied_from_index(index: SuffixIndex, tokens: jax.Array, length: jax.Array, most: int, longest: int):
    """As `copied`, from the first place in an index where the longest suffix stands that occurs there."""
    place, size = longest_in_index(index, tokens, length, longest)
    last = index.text.shape[0] - 1
    first = jnp.where(place.width > 1, index.earliest[node_of(index.common, place.low, place.width)], 0)
    first = jnp.where(place.width > 1, first, index.order[jnp.minimum(place.low, last)])
    found = index.text[jnp.minimum(first + place.depth + jnp.arange(most), last)]
    count = jnp.where(size > 0, jnp.cumprod(found >= 0).sum(), 0)
    return found, count, jnp.where(count > 0, size, 0)


@dataclasses.dataclass(frozen=True)
class SamDrafter(BaseDrafter):
    """Suffix-automaton lookup in prompt and output, and in the texts of its parameters: a `SuffixIndex` or nothing.

    Attributes:
      num_nodes: K.
      shortest: a shorter match drafts nothing.
      longest: longer matches count as this long. The index has a depth of one more, at least.
    """

    num_nodes: int
    shortest: int = 3
    longest: int = 64

    @property
    def priors(self):
        """One kind per length of the matching suffix, up to 8."""
        return (0.25, 0.25, 0.5, 0.7, *(0.8,) * 5)

    def propose(self, params, state, view):
        options = self.num_nodes, self.longest
        found = each_row(lambda *row: copied(*row, *options), view.tokens, view.length)
        if isinstance(params, SuffixIndex):
            other = jax.vmap(lambda *row: copied_from_index(params, *row, *options))(view.tokens, view.length)
            better = other[2] - BEHIND > found[2]
            found = jax.tree.map(lambda x, y: select_rows(better, x, y), other, found)
        tokens, count, matched = found
        count = jnp.where(matched >= self.shortest, count, 0)
        return Draft(tokens, count, kind=jnp.minimum(matched, len(self.priors) - 1)), state
