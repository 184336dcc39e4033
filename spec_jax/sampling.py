"""From logits to a token: processors, noise keys and Gumbel-max sampling, one row of the vocabulary at a time.

Noise is keyed by (seed, absolute position, purpose) and never by step or batch slot, so a row's text depends only on
its own prompt and parameters. On a CPU rows run one after another at one fixed shape, so that their bits cannot depend
on how many there are; elsewhere they run side by side.
"""

from __future__ import annotations

from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from spec_jax import processors as processors_lib
from spec_jax.processors import History, Processors

ACCEPT, TARGET, DRAFT = 0, 1, 2
"""Purposes of noise: acceptance uniforms; the target's own Gumbel noise (plain, bonus, residual); the drafter's."""
NO_TOKEN = -1
"""In place of a token where the options leave none to choose; equal to no draft token."""
BLOCK = 256
"""Ids among which `best_token` looks for the best one first."""


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


def over_rows(function: Callable, *arrays: jax.Array):
    """Maps `function` over the leading axis: in sequence on a CPU, side by side elsewhere."""
    return lax.platform_dependent(
        *arrays,
        cpu=lambda *xs: lax.map(lambda x: function(*x), xs),
        default=lambda *xs: jax.vmap(function)(*xs),
    )


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


def process(logits: jax.Array, temperature, top_k, top_p, min_p) -> jax.Array:
    """The processed logits [vocab] of one row: divided by the temperature, -inf where a filter cut a token.

    Thresholds are found by bisection, not by sorting: ties at a cut are all kept, and no order of equal elements or of
    a cumulative sum can leak in. The same function standardises target and drafter, as exactness requires.

    Args:
      logits: float32 [vocab] of one row, -inf at ids that must not be chosen.
      temperature: > 0 (a greedy row's result is not used).
    """
    scaled = logits / jnp.where(temperature > 0, temperature, 1.0)
    peak = scaled.max()
    scaled = jnp.where(scaled >= peak + jnp.log(min_p), scaled, -jnp.inf)  # log(0) = -inf keeps all

    def keep_top_k(x):
        order = _ordered(x)
        k = jnp.clip(top_k, 1, x.shape[0])
        threshold = _largest_threshold(lambda t: (order >= t).sum(dtype=jnp.int32) >= k)
        return jnp.where(order >= threshold, x, -jnp.inf)

    def keep_top_p(x):
        order, mass = _ordered(x), jnp.exp(x - peak)
        goal = top_p * mass.sum()
        threshold = _largest_threshold(lambda t: jnp.where(order >= t, mass, 0.0).sum() >= goal)
        threshold = jnp.minimum(threshold, order.max())  # a goal that underflows to 0 would cut everything
        return jnp.where(order >= threshold, x, -jnp.inf)

    scaled = lax.cond(top_k > 0, keep_top_k, lambda x: x, scaled)
    return lax.cond(top_p < 1.0, keep_top_p, lambda x: x, scaled)


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
) -> tuple[jax.Array, jax.Array]:
    """The token each row chooses: the argmax where the temperature is 0, else Gumbel-max over the processed logits.

    Args:
      logits: float32 [batch, width, vocab].
      positions: int32 [batch, width], absolute positions of the tokens to choose; they key the noise.
      purpose: of the noise; None chooses the argmax in every row.
      history: what precedes the tokens, where `sampling.processors` asks for it.
      wanted: bool [batch, width], rows that choose; None: all. The others cost nothing on a CPU, and get token 0.

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

        def sample():
            scores = processed(logits, s, row)
            token, gap = best_token(scores + gumbel(s.key[row], position, purpose, vocab))
            return token, gap * s.temperature[row]

        return flag_broken(broken, *lax.cond(s.temperature[row] > 0, sample, lambda: best_token(logits)))

    def one(want, row, column, position):
        # The row is taken inside: what is not wanted must not even be copied.
        return lax.cond(
            want,
            lambda: choose(row, column, logits[row, column], position),
            lambda: (jnp.int32(0), jnp.float32(jnp.inf)),
        )

    rows, columns = (x.reshape(-1) for x in jnp.indices((batch, width)))
    wanted = jnp.ones((batch, width), bool) if wanted is None else wanted
    tokens, gaps = over_rows(one, wanted.reshape(-1), rows, columns, positions.reshape(-1))
    return tokens.reshape(batch, width), gaps.reshape(batch, width)


def probabilities(
    logits: jax.Array, positions: jax.Array, sampling: SamplingState, vocab_size: int, history: History | None = None
) -> jax.Array:
    """Processed probabilities float32 [batch, vocab] of logits [batch, vocab]: what `choose_tokens` draws from.

    One-hot where the temperature is 0; zeros where the options leave no token.

    Args:
      positions: int32 [batch], absolute positions of the tokens to choose.
    """
    s = sampling

    def one(row, logits, position):
        logits = adjusted(logits, s, history, row, 0, position, vocab_size)

        def soft():
            scores = processed(logits, s, row)
            return jnp.where(scores.max() == -jnp.inf, 0.0, jax.nn.softmax(scores))

        def hard():
            return jax.nn.one_hot(best_token(logits)[0], logits.shape[0], dtype=jnp.float32)

        return lax.cond(s.temperature[row] > 0, soft, hard)

    return over_rows(one, jnp.arange(logits.shape[0]), logits, positions)
