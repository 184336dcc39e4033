"""The walk of a rule through a draft tree: one visit per row in flight, from the last committed token to where it ends.

A visit looks at one row's law and judges the row's children in draw order, so that a step holds one law per sequence,
however many nodes the tree has.
"""

from __future__ import annotations

from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from spec_jax.drafting.base import DraftProbs
from spec_jax.laws import Law, Laws
from spec_jax.rows import cond
from spec_jax.rules.base import Tree, Verification, row_law

NONE = -1


@flax.struct.dataclass
class Children:
    """The children of every row in flight, in draw order, as linked lists of nodes; NONE ends a list.

    Attributes:
      first: int32 [batch, rows], the first child of a row.
      following: int32 [batch, nodes], the sibling behind a node.
    """

    first: jax.Array
    following: jax.Array


def children_of(row_parents: jax.Array, present: jax.Array) -> Children:
    """The nodes that are present [batch, nodes] by the row that each is a child of; nodes stand in draw order."""
    batch, nodes = row_parents.shape
    index = jnp.arange(batch)

    def link(step, lists):
        first, following = lists
        node = nodes - 1 - step
        parent = row_parents[:, node]
        behind = first[index, parent]
        following = following.at[:, node].set(behind)
        return first.at[index, parent].set(jnp.where(present[:, node], node, behind)), following

    blank = jnp.full((batch, nodes + 1), NONE, jnp.int32), jnp.full((batch, nodes), NONE, jnp.int32)
    return Children(*lax.fori_loop(0, nodes, link, blank))


@flax.struct.dataclass
class Visit:
    """What became of one visit.

    Attributes:
      to: int32, the row to go on at: a child, or the parent of a row that was given up.
      done: bool, whether the walk ends at this row.
      token: int32, the token behind it, where it ends.
      gap: float32, the lead of a greedy row's choice.
      entry: float32, what the rule wants to know when it comes to `to` as a child.
    """

    to: jax.Array
    done: jax.Array
    token: jax.Array
    gap: jax.Array
    entry: jax.Array

    @classmethod
    def nothing(cls) -> Visit:
        return cls(jnp.int32(0), jnp.bool_(True), jnp.int32(0), jnp.float32(jnp.inf), jnp.float32(1))

    @classmethod
    def end(cls, laws: Laws, law: Law, done: jax.Array, weights: jax.Array, to: jax.Array, entry: jax.Array) -> Visit:
        """The walk ends here if `done`, with a token of the law that the weights [vocab] are proportional to."""

        def draw(law, weights):
            return laws.draw(law, weights)

        token, gap = cond(done, draw, lambda law, _: (jnp.int32(0), law.gap), law, weights)
        return cls(to, done, token, gap, entry)


def walk(visit: Callable[..., Visit], laws: Laws, tree: Tree) -> Verification:
    """Visits rows until every sequence is done, and reports the path from the last committed token to the last visit.

    Args:
      visit: (sequence, row, entry, back) -> Visit. `entry` is what the visit of the parent left, 1 at the last
        committed token; `back` is the child that has just been given up, NONE on arrival.
    """
    batch, nodes = tree.tokens.shape
    index = jnp.arange(batch)

    def step(carry):
        at, done, token, gaps, entries, back = carry
        found = laws.over_rows(
            visit, index, at, entries[index, at], back[index, at], wanted=~done, nothing=Visit.nothing()
        )
        moved = ~done & ~found.done
        to = jnp.where(moved, found.to, nodes + 1)  # beyond the rows: nothing is written
        gaps = gaps.at[index, at].set(jnp.where(done, gaps[index, at], found.gap))
        given_up = to < at  # parents stand in front of their children
        back = back.at[index, jnp.where(given_up, to, nodes + 1)].set(at - 1, mode="drop")
        entries = entries.at[index, jnp.where(given_up, nodes + 1, to)].set(found.entry, mode="drop")
        token = jnp.where(done, token, found.token)
        return jnp.where(moved, found.to, at), done | found.done, token, gaps, entries, back

    rows = jnp.zeros((batch, nodes + 1))
    start = (
        jnp.zeros(batch, jnp.int32),
        jnp.zeros(batch, bool),
        jnp.zeros(batch, jnp.int32),
        rows + jnp.inf,
        rows + 1,
        jnp.full(rows.shape, NONE, jnp.int32),
    )
    at, _, token, gaps, *_ = lax.while_loop(lambda carry: ~carry[1].all(), step, start)
    return along(tree, at, token, gaps)


def along(tree: Tree, at: jax.Array, token: jax.Array, gaps: jax.Array) -> Verification:
    """The verdict that accepts the path to the row `at` [batch] and goes on with `token`; gaps [batch, rows] by row."""
    batch, nodes = tree.tokens.shape
    index = jnp.arange(batch)

    def climb(carry):
        row, path = carry
        path = path.at[index, tree.depth[index, row]].set(row)
        return jnp.where(row > 0, tree.row_parents[index, row - 1], 0), path

    _, path = lax.while_loop(lambda carry: (carry[0] > 0).any(), climb, (at, jnp.zeros((batch, nodes + 1), jnp.int32)))
    accepted = tree.depth[index, at]
    tokens = jnp.take_along_axis(tree.tokens, jnp.maximum(path[:, 1:] - 1, 0), axis=1)
    tokens = jnp.pad(tokens, ((0, 0), (0, 1))).at[index, accepted].set(token)
    return Verification(tokens, accepted, path, jnp.take_along_axis(gaps, path, axis=1))


@flax.struct.dataclass
class Siblings:
    """What the next child of a row is judged by.

    Attributes:
      p: float32 [vocab], the target's law, less what the children before have taken of it.
      q: float32 [vocab], what the next child was drawn from; None where children are chosen deterministically.
      one_hot: bool, whether this row's children are.
    """

    p: jax.Array
    q: jax.Array | None
    one_hot: jax.Array

    def law_of(self, token: jax.Array) -> jax.Array:
        """The law [vocab] that a child was drawn from."""
        point = jax.nn.one_hot(token, self.p.shape[0], dtype=self.p.dtype)
        return point if self.q is None else jnp.where(self.one_hot, point, self.q)


def arrive(q: DraftProbs | None, p: jax.Array, row: jax.Array, column: jax.Array) -> Siblings:
    """The children of the row in flight `column` of sequence `row`, of which none has been judged."""
    if q is None:
        return Siblings(p, None, jnp.bool_(True))
    return Siblings(p, *row_law(q, row, column, p.shape[0]))


def select(chosen: jax.Array, x, y):
    """x where `chosen`, a scalar, else y; pytrees of arrays."""
    return jax.tree.map(lambda a, b: jnp.where(chosen, a, b), x, y)
