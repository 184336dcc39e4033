"""Prompt lookup: propose what followed the last occurrence of the current suffix (no weights, all on the device).

Saxena, "Prompt Lookup Decoding" (https://github.com/apoorvumang/prompt-lookup-decoding).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from spec_jax.drafting.base import BaseDrafter, Draft


def lookup(
    tokens: jax.Array, length: jax.Array, num_tokens: int, longest: int, shortest: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The continuation of the best earlier match of the committed suffix.

    The longest suffix wins, from `longest` tokens down to `shortest`. Among its matches, those followed by the most
    tokens (up to `num_tokens`) win, and among these the newest. A continuation never runs past the committed text, so
    it may be shorter than `num_tokens`; without a match it is empty.

    Args:
      tokens: int32 [batch, capacity].
      length: int32 [batch], committed tokens.

    Returns:
      draft tokens int32 [batch, num_tokens], their count int32 [batch], and how long the matching suffix was.
    """
    batch, capacity = tokens.shape
    index = jnp.arange(capacity)
    # matched[b, i]: how many tokens ending at i equal the suffix, counted back from the last committed token.
    matched = jnp.zeros((batch, capacity), jnp.int32)
    running = index[None] < length[:, None] - 1  # the suffix itself is no match
    for back in range(min(longest, capacity)):  # no suffix is longer than the text
        at = length - 1 - back
        want = jnp.take_along_axis(tokens, jnp.maximum(at, 0)[:, None], axis=1)
        have = jnp.pad(tokens[:, : capacity - back], ((0, 0), (back, 0)))
        running = running & (have == want) & (index[None] >= back) & (at >= 0)[:, None]
        matched = matched + running
    follow = jnp.minimum(length[:, None] - 1 - index, num_tokens)  # tokens that follow position i
    score = jnp.where(matched >= shortest, matched * (num_tokens + 1) + follow, 0)
    best = capacity - 1 - jnp.argmax(score[:, ::-1], axis=1)
    top = jnp.take_along_axis(score, best[:, None], axis=1)[:, 0]
    count = jnp.where(top > 0, jnp.take_along_axis(follow, best[:, None], axis=1)[:, 0], 0)
    source = jnp.minimum(best[:, None] + 1 + jnp.arange(num_tokens), capacity - 1)
    return jnp.take_along_axis(tokens, source, axis=1), count, top // (num_tokens + 1)


@dataclasses.dataclass(frozen=True)
class NGramDrafter(BaseDrafter):
    """Prompt lookup over prompt and output.

    Attributes:
      num_nodes: K.
      longest, shortest: suffix lengths looked up, longest first.
    """

    num_nodes: int
    longest: int = 3
    shortest: int = 1

    @property
    def priors(self):
        """One kind per length of the matching suffix: long matches continue more often.

        SmolLM2-135M on MT-bench, GSM8K, HumanEval and summaries accepts the first token behind matches of 1, 2 and 3
        tokens at rates of 0.24, 0.49 and 0.76.
        """
        return tuple(min(0.25 * matched, 0.8) for matched in range(self.longest + 1))

    def propose(self, params, state, view):
        tokens, count, matched = lookup(view.tokens, view.length, self.num_nodes, self.longest, self.shortest)
        return Draft(tokens, count, kind=matched), state
