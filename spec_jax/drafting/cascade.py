"""A drafter that itself drafts: a cheap drafter guesses what the draft model proposes, which checks several at once.

Chen et al., Cascade Speculative Drafting (https://arxiv.org/abs/2312.11462). The proposal is the one that the draft
model makes alone; it takes fewer of its forward passes where text is copied.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax

from spec_jax import sampling as sampling_lib
from spec_jax.drafting.base import BaseDrafter, Draft, Needs, NoDrafter
from spec_jax.drafting.draft_model import DraftModelDrafter, DraftModelState


@dataclasses.dataclass(frozen=True)
class CascadeDrafter(BaseDrafter):
    """A draft model that is itself decoded speculatively, greedily or under the target's own noise.

    Penalties, bad words, biases and grammars are left to the target: what they forbid is drafted, and refused.

    Attributes:
      model: the draft model; a chain, not sampled.
      inner: a drafter of chains without state, such as prompt lookup. The parameters of both are a pair.
    """

    model: DraftModelDrafter
    inner: Any

    @property
    def num_nodes(self):
        return self.model.num_nodes

    @property
    def needs(self):
        return Needs(slots=self.num_nodes + self.inner.num_nodes + 2)

    def init(self, params, target, batch, capacity):
        return self.model.init(params[0], target, batch, capacity)

    def for_prefill(self):
        return dataclasses.replace(self, model=self.model.for_prefill(), inner=NoDrafter())

    def grow(self, state, capacity):
        return self.model.grow(state, capacity)

    def commit(self, params, state, seen):
        return self.model.commit(params[0], state, seen)

    def propose(self, params, state, view):
        index, n = jnp.arange(view.length.shape[0]), self.inner.num_nodes
        rows = jnp.arange(n + 2)  # the token before the last one, which the cache may lack, the last one, and drafts
        most = jnp.clip(self.model.max_positions - view.length + 1, 0, self.num_nodes)
        most = jnp.where(view.live, jnp.minimum(most, jnp.maximum(view.room - 1, 0)), 0)
        most = most if view.wanted is None else jnp.minimum(most, view.wanted)
        capacity = view.tokens.shape[1]
        purpose = view.draft_purpose if view.rule == "coupled" else None

        def put(tokens, at, values, kept):
            return tokens.at[index[:, None], jnp.where(kept, at, capacity)].set(values, mode="drop")

        def check(carry):
            tokens, done, cache = carry
            end = view.length + done
            open_to = done < most
            inner = view.replace(tokens=tokens, length=end, last=tokens[index, end - 1], room=most - done, live=open_to)
            guess, _ = self.inner.propose(params[1], (), inner)
            count = jnp.where(open_to, jnp.clip(guess.count, 0, jnp.maximum(most - done - 1, 0)), 0)
            ahead = jnp.arange(n)
            guessed = put(tokens, end[:, None] + ahead, guess.tokens, ahead < count[:, None])
            start = jnp.maximum(end - 2, 0)
            last = end - 1 - start
            flight = guessed[index[:, None], jnp.minimum(start[:, None] + rows, capacity - 1)]
            active = (rows <= (last + count)[:, None]) & open_to[:, None]
            out = self.model.forward(params[0], flight, cache.replace(length=start), True, active=active, write=open_to)
            position = start[:, None] + 1 + rows
            vocab = view.target.vocab_size
            chosen, _ = sampling_lib.choose_tokens(
                out.logits,
                position,
                view.sampling.replace(processors=None),
                vocab,
                purpose,
                None,
                wanted=active & (rows >= last[:, None]),
            )
            chosen = chosen[index[:, None], jnp.minimum(last[:, None] + jnp.arange(n + 1), n + 1)]
            right = (chosen[:, :n] == guess.tokens) & (ahead < count[:, None])
            run = jnp.where(open_to, jnp.cumprod(right, axis=1).sum(axis=1) + 1, 0)
            run = jnp.minimum(run, most - done)
            at = end[:, None] + jnp.arange(n + 1)
            return put(tokens, at, chosen, jnp.arange(n + 1) < run[:, None]), done + run, out.cache

        start = view.tokens, jnp.zeros_like(view.length), state.cache
        tokens, done, cache = lax.while_loop(lambda c: (c[1] < most).any(), check, start)
        at = jnp.minimum(view.length[:, None] + jnp.arange(self.num_nodes), capacity - 1)
        fed = jnp.where(done > 0, view.length - 1 + done, state.cache.length)
        draft = Draft(jnp.take_along_axis(tokens, at, axis=1), done)
        return draft, DraftModelState(cache.replace(length=fed), state.tail)
