"""The carry of the decode loop, what it records per token, and how a prefilled prompt enters a slot of the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from spec_jax import cache as kv
from spec_jax.rows import over_rows
from spec_jax.sampling import SamplingState, mask_padding

RUNNING, STOP, LENGTH, CONTEXT = 0, 1, 2, 3


@flax.struct.dataclass
class Logprobs:
    """Natural-log softmax of the raw logits, per token of the text.

    Attributes:
      chosen: float32 [batch, capacity], of the token itself.
      rank: int32 [batch, capacity], its place among all ids: 1 + how many are more likely.
      top_ids: int32 [batch, capacity, top], the likeliest ids (ties: the lowest first).
      top: float32 [batch, capacity, top], theirs.
    """

    chosen: jax.Array
    rank: jax.Array
    top_ids: jax.Array
    top: jax.Array


@flax.struct.dataclass
class Trace:
    """What happened to every token of the text. Cutting a text cuts its trace, so statistics never need correcting.

    Attributes:
      accepted: bool [batch, capacity], tokens that were drafted and accepted.
      drafted: int32 [batch, capacity], at the first token of every step how many tokens were drafted in it, -1 at the
        others.
      gap: float32 [batch, capacity], lead of the token over the runner-up, see `verify.Verification`; NaN where the
        logits were not numbers.
      logprobs: None where no row asks for them.
    """

    accepted: jax.Array
    drafted: jax.Array
    gap: jax.Array
    logprobs: Logprobs | None = None


@flax.struct.dataclass
class DecodeState:
    """The carry of the loop.

    Attributes:
      tokens: int32 [batch, capacity], committed tokens: prompt, then output.
      length: int32 [batch], how many are committed.
      prompt_length: int32 [batch], how many of them are the prompt.
      limit: int32 [batch], the length at which a row must end.
      cap_reason: int32 [batch], LENGTH or CONTEXT, why `limit` is where it is.
      finish: int32 [batch], RUNNING or the reason a row ended.
      steps: int32 [], steps run so far.
      trace: what happened, per token.
      cache: the target's cache; cache.length = length - 1.
      drafter: the drafter's own state.
      sampling: the rows' sampling parameters and keys.
      grammar_states: per grammar of the call its state in front of the last committed token, leaves [batch, ...].
      acceptance: what the draft length policy has seen of every row, None without one.
    """

    tokens: jax.Array
    length: jax.Array
    prompt_length: jax.Array
    limit: jax.Array
    cap_reason: jax.Array
    finish: jax.Array
    steps: jax.Array
    trace: Trace
    cache: kv.KVCache
    drafter: Any
    sampling: SamplingState
    grammar_states: tuple[Any, ...] = ()
    acceptance: Any = None

    @property
    def live(self) -> jax.Array:
        return self.finish == RUNNING

    @property
    def first(self) -> jax.Array:
        """Whether no new token has been committed yet."""
        return self.length == self.prompt_length


@flax.struct.dataclass
class Prefilled:
    """One prompt behind its prefill: the batch of one that a slot is filled from.

    Attributes:
      cache: the target's cache, batch 1.
      drafter: the drafter's state, batch 1.
    """

    cache: kv.KVCache
    drafter: Any


@flax.struct.dataclass
class Rows:
    """What else a slot is filled with, [batch] each, read at the slots being filled only.

    Attributes:
      prompt_length, limit, cap_reason: as in `DecodeState`; rows of length >= limit are finished from the start.
      sampling: parameters and keys.
      grammar_states: per grammar of the call its first state.
    """

    prompt_length: jax.Array
    limit: jax.Array
    cap_reason: jax.Array
    sampling: SamplingState
    grammar_states: tuple[Any, ...] = ()

    @property
    def finish(self) -> jax.Array:
        """Whether the rows are finished from the start."""
        return jnp.where(self.prompt_length >= self.limit, self.cap_reason, RUNNING)


def new_trace(batch: int, capacity: int, logprobs: int | None) -> Trace:
    """A trace without tokens; `logprobs` is how many likely ids to record, None for no log-probabilities at all."""
    shape = (batch, capacity)
    found = None
    if logprobs is not None:
        ids, values = jnp.zeros((*shape, logprobs), jnp.int32), jnp.zeros((*shape, logprobs), jnp.float32)
        found = Logprobs(jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.int32), ids, values)
    return Trace(jnp.zeros(shape, bool), jnp.full(shape, -1, jnp.int32), jnp.zeros(shape, jnp.float32), found)


def start_state(
    tokens: jax.Array,
    rows: Rows,
    cache: kv.KVCache,
    drafter: Any,
    logprobs: int | None = None,
    acceptance: Any = None,
) -> DecodeState:
    """The state in front of the first step, for prompts int32 [batch, capacity] whose prefill has filled `cache`."""
    return DecodeState(
        tokens=tokens,
        length=rows.prompt_length,
        prompt_length=rows.prompt_length,
        limit=rows.limit,
        cap_reason=rows.cap_reason,
        finish=rows.finish,
        steps=jnp.int32(0),
        trace=new_trace(*tokens.shape, logprobs),
        cache=cache,
        drafter=drafter,
        sampling=rows.sampling,
        grammar_states=rows.grammar_states,
        acceptance=acceptance,
    )


def fill_slots(
    state: DecodeState,
    prefilled: Prefilled,
    tokens: jax.Array,
    slots: jax.Array,
    count: jax.Array,
    rows: Rows,
    fill_drafter: Callable[[Any, Any, Callable], Any],
) -> DecodeState:
    """Puts one prefilled prompt into the first `count` of `slots`, whose rows start anew. Other rows are untouched.

    Args:
      tokens: int32 [1, capacity], the prompt.
      slots: int32 [batch], where the samples of this prompt go.
      rows: the new parameters at the slots' places, [batch], or [1] where the slots share them. Neither they nor the
        state hold grammars, which belong to no row.
      fill_drafter: (state, one prompt's state, put) -> state; see `Drafter.fill`.
    """
    filled = jnp.zeros(slots.shape, bool).at[jnp.where(jnp.arange(slots.shape[0]) < count, slots, slots.shape[0])]
    filled = filled.set(True, mode="drop")

    def put(whole, one):
        """`one` [1, ...] at every slot of `whole` [batch, ...], in place."""
        write = lax.dynamic_update_slice_in_dim
        return lax.fori_loop(0, count, lambda i, whole: write(whole, one.astype(whole.dtype), slots[i], axis=0), whole)

    def choose(new, old):
        return jnp.where(filled.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    length = choose(rows.prompt_length, state.length)
    return state.replace(
        tokens=choose(jnp.broadcast_to(tokens, state.tokens.shape), state.tokens),
        length=length,
        prompt_length=choose(rows.prompt_length, state.prompt_length),
        limit=choose(rows.limit, state.limit),
        cap_reason=choose(rows.cap_reason, state.cap_reason),
        finish=choose(rows.finish, state.finish),
        cache=kv.KVCache(
            k=tuple(map(put, state.cache.k, prefilled.cache.k)),
            v=tuple(map(put, state.cache.v, prefilled.cache.v)),
            length=length - 1,
        ),
        drafter=fill_drafter(state.drafter, prefilled.drafter, put),
        sampling=jax.tree.map(choose, rows.sampling, state.sampling),
        grammar_states=jax.tree.map(choose, rows.grammar_states, state.grammar_states),
        acceptance=state.acceptance
        if getattr(state.acceptance, "kept", False)
        else jax.tree.map(lambda x: choose(jnp.zeros_like(x), x), state.acceptance),
    )


def record(
    trace: Trace, at: jax.Array, accepted: jax.Array, drafted: jax.Array, gap: jax.Array, found: Logprobs | None
) -> Trace:
    """Writes what happened to the tokens of one step at their places `at` int32 [batch, width], if within."""
    rows = jnp.arange(at.shape[0])[:, None]

    def write(whole, new):
        return whole.at[rows, at].set(new, mode="drop")

    first = jnp.arange(at.shape[1]) == 0
    return Trace(
        accepted=write(trace.accepted, accepted),
        drafted=write(trace.drafted, jnp.where(first, drafted[:, None], -1)),
        gap=write(trace.gap, gap),
        logprobs=None if found is None else jax.tree.map(write, trace.logprobs, found),
    )


def read_logprobs(
    logits: jax.Array, path: jax.Array, tokens: jax.Array, kept: jax.Array, top: int, vocab_size: int
) -> Logprobs:
    """The log-probabilities of the tokens of one step, [batch, width]; zeros where `kept` is False.

    Args:
      logits: float32 [batch, rows, vocab], raw.
      path: int32 [batch, width], the row in flight that each token follows.
      tokens: int32 [batch, width].
    """
    batch, width = tokens.shape
    count = max(top, 1)  # results without elements cannot be mapped over rows

    def look(row, in_flight, logits, token):
        x = mask_padding(logits.astype(jnp.float32), vocab_size)
        total = jax.nn.logsumexp(x)
        values, ids = lax.top_k(x, count)
        rank = 1 + (x > x[token]).sum(dtype=jnp.int32)
        return Logprobs(x[token] - total, rank, ids.astype(jnp.int32), values - total)

    nothing = Logprobs(jnp.float32(0), jnp.int32(0), jnp.zeros(count, jnp.int32), jnp.zeros(count, jnp.float32))
    rows, columns = jnp.repeat(jnp.arange(batch), width), path.reshape(-1)
    found = over_rows(look, logits, rows, columns, tokens.reshape(-1), wanted=kept.reshape(-1), nothing=nothing)
    found = found.replace(top_ids=found.top_ids[:, :top], top=found.top[:, :top])
    return jax.tree.map(lambda x: x.reshape(batch, width, *x.shape[1:]), found)
