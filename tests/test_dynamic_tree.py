"""Dynamic draft trees against plain-Python references written from the papers; masks and depths against a walk."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import tree
from spec_jax.dynamic_tree import (
    Pool,
    best_first,
    expected_tokens_of,
    grow_pool,
    keeps_growing,
    select_tree,
    start_pool,
)

start = jax.jit(start_pool, static_argnums=2)
grow = jax.jit(grow_pool)  # the level is traced
select = jax.jit(select_tree, static_argnums=1)
expected = jax.jit(expected_tokens_of, static_argnums=1)
from_marginals = jax.jit(best_first, static_argnums=2)

INF = float("inf")


class Laws:
    """A drafter's k best tokens behind any prefix, chosen once: tokens and float32 log-probabilities [k]."""

    def __init__(self, seed, k, kind):
        self.rng, self.k, self.kind = np.random.default_rng(seed), k, kind
        self.known = {}

    def __call__(self, prefix):
        if prefix not in self.known:
            tokens = self.rng.choice(50, self.k, replace=False) + 1
            if self.kind == "ties":  # few values, whose sums are exact and often equal; some tokens are forbidden
                log_probs = self.rng.choice([-INF, 0.0, -0.0, -0.5, -1.0, -1.0], self.k)
            elif self.kind == "rounding":  # a child's score rounds to its parent's
                log_probs = self.rng.choice([-1e-9, -3e-8, 0.0], self.k) - 5 * (not prefix)
            else:
                log_probs = np.log(self.rng.dirichlet(np.ones(self.k + 1))[: self.k])
            self.known[prefix] = tokens, log_probs.astype(np.float32)
        return self.known[prefix]


def prefixes_of(pool, row):
    """The tokens that lead to every place of the pool of one row; empty where nothing was added yet."""
    tokens, parents = np.asarray(pool.tokens)[row].tolist(), np.asarray(pool.parents)[row].tolist()
    prefixes = []
    for token, parent in zip(tokens, parents, strict=True):
        prefixes.append((prefixes[parent] if parent >= 0 else ()) + (token,))
    return prefixes


def grown(laws, depth, stop=lambda pool, level: None):
    """The pool of a batch, row i by laws[i], and the pools before. `stop` says which rows grow no further."""
    tokens, log_probs = (np.stack(x) for x in zip(*[law(()) for law in laws], strict=True))
    pool, layer = start(jnp.asarray(tokens), jnp.asarray(log_probs), depth)
    for level in range(1, depth):
        stopped = stop(pool, level)
        tokens, log_probs = [], []
        for row, (law, places) in enumerate(zip(laws, np.asarray(layer).tolist(), strict=True)):
            prefixes = prefixes_of(pool, row)
            children = [law(prefixes[place]) for place in places]
            tokens.append([c[0] for c in children])
            log_probs.append([np.full_like(c[1], -INF) if stopped is not None and stopped[row] else c[1]
                              for c in children])  # fmt: skip
        pool, layer = grow(pool, level, layer, jnp.asarray(np.array(tokens)), jnp.asarray(np.array(log_probs)))
    return pool


def reference(law, k, depth, nodes, threshold=None):
    """The paths of the tree, their scores, and its expected tokens, by sorting; ties go to what was found first.

    With a threshold the tree stops growing as OPT-Tree does.
    """
    found = [(np.float32(s), (int(t),)) for t, s in zip(*law(()), strict=True)]
    layer = list(found)
    before = 0.0
    for _ in range(1, depth):
        after = sum(np.exp(s) for s, _ in sorted(found, key=lambda x: -x[0])[:nodes])
        if threshold is not None and after - before <= threshold:
            break
        before = after
        children = [
            (np.float32(score + s), (*path, int(t))) for score, path in layer for t, s in zip(*law(path), strict=True)
        ]
        found += children
        layer = sorted(children, key=lambda x: -x[0])[:k]  # stable
    best = [x for x in sorted(found, key=lambda x: -x[0])[:nodes] if x[0] > -INF]
    order = {path: i for i, (_, path) in enumerate(found)}
    return sorted((path for _, path in best), key=order.__getitem__), [float(np.exp(s)) for s, _ in best]


def paths_in(tokens, parents, count):
    """The paths of a tree's real nodes; the padding must be as documented, and parents stand in front."""
    assert (tokens[count:] == 0).all() and (parents[count:] == -1).all()
    paths = []
    for node, (token, parent) in enumerate(zip(tokens[:count].tolist(), parents[:count].tolist(), strict=True)):
        assert -1 <= parent < node
        paths.append((paths[parent] if parent >= 0 else ()) + (token,))
    return paths


# --- EAGLE-2 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "ties", "rounding"])
@pytest.mark.parametrize("k, depth, nodes", [(4, 4, 10), (3, 5, 30), (1, 4, 3)])
def test_eagle2_selects_what_the_paper_selects(k, depth, nodes, kind):
    laws = [Laws(seed, k, kind) for seed in range(24)]
    pool = grown(laws, depth)
    tokens, parents, count, places = map(np.asarray, select(pool, nodes))
    gained = np.asarray(expected(pool, nodes))
    for row, law in enumerate(laws):
        paths, probs = reference(law, k, depth, nodes)
        assert paths_in(tokens[row], parents[row], count[row]) == paths
        assert gained[row] == pytest.approx(sum(probs), rel=1e-5)
        real = places[row, : count[row]]
        assert (np.diff(real) > 0).all() and (places[row, count[row] :] == 0).all()
        assert [prefixes_of(pool, row)[place] for place in real] == paths
    assert (count == nodes).all() or kind == "ties"
    assert not any(np.isnan(x).any() for x in (pool.scores, gained))
    assert tokens.dtype == parents.dtype == count.dtype == places.dtype == np.int32


@functools.partial(jax.jit, static_argnums=(3, 4))
def drafted(first, ids, log_probs, depth, nodes):
    """A tree by a drafter whose law depends on the last token alone: rows of `ids` and `log_probs` [vocab, k]."""

    def step(level, carry):
        pool, layer = carry
        fed = jnp.take_along_axis(pool.tokens, layer, axis=1)
        return grow_pool(pool, level, layer, ids[fed], log_probs[fed])

    pool, _ = jax.lax.fori_loop(1, depth, step, start_pool(ids[first], log_probs[first], depth))
    return select_tree(pool, nodes)


def test_a_loop_on_the_device_grows_the_same_tree():
    rng = np.random.default_rng(0)
    ids = np.argsort(rng.random((9, 9)))[:, :3]
    log_probs = np.log(rng.dirichlet(np.ones(4), 9)[:, :3]).astype(np.float32)
    tokens, parents, count, _ = map(np.asarray, drafted(jnp.arange(9), jnp.asarray(ids), jnp.asarray(log_probs), 4, 12))
    for first in range(9):

        def law(prefix, first=first):
            return ids[[first, *prefix][-1]], log_probs[[first, *prefix][-1]]

        paths, _ = reference(law, 3, 4, 12)
        assert paths_in(tokens[first], parents[first], count[first]) == paths


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_what_may_not_be_proposed_is_in_no_tree(bad):
    tokens = jnp.arange(1, 7).reshape(2, 3)
    pool, layer = start(tokens, jnp.array([[-1.0, bad, -2.0], [bad, bad, bad]]), 2)
    behind = jnp.full((2, 3, 3), -0.1).at[0, 0, 1].set(bad)
    pool, layer = grow(pool, 1, layer, jnp.arange(10, 28).reshape(2, 3, 3), behind)
    tokens, parents, count, _ = select(pool, 12)
    assert count.tolist() == [7, 0]
    assert paths_in(np.asarray(tokens[0]), np.asarray(parents[0]), 7) == [
        (1,), (3,), (1, 10), (1, 12), (3, 16), (3, 17), (3, 18)
    ]  # fmt: skip
    assert paths_in(np.asarray(tokens[1]), np.asarray(parents[1]), 0) == []
    assert np.asarray(expected(pool, 12))[1] == 0
    assert not np.isnan(pool.scores).any()


def test_log_probs_that_round_above_zero_do_not_orphan_a_node():
    pool, layer = start(jnp.array([[1, 2]]), jnp.array([[-1.0, -1.0]]), 3)
    for level in (1, 2):
        pool, layer = grow(pool, level, layer, jnp.full((1, 2, 2), 3), jnp.full((1, 2, 2), 1e-6))
    assert np.asarray(pool.scores).max() == -1.0
    for nodes in (3, 7):
        tokens, parents, count, places = map(np.asarray, select(pool, nodes))
        assert count[0] == nodes
        assert places[0].tolist() == list(range(nodes))
        paths_in(tokens[0], parents[0], nodes)


def test_levels_outside_the_pool():
    pool, layer = start(jnp.array([[1, 2]]), jnp.array([[-1.0, -2.0]]), 2)
    children = jnp.full((1, 2, 2), 3), jnp.full((1, 2, 2), -0.5)
    full, layer = grow(pool, 1, layer, *children)
    assert select(full, 6)[2].tolist() == [6]
    for level in (-1, 0, 2, 3):
        with pytest.raises(ValueError, match=rf"level={level} must lie in 1\.\.1"):
            grow_pool(full, level, layer, *children)
        same, beyond = grow(full, level, layer, *children)  # traced: nothing is overwritten
        jax.tree.map(np.testing.assert_array_equal, same, full)
        barren, _ = grow(full, 1, beyond, *children)  # and nothing grows from such a layer
        assert select(barren, 6)[2].tolist() == [2]


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda pool: start_pool(jnp.zeros((1, 2), jnp.int32), jnp.zeros((1, 2)), 0), "depth=0 must be a positive"),
        (lambda pool: start_pool(jnp.zeros((1, 2), jnp.int32), jnp.zeros((2, 2)), 1), r"log_probs \(2, 2\) must both"),
        (
            lambda pool: start_pool(jnp.zeros(2, jnp.int32), jnp.zeros(2), 1),
            r"tokens \(2,\) .* must both be \[batch, k",
        ),
        (lambda pool: select_tree(pool, 0), "nodes=0 must be a positive integer"),
        (lambda pool: select_tree(pool, 7), "nodes=7 must be at most 6, the size of the pool"),
        (lambda pool: expected_tokens_of(pool, 7), "nodes=7 must be at most 6, the size of the pool"),
        (
            lambda pool: grow_pool(pool, 1, jnp.zeros((1, 2), int), jnp.zeros((1, 4), int), jnp.zeros((1, 4))),
            r"they are \(1, 4\), \(1, 4\) and \(1, 6\)",
        ),
        (
            lambda pool: grow_pool(pool, 1, jnp.zeros((1, 3), int), jnp.zeros((1, 3, 3), int), jnp.zeros((1, 3, 3))),
            r"a pool of \[1, 3 \+ \(depth - 1\) \* 9\]",
        ),
        (lambda pool: best_first(jnp.zeros((1, 2), int), jnp.zeros((1, 2)), 1), r"must both be \[batch, slots, m\]"),
        (lambda pool: best_first(jnp.zeros((1, 2, 0), int), jnp.zeros((1, 2, 0)), 1), "none of them 0"),
        (lambda pool: best_first(jnp.zeros((1, 2, 2), int), jnp.zeros((1, 2, 2)), 7), "nodes=7 must be at most 6: 2 "),
        (lambda pool: best_first(jnp.zeros((1, 2, 2), int), jnp.zeros((1, 2, 2)), 0), "nodes=0 must be a positive"),
    ],
)
def test_bad_input(call, message):
    pool = Pool(jnp.zeros((1, 6), jnp.int32), jnp.full((1, 6), -jnp.inf), jnp.full((1, 6), -1, jnp.int32))
    with pytest.raises(ValueError, match=message):
        call(pool)


# --- OPT-Tree ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threshold", [0.0, 0.15, 0.5])
def test_opt_tree_grows_as_long_as_it_gains(threshold):
    k, depth, nodes = 4, 4, 10  # programs that the tests above have compiled
    laws = [Laws(seed, k, "plain") for seed in range(24)]
    before, going, levels = np.zeros(24), np.ones(24, bool), np.ones(24, int)

    def stop(pool, level):
        nonlocal before, going, levels
        after = expected(pool, nodes)
        going = going & np.asarray(keeps_growing(before, after, threshold))
        before, levels = after, levels + going
        return ~going

    pool = grown(laws, depth, stop)
    tokens, parents, count, _ = map(np.asarray, select(pool, nodes))
    gained = np.asarray(expected(pool, nodes))
    for row, law in enumerate(laws):
        paths, probs = reference(law, k, depth, nodes, threshold)
        assert paths_in(tokens[row], parents[row], count[row]) == paths
        assert gained[row] == pytest.approx(sum(probs), rel=1e-5)
    assert len(set(levels)) > 1 or threshold == 0.0


def test_the_stop_rule_goes_row_by_row():
    after = jnp.array([0.5, 0.75, 1.0])
    assert keeps_growing(0.25, after, 0.25).tolist() == [False, True, True]
    assert keeps_growing(jnp.array([0.5, 0.5, 0.0]), after, jnp.array([0.0, 0.5, 0.5])).tolist() == [False, False, True]


# --- best-first from marginals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots, m, nodes", [(3, 4, 12), (4, 3, 120), (1, 5, 4), (2, 2, 6)])
@pytest.mark.parametrize("ties", [False, True])
def test_best_first_finds_the_likeliest_prefixes(slots, m, nodes, ties):
    rng = np.random.default_rng(slots)
    rows = 16
    tokens = np.argsort(rng.random((rows, slots, 40)))[..., :m] + 1
    if ties:
        log_probs = rng.choice([-INF, 0.0, -0.5, -1.0, -1.0], (rows, slots, m))
    else:
        log_probs = np.log(rng.dirichlet(np.ones(m + 1), (rows, slots))[..., :m])
    log_probs = -np.sort(-log_probs).astype(np.float32)
    found = map(np.asarray, from_marginals(jnp.asarray(tokens), jnp.asarray(log_probs), nodes))
    for row, (ids, parents, count) in enumerate(zip(*found, strict=True)):
        scores = {
            tuple(tokens[row, slot, rank].item() for slot, rank in enumerate(ranks)): np.float64(
                sum(log_probs[row, slot, rank] for slot, rank in enumerate(ranks))
            )
            for d in range(1, slots + 1)
            for ranks in itertools.product(range(m), repeat=d)
        }
        best = sorted((s for s in scores.values() if s > -INF), reverse=True)[:nodes]
        paths = paths_in(ids, parents, count)
        assert len(set(paths)) == len(paths) == len(best)
        np.testing.assert_allclose(sorted((scores[p] for p in paths), reverse=True), best, atol=1e-5)
        if not ties:
            assert set(paths) == set(sorted(scores, key=scores.get, reverse=True)[:nodes])


def test_best_first_draws_siblings_by_rank():
    tokens = jnp.asarray([[[5, 6, 7], [8, 9, 10]]])
    log_probs = jnp.log(jnp.asarray([[[0.6, 0.3, 0.05], [0.5, 0.45, 0.04]]]))
    ids, parents, count = from_marginals(tokens, log_probs, 5)  # .6, .3, .3, .27, .15
    assert ids.tolist() == [[5, 6, 8, 9, 8]]
    assert parents.tolist() == [[-1, -1, 0, 0, 1]]
    assert count.tolist() == [5]


# --- masks and depths -------------------------------------------------------------------------------------------------


def walked(parents, width):
    """Rows that each row sees and its depth, by walking up."""
    mask, depth = np.zeros((width, width), bool), np.zeros(width, int)
    for row in range(width):
        at = row
        while at > 0:
            mask[row, at] = True
            at = parents[at - 1] + 1 if at <= len(parents) else 0
            depth[row] += 1
        mask[row, 0] = True
    return mask, depth


def test_masks_and_depths_of_random_trees():
    rng = np.random.default_rng(5)
    masks = jax.jit(tree.ancestor_mask, static_argnums=1)
    for nodes, padding in ((1, 0), (9, 3), (40, 2)):
        width = nodes + 1 + padding
        batch = np.array([[rng.integers(-1, node) for node in range(nodes)] for _ in range(20)], np.int32)
        batch[0] = np.arange(-1, nodes - 1)  # as deep as it gets
        wanted = [walked(parents.tolist(), width) for parents in batch]
        mask, depth = (np.stack(x) for x in zip(*wanted, strict=True))
        for found in (tree.ancestor_mask(batch, width), masks(jnp.asarray(batch), width)):
            np.testing.assert_array_equal(found, mask)
            np.testing.assert_array_equal(tree.depths(found), depth)
        for row in range(3):
            static = tree.ancestor_mask(batch[row], width)
            assert isinstance(static, np.ndarray)
            np.testing.assert_array_equal(static, mask[row])
            np.testing.assert_array_equal(tree.depths(static), depth[row])
