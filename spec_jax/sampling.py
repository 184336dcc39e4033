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

ACCEPT, TARGET, DRAFT = 0, 1, 2
"""Purposes of noise: acceptance uniforms; the target's own Gumbel noise (plain, bonus, residual); the drafter's."""


@flax.struct.dataclass
class SamplingState:
    """`SamplingParams` of every row as arrays, so that other values never recompile.

    Attributes:
      temperature, top_p, min_p: float32 [batch]; temperature 0 is greedy.
      top_k: int32 [batch], 0 for all.
      key: typed PRNG keys [batch], from the rows' seeds.
      stop_ids: int32 [batch, stops], padded with -1.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    key: jax.Array
    stop_ids: jax.Array


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


def process(logits: jax.Array, temperature, top_k, top_p, min_p, vocab_size: int) -> jax.Array:
    """The processed logits [vocab] of one row: divided by the temperature, -inf where a filter cut a token.

    Thresholds are found by bisection, not by sorting: ties at a cut are all kept, and no order of equal elements or of
    a cumulative sum can leak in. The same function standardises target and drafter, as exactness requires.

    Args:
      logits: float32 [vocab] of one row.
      temperature: > 0 (a greedy row's result is not used).
      vocab_size: ids at and beyond it are padding of the embedding and never sampled.
    """
    logits = logits.astype(jnp.float32)
    logits = mask_padding(logits, vocab_size)
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


def mask_padding(logits: jax.Array, vocab_size: int) -> jax.Array:
    """-inf at the ids beyond the vocabulary, which only pad the embedding. logits [..., vocab]."""
    if logits.shape[-1] <= vocab_size:
        return logits
    return jnp.where(jnp.arange(logits.shape[-1]) < vocab_size, logits, -jnp.inf)


def gumbel(key: jax.Array, position: jax.Array, purpose: int, size: int) -> jax.Array:
    """Standard Gumbel noise float32 [size] of one row at one position."""
    return jax.random.gumbel(noise_key(key, position, purpose), (size,), jnp.float32)


def top_two_gap(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The index of the largest score (ties: the lowest index) and its lead over the runner-up. scores [vocab]."""
    best = jnp.argmax(scores).astype(jnp.int32)
    rest = jnp.where(jnp.arange(scores.shape[0]) == best, -jnp.inf, scores)
    return best, jnp.where(jnp.isnan(scores).any(), jnp.nan, scores[best] - rest.max())


def choose_tokens(
    logits: jax.Array, positions: jax.Array, sampling: SamplingState, vocab_size: int, purpose: int = TARGET
) -> tuple[jax.Array, jax.Array]:
    """The token each row chooses: the argmax where the temperature is 0, else Gumbel-max over the processed logits.

    Args:
      logits: float32 [batch, width, vocab].
      positions: int32 [batch, width], absolute positions of the tokens to choose; they key the noise.

    Returns:
      tokens int32 [batch, width] and gaps float32 [batch, width], the lead of the choice over the runner-up in units of
      the logits, NaN where the logits are.
    """
    batch, width, vocab = logits.shape
    s = sampling

    def one(row, logits, position):
        def sample():
            scores = process(logits, s.temperature[row], s.top_k[row], s.top_p[row], s.min_p[row], vocab_size)
            token, gap = top_two_gap(scores + gumbel(s.key[row], position, purpose, vocab))
            return token, gap * s.temperature[row]

        return lax.cond(s.temperature[row] > 0, sample, lambda: top_two_gap(mask_padding(logits, vocab_size)))

    rows = jnp.repeat(jnp.arange(batch), width)
    tokens, gaps = over_rows(one, rows, logits.reshape(-1, vocab), positions.reshape(-1))
    return tokens.reshape(batch, width), gaps.reshape(batch, width)


def probabilities(logits: jax.Array, sampling: SamplingState, vocab_size: int) -> jax.Array:
    """Processed probabilities float32 [batch, vocab] of logits [batch, vocab]; one-hot where the temperature is 0."""
    s = sampling

    def one(logits, temperature, top_k, top_p, min_p):
        def soft():
            return jax.nn.softmax(process(logits, temperature, top_k, top_p, min_p, vocab_size))

        def hard():
            return jax.nn.one_hot(jnp.argmax(mask_padding(logits, vocab_size)), logits.shape[0], dtype=jnp.float32)

        return lax.cond(temperature > 0, soft, hard)

    return over_rows(one, logits, s.temperature, s.top_k, s.top_p, s.min_p)
