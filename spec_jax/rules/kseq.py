"""K-SEQ: siblings drawn independently from one law are judged by one test that all of them share.

SpecTr, Sun et al. (https://arxiv.org/abs/2310.15141): accepts at least 1 - 1/e times as often as the best rule could.
Drafts are sequences side by side, so the walk goes on behind all nodes that hold the accepted prefix.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from spec_jax.laws import Laws
from spec_jax.rows import cond
from spec_jax.rules.base import Tree, Verification, acceptance_probability
from spec_jax.rules.recursive import after_refusal
from spec_jax.rules.walk import NONE, Visit, arrive, children_of, walk

STEPS = 60
"""Newton steps at most; a handful is enough but where p and q hardly overlap."""


def divisor(p: jax.Array, q: jax.Array, count: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The least rho in [1, count] with 1 - (1 - beta)^count <= rho beta, and beta = sum(min(q, p / rho)).

    p, q: laws [vocab]; count: int32, siblings, at least 1. Newton's method inside a bracket; every rho at and above the
    least one is lossless.
    """
    k = count.astype(p.dtype)
    tolerance = 4 * jnp.finfo(p.dtype).eps

    def excess(rho):
        """1 - (1 - beta)^k - rho beta, which falls with rho, its slope, and beta."""
        cut = p < rho * q
        beta = jnp.where(cut, p / rho, q).sum()
        fall = -jnp.where(cut, p, 0.0).sum() / rho**2
        slope = k * jnp.exp((k - 1) * jnp.log1p(-jnp.minimum(beta, 1.0))) * fall - beta - rho * fall
        return some_accepted(beta, k) - rho * beta, slope, beta

    def narrow(carry):
        step, low, high, rho, _ = carry
        value, slope, _ = excess(rho)
        high, low = jnp.where(value <= 0, rho, high), jnp.where(value > 0, rho, low)
        guess = rho - value / jnp.where(slope < 0, slope, -1.0)
        guess = jnp.where((guess >= low) & (guess <= high), guess, (low + high) / 2)
        return step + 1, low, high, guess, jnp.abs(guess - rho) <= tolerance * rho

    one = jnp.ones((), p.dtype)
    start = jnp.int32(0), one, jnp.maximum(k, one), one, k <= 1
    *_, rho, _ = lax.while_loop(lambda carry: (carry[0] < STEPS) & ~carry[-1], narrow, start)
    return rho, excess(rho)[2]


def some_accepted(beta: jax.Array, count: jax.Array) -> jax.Array:
    """1 - (1 - beta)^count, also of a beta so small that 1 - beta would round to 1."""
    return -jnp.expm1(count * jnp.log1p(-jnp.minimum(beta, 1.0)))


def remainder(p: jax.Array, q: jax.Array, rho: jax.Array, beta: jax.Array, count: jax.Array) -> jax.Array:
    """The law [vocab], not normalised, of the token that follows where all `count` siblings were refused."""
    accepted = some_accepted(beta, count.astype(p.dtype))
    scale = jnp.where(beta > 0, accepted / jnp.where(beta > 0, beta, 1.0), 0.0)
    rest = jnp.maximum(p - jnp.minimum(q, p / rho) * scale, 0.0)
    return jnp.where(rest.sum() > 0, rest, p)


def merged(tree: Tree) -> jax.Array:
    """For every row in flight the first row that the same tokens lead to, int32 [batch, rows].

    They share the target's law, up to rounding, but the first need not have children of its own.
    """
    batch, nodes = tree.tokens.shape
    index, node = jnp.arange(batch)[:, None], jnp.arange(nodes)
    alike = (tree.tokens[:, :, None] == tree.tokens[:, None]) & tree.present[:, None]
    alike = (alike & (node < node[:, None])) | (node == node[:, None])  # [batch, nodes, nodes], earlier ones and itself

    def deepen(_, rows):
        """Right one level further down: a node is like the first whose token and whose parent are alike."""
        above = rows[index, tree.row_parents]
        same = alike & (above[:, :, None] == above[:, None])
        return rows.at[:, 1:].set(jnp.argmax(same, axis=2) + 1)

    rows = jnp.broadcast_to(jnp.arange(nodes + 1), (batch, nodes + 1))
    return lax.fori_loop(0, tree.depth.max(), deepen, rows)


def kseq_rule(laws: Laws, tree: Tree) -> Verification:
    """See `verify.verify`, which checks the arguments; the noise belongs to this round.

    Children that a row proposes deterministically (one_hot) are judged by recursive rejection.
    """
    nodes, index = tree.tokens.shape[1], jnp.arange(tree.tokens.shape[0])[:, None]
    rows = merged(tree)
    parents = rows[index, tree.row_parents]
    children = children_of(parents, tree.present)

    def visit(row, column, entry, back):
        law = laws.at(row, column, tree.length[row] + tree.depth[row, column])
        count = (tree.present[row] & (parents[row] == column)).sum(dtype=jnp.int32)
        # The law of the first child is that of the row it hangs on: of the rows that hold the same tokens some may have
        # no children, and then no law.
        hangs_on = tree.row_parents[row, jnp.maximum(children.first[row, column], 0)]
        siblings = arrive(tree.q, laws.probabilities(law), row, hangs_on)
        p, q, one_hot = siblings.p, siblings.q, siblings.one_hot
        rho, beta = cond(
            ~one_hot & (count > 0) & ~law.broken,
            divisor,
            lambda *_: (jnp.float32(1), jnp.float32(0)),
            p,
            q,
            count,
        )

        def without_child(left, token):  # a child that was chosen deterministically is a law of its own
            return after_refusal(left, jax.nn.one_hot(token, left.shape[0], dtype=left.dtype), token, False)[0]

        def judge(carry):
            node, _, left = carry
            token = tree.tokens[row, node]
            drawn_from, inside = siblings.law_of(token), jnp.clip(token, 0, p.shape[0] - 1)
            passed = acceptance_probability(left[inside], rho * drawn_from[inside])
            passed = tree.known[row, node] & (laws.uniform(row, node) < passed)
            left = cond(one_hot & ~passed, without_child, lambda left, *_: left, left, token)
            return jnp.where(passed, node, children.following[row, node]), passed, left

        start = jnp.where(law.broken, NONE, children.first[row, column]), jnp.bool_(False), p
        node, passed, left = lax.while_loop(lambda carry: (carry[0] != NONE) & ~carry[1], judge, start)
        left = jnp.where(one_hot | (count == 0), left, remainder(p, q, rho, beta, count))
        to = rows[row, jnp.clip(node + 1, 0, nodes)]
        return Visit.end(laws, law, ~passed, jnp.where(law.empty, 0.0, left), to, entry)

    return walk(visit, laws, tree)
