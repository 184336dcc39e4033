"""Which tokens a tree drafter puts behind a row in flight, always from the law that the target's options leave of it.

The likeliest ones, or siblings that are drawn: without replacement (Gumbel-top-k, https://arxiv.org/abs/1903.06059, as
Sequoia does, https://arxiv.org/abs/2402.12374) or independently of each other (SpecInfer,
https://arxiv.org/abs/2305.09781).
"""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from spec_jax import sampling as sampling_lib
from spec_jax.drafting.base import View
from spec_jax.processors import read_flight
from spec_jax.rows import cond, over_rows
from spec_jax.sampling import NO_TOKEN


@dataclasses.dataclass(frozen=True)
class Choice:
    """How the children of a row are chosen.

    Attributes:
      count: children per row.
      vocab_size: ids at and beyond it are never chosen.
      draw: draw them from the row's law, and return it.
      replacement: whether drawn siblings are independent of each other, so that they may be equal.
      grade: whether the log-probabilities of likeliest children are wanted.
    """

    count: int
    vocab_size: int
    draw: bool = False
    replacement: bool = False
    grade: bool = False


@flax.struct.dataclass
class Children:
    """The children chosen for some rows in flight.

    Attributes:
      tokens: int32 [batch, rows, count] in draw order, NO_TOKEN where the law has no further token.
      log_probs: float32 [batch, rows, count] by the scores they are the best of, -inf where there is no token.
      law: float32 [batch, rows, vocab], what they were drawn from.
    """

    tokens: jax.Array
    log_probs: jax.Array | None
    law: jax.Array | None


def best_tokens(scores: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The ids int32 [count] of the largest of `scores` [vocab], best first, and their scores.

    NO_TOKEN for every one whose score is -inf, or that the vocabulary has not.
    """
    missing = max(count - scores.shape[0], 0)
    values, ids = lax.top_k(jnp.pad(scores, (0, missing), constant_values=-jnp.inf), count)
    return jnp.where(values == -jnp.inf, NO_TOKEN, ids).astype(jnp.int32), values


def choose_children(
    choice: Choice,
    logits: jax.Array,
    view: View,
    tokens: jax.Array,
    mask: jax.Array,
    row_parents: jax.Array,
    rows: jax.Array,
    wanted: jax.Array,
    level: jax.Array,
) -> Children:
    """The children of some rows of one level, each by the law behind its own path.

    At temperature 0, and where nothing is drawn, they are the likeliest tokens. Under `coupled` they are the best ones
    under the target's own noise, which all rows of a level share, as they share a position. Drawn, they are the winners
    of one race in the order in which they arrive, or of `count` races. Keys of drawn children are the round's with the
    row folded in, so that neither two rows nor two races share any noise.

    Args:
      logits: float32 [batch, rows in flight, vocab]; logits of further rows may stand in front of these.
      tokens: int32 [batch, rows in flight], row 0 the last committed token.
      mask: bool [batch or 1, rows in flight, rows in flight], which rows each row sees.
      row_parents: int32 [batch, rows in flight - 1], the row that row i + 1 is a child of.
      rows: int32 [n], the rows whose children are chosen.
      wanted: bool [batch, n], where they are wanted; elsewhere they are NO_TOKEN and cost nothing on a CPU.
      level: depth of these rows, 0 for row 0.
    """
    batch, n = wanted.shape
    vocab, s, coupled = logits.shape[-1], view.sampling, view.rule == "coupled"
    in_front = logits.shape[1] - tokens.shape[1]
    position = view.length + level
    history = read_flight(s.processors, view.committed, tokens, mask, row_parents, view.grammar_states, view.first)

    def likeliest(scores, *_):
        tokens, best = best_tokens(scores, choice.count)
        total = jnp.where(best[0] == -jnp.inf, 0.0, jax.nn.logsumexp(scores)) if choice.grade else None
        return Children(tokens, best - total if choice.grade else None, jnp.zeros(vocab) if choice.draw else None)

    def noisy(logits, row, in_flight):
        scores = sampling_lib.processed(logits, s, row)
        if not choice.draw:
            noise = sampling_lib.gumbel(s.key[row], position[row], sampling_lib.TARGET, vocab) if coupled else 0.0
            return likeliest(scores + noise)
        law = sampling_lib.softmax(scores)
        key = sampling_lib.noise_key(s.key[row], in_flight, sampling_lib.DRAFT)
        if not choice.replacement:
            tokens, _ = best_tokens(scores + jax.random.gumbel(key, (vocab,), jnp.float32), choice.count)
            return Children(tokens, None, law)

        def race(child):
            noise = jax.random.gumbel(jax.random.fold_in(key, child), (vocab,), jnp.float32)
            return sampling_lib.best_token(scores + noise)[0]

        return Children(lax.map(race, jnp.arange(choice.count)), None, law)

    def choose(row, column, logits):
        in_flight = column - in_front
        logits = sampling_lib.adjusted(logits, s, history, row, in_flight, position[row], choice.vocab_size)
        return cond(s.temperature[row] > 0, noisy, likeliest, logits, row, in_flight)

    nothing = Children(
        jnp.full(choice.count, NO_TOKEN, jnp.int32),
        jnp.full(choice.count, -jnp.inf) if choice.grade else None,
        jnp.zeros(vocab) if choice.draw else None,
    )
    index, columns = jnp.repeat(jnp.arange(batch), n), in_front + jnp.tile(rows, batch)
    found = over_rows(choose, logits, index, columns, wanted=wanted.reshape(-1), nothing=nothing)
    return jax.tree.map(lambda x: x.reshape(batch, n, *x.shape[1:]), found)
