"""Acceptance that changes the output, for comparison with the papers that use it: every name begins with `lossy_`.

`lossy_typical` (Medusa, https://arxiv.org/abs/2401.10774) keeps tokens that are not unlikely for the law's entropy,
`lossy_relaxed` (TensorRT-LLM) tokens close to the most probable one, `lossy_lenience` (Leviathan et al.,
https://arxiv.org/abs/2211.17192, appendix A.5) tokens by a test that is easier by a factor.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from spec_jax import sampling as sampling_lib
from spec_jax.laws import Laws
from spec_jax.rules.base import Tree, Verification, acceptance_probability, child_law, residual
from spec_jax.rules.walk import NONE, Visit, along, children_of, walk

LOG_OFFSET = 1e-5
"""Medusa's, which keeps the entropy's logarithm finite."""


def typical_threshold(p: jax.Array, epsilon: float, delta: float) -> jax.Array:
    """min(epsilon, delta exp(-H(p))): a token of at least this probability is typical of p [vocab]."""
    entropy = -(p * jnp.log(p + LOG_OFFSET)).sum()
    return jnp.minimum(epsilon, delta * jnp.exp(-entropy))


def relaxed_threshold(p: jax.Array, top_k: int, delta: float) -> jax.Array:
    """The least probability of a token that is among the `top_k` of p [vocab] and within `delta` of the best."""
    best = lax.top_k(p, min(top_k, p.shape[0]))[0]
    return jnp.maximum(best[0] - delta, best[-1])


def typical_rule(laws: Laws, tree: Tree, posterior_threshold: float, posterior_alpha: float) -> Verification:
    """Medusa's typical acceptance: the longest path of typical tokens, the likeliest of these. Lossy."""

    def threshold(p):
        return typical_threshold(p, posterior_threshold, posterior_alpha)

    return _by_threshold(threshold, True, laws, tree)


def relaxed_rule(laws: Laws, tree: Tree, relaxed_top_k: int, relaxed_delta: float) -> Verification:
    """TensorRT-LLM's relaxed acceptance: the longest path of tokens near the top, the likeliest of these. Lossy."""

    def threshold(p):
        return relaxed_threshold(p, relaxed_top_k, relaxed_delta)

    return _by_threshold(threshold, False, laws, tree)


def _by_threshold(threshold: Callable, strict: bool, laws: Laws, tree: Tree) -> Verification:
    """The longest path whose every token has at least (strict: more than) the threshold of the law it follows.

    Among the longest paths the likeliest wins. At temperature 0 a token must be the argmax. What follows is the argmax
    or a token of the target's own law.
    """
    batch, nodes = tree.tokens.shape
    index = jnp.arange(batch)
    inside = jnp.clip(tree.tokens, 0, laws.logits.shape[-1] - 1)

    def look(row, column):
        """Of every node whether it may follow this row, and its log-probability there; the lead of a greedy choice."""
        law = laws.at(row, column, tree.length[row] + tree.depth[row, column])
        p = laws.probabilities(law)
        least, found = threshold(p), p[inside[row]]
        passed = found > least if strict else found >= least
        # The law is one-hot at temperature 0, and a threshold may be 0.
        return passed & (found > 0) & ~law.broken, jnp.log(found), law.gap

    def step(carry, column):
        kept, likelihood, gaps = carry
        child = tree.valid & (tree.row_parents == column)
        passed, found, gap = laws.over_rows(
            look,
            index,
            jnp.full(batch, column),
            wanted=kept[:, column],
            nothing=(jnp.zeros(nodes, bool), jnp.zeros(nodes), jnp.float32(jnp.inf)),
        )
        passed = passed & child
        kept = kept.at[:, 1:].set(kept[:, 1:] | passed)
        so_far = likelihood[:, column, None] + found
        return (
            kept,
            likelihood.at[:, 1:].set(jnp.where(passed, so_far, likelihood[:, 1:])),
            gaps.at[:, column].set(gap),
        )

    rows = jnp.zeros((batch, nodes + 1))
    start = rows.astype(bool).at[:, 0].set(True), rows, rows + jnp.inf
    kept, likelihood, gaps = lax.fori_loop(0, nodes + 1, lambda column, carry: step(carry, column), start)
    depth = jnp.where(kept, tree.depth[:, : nodes + 1], -1)
    longest = depth == depth.max(axis=1, keepdims=True)
    at = jnp.argmax(jnp.where(longest, likelihood, -jnp.inf), axis=1).astype(jnp.int32)

    def choose(row, column):
        law = laws.at(row, column, tree.length[row] + tree.depth[row, column])
        return laws.draw(law, laws.probabilities(law))

    token, gap = laws.over_rows(choose, index, at)
    return along(tree, at, token, gaps.at[index, at].set(gap))


def lenience_rule(laws: Laws, tree: Tree, lenience: float) -> Verification:
    """Leviathan's lenience l of a chain: x passes with probability min(1, p(x) / (l q(x))). Lossy for l below 1.

    A refused token is replaced from max(p - q, 0), so that P(x) <= p(x) / l. At temperature 0 a token passes where the
    target's softmax gives it at least l times the largest probability.
    """
    children = children_of(tree.row_parents, tree.present)

    def visit(row, column, entry, back):
        law = laws.at(row, column, tree.length[row] + tree.depth[row, column])
        p, node = laws.probabilities(law), children.first[row, column]
        token = tree.tokens[row, node]
        inside = jnp.clip(token, 0, p.shape[0] - 1)
        q = child_law(tree.q, row, column, token, p.shape[0])
        sampled = laws.uniform(row, law.position) < acceptance_probability(p[inside], lenience * q[inside])
        near = laws.lead(law, inside) <= -jnp.log(lenience)
        drafted = (node != NONE) & ~law.broken
        passed = drafted & tree.known[row, node] & jnp.where(law.best == sampling_lib.UNSEEN, sampled, near)
        rest = jnp.where(drafted & ~law.empty, residual(p, q), p)
        return Visit.end(laws, law, ~passed, rest, node + 1, entry)

    return walk(visit, laws, tree)
