"""Block verification: the whole draft is judged at once, and the longest prefix that passes is kept.

Sun et al. (https://arxiv.org/abs/2403.10444), Algorithm 2: on average at least as many tokens as the token rule for any
p and q, as many where drafts are deterministic or K is 1. A prefix that fails does not end the scan, so a later round
must not meet noise that an earlier one has used: keys belong to a round, see `sampling.of_round`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from spec_jax.laws import Laws
from spec_jax.rows import cond
from spec_jax.rules.base import Tree, Verification, child_law, residual


def prefix_probability(before: jax.Array, p: jax.Array, q: jax.Array) -> jax.Array:
    """p_i = min(1, p_{i-1} p(x_i) / q(x_i)): how much of the draft's prefix the target covers.

    A token that the draft could not have proposed counts as covered where the target may say it.
    """
    return jnp.minimum(1.0, jnp.where(q > 0, before * p / jnp.where(q > 0, q, 1.0), jnp.where(p > 0, before, 0.0)))


def keep_probability(prefix: jax.Array, p: jax.Array, q: jax.Array) -> jax.Array:
    """h_i of a prefix that is not the whole draft, from p_i and the laws p and q [..., vocab] of what follows it.

    Where the target may say nothing behind it (p is zero), the prefix is kept as often as if it were whole.
    """
    rest = jnp.maximum(prefix[..., None] * p - q, 0.0).sum(-1)
    rest = jnp.where(p.sum(-1) > 0, rest, prefix)
    total = rest + (1.0 - prefix)
    return jnp.where(total > 0, rest / jnp.where(total > 0, total, 1.0), 1.0)


def block_rule(laws: Laws, draft: Tree) -> Verification:
    """See `verify.verify`, which checks the arguments; the noise belongs to this round."""
    batch, nodes = draft.tokens.shape
    vocab, index = laws.logits.shape[-1], jnp.arange(draft.tokens.shape[0])
    count, valid, columns = draft.present.sum(axis=1), draft.valid, jnp.arange(nodes + 1)
    laws = laws.prepared(draft.length[:, None] + columns, columns <= count[:, None])

    def look(row, column, prefix, token, is_valid):
        """Whether the prefix that ends here passes, p_i of the next one, and the lead of a greedy choice."""
        position = draft.length[row] + column
        law = laws.at(row, column, position)

        def keep(row, column, prefix, token):
            p = laws.probabilities(laws.at(row, column, draft.length[row] + column))
            return keep_probability(prefix, p, child_law(draft.q, row, column, token, vocab))

        # Of a prefix in front of further drafts h_i is at most p_i, so most need not be computed.
        u = laws.uniform(row, position)
        possible = (column > 0) & (u < prefix) & ~law.broken
        kept = cond(possible, keep, lambda _, __, prefix, ___: prefix, row, column, prefix, token)
        q = child_law(draft.q, row, column, token, vocab)[jnp.clip(token, 0, vocab - 1)]
        follows = jnp.where(is_valid & ~law.broken, prefix_probability(prefix, laws.probability(law, token), q), 0.0)
        return (column == 0) | (u < kept), follows, law.gap

    def step(carry, column):
        prefix, (accepted, covered) = carry
        # Behind a prefix that the target does not cover no prefix passes.
        more = (column < count) & (prefix > 0)
        each = jnp.full(batch, column), prefix, draft.tokens[:, column], valid[:, column]
        passed, follows, gap = laws.over_rows(look, index, *each, wanted=more, nothing=nothing)
        kept = jnp.where(passed, column, accepted), jnp.where(passed, prefix, covered)
        return (jnp.where(column < count, follows, prefix), kept), gap

    nothing = jnp.bool_(False), jnp.float32(0), jnp.float32(jnp.inf)
    one = jnp.ones(batch, jnp.float32)
    start = one, (jnp.zeros(batch, jnp.int32), one)
    (last, (accepted, prefix)), gaps = lax.scan(step, start, jnp.arange(nodes))

    # The whole draft is kept as often as it is covered.
    passed = (jax.vmap(laws.uniform)(index, draft.length + count) < last) & (count > 0)
    accepted, prefix = jnp.where(passed, count, accepted), jnp.where(passed, last, prefix)

    def choose(row, column, prefix, token):
        law = laws.at(row, column, draft.length[row] + column)
        q = jnp.where(column < count[row], child_law(draft.q, row, column, token, vocab), 0.0)
        return laws.draw(law, jnp.where(law.empty, 0.0, residual(prefix * laws.probabilities(law), q)))

    token = draft.tokens[index, jnp.minimum(accepted, nodes - 1)]
    follow, gap = laws.over_rows(choose, index, accepted, prefix, token)
    gaps = jnp.pad(gaps.T, ((0, 0), (0, 1)), constant_values=jnp.inf)
    column = jnp.broadcast_to(jnp.arange(nodes + 1), gaps.shape)
    tokens = jnp.where(column < accepted[:, None], jnp.pad(draft.tokens, ((0, 0), (0, 1))), follow[:, None])
    return Verification(tokens, accepted, column, gaps.at[index, accepted].set(gap))
