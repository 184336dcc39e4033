"""The decode loop: draft, verify, commit, roll back, stop, all in one `lax.while_loop` over one `DecodeState`.

Invariant between steps: the last committed token of a row is not yet in the target's cache. A step feeds it together
with the draft nodes, so that plain decoding is the same step with no nodes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from spec_jax import cache as kv
from spec_jax import tree as tree_lib
from spec_jax.decode_state import (
    RUNNING,
    STOP,
    DecodeState,
    Prefilled,
    Rows,
    fill_slots,
    read_logprobs,
    record,
    start_state,
)
from spec_jax.draft_length import Pace, default_pace
from spec_jax.draft_policies import StopRule
from spec_jax.drafting.base import Draft, Seen, TargetView, View, propose_if
from spec_jax.flight import acceptable, active_rows, shape_of
from spec_jax.in_place import run_if
from spec_jax.kernels.masks import pack_ancestors
from spec_jax.models.layers import RowBlocks
from spec_jax.models.llama import ForwardOutput
from spec_jax.prefill import prefill
from spec_jax.processors import Committed, read_committed, read_flight
from spec_jax.sampling import NO_TOKEN, SamplingState, of_round
from spec_jax.verify import ROUND_RULES, Verification, verify


@dataclasses.dataclass(frozen=True)
class Decoder:
    """The static description of one compiled decoder: hashable, so equal decoders share their programs.

    Attributes:
      module: the target's Linen module.
      drafter: the drafter.
      vocab_size: usable ids of the target.
      width: rows of one verification step, at least drafter.num_nodes + 1.
      rule: the verification rule, see `verify.verify`.
      rows: canonical row blocks of the target's forward passes.
      prefill_chunk: prompt tokens per row and prefill step.
      policy: how many draft tokens a step verifies, a `CostModel` or one of `draft_policies`; None: as many as the
        drafter proposes.
      rule_options: what a lossy rule is told.
      stop: when a model that drafts stops by itself.
    """

    module: Any
    drafter: Any
    vocab_size: int
    width: int
    rule: str
    rows: RowBlocks
    prefill_chunk: int
    policy: Any = None
    rule_options: tuple[float, ...] = ()
    stop: StopRule | None = None

    def __post_init__(self):
        if self.width < self.drafter.num_nodes + 1:
            raise ValueError(f"width={self.width} cannot hold {self.drafter.num_nodes} draft nodes and the last token")
        parents = self.drafter.parents
        if parents is not None:
            if len(parents) != self.drafter.num_nodes:
                raise ValueError(f"{len(parents)} parents were given for num_nodes={self.drafter.num_nodes}")
            tree_lib.check_parents(parents)
        if self.policy is not None:
            if parents is not None or self.drafter.dynamic_tree:
                raise ValueError(f"verify_width='auto', schedules and tables of draft lengths need a chain drafter, "
                                 f"and {type(self.drafter).__name__} drafts trees")  # fmt: skip
            if self.policy.widths[-1] != self.width:
                raise ValueError(f"the policy's widths {self.policy.widths} must end with the decoder's {self.width}")

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
        """Prefills a batch of prompts and returns the state in front of the first step.

        Args:
          tokens: int32 [batch, capacity], prompts at the left; capacity a multiple of the KV block that holds the
            longest row plus the width, or plus the drafter's `needs.slots` where these are more.
          prompt_length: int32 [batch], at least 1; rows of length >= limit are finished from the start.
          limit: int32 [batch], the length at which a row must end.
          cap_reason: int32 [batch], LENGTH or CONTEXT.
        """
        row = self.blank(params, drafter_params, *tokens.shape)
        row = self.prefill(params, drafter_params, row, tokens, jnp.zeros_like(prompt_length), prompt_length - 1)
        rows = Rows(prompt_length, limit, cap_reason, sampling)
        return start_state(tokens, rows, row.cache, row.drafter, acceptance=self.start_acceptance(tokens.shape[0]))

    def start_acceptance(self, batch: int) -> Any:
        """What the policy knows before the first step; None without a policy."""
        return None if self.policy is None else self.policy.init(batch)

    def blank(self, params: Any, drafter_params: Any, batch: int, capacity: int) -> Prefilled:
        """Empty caches for `batch` prompts of up to `capacity` tokens."""
        if capacity % kv.BLOCK:
            raise ValueError(f"capacity={capacity} must be a multiple of the KV block of {kv.BLOCK} slots")
        c = self.module.config
        cache = kv.init_cache(c, batch, capacity, self.module.dtype)
        return Prefilled(cache, self.drafter.init(drafter_params, self._target(params), batch, capacity))

    def fill(
        self,
        state: DecodeState,
        prefilled: Prefilled,
        tokens: jax.Array,
        slots: jax.Array,
        count: jax.Array,
        rows: Rows,
    ) -> DecodeState:
        """Puts one prefilled prompt into slots of a running batch; see `decode_state.fill_slots`."""
        return fill_slots(state, prefilled, tokens, slots, count, rows, self.drafter.fill)

    def for_prefill(self) -> Decoder:
        """The decoder whose other programs than `run` are the same, without what only matters in a step.

        Decoders that differ in width, rule or draft length share it, and so one compiled program.
        """
        drafter = self.drafter.for_prefill()
        # Below E2 a block is one flight of the whole batch; prefill feeds one prompt and need not agree with it.
        rows = self.rows if self.rows.any_width else RowBlocks()
        width = max(128, drafter.num_nodes + 1)
        plain = {"rule": "coupled", "rule_options": (), "policy": None, "stop": None}
        return dataclasses.replace(self, drafter=drafter, width=width, rows=rows, **plain)

    def run(
        self,
        params: Any,
        drafter_params: Any,
        state: DecodeState,
        max_steps: jax.Array,
        min_live: jax.Array | int = 1,
        pace: Pace | None = None,
    ) -> DecodeState:
        """Decodes until fewer than `min_live` rows are live or `max_steps` more steps are done.

        `state` may be donated. `pace` tells the policy what steps cost; None: `default_pace`.
        """
        if self.policy is not None and pace is None:
            pace = jax.tree.map(jnp.asarray, default_pace(state.length.shape[0], self.drafter.num_nodes))

        def unfinished(carry):
            steps, state = carry
            return (state.live.sum() >= jnp.maximum(min_live, 1)) & (steps < max_steps)

        def step(carry):
            steps, state = carry
            return steps + 1, self.step(params, drafter_params, state, pace)

        return lax.while_loop(unfinished, step, (jnp.int32(0), state))[1]

    def step(self, params: Any, drafter_params: Any, state: DecodeState, pace: Pace | None = None) -> DecodeState:
        """One step: draft, verify, commit, roll back."""
        processors, vocab = state.sampling.processors, self.module.config.vocab_size
        committed = read_committed(processors, state.tokens, state.prompt_length, state.length, vocab)
        draft, drafter_state = self.draft(params, drafter_params, state, committed, pace)
        flight, out = self.forward(params, state, draft, pace)
        verdict, grammar_states = self.verify(state, draft, flight, out.logits, committed)
        return self.commit(drafter_params, state, drafter_state, draft, flight, out, verdict, grammar_states)

    def draft(
        self, params: Any, drafter_params: Any, state: DecodeState, committed: Committed | None, pace: Pace | None
    ) -> tuple[Draft, Any]:
        """The draft of one step, as long as the policy wants it, and the drafter's state behind it."""
        if self.drafter.num_nodes == 0:
            return self._no_draft(state), state.drafter
        if self.policy is None:
            return self._propose(params, drafter_params, state, committed)
        nodes, live = self.drafter.num_nodes, state.live
        if self.policy.judges and len(self.policy.priors) > 1:  # how good a proposal is shows in the proposal
            draft, drafter_state = self._propose(params, drafter_params, state, committed)
        else:
            most = jnp.where(live, jnp.clip(state.limit - state.length - 1, 0, nodes), 0)
            hopeful = self.policy.choose(state.acceptance, _kind(None, live), most, live, nodes, pace.times, pace.draft)
            wanted = jnp.where(pace.forced == 0, hopeful, nodes)
            asked = jnp.where(pace.forced == 0, hopeful.any(), pace.forced > 0)
            draft, drafter_state = self._propose_if(asked, params, drafter_params, state, committed, wanted)
        kind = _kind(draft, live)
        count = self.policy.choose(state.acceptance, kind, draft.count, live, nodes, pace.times)
        ordered = jnp.minimum(draft.count, jnp.maximum(pace.forced - 1, 0))
        return draft.replace(count=jnp.where(pace.forced == 0, count, ordered)), drafter_state

    def forward(
        self, params: Any, state: DecodeState, draft: Draft, pace: Pace | None = None
    ) -> tuple[jax.Array, ForwardOutput]:
        """One target forward pass of the last token and the draft nodes: their tokens int32 [batch, width], and it.

        The barriers keep the pass the same computation whatever stands around it, which is what makes plain and
        speculative decoding bit-identical.
        """
        last = self._last(state)
        cache = state.cache if draft.target_cache is None else draft.target_cache
        padding = jnp.zeros((last.shape[0], self.width - 1 - self.drafter.num_nodes), jnp.int32)
        # A proposal outside the vocabulary is refused by every rule; fed as it is, JAX would clamp it in silence.
        known = (draft.tokens >= 0) & (draft.tokens < self.vocab_size)
        flight = jnp.concatenate([last[:, None], jnp.where(known, draft.tokens, 0), padding], axis=1)
        mask, _, _ = shape_of(draft, self.drafter, self.width)
        mask = mask if mask.ndim == 3 else mask[None]
        active = active_rows(draft, state.live, self.width)
        if pace is not None:
            active = active | ((jnp.arange(self.width) < pace.forced) & state.live[:, None])
        known = draft.exit
        if known is not None and any(0 <= layer < known.layer for layer in self.drafter.needs.features):
            known = None  # those layers have to run to be captured
        fed, cache, known = lax.optimization_barrier((flight, cache, known))

        def narrow(width, begin=None, cache=cache):
            def run():
                out = self.module.apply(
                    {"params": params},
                    fed[:, :width],
                    cache,
                    depth=tree_lib.depths(mask)[:, :width],
                    ancestors=pack_ancestors(mask[:, :width, :width]),
                    rows=self.rows,
                    write=state.live,
                    active=active[:, :width],
                    capture=self.drafter.needs.features,
                    **(begin or {}),
                )
                wide = ((0, 0), (0, self.width - width), (0, 0))
                rows = jax.tree.map(lambda x: jnp.pad(x, wide), (out.logits, out.features))
                return ForwardOutput(*rows, out.cache)

            return run

        widths = (self.width,) if self.policy is None else self.policy.widths
        needed = jnp.where(active, jnp.arange(self.width), 0).max()
        index = sum((needed >= width).astype(jnp.int32) for width in widths[:-1]) if len(widths) > 1 else 0

        def forward():
            return narrow(self.width)() if len(widths) == 1 else lax.switch(index, [narrow(w) for w in widths])

        if known is None:
            out = forward()
        else:
            missing = self.width - known.hidden.shape[1]
            begin = {"start": known.layer, "hidden": jnp.pad(known.hidden, ((0, 0), (0, missing), (0, 0)))}
            if self.policy is None:
                out = narrow(self.width, begin)()
            elif len(widths) > 1:
                out = lax.cond(known.known, narrow(self.width, begin), forward)
            else:

                def first_layers(carry):
                    shape = tree_lib.depths(mask), pack_ancestors(mask), state.live, active
                    return self._first_layers(params, fed, carry[1], shape, known.layer)

                hidden, cache = run_if(~known.known, first_layers, (begin["hidden"], cache))
                out = narrow(self.width, begin | {"hidden": hidden}, cache)()
        # Flat logits, as the head made them and as choosing reads them: around a barrier XLA copies another shape.
        shape, flat = out.logits.shape, out.logits.reshape(-1, out.logits.shape[-1])
        flat, features, cache = lax.optimization_barrier((flat, out.features, out.cache))
        return flight, ForwardOutput(flat.reshape(shape), features, cache)

    def _first_layers(self, params, tokens, cache, shape, stop) -> tuple[jax.Array, kv.KVCache]:
        """Outputs [batch, width, embed] of layer `stop` - 1, and the cache with the rows of the layers up to it."""

        def run(module, tokens, cache):
            flight = module.flight(cache, tokens.shape[1], *shape)
            x, cache, _ = module.layers(module.embed(tokens), cache, flight, self.rows, stop=stop)
            return x, cache

        return self.module.apply({"params": params}, tokens, cache, method=run)

    def verify(
        self, state: DecodeState, draft: Draft, flight: jax.Array, logits: jax.Array, committed: Committed | None
    ) -> tuple[Verification, Any]:
        """The verdict, every row behind its own history, and the grammars' states behind every row."""
        mask, row_parents, chain = shape_of(draft, self.drafter, self.width)
        row_parents = jnp.broadcast_to(row_parents, draft.tokens.shape)
        used = self.drafter.num_nodes + 1
        ahead, states = mask[..., :used, :used], state.grammar_states
        processors = state.sampling.processors
        history = read_flight(processors, committed, flight[:, :used], ahead, row_parents, states, state.first)
        verdict = verify(
            self.rule,
            logits,
            draft,
            row_parents,
            jnp.broadcast_to(tree_lib.depths(mask), flight.shape),
            chain,
            state.length,
            self._sampling(state),
            self.vocab_size,
            history,
            active_rows(draft, state.live, self.width),
            self.rule_options,
        )
        return verdict, history.after if states else ()

    def commit(
        self,
        drafter_params: Any,
        state: DecodeState,
        drafter_state: Any,
        draft: Draft,
        flight: jax.Array,
        out: ForwardOutput,
        verdict: Verification,
        grammar_states: Any,
    ) -> DecodeState:
        """Commits the run token by token, rolls back what was refused, and tells the drafter."""
        index, column = jnp.arange(flight.shape[0]), jnp.arange(self.width)
        cache, logits = out.cache, out.logits
        # A stop token, the limit, or options that leave no token end the run.
        is_stop = (verdict.tokens[..., None] == state.sampling.stop_ids[:, None, :]).any(-1)
        is_none = verdict.tokens == NO_TOKEN
        run = jnp.minimum(verdict.num_accepted + 1, state.limit - state.length)
        ends = (is_stop | is_none) & (column < run[:, None])
        ended = ends.any(axis=1)
        end = jnp.argmax(ends, axis=1)
        emitted = jnp.where(ended, end + ~is_none[index, end], run)
        emitted = jnp.where(state.live, emitted, 0)
        kept = column < emitted[:, None]
        at = jnp.where(kept, state.length[:, None] + column, state.tokens.shape[1])
        tokens = state.tokens.at[index[:, None], at].set(verdict.tokens, mode="drop")
        length = state.length + emitted
        finish = jnp.where(length >= state.limit, state.cap_reason, RUNNING)
        finish = jnp.where(ended, STOP, finish)
        finish = jnp.where(state.live, finish, state.finish)

        logprobs = None
        if state.trace.logprobs is not None:
            top = state.trace.logprobs.top.shape[-1]
            logprobs = read_logprobs(logits, verdict.path, verdict.tokens, kept, top, self.vocab_size)
        was_draft = column < verdict.num_accepted[:, None]
        trace = record(state.trace, at, was_draft, draft.count, verdict.gaps, logprobs)
        states = state.grammar_states
        if states:
            newest = verdict.path[index, jnp.maximum(emitted - 1, 0)]
            states = jax.tree.map(lambda x: x[index, newest], grammar_states)

        # The accepted path becomes contiguous (a chain already is), and the rest is cut off by the length.
        if self.drafter.dynamic_tree or self.drafter.parents is not None:
            moving = jnp.where(state.live, cache.length, cache.capacity)
            cache = kv.move_path(cache.replace(length=moving), verdict.path)
        cache = cache.replace(length=length - 1)

        along = {k: jnp.take_along_axis(f, verdict.path[..., None], axis=1) for k, f in out.features.items()}
        fed = jnp.take_along_axis(flight, verdict.path, axis=1)
        seen = Seen(fed, verdict.tokens, state.length - 1, emitted, along, logits, verdict.path, False, draft.count)
        acceptance = state.acceptance
        if self.policy is not None:
            kind = _kind(draft, state.live)
            acceptance = self.policy.observe(acceptance, kind, draft.count, verdict.num_accepted, state.live)
        return state.replace(
            tokens=tokens,
            length=length,
            finish=finish,
            steps=state.steps + 1,
            trace=trace,
            cache=cache,
            drafter=self.drafter.commit(drafter_params, drafter_state, seen),
            acceptance=acceptance,
            grammar_states=states,
        )

    def _target(self, params) -> TargetView:
        return TargetView(params, self.module, self.rows, self.vocab_size)

    def _sampling(self, state: DecodeState) -> SamplingState:
        """The rows' parameters, with the keys that the rule wants."""
        sampling = state.sampling.with_kernels(self.module.packed)
        return of_round(sampling, state.length) if self.rule in ROUND_RULES else sampling

    def _last(self, state: DecodeState) -> jax.Array:
        """The last committed token of every row, not yet in the cache."""
        return state.tokens[jnp.arange(state.length.shape[0]), state.length - 1]

    def _no_draft(self, state: DecodeState) -> Draft:
        batch = state.length.shape[0]
        return Draft(jnp.zeros((batch, self.drafter.num_nodes), jnp.int32), jnp.zeros(batch, jnp.int32))

    def _propose_if(self, asked, params, drafter_params, state, committed, wanted) -> tuple[Draft, Any]:
        """A proposal where one is asked for, else an empty draft of its shape and the drafter's state unchanged."""

        def propose(cache, drafter_state):
            now = state.replace(drafter=drafter_state, cache=cache)
            return self._propose(params, drafter_params, now, committed, wanted)

        return propose_if(asked, propose, state.cache, state.drafter)

    def _propose(self, params, drafter_params, state, committed, wanted=None) -> tuple[Draft, Any]:
        last = self._last(state)
        room = state.limit - state.length
        view = View(
            state.tokens,
            state.length,
            last,
            room,
            state.live,
            state.cache,
            self._sampling(state),
            self._target(params),
            rule=self.rule,
            committed=committed,
            grammar_states=state.grammar_states,
            first=state.first,
            wanted=wanted,
            stop=self.stop,
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
        real = acceptable(draft, self.drafter.num_nodes)
        count = jnp.where(state.live, jnp.clip(draft.count, 0, jnp.minimum(real, jnp.maximum(room - 1, 0))), 0)
        if self.drafter.dynamic_tree != (draft.parents is not None):
            raise ValueError(f"{self.drafter!r} must return draft parents exactly when its dynamic_tree is True")
        if self.drafter.dynamic_tree or self.drafter.parents is not None:
            # In a tree the room bounds the depth, not the number of nodes; a run is cut when it is committed.
            count = jnp.where(state.live & (room > 1), jnp.clip(draft.count, 0, real), 0)
        return draft.replace(count=count), drafter_state

    def prefill(
        self, params: Any, drafter_params: Any, row: Prefilled, tokens: jax.Array, start: jax.Array, end: jax.Array
    ) -> Prefilled:
        """Feeds tokens[:, start:end] to the target and the drafter; see `prefill.prefill`."""
        return prefill(self, params, drafter_params, row, tokens, start, end)


def _kind(draft: Draft | None, live: jax.Array) -> jax.Array:
    """The kind of every row's proposal, 0 where there is but one."""
    return jnp.zeros(live.shape, jnp.int32) if draft is None or draft.kind is None else draft.kind
