"""Recursive rejection on trees: the children of a row are tried in turn, each against what the refused ones left.

SpecInfer (https://arxiv.org/abs/2305.09781), Sequoia (https://arxiv.org/abs/2402.12374): with siblings drawn with or
without replacement, and with deterministic ones, each of which is a law of its own (EAGLE-2, n-gram trees). On a chain
it is the token rule.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from spec_jax.laws import Laws
from spec_jax.rules.base import Tree, Verification, acceptance_probability
from spec_jax.rules.walk import NONE, Siblings, Visit, arrive, children_of, select, walk


def after_refusal(
    p: jax.Array, q: jax.Array, token: jax.Array, without_replacement: bool
) -> tuple[jax.Array, jax.Array]:
    """The laws [vocab] that the next sibling is judged by: what is left of p, and what the sibling was drawn from.

    Where rounding leaves nothing of p, that is p as it was.
    """
    rest = jnp.maximum(p - q, 0.0)
    rest = jnp.where(rest.sum() > 0, rest, p)
    if without_replacement:
        q = without(q, token)
    return normalised(rest), normalised(q)


def without(q: jax.Array, token: jax.Array) -> jax.Array:
    """q [vocab] without one token, which may lie outside."""
    return jnp.where(jnp.arange(q.shape[0]) == token, 0.0, q)


def normalised(x: jax.Array) -> jax.Array:
    """x [vocab] divided by its sum; zeros stay."""
    total = x.sum()
    return x / jnp.where(total > 0, total, 1.0)


def recursive_rule(laws: Laws, tree: Tree) -> Verification:
    """See `verify.verify`, which checks the arguments; the noise belongs to this round."""
    children = children_of(tree.row_parents, tree.present)
    once = tree.q is not None and tree.q.without_replacement

    def visit(row, column, entry, back):
        law = laws.at(row, column, tree.length[row] + tree.depth[row, column])

        def judge(carry):
            node, _, siblings = carry
            token = tree.tokens[row, node]
            p, q = siblings.p, siblings.law_of(token)
            inside = jnp.clip(token, 0, p.shape[0] - 1)
            # Siblings beyond what could be drawn without replacement are no draws, and not judged.
            drawn = q.sum() > 0
            passed = drawn & tree.known[row, node]
            passed = passed & (laws.uniform(row, node) < acceptance_probability(p[inside], q[inside]))
            left_p, left_q = after_refusal(p, q, token, once)
            left = Siblings(left_p, None if siblings.q is None else left_q, siblings.one_hot)
            siblings = select(drawn & ~passed, left, siblings)
            return jnp.where(passed, node, children.following[row, node]), passed, siblings

        siblings = arrive(tree.q, laws.probabilities(law), row, column)
        start = jnp.where(law.broken, NONE, children.first[row, column]), jnp.bool_(False), siblings
        node, passed, siblings = lax.while_loop(lambda carry: (carry[0] != NONE) & ~carry[1], judge, start)
        return Visit.end(laws, law, ~passed, siblings.p, node + 1, entry)

    return walk(visit, laws, tree)
