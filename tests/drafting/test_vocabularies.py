"""Draft models of another vocabulary: token by token over what both share, and by text in a loop on the host."""

import dataclasses
import functools
import gc
import weakref

import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from test_tokenizer import MERGES, SPECIAL, build, byte_alphabet

from spec_jax.config import SpeculativeConfig
from spec_jax.generation import generate
from spec_jax.vocabulary import kept_map, map_vocabulary

PROMPTS = ["the cat", "a", "12 3 the"]
SAMPLING = {"max_tokens": 24}
BUDGET = 24


@functools.lru_cache
def pair():
    """A target and a draft model that is the target with its ids shuffled: as ids they have nothing in common."""
    ours = build()
    words = byte_alphabet() + [merge.replace(" ", "") for merge in MERGES]
    shuffled = np.random.default_rng(1).permutation(len(words))
    tokens = SPECIAL + [words[i] for i in shuffled]
    theirs = build(tokens=tokens)
    model = tiny.tiny(vocab=ours.vocab_size, tie_embeddings=False)
    model = dataclasses.replace(model, tokenizer=ours, vocab_size=ours.vocab_size, eos_token_ids=(2,))
    at = np.concatenate([np.arange(3), 3 + shuffled])  # draft id -> target id
    params = dict(model.params)
    params["embedding"], params["lm_head"] = (jnp.asarray(np.asarray(params[n])[at]) for n in ("embedding", "lm_head"))
    return model, dataclasses.replace(model, params=params, tokenizer=theirs, name="shuffled"), at


def without(draft, count):
    """The draft model with a tokenizer that lacks the last tokens: they get other names."""
    tokens = [draft.tokenizer.id_to_token(i) for i in range(draft.vocab_size)]
    tokens[-count:] = [f"[{i}]" for i in range(count)]
    known = set(tokens)
    merges = [m for m in MERGES if {*m.split(), m.replace(" ", "")} <= known]
    return dataclasses.replace(draft, tokenizer=build(tokens=tokens, merges=merges))


def test_the_map_finds_tokens_by_their_bytes():
    model, draft, at = pair()
    table = map_vocabulary(model, draft, model.config.vocab_size)
    np.testing.assert_array_equal(np.asarray(table.shared)[at][3:], np.arange(3, len(at)))
    assert np.asarray(table.shared)[:2].tolist() == [-1, -1] and int(table.shared[2]) == 2  # the end stands for the end
    np.testing.assert_array_equal(np.asarray(table.feed)[at][3:], np.arange(3, len(at)))


@pytest.mark.parametrize(
    "more", [{}, pytest.param({"speculative_token_tree": [[0], [1], [0, 0]]}, marks=pytest.mark.slow)], ids=str
)
def test_the_same_model_under_other_ids_is_always_right(more):
    model, draft, _ = pair()
    plain = generate(model, PROMPTS, None, SAMPLING)
    config = {"method": "draft_model", "model": draft, "use_heterogeneous_vocab": True, **more}
    result = generate(model, PROMPTS, config, SAMPLING)
    assert [s.token_ids for s in result.sequences] == [s.token_ids for s in plain.sequences]
    assert result.stats.mean_acceptance_length > (2.4 if more else 4.0)  # of 3 and 5


@pytest.mark.slow
def test_the_law_holds_where_tokens_are_missing():
    """Sampled drafts of the shared tokens: q is zero elsewhere, and the text is still plain decoding's, greedily."""
    model, draft, _ = pair()
    lacking = without(draft, 60)
    plain = generate(model, PROMPTS, None, SAMPLING)
    for sample in ("greedy", "probabilistic"):
        config = {
            "method": "draft_model", "model": lacking, "use_heterogeneous_vocab": True, "draft_sample_method": sample,
        }  # fmt: skip
        result = generate(model, PROMPTS, config, SAMPLING)
        assert [s.token_ids for s in result.sequences] == [s.token_ids for s in plain.sequences]
        assert 0 < result.stats.num_accepted_tokens < BUDGET * 3
    shared = np.asarray(map_vocabulary(model, lacking, model.config.vocab_size).shared)
    assert (shared >= 0).sum() == model.vocab_size - 60 - 2


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.slow
def test_drafts_by_text_are_exact_and_say_that_they_are_slow(temperature):
    model, draft, _ = pair()
    sampling = {**SAMPLING, "temperature": temperature, "seed": 2}
    plain = generate(model, PROMPTS, None, sampling, exact=True)
    config = {"method": "draft_model", "model": draft, "use_heterogeneous_vocab": "text", "num_speculative_tokens": 4}
    result = generate(model, PROMPTS, config, sampling, max_batch_size=2, exact=True)
    assert [s.token_ids for s in result.sequences] == [s.token_ids for s in plain.sequences]
    assert result.stats.remark == "host loop: shuffled drafts text, one step of the target at a time"
    if not temperature:
        assert result.stats.num_accepted_tokens > 0


def test_bad_pairs_are_refused():
    model, draft, _ = pair()
    config = {"method": "draft_model", "model": draft}
    with pytest.raises(ValueError, match="use_heterogeneous_vocab"):
        generate(model, PROMPTS, config, SAMPLING)
    bare = dataclasses.replace(draft, tokenizer=None)
    for how in (True, "text"):
        with pytest.raises(ValueError, match="shuffled"):
            generate(model, PROMPTS, {**config, "model": bare, "use_heterogeneous_vocab": how}, SAMPLING)
    with pytest.raises(ValueError, match="shares 3.4% of its tokens"):
        generate(model, PROMPTS, {**config, "model": without(draft, 255), "use_heterogeneous_vocab": True}, SAMPLING)
    for bad, words in (("words", "must be True, False or 'text'"), ("text", "fixed length")):
        with pytest.raises(ValueError, match=words):
            SpeculativeConfig(**config, use_heterogeneous_vocab=bad, verify_width="auto")
    with pytest.raises(ValueError, match="belongs to method='draft_model'"):
        SpeculativeConfig(method="ngram", use_heterogeneous_vocab=True)


def test_a_kept_map_does_not_keep_its_models():
    model, draft, _ = pair()
    draft = dataclasses.replace(draft)
    assert kept_map(model, draft) is kept_map(model, draft)
    there = weakref.ref(draft)
    del draft
    gc.collect()
    assert there() is None
