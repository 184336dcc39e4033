"""A synthetic drafter: it knows the text, and errs as often as it is told. For what a drafter would be worth.

It replays recorded outputs, so that any acceptance rate can be tried before there is a drafter that reaches it. Its
figures are those of no drafter, and are called synthetic wherever they are shown.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.cache import power_of_two
from spec_jax.drafting.base import BaseDrafter, Draft


@flax.struct.dataclass
class Recorded:
    """Recorded texts, prompts and outputs: tokens int32 [texts, longest], length int32 [texts]."""

    tokens: jax.Array
    length: jax.Array


def recorded(texts: Sequence[Sequence[int]]) -> Recorded:
    """Texts as arrays, longer than they are, so that other texts share a program."""
    tokens = np.zeros((len(texts), power_of_two(max(map(len, texts)))), np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    return Recorded(jnp.asarray(tokens), jnp.asarray([len(text) for text in texts], jnp.int32))


@dataclasses.dataclass(frozen=True)
class OracleDrafter(BaseDrafter):
    """Replays the recorded text that a row's own text is the beginning of; its parameters are `Recorded`.

    Attributes:
      num_nodes: K.
      acceptance: the share of draft tokens that are right, each for itself. Which are wrong depends on the position and
        the recorded text alone, so that runs can be repeated. A row that has left every recorded text has no drafts.
    """

    num_nodes: int
    acceptance: float = 0.8

    @property
    def remark(self):
        return f"synthetic: drafts replay recorded texts, {self.acceptance:.0%} of their tokens right"

    @property
    def priors(self):
        return (self.acceptance,)

    def propose(self, params, state, view):
        longest = params.tokens.shape[1]
        place = jnp.arange(longest)

        def row(tokens, length):
            text = jnp.pad(tokens, (0, max(longest - tokens.shape[0], 0)))[:longest]
            same = ((text == params.tokens) | (place >= length)).all(axis=1) & (params.length >= length)
            chosen = jnp.argmax(same)
            at = length + jnp.arange(self.num_nodes)
            truth = params.tokens[chosen, jnp.minimum(at, longest - 1)]
            keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.fold_in(jax.random.key(0), chosen), i))(at)
            right = jax.vmap(jax.random.uniform)(keys) < self.acceptance
            other = (truth + 1) % view.target.vocab_size
            count = jnp.clip(params.length[chosen] - length, 0, self.num_nodes)
            return jnp.where(right, truth, other), jnp.where(same.any(), count, 0)

        tokens, count = jax.vmap(row)(view.tokens, view.length)
        return Draft(tokens, count), state
