"""The decode loop: draft, verify, commit, roll back, stop, all in one `lax.while_loop` over one `DecodeState`.

Invariant between steps: the last committed token of a row is not yet in the target's cache. A step feeds it together
with the draft nodes, so that plain decoding is the same step with no nodes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spec_jax import cache as kv
from spec_jax import tree as tree_lib
from spec_jax.drafting.base import Draft, Seen, TargetView, View
from spec_jax.kernels.attention import pack_ancestors
from spec_jax.models.layers import RowBlocks
from spec_jax.sampling import SamplingState
from spec_jax.verify import NEAR_TIE, verify

RUNNING, STOP, LENGTH, CONTEXT = 0, 1, 2, 3


@flax.struct.dataclass
class Counters:
    """What happened per row, counted per emitted token and so cut exactly where the text is cut.

    Attributes:
      steps: int32 [batch], verification steps while the row was live.
      drafts: int32 [batch], steps that had at least one draft token.
      draft_tokens: int32 [batch], draft tokens proposed.
      accepted: int32 [batch], draft tokens accepted and emitted.
      histogram: int32 [batch, nodes + 1], steps with a draft by how many of its tokens were accepted.
      near_ties: int32 [batch], emitted tokens whose lead over the runner-up was below the near-tie bound.
      broken: int32 [batch], emitted tokens that were chosen from logits that are not numbers.
    """

    steps: jax.Array
    drafts: jax.Array
    draft_tokens: jax.Array
    accepted: jax.Array
    histogram: jax.Array
    near_ties: jax.Array
    broken: jax.Array


@flax.struct.dataclass
class DecodeState:
    """The carry of the loop.

    Attributes:
      tokens: int32 [batch, capacity], committed tokens: prompt, then output.
      length: int32 [batch], how many are committed.
      limit: int32 [batch], the length at which a row must end.
      cap_reason: int32 [batch], LENGTH or CONTEXT, why `limit` is where it is.
      finish: int32 [batch], RUNNING or the reason a row ended.
      accepted: bool [batch, capacity], tokens that were drafted and accepted.
      cache: the target's cache; cache.length = length - 1.
      drafter: the drafter's own state.
      sampling: the rows' sampling parameters and keys.
      counters: statistics.
    """

    tokens: jax.Array
    length: jax.Array
    limit: jax.Array
    cap_reason: jax.Array
    finish: jax.Array
    accepted: jax.Array
    cache: kv.KVCache
    drafter: Any
    sampling: SamplingState
    counters: Counters

    @property
    def live(self) -> jax.Array:
        return self.finish == RUNNING


@dataclasses.dataclass(frozen=True)
class Decoder:
    """The static description of one compiled decoder: hashable, so equal decoders share their programs.

    Attributes:
      module: the target's Linen module.
      drafter: the drafter.
      vocab_size: usable ids of the target.
      width: rows of one verification step, at least drafter.num_nodes + 1.
      rule: "coupled" or "standard".
      rows: canonical row blocks of the target's forward passes.
      prefill_chunk: prompt tokens per row and prefill step.
    """

    module: Any
    drafter: Any
    vocab_size: int
    width: int
    rule: str
    rows: RowBlocks
    prefill_chunk: int

    def __post_init__(self):
        if self.width < self.drafter.num_nodes + 1:
            raise ValueError(f"width={self.width} cannot hold {self.drafter.num_nodes} draft nodes and the last token")
        parents = self.drafter.parents
        if parents is not None:
            if len(parents) != self.drafter.num_nodes:
                raise ValueError(f"{len(parents)} parents were given for num_nodes={self.drafter.num_nodes}")
            tree_lib.check_parents(parents)

    def init(
        self,
        params: Any,
        drafter_params: Any,
        tokens: jax.Array,
        prompt_length: jax.Array,
        limit: jax.Array,
        cap_reason: jax.Array,
        sampling: SamplingState,
    ) -> DecodeState:
        """Prefills the prompts and returns the state in front of the first step.

        Args:
          tokens: int32 [batch, capacity], prompts at the left; capacity a multiple of the KV block that holds the
            longest row plus the width.
          prompt_length: int32 [batch], at least 1; rows of length >= limit are finished from the start.
          limit: int32 [batch], the length at which a row must end.
          cap_reason: int32 [batch], LENGTH or CONTEXT.
        """
        batch, capacity = tokens.shape
        if capacity % kv.BLOCK:
            raise ValueError(f"capacity={capacity} must be a multiple of the KV block of {kv.BLOCK} slots")
        c = self.module.config
        target = self._target(params)
        cache = kv.init_cache(c.num_layers, batch, c.num_kv_heads, capacity, c.head_dim, self.module.dtype)
        drafter_state = self.drafter.init(drafter_params, target, batch, capacity)
        cache, drafter_state = self._prefill(params, drafter_params, tokens, prompt_length - 1, cache, drafter_state)
        finish = jnp.where(prompt_length >= limit, cap_reason, RUNNING)
        accepted = jnp.zeros(tokens.shape, bool)
        return DecodeState(
            tokens,
            prompt_length,
            limit,
            cap_reason,
            finish,
            accepted,
            cache,
            drafter_state,
            sampling,
            self.no_counts(batch),
        )

    def no_counts(self, batch: int) -> Counters:
        """Counters at zero."""
        zeros = [jnp.zeros(batch, jnp.int32) for _ in range(6)]
        return Counters(*zeros[:4], jnp.zeros((batch, self.drafter.num_nodes + 1), jnp.int32), *zeros[4:])

    def for_prefill(self) -> Decoder:
        """The decoder whose `init` compiles to the same prefill, without what only matters afterwards.

        Decoders that differ in width, rule or draft length share it, and so one compiled program; the counters of its
        state are to be replaced by `no_counts`.
        """
        drafter = self.drafter.for_prefill()
        return dataclasses.replace(self, drafter=drafter, width=max(128, drafter.num_nodes + 1), rule="coupled")

    def run(self, params: Any, drafter_params: Any, state: DecodeState, max_steps: jax.Array) -> DecodeState:
        """Decodes until every row has ended or `max_steps` more steps are done. `state` may be donated."""

        def unfinished(carry):
            steps, state = carry
            return state.live.any() & (steps < max_steps)

        def step(carry):
            steps, state = carry
            return steps + 1, self.step(params, drafter_params, state)

        return lax.while_loop(unfinished, step, (jnp.int32(0), state))[1]

    def step(self, params: Any, drafter_params: Any, state: DecodeState) -> DecodeState:
        """One step: draft, verify, commit, roll back."""
        # 1) Draft.
        index = jnp.arange(state.length.shape[0])
        last = state.tokens[index, state.length - 1]
        draft, drafter_state = self._propose(params, drafter_params, state, last)
        cache = state.cache if draft.target_cache is None else draft.target_cache

        # 2) One target forward pass of the last token and the draft nodes. The barriers keep the pass the same
        # computation whatever stands around it, which is what makes plain and speculative decoding bit-identical.
        nodes = self.drafter.num_nodes
        padding = jnp.zeros((last.shape[0], self.width - 1 - nodes), jnp.int32)
        # A proposal outside the vocabulary is refused by every rule; fed as it is, JAX would clamp it in silence.
        known = (draft.tokens >= 0) & (draft.tokens < self.vocab_size)
        flight = jnp.concatenate([last[:, None], jnp.where(known, draft.tokens, 0), padding], axis=1)
        depth, ancestors, row_parents, chain = self._shape_of(draft)
        flight, cache = lax.optimization_barrier((flight, cache))
        out = self.module.apply(
            {"params": params},
            flight,
            cache,
            depth=depth,
            ancestors=ancestors,
            rows=self.rows,
            write=state.live,
            capture=self.drafter.needs.features,
        )
        logits, features, cache = lax.optimization_barrier((out.logits, out.features, out.cache))

        # 3) Verify.
        verdict = verify(
            self.rule,
            logits,
            draft,
            jnp.broadcast_to(row_parents, draft.tokens.shape),
            jnp.broadcast_to(depth, flight.shape),
            chain,
            state.length,
            state.sampling,
            self.vocab_size,
        )

        # 4) Commit the run, token by token: a stop token or the limit inside it ends it there.
        column = jnp.arange(self.width)
        is_stop = (verdict.tokens[..., None] == state.sampling.stop_ids[:, None, :]).any(-1)
        run = jnp.minimum(verdict.num_accepted + 1, state.limit - state.length)
        stops = is_stop & (column < run[:, None])
        stopped = stops.any(axis=1)
        emitted = jnp.where(stopped, jnp.argmax(stops, axis=1) + 1, run)
        emitted = jnp.where(state.live, emitted, 0)
        kept = column < emitted[:, None]
        at = jnp.where(kept, state.length[:, None] + column, state.tokens.shape[1])
        tokens = state.tokens.at[index[:, None], at].set(verdict.tokens, mode="drop")
        was_draft = column < verdict.num_accepted[:, None]
        accepted = state.accepted.at[index[:, None], at].set(was_draft, mode="drop")
        length = state.length + emitted
        finish = jnp.where(length >= state.limit, state.cap_reason, RUNNING)
        finish = jnp.where(stopped, STOP, finish)
        finish = jnp.where(state.live, finish, state.finish)

        # 5) Roll back: the accepted path becomes contiguous (a chain already is), the rest is cut off by the length.
        if not chain:
            moving = jnp.where(state.live, cache.length, cache.capacity)
            cache = kv.move_path(cache.replace(length=moving), verdict.path)
        cache = cache.replace(length=length - 1)

        # 6) Tell the drafter.
        along = {k: jnp.take_along_axis(f, verdict.path[..., None], axis=1) for k, f in features.items()}
        fed = jnp.take_along_axis(flight, verdict.path, axis=1)
        seen = Seen(fed, verdict.tokens, state.length - 1, emitted, along, logits, verdict.path, prefill=False)
        drafter_state = self.drafter.commit(drafter_params, drafter_state, seen)

        counters = self._count(state, draft, verdict, emitted, kept)
        return state.replace(
            tokens=tokens,
            length=length,
            finish=finish,
            accepted=accepted,
            cache=cache,
            drafter=drafter_state,
            counters=counters,
        )

    def _target(self, params) -> TargetView:
        return TargetView(params, self.module, self.rows, self.vocab_size)

    def _propose(self, params, drafter_params, state, last) -> tuple[Draft, Any]:
        if self.drafter.num_nodes == 0:
            batch = last.shape[0]
            return Draft(jnp.zeros((batch, 0), jnp.int32), jnp.zeros(batch, jnp.int32)), state.drafter
        room = state.limit - state.length
        view = View(
            state.tokens,
            state.length,
            last,
            room,
            state.live,
            state.cache,
            state.sampling,
            self._target(params),
            rule=self.rule,
        )
        draft, drafter_state = self.drafter.propose(drafter_params, state.drafter, view)
        for name, shape in (("tokens", (*last.shape, self.drafter.num_nodes)), ("count", last.shape)):
            given = getattr(draft, name)
            if given.shape != shape or not jnp.issubdtype(given.dtype, jnp.integer):
                raise ValueError(
                    f"{type(self.drafter).__name__}.propose returned Draft.{name} {given.dtype}{list(given.shape)}; "
                    f"it must be int32{list(shape)}"
                )
        # Verification always adds one token of its own, so a row with room for r tokens can use r - 1 drafts.
        real = self._acceptable(draft)
        count = jnp.where(state.live, jnp.clip(draft.count, 0, jnp.minimum(real, jnp.maximum(room - 1, 0))), 0)
        if self.drafter.dynamic_tree != (draft.parents is not None):
            raise ValueError(f"{self.drafter!r} must return draft parents exactly when its dynamic_tree is True")
        if self.drafter.dynamic_tree or self.drafter.parents is not None:
            # In a tree the room bounds the depth, not the number of nodes; a run is cut when it is committed.
            count = jnp.where(state.live & (room > 1), jnp.clip(draft.count, 0, real), 0)
        return draft.replace(count=count), drafter_state

    def _acceptable(self, draft: Draft):
        """How many nodes of a draft may be accepted at all: the auxiliary ones stand behind them."""
        nodes = self.drafter.num_nodes
        return nodes if draft.auxiliary is None else nodes - draft.auxiliary.sum(dtype=jnp.int32)

    def _shape_of(self, draft: Draft):
        """Depths, packed ancestors and row parents of the flight, and whether its acceptable nodes form a chain."""
        nodes = self.drafter.num_nodes
        parents = draft.parents
        if parents is None:
            static = self.drafter.parents
            chain = static is None
            parents = np.asarray(tree_lib.chain_parents(nodes) if chain else static, np.int32)
            if chain:  # padding rows continue the chain: one mask and one program for every number of nodes
                mask = np.tril(np.ones((self.width, self.width), bool))
            else:
                mask = tree_lib.ancestor_mask(parents, self.width)
        else:
            chain = False
            mask = tree_lib.ancestor_mask(jnp.asarray(parents, jnp.int32), self.width)
        depth = tree_lib.depths(mask)
        packed = pack_ancestors(mask if mask.ndim == 3 else mask[None])
        return depth, packed, jnp.asarray(parents) + 1, chain

    def _prefill(self, params, drafter_params, tokens, count, cache, drafter_state):
        """Feeds tokens[:, :count] chunk by chunk; rows of other lengths share the chunks."""
        chunk = self.prefill_chunk
        depth = np.arange(chunk, dtype=np.int32)
        ancestors = pack_ancestors(np.tril(np.ones((1, chunk, chunk), bool)))
        padded = jnp.pad(tokens, ((0, 0), (0, chunk + 1)))
        needs = self.drafter.needs

        def body(carry):
            index, cache, drafter_state = carry
            start = index * chunk
            fed = lax.dynamic_slice_in_dim(padded, start, chunk, axis=1)
            follow = lax.dynamic_slice_in_dim(padded, start + 1, chunk, axis=1)
            starts = jnp.full(count.shape, start)
            inside = jnp.clip(count - start, 0, chunk)
            fed, cache = lax.optimization_barrier((fed, cache.replace(length=starts)))
            out = self.module.apply(
                {"params": params},
                fed,
                cache,
                depth=depth,
                ancestors=ancestors,
                rows=self.rows,
                capture=needs.features,
                with_logits=needs.prefill_logits,
            )
            path = jnp.broadcast_to(depth, fed.shape)
            seen = Seen(fed, follow, starts, inside, out.features, out.logits, path, prefill=True)
            return index + 1, out.cache, self.drafter.commit(drafter_params, drafter_state, seen)

        chunks = (jnp.max(count) + chunk - 1) // chunk
        start = (jnp.int32(0), cache, drafter_state)
        _, cache, drafter_state = lax.while_loop(lambda carry: carry[0] < chunks, body, start)
        return cache.replace(length=count), drafter_state

    def _count(self, state, draft, verdict, emitted, kept) -> Counters:
        c, live = state.counters, state.live
        drafted = live & (draft.count > 0)
        accepted = jnp.minimum(verdict.num_accepted, emitted)
        rows = jnp.arange(emitted.shape[0])
        bound = NEAR_TIE[self.module.dtype]
        return Counters(
            steps=c.steps + live,
            drafts=c.drafts + drafted,
            draft_tokens=c.draft_tokens + draft.count,
            accepted=c.accepted + accepted,
            histogram=c.histogram.at[rows, accepted].add(drafted.astype(jnp.int32), mode="drop"),
            near_ties=c.near_ties + ((verdict.gaps < bound) & kept).sum(axis=1, dtype=jnp.int32),
            broken=c.broken + (jnp.isnan(verdict.gaps) & kept).sum(axis=1, dtype=jnp.int32),
        )
