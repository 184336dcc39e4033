"""The contract, over drafters, rules, batch and options: what a drafter proposes changes nothing but the speed.

Under `coupled`, and under every rule at temperature 0, text, ids, reasons and log-probs are those of plain decoding,
bit for bit; the law under `standard` is in test_options_law.py. Guards B26, B27, B29 and B30, and B13, B25 in part.
"""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
import reference
import tiny

from spec_jax.generation import generate
from spec_jax.history import TokenHistory
from spec_jax.sampling_params import SamplingParams

K = 6
LENGTHS = (3, 9, 20)
BUDGET = 24
OFTEN, SOMETIMES = 6, 45
"""Tokens that the model likes to write."""


@functools.lru_cache
def model():
    return tiny.with_text(tiny.tiny())


@functools.lru_cache
def prompts():
    return tiny.prompts_of(model(), LENGTHS, seed=11)


KINDS = EVEN, TRIGGER, FIVE, LIMITED, ENDING = range(5)


def grammar(state, token):
    """Several automata in one function, so that all of them share one program. state: [kind, count, parameter].

    EVEN: OFTEN an even number of times in front of every SOMETIMES. TRIGGER: free until token 9, then even ids only.
    FIVE: odd ids, and nothing behind the fifth. LIMITED: free for `parameter` tokens, then odd ids, nothing behind the
    twelfth. ENDING: nothing behind `parameter` tokens.
    """
    kind, count, parameter = state
    ids, odd = jnp.arange(97), jnp.arange(97) % 2 == 1
    counted = count + (token >= 0)
    parity = jnp.where(token == OFTEN, 1 - count, jnp.where(token == SOMETIMES, 0, count))
    count = jnp.select([kind == EVEN, kind == TRIGGER], [parity, jnp.where(token == 9, 1, count)], counted)
    masks = [
        (ids != SOMETIMES) | (count == 0),
        (count == 0) | ~odd,
        odd & (count < 5),
        (count < parameter) | (odd & (count < 12)),
        (ids >= 0) & (count < parameter),
    ]
    return jnp.stack([kind, count, parameter]).astype(jnp.int32), jnp.stack(masks)[kind]


def with_grammar(kind, parameter=0):
    return {"mask_fn": grammar, "mask_state": np.array([kind, 0, parameter], np.int32)}


EVERYTHING = {
    "repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2, "logit_bias": {5: 1.5, OFTEN: -1.0},
    "bad_words": ["b", "gh", "a", "ak", "cgca"], "allowed_token_ids": [i for i in range(97) if i != 60],
    "min_tokens": 3, "stop_token_ids": [12, SOMETIMES], "logprobs": 3, **with_grammar(EVEN),
}  # fmt: skip
STOPS = ["agf", "iag", "gch.", "gdc"]
OPTIONS = {
    "none": {},
    "logit_bias up": {"logit_bias": {17: 100.0}},
    "logit_bias": {"logit_bias": {OFTEN: -100.0, SOMETIMES: float("-inf"), 3: 4.5}},
    "allowed_token_ids": {"allowed_token_ids": [1, 4, 9, 30, OFTEN]},
    "bad_words": {"bad_words": ["a", "kd", "d", "cgca", "chcg"]},
    "min_tokens": {"min_tokens": 9, "stop_token_ids": [OFTEN, SOMETIMES, 7]},
    "min_tokens with stop": {"min_tokens": 5, "stop": ["a", "b", "c", "d", "e", "i"]},
    "stop": {"stop": STOPS},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "presence_penalty": {"presence_penalty": 0.8},
    "frequency_penalty": {"frequency_penalty": 0.5},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": -0.8, "frequency_penalty": 0.5},
    "mask_fn": with_grammar(EVEN),
    "mask_fn with trigger": {**with_grammar(TRIGGER), "logit_bias": {9: 5.0}},
    "mask_fn that ends": with_grammar(FIVE),
    "logprobs": {"logprobs": 3},
    "everything": EVERYTHING,
}
SAMPLED = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.001, "seed": 5}
# A row that uses everything makes every call of one layout, and so of one program: options are values, not programs.
FILLER = {**EVERYTHING, "stop": ["x"], "min_tokens": 1, "max_tokens": 1}


def run(options, temperature, config=None, drafter=None, rule=None):
    sampled = SAMPLED if temperature else {"temperature": 0.0}
    rows = [{**sampled, "max_tokens": BUDGET, "logprobs": 2, **options, "seed": 5 + i} for i in range(3)]
    if drafter is not None and rule:
        config = {"rejection_sample_method": rule}
    elif rule and config:
        config = {**config, "rejection_sample_method": rule}
    return generate(model(), [*prompts(), [1]], config, [*rows, FILLER], drafter=drafter, exact=True)


@functools.lru_cache
def plain(name, temperature):
    return run(OPTIONS[name], temperature).sequences[:3]


NGRAM = {"method": "ngram", "num_speculative_tokens": K}
NEAR = {"method": "draft_model", "num_speculative_tokens": 4}
SUFFIX = {"num_speculative_tokens": K, "suffix_decoding_max_spec_factor": 3.0}


@functools.lru_cache
def history():
    """What is written without options, as texts to copy from."""
    return TokenHistory([s.token_ids for temperature in (0, 1) for s in plain("none", temperature)])


def texts(name, temperature):
    return [p + s.token_ids for p, s in zip(prompts(), plain(name, temperature), strict=True)] + [[1]]


def drafters(name, text):
    """(config, drafter) of one entry."""
    wrong = [n + offset for n in LENGTHS for offset in (2, 3, 9, 17)]
    if name == "tree":
        return None, (tiny.TreeDrafter(), tiny.script(text, K)[1])
    if name in ("oracle", "script", "anti"):
        return None, tiny.script(text, K, {"oracle": (), "script": wrong, "anti": "all"}[name])
    return {
        "ngram": {"method": "ngram", "num_speculative_tokens": K},
        "suffix": {"method": "suffix", **SUFFIX},
        "suffix_tree": {"method": "suffix", "suffix_decoding_use_tree": True, "history": history(), **SUFFIX},
        "sam": {"method": "sam", "num_speculative_tokens": K, "sam_min_match": 1, "history": history()},
        "rest": {"method": "rest", "num_speculative_tokens": K, "datastore": history()},
        "recorded": {"method": "oracle", "num_speculative_tokens": K, "oracle_texts": text, "oracle_acceptance": 0.7},
        "hybrid": {"method": "hybrid", "drafters": [NGRAM, {**NEAR, "model": tiny.perturbed(model(), 0.1)}]},
        "cascade": {"method": "cascade", "drafters": [NGRAM], "model": tiny.perturbed(model(), 0.1)},
        "unsure": {**NEAR, "model": tiny.perturbed(model(), 0.1), "assistant_confidence_threshold": 0.5},
        "layer_skip": {"method": "layer_skip", "num_speculative_tokens": K, "exit_layer": 1},
        "draft_model": {"method": "draft_model", "num_speculative_tokens": K, "model": tiny.perturbed(model(), 0.1)},
        "eagle2": {
            "method": "draft_model",
            "model": tiny.perturbed(model(), 0.1),
            "speculative_token_tree": "eagle2",
            "tree_depth": 3,
        },
        "recycling": {"method": "recycling", "num_speculative_tokens": 12},
        "jacobi": {"method": "jacobi", "num_speculative_tokens": K},
        "lookahead": {"method": "lookahead", "lookahead_ngram_size": 3, "lookahead_guesses": 3},
    }[name], None


DRAFTERS = [
    "oracle", "script", "anti", "tree", "ngram", "suffix", "suffix_tree", "sam", "rest", "recorded", "recycling",
    "jacobi", "lookahead", "hybrid", "cascade", "unsure", "layer_skip", "draft_model", "eagle2",
]  # fmt: skip
TREES = ("tree", "suffix_tree", "rest", "recycling", "lookahead", "eagle2")


def assert_equal(ours, theirs, what, exact=True):
    for a, b in zip(ours, theirs, strict=True):
        assert a.token_ids == b.token_ids, what
        assert (a.text, a.finish_reason, a.stop_reason) == (b.text, b.finish_reason, b.stop_reason), what
        if exact:
            assert a.logprobs == b.logprobs, what


@pytest.mark.parametrize("name", OPTIONS)
def test_plain_decoding_is_the_reference(name):
    """Also that the options bite: without them the text is another one."""
    for temperature in (0, 1):
        for prompt, row, seed in zip(prompts(), plain(name, temperature), (5, 6, 7), strict=True):
            sampled = SAMPLED if temperature else {}
            params = SamplingParams(**{**sampled, "max_tokens": BUDGET, **OPTIONS[name], "seed": seed})
            ids, text, reason, logprobs, closeness = reference.decode(model(), prompt, params)
            if closeness < reference.CLOSE:
                continue
            assert (row.token_ids, row.text, row.finish_reason) == (ids, text, reason)
            check_logprobs(row, logprobs)
        free = plain("none", temperature)
        changed = [a.token_ids != b.token_ids for a, b in zip(plain(name, temperature), free, strict=True)]
        assert any(changed) or name in ("none", "logprobs")


@pytest.mark.parametrize(
    "config", [None, pytest.param({"method": "ngram", "num_speculative_tokens": 3}, marks=pytest.mark.slow)]
)
def test_logprobs_0_gives_the_token_alone(config):
    params = {"max_tokens": 12, "logprobs": 0}
    alone, beside = (generate(model(), prompts(), config, params | {"logprobs": n}).sequences for n in (0, 1))
    for a, b in zip(alone, beside, strict=True):
        assert a.token_ids == b.token_ids
        assert a.logprobs == [{t: entry[t]} for t, entry in zip(b.token_ids, b.logprobs, strict=True)]


def check_logprobs(row, logprobs):
    """Every entry is the log-softmax of the raw logits at its position: of the token, and of the likeliest ids."""
    assert len(row.logprobs) == len(row.token_ids)
    for token, entry, truth in zip(row.token_ids, row.logprobs, logprobs, strict=True):
        assert next(iter(entry)) == token
        for other, found in entry.items():
            assert found.logprob == pytest.approx(truth[other], abs=2e-4)
            assert found.rank == 1 + (truth > truth[other]).sum()
        likely = np.argsort(-truth)[: len(entry) - (entry[token].rank > len(entry) - 1)]
        assert set(entry) == {token, *likely.tolist()}


HEAVY = pytest.mark.slow  # programs that take long to compile


@pytest.mark.parametrize("drafter", [*DRAFTERS[:4], *(pytest.param(d, marks=HEAVY) for d in DRAFTERS[4:])])
def test_coupled_text_is_that_of_plain_decoding_under_every_option(drafter):
    for temperature in (0, 1):
        for name in OPTIONS:
            config, pair = drafters(drafter, texts(name, temperature))
            result = run(OPTIONS[name], temperature, config, pair)
            assert_equal(
                result.sequences[:3],
                plain(name, temperature),
                (name, temperature),
                exact=drafter not in TREES,
            )
            rate = result.stats.draft_acceptance_rate
            if drafter == "oracle":
                # The script does not know where a text ends early.
                assert rate == 1 or (rate > 0.3 and any(s.finish_reason == "stop" for s in result.sequences[:3]))
            if drafter == "anti":
                assert rate < 0.02  # nothing but a chance hit behind the end of the script
            if drafter == "eagle2":
                assert rate > 0
            if name == "none" and drafter in ("recycling", "jacobi", "lookahead") and temperature == 0:
                assert rate > 0
            if name == "none" and drafter in ("suffix_tree", "sam", "rest", "recorded"):
                assert result.stats.num_accepted_tokens > 40  # of 72: they know the text
            if drafter in ("script", "tree") and name not in ("stop", "mask_fn that ends", "min_tokens with stop"):
                assert 0.2 < rate < 1


@HEAVY
@pytest.mark.parametrize("drafter", ["script", "ngram", "layer_skip", "draft_model"])
def test_standard_is_greedy_at_temperature_zero_under_every_option(drafter):
    for name in OPTIONS:
        config, pair = drafters(drafter, texts(name, 0))
        if drafter in ("layer_skip", "draft_model"):
            config["draft_sample_method"] = "probabilistic"
        result = run(OPTIONS[name], 0, config, pair, "standard")
        assert_equal(result.sequences[:3], plain(name, 0), name)


def test_drafts_that_the_options_forbid_are_never_written():
    """B26: a script that knows nothing of the options proposes the text without them, banned ids and all."""
    for temperature in (0, 1):
        free = tiny.script(texts("none", temperature), K)
        for name in OPTIONS:
            result = run(OPTIONS[name], temperature, drafter=free)
            assert_equal(result.sequences[:3], plain(name, temperature), (name, temperature))


@pytest.mark.parametrize("minimum", range(K + 3))
def test_the_end_token_may_come_exactly_behind_the_minimum(minimum):
    """B27: an end token that is always the likeliest, at every offset of an accepted run."""
    options = {"min_tokens": minimum, "stop_token_ids": [33, 34], "logit_bias": {33: 100.0}}
    want = run(options, 0).sequences[:3]
    assert [len(s.token_ids) for s in want] == [minimum + 1] * 3
    assert all(s.token_ids[-1] == 33 and not {33, 34} & set(s.token_ids[:-1]) for s in want)
    right = [p + s.token_ids for p, s in zip(prompts(), want, strict=True)] + [[1]]
    eager = [p + [33] * BUDGET for p in prompts()] + [[1]]
    for text in (right, eager):
        assert_equal(run(options, 0, drafter=tiny.script(text, K)).sequences[:3], want, minimum)


def test_a_stop_string_that_begins_in_the_prompt_does_not_stop():
    target = model()
    prompt = prompts()[1]
    free = generate(target, [prompt], None, {"max_tokens": 8}).sequences[0]
    tail = target.tokenizer.decode(prompt)[-1]
    stop = tail + free.text[:2]
    assert stop not in free.text
    assert generate(target, [prompt], None, {"max_tokens": 8, "stop": [stop]}).sequences[0].text == free.text


def test_equally_likely_tokens_share_a_rank():
    target = tiny.tiny()
    head = target.params["lm_head"]
    tied = dataclasses.replace(target, params={**target.params, "lm_head": jnp.repeat(head[::3], 3, axis=0)[:97]})
    result = generate(tied, [[5, 6]], None, {"max_tokens": 8, "logprobs": 4})
    for entry in result.sequences[0].logprobs:
        values = list(entry.values())
        assert len({v.rank for v in values if v.logprob == values[0].logprob}) == 1 == values[0].rank
        assert sum(v.logprob == values[0].logprob for v in values) == 3


@HEAVY
@pytest.mark.parametrize("k", [1, 3])
def test_penalties_count_the_drafts_in_flight_whatever_their_number(k):
    """B27: runs that repeat a token inside one run, at other draft lengths than the rest of this file."""
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty", "penalties"):
        for text in (texts(name, 0), texts("none", 0)):
            result = run(OPTIONS[name], 0, drafter=tiny.script(text, k))
            assert_equal(result.sequences[:3], plain(name, 0), (name, k))


@HEAVY
def test_the_drafter_knows_the_options():
    """The same model as drafter proposes what the target will choose, processors and all: every draft is kept."""
    config = {"method": "draft_model", "num_speculative_tokens": K, "model": model()}
    for name in ("penalties", "bad_words", "mask_fn", "logit_bias", "everything"):
        for temperature in (0, 1):
            result = run(OPTIONS[name], temperature, config)
            # Drafts behind a stop token are neither accepted nor refused.
            rates = {s.stats.draft_acceptance_rate for s in result.sequences[:3] if s.finish_reason == "length"}
            assert rates == {1.0}, (name, temperature)


@HEAVY
def test_a_drafted_tree_knows_the_options_and_the_noise_behind_every_node():
    """All layers of the target draft what it will choose: the first branch is kept to its end in every step."""
    paths = [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]
    config = {"method": "layer_skip", "exit_layer": 2, "speculative_token_tree": paths}
    for name in ("none", "penalties", "bad_words", "mask_fn", "logit_bias", "everything"):
        for temperature in (0, 1):
            result = run(OPTIONS[name], temperature, config)
            full = [s.stats for s in result.sequences[:3] if s.finish_reason == "length"]
            assert {(s.num_drafts, s.num_accepted_tokens) for s in full} == {(BUDGET // 4, BUDGET // 4 * 3)}


@pytest.mark.parametrize("trigger", range(K + 2))
def test_a_grammar_that_starts_or_ends_anywhere_in_a_run(trigger):
    """B29: the trigger token at each offset of an accepted run, and the end of the grammar at each offset."""

    free = texts("none", 0)
    for kind, count in ((LIMITED, 12), (ENDING, trigger)):
        options = with_grammar(kind, trigger)
        want = run(options, 0).sequences[:3]
        assert [(len(s.token_ids), s.finish_reason) for s in want] == [(count, "stop")] * 3
        if kind == LIMITED:
            assert all(t % 2 for s in want for t in s.token_ids[trigger:])
        right = [p + s.token_ids for p, s in zip(prompts(), want, strict=True)] + [[1]]
        for text in (right, free):  # `free` proposes illegal tokens behind the trigger
            result = run(options, 0, drafter=tiny.script(text, K))
            assert_equal(result.sequences[:3], want, (trigger, count))
