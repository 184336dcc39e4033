"""Verification rules: exact laws by enumeration, the law of the compiled rule by sampling, and noise across rounds.

Every statistical test comes with a power check: a deliberately wrong sampler must fail it.
"""

import functools
import itertools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from spec_jax.drafting.base import Draft, DraftProbs
from spec_jax.sampling import SamplingState
from spec_jax.verify import acceptance_probability, residual, verify

GOLDEN = json.loads((pathlib.Path(__file__).parent / "goldens" / "verification.json").read_text())
P_LIMIT = 1e-4


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


@functools.partial(jax.jit, static_argnums=(0, 5))
def run_rule(rule, logits, draft, sampling, length, vocab):
    nodes = draft.tokens.shape[1]
    parents = jnp.broadcast_to(jnp.arange(nodes), draft.tokens.shape)
    depth = jnp.broadcast_to(jnp.arange(nodes + 1), logits.shape[:2])
    return verify(rule, logits, draft, parents, depth, True, length, sampling, vocab)


def chi_square(counts, law):
    """p-value of observed counts under a law; cells of the law below 1e-12 must be empty."""
    counts, law = np.asarray(counts, float).ravel(), np.asarray(law, float).ravel()
    assert counts[law < 1e-12].sum() == 0, "a token of probability zero was emitted"
    keep = law >= 1e-12
    return stats.chisquare(counts[keep], law[keep] / law[keep].sum() * counts.sum()).pvalue


# --- the exact law, by enumeration ----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", GOLDEN["multi_draft"], ids=str)
def test_single_draft_acceptance_and_residual_are_the_golden_values(case):
    p, q = np.array(case["p"], np.float64), np.array(case["q"], np.float64)
    with jax.enable_x64(True):
        accept = np.asarray(acceptance_probability(jnp.asarray(p), jnp.asarray(q)))
        rest = np.asarray(residual(jnp.asarray(p), jnp.asarray(q)))
    assert (q * accept).sum() == pytest.approx(case["single"], abs=1e-12)
    np.testing.assert_allclose(rest / rest.sum(), case["residual"], atol=1e-12)
    assert (p * q).sum() == pytest.approx(case["exact_match"], abs=1e-12)


def token_rule_law(p_of, q_of, vocab, k):
    """Law of the first k + 1 tokens and the expected run length of the token rule, enumerating drafts and coins."""
    law, expected = {}, 0.0

    def complete(prefix, mass):
        if len(prefix) == k + 1:
            law[prefix] = law.get(prefix, 0.0) + mass
            return
        for token, prob in enumerate(p_of(prefix)):
            if prob > 0:
                complete((*prefix, token), mass * prob)

    for drafts in itertools.product(range(vocab), repeat=k):
        alive = np.prod([q_of(drafts[:i])[drafts[i]] for i in range(k)])
        for i in range(k):
            p, q = p_of(drafts[:i]), q_of(drafts[:i])
            accept = float(acceptance_probability(p[drafts[i]], q[drafts[i]]))
            refused = alive * (1 - accept)
            if refused > 0:
                rest = np.asarray(residual(p, q))
                for token, prob in enumerate(rest / rest.sum()):
                    if prob > 0:
                        complete((*drafts[:i], token), refused * prob)
                expected += refused * (i + 1)
            alive *= accept
        if alive > 0:
            complete(drafts, alive)
            expected += alive * (k + 1)
    return law, expected


@pytest.mark.parametrize(
    "vocab, k, seed, truncated", [(2, 2, 1, False), (3, 3, 2, False), (4, 2, 3, True), (3, 2, 4, True)]
)
def test_enumerated_law_of_the_token_rule_is_the_target(vocab, k, seed, truncated):
    rng = np.random.default_rng(seed)

    def tables():
        rows = {}
        for n in range(k + 1):
            for prefix in itertools.product(range(vocab), repeat=n):
                row = rng.dirichlet(np.ones(vocab))
                if truncated:  # a top-k filter: zeros in p and in q, at different tokens
                    row[rng.integers(vocab)] = 0
                    row /= row.sum()
                rows[prefix] = row
        return rows

    with jax.enable_x64(True):
        p, q = tables(), tables()
        law, _ = token_rule_law(p.__getitem__, q.__getitem__, vocab, k)
    for sequence in itertools.product(range(vocab), repeat=k + 1):
        truth = np.prod([p[sequence[:i]][sequence[i]] for i in range(k + 1)])
        assert law.get(sequence, 0.0) == pytest.approx(truth, abs=1e-12)


@pytest.mark.parametrize("case", GOLDEN["iid_chain"], ids=lambda c: f"gamma{c['gamma']}")
def test_expected_run_length_of_the_token_rule(case):
    p, q = np.array([1 / 3, 2 / 3]), np.array([2 / 3, 1 / 3])
    with jax.enable_x64(True):
        _, expected = token_rule_law(lambda _: p, lambda _: q, 2, case["gamma"])
    assert expected == pytest.approx(case["token_E"], abs=1e-12)


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
    verdict = run_rule("standard", logits, draft, sampling_state(samples), length, vocab)
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


def test_a_drafter_equal_to_the_target_is_always_accepted():
    batch, k, vocab = 500, 3, 6
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(batch, k + 1, vocab)).astype(np.float32)
    probs = np.asarray(jax.nn.softmax(logits[:, :k]))
    tokens = (probs.cumsum(-1) < rng.random((batch, k, 1))).sum(-1).clip(0, vocab - 1)
    draft = Draft(jnp.asarray(tokens, jnp.int32), jnp.full(batch, k, jnp.int32), DraftProbs(jnp.asarray(probs)))
    verdict = run_rule("standard", jnp.asarray(logits), draft, sampling_state(batch), jnp.ones(batch, jnp.int32), vocab)
    # p and q come from two softmax evaluations, so a ratio may fall short of 1 by rounding, once in millions.
    assert float(verdict.num_accepted.mean()) > k - 0.01


def test_disjoint_supports_accept_nothing():
    batch = 200
    logits = jnp.broadcast_to(jnp.array([0.0, 0.0, -jnp.inf, -jnp.inf]), (batch, 2, 4))
    probs = jnp.broadcast_to(jnp.array([0.0, 0.0, 0.5, 0.5]), (batch, 1, 4))
    draft = Draft(jnp.full((batch, 1), 2, jnp.int32), jnp.ones(batch, jnp.int32), DraftProbs(probs))
    verdict = run_rule("standard", logits, draft, sampling_state(batch), jnp.ones(batch, jnp.int32), 4)
    assert int(verdict.num_accepted.max()) == 0
    assert set(np.asarray(verdict.tokens[:, 0]).tolist()) == {0, 1}


@pytest.mark.parametrize("rule", ["standard", "coupled"])
def test_greedy_rows_accept_exactly_the_argmax_and_ties_go_to_the_lowest_id(rule):
    logits = jnp.array([[[1.0, 3.0, 3.0], [5.0, 5.0, 0.0], [0.0, 2.0, 2.0]]] * 3)
    tokens = jnp.array([[1, 0], [2, 0], [1, 1]], jnp.int32)  # all right; refused at once; second refused
    draft = Draft(tokens, jnp.full(3, 2, jnp.int32))
    verdict = run_rule(rule, logits, draft, sampling_state(3, temperature=0.0), jnp.ones(3, jnp.int32), 3)
    assert verdict.num_accepted.tolist() == [2, 0, 1]
    assert verdict.tokens[0, :3].tolist() == [1, 0, 1]
    assert int(verdict.tokens[1, 0]) == 1
    assert verdict.tokens[2, :2].tolist() == [1, 0]
    assert float(verdict.gaps[0, 0]) == 0.0  # an exact tie is the nearest of near-ties


def test_padding_proposals_are_never_accepted():
    logits = jnp.zeros((1, 3, 4)).at[..., 1].set(9.0)
    draft = Draft(jnp.array([[1, 1]], jnp.int32), jnp.array([1], jnp.int32))
    for rule in ("standard", "coupled"):
        verdict = run_rule(rule, logits, draft, sampling_state(1, 0.0), jnp.ones(1, jnp.int32), 4)
        assert verdict.num_accepted.tolist() == [1]


def test_unknown_rules_and_trees_under_standard_are_refused():
    draft = Draft(jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32))
    arguments = (jnp.zeros((1, 2, 3)), draft, jnp.zeros((1, 1), jnp.int32), jnp.zeros((1, 2), jnp.int32))
    with pytest.raises(ValueError, match="'lenient'"):
        verify("lenient", *arguments, True, jnp.ones(1, jnp.int32), sampling_state(1), 3)
    with pytest.raises(ValueError, match="chains"):
        verify("standard", *arguments, False, jnp.ones(1, jnp.int32), sampling_state(1), 3)
