"""The token rule: every draft token passes a test of its own, and the first that fails ends the run.

Leviathan et al. (https://arxiv.org/abs/2211.17192), Chen et al. (https://arxiv.org/abs/2302.01318).
"""

from __future__ import annotations

import jax.numpy as jnp

from spec_jax.laws import Laws
from spec_jax.rules.base import Tree, Verification, acceptance_probability, child_law, draft_probability, residual


def token_rule(laws: Laws, draft: Tree) -> Verification:
    """See `verify.verify`, which checks the arguments."""
    batch, nodes = draft.tokens.shape
    vocab = laws.logits.shape[-1]

    def accept(row, column, token, draft_prob):
        """Whether one draft token passes its own test, which for a greedy row is to be the argmax."""
        position = draft.length[row] + column
        law = laws.at(row, column, position)
        p = laws.probability(law, token)
        return (laws.uniform(row, position) < acceptance_probability(p, draft_prob)) & ~law.broken, law.gap

    rows, columns = (x.reshape(-1) for x in jnp.indices((batch, nodes)))
    passed, gaps = laws.over_rows(
        accept,
        rows,
        columns,
        draft.tokens.reshape(-1),
        draft_probability(draft).reshape(-1),
        wanted=draft.valid.reshape(-1),
        nothing=(jnp.bool_(False), jnp.float32(jnp.inf)),
        reached=lambda found, at: (columns[at] == 0) | found[0][at - 1],
    )
    passed, gaps = passed.reshape(batch, nodes), gaps.reshape(batch, nodes)
    num_accepted = jnp.cumprod((passed & draft.valid).astype(jnp.int32), axis=1).sum(axis=1)

    # The next token: from the residual where a real draft was refused, else from the target itself.
    index = jnp.arange(batch)
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
