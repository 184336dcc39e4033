"""Exact laws and expected lengths of all lossless rules: by enumeration, one step and several, and golden values."""

import itertools
import json
import pathlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rule_laws import (
    accept,
    after_deletion,
    chain,
    completed,
    depth_of,
    divisor,
    expected_tokens,
    greatest_error,
    prefix_probability,
    residual,
    several,
    step,
    table,
)

GOLDEN = json.loads((pathlib.Path(__file__).parent / "goldens" / "verification.json").read_text())
TREES = {
    "siblings": (-1, -1, -1),
    "binary": (-1, -1, 0, 0, 1, 1),
    "uneven": (-1, 0, -1, 0, 2, -1, 4),
    "chain": (-1, 0, 1),
    "deep": (-1, 0, 1, 2, 0, -1, 5),
}
TREE_KINDS = [("recursive", k) for k in ("with", "without", "top")] + [
    ("traversal", k) for k in ("with", "without", "top")
]
CASES = [
    *(("standard", kind, chain(k)) for kind in ("with", "top") for k in (1, 2, 4)),
    *(("block", kind, chain(k)) for kind in ("with", "top") for k in (1, 2, 4)),
    *((rule, kind, parents) for rule, kind in (*TREE_KINDS, ("kseq", "with")) for parents in TREES.values()),
]


def laws_of(seed, vocab, depth, p_zeros=0, q_zeros=0):
    rng = np.random.default_rng(seed)
    return table(rng, vocab, depth, p_zeros).__getitem__, table(rng, vocab, depth, q_zeros).__getitem__


@pytest.mark.parametrize("zeros", [(0, 0), (1, 0), (0, 1), (1, 1)], ids=str)
@pytest.mark.parametrize("rule, kind, parents", CASES, ids=str)
def test_the_law_of_a_step_is_the_target_s(rule, kind, parents, zeros):
    vocab, depth = 2 if len(parents) > 6 and kind != "top" else 3, depth_of(parents)
    p, q = laws_of(len(parents), vocab, depth, *zeros)
    outcomes = step(rule, parents, p, q, kind)
    assert greatest_error(completed(outcomes, p, depth + 1), p, depth + 1) < 1e-12


@pytest.mark.parametrize("rule", ["standard", "block", "traversal"])
def test_four_tokens_and_three_drafts(rule):
    p, q = laws_of(1, 4, 3, 1, 1)
    outcomes = step(rule, chain(3), p, q)
    assert greatest_error(completed(outcomes, p, 4), p, 4) < 1e-12


@pytest.mark.parametrize(
    "rule, kind, parents",
    [
        ("standard", "with", chain(2)),
        ("block", "with", chain(2)),
        ("block", "top", chain(2)),
        ("recursive", "without", (-1, -1, 0, 0)),
        ("recursive", "with", (-1, -1, 0, 0)),
        ("traversal", "without", (-1, -1, 0, 0)),
        ("traversal", "top", (-1, -1, 0, 1)),
        ("kseq", "with", (-1, -1, 0, 1)),
    ],
    ids=str,
)
def test_the_law_over_three_steps_is_the_target_s(rule, kind, parents):
    vocab, length = 3, 4
    rng = np.random.default_rng(3)
    p_table, q_table = rng.dirichlet(np.ones(vocab), vocab), rng.dirichlet(np.ones(vocab), vocab)

    def behind(rows):  # a first-order chain that begins behind token 0
        return lambda prefix: tuple(rows[prefix[-1] if prefix else 0].tolist())

    p, q = behind(p_table), behind(q_table)
    outcomes = several(rule, parents, p, q, kind, 3)
    assert min(map(len, outcomes)) == 3 < max(map(len, outcomes))
    assert greatest_error(completed(outcomes, p, length), p, length) < 1e-12


@pytest.mark.parametrize("case", GOLDEN["multi_draft"], ids=range(len(GOLDEN["multi_draft"])))
@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_acceptance_of_siblings_is_the_golden_value(case, count):
    p, q = (lambda _, law=tuple(case[name]): law for name in "pq")
    want = {"rrs_iid": case["single"], "rrs_without": case["single"], "kseq": case["single"]}
    want |= case[f"k{count}"] if count > 1 else {}
    rules = {"rrs_iid": ("recursive", "with"), "rrs_without": ("recursive", "without"), "kseq": ("kseq", "with")}
    rules |= {"topk_onehot": ("recursive", "top")} if count > 1 else {}
    got = {name: expected_tokens(step(rule, (-1,) * count, p, q, kind)) - 1 for name, (rule, kind) in rules.items()}
    assert got == pytest.approx({name: want[name] for name in rules}, abs=1e-12)
    if count > 1:
        assert divisor(tuple(case["p"]), tuple(case["q"]), count)[0] == pytest.approx(want["kseq_rho"], abs=1e-9)
        # No rule can do better than the best coupling of the target with these siblings.
        assert max(got["rrs_iid"], got["kseq"]) <= want["opt_iid"] + 1e-12
        assert got["rrs_without"] <= want["opt_without"] + 1e-12


@pytest.mark.parametrize("case", GOLDEN["multi_draft"], ids=range(len(GOLDEN["multi_draft"])))
def test_single_draft_acceptance_and_residual_are_the_golden_values(case):
    p, q = tuple(case["p"]), tuple(case["q"])
    assert sum(x * accept(y, x) for x, y in zip(q, p, strict=True)) == pytest.approx(case["single"], abs=1e-12)
    rest = np.array(residual(p, q))
    np.testing.assert_allclose(rest / rest.sum(), case["residual"], atol=1e-12)
    assert np.dot(p, q) == pytest.approx(case["exact_match"], abs=1e-12)


@pytest.mark.parametrize("case", GOLDEN["iid_chain"], ids=lambda c: f"gamma{c['gamma']}")
def test_the_expected_lengths_on_chains_are_the_golden_values(case):
    p, q = (1 / 3, 2 / 3), (2 / 3, 1 / 3)
    for rule, name in (("standard", "token_E"), ("block", "block_E"), ("traversal", "block_E")):
        got = expected_tokens(step(rule, chain(case["gamma"]), lambda _: p, lambda _: q))
        assert got == pytest.approx(case[name], abs=1e-12), rule
    assert case["token_E"] == pytest.approx(case["leviathan_E"], abs=1e-12)


def test_the_traversal_paper_s_example():
    """Figure 2 of https://arxiv.org/abs/2505.12398: a node with two children, drawn without replacement."""
    want, p, q = GOLDEN["traversal_fig2"], (0.3, 0.4, 0.3), (0.6, 0.3, 0.1)
    first = prefix_probability(1.0, p[0], q[0])
    assert first == pytest.approx(want["p(X1)"], abs=1e-12)
    child = prefix_probability(first, p[1], q[1])
    assert child == pytest.approx(want["accept(X1X3)"], abs=1e-12)
    left, left_p, left_q = after_deletion(first, p, q, 1, True)
    assert left == pytest.approx(want["p_prime(X1) after X3 deleted"], abs=1e-12)
    second = prefix_probability(left, left_p[2], left_q[2])
    assert second == pytest.approx(want["accept(X1X4)"], abs=1e-12)
    assert after_deletion(left, left_p, left_q, 2, True)[0] == pytest.approx(
        want["residual mass of X1 after X4 deleted"], abs=1e-12
    )


weights = st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0, 1.0, 3.0]), min_size=3, max_size=3).filter(sum)


@settings(max_examples=40, deadline=None)
@given(st.lists(weights, min_size=8, max_size=8), st.sampled_from(CASES[6:]))
def test_any_laws_with_zeros_ties_and_truncation_keep_the_law(rows, case):
    """First-order laws with zeros and equal probabilities, p and q truncated alike or not, on every rule and tree."""
    rule, kind, parents = case
    if len(parents) > 4:
        return
    laws = [tuple(x / sum(row) for x in row) for row in rows]

    def p(prefix):
        return laws[prefix[-1] if prefix else 3]

    def q(prefix):
        return laws[4 + (prefix[-1] if prefix else 3)]

    depth = depth_of(parents)
    outcomes = step(rule, parents, p, q, kind)
    assert greatest_error(completed(outcomes, p, depth + 1), p, depth + 1) < 1e-12


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([2, 3]), st.sampled_from(["with", "without", "top"]))
def test_no_rule_keeps_less_than_it_should(seed, vocab, kind):
    """block >= token, equal for deterministic drafts and K = 1; traversal >= recursive, on a chain as much as block."""
    p, q = laws_of(seed, vocab, 3)
    if kind != "without":
        for k in (1, 2, 3):
            block, token, on_chain = (
                expected_tokens(step(rule, chain(k), p, q, kind)) for rule in ("block", "standard", "traversal")
            )
            assert block >= token - 1e-12 and on_chain == pytest.approx(block, abs=1e-12)
            if k == 1 or kind == "top":
                assert block == pytest.approx(token, abs=1e-12)
    for parents in ((-1, -1, 0, 0), (-1, -1, 0, 1), (-1, 0, 0)):
        traversal, recursive = (expected_tokens(step(rule, parents, p, q, kind)) for rule in ("traversal", "recursive"))
        assert traversal >= recursive - 1e-12


def test_block_s_expected_length_is_one_plus_the_covered_prefixes():
    """E = 1 + sum of E[p_i], section 3 of https://arxiv.org/abs/2403.10444."""
    vocab, k = 3, 3
    p, q = laws_of(2, vocab, k)
    covered = 1.0
    for path in itertools.product(range(vocab), repeat=k):
        drawn, prefix = np.prod([q(path[:i])[path[i]] for i in range(k)]), 1.0
        for i in range(k):
            prefix = prefix_probability(prefix, p(path[:i])[path[i]], q(path[:i])[path[i]])
            covered += drawn * prefix
    assert expected_tokens(step("block", chain(k), p, q)) == pytest.approx(covered, abs=1e-12)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_more_siblings_are_accepted_more_often_and_all_of_them_always(count):
    p, q = (0.3, 0.4, 0.2, 0.1), (0.1, 0.2, 0.3, 0.4)
    for rule, kind in (*TREE_KINDS, ("kseq", "with")):
        few, more = (
            expected_tokens(step(rule, (-1,) * c, lambda _: p, lambda _: q, kind)) for c in (max(count - 1, 1), count)
        )
        assert more >= few - 1e-12, (rule, kind)
        if count == 4 and kind != "with":
            assert more == pytest.approx(2, abs=1e-12), (rule, kind)
