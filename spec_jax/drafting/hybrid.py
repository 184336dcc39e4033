"""Two drafters in one: a proposal copied from texts where it promises more than the other drafter usually reaches.

SuffixDecoding's hybrid mode (https://arxiv.org/abs/2411.04975): the first drafter costs next to nothing, and says with
each proposal how many tokens it expects to be accepted; the second, a model, drafts the rows where that is too little.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from spec_jax import tree as tree_lib
from spec_jax.drafting.base import BaseDrafter, Draft, DraftProbs, Needs, propose_if
from spec_jax.rows import select_rows

MEMORY = 0.1
"""Weight of the newest proposal in what the second drafter is expected to reach."""


@flax.struct.dataclass
class HybridState:
    """Both drafters' states, and per row, [batch]: whether the first drafted last (bool), and the accepted tokens to
    expect of the second (float32)."""

    first: Any
    second: Any
    took_first: jax.Array
    expected: jax.Array


@dataclasses.dataclass(frozen=True)
class HybridDrafter(BaseDrafter):
    """Takes the first drafter's proposal where it expects at least `threshold` tokens to be accepted.

    Attributes:
      first: a drafter of chains that chooses its tokens deterministically.
      second: any drafter without auxiliary rows. Its parameters stand behind the first one's, in a pair.
      threshold: accepted tokens; None: what the second drafter has reached lately in the same row.
    """

    first: Any
    second: Any
    threshold: float | None = None

    @property
    def num_nodes(self):
        return max(self.first.num_nodes, self.second.num_nodes)

    @property
    def dynamic_tree(self):
        return self.second.parents is not None or self.second.dynamic_tree

    @property
    def needs(self):
        ours, theirs = self.first.needs, self.second.needs
        features = tuple(sorted({*ours.features, *theirs.features}))
        return Needs(features, ours.prefill_logits or theirs.prefill_logits, max(ours.slots, theirs.slots))

    @property
    def priors(self):
        return (*self.first.priors, *self.second.priors)

    @property
    def remark(self):
        return "; ".join(x for x in (self.first.remark, self.second.remark) if x)

    def init(self, params, target, batch, capacity):
        first, second = (d.init(p, target, batch, capacity) for d, p in zip(self._both, params, strict=True))
        prior = self.second.priors[0]
        expected = sum(prior ** (i + 1) for i in range(self.second.num_nodes))
        return HybridState(first, second, jnp.zeros(batch, bool), jnp.full(batch, expected, jnp.float32))

    @property
    def _both(self):
        return self.first, self.second

    def for_prefill(self):
        return dataclasses.replace(self, first=self.first.for_prefill(), second=self.second.for_prefill())

    def fill(self, state, one, put):
        rows = {name: put(getattr(state, name), getattr(one, name)) for name in ("took_first", "expected")}
        first = self.first.fill(state.first, one.first, put)
        return state.replace(first=first, second=self.second.fill(state.second, one.second, put), **rows)

    def take(self, state, slot):
        def row(x):
            return lax.dynamic_slice_in_dim(x, slot, 1)

        first, second = self.first.take(state.first, slot), self.second.take(state.second, slot)
        return HybridState(first, second, *map(row, (state.took_first, state.expected)))

    def grow(self, state, capacity):
        parts = {}
        for name, drafter in (("first", self.first), ("second", self.second)):
            part = getattr(state, name)
            parts[name] = drafter.grow(part, capacity)
            if parts[name] is None and jax.tree.leaves(part):
                return None
        return state.replace(**parts)

    def commit(self, params, state, seen):
        own = jnp.ones_like(state.took_first) if seen.own is None else seen.own
        first = self.first.commit(params[0], state.first, seen.replace(own=own & state.took_first))
        second = self.second.commit(params[1], state.second, seen.replace(own=own & ~state.took_first))
        expected = state.expected
        if not seen.prefill:
            accepted = seen.count - 1
            told = (seen.count > 0) & own & ~state.took_first & (seen.drafted > 0)
            # A draft that was cut short by a policy and accepted says nothing of how far it might have reached.
            told = told & ((accepted < seen.drafted) | (accepted >= expected))
            expected = jnp.where(told, expected + MEMORY * (accepted - expected), expected)
        return state.replace(first=first, second=second, expected=expected)

    def propose(self, params, state, view):
        ours, first = self.first.propose(params[0], state.first, view)
        bar = state.expected if self.threshold is None else jnp.float32(self.threshold)
        took_first = view.live & (ours.count > 0) & (_score(self.first, ours) >= bar)

        def propose(cache, second):
            return self.second.propose(params[1], second, view.replace(cache=cache))

        _, after = jax.eval_shape(propose, view.cache, state.second)
        if jax.tree.structure(after) == jax.tree.structure(state.second):
            theirs, second = propose_if((view.live & ~took_first).any(), propose, view.cache, state.second)
        else:
            theirs, second = propose(view.cache, state.second)
        if theirs.auxiliary is not None:
            raise ValueError(f"{type(self.second).__name__} has auxiliary rows and cannot be the second of a hybrid")
        draft = self._merged(ours, theirs, took_first)
        return draft, state.replace(first=first, second=second, took_first=took_first)

    def _merged(self, ours: Draft, theirs: Draft, took_first: jax.Array) -> Draft:
        batch, nodes = took_first.shape[0], self.num_nodes

        def wide(x):
            return jnp.pad(x, ((0, 0), (0, nodes - x.shape[1])))

        parents = None
        if self.dynamic_tree:
            given = theirs.parents if theirs.parents is not None else jnp.asarray(self.second.parents, jnp.int32)
            given = jnp.broadcast_to(given, (batch, given.shape[-1]))
            given = jnp.pad(given, ((0, 0), (0, nodes - given.shape[1])), constant_values=-1)
            parents = jnp.where(took_first[:, None], jnp.asarray(tree_lib.chain_parents(nodes), jnp.int32), given)
        q = theirs.q
        if q is not None:
            rows = q.probs.shape[1]
            chosen = jnp.zeros((batch, rows), bool) if q.one_hot is None else q.one_hot
            one_hot = jnp.pad(chosen | took_first[:, None], ((0, 0), (0, max(nodes - rows, 0))), constant_values=True)

            def more(x):
                return jnp.pad(x, ((0, 0), (0, max(nodes - rows, 0)), (0, 0)))

            ids = None if q.ids is None else more(q.ids)
            q = DraftProbs(more(q.probs), ids, one_hot, q.without_replacement)
        kinds = [
            offset + (jnp.zeros(batch, jnp.int32) if draft.kind is None else draft.kind)
            for draft, offset in ((ours, 0), (theirs, len(self.first.priors)))
        ]
        return Draft(
            select_rows(took_first, wide(ours.tokens), wide(theirs.tokens)),
            jnp.where(took_first, ours.count, theirs.count),
            q,
            parents,
            target_cache=theirs.target_cache,
            kind=jnp.where(took_first, *kinds),
        )


def _score(drafter: Any, draft: Draft) -> jax.Array:
    """Accepted tokens to expect, float32 [batch]: what the draft says, or by the prior acceptance of its kind."""
    if draft.score is not None:
        return draft.score
    rate = jnp.asarray(drafter.priors, jnp.float32)[0 if draft.kind is None else draft.kind]
    depth = jnp.arange(1, drafter.num_nodes + 1)
    powers = jnp.broadcast_to(rate, draft.count.shape)[:, None] ** depth
    return jnp.where(depth <= draft.count[:, None], powers, 0.0).sum(axis=1)
