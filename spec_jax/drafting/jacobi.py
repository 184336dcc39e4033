"""Jacobi decoding: the target's own predictions behind a rejected token are the next draft (no weights).

Santilli et al. (https://arxiv.org/abs/2305.10427): decoding as a fixed point, found by updating all positions at once.
Each step updates the next K positions, and what has become stable is accepted.
"""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from spec_jax.drafting.base import BaseDrafter, Draft
from spec_jax.drafting.likeliest import likeliest_tokens


@flax.struct.dataclass
class JacobiState:
    """The guess at the next K tokens, int32 [batch, K], and how many of its leading tokens were predicted."""

    guess: jax.Array
    known: jax.Array


@dataclasses.dataclass(frozen=True)
class JacobiDrafter(BaseDrafter):
    """Drafts the last step's predictions, and behind them the newest tokens of the text, as good a guess as any.

    Attributes:
      num_nodes: K.
      vocab_size: usable ids.
    """

    num_nodes: int
    vocab_size: int
    priors: tuple[float, ...] = (0.2,)

    def init(self, params, target, batch, capacity):
        return JacobiState(jnp.zeros((batch, self.num_nodes), jnp.int32), jnp.zeros(batch, jnp.int32))

    def for_prefill(self):
        return self  # the state's shape depends on K

    def grow(self, state, capacity):
        return state

    def commit(self, params, state, seen):
        if seen.prefill:
            return state.replace(known=jnp.zeros_like(state.known))
        k = self.num_nodes
        at = seen.count[:, None] + jnp.arange(k)  # rows behind the run, whose tokens were refused
        fed = (at <= seen.drafted[:, None]) & (seen.count > 0)[:, None]
        found = likeliest_tokens(seen.logits, jnp.minimum(at, seen.logits.shape[1] - 1), fed, 1, self.vocab_size)
        guess = jnp.where(fed, found[:, :, 0], 0)
        return JacobiState(guess, fed.sum(axis=1, dtype=jnp.int32))

    def propose(self, params, state, view):
        k = self.num_nodes
        at = view.length[:, None] - k + jnp.arange(k)
        text = jnp.take_along_axis(view.tokens, jnp.clip(at, 0, view.tokens.shape[1] - 1), axis=1)
        text = jnp.where(at >= 0, text, view.last[:, None])
        guess = jnp.where(jnp.arange(k) < state.known[:, None], state.guess, text)
        return Draft(guess, jnp.full(view.length.shape, k, jnp.int32)), state
