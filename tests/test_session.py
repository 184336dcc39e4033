"""Sessions: the next turn starts from the cache and equals a fresh call on the whole text, bit for bit."""

import dataclasses
import functools
import gc
import itertools
import weakref

import numpy as np
import pytest
import tiny

from spec_jax import session as session_lib
from spec_jax.generation import generate

K = 4


@functools.lru_cache
def model():
    # The module of most other files, and so their programs; nothing in it depends on the context.
    return tiny.with_text(dataclasses.replace(tiny.tiny(), max_model_len=700))


@functools.lru_cache
def prompts():
    return tiny.prompts_of(model(), (1, 40, 7), seed=21)


def drafters(name, texts):
    own = {"method": "draft_model", "num_speculative_tokens": K, "model": tiny.perturbed(model(), 0.05)}
    return {
        "plain": {},
        "script": {"drafter": tiny.script(texts, K, size=700)},
        "ngram": {"speculative_config": {"method": "ngram", "num_speculative_tokens": K}},
        "layer_skip": {"speculative_config": {"method": "layer_skip", "num_speculative_tokens": K, "exit_layer": 1}},
        "draft_model": {"speculative_config": own},
        "recycling": {"speculative_config": {"method": "recycling", "num_speculative_tokens": 12}},
        "jacobi": {"speculative_config": {"method": "jacobi", "num_speculative_tokens": K}},
        "lookahead": {"speculative_config": {"method": "lookahead", "lookahead_ngram_size": 3}},
    }[name]


def fresh(token_ids, sampling):
    return generate(model(), token_ids, None, sampling, exact=True).sequences


def assert_same(ours, theirs, exact=True):
    for a, b in zip(ours, theirs, strict=True):
        assert (a.token_ids, a.text, a.finish_reason) == (b.token_ids, b.text, b.finish_reason)
        assert a.logprobs == b.logprobs or not exact


MORE = [[5, 9, 30], [8], [11] * 50]


NAMES = ["script", "draft_model", "plain", "ngram", "layer_skip", "recycling", "jacobi", "lookahead"]
TREES = ("recycling", "lookahead")
ENDINGS = ["budget", "stop", "string"]


def pairs():
    """Every drafter with every ending; the script, whose runs can be cut anywhere, in the fast tests."""
    for name, ending in itertools.product(NAMES, ENDINGS):
        yield pytest.param(name, ending, marks=() if name == "script" else pytest.mark.slow)


@pytest.mark.parametrize("name, ending", list(pairs()))
def test_a_continued_sequence_is_a_fresh_prefill_of_the_whole_text(name, ending):
    """The first turn ends anywhere in a run: by its budget, a stop token or a stop string; then two more turns."""
    free = fresh(prompts(), {"max_tokens": 24})
    texts = [p + s.token_ids for p, s in zip(prompts(), free, strict=True)]
    for cut in (1, 2, 3, 4, 5, 6) if name == "script" else (3, 5):
        first = {
            "budget": [{"max_tokens": cut}] * 3,
            "stop": [{"max_tokens": 24, "stop_token_ids": [s.token_ids[cut - 1]]} for s in free],
            "string": [
                {"max_tokens": 24, "stop": [c for c in s.text[cut - 1 : cut + 1] if c != "\ufffd"]} for s in free
            ],
        }[ending]
        result = generate(model(), prompts(), sampling=first, **drafters(name, texts))
        assert result.session.cached
        for turn, more in enumerate((MORE, [[], [3], [4, 4]])):
            whole = [ids + m for ids, m in zip(result.session.token_ids, more, strict=True)]
            lengths = [len(ids) for ids in result.session.token_ids]
            options = {"max_tokens": 9, "logprobs": 1, "temperature": 0.0 if turn else 0.9, "seed": 3}
            result = result.session.generate(more, options)
            assert_same(result.sequences, fresh(whole, options), exact=name not in TREES)
            # All but the last two tokens, which a drafter may not have seen.
            assert [s.stats.num_cached_tokens for s in result.sequences] == [max(n - 2, 0) for n in lengths]


@pytest.mark.slow
def test_the_drafter_is_as_good_behind_a_continuation_as_behind_a_prefill():
    """B32 across calls: with a hole in its cache an equal draft model would be refused."""
    config = {"method": "draft_model", "num_speculative_tokens": K, "model": model()}
    for cut in range(1, 8):
        result = generate(model(), prompts(), config, {"max_tokens": cut})
        again = result.session.generate(MORE, {"max_tokens": 20})
        assert again.stats.draft_acceptance_rate == 1
        assert again.stats.num_steps == 3 * 4


def test_a_session_can_be_continued_twice():
    first = generate(model(), prompts(), None, {"max_tokens": 5})
    ours = [first.session.generate(MORE, {"max_tokens": 6}) for _ in range(2)]
    assert_same(ours[0].sequences, ours[1].sequences)
    assert all(r.stats.num_cached_tokens for r in ours)


@pytest.mark.parametrize(
    "name", ["plain", *(pytest.param(n, marks=pytest.mark.slow) for n in NAMES if n not in ("script", "plain"))]
)
def test_a_conversation_that_outgrows_its_bucket_keeps_its_cache(name):
    options = {"max_tokens": 30}
    result = generate(model(), prompts(), sampling=options, **drafters(name, []))
    more = [tiny.prompts_of(model(), [500], seed=1)[0], [7], [8]]
    whole = [ids + m for ids, m in zip(result.session.token_ids, more, strict=True)]
    again = result.session.generate(more, options)
    assert_same(again.sequences, fresh(whole, options))
    assert again.stats.num_cached_tokens > 0


def test_text_that_was_changed_is_prefilled_from_where_it_differs():
    """A conversation is rendered anew, and may not begin with the very tokens of the cache."""
    target = tiny.model_of(model().module, model().params, tokenizer=Chat(), name="chat")
    talk = [{"role": "user", "content": "abcab"}]
    first = generate(target, [talk], None, {"max_tokens": 12, "logit_bias": {29: -100.0, 38: -100.0}})
    more = [{"role": "user", "content": "dca"}]
    again = first.session.generate([more], {"max_tokens": 8})
    whole = [*talk, {"role": "assistant", "content": first.sequences[0].text}, *more]
    fresh = generate(target, [whole], None, {"max_tokens": 8})
    assert again.sequences[0].token_ids == fresh.sequences[0].token_ids
    third = again.session.generate(more, {"max_tokens": 4})
    whole += [{"role": "assistant", "content": again.sequences[0].text}, *more]
    assert third.sequences[0].token_ids == generate(target, [whole], None, {"max_tokens": 4}).sequences[0].token_ids
    with pytest.raises(ValueError, match="cannot go on with messages"):
        generate(target, ["ab"], None, {"max_tokens": 2}).session.generate([more])


class Chat(tiny.ToyTokenizer):
    """A template that is as plain as can be: every message in full stops."""

    has_chat_template = True

    def apply_chat_template(self, messages, add_generation_prompt=True):
        return self.encode("".join(f".{m['content']}." for m in messages).replace("\ufffd", ","))


def test_prompts_that_never_had_a_slot_are_prefilled():
    first = generate(model(), [[1, 2], [3]], None, [{"max_tokens": 0}, {"max_tokens": 4}])
    again = first.session.generate([[5], [6]], {"max_tokens": 4})
    assert_same(again.sequences, fresh([[1, 2, 5], [3, *first.sequences[1].token_ids, 6]], {"max_tokens": 4}))


def test_only_the_newest_sessions_keep_their_caches():
    results = [generate(model(), prompts(), None, {"max_tokens": 3}) for _ in range(session_lib.KEPT + 1)]
    assert [r.session.cached for r in results] == [False] + [True] * session_lib.KEPT
    for _ in range(session_lib.KEPT):
        generate(model(), prompts(), None, {"max_tokens": 3})  # dropped at once, and so in nobody's way
    assert results[-1].session.cached
    again = results[0].session.generate(MORE, {"max_tokens": 5})
    assert again.stats.num_cached_tokens == 0
    assert_same(again.sequences, results[1].session.generate(MORE, {"max_tokens": 5}).sequences)
    results[2].session.release()
    assert not results[2].session.cached


def test_a_dropped_result_frees_its_cache():
    result = generate(model(), prompts(), None, {"max_tokens": 3})
    cache = weakref.ref(result.session._state.cache.k[0])
    del result
    gc.collect()
    assert cache() is None


def test_more_prompts_than_slots_leave_no_cache_and_go_on_all_the_same():
    first = generate(model(), prompts(), None, {"max_tokens": 5}, max_batch_size=2)
    assert not first.session.cached
    again = first.session.generate(MORE, {"max_tokens": 5})
    whole = [p + s.token_ids + m for p, s, m in zip(prompts(), first.sequences, MORE, strict=True)]
    assert_same(again.sequences, fresh(whole, {"max_tokens": 5}))


@pytest.mark.parametrize(
    "more, message",
    [
        ([[1]], "3 sequences, but 1 continuations"),
        ("ab", "3 sequences, but 1 continuations"),
        ([[1], [2], [97]], "token id 97"),
        ([[1], [2], [1.5]], "must be a string"),
        ([[1], [2], [{"role": "user", "content": "x"}]], "cannot go on with messages"),
        (None, "must be a string, or a list"),
        (5, "must be a string, or a list"),
        ([0, [1], [2]], "wrap it in a list"),
        ([False, [1], [2]], "wrap it in a list"),
        ([{}, [1], [2]], "wrap it in a list"),
    ],
)
def test_bad_continuations_are_named(more, message):
    result = generate(model(), prompts(), None, {"max_tokens": 2})
    with pytest.raises(ValueError, match=message):
        result.session.generate(more)
    with pytest.raises(ValueError, match="progress='no'"):
        result.session.generate(MORE, progress="no")


def test_samples_continue_one_by_one():
    first = generate(model(), prompts()[1:2], None, {"n": 3, "temperature": 1.0, "seed": 2, "max_tokens": 6})
    again = first.session.generate([[4]] * 3, {"max_tokens": 5})
    whole = [prompts()[1] + s.token_ids + [4] for s in first.sequences]
    assert_same(again.sequences, fresh(whole, {"max_tokens": 5}))
    assert np.ptp([s.stats.num_cached_tokens for s in again.sequences]) == 0
