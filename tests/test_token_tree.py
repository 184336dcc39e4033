"""Static draft trees: paths and parents, and Sequoia's programme against every tree and against best-first search."""

import heapq
import itertools
import json
import subprocess
import sys

import numpy as np
import pytest

from spec_jax.token_tree import check_parents, expected_tokens, parse_tree, paths_of, sequoia_tree

PAPER = (0.6, 0.2, 0.1, 0.05)
BY_NODES = (1.6, 1.96, 2.176, 2.376, 2.5056)  # of 1, 2, ... draft nodes
TWO_LEVELS = (1.6, 1.96, 2.16, 2.28, 2.4)
TIMES = {1: 10, 2: 10, 4: 10, 8: 12, 16: 14, 32: 18}


def random_parents(rng, nodes):
    return tuple(int(rng.integers(-1, node)) for node in range(nodes))


def random_rates(rng, children, falling=False, total=1.0):
    """Positional acceptance; unless it is falling some of it is exactly 0."""
    rates = rng.dirichlet(np.ones(children + 1))[:children] * total
    return np.sort(rates)[::-1] if falling else np.where(rng.random(children) < 0.2, 0.0, rates)


def value_of(tree, rates):
    """Expected tokens of a set of paths: the sum over nodes of the chance that all of the path is accepted."""
    return 1 + sum(np.prod([rates[rank] for rank in path]) for path in tree)


def every_tree(nodes, children):
    """All trees of up to `nodes` nodes, as sets of paths."""
    seen = layer = {frozenset()}
    for _ in range(nodes):
        grown = set()
        for tree in layer:
            for above in [(), *tree]:
                rank = sum(path[:-1] == above for path in tree)
                if rank < children:
                    grown.add(tree | {(*above, rank)})
        seen, layer = seen | grown, grown
    return [sorted(tree) for tree in seen]


def best_first(rates, nodes, depth):
    """Expected tokens of the best trees of 0..nodes nodes: with falling rates the likeliest nodes are a tree."""
    gains, heap = [1.0], [(-rates[0], 0, 1, 1.0)]  # (-probability, rank, depth, the parent's probability)
    while len(gains) <= nodes and heap:
        minus, rank, level, above = heapq.heappop(heap)
        gains.append(gains[-1] - minus)
        if rank + 1 < len(rates):
            heapq.heappush(heap, (-above * rates[rank + 1], rank + 1, level, above))
        if level < depth:
            heapq.heappush(heap, (minus * rates[0], 0, level + 1, -minus))
    return gains + gains[-1:] * (nodes + 1 - len(gains))


# --- paths ------------------------------------------------------------------------------------------------------------


def test_paths_as_medusa_and_as_vllm_write_them():
    choices = [[0], [0, 0], [1], [0, 1], [2], [0, 0, 0], [1, 0], [0, 2]]
    parents = (-1, -1, -1, 0, 0, 0, 1, 3)
    assert parse_tree(choices) == parents
    assert parse_tree(json.dumps(choices)) == parents
    assert parse_tree(str([tuple(path) for path in choices])) == parents
    assert parse_tree(tuple(tuple(np.array(path)) for path in choices)) == parents
    assert parse_tree(" [(0,), (0, 0), (1,)]\n") == (-1, -1, 0)
    assert parse_tree([(0,) * depth for depth in range(1, 6)]) == (-1, 0, 1, 2, 3)


def test_a_tree_of_accuracies_as_medusa_chooses_it():
    # Heads of falling accuracy: the likeliest prefixes, written in the order in which they were found.
    accuracy = np.array([[0.6, 0.15, 0.05], [0.5, 0.12, 0.04], [0.4, 0.1, 0.03]])
    prefixes = [path for d in (1, 2, 3) for path in itertools.product(range(3), repeat=d)]
    chosen = sorted(prefixes, key=lambda path: -np.prod([accuracy[slot, rank] for slot, rank in enumerate(path)]))[:20]
    parents = parse_tree(chosen)
    check_parents(parents)
    assert list(paths_of(parents)) == sorted(chosen, key=lambda path: (len(path), path))


def test_paths_and_parents_are_inverse():
    rng = np.random.default_rng(0)
    for nodes in [*range(1, 12), 40, 1024]:
        parents = random_parents(rng, nodes)
        paths = paths_of(parents)
        for path, parent in zip(paths, parents, strict=True):
            assert path[:-1] == (paths[parent] if parent >= 0 else ())
        assert len(set(paths)) == nodes
        shuffled = [paths[i] for i in rng.permutation(nodes)]
        canonical = parse_tree(shuffled)
        assert paths_of(canonical) == tuple(sorted(paths, key=lambda path: (len(path), path)))
        assert parse_tree(paths_of(canonical)) == canonical
    assert paths_of(()) == ()


@pytest.mark.parametrize(
    "value, message",
    [
        ([], "must list one path"),
        ("", "is no list of paths"),
        ("[(0,), (0", "is no list of paths"),
        ("[" * 9000, "is no list of paths"),
        ("__import__('os')", "is no list of paths"),
        ("{(0,), (1,)}", "must list one path"),
        ("[]", "must list one path"),
        (7, "tree=7 must list one path"),
        (None, "tree=None must list one path"),
        ([0, 1], "tree path 0 must be a list of child ranks"),
        ([[]], r"tree path \[\] must be a list of child ranks"),
        ([[0], [-1]], r"tree path \[-1\] must be"),
        ([[0], [0.0]], r"tree path \[0.0\] must be"),
        ([[True]], r"tree path \[True\] must be"),
        (["0"], "tree path '0' must be"),
        ([[0], [1], [0]], r"tree path \(0,\) is listed twice"),
        ([[0], [1, 0]], r"tree path \(1, 0\) needs its parent, \(1,\)"),
        ([[0], [2]], r"tree path \(2,\) needs the sibling before it, \(1,\)"),
        ([[0], [0, 1]], r"tree path \(0, 1\) needs the sibling before it, \(0, 0\)"),
        ([[1]], r"tree path \(1,\) needs the sibling before it, \(0,\)"),
        ([[rank] for rank in range(1025)], "1025 nodes is too large: at most 1024"),
    ],
)
def test_what_is_no_tree(value, message):
    with pytest.raises(ValueError, match=message):
        parse_tree(value)


@pytest.mark.parametrize("parents", [(0,), (-1, 1), (-2,), (-1, 0.0), (-1, None)])
def test_parents_must_precede_their_children(parents):
    for function in (check_parents, paths_of, lambda p: expected_tokens(p, PAPER)):
        with pytest.raises(ValueError, match=f"parents.{len(parents) - 1}.=.* parents precede their children"):
            function(parents)


def test_loads_neither_jax_nor_flax():
    code = "import sys, spec_jax.token_tree; print([m for m in ('jax', 'jaxlib', 'flax') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


# --- expected tokens --------------------------------------------------------------------------------------------------


def test_expected_tokens_of_any_tree():
    rng = np.random.default_rng(1)
    for nodes in range(12):
        parents, rates = random_parents(rng, nodes), random_rates(rng, 12)
        assert expected_tokens(parents, rates) == pytest.approx(value_of(paths_of(parents), rates), rel=1e-12)
    assert expected_tokens((-1, 0, 1), (0.5,)) == 1.875
    assert expected_tokens((-1, -1, 0), (0.5, 0.25)) == 2.0
    with pytest.raises(ValueError, match="node 2 is child 3 of its parent, but acceptances has 2 entries"):
        expected_tokens((-1, -1, -1), (0.5, 0.25))


# --- Sequoia's dynamic programme --------------------------------------------------------------------------------------


def test_values_of_the_reference():
    for nodes, (free, capped) in enumerate(zip(BY_NODES, TWO_LEVELS, strict=True), 1):
        assert sequoia_tree(PAPER, nodes).expected_tokens == pytest.approx(free, rel=1e-12)
        assert sequoia_tree(PAPER, nodes, max_depth=2).expected_tokens == pytest.approx(capped, rel=1e-12)
    assert sequoia_tree(PAPER, 3).parents == (-1, 0, 1)
    assert sequoia_tree(PAPER, 3).seconds_per_token is None


def test_no_tree_expects_more():
    rng = np.random.default_rng(2)
    trees = every_tree(6, 4)
    assert len(trees) == 1 + 1 + 2 + 5 + 14 + (42 - 1) + (132 - 7)  # Catalan's, less those with five children or six
    for case in range(12):
        rates = np.array(PAPER) if case == 0 else random_rates(rng, 4)
        values = [value_of(tree, rates) for tree in trees]
        for nodes, depth in itertools.product(range(1, 7), (1, 2, 3, 6)):
            allowed = [i for i, t in enumerate(trees) if len(t) <= nodes and all(len(path) <= depth for path in t)]
            best = max(values[i] for i in allowed)
            found = sequoia_tree(rates, nodes, max_depth=depth)
            assert found.expected_tokens == pytest.approx(best, rel=1e-12)
            assert expected_tokens(found.parents, rates) == pytest.approx(best, rel=1e-12)
            fewest = min(len(trees[i]) for i in allowed if values[i] >= best - 1e-12)
            assert len(found.parents) == fewest  # nodes that add nothing are left out
            assert max(map(len, paths_of(found.parents)), default=0) <= depth


@pytest.mark.parametrize("depth", [None, 1, 3, 7])
def test_with_falling_acceptance_the_likeliest_nodes_are_the_best_tree(depth):
    rng = np.random.default_rng(3)
    for children, nodes in ((1, 9), (2, 20), (5, 40), (12, 64)):
        rates = random_rates(rng, children, falling=True, total=rng.uniform(0.5, 1.0))
        expected = best_first(rates, nodes, depth or nodes)
        for count in {1, 2, nodes // 2, nodes}:
            found = sequoia_tree(rates, count, max_depth=depth)
            assert found.expected_tokens == pytest.approx(expected[count], rel=1e-12)
            assert expected_tokens(found.parents, rates) == pytest.approx(expected[count], rel=1e-12)
            assert parse_tree(paths_of(found.parents)) == found.parents


def test_a_tree_is_no_larger_than_acceptance_pays_for():
    assert sequoia_tree((1.0, 0.0), 5) == sequoia_tree((1.0,), 5)
    assert sequoia_tree((1.0,), 5).parents == (-1, 0, 1, 2, 3)
    assert sequoia_tree((0.0, 0.0), 5).parents == ()
    assert sequoia_tree((0.0, 0.5), 2).parents == (-1, -1)  # a second child needs a first one
    assert len(sequoia_tree((0.5, 0.3), 10, max_depth=2).parents) == 6
    assert len(sequoia_tree(PAPER, 1024).parents) == 1024


# --- by measured times ------------------------------------------------------------------------------------------------


def test_the_fewest_seconds_per_token_of_all_trees():
    rng = np.random.default_rng(4)
    trees = every_tree(6, 3)
    chosen = set()
    for case in range(30):
        rates = random_rates(rng, 3, falling=case % 2) + 1e-3
        rates /= max(1.0, rates.sum())
        slope, draft = rng.choice([0.0, 0.1, 0.6]), rng.choice([0.0, 0.05, 0.4])
        times = 1 + slope * np.arange(8) + rng.uniform(0, 0.2, 8)  # by rows; may fall as well
        costs = [
            (times[len(tree) + 1] + draft * max(map(len, tree), default=0)) / value_of(tree, rates) for tree in trees
        ]
        found = sequoia_tree(rates, 6, target_seconds=lambda rows, t=times: t[rows], draft_seconds=draft)
        assert found.seconds_per_token == pytest.approx(min(costs), rel=1e-12)
        depth = max(map(len, paths_of(found.parents)), default=0)
        expected = expected_tokens(found.parents, rates)
        assert found.expected_tokens == pytest.approx(expected, rel=1e-12)
        cost = (times[len(found.parents) + 1] + draft * depth) / expected
        assert cost == pytest.approx(found.seconds_per_token, rel=1e-12)
        chosen.add(len(found.parents))
    assert {0, 6} < chosen  # plain decoding and the largest tree are both best somewhere


@pytest.mark.parametrize("draft", [0.0, 0.3, 2.0])
def test_measured_row_counts_are_searched_with_every_depth(draft):
    for rates in (PAPER, (0.9, 0.05), (0.3, 0.2, 0.15, 0.1)):
        search = {
            (depth * draft + TIMES[rows]) / best_first(rates, rows - 1, depth)[-1]: (rows, depth)
            for rows, depth in itertools.product(TIMES, range(1, 32))
        }
        cost, (rows, depth) = min(search.items())
        assert cost < TIMES[1]
        found = sequoia_tree(rates, 31, target_seconds=TIMES, draft_seconds=draft)
        assert found.seconds_per_token == pytest.approx(cost, rel=1e-12)
        assert len(found.parents) == rows - 1
        if draft:
            assert max(map(len, paths_of(found.parents))) == depth


def test_row_counts_between_measured_ones_are_padded():
    # One level of two children is all there can be: three rows, at the time of four.
    found = sequoia_tree((0.5, 0.4), 31, max_depth=1, target_seconds={2: 10, 4: 11, 32: 90}, draft_seconds=0)
    assert found.parents == (-1, -1)
    assert found.seconds_per_token == pytest.approx(11 / 1.9)


def test_plain_decoding_where_drafting_does_not_pay():
    found = sequoia_tree(PAPER, 15, target_seconds=lambda rows: float(rows), draft_seconds=0.1)
    assert found.parents == () and found.expected_tokens == 1.0 and found.seconds_per_token == 1.0


@pytest.mark.parametrize(
    "change, message",
    [
        ({"acceptances": ()}, "must list one probability per child"),
        ({"acceptances": 0.5}, "acceptances=0.5 must list"),
        ({"acceptances": (0.5, -0.1)}, r"acceptances\[1\]=-0.1 must be a probability"),
        ({"acceptances": (1.1,)}, r"acceptances\[0\]=1.1 must be a probability"),
        ({"acceptances": (float("nan"),)}, r"acceptances\[0\]=nan must be"),
        ({"acceptances": ("a",)}, r"acceptances\[0\]='a' must be"),
        ({"acceptances": (0.7, 0.4)}, "acceptances sum to 1.1"),
        ({"max_nodes": 0}, "max_nodes=0 must be a positive integer"),
        ({"max_nodes": 1025}, "max_nodes=1025 must be at most 1024"),
        ({"max_depth": 0}, "max_depth=0 must be a positive integer"),
        ({"draft_seconds": None}, "go together"),
        ({"target_seconds": None}, "go together"),
        ({"draft_seconds": -1.0}, "draft_seconds=-1.0 must be"),
        ({"draft_seconds": float("inf")}, "draft_seconds=inf must be"),
        ({"target_seconds": [1, 2, 3]}, r"target_seconds=\[1, 2, 3\] must be a function or a mapping"),
        ({"target_seconds": {}}, "target_seconds ends at 0 rows, max_nodes=4 needs the time of 5"),
        ({"target_seconds": {1: 1, 4: 1}}, "target_seconds ends at 4 rows, max_nodes=4 needs the time of 5"),
        ({"target_seconds": {0: 1, 8: 1}}, r"keys \[0, 8\]: row counts must be positive integers"),
        ({"target_seconds": {1: 1, 8: 0.0}}, "target_seconds of 8 rows is 0.0"),
        ({"target_seconds": lambda rows: float("nan")}, "target_seconds of 1 rows is nan"),
        ({"target_seconds": lambda rows: None}, "target_seconds of 1 rows is None"),
    ],
)
def test_bad_input(change, message):
    options = {
        "acceptances": PAPER,
        "max_nodes": 4,
        "max_depth": None,
        "target_seconds": {8: 1.0},
        "draft_seconds": 0.1,
    }
    with pytest.raises(ValueError, match=message):
        sequoia_tree(**(options | change))


def test_acceptance_that_rounds_above_one_is_taken():
    assert sequoia_tree((0.6, 0.4 + 1e-7), 2).parents == sequoia_tree((0.6, 0.4), 2).parents
