"""Traversal verification: a tree is judged from its leaves, and what a refused node could have won goes to its parent.

Weng et al. (https://arxiv.org/abs/2505.12398), Algorithm 3: on average at least as many tokens as recursive rejection,
and on a chain as many as block verification. A node that fails does not end the walk, so a later round must not meet
noise that an earlier one has used: keys belong to a round, see `sampling.of_round`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from spec_jax.laws import Laws
from spec_jax.rows import cond
from spec_jax.rules.base import Tree, Verification, child_law
from spec_jax.rules.block import prefix_probability
from spec_jax.rules.recursive import normalised, without
from spec_jax.rules.walk import NONE, Siblings, Visit, arrive, children_of, select, walk

ACCEPTED = 2.0
"""Entry of a row that is accepted before it is visited, above every uniform."""


def after_deletion(
    prefix: jax.Array, p: jax.Array, q: jax.Array, token: jax.Array, without_replacement: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What is left of a node when one of its children is deleted: its acceptance, and the laws [vocab] of its children.

    Args:
      prefix: the acceptance probability of the node so far; 1 at the last committed token, and it stays 1 there.
      p, q: what its next child is judged by, and what the child was drawn from.
    """
    rest = jnp.maximum(prefix * p - q, 0.0)
    total = rest.sum()
    kept = total + (1.0 - prefix)
    left = jnp.where(kept > 0, total / jnp.where(kept > 0, kept, 1.0), 1.0)
    p = jnp.where(total > 0, rest / jnp.where(total > 0, total, 1.0), p)
    return left, p, normalised(without(q, token)) if without_replacement else q


def traversal_rule(laws: Laws, tree: Tree) -> Verification:
    """See `verify.verify`, which checks the arguments; the noise belongs to this round.

    A row's law is made anew when the walk comes back to it, and the deletions of before are repeated on it: kept laws
    would be as many as the tree is deep.
    """
    children = children_of(tree.row_parents, tree.present)
    once = tree.q is not None and tree.q.without_replacement
    rows = tree.tokens.shape[1] + 1
    drafted = jnp.pad(tree.present, ((0, 0), (1, 0)), constant_values=True)
    laws = laws.prepared(tree.length[:, None] + tree.depth[:, :rows], drafted)

    def enter(row, node, prefix, p, q):
        """With what entry a child is visited, from p and q of its token; 0: not at all, and it is deleted."""
        found = jnp.where(tree.known[row, node], prefix_probability(prefix, p, q), 0.0)
        leaf = children.first[row, node + 1] == NONE
        return jnp.where(leaf, jnp.where(laws.uniform(row, node) < found, ACCEPTED, 0.0), found)

    def judged(law, entry, back):
        """The visit that deletes children until one is entered or none is left, and then tries the row itself."""
        row, column = law.row, law.column

        def judge(carry):
            node, _, prefix, siblings = carry
            token = tree.tokens[row, node]
            q, inside = siblings.law_of(token), jnp.clip(token, 0, siblings.p.shape[0] - 1)
            # Siblings beyond what could be drawn without replacement are no draws, and not judged.
            drawn = q.sum() > 0
            found = enter(row, node, prefix, siblings.p[inside], q[inside])
            # What was deleted before is deleted again: siblings stand in order.
            found = jnp.where(drawn & (node > back), found, 0.0)
            left, left_p, left_q = after_deletion(prefix, siblings.p, q, token, once)
            left = left, Siblings(left_p, None if siblings.q is None else left_q, siblings.one_hot)
            prefix, siblings = select(drawn & (found == 0), left, (prefix, siblings))
            return jnp.where(found > 0, node, children.following[row, node]), found, prefix, siblings

        # Where nothing can follow, no child is judged, and the row is kept as often as if it were a leaf.
        childless = law.broken | law.empty | (entry == ACCEPTED)
        first = jnp.where(childless, NONE, children.first[row, column])
        start = first, jnp.float32(0), entry, arrive(tree.q, laws.probabilities(law), row, column)
        node, found, prefix, siblings = lax.while_loop(lambda c: (c[0] != NONE) & (c[1] == 0), judge, start)
        down = found > 0
        # The last committed token is kept.
        kept = ~down & ((column == 0) | (laws.uniform(row, column - 1) < prefix))
        return Visit.end(laws, law, kept, siblings.p, jnp.where(down, node + 1, parent(row, column)), found)

    def parent(row, column):
        return tree.row_parents[row, jnp.maximum(column - 1, 0)]

    def moved(to, law, entry):
        return Visit(to, jnp.bool_(False), jnp.int32(0), law.gap, entry)

    def visit(row, column, entry, back):
        # A row is kept less often without its children than with them: if not even then, it need not be looked at.
        last = (back != NONE) & (children.following[row, jnp.maximum(back, 0)] == NONE)
        lost = last & (column > 0) & (laws.uniform(row, jnp.maximum(column - 1, 0)) >= entry)

        def look(row, column, entry, back):
            law = laws.at(row, column, tree.length[row] + tree.depth[row, column])
            # On the way down a row's first child is judged by two probabilities, not by two laws.
            node = children.first[row, column]
            token = tree.tokens[row, node]
            q = child_law(tree.q, row, column, token, laws.logits.shape[-1])
            found = enter(row, node, entry, laws.probability(law, token), q[jnp.clip(token, 0, q.shape[0] - 1)])
            direct = (node != NONE) & (back == NONE) & (found > 0) & ~law.broken & (entry != ACCEPTED)
            return cond(
                direct,
                lambda law, entry, back, node, found: moved(node + 1, law, found),
                lambda law, entry, back, *_: judged(law, entry, back),
                law, entry, back, node, found,
            )  # fmt: skip

        def give_up(row, column, entry, back):
            return Visit(parent(row, column), jnp.bool_(False), jnp.int32(0), jnp.float32(jnp.inf), jnp.float32(0))

        return cond(lost, give_up, look, row, column, entry, back)

    return walk(visit, laws, tree)
