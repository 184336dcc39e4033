"""Lookahead decoding: n-grams from a Jacobi window are kept in a pool and verified when their first token comes.

Fu et al. (https://arxiv.org/abs/2402.02057). One forward pass of the target does two things: auxiliary rows carry a
window of N - 1 guesses at each of the next positions, whose last predictions complete new n-grams; and up to G n-grams
that begin with the current token are verified, as a tree without equal siblings.
"""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spec_jax.drafting.base import BaseDrafter, Draft
from spec_jax.drafting.likeliest import likeliest_tokens

EMPTY = -1
BUCKETS = 1024
"""Keys that a row's pool holds, a power of two; a new key takes the place of an old one with the same remainder."""


@flax.struct.dataclass
class Pool:
    """Per row and key at most G n-grams without their key, the newest first.

    Attributes:
      keys: int32 [batch, BUCKETS], EMPTY where nothing is.
      grams: int32 [batch, BUCKETS, G, N - 1], EMPTY where there are fewer.
    """

    keys: jax.Array
    grams: jax.Array


@flax.struct.dataclass
class LookaheadState:
    """
    Attributes:
      pool: the n-grams.
      window: int32 [batch, N - 1, W]; entry (l, j) is a guess at the token l + j places behind the current one, made l
        steps after the guesses of row 0. Entry (0, 0) is the current token.
      age: int32 [batch], steps since the window was filled with prompt tokens; its rows are predictions after N - 2.
      tail: int32 [batch, N - 1], the newest tokens of the prompt that was read so far, EMPTY where there are fewer.
      read: int32 [batch], the position behind what was read. A session's next turn is not read from there on.
    """

    pool: Pool
    window: jax.Array
    age: jax.Array
    tail: jax.Array
    read: jax.Array


def add_grams(pool: Pool, keys: jax.Array, grams: jax.Array, wanted: jax.Array) -> Pool:
    """Puts n-grams in front of their keys' lists, one after another; one that is there moves to the front.

    Args:
      keys: int32 [batch, m]; grams: int32 [batch, m, N - 1]; wanted: bool [batch, m].
    """
    index = jnp.arange(keys.shape[0])

    def add(place, pool):
        key, gram, valid = keys[:, place], grams[:, place], wanted[:, place]
        bucket = jnp.where(valid, key % BUCKETS, 0)
        mine = pool.keys[index, bucket] == key
        known = jnp.where(mine[:, None, None], pool.grams[index, bucket], EMPTY)
        there = (known == gram[:, None]).all(axis=2)
        order = jnp.argsort(there, axis=1, stable=True)  # what is there already goes to the end, and drops out
        rest = jnp.take_along_axis(known, order[:, :, None], axis=1)[:, :-1]
        fresh = jnp.concatenate([gram[:, None], rest], axis=1)
        at = jnp.where(valid, bucket, BUCKETS)
        return Pool(pool.keys.at[index, at].set(key, mode="drop"), pool.grams.at[index, at].set(fresh, mode="drop"))

    return lax.fori_loop(0, keys.shape[1], add, pool)


def look_up(pool: Pool, key: jax.Array) -> jax.Array:
    """The n-grams of one key per row, int32 [batch, G, N - 1]."""
    index, bucket = jnp.arange(key.shape[0]), jnp.maximum(key, 0) % BUCKETS
    return jnp.where((pool.keys[index, bucket] == key)[:, None, None], pool.grams[index, bucket], EMPTY)


def merged(grams: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Chains int32 [batch, G, m] as a tree without equal siblings, the real nodes in front.

    Returns:
      tokens and parents int32 [batch, G * m], and how many nodes are real, int32 [batch].
    """
    batch, count, depth = grams.shape
    # twin[b, g, h, d]: chains g and h agree up to depth d. The first of them that do has the node.
    twin = jnp.cumprod(grams[:, :, None] == grams[:, None], axis=3).astype(bool)
    first = jnp.argmax(twin, axis=2)  # [batch, G, m]
    own = (first == jnp.arange(count)[None, :, None]) & (grams >= 0)
    place = (jnp.cumsum(own.reshape(batch, -1), axis=1) - 1).reshape(own.shape)
    index = jnp.arange(batch)[:, None, None]
    node = place[index, first, jnp.arange(depth)]
    parents = jnp.concatenate([jnp.full((batch, count, 1), -1, jnp.int32), node[:, :, :-1]], axis=2)
    to = jnp.where(own, place, count * depth).reshape(batch, -1)

    def moved(x):
        flat = x.reshape(batch, -1)
        return jnp.full_like(flat, -1).at[jnp.arange(batch)[:, None], to].set(flat, mode="drop")

    return moved(grams), moved(parents), own.sum(axis=(1, 2), dtype=jnp.int32)


@dataclasses.dataclass(frozen=True)
class LookaheadDrafter(BaseDrafter):
    """Lookahead decoding.

    Attributes:
      ngram: N, at least 3.
      window: W, positions of the window.
      guesses: G, n-grams verified at once.
      vocab_size: usable ids.
      from_prompt: the pool begins with the n-grams of the prompt.
    """

    ngram: int
    window: int
    guesses: int
    vocab_size: int
    from_prompt: bool = True
    dynamic_tree: bool = True

    @property
    def verified(self):
        """Nodes of the verification branch."""
        return self.guesses * (self.ngram - 1)

    @property
    def num_nodes(self):
        return self.verified + (self.ngram - 1) * self.window - 1

    def init(self, params, target, batch, capacity):
        size = self.ngram - 1
        pool = Pool(
            jnp.full((batch, BUCKETS), EMPTY, jnp.int32),
            jnp.full((batch, BUCKETS, self.guesses, size), EMPTY, jnp.int32),
        )
        window, tail = jnp.zeros((batch, size, self.window), jnp.int32), jnp.full((batch, size), EMPTY, jnp.int32)
        age, read = (jnp.zeros(batch, jnp.int32) for _ in range(2))  # one array in two places could not be donated
        return LookaheadState(pool, window, age, tail, read)

    def grow(self, state, capacity):
        return state

    def commit(self, params, state, seen):
        return self._read_prompt(state, seen) if seen.prefill else self._learn(state, seen)

    def _read_prompt(self, state, seen):
        """Fills the window with tokens of the prompt, and the pool with its n-grams."""
        size, live = self.ngram - 1, seen.count > 0
        # What was read: the tail of before, the chunk, and the token behind it.
        newest = jnp.take_along_axis(seen.next_tokens, jnp.maximum(seen.count - 1, 0)[:, None], axis=1)
        before = jnp.where((state.read == seen.start)[:, None], state.tail, EMPTY)
        text = jnp.concatenate([before, seen.tokens, jnp.zeros_like(newest)], axis=1)
        end = size + seen.count
        text = text.at[jnp.arange(len(end)), end].set(newest[:, 0])
        at = jnp.arange(size * self.window).reshape(size, self.window)
        cells = jnp.take_along_axis(seen.tokens, (at.reshape(-1) % jnp.maximum(seen.count, 1)[:, None]), axis=1)
        window = jnp.where(live[:, None, None], cells.reshape(state.window.shape), state.window)
        back = end[:, None] - size + jnp.arange(size)
        tail = jnp.where(live[:, None], jnp.take_along_axis(text, back, axis=1), state.tail)
        pool = state.pool
        if self.from_prompt:
            start = jnp.arange(seen.tokens.shape[1] + 1)  # of the n-gram, in `text`
            cut = start[:, None] + jnp.arange(self.ngram)
            grams = text[:, cut]
            whole = (grams >= 0).all(axis=2) & (start + self.ngram - 1 <= end[:, None]) & live[:, None]
            pool = add_grams(pool, grams[:, :, 0], grams[:, :, 1:], whole)
        read = jnp.where(live, seen.start + seen.count, state.read)
        return LookaheadState(pool, window, jnp.where(live, 0, state.age), tail, read)

    def _learn(self, state, seen):
        """Completes the n-grams of the window with its newest predictions, and moves it behind the accepted run."""
        batch, size, width = state.window.shape
        live = seen.count > 0
        rows = np.arange(width) + 1 + self.verified + (size - 1) * width - 1  # the window's last row, in the flight
        columns = jnp.broadcast_to(jnp.asarray(rows), (batch, width))
        wanted = jnp.broadcast_to(live[:, None], columns.shape)
        newest = likeliest_tokens(seen.logits, columns, wanted, 1, self.vocab_size)[:, :, 0]
        whole = jnp.concatenate([state.window, newest[:, None]], axis=1)  # [batch, N, W]
        ready = wanted & (state.age >= size - 1)[:, None] & (newest >= 0)
        pool = add_grams(state.pool, whole[:, 0], jnp.moveaxis(whole[:, 1:], 1, 2), ready)
        # The new current token stands seen.count places further; columns that are lost are filled with the last one.
        from_column = jnp.minimum(jnp.arange(width) + seen.count[:, None] - 1, width - 1)
        moved = jnp.take_along_axis(whole[:, 1:], jnp.maximum(from_column, 0)[:, None], axis=2)
        window = jnp.where(live[:, None, None], jnp.maximum(moved, 0), state.window)
        return state.replace(pool=pool, window=window, age=state.age + live)

    def propose(self, params, state, view):
        batch, size, width = state.window.shape
        window = state.window.at[:, 0, 0].set(view.last)
        tokens, parents, count = merged(look_up(state.pool, view.last))
        # Node of entry (l, j): behind the verified ones, without (0, 0), which is the last token.
        node = self.verified + np.arange(size * width).reshape(size, width) - 1
        before = np.concatenate([np.append(-1, node[0])[None, :-1], node[:-1]])
        before[0, 1:] = node[0, :-1]
        before[before == self.verified - 1] = -1
        cells = window.reshape(batch, -1)[:, 1:]
        nodes = jnp.broadcast_to(jnp.asarray(before.reshape(-1)[1:], jnp.int32), cells.shape)
        auxiliary = jnp.arange(self.num_nodes) >= self.verified
        draft = Draft(
            jnp.concatenate([tokens, cells], axis=1),
            count,
            parents=jnp.concatenate([parents, nodes], axis=1),
            auxiliary=auxiliary,
        )
        return draft, state.replace(window=window)
