"""The filters of a law: the least score that min_p, top_k and top_p leave of one row of the vocabulary."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from spec_jax.kernels import cpu
from spec_jax.rows import cond

HEAD = 128
"""Best scores among which filters look for their cuts first."""


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


def any_filter(temperature, top_k, top_p, min_p) -> jax.Array:
    """Whether a row is sampled, and from less than the whole vocabulary."""
    return (temperature > 0) & ((top_k > 0) | (top_p < 1.0) | (min_p > 0))


def least_kept(scores: jax.Array, temperature, top_k, top_p, min_p, kernels: bool = False) -> jax.Array:
    """The least of the scores [vocab] that the filters leave, -inf where there is none; `kernels`: by `cpu.cuts`."""
    filters = temperature, top_k, top_p, min_p
    if kernels:
        index = jnp.where(any_filter(*filters), 0, -1)[None]
        return cpu.cuts(scores[None], index, *(x[None] for x in filters), scores.shape[0])[0]

    def found(scores, *filters):
        return cutoff(scores, scores.max(), *filters)

    def by_peak(scores, temperature, top_k, top_p, min_p):
        return lowest(scores.max(), temperature, min_p)

    return cond((temperature > 0) & ((top_k > 0) | (top_p < 1.0)), found, by_peak, scores, *filters)


def process(logits: jax.Array, temperature, top_k, top_p, min_p, kernels: bool = False) -> jax.Array:
    """The processed logits [vocab] of one row: less the best one, divided by the temperature; -inf where a filter cut.

    The same function standardises target and drafter, as exactness requires. At a low temperature logits / temperature
    would have no digits left for the noise.

    Args:
      logits: float32 [vocab] of one row, -inf at ids that must not be chosen.
      temperature: > 0 (a greedy row's result is not used).
    """
    temperature = jnp.where(temperature > 0, temperature, 1.0)
    low = least_kept(logits, temperature, top_k, top_p, min_p, kernels)
    peak = logits.max()
    peak = jnp.where(peak == -jnp.inf, 0.0, peak)
    return jnp.where(logits >= low, (logits - peak) / temperature, -jnp.inf)
