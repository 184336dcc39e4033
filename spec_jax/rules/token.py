"""The token rule: every draft token passes a test of its own, and the first that fails ends the run.

Leviathan et al. (https://arxiv.org/abs/2211.17192), Chen et al. (https://arxiv.org/abs/2302.01318).
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from spec_jax.laws import Laws
from spec_jax.rules.base import Tree, Verification, acceptance_probability, child_law, draft_probability, residual


def token_rule(laws: Laws, draft: Tree) -> Verification:
    """See `verify.verify`, which checks the arguments."""
    batch, nodes = draft.tokens.shape
    vocab, index = laws.logits.shape[-1], jnp.arange(batch)

    def accept(row, column, token, draft_prob):
        """Whether one draft token passes its own test, which for a greedy row is to be the argmax."""
        position = draft.length[row] + column
        law = laws.at(row, column, position)
        p = laws.probability(law, token)
        return (laws.uniform(row, position) < acceptance_probability(p, draft_prob)) & ~law.broken, law.gap

    q, valid = draft_probability(draft), draft.valid

    def step(carry):
        column, alive, accepted, gaps = carry
        passed, gap = laws.over_rows(
            accept,
            index,
            jnp.full(batch, column),
            draft.tokens[:, column],
            q[:, column],
            wanted=alive & valid[:, column],
            nothing=(jnp.bool_(False), jnp.float32(jnp.inf)),
        )
        return column + 1, passed, accepted + passed, gaps.at[:, column].set(gap)

    start = jnp.int32(0), jnp.ones(batch, bool), jnp.zeros(batch, jnp.int32), jnp.full((batch, nodes), jnp.inf)
    _, _, num_accepted, gaps = lax.while_loop(lambda c: (c[0] < nodes) & c[1].any(), step, start)

    # The next token: from the residual where a real draft was refused, else from the target itself.
    refused = num_accepted < draft.present.sum(axis=1)
    token = draft.tokens[index, jnp.minimum(num_accepted, nodes - 1)]

    def choose(row, column, token, refused):
        law = laws.at(row, column, draft.length[row] + column)
        p = laws.probabilities(law)
        q = jnp.where(refused, child_law(draft.q, row, column, token, vocab), 0.0)
        return laws.draw(law, jnp.where(law.empty, 0.0, residual(p, q)))

    follow, lead = laws.over_rows(choose, index, num_accepted, token, refused)
    column = jnp.arange(nodes + 1)
    drafted = jnp.pad(draft.tokens, ((0, 0), (0, 1)))
    tokens = jnp.where(column < num_accepted[:, None], drafted, follow[:, None])
    gaps = jnp.where(column < num_accepted[:, None], jnp.pad(gaps, ((0, 0), (0, 1))), lead[:, None])
    path = jnp.broadcast_to(column, tokens.shape)
    return Verification(tokens, num_accepted, path, gaps)
