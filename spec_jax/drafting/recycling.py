"""Token recycling: what the target found likely behind a token before is drafted behind it again (no weights).

Luo et al., Token Recycling (https://arxiv.org/abs/2408.08696): an adjacency matrix holds the likeliest next tokens of
every token, as its last verified row said, whether that row was accepted or not; a tree is read off it.
"""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from spec_jax.drafting.base import BaseDrafter, Draft
from spec_jax.drafting.likeliest import likeliest_tokens
from spec_jax.token_tree import paths_of

EMPTY = -1


@flax.struct.dataclass
class RecyclingState:
    """Per row, so that a text does not depend on its company.

    Attributes:
      next_tokens: int32 [batch, vocab, ranks], the likeliest next tokens of every token, EMPTY where nothing was seen:
        1.5 MB for 49152 tokens and 8 ranks.
      flight: int32 [batch, 1 + nodes], the tokens of the last flight, EMPTY behind its real nodes.
    """

    next_tokens: jax.Array
    flight: jax.Array


@dataclasses.dataclass(frozen=True)
class RecyclingDrafter(BaseDrafter):
    """Drafts a tree whose nodes are ranks of the matrix; nodes that lead to nothing seen are left out.

    Attributes:
      tree: parents of the template's nodes. A node's place among its siblings is its rank.
      vocab_size: usable ids.
    """

    tree: tuple[int, ...]
    vocab_size: int
    dynamic_tree: bool = True

    @property
    def num_nodes(self):
        return len(self.tree)

    @property
    def ranks(self):
        """Columns of the matrix."""
        return max(self._ranks) + 1

    @property
    def _ranks(self):
        return [path[-1] for path in paths_of(self.tree)]

    def init(self, params, target, batch, capacity):
        table = jnp.full((batch, self.vocab_size, self.ranks), EMPTY, jnp.int32)
        return RecyclingState(table, jnp.full((batch, 1 + self.num_nodes), EMPTY, jnp.int32))

    def grow(self, state, capacity):
        return state

    def commit(self, params, state, seen):
        if seen.prefill:
            return state.replace(next_tokens=self._read_prompt(state.next_tokens, seen))
        rows = jnp.broadcast_to(jnp.arange(state.flight.shape[1]), state.flight.shape)
        wanted = (state.flight >= 0) & (seen.count > 0)[:, None] & (rows <= seen.drafted[:, None])
        if seen.own is not None:  # the flight was another drafter's
            wanted = wanted & seen.own[:, None]
        found = likeliest_tokens(seen.logits, rows, wanted, self.ranks, self.vocab_size)
        # Of several rows with the same token the last one counts.
        same = (state.flight[:, :, None] == state.flight[:, None, :]) & wanted[:, None, :]
        last = wanted & ~(same & (rows[0][None, None, :] > rows[0][None, :, None])).any(axis=2)
        token = jnp.where(last, state.flight, self.vocab_size)
        index = jnp.arange(token.shape[0])[:, None]
        return state.replace(next_tokens=state.next_tokens.at[index, token].set(found, mode="drop"))

    def _read_prompt(self, table, seen):
        """A token's successors in the prompt, the newest first: the head does not run on prompts."""

        def add(column, table):
            token, after = seen.tokens[:, column], seen.next_tokens[:, column]
            index = jnp.arange(token.shape[0])
            known = table[index, jnp.clip(token, 0, self.vocab_size - 1)]
            kept = jnp.argsort(known == after[:, None], axis=1, stable=True)  # what is there already goes to the end
            rest = jnp.take_along_axis(known, kept, axis=1)[:, : self.ranks - 1]
            fresh = jnp.concatenate([after[:, None], rest], axis=1)
            at = jnp.where(column < seen.count, token, self.vocab_size)
            return table.at[index, at].set(fresh, mode="drop")

        return jax.lax.fori_loop(0, seen.count.max(), add, table)

    def propose(self, params, state, view):
        index, tokens = jnp.arange(view.last.shape[0]), []
        for parent, rank in zip(self.tree, self._ranks, strict=True):
            before = view.last if parent < 0 else tokens[parent]
            after = state.next_tokens[index, jnp.clip(before, 0, self.vocab_size - 1), rank]
            tokens.append(jnp.where(before >= 0, after, EMPTY))
        tokens = jnp.stack(tokens, axis=1)
        real = tokens >= 0
        # The real nodes move to the front, in their order, so that parents still precede their children.
        place = jnp.cumsum(real, axis=1) - 1
        to = jnp.where(real, place, self.num_nodes)
        parents = jnp.where(jnp.asarray(self.tree) < 0, -1, place[:, jnp.maximum(jnp.asarray(self.tree), 0)])

        def moved(x, fill):
            return jnp.full_like(x, fill).at[index[:, None], to].set(x, mode="drop")

        count = real.sum(axis=1, dtype=jnp.int32)
        packed = moved(tokens, EMPTY)
        flight = jnp.concatenate([view.last[:, None], packed], axis=1)
        draft = Draft(packed, count, parents=moved(parents, -1))
        return draft, state.replace(flight=flight)
