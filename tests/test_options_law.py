"""The law of whole outputs under `standard` with options that depend on the text, against its enumeration.

The law of three tokens is the product of the reference's own next-token laws (reference.py) over all prefixes.
"""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
import reference
import tiny
from scipy import stats

from spec_jax.generation import generate
from spec_jax.sampling_params import SamplingParams

pytestmark = pytest.mark.slow  # each case compiles a program of its own

SAMPLES, BATCH, VOCAB, FIRST = 12_000, 4_000, 5, 1
TARGET_TABLE, DRAFT_TABLE = tiny.random_table(VOCAB, seed=3), tiny.random_table(VOCAB, seed=4)


class Letters:
    """Ids 0..4 are the letters a..e."""

    has_chat_template = False

    def encode(self, text, add_special_tokens=True):
        return ["abcde".index(c) for c in text.replace(" ", "")]

    def decode(self, ids):
        return "".join("abcde"[i] for i in ids)


@functools.lru_cache
def models():
    return dataclasses.replace(tiny.markov(TARGET_TABLE), tokenizer=Letters()), tiny.markov(DRAFT_TABLE)


def no_more_than_one_two(state, token):
    """The token 2 at most once."""
    state = (state + (token == 2)).astype(jnp.int32)
    return state, (jnp.arange(VOCAB) != 2) | (state < 1)


OPTIONS = {
    "penalties": {"repetition_penalty": 1.5, "presence_penalty": 0.7, "frequency_penalty": -0.4, "temperature": 0.8},
    "words and bias": {"bad_words": ["ab", "dd", "e"], "logit_bias": {3: 0.7}, "temperature": 1.3},
    "minimum and grammar": {
        "min_tokens": 2, "stop_token_ids": [0], "mask_fn": no_more_than_one_two, "temperature": 1.0, "top_k": 3,
    },
    "all": {
        "repetition_penalty": 1.2, "presence_penalty": 0.4, "bad_words": ["dd", "ea"], "logit_bias": {4: 0.5},
        "allowed_token_ids": [0, 2, 3, 4], "mask_fn": no_more_than_one_two, "temperature": 1.1, "min_p": 0.05,
    },
}  # fmt: skip


def law(options):
    """{output: probability} of every output of up to three tokens."""
    model, _ = models()
    params = SamplingParams(max_tokens=3, **options)
    stop_ids, words = reference.options_of(params, model, [FIRST])
    found = {}

    def walk(new, probability):
        if len(new) == 3 or (new and new[-1] in stop_ids):
            found[tuple(new)] = found.get(tuple(new), 0) + probability
            return
        mask = None
        if params.mask_fn:
            mask = np.arange(VOCAB) != 2 if 2 in new else np.ones(VOCAB, bool)
        raw = np.log(TARGET_TABLE[new[-1] if new else FIRST])
        x = reference.adjusted(raw, params, model, [FIRST], new, stop_ids, words, mask)
        x, _ = reference.filtered(x, params)
        p = np.exp(x - x.max()) / np.exp(x - x.max()).sum()
        for token in np.flatnonzero(p):
            walk([*new, int(token)], probability * p[token])

    walk([], 1.0)
    return found


def p_value(sequences, truth):
    counts = dict.fromkeys(truth, 0)
    for s in sequences:
        assert tuple(s.token_ids) in counts, f"{s.token_ids} has probability zero"
        counts[tuple(s.token_ids)] += 1
    expected = np.array(list(truth.values())) * SAMPLES
    observed = np.array(list(counts.values()))
    common = expected > 5
    observed = np.append(observed[common], observed[~common].sum())
    expected = np.append(expected[common], expected[~common].sum())
    keep = expected > 0
    return stats.chisquare(observed[keep], expected[keep] * observed.sum() / expected[keep].sum()).pvalue


METHODS = {
    "plain": None,
    "draft_model": {"method": "draft_model", "num_speculative_tokens": 2, "draft_sample_method": "probabilistic"},
    "greedy drafts": {"method": "draft_model", "num_speculative_tokens": 2, "rejection_sample_method": "standard"},
    "ngram": {"method": "ngram", "num_speculative_tokens": 2, "rejection_sample_method": "standard"},
}


def sample(method, options):
    target, draft = models()
    config = METHODS[method]
    if config and config["method"] == "draft_model":
        config = {**config, "model": draft}
    params = SamplingParams(max_tokens=3, n=SAMPLES, seed=3, **options)
    return generate(target, [[FIRST]], config, params, verify_width=4, max_batch_size=BATCH)


@pytest.mark.parametrize(
    "method, name",
    [
        ("draft_model", "all"),
        ("ngram", "penalties"),
        ("draft_model", "penalties"),
        ("draft_model", "words and bias"),
        ("draft_model", "minimum and grammar"),
        ("plain", "all"),
        ("greedy drafts", "all"),
    ],
)
def test_the_law_under_standard_is_the_targets_with_its_options(method, name):
    result = sample(method, OPTIONS[name])
    assert p_value(result.sequences, law(OPTIONS[name])) > 1e-4
    if method == "draft_model":
        assert 0.2 < result.stats.draft_acceptance_rate < 1


def test_power_an_option_that_counts_the_committed_tokens_only_is_found(monkeypatch):
    """B27: penalties that do not see the drafts in flight."""
    from spec_jax import decode

    def blind(processors, committed, flight, *rest):
        history = real(processors, committed, flight, *rest)
        return history.replace(path=jnp.full_like(history.path, -1))

    real = decode.read_flight
    monkeypatch.setattr(decode, "read_flight", blind)
    options = {**OPTIONS["penalties"], "top_p": 0.999}
    result = sample("greedy drafts", options)
    assert p_value(result.sequences, law(options)) < 1e-4
