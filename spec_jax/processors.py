"""Logit processors: what a token's history forbids or makes less likely, at every position in flight.

A draft token at depth d is judged behind the d tokens in flight that lead to it, so every row of a flight has a history
of its own: the committed text and the drafts on its path. Nothing that depends on the text is kept between steps except
a grammar's state, so nothing has to be rolled back: counts and tails are read off the committed tokens of each step.

Rows that use no such option run a program without this code: every group of options is None where no row needs it.
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

NOTHING = -1
"""In place of a token: no token here. In `bad_words` in front of a shorter word: any token, or none."""


@flax.struct.dataclass
class Penalties:
    """float32 [batch] each; see `SamplingParams`."""

    repetition: jax.Array
    presence: jax.Array
    frequency: jax.Array


@flax.struct.dataclass
class Processors:
    """The options of every row as arrays; a group that no row of the call uses is None.

    Attributes:
      bias: float32 [batch, vocab], logit_bias, and -inf at the ids outside allowed_token_ids.
      min_length: int32 [batch], tokens of prompt and new text below which stop ids are forbidden.
      bad_words: int32 [batch, words, longest], right-aligned, padded in front with NOTHING; a word of NOTHING is none.
      penalties: repetition, presence and frequency.
      mask_fns: the grammars of the call, each a pytree that can be called.
      grammar: int32 [batch], the row's index into `mask_fns`, -1 for none.
    """

    bias: jax.Array | None = None
    min_length: jax.Array | None = None
    bad_words: jax.Array | None = None
    penalties: Penalties | None = None
    mask_fns: tuple[Any, ...] = ()
    grammar: jax.Array | None = None


@flax.struct.dataclass
class Committed:
    """What the options need to know of the committed text.

    Attributes:
      prompted: bool [batch, vocab], ids in the prompt (penalties).
      counts: int32 [batch, vocab], times that an id is in the new text (penalties).
      tail: int32 [batch, longest - 1], the last new tokens, padded in front with NOTHING (bad words).
    """

    prompted: jax.Array | None
    counts: jax.Array | None
    tail: jax.Array | None


@flax.struct.dataclass
class History:
    """What precedes the token to be chosen at every row in flight.

    Attributes:
      committed: the same for every row in flight.
      path: int32 [batch, rows, depth], the draft tokens that lead to a row, its own last, padded with NOTHING.
      depth: int32 [batch, rows], how many there are.
      fed: int32 [batch, rows], the row's own token as a grammar takes it: NOTHING in front of the first new token.
      before: per grammar its state in front of `fed`, leaves [batch, rows, ...].
      after: per grammar its state behind `fed`.
    """

    committed: Committed
    path: jax.Array
    depth: jax.Array
    fed: jax.Array
    before: tuple[Any, ...]
    after: tuple[Any, ...]


def read_committed(
    processors: Processors | None, tokens: jax.Array, prompt_length: jax.Array, length: jax.Array, vocab: int
) -> Committed | None:
    """Reads the committed text, int32 tokens [batch, capacity], as far as the options need it."""
    if processors is None:
        return None
    index = jnp.arange(tokens.shape[1])
    is_new = (index >= prompt_length[:, None]) & (index < length[:, None])
    prompted = counts = tail = None
    if processors.penalties is not None:
        rows = jnp.arange(tokens.shape[0])[:, None]
        in_prompt = jnp.where(index < prompt_length[:, None], tokens, vocab)
        prompted = jnp.zeros((tokens.shape[0], vocab), bool).at[rows, in_prompt].set(True, mode="drop")
        new = jnp.where(is_new, tokens, vocab)
        counts = jnp.zeros((tokens.shape[0], vocab), jnp.int32).at[rows, new].add(1, mode="drop")
    if processors.bad_words is not None:
        at = length[:, None] - (processors.bad_words.shape[2] - 1) + jnp.arange(processors.bad_words.shape[2] - 1)
        found = jnp.take_along_axis(tokens, jnp.maximum(at, 0), axis=1)
        tail = jnp.where(at >= prompt_length[:, None], found, NOTHING)
    return Committed(prompted, counts, tail)


def read_flight(
    processors: Processors | None,
    committed: Committed | None,
    flight: jax.Array,
    ancestors: jax.Array,
    parents: jax.Array,
    states: tuple[Any, ...],
    first: jax.Array,
) -> History | None:
    """The history of every row in flight.

    Args:
      flight: int32 [batch, rows], the last committed token and the draft tokens.
      ancestors: bool [batch or 1, rows, rows], which rows each row sees, itself included.
      parents: int32 [batch, rows - 1], the row that row i + 1 is a child of.
      states: per grammar its state in front of the last committed token, leaves [batch, ...].
      first: bool [batch], whether no new token has been committed yet.
    """
    if processors is None:
        return None
    batch, rows = flight.shape
    ancestors = jnp.broadcast_to(ancestors, (batch, rows, rows))
    depth = ancestors.sum(-1, dtype=jnp.int32) - 1
    # path[w, d]: the token of that ancestor of w, if any, which is d + 1 deep; NOTHING + (token - NOTHING) is itself.
    there = ancestors[:, :, 1:, None] & (depth[:, None, 1:, None] == jnp.arange(1, rows))
    path = NOTHING + jnp.where(there, flight[:, None, 1:, None] - NOTHING, 0).sum(2, dtype=jnp.int32)
    fed = flight.at[:, 0].set(jnp.where(first, NOTHING, flight[:, 0]))
    before, after = [], []
    for fn, state in zip(processors.mask_fns, states, strict=True):
        b, a = _walk(fn, state, fed, parents)
        before.append(b)
        after.append(a)
    return History(committed, path, depth, fed, tuple(before), tuple(after))


def _walk(fn: Any, state: Any, fed: jax.Array, parents: jax.Array) -> tuple[Any, Any]:
    """A grammar's states in front of and behind every row in flight, leaves [batch, rows, ...]."""
    batch, rows = fed.shape
    index = jnp.arange(batch)
    parents = jnp.concatenate([jnp.zeros((batch, 1), parents.dtype), parents], axis=1)
    empty = jax.tree.map(lambda x: jnp.zeros((batch, rows, *x.shape[1:]), x.dtype), state)

    def step(carry, row):
        before, after = carry
        own = jax.tree.map(lambda start, a: jnp.where(row == 0, start, a[index, parents[:, row]]), state, after)
        behind = jax.vmap(lambda s, t: fn(s, t)[0])(own, fed[:, row])
        before = jax.tree.map(lambda all, x: all.at[:, row].set(x), before, own)
        after = jax.tree.map(lambda all, x: all.at[:, row].set(x), after, behind)
        return (before, after), None

    (before, after), _ = lax.scan(step, (empty, empty), jnp.arange(rows))
    return before, after


def adjust(
    logits: jax.Array,
    processors: Processors | None,
    history: History | None,
    stop_ids: jax.Array,
    row: jax.Array,
    column: jax.Array,
    position: jax.Array,
) -> jax.Array:
    """The logits [vocab] of one row in flight after every option but temperature and filters.

    Args:
      stop_ids: int32 [batch, stops], padded with -1.
      row, column: which sequence and which of its rows in flight.
      position: absolute position of the token to choose.
    """
    p, h = processors, history
    if p is None:
        return logits
    size = logits.shape[0]
    for number, fn in enumerate(p.mask_fns):
        state = jax.tree.map(lambda x: x[row, column], h.before[number])

        def allowed(fn=fn, state=state):
            mask = fn(state, h.fed[row, column])[1]
            return jnp.pad(mask, (0, size - mask.shape[0]))

        mask = lax.cond(p.grammar[row] == number, allowed, lambda: jnp.ones(size, bool))
        logits = jnp.where(mask, logits, -jnp.inf)
    if p.bias is not None:
        logits = logits + p.bias[row]
    if p.min_length is not None:
        early = (position < p.min_length[row]) & (stop_ids[row] >= 0)
        logits = logits.at[jnp.where(early, stop_ids[row], size)].set(-jnp.inf, mode="drop")
    if p.bad_words is not None:
        words, longest = p.bad_words[row], p.bad_words.shape[2]
        line = jnp.concatenate([h.committed.tail[row], h.path[row, column]])
        recent = lax.dynamic_slice_in_dim(line, h.depth[row, column], longest - 1)
        begun = ((words[:, :-1] == NOTHING) | (words[:, :-1] == recent)).all(axis=1)
        last = jnp.where(begun & (words[:, -1] >= 0), words[:, -1], size)
        logits = logits.at[last].set(-jnp.inf, mode="drop")
    if p.penalties is not None:
        path = h.path[row, column]
        counts = h.committed.counts[row].at[jnp.where(path >= 0, path, size)].add(1, mode="drop")
        repetition = p.penalties.repetition[row]
        repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
        logits = jnp.where(h.committed.prompted[row] | (counts > 0), repeated, logits)
        logits = logits - p.penalties.frequency[row] * counts.astype(jnp.float32)
        logits = logits - p.penalties.presence[row] * (counts > 0).astype(jnp.float32)
    return logits


def read_draft(
    processors: Processors | None,
    committed: Committed | None,
    path: jax.Array,
    depth: jax.Array,
    fed: jax.Array,
    states: tuple[Any, ...],
) -> History | None:
    """The history behind one token that a drafter has just fed, as one row in flight.

    Args:
      path: int32 [batch, steps], the draft tokens so far, padded with NOTHING.
      depth: how many of them there are.
      fed: int32 [batch], the newest token; NOTHING in front of the first new token.
      states: per grammar its state in front of `fed`, leaves [batch, ...].
    """
    if processors is None:
        return None
    after = [
        jax.vmap(lambda s, t, fn=fn: fn(s, t)[0])(s, fed) for fn, s in zip(processors.mask_fns, states, strict=True)
    ]

    def one_row(tree):
        return jax.tree.map(lambda x: x[:, None], tree)

    depth = jnp.broadcast_to(depth, fed.shape)
    return History(committed, *one_row((path, depth, fed, tuple(states), tuple(after))))
