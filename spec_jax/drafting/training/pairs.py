"""Which of a drafter's rows are held to which of the target's laws, and how long its chains are accepted.

Everywhere below, place a of slot s is the row that was made from the target's features up to a and the token at a + 1,
and guesses the token at a + 2 + s.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.drafting.training.forward import Texts
from spec_jax.drafting.training.losses import Pairs


def learned(texts: Texts) -> jax.Array:
    """bool [batch, length]: whether the token behind this place is to be learned, so that this place's law counts."""
    follows = texts.segments[:, :-1] == texts.segments[:, 1:]
    return jnp.pad(texts.loss[:, 1:] & follows & (texts.segments[:, 1:] > 0), ((0, 0), (0, 1)))


def aligned_pairs(texts: Texts, offsets: Sequence[int], weights: Sequence[float]) -> Pairs:
    """Pairs of rows [slots, batch, length], where row (s, place) is held to the law at place + offsets[s]."""
    batch, length = texts.tokens.shape
    places = jnp.arange(batch * length).reshape(batch, length)
    counts, slots = learned(texts), []
    for slot, offset in enumerate(offsets):
        at = jnp.arange(length) >= offset
        same = at & (jnp.roll(texts.segments, offset, axis=1) == texts.segments)
        slots.append(jnp.where(counts & same, places - offset + slot * batch * length, -1).reshape(-1))
    rows = jnp.stack(slots, axis=1)
    weight = jnp.where(rows >= 0, jnp.asarray(weights, jnp.float32), 0)
    return in_front(places.reshape(-1), texts, rows, weight)


def in_front(law: jax.Array, texts: Texts, rows: jax.Array, weight: jax.Array) -> Pairs:
    """`Pairs` with the entries that have any row moved to the front."""
    used = (rows >= 0).any(axis=1)
    order = jnp.argsort(~used, stable=True)
    label = jnp.roll(texts.tokens, -1, axis=1).reshape(-1)[law]
    return Pairs(used.sum(dtype=jnp.int32), law[order], label[order], rows[order], weight[order])


def walk(right: np.ndarray, texts: Texts) -> tuple[int, int, np.ndarray]:
    """Greedy decoding of the texts' answers with chains whose tokens are right where `right` says so.

    The texts must be greedy answers for this to be what decoding would do.

    Args:
      right: bool [slots, batch, length], see the module's head.
      texts: arrays [batch, length].

    Returns:
      Tokens and steps of all answers, their first tokens aside, and int64 [slots]: steps that accepted more than s.
    """
    segments, loss = np.asarray(texts.segments), np.asarray(texts.loss)
    chained = np.cumprod(np.asarray(right), axis=0, dtype=np.int64)
    tokens, steps, accepted = 0, 0, np.zeros(len(right), np.int64)
    for row in range(len(segments)):
        for segment in range(1, segments[row].max() + 1):
            places = np.flatnonzero((segments[row] == segment) & loss[row])
            if len(places) < 2:
                continue
            known, last = places[0], places[-1]
            while known < last:
                took = chained[:, row, known - 1] if known else np.zeros(len(right), np.int64)
                took = took[: last - known]
                count = int(took.sum())
                accepted[:count] += 1
                steps += 1
                tokens += min(count + 1, last - known)
                known += count + 1
    return tokens, steps, accepted
