"""Drafting a tree level by level, as `base.draft_chain` drafts a chain token by token.

The whole tree is in flight from the start, every row at a place of its own. Each level runs the rows that have
children: what earlier levels wrote stays in the cache behind `length`, where later rows see it through the ancestor
mask. A packed model computes the rows of the level alone; others compute all, those of earlier levels as before.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spec_jax import tree as tree_lib
from spec_jax.drafting.base import BaseDrafter, DraftProbs, Needs, View
from spec_jax.drafting.children import Choice, choose_children
from spec_jax.dynamic_tree import Pool, expected_tokens_of, grow_pool, keeps_growing, select_tree, start_pool
from spec_jax.sampling import NO_TOKEN

NextLogits = Callable[[Any, jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]
"""(carry, tokens int32 [batch, rows], mask bool [batch or 1, rows, rows], active bool [batch, rows]) -> (logits float32
[batch, rows, vocab], carry): a forward pass of the rows in flight, of which the active ones are wanted. Tokens of later
levels are not known yet, and logits of rows that stand in front of the flight may come first."""


@flax.struct.dataclass
class TreeDraft:
    """A tree that was drafted.

    Attributes:
      tokens: int32 [batch, nodes], NO_TOKEN where a law had no token left.
      count: int32 [batch], the leading nodes that are real.
      depth: int32 [nodes] or [batch, nodes], 1 for children of the last committed token, never falling from a real node
        to the next.
      fed: int32 [nodes] or [batch, nodes], the row in flight in which a node was fed, -1 for leaves, which were not.
      parents: int32 [batch, nodes] of a dynamic tree.
      q: the laws of drawn nodes.
    """

    tokens: jax.Array
    count: jax.Array
    depth: jax.Array | np.ndarray
    fed: jax.Array | np.ndarray
    parents: jax.Array | None = None
    q: DraftProbs | None = None


@dataclasses.dataclass(frozen=True)
class Levels:
    """Which rows in flight of a static tree each level expands; row 0 is the last committed token, node i row i + 1.

    Attributes:
      rows: int32 [levels, widest], the rows of each level that have children, padded with the number of rows.
      children: int32 [levels, widest, most], their children's rows in draw order, padded in the same way.
      depth: int32 [nodes], 1 for children of the last committed token.
    """

    rows: np.ndarray
    children: np.ndarray
    depth: np.ndarray

    @property
    def inner(self) -> np.ndarray:
        """The rows that have children, ascending."""
        return np.sort(self.rows[self.rows <= self.depth.size])


@functools.lru_cache
def levels_of(parents: tuple[int, ...]) -> Levels:
    """The levels of a tree whose nodes stand in order of depth.

    Raises:
      ValueError: for parents that do not precede their children, or nodes that are not in order of depth.
    """
    tree_lib.check_parents(parents)
    depth = np.zeros(len(parents) + 1, np.int32)
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        depth[node + 1] = depth[parent + 1] + 1
        children.setdefault(parent + 1, []).append(node + 1)
    if (np.diff(depth) < 0).any():
        node = int(np.argmax(np.diff(depth) < 0))
        raise ValueError(f"parents={parents}: node {node} is less deep than the node in front of it; a drafter goes "
                         "level by level, so give the nodes in order of depth")  # fmt: skip
    expanded = [[row for row in children if depth[row] == level] for level in range(depth.max())]
    widest, most = max(map(len, expanded)), max(map(len, children.values()))
    rows = np.full((len(expanded), widest), len(depth), np.int32)
    table = np.full((len(expanded), widest, most), len(depth), np.int32)
    for level, found in enumerate(expanded):
        for place, row in enumerate(sorted(found)):
            rows[level, place] = row
            table[level, place, : len(children[row])] = children[row]
    return Levels(rows, table, depth[1:])


@dataclasses.dataclass(frozen=True)
class StaticTree:
    """A tree of one shape in every step (SpecInfer, https://arxiv.org/abs/2305.09781; Sequoia,
    https://arxiv.org/abs/2402.12374).

    Attributes:
      parents: of its nodes, in order of depth, siblings in draw order.
      replacement: whether drawn siblings are independent of each other.
    """

    parents: tuple[int, ...]
    replacement: bool = False

    dynamic = False

    @property
    def nodes(self) -> int:
        return len(self.parents)

    @property
    def rows(self) -> int:
        """Rows in flight while it is drafted."""
        return 1 + len(self.parents)

    @property
    def depth(self) -> int:
        return int(levels_of(self.parents).depth[-1])

    def draft(
        self, next_logits: NextLogits, carry: Any, view: View, sample: bool, vocab_size: int
    ) -> tuple[TreeDraft, Any]:
        """Drafts it in one loop over its levels. `sample`: draw the nodes, unless under `coupled`."""
        levels, rows, batch = levels_of(self.parents), self.rows, view.last.shape[0]
        choice = Choice(levels.children.shape[-1], vocab_size, sample and view.rule != "coupled", self.replacement)
        parents = np.asarray(self.parents, np.int32)
        mask = tree_lib.ancestor_mask(parents, rows)[None]
        row_parents = jnp.broadcast_to(jnp.asarray(parents) + 1, (batch, rows - 1))
        expanded, children = jnp.asarray(levels.rows), jnp.asarray(levels.children)

        def level(depth, state):
            tokens, laws, carry = state
            columns = expanded[depth]
            wanted = (columns < rows) & view.live[:, None]
            active = jnp.zeros((batch, rows), bool).at[:, columns].set(wanted, mode="drop")
            logits, carry = next_logits(carry, jnp.maximum(tokens, 0), mask, active)  # NO_TOKEN is no index
            columns_in = jnp.minimum(columns, rows - 1)
            found = choose_children(choice, logits, view, tokens, mask, row_parents, columns_in, wanted, depth)
            tokens = tokens.at[:, children[depth]].set(found.tokens, mode="drop")
            laws = laws.at[:, columns].set(found.law, mode="drop") if choice.draw else None
            return tokens, laws, carry

        tokens = jnp.full((batch, rows), NO_TOKEN, jnp.int32).at[:, 0].set(view.last)
        logits, _ = jax.eval_shape(lambda *x: next_logits(*x, mask, tokens >= 0), carry, tokens)
        # Row w of the laws is that of the children of row w; rows behind the last that has children need none.
        laws = jnp.zeros((batch, levels.inner[-1] + 1, logits.shape[-1])) if choice.draw else None
        tokens, laws, carry = lax.fori_loop(0, self.depth, level, (tokens, laws, carry))
        q = None
        if choice.draw:  # greedy rows take the likeliest tokens, each of which is a law of its own
            greedy = jnp.broadcast_to((view.sampling.temperature == 0)[:, None], laws.shape[:2])
            q = DraftProbs(laws, one_hot=greedy, without_replacement=not self.replacement)
        row = np.arange(1, rows)
        fed = np.where(np.isin(row, levels.inner), row, -1)
        return TreeDraft(tokens[:, 1:], jnp.full(batch, rows - 1, jnp.int32), levels.depth, fed, q=q), carry


@flax.struct.dataclass
class _Growth:
    """A dynamic tree while it grows.

    Attributes:
      level: int32, how many levels were expanded.
      grows: bool [batch], rows that expand another level.
      expected: float32 [batch], draft tokens that the best tree so far expects accepted.
      pool: the candidates.
      layer: int32 [batch, top_k], places in the pool of the nodes to expand next.
      fed: int32 [batch, pool], the row in flight in which a candidate was fed, -1 where it was not.
      tokens: int32 [batch, rows] in flight.
      row_parents: int32 [batch, rows - 1], the row that row i + 1 is a child of.
      carry: the drafter's.
    """

    level: jax.Array
    grows: jax.Array
    expected: jax.Array
    pool: Pool
    layer: jax.Array
    fed: jax.Array
    tokens: jax.Array
    row_parents: jax.Array
    carry: Any


@dataclasses.dataclass(frozen=True)
class DynamicTree:
    """A tree grown anew in every step from the drafter's own probabilities, see `spec_jax.dynamic_tree`.

    EAGLE-2 (https://arxiv.org/abs/2406.16858) grows all levels, OPT-Tree (https://arxiv.org/abs/2406.17276) stops in
    every row where a level adds too little. Children are the likeliest tokens, or under `coupled` at a temperature the
    best ones under the target's noise.

    Attributes:
      nodes: how many are kept of the pool.
      top_k: children per node, and nodes expanded per level.
      levels: at most.
      threshold: expected tokens that a level must add for another one to be drafted; None: all levels are.
    """

    nodes: int
    top_k: int
    levels: int
    threshold: float | None = None

    parents = None
    dynamic = True

    @property
    def rows(self) -> int:
        """Rows in flight while it is drafted: every level but the last is fed."""
        return 1 + (self.levels - 1) * self.top_k

    @property
    def depth(self) -> int:
        return self.levels

    def draft(
        self, next_logits: NextLogits, carry: Any, view: View, sample: bool, vocab_size: int
    ) -> tuple[TreeDraft, Any]:
        """Grows it in one loop over its levels. Nothing is drawn: `sample` must be False."""
        if sample:
            raise ValueError("a dynamic tree holds the likeliest tokens; draw the nodes of a static one")
        k, rows, batch = self.top_k, self.rows, view.last.shape[0]
        choice, index = Choice(k, vocab_size, grade=True), jnp.arange(batch)[:, None]

        def level(g: _Growth) -> _Growth:
            first = g.level == 0
            columns = 1 + (g.level - 1) * k + jnp.arange(k)
            # The layer enters the flight; what is not expanded is not fed.
            at = jnp.where(first, rows, columns)
            parent = jnp.take_along_axis(g.pool.parents, g.layer, axis=1)
            behind = jnp.where(parent < 0, 0, jnp.take_along_axis(g.fed, jnp.maximum(parent, 0), axis=1))
            tokens = g.tokens.at[:, at].set(jnp.take_along_axis(g.pool.tokens, g.layer, axis=1), mode="drop")
            row_parents = g.row_parents.at[:, at - 1].set(behind, mode="drop")
            fed = g.fed.at[index, g.layer].set(jnp.where(first | ~g.grows[:, None], -1, columns))
            columns = jnp.where(first, jnp.where(jnp.arange(k) == 0, 0, rows), columns)  # row 0 alone
            wanted = (columns < rows) & g.grows[:, None]
            columns = jnp.minimum(columns, rows - 1)
            active = jnp.zeros((batch, rows), bool).at[:, columns].max(wanted)
            mask = tree_lib.ancestor_mask(row_parents - 1, rows)
            logits, carry = next_logits(g.carry, jnp.maximum(tokens, 0), mask, active)  # NO_TOKEN is no index
            found = choose_children(choice, logits, view, tokens, mask, row_parents, columns, wanted, g.level)
            pool, layer = lax.cond(
                first,
                lambda: start_pool(found.tokens[:, 0], found.log_probs[:, 0], self.levels),
                lambda: grow_pool(g.pool, g.level, g.layer, found.tokens, found.log_probs),
            )
            grows, expected = g.grows, g.expected
            if self.threshold is not None:
                expected = expected_tokens_of(pool, self.nodes)
                grows = grows & keeps_growing(g.expected, expected, self.threshold)
            return _Growth(g.level + 1, grows, expected, pool, layer, fed, tokens, row_parents, carry)

        none = jnp.full((batch, k), NO_TOKEN, jnp.int32)
        pool, layer = start_pool(none, jnp.full((batch, k), -jnp.inf), self.levels)
        tokens = jnp.full((batch, rows), NO_TOKEN, jnp.int32).at[:, 0].set(view.last)
        start = _Growth(
            level=jnp.int32(0),
            grows=view.live,
            expected=jnp.zeros(batch),
            pool=pool,
            layer=layer,
            fed=jnp.full(pool.tokens.shape, -1, jnp.int32),
            tokens=tokens,
            row_parents=jnp.zeros((batch, rows - 1), jnp.int32),
            carry=carry,
        )
        end = lax.while_loop(lambda g: (g.level < self.levels) & g.grows.any(), level, start)
        tokens, parents, count, places = select_tree(end.pool, self.nodes)
        real = jnp.arange(self.nodes) < count[:, None]
        fed = jnp.where(real, jnp.take_along_axis(end.fed, places, axis=1), -1)
        depth = jnp.where(places < k, 1, (places - k) // (k * k) + 2)
        return TreeDraft(tokens, count, depth, fed, parents), end.carry


class TreeDrafter(BaseDrafter):
    """What a drafter with a field `tree`, None for a chain, tells of it."""

    tree: StaticTree | DynamicTree | None

    @property
    def parents(self):
        return None if self.tree is None else self.tree.parents

    @property
    def dynamic_tree(self):
        return self.tree is not None and self.tree.dynamic

    @property
    def needs(self):
        return Needs(slots=0 if self.tree is None else self.tree.rows)
