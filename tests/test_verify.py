"""Verification rules, compiled: their law by sampling, noise across rounds, and what all of them share.

Every statistical test comes with a power check: a deliberately wrong sampler must fail it.
"""

import functools
import itertools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from spec_jax import rule_names
from spec_jax.drafting.base import Draft, DraftProbs
from spec_jax.kernels import cpu
from spec_jax.rules.base import acceptance_probability, residual
from spec_jax.sampling import SamplingState
from spec_jax.verify import CHAIN_RULES, TREE_RULES, verify
from spec_jax.verify import RULES as LAW_RULES

# Operation by operation they take longer to compile.
acceptance_probability, residual = jax.jit(acceptance_probability), jax.jit(residual)

P_LIMIT = 1e-4
needs_kernels = pytest.mark.skipif(cpu.unavailable() is not None, reason="needs the CPU kernels")
LOSSLESS = [name for name in LAW_RULES if not name.startswith("lossy_")]


def sampling_state(batch, temperature=1.0, seeds=None):
    seeds = np.arange(batch) if seeds is None else seeds
    return SamplingState(
        temperature=jnp.full(batch, temperature, jnp.float32),
        top_k=jnp.zeros(batch, jnp.int32),
        top_p=jnp.ones(batch, jnp.float32),
        min_p=jnp.zeros(batch, jnp.float32),
        key=jax.vmap(jax.random.key)(jnp.asarray(seeds)),
        stop_ids=jnp.full((batch, 1), -1, jnp.int32),
    )


@functools.partial(jax.jit, static_argnums=(0, 5, 6))
def run_rule(rule, logits, draft, sampling, length, vocab, options=()):
    nodes = draft.tokens.shape[1]
    parents = jnp.broadcast_to(jnp.arange(nodes), draft.tokens.shape)
    depth = jnp.broadcast_to(jnp.arange(nodes + 1), logits.shape[:2])
    return verify(rule, logits, draft, parents, depth, True, length, sampling, vocab, options=options)


def rows_side_by_side():
    """Trace as for an accelerator, whose way through `rows.over_rows` is another."""
    return mock.patch.object(jax.lax, "platform_dependent", lambda *x, cpu, default: default(*x))


def run_side_by_side(*arguments):
    """`run_rule` in rows side by side; a function of its own, since a trace is kept with its function."""
    rule, logits, draft, sampling, length, vocab = arguments
    with rows_side_by_side():
        return jax.jit(lambda *x: run_rule.__wrapped__(rule, *x, vocab))(logits, draft, sampling, length)


def chi_square(counts, law):
    """p-value of observed counts under a law; cells of the law below 1e-12 must be empty."""
    counts, law = np.asarray(counts, float).ravel(), np.asarray(law, float).ravel()
    assert counts[law < 1e-12].sum() == 0, "a token of probability zero was emitted"
    keep = law >= 1e-12
    return stats.chisquare(counts[keep], law[keep] / law[keep].sum() * counts.sum()).pvalue


def test_edges_of_acceptance():
    p, q = jnp.array([0.0, 0.5, 0.3]), jnp.array([0.4, 0.0, 0.3])
    np.testing.assert_array_equal(np.asarray(acceptance_probability(p, q)), [0.0, 1.0, 1.0])
    np.testing.assert_array_equal(np.asarray(residual(p, p)), np.asarray(p))  # nothing left: the target itself


# --- the compiled rule, by sampling ---------------------------------------------------------------------------------

SAMPLES = 200_000
P_TARGET = np.array([0.45, 0.25, 0.2, 0.1, 0.0])
Q_DRAFT = np.array([0.1, 0.3, 0.05, 0.25, 0.3])


@functools.lru_cache
def first_token_counts(kind, wrong=None):
    """Counts of the first emitted token over many rows with K = 1, for a way of drafting and an injected fault."""
    samples = SAMPLES if wrong is None else SAMPLES // 5
    rng = np.random.default_rng(7)
    vocab = len(P_TARGET)
    sampled = rng.choice(vocab, size=samples, p=Q_DRAFT)
    fixed = np.full(samples, 1)
    mixed = rng.random(samples) < 0.5
    tokens = {"dense": sampled, "sparse": sampled, "one_hot": fixed, "mixed": np.where(mixed, fixed, sampled)}[kind]
    q = Q_DRAFT if wrong != "q before temperature" else (Q_DRAFT**0.5 / (Q_DRAFT**0.5).sum())
    probs = jnp.broadcast_to(jnp.asarray(q, jnp.float32), (samples, 1, vocab))
    law = {
        "dense": DraftProbs(probs),
        "sparse": DraftProbs(probs[..., ::-1], jnp.broadcast_to(jnp.arange(vocab)[::-1], probs.shape)),
        "one_hot": None if wrong is None else DraftProbs(probs),
        "mixed": DraftProbs(probs, one_hot=jnp.asarray(mixed)[:, None] if wrong is None else None),
    }[kind]
    draft = Draft(jnp.asarray(tokens, jnp.int32)[:, None], jnp.ones(samples, jnp.int32), law)
    logits = jnp.broadcast_to(jnp.log(jnp.asarray(P_TARGET, jnp.float32)), (samples, 2, vocab))
    length = jnp.full(samples, 5, jnp.int32)
    # So many rows one after another take long.
    verdict = run_side_by_side("standard", logits, draft, sampling_state(samples), length, vocab)
    return np.bincount(np.asarray(verdict.tokens[:, 0]), minlength=vocab), float(verdict.num_accepted.mean())


@pytest.mark.parametrize("kind", ["dense", "sparse", "one_hot", "mixed"])
def test_law_of_the_first_token_is_the_targets(kind):
    counts, accepted = first_token_counts(kind)
    assert chi_square(counts, P_TARGET) > P_LIMIT
    overlap = np.minimum(P_TARGET, Q_DRAFT).sum()
    expected = {"dense": overlap, "sparse": overlap, "one_hot": P_TARGET[1], "mixed": (overlap + P_TARGET[1]) / 2}[kind]
    assert accepted == pytest.approx(expected, abs=0.006)


@pytest.mark.parametrize(
    "kind, fault", [("dense", "q before temperature"), ("one_hot", "soft q"), ("mixed", "flag lost")]
)
def test_power_a_wrong_draft_law_is_found(kind, fault):
    counts, _ = first_token_counts(kind, fault)
    assert chi_square(counts, P_TARGET) < P_LIMIT


@functools.lru_cache
def three_rounds(rule, reuse=None, samples=20_000, rounds=3, k=2):
    """Counts of the first three tokens when `rounds` steps of a first-order chain follow each other, and its law.

    `reuse` keys the noise of every round by the same position, as a broken implementation would.
    """
    vocab = 3
    rng = np.random.default_rng(11)
    p_table, q_table = rng.dirichlet(np.ones(vocab), vocab), rng.dirichlet(np.ones(vocab), vocab)
    sampling = sampling_state(samples)
    text = np.zeros((samples, 1 + rounds * (k + 1)), np.int64)
    length = np.ones(samples, np.int64)

    def step(logits, tokens, probs, at):
        draft = Draft(tokens, jnp.full(samples, k, jnp.int32), DraftProbs(probs))
        return run_rule(rule, logits, draft, sampling, at, vocab)

    for _ in range(rounds):
        last = text[np.arange(samples), length - 1]
        drafts, probs, states = np.zeros((samples, k), np.int64), np.zeros((samples, k, vocab)), [last]
        for i in range(k):
            probs[:, i] = q_table[states[-1]]
            drafts[:, i] = (probs[:, i].cumsum(1) < rng.random(samples)[:, None]).sum(1).clip(0, vocab - 1)
            states.append(drafts[:, i])
        logits = np.log(p_table[np.stack(states, axis=1)])
        at = np.full(samples, 1) if reuse else length
        verdict = step(
            jnp.asarray(logits, jnp.float32),
            jnp.asarray(drafts, jnp.int32),
            jnp.asarray(probs, jnp.float32),
            jnp.asarray(at, jnp.int32),
        )
        emitted, n = np.asarray(verdict.tokens), np.asarray(verdict.num_accepted)
        for i in range(k + 1):
            rows = n >= i
            text[rows, length[rows] + i] = emitted[rows, i]
        length = length + n + 1
    assert (length >= 4).all()
    cells = text[:, 1] * vocab**2 + text[:, 2] * vocab + text[:, 3]
    law = [p_table[0, a] * p_table[a, b] * p_table[b, c] for a, b, c in itertools.product(range(vocab), repeat=3)]
    return np.bincount(cells, minlength=vocab**3), np.array(law)


@pytest.mark.parametrize("rule", ["standard", "coupled"])
def test_law_over_three_rounds_is_the_targets(rule):
    assert chi_square(*three_rounds(rule)) > P_LIMIT


@pytest.mark.parametrize("rule", ["standard", "coupled"])
def test_power_noise_reused_in_a_later_round_is_found(rule):
    assert chi_square(*three_rounds(rule, reuse=True)) < P_LIMIT


@pytest.mark.parametrize("rule", LOSSLESS)
def test_a_drafter_equal_to_the_target_is_always_accepted(rule):
    batch, k, vocab = 500, 3, 6
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(batch, k + 1, vocab)).astype(np.float32)
    probs = np.asarray(jax.nn.softmax(logits[:, :k]))
    tokens = (probs.cumsum(-1) < rng.random((batch, k, 1))).sum(-1).clip(0, vocab - 1)
    draft = Draft(jnp.asarray(tokens, jnp.int32), jnp.full(batch, k, jnp.int32), DraftProbs(jnp.asarray(probs)))
    verdict = run_rule(rule, jnp.asarray(logits), draft, sampling_state(batch), jnp.ones(batch, jnp.int32), vocab)
    # p and q come from two softmax evaluations, so a ratio may fall short of 1 by rounding, once in millions.
    assert float(verdict.num_accepted.mean()) > k - 0.01


@pytest.mark.parametrize("rule", LOSSLESS)
def test_disjoint_supports_accept_nothing(rule):
    batch = 200
    logits = jnp.broadcast_to(jnp.array([0.0, 0.0, -jnp.inf, -jnp.inf]), (batch, 2, 4))
    probs = jnp.broadcast_to(jnp.array([0.0, 0.0, 0.5, 0.5]), (batch, 1, 4))
    draft = Draft(jnp.full((batch, 1), 2, jnp.int32), jnp.ones(batch, jnp.int32), DraftProbs(probs))
    verdict = run_rule(rule, logits, draft, sampling_state(batch), jnp.ones(batch, jnp.int32), 4)
    assert int(verdict.num_accepted.max()) == 0
    assert set(np.asarray(verdict.tokens[:, 0]).tolist()) == {0, 1}


@pytest.mark.parametrize("rule", ["coupled", *LOSSLESS, "lossy_typical"])
def test_greedy_rows_accept_exactly_the_argmax_and_ties_go_to_the_lowest_id(rule):
    logits = jnp.array([[[1.0, 3.0, 3.0], [5.0, 5.0, 0.0], [0.0, 2.0, 2.0]]] * 3)
    tokens = jnp.array([[1, 0], [2, 0], [1, 1]], jnp.int32)  # all right; refused at once; second refused
    # K-SEQ judges draws only, and a certain one is what a deterministic proposal is.
    q = DraftProbs(jax.nn.one_hot(tokens, 3)) if rule == "kseq" else None
    draft, options = Draft(tokens, jnp.full(3, 2, jnp.int32), q), (0.09, 0.3) if rule == "lossy_typical" else ()
    state = sampling_state(3, temperature=0.0)
    verdict = run_rule(rule, logits, draft, state, jnp.ones(3, jnp.int32), 3, options)
    assert verdict.num_accepted.tolist() == [2, 0, 1]
    assert verdict.tokens[0, :3].tolist() == [1, 0, 1]
    assert int(verdict.tokens[1, 0]) == 1
    assert verdict.tokens[2, :2].tolist() == [1, 0]
    assert float(verdict.gaps[0, 0]) == 0.0  # an exact tie is the nearest of near-ties


@pytest.mark.parametrize("rule", ["coupled", *LOSSLESS])
def test_padding_proposals_are_never_accepted(rule):
    logits = jnp.zeros((1, 3, 4)).at[..., 1].set(9.0)
    tokens = jnp.array([[1, 1]], jnp.int32)
    draft = Draft(tokens, jnp.array([1], jnp.int32), DraftProbs(jax.nn.one_hot(tokens, 4)) if rule == "kseq" else None)
    verdict = run_rule(rule, logits, draft, sampling_state(1, 0.0), jnp.ones(1, jnp.int32), 4)
    assert verdict.num_accepted.tolist() == [1]


def test_unknown_rules_and_trees_under_rules_of_chains_are_refused():
    draft = Draft(jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32))
    arguments = (jnp.zeros((1, 2, 3)), draft, jnp.zeros((1, 1), jnp.int32), jnp.zeros((1, 2), jnp.int32))
    with pytest.raises(ValueError, match="'lenient'"):
        verify("lenient", *arguments, True, jnp.ones(1, jnp.int32), sampling_state(1), 3)
    for rule in CHAIN_RULES:
        with pytest.raises(ValueError, match=f"'{rule}' verifies chains"):
            verify(rule, *arguments, False, jnp.ones(1, jnp.int32), sampling_state(1), 3)
    with pytest.raises(ValueError, match="'kseq' judges siblings that were drawn independently"):
        verify("kseq", *arguments, True, jnp.ones(1, jnp.int32), sampling_state(1), 3)


def test_the_configuration_knows_the_rules():
    """It names them itself, so that reading a configuration loads no backend."""
    assert sorted(rule_names.RULES) == sorted((*CHAIN_RULES, *TREE_RULES))
    assert rule_names.RULES[1:] == tuple(LAW_RULES)
    assert rule_names.CHAIN_RULES == CHAIN_RULES


@pytest.mark.parametrize("temperatures", [(0.0, 0.0, 0.0), (0.0, 1.0, 0.7), (1.0, 0.5, 2.0)], ids=str)
@pytest.mark.parametrize("rule", ["coupled", *LOSSLESS])
@pytest.mark.parametrize("how", ["side by side", pytest.param("kernels", marks=needs_kernels)])  # all in one program
def test_other_ways_choose_what_rows_in_sequence_choose(how, rule, temperatures):
    """Accelerators take the other way through `rows.over_rows`, and CPU kernels may choose; no row's filters or noise
    may leak into another."""
    batch, nodes, vocab = 3, 3, 200
    rng = np.random.default_rng(1)
    logits = jnp.asarray(rng.normal(size=(batch, nodes + 1, vocab)) * 3, jnp.float32).at[0, 1, 5].set(jnp.nan)
    best = jnp.argmax(logits[:, :nodes], axis=-1)
    q = DraftProbs(jax.nn.softmax(jnp.asarray(rng.normal(size=(batch, nodes, vocab)), jnp.float32)))
    draft = Draft(best.astype(jnp.int32), jnp.array([3, 2, 3], jnp.int32), q=q)
    state = sampling_state(batch).replace(
        temperature=jnp.asarray(temperatures, jnp.float32),
        top_k=jnp.array([0, 5, 0], jnp.int32),
        top_p=jnp.array([1.0, 1.0, 0.5], jnp.float32),
    )
    length = jnp.array([4, 9, 1], jnp.int32)
    want = run_rule(rule, logits, draft, state, length, vocab)
    if how == "kernels":
        got = run_rule(rule, logits, draft, state.with_kernels(True), length, vocab)
    else:
        got = run_side_by_side(rule, logits, draft, state, length, vocab)
    np.testing.assert_array_equal(got.num_accepted, want.num_accepted)
    used = np.arange(nodes + 1) <= np.asarray(want.num_accepted)[:, None]  # the rest is padding
    for name in ("tokens", "path"):
        np.testing.assert_array_equal(
            np.asarray(getattr(got, name))[used], np.asarray(getattr(want, name))[used], err_msg=name
        )
    np.testing.assert_allclose(np.asarray(got.gaps)[used], np.asarray(want.gaps)[used], rtol=1e-6, atol=1e-5)
