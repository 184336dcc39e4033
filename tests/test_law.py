"""The law of whole outputs under every rule, against the closed form of a Markov model.

Guards B04 (a draft judged by a law it was not drawn from), B08 and B26 (options applied to some tokens only).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from tiny import markov, packed, random_table, script

from spec_jax.drafting.base import BaseDrafter, Draft, DraftProbs
from spec_jax.generation import generate
from spec_jax.kernels import cpu
from spec_jax.sampling import noise_key
from spec_jax.sampling_params import SamplingParams

SAMPLES, BATCH, WIDTH = 20_000, 5_000, 4
VOCAB, FIRST = 5, 1
TARGET_TABLE, DRAFT_TABLE = random_table(VOCAB, seed=3), random_table(VOCAB, seed=4)


def processed(table, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The table after temperature, min_p, top_k and top_p, by sorting."""
    out = np.zeros_like(table)
    for row, p in enumerate(table):
        p = p ** (1 / temperature)
        p = np.where(p >= min_p * p.max(), p, 0)
        order = np.argsort(-p)
        if top_k:
            p[order[top_k:]] = 0
        if top_p < 1:
            mass = np.cumsum(p[order]) / p.sum()
            p[order[int(np.searchsorted(mass, top_p)) + 1 :]] = 0
        out[row] = p / p.sum()
    return out


def outputs_law(table):
    """Probability of every output of three tokens after `FIRST`."""
    return np.einsum("a,ab,bc->abc", table[FIRST], table, table).ravel()


def chi_square(sequences, law):
    cells = np.array([s.token_ids for s in sequences]) @ [VOCAB**2, VOCAB, 1]
    counts = np.bincount(cells, minlength=VOCAB**3)
    assert counts[law == 0].sum() == 0, "an output of probability zero was emitted"
    common = law * len(sequences) > 5
    observed = np.append(counts[common], counts[~common].sum())
    expected = np.append(law[common], law[~common].sum()) * len(sequences)
    keep = expected > 0
    return stats.chisquare(observed[keep], expected[keep] * observed.sum() / expected.sum()).pvalue


@functools.lru_cache
def models(is_packed=False):
    found = markov(TARGET_TABLE), markov(DRAFT_TABLE, pad_vocab=3)
    return tuple(map(packed, found)) if is_packed else found


def sample(config, options, prompt=(FIRST,), drafter=None, is_packed=False):
    params = SamplingParams(max_tokens=3, n=SAMPLES, seed=7, **options)
    target, _ = models(is_packed)
    # As narrow as three rows allow: the samples are many, and every row of a flight is computed.
    width = 8 if config and config.get("method") == "lookahead" else WIDTH
    options = {"verify_width": width, "max_batch_size": BATCH, "drafter": drafter}
    return generate(target, [list(prompt)], config, params, **options)


SLOW = pytest.mark.slow
MODEL = {"method": "draft_model", "model": None, "num_speculative_tokens": 2}
OPTIONS = [
    {"temperature": 0.7},
    {"temperature": 1.0},
    {"temperature": 1.5},
    {"temperature": 1.0, "top_k": 3},
    {"temperature": 1.5, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.2, "top_k": 4},
]


LOOKAHEAD = {"method": "lookahead", "lookahead_ngram_size": 3, "lookahead_window": 2, "lookahead_guesses": 2}
FROM_TEXT = ("ngram", "hybrid", "recycling", "recycling, traversal", "jacobi", "lookahead", "lookahead, traversal")
"""Drafters that know nothing but their prompt when a text of three tokens begins."""


def config_of(name, is_packed=False):
    _, draft = models(is_packed)
    return {
        "plain": None,
        "probabilistic": MODEL | {"model": draft, "draft_sample_method": "probabilistic"},
        "greedy drafts": MODEL | {"model": draft, "rejection_sample_method": "standard"},
        "block": MODEL | {"model": draft, "draft_sample_method": "probabilistic", "rejection_sample_method": "block"},
        "recursive": MODEL
        | {"model": draft, "draft_sample_method": "probabilistic", "rejection_sample_method": "recursive"},
        "block, greedy drafts": MODEL | {"model": draft, "rejection_sample_method": "block"},
        "coupled": MODEL | {"model": draft},
        "ngram": {"method": "ngram", "num_speculative_tokens": 2, "rejection_sample_method": "standard"},
        "unsure": MODEL
        | {"model": draft, "draft_sample_method": "probabilistic", "assistant_confidence_threshold": 0.4},
        "surviving": MODEL | {"model": draft, "draft_sample_method": "probabilistic", "draft_survival_threshold": 0.6},
        "hybrid": {
            "method": "hybrid",
            "hybrid_threshold": 0.3,
            "drafters": [
                {"method": "ngram", "num_speculative_tokens": 2},
                MODEL | {"model": draft, "draft_sample_method": "probabilistic"},
            ],
        },
        "recycling": {
            "method": "recycling",
            "speculative_token_tree": [[0], [1], [0, 0]],
            "rejection_sample_method": "recursive",
        },
        "recycling, traversal": {
            "method": "recycling",
            "speculative_token_tree": [[0], [1], [0, 0]],
            "rejection_sample_method": "traversal",
        },
        "jacobi": {"method": "jacobi", "num_speculative_tokens": 2, "rejection_sample_method": "standard"},
        "lookahead": LOOKAHEAD | {"rejection_sample_method": "recursive"},
        "lookahead, traversal": LOOKAHEAD | {"rejection_sample_method": "traversal"},
        "layer_skip": {
            "method": "layer_skip",
            "num_speculative_tokens": 2,
            "exit_layer": 1,
            "draft_sample_method": "probabilistic",
        },
    }[name]


@pytest.mark.parametrize(
    "name, options",
    [
        # OPTIONS[1] is in the test of the overlap.
        *(
            pytest.param("probabilistic", o, marks=() if o is OPTIONS[5] else SLOW)
            for o in OPTIONS
            if o is not OPTIONS[1]
        ),
        *(pytest.param("block", o, marks=SLOW) for o in OPTIONS),
        pytest.param("recursive", OPTIONS[5], marks=SLOW),
        pytest.param("unsure", OPTIONS[1], marks=SLOW),
        pytest.param("surviving", OPTIONS[2], marks=SLOW),
        pytest.param("coupled", OPTIONS[5], marks=SLOW),
        pytest.param("coupled", OPTIONS[0], marks=SLOW),
    ],
    ids=str,
)
def test_model_drafts_keep_the_law_under_every_option(name, options):
    result = sample(config_of(name), options)
    assert chi_square(result.sequences, outputs_law(processed(TARGET_TABLE, **options))) > 1e-4
    assert 0 < result.stats.draft_acceptance_rate < 1


@SLOW
@pytest.mark.skipif(cpu.unavailable() is not None, reason="needs the CPU kernels")
@pytest.mark.parametrize(
    "name, options",
    [
        ("plain", OPTIONS[4]),
        ("probabilistic", OPTIONS[5]),
        ("block", OPTIONS[4]),
        ("recursive", OPTIONS[3]),
        ("coupled", OPTIONS[5]),
    ],
    ids=str,
)
def test_packed_models_keep_the_law(name, options):
    """Their laws, filters and choices come from the CPU kernels."""
    result = sample(config_of(name, True), options, is_packed=True)
    assert chi_square(result.sequences, outputs_law(processed(TARGET_TABLE, **options))) > 1e-4


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=SLOW)
        for name in ("plain", "layer_skip", "greedy drafts", "block, greedy drafts", *FROM_TEXT)
    ],
)
def test_other_ways_of_drafting_keep_the_law(name):
    options = {"temperature": 1.0, "top_k": 4}
    prompt = (0, 2, FIRST, 3, 0, 4, FIRST) if name in FROM_TEXT else (FIRST,)
    result = sample(config_of(name), options, prompt)
    assert chi_square(result.sequences, outputs_law(processed(TARGET_TABLE, **options))) > 1e-4
    if name != "plain":
        assert result.stats.draft_acceptance_rate > 0
    if name == "layer_skip":  # all layers with the same processors: rule (i) accepts everything
        assert result.stats.draft_acceptance_rate > 0.9999


def test_acceptance_of_sampled_drafts_is_the_overlap_of_the_laws():
    """Accepting less than sum(min(p, q)) would still be lossless and would hide a broken drafter."""
    result = sample(config_of("probabilistic"), OPTIONS[1])
    assert chi_square(result.sequences, outputs_law(TARGET_TABLE)) > 1e-4
    accepted = sum(s.accepted[0] for s in result.sequences) / SAMPLES
    assert accepted == pytest.approx(np.minimum(TARGET_TABLE[FIRST], DRAFT_TABLE[FIRST]).sum(), abs=0.015)


@SLOW
def test_coupled_drafts_are_accepted_more_often_than_independent_ones():
    result = sample(config_of("coupled"), {"temperature": 1.0})
    accepted = sum(s.accepted[0] for s in result.sequences) / SAMPLES
    assert accepted > (TARGET_TABLE[FIRST] * DRAFT_TABLE[FIRST]).sum() + 0.05


@SLOW
def test_power_a_draft_drawn_from_another_law_than_q_is_found(monkeypatch):
    """The drafter's token is taken before top_k and its q after: the classic fault of B04."""
    from spec_jax import sampling
    from spec_jax.drafting import base

    def wrong(logits, positions, state, vocab_size, purpose, history):
        flat = state.replace(top_k=state.top_k * 0, temperature=state.temperature * 0 + 3.0)
        return sampling.choose_tokens(logits, positions, flat, vocab_size, purpose, history)

    fake = type("fake", (), {"choose_tokens": staticmethod(wrong)})
    for name in ("probabilities", "TARGET", "DRAFT"):
        setattr(fake, name, getattr(sampling, name))
    monkeypatch.setattr(base, "sampling_lib", fake)
    options = {"temperature": 0.7, "top_k": 4}
    config = config_of("probabilistic") | {"num_speculative_tokens": 1}  # a program of its own: nothing is reused
    result = sample(config, options)
    assert chi_square(result.sequences, outputs_law(processed(TARGET_TABLE, **options))) < 1e-4


def test_every_row_of_a_mixed_batch_has_its_own_law():
    """Greedy, sampled and default rows side by side, padded with a filler row: none changes another."""
    target, draft = models()
    config = MODEL | {"model": draft, "draft_sample_method": "probabilistic"}
    params = [SamplingParams(max_tokens=3), SamplingParams(max_tokens=3, temperature=0.7, n=SAMPLES, seed=7)]
    result = generate(target, [[FIRST], [FIRST]], config, params, WIDTH, max_batch_size=BATCH)
    greedy = [int(TARGET_TABLE[FIRST].argmax())]
    while len(greedy) < 3:
        greedy.append(int(TARGET_TABLE[greedy[-1]].argmax()))
    assert result.sequences[0].token_ids == greedy
    assert chi_square(result.sequences[1:], outputs_law(processed(TARGET_TABLE, temperature=0.7))) > 1e-4


@SLOW
def test_script_accepts_by_the_target_probability_under_standard():
    """A fixed proposal is a point mass: it is kept with the target's probability of it, and refused otherwise."""
    proposal = int(np.argsort(TARGET_TABLE[FIRST])[-2])
    drafter = script([[FIRST, proposal, 0, 0]] * BATCH, 1, vocab=VOCAB, size=16)
    result = sample({"rejection_sample_method": "standard"}, {"temperature": 1.0}, drafter=drafter)
    accepted = sum(s.accepted[0] for s in result.sequences) / SAMPLES
    assert accepted == pytest.approx(TARGET_TABLE[FIRST, proposal], abs=0.015)
    assert chi_square(result.sequences, outputs_law(TARGET_TABLE)) > 1e-4


@dataclasses.dataclass(frozen=True)
class PaddedDrafter(BaseDrafter):
    """Samples from a law that puts half of its mass on an id outside the target's vocabulary."""

    num_nodes: int = 2

    def propose(self, params, state, view):
        batch = view.length.shape[0]
        coin = jax.vmap(lambda key, at: jax.random.uniform(noise_key(key, at, 99), (2,)))(
            view.sampling.key, view.length
        )
        tokens = jnp.where(coin < 0.5, VOCAB + 1, 2)
        probs = jnp.broadcast_to(jnp.zeros(VOCAB + 3).at[jnp.array([2, VOCAB + 1])].set(0.5), (batch, 2, VOCAB + 3))
        return Draft(tokens, jnp.full(batch, 2, jnp.int32), DraftProbs(probs)), state


@SLOW
def test_a_draft_outside_the_vocabulary_is_refused_by_the_rule_not_dropped():
    """Dropping it would draw the next token from p where the rule wants the residual."""
    target = markov(TARGET_TABLE, pad_vocab=3)
    params = SamplingParams(max_tokens=3, n=SAMPLES, seed=7, temperature=1.0)
    drafter = (PaddedDrafter(), ())
    config = {"rejection_sample_method": "standard"}
    result = generate(target, [[FIRST]], config, params, WIDTH, max_batch_size=BATCH, drafter=drafter)
    assert max(max(s.token_ids) for s in result.sequences) < VOCAB
    assert chi_square(result.sequences, outputs_law(TARGET_TABLE)) > 1e-4
    assert result.stats.num_accepted_tokens > 0
