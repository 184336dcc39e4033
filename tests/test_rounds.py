"""The compiled rules on drafted trees over several rounds: law, tokens per step, and faults that must be found."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rule_laws import chain, children_of, expected_tokens, step
from test_verify import P_LIMIT, chi_square, rows_side_by_side, sampling_state

from spec_jax import sampling
from spec_jax.drafting.base import Draft, DraftProbs
from spec_jax.rules import kseq, recursive, traversal
from spec_jax.verify import CHAIN_RULES, verify

SAMPLES, ROUNDS, VOCAB = 15_000, 3, 3
SIBLINGS, BINARY, UNEVEN = (-1, -1, -1), (-1, -1, 0, 0, 1, 1), (-1, 0, -1, 0, 2, -1, 4)
LEAF_FIRST = (-1, -1, 1, 1, 1)
RNG = np.random.default_rng(11)
P_TABLE, Q_TABLE = RNG.dirichlet(np.ones(VOCAB), VOCAB), RNG.dirichlet(np.ones(VOCAB), VOCAB)


def draw_children(key, q, count, kind):
    """`count` tokens from q [vocab]: by the largest of log q plus noise, one after another, or the most probable."""
    if kind == "top":
        return jax.lax.top_k(q, count)[1]
    if kind == "without":
        return jax.lax.top_k(jnp.log(q) + jax.random.gumbel(key, q.shape), count)[1]
    return jax.random.categorical(key, jnp.log(q), shape=(count,))


def rounds(rule, kind, parents, keys=sampling.of_round, samples=SAMPLES, in_sequence=False):
    """Counts of the first three tokens of a first-order chain, and tokens of the first of several steps, per sample.

    The drafter's noise and the rule's have the same keys, as in the loop: `keys` makes them from a round's length.
    """
    nodes, children = len(parents), children_of(parents)
    state, index = sampling_state(samples), jnp.arange(samples)
    depth = [0]
    for parent in parents:
        depth.append(depth[parent + 1] + 1)

    def one_round(text, length):
        noise, rows, laws = keys(state, length), [text[index, length - 1]] + [None] * nodes, []
        for row in range(nodes + 1):
            law = jnp.asarray(Q_TABLE, jnp.float32)[rows[row]]
            laws.append(law if children[row] else jnp.zeros_like(law))  # a leaf has none
            if not children[row]:
                continue
            draw = functools.partial(draw_children, count=len(children[row]), kind=kind)
            drawn = jax.vmap(lambda k, q, d=draw, r=row: d(sampling.noise_key(k, r, sampling.DRAFT), q))(
                noise.key, laws[row]
            )
            for place, node in enumerate(children[row]):
                rows[node + 1] = drawn[:, place].astype(jnp.int32)
        q = None if kind == "top" else DraftProbs(jnp.stack(laws, 1), without_replacement=kind == "without")
        draft = Draft(jnp.stack(rows[1:], 1), jnp.full(samples, nodes, jnp.int32), q)
        logits = jnp.log(jnp.asarray(P_TABLE, jnp.float32))[jnp.stack(rows, 1)]
        row_parents = jnp.broadcast_to(jnp.array(parents) + 1, (samples, nodes))
        depths = jnp.broadcast_to(jnp.asarray(depth), (samples, nodes + 1))
        is_chain = rule in CHAIN_RULES
        verdict = verify(rule, logits, draft, row_parents, depths, is_chain, length, noise, VOCAB)
        column = jnp.arange(nodes + 1)
        at = jnp.where(column <= verdict.num_accepted[:, None], length[:, None] + column, text.shape[1])
        # The path leads from parent to child, and its nodes hold the tokens that are emitted.
        parent = jnp.take_along_axis(row_parents, jnp.maximum(verdict.path[:, 1:] - 1, 0), axis=1)
        on = column[1:] <= verdict.num_accepted[:, None]
        fits = jnp.where(on, parent == verdict.path[:, :-1], True).all()
        held = jnp.take_along_axis(draft.tokens, jnp.maximum(verdict.path[:, 1:] - 1, 0), axis=1)
        fits &= jnp.where(on, held == verdict.tokens[:, :-1], True).all()
        text = text.at[index[:, None], at].set(verdict.tokens[:, : nodes + 1], mode="drop")
        return text, length + verdict.num_accepted + 1, fits

    compiled = jax.jit(one_round)
    text, length = jnp.zeros((samples, 1 + ROUNDS * (nodes + 1)), jnp.int32), jnp.ones(samples, jnp.int32)
    first = None
    for _ in range(ROUNDS):
        if in_sequence:
            text, length, fits = compiled(text, length)
        else:  # so many rows one after another take long
            with rows_side_by_side():
                text, length, fits = compiled(text, length)
        first = np.asarray(length) - 1 if first is None else first
        assert fits
    text = np.asarray(text)
    counts = np.bincount(text[:, 1] * VOCAB**2 + text[:, 2] * VOCAB + text[:, 3], minlength=VOCAB**3)
    return counts, first


LAW = np.array([P_TABLE[0, a] * P_TABLE[a, b] * P_TABLE[b, c] for a, b, c in itertools.product(range(VOCAB), repeat=3)])
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "rule, kind, parents",
    [
        pytest.param("standard", "with", chain(2), marks=SLOW),
        ("block", "with", chain(3)),
        ("recursive", "without", BINARY),
        pytest.param("recursive", "with", UNEVEN, marks=SLOW),
        pytest.param("recursive", "top", BINARY, marks=SLOW),
        ("traversal", "without", BINARY),
        pytest.param("traversal", "with", UNEVEN, marks=SLOW),
        pytest.param("traversal", "top", UNEVEN, marks=SLOW),
        ("kseq", "with", LEAF_FIRST),
        pytest.param("kseq", "with", UNEVEN, marks=SLOW),
    ],
    ids=str,
)
def test_the_law_over_three_rounds_is_the_target_s_and_the_first_is_as_long_as_it_should_be(rule, kind, parents):
    counts, first = rounds(rule, kind, parents)
    assert chi_square(counts, LAW) > P_LIMIT

    def behind(rows):
        return lambda prefix: tuple(rows[prefix[-1] if prefix else 0].tolist())

    want = expected_tokens(step(rule, parents, behind(P_TABLE), behind(Q_TABLE), kind))
    assert want > 1.2
    assert first.mean() == pytest.approx(want, abs=4 * first.std() / SAMPLES**0.5)


@SLOW
@pytest.mark.parametrize("rule, kind, parents", [("block", "with", chain(2)), ("traversal", "without", BINARY)])
def test_rows_in_sequence_have_the_law_too(rule, kind, parents):
    assert chi_square(rounds(rule, kind, parents, in_sequence=True)[0], LAW) > P_LIMIT


@SLOW
@pytest.mark.parametrize(
    "rule, kind, parents, samples",
    [
        ("block", "with", chain(2), 30_000),
        ("traversal", "without", SIBLINGS, 60_000),
        ("recursive", "without", SIBLINGS, 60_000),
        ("kseq", "with", SIBLINGS, 60_000),
    ],
    ids=str,
)
def test_power_noise_keyed_by_position_is_found(rule, kind, parents, samples):
    """Nodes as they stand in the tree, whatever the round."""
    counts, _ = rounds(rule, kind, parents, lambda state, length: state, samples)
    assert chi_square(counts, LAW) < P_LIMIT


def with_replacement(function, *arguments):
    return function(*arguments[:-1], False)


@SLOW
@pytest.mark.parametrize(
    "rule, name, kind, wrong",
    [
        ("recursive", "after_refusal", "without", functools.partial(with_replacement, recursive.after_refusal)),
        ("traversal", "after_deletion", "without", functools.partial(with_replacement, traversal.after_deletion)),
        ("kseq", "remainder", "with", lambda p, q, rho, beta, count: jnp.maximum(p - q, 0.0)),
    ],
    ids=["recursive", "traversal", "kseq"],
)
def test_power_siblings_judged_as_if_drawn_otherwise_are_found(rule, name, kind, wrong, monkeypatch):
    monkeypatch.setattr({"recursive": recursive, "traversal": traversal, "kseq": kseq}[rule], name, wrong)
    counts, _ = rounds(rule, kind, SIBLINGS, samples=60_000 if rule == "kseq" else SAMPLES)
    assert chi_square(counts, LAW) < P_LIMIT


@pytest.mark.parametrize("rule", ["recursive", "traversal", "coupled", "lossy_typical"])
def test_greedy_rows_follow_the_argmax(rule):
    parents = jnp.array([[1 + p for p in BINARY]])
    depth = jnp.array([[0, 1, 1, 2, 2, 2, 2]])
    logits = jnp.zeros((1, 7, 5)).at[0, jnp.arange(7), jnp.array([3, 0, 1, 2, 2, 4, 2])].set(2.0)
    draft = Draft(jnp.array([[0, 3, 1, 2, 0, 1]], jnp.int32), jnp.array([6], jnp.int32))
    state = sampling_state(1, temperature=0.0)
    options = (0.09, 0.3) if rule == "lossy_typical" else ()
    verdict = verify(rule, logits, draft, parents, depth, False, jnp.ones(1, jnp.int32), state, 5, options=options)
    assert int(verdict.num_accepted[0]) == 2
    assert verdict.tokens[0, :3].tolist() == [3, 1, 2] and verdict.path[0, :3].tolist() == [0, 2, 6]
    np.testing.assert_allclose(verdict.gaps[0, :3], 2.0)
