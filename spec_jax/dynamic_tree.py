"""Dynamic draft trees: grown anew in every step, from the drafter's own probabilities. Pure, batched, of fixed shapes.

EAGLE-2 (https://arxiv.org/abs/2406.16858) and OPT-Tree (https://arxiv.org/abs/2406.17276) grow a pool of candidates
level by level, each level from the best of the one before, and keep the best of the pool. Drafters that predict all
positions at once (Medusa, https://arxiv.org/abs/2401.10774; DFlash, https://arxiv.org/abs/2602.06036) have the same
laws behind every node of a level, so that nothing has to be run in between.

    pool, layer = start_pool(tokens, log_probs, depth)
    for level in range(1, depth):  # or lax.fori_loop
        ...                        # the drafter's k best continuations of the places in `layer`
        pool, layer = grow_pool(pool, level, layer, tokens, log_probs)
    tokens, parents, count, places = select_tree(pool, nodes)

Log-probabilities are natural logarithms; -inf marks a token that may not be proposed, and no tree holds it. NaN counts
as -inf, and what rounding lifts above 0 as 0: a node is never likelier than its parent, which keeps trees connected.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spec_jax.checks import check_counts


@flax.struct.dataclass
class Pool:
    """Candidate nodes, k of the first level and k * k of each further one, in the order in which they were added.

    Attributes:
      tokens: int32 [batch, size], size = k + (depth - 1) * k * k.
      scores: float32 [batch, size], log-probability of the path that ends here; -inf where nothing was added yet.
      parents: int32 [batch, size], the parent's place in the pool, -1 for children of the last committed token.
    """

    tokens: jax.Array
    scores: jax.Array
    parents: jax.Array


def _log_probs(log_probs: jax.Array) -> jax.Array:
    """float32 in -inf..0, NaN as -inf; there is no -0.0, which `lax.top_k` ranks below 0.0."""
    x = log_probs.astype(jnp.float32)
    return jnp.where(jnp.isnan(x), -jnp.inf, jnp.where(x < 0, x, 0.0))


def _check_nodes(pool: Pool, nodes: int) -> None:
    check_counts(nodes=nodes)
    size = pool.scores.shape[1]
    if nodes > size:
        raise ValueError(f"nodes={nodes} must be at most {size}, the size of the pool: take fewer nodes or more levels")


def start_pool(tokens: jax.Array, log_probs: jax.Array, depth: int) -> tuple[Pool, jax.Array]:
    """A pool for `depth` levels that holds the first: the k likeliest tokens behind the last committed one.

    Args:
      tokens: int32 [batch, k], in draw order.
      log_probs: float [batch, k].
      depth: levels of the tree, this one included.

    Returns:
      The pool, and the layer to expand next: int32 [batch, k], places in the pool.

    Raises:
      ValueError: shapes that differ, or a depth that is no positive integer.
    """
    check_counts(depth=depth)
    if tokens.ndim != 2 or log_probs.shape != tokens.shape or not tokens.shape[1]:
        raise ValueError(f"tokens {tokens.shape} and log_probs {log_probs.shape} must both be [batch, k], k > 0")
    k = tokens.shape[1]
    rest = ((0, 0), (0, (depth - 1) * k * k))
    pool = Pool(
        tokens=jnp.pad(tokens.astype(jnp.int32), rest),
        scores=jnp.pad(_log_probs(log_probs), rest, constant_values=-jnp.inf),
        parents=jnp.full((tokens.shape[0], k + rest[1][1]), -1, jnp.int32),
    )
    return pool, jnp.broadcast_to(jnp.arange(k, dtype=jnp.int32), tokens.shape)


def grow_pool(
    pool: Pool, level: int | jax.Array, layer: jax.Array, tokens: jax.Array, log_probs: jax.Array
) -> tuple[Pool, jax.Array]:
    """Adds the children of a layer, all k * k of them, and chooses the k likeliest as the next layer.

    A row whose log_probs are all -inf does not grow.

    Args:
      pool: from `start_pool`, grown by the levels before this one.
      level: 1..depth - 1, may be traced. A traced level outside adds nothing.
      layer: int32 [batch, k], as the last call returned it.
      tokens: int32 [batch, k, k]; [:, i] are continuations of place layer[:, i], in draw order.
      log_probs: float [batch, k, k], of each token behind its parent.

    Returns:
      The pool, and the next layer: places in the pool by falling score, of equal ones the smaller place first.

    Raises:
      ValueError: shapes that do not fit, or a level outside that is not traced.
    """
    batch, k = layer.shape
    size = pool.scores.shape[1]
    if not tokens.shape == log_probs.shape == (batch, k, k) or pool.scores.shape[0] != batch or (size - k) % (k * k):
        raise ValueError(f"a layer {layer.shape} takes tokens and log_probs of {(batch, k, k)} and a pool of "
                         f"[{batch}, {k} + (depth - 1) * {k * k}]; they are {tokens.shape}, {log_probs.shape} and "
                         f"{pool.scores.shape}")  # fmt: skip
    depth = (size - k) // (k * k) + 1
    if not isinstance(level, jax.core.Tracer) and not 1 <= level < depth:
        raise ValueError(f"level={level} must lie in 1..{depth - 1}: the pool has {depth} levels, and `start_pool` "
                         f"fills level 0")  # fmt: skip
    above = jnp.take_along_axis(pool.scores, layer, axis=1, mode="fill", fill_value=-jnp.inf)
    scores = (above[:, :, None] + _log_probs(log_probs)).reshape(batch, k * k)
    # Places from `size` on do not exist: writes there are dropped, and reads are -inf.
    start = jnp.where((level >= 1) & (level < depth), k + (level - 1) * k * k, size).astype(jnp.int32)
    places = start + jnp.arange(k * k, dtype=jnp.int32)
    pool = Pool(
        tokens=pool.tokens.at[:, places].set(tokens.reshape(batch, k * k).astype(jnp.int32), mode="drop"),
        scores=pool.scores.at[:, places].set(scores, mode="drop"),
        parents=pool.parents.at[:, places].set(jnp.repeat(layer, k, axis=1), mode="drop"),
    )
    return pool, start + lax.top_k(scores, k)[1]


def select_tree(pool: Pool, nodes: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The tree of the pool's likeliest candidates, of equal ones those that were added first.

    It is connected: a parent is no less likely than its child and was added before it.

    Args:
      nodes: of the tree, at most the size of the pool.

    Returns:
      tokens: int32 [batch, nodes], in the order of the pool: parents in front of their children, siblings as drawn.
      parents: int32 [batch, nodes], -1 for children of the last committed token.
      count: int32 [batch], the leading nodes that are real; the rest is padding, with token 0 and parent -1.
      places: int32 [batch, nodes], where in the pool a node stands; 0 for padding.

    Raises:
      ValueError: `nodes` is no positive integer, or beyond the size of the pool.
    """
    _check_nodes(pool, nodes)
    beyond = pool.scores.shape[1]
    scores, places = lax.top_k(pool.scores, nodes)  # of equal scores the smaller place comes first
    places = jnp.sort(jnp.where(scores > -jnp.inf, places, beyond), axis=1)
    real = places < beyond
    inside = jnp.where(real, places, 0)
    tokens = jnp.where(real, jnp.take_along_axis(pool.tokens, inside, axis=1), 0)
    parent = jnp.where(real, jnp.take_along_axis(pool.parents, inside, axis=1), -1)
    # A parent is in the tree as well, so its number there is how many selected places stand in front of it.
    number = (places[:, None, :] < parent[:, :, None]).sum(axis=-1, dtype=jnp.int32)
    return tokens, jnp.where(parent < 0, -1, number), real.sum(axis=1, dtype=jnp.int32), inside


def expected_tokens_of(pool: Pool, nodes: int) -> jax.Array:
    """Draft tokens that the best tree so far expects accepted: float32 [batch], the sum of its paths' probabilities.

    OPT-Tree takes the drafter's probability of a path for the probability that all of it is accepted. The target's own
    token is not counted.

    Raises:
      ValueError: `nodes` is no positive integer, or beyond the size of the pool.
    """
    _check_nodes(pool, nodes)
    return jnp.exp(lax.top_k(pool.scores, nodes)[0]).sum(axis=1)


def keeps_growing(before: jax.Array | float, after: jax.Array, threshold: float | jax.Array) -> jax.Array:
    """OPT-Tree's stop rule, bool [batch]: another level is drafted only if the last one gained more than `threshold`.

    Args:
      before, after: `expected_tokens_of` in front of and behind the last level; 0 in front of the first one.
      threshold: expected tokens that a level must add, 0.5 in the paper's code; the most that a level can add is 1.
    """
    return after - before > threshold


def best_first(tokens: jax.Array, log_probs: jax.Array, nodes: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The likeliest prefixes where a position's law does not depend on the tokens before it.

    Args:
      tokens: int32 [batch, slots, m]: slot s holds the candidates for the (s + 1)-th token behind the last one.
      log_probs: float [batch, slots, m], falling along m; of other orders the tree is connected, but not the best.
      nodes: of the tree; its depth is at most `slots`.

    Returns:
      tokens int32 [batch, nodes], parents int32 [batch, nodes] and count int32 [batch], as in `select_tree`; of equal
      prefixes the shorter ones come first.

    Raises:
      ValueError: shapes that are not these, `nodes` that is no positive integer or more than there are prefixes.
    """
    check_counts(nodes=nodes)
    if tokens.ndim != 3 or log_probs.shape != tokens.shape or not tokens.size:
        raise ValueError(f"tokens {tokens.shape} and log_probs {log_probs.shape} must both be [batch, slots, m], none "
                         f"of them 0")  # fmt: skip
    batch, slots, m = tokens.shape
    prefixes = sum(m**depth for depth in range(1, slots + 1))
    if nodes > prefixes:
        raise ValueError(f"nodes={nodes} must be at most {prefixes}: {slots} slots of {m} tokens have no more prefixes")
    log_probs, tokens = _log_probs(log_probs), tokens.astype(jnp.int32)
    scores, places = jnp.zeros((batch, 1)), jnp.full((batch, 1), -1, jnp.int32)
    parts, size = [], 0
    for slot in range(slots):
        # Scores fall along the layer, and log_probs along the ranks. So the r-th child of the i-th node (from 1 on)
        # comes behind i * r - 1 others at least, and where i * r is beyond `nodes` it is not in the tree.
        width = scores.shape[1]
        node, rank = np.nonzero(np.outer(np.arange(1, width + 1), np.arange(1, m + 1)) <= nodes)
        candidates = scores[:, node] + log_probs[:, slot, rank]
        scores, best = lax.top_k(candidates, min(nodes, len(node)))
        parent = jnp.take_along_axis(places[:, node], best, axis=1)
        parts.append(Pool(jnp.take_along_axis(tokens[:, slot, rank], best, axis=1), scores, parent))
        places = jnp.broadcast_to(size + jnp.arange(best.shape[1], dtype=jnp.int32), best.shape)
        size += best.shape[1]
    return select_tree(jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *parts), nodes)[:3]
