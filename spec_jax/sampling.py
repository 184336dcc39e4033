"""From logits to a token: processors, noise keys and Gumbel-max sampling, one row of the vocabulary at a time.

Noise is keyed by (seed, absolute position, purpose) and never by step or batch slot, so a row's text depends only on
its own prompt and parameters. On a CPU rows run one after another at one fixed shape, so that their bits cannot depend
on how many there are; elsewhere they run side by side.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from spec_jax import processors as processors_lib
from spec_jax.processors import History, Processors

ACCEPT, TARGET, DRAFT, ROUND = 0, 1, 2, 3
"""Purposes of noise: acceptance uniforms; the target's own Gumbel noise (plain, bonus, residual); the drafter's."""
UNSEEN = -2
"""In place of a token that was not chosen because its row is of no use; equal to no draft token."""
NO_TOKEN = -1
"""In place of a token where the options leave none to choose; equal to no draft token."""
BLOCK = 256
"""Ids among which `best_token` looks for the best one first."""
HEAD = 128
"""Best scores among which filters look for their cuts first."""


@flax.struct.dataclass
class SamplingState:
    """`SamplingParams` of every row as arrays, so that other values never recompile.

    Attributes:
      temperature, top_p, min_p: float32 [batch]; temperature 0 is greedy.
      top_k: int32 [batch], 0 for all.
      key: typed PRNG keys [batch], from the rows' seeds.
      stop_ids: int32 [batch, stops], padded with -1.
      processors: the options that depend on the text, None where no row uses any.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    key: jax.Array
    stop_ids: jax.Array
    processors: Processors | None = None


def over_rows(function: Callable, logits: jax.Array, rows, columns, *arrays, wanted=None, nothing=None, reached=None):
    """`function(row, column, logits[row, column], *arrays)` of every entry: on a CPU in sequence, elsewhere side by
    side, as many at a time as there are sequences.

    Args:
      function: of scalars, one row of logits [vocab] and one entry of each of `arrays`. It branches with `cond`.
      logits: [batch, width, vocab].
      rows, columns: int32 [n].
      arrays: [n, ...] each.
      wanted: bool [n], entries to compute; None: all. The others cost nothing on a CPU.
      nothing: what the others get, like one result.
      reached: (results so far [n, ...], index) -> bool, whether the entries before an entry leave it of use. A CPU
        leaves it out where they do not; elsewhere it is computed, and must do no harm.

    Returns:
      The results, [n, ...] each.
    """

    def in_sequence(wanted, rows, columns, *more):
        def one(index, *before):
            # The row is taken inside: what is not wanted must not even be copied.
            def compute():
                row, column = rows[index], columns[index]
                return function(row, column, logits[row, column], *(x[index] for x in more))

            use = True if wanted is None else wanted[index]
            use = use & reached(*before, index) if before else use
            return compute() if use is True else lax.cond(use, compute, lambda: nothing)

        indices = jnp.arange(rows.shape[0])
        if reached is None:
            return lax.map(one, indices)

        def step(index, results):
            return jax.tree.map(lambda whole, new: whole.at[index].set(new), results, one(index, results))

        blank = jax.tree.map(lambda x: jnp.broadcast_to(x, (rows.shape[0], *jnp.shape(x))), nothing)
        return lax.fori_loop(0, rows.shape[0], step, blank)

    def side_by_side(wanted, rows, columns, *more):
        def one(entry):
            row, column, *more = entry
            return function(row, column, logits[row, column], *more)

        # As many at a time as there are sequences: whole laws of all rows would be the logits several times over.
        found = lax.map(one, (rows, columns, *more), batch_size=logits.shape[0])
        return found if wanted is None else jax.tree.map(functools.partial(select_rows, wanted), found, nothing)

    return lax.platform_dependent(wanted, rows, columns, *arrays, cpu=in_sequence, default=side_by_side)


def select_rows(chosen: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    """x [n, ...] where `chosen` [n], else y [n, ...] or [...]."""
    return jnp.where(chosen.reshape(-1, *[1] * (x.ndim - 1)), x, y)


def cond(predicate: jax.Array, on_true: Callable, on_false: Callable, *operands):
    """`lax.cond` of one row that side by side, under `jax.vmap`, still leaves out `on_true` where no row asks for it.

    `lax.cond` would then compute both for every row, and the filters of a sampled row read the logits 64 times.

    Args:
      predicate: bool scalar.
      on_true, on_false: functions of `operands`, and of nothing else that is traced for a row.
    """

    @jax.custom_batching.custom_vmap
    def choose(predicate, operands):
        return lax.cond(predicate, on_true, on_false, *operands)

    @choose.def_vmap
    def _(size, batched, predicate, operands):
        axes = jax.tree.map(lambda b: 0 if b else None, batched[1])
        predicate = jnp.broadcast_to(predicate, (size,))

        def each(function):
            return jax.vmap(lambda _, operands: function(*operands), (0, axes))(jnp.arange(size), operands)

        def mixed():
            some, others = each(on_true), each(on_false)
            return jax.tree.map(functools.partial(select_rows, predicate), some, others)

        out = lax.cond(predicate.any(), mixed, lambda: each(on_false))
        return out, jax.tree.map(lambda _: True, out)

    return choose(predicate, operands)


def noise_key(key: jax.Array, position: jax.Array, purpose: int) -> jax.Array:
    """The key of one row's noise at an absolute position for one purpose."""
    return jax.random.fold_in(jax.random.fold_in(key, position), purpose)


def _ordered(x: jax.Array) -> jax.Array:
    """float32 to uint32 so that integer order is float order; bisecting on it is exact."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(0x80000000))


def _largest_threshold(enough: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """The largest uint32 t for which `enough(t)` holds, given that it holds at 0 and is monotone."""

    def step(index, low):
        candidate = low | (jnp.uint32(1) << (31 - index).astype(jnp.uint32))
        return jnp.where(enough(candidate), candidate, low)

    return lax.fori_loop(0, 32, step, jnp.uint32(0))


def _float_of(order: jax.Array) -> jax.Array:
    """The inverse of `_ordered`."""
    bits = jnp.where(order >> 31 == 1, order & jnp.uint32(0x7FFFFFFF), ~order)
    return lax.bitcast_convert_type(bits, jnp.float32)


def cutoff(scores: jax.Array, peak: jax.Array, temperature, top_k, top_p, min_p) -> jax.Array:
    """The least score [vocab] that min_p, top_k and top_p leave; `peak` is the best.

    A score as it is, not over the temperature: who compares with it later must meet the very same number, and a
    division may be compiled as one here and as a product there. Cuts are looked for among the HEAD best scores, and by
    bisection over all where these do not reach as far. Ties at a cut are all kept, so that no order of equal scores can
    leak in.
    """

    def mass(scores, low, peak, temperature):
        return jnp.where(scores >= low, jnp.exp((scores - peak) / temperature), 0.0)

    def kth(scores, low, top_k, _):
        order = _ordered(jnp.where(scores >= low, scores, -jnp.inf))
        k = jnp.clip(top_k, 1, scores.shape[0])
        return _float_of(_largest_threshold(lambda t: (order >= t).sum(dtype=jnp.int32) >= k))

    def nucleus(scores, low, goal, peak, temperature, _):
        order, masses = _ordered(jnp.where(scores >= low, scores, -jnp.inf)), mass(scores, low, peak, temperature)
        return _float_of(_largest_threshold(lambda t: jnp.where(order >= t, masses, 0.0).sum() >= goal))

    low = lowest(peak, temperature, min_p)
    head = lax.top_k(scores, min(HEAD, scores.shape[0]))[0]
    found = head[jnp.clip(top_k, 1, head.shape[0]) - 1]
    found = cond(top_k > head.shape[0], kth, lambda *x: x[-1], scores, low, top_k, found)
    low = jnp.where(top_k > 0, jnp.maximum(low, found), low)  # min_p may have left fewer than k

    goal = top_p * mass(scores, low, peak, temperature).sum()
    sums = jnp.cumsum(mass(head, low, peak, temperature))
    found, beyond = head[jnp.argmax(sums >= goal)], (top_p < 1.0) & ~(sums[-1] >= goal)
    found = cond(beyond, nucleus, lambda *x: x[-1], scores, low, goal, peak, temperature, found)
    return jnp.where(top_p < 1.0, jnp.maximum(low, found), low)


def lowest(peak: jax.Array, temperature, min_p) -> jax.Array:
    """The least score that min_p leaves. At most the peak, whatever rounding says; log(0) = -inf keeps all."""
    return jnp.minimum(peak, peak + temperature * jnp.log(min_p))


def process(logits: jax.Array, temperature, top_k, top_p, min_p) -> jax.Array:
    """The processed logits [vocab] of one row: divided by the temperature, -inf where a filter cut a token.

    The same function standardises target and drafter, as exactness requires.

    Args:
      logits: float32 [vocab] of one row, -inf at ids that must not be chosen.
      temperature: > 0 (a greedy row's result is not used).
    """
    temperature, peak = jnp.where(temperature > 0, temperature, 1.0), logits.max()
    filtered, arguments = (top_k > 0) | (top_p < 1.0), (temperature, top_k, top_p, min_p)
    low = cond(filtered, cutoff, lambda _, peak, t, *x: lowest(peak, t, x[-1]), logits, peak, *arguments)
    return jnp.where(logits >= low, logits / temperature, -jnp.inf)


def processed(logits: jax.Array, sampling: SamplingState, row: jax.Array) -> jax.Array:
    """`process` with the parameters of one row of the batch."""
    s = sampling
    return process(logits, s.temperature[row], s.top_k[row], s.top_p[row], s.min_p[row])


def mask_padding(logits: jax.Array, vocab_size: int) -> jax.Array:
    """-inf at the ids beyond the vocabulary, which only pad the embedding. logits [..., vocab]."""
    if logits.shape[-1] <= vocab_size:
        return logits
    return jnp.where(jnp.arange(logits.shape[-1]) < vocab_size, logits, -jnp.inf)


def gumbel(key: jax.Array, position: jax.Array, purpose: int, size: int) -> jax.Array:
    """Standard Gumbel noise float32 [size] of one row at one position."""
    return jax.random.gumbel(noise_key(key, position, purpose), (size,), jnp.float32)


def best_token(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The id of the largest score (ties: the lowest id) and its lead over the runner-up. scores [vocab].

    NO_TOKEN where every score is -inf.
    """
    # One pass finds the best of every block, and the rest is looked up there: an argmax over a vocabulary takes XLA's
    # CPU code four times as long as a maximum.
    blocks = jnp.pad(scores, (0, -scores.shape[0] % BLOCK), constant_values=-jnp.inf).reshape(-1, BLOCK)
    tops = blocks.max(axis=1)
    at = jnp.argmax(tops)
    block = blocks[at]
    best = jnp.argmax(block)
    peak = block[best]
    rest = jnp.maximum(_without(tops, at).max(), _without(block, best).max())
    lead = jnp.where(rest == -jnp.inf, jnp.inf, peak - rest)
    return jnp.where(peak == -jnp.inf, NO_TOKEN, at * BLOCK + best).astype(jnp.int32), lead


def _without(scores: jax.Array, index: jax.Array) -> jax.Array:
    return jnp.where(jnp.arange(scores.shape[0]) == index, -jnp.inf, scores)


def draw(weights: jax.Array, key: jax.Array, position: jax.Array, purpose: int) -> jax.Array:
    """One token of the law that the weights [vocab] are proportional to; NO_TOKEN where all are zero.

    First a block of ids and then one of its ids, so that a draw takes little noise: making noise for every id costs a
    CPU more than the rest of a rule. Nobody shares the noise, so how it enters matters to the law alone.
    """
    size = min(BLOCK, weights.shape[0])
    blocks = jnp.pad(weights, (0, -weights.shape[0] % size)).reshape(-1, size)
    totals = blocks.sum(axis=1)
    noise = gumbel(key, position, purpose, totals.shape[0] + size)
    block = jnp.argmax(jnp.log(totals) + noise[size:])
    token = block * size + jnp.argmax(jnp.log(blocks[block]) + noise[:size])
    return jnp.where(totals[block] > 0, token, NO_TOKEN).astype(jnp.int32)


def is_broken(logits: jax.Array, vocab_size: int) -> jax.Array:
    """Whether a row of raw logits [vocab] holds NaN or +inf, from which no token can be chosen."""
    return ~(mask_padding(logits, vocab_size) < jnp.inf).all()


def flag_broken(broken: jax.Array, token: jax.Array, gap: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A choice as it is, or token 0 with a gap of NaN: a token that is emitted, so that its trace tells."""
    return jnp.where(broken, 0, token), jnp.where(broken, jnp.nan, gap)


def adjusted(logits, sampling: SamplingState, history: History | None, row, column, position, vocab_size) -> jax.Array:
    """The logits [vocab] of one row in flight after every option that holds at temperature 0 too."""
    logits = mask_padding(logits.astype(jnp.float32), vocab_size)
    return processors_lib.adjust(logits, sampling.processors, history, sampling.stop_ids, row, column, position)


def choose_tokens(
    logits: jax.Array,
    positions: jax.Array,
    sampling: SamplingState,
    vocab_size: int,
    purpose: int | None = TARGET,
    history: History | None = None,
    wanted: jax.Array | None = None,
    reached: Callable[[Any, jax.Array], jax.Array] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The token each row chooses: the argmax where the temperature is 0, else Gumbel-max over the processed logits.

    Args:
      logits: float32 [batch, width, vocab].
      positions: int32 [batch, width], absolute positions of the tokens to choose; they key the noise.
      purpose: of the noise; None chooses the argmax in every row.
      history: what precedes the tokens, where `sampling.processors` asks for it.
      wanted: bool [batch, width], rows that choose; None: all. The others cost nothing on a CPU, and get UNSEEN.
      reached: see `over_rows`, of the rows one after another; rows that are not reached get UNSEEN too.

    Returns:
      tokens int32 [batch, width], NO_TOKEN where the options leave none, and gaps float32 [batch, width], the lead of
      the choice over the runner-up in units of the logits, NaN where the logits are.
    """
    batch, width, vocab = logits.shape
    s = sampling

    def choose(row, column, logits, position):
        broken = is_broken(logits, vocab_size)
        logits = adjusted(logits, s, history, row, column, position, vocab_size)
        if purpose is None:
            return flag_broken(broken, *best_token(logits))

        def sample(logits, row, position):
            scores = processed(logits, s, row)
            token, gap = best_token(scores + gumbel(s.key[row], position, purpose, vocab))
            return token, gap * s.temperature[row]

        sampled = s.temperature[row] > 0
        return flag_broken(broken, *cond(sampled, sample, lambda x, *_: best_token(x), logits, row, position))

    rows, columns = (x.reshape(-1) for x in jnp.indices((batch, width)))
    wanted = None if wanted is None else wanted.reshape(-1)
    nothing = jnp.int32(UNSEEN), jnp.float32(jnp.inf)
    tokens, gaps = over_rows(
        choose, logits, rows, columns, positions.reshape(-1), wanted=wanted, nothing=nothing, reached=reached
    )
    return tokens.reshape(batch, width), gaps.reshape(batch, width)


def softmax(scores: jax.Array) -> jax.Array:
    """The probabilities float32 [vocab] of processed logits; zeros where the options leave no token."""
    return jnp.where(scores.max() == -jnp.inf, 0.0, jax.nn.softmax(scores))


def of_round(sampling: SamplingState, length: jax.Array) -> SamplingState:
    """The rows' parameters with keys that belong to the round that begins behind `length` committed tokens.

    For rules that look beyond the first rejection: a position that such a round has looked at and not committed would
    meet the same noise again in the next, which is no longer independent of what was kept.
    """
    fold = jax.vmap(lambda key, at: jax.random.fold_in(jax.random.fold_in(key, ROUND), at))
    return sampling.replace(key=fold(sampling.key, length))


def probabilities(
    logits: jax.Array, positions: jax.Array, sampling: SamplingState, vocab_size: int, history: History | None = None
) -> jax.Array:
    """Processed probabilities float32 [batch, vocab] of logits [batch, vocab]: what `choose_tokens` draws from.

    One-hot where the temperature is 0; zeros where the options leave no token.

    Args:
      positions: int32 [batch], absolute positions of the tokens to choose.
    """

    def soft(logits, row):
        return softmax(processed(logits, sampling, row))

    def hard(logits, _):
        return jax.nn.one_hot(best_token(logits)[0], logits.shape[0], dtype=jnp.float32)

    def one(row, column, logits, position):
        logits = adjusted(logits, sampling, history, row, column, position, vocab_size)
        return cond(sampling.temperature[row] > 0, soft, hard, logits, row)

    rows = jnp.arange(logits.shape[0])
    return over_rows(one, logits[:, None], rows, jnp.zeros_like(rows), positions)
