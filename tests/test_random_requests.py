"""Random requests against the reference decoder: any options, prompts, drafters, batches and slots, no difference.

The reference (reference.py) recomputes every token without a cache in float64. A case is excused only where one of its
own choices was closer than `reference.CLOSE`; these are counted and must stay few. Which options a case uses is random,
but every call holds one filler row that uses all of them, so that each drafter needs one program.
"""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
import reference
import tiny
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spec_jax.drafting.base import BaseDrafter, Draft
from spec_jax.generation import generate
from spec_jax.sampling_params import SamplingParams

CONTEXT, BATCH, K = 48, 4, 5
CALLS = 150
"""Per drafter; each holds two to five requests."""


@functools.lru_cache
def model():
    return tiny.with_text(tiny.tiny(vocab=97, context=CONTEXT), eos=(95,))


def grammar(state, token):
    """Two automata, chosen by the state's sign: no token twice in a row, or nothing but low ids behind token 7."""
    last = jnp.where(token >= 0, token + 1, 0).astype(jnp.int32)
    ids = jnp.arange(97)
    behind = (state == -2) | ((state < 0) & (token == 7))
    mask = jnp.where(state < 0, ~behind | (ids < 40), ids + 1 != last)
    return jnp.where(state < 0, jnp.where(behind, -2, -1), last).astype(jnp.int32), mask


ids = st.integers(0, 96)
LIKELY = [69, 70, 63, 6, 45, 30]
"""Tokens that the model likes to write."""
OPTIONS = {
    "temperature": st.sampled_from([0.0, 0.0, 0.5, 1.0, 2.0]),
    "top_k": st.sampled_from([0, 1, 5, 30]),
    "top_p": st.sampled_from([1.0, 0.9, 0.4]),
    "min_p": st.sampled_from([0.0, 0.05]),
    "seed": st.integers(0, 2**64 - 1),
    "stop": st.lists(st.text("abcdefghijkl", min_size=1, max_size=2), min_size=1, max_size=3),
    "stop_token_ids": st.lists(st.one_of(ids, st.sampled_from(LIKELY)), min_size=4, max_size=8),
    "ignore_eos": st.booleans(),
    "logprobs": st.integers(0, 2),
    "repetition_penalty": st.sampled_from([1.0, 0.7, 1.4]),
    "presence_penalty": st.sampled_from([0.0, -0.6, 1.1]),
    "frequency_penalty": st.sampled_from([0.0, -0.3, 0.9]),
    "logit_bias": st.dictionaries(ids, st.sampled_from([-100.0, -3.0, 2.0, 6.0, float("-inf")]), max_size=5),
    "bad_words": st.lists(st.text("abcdefgh", min_size=1, max_size=3), max_size=3),
    "allowed_token_ids": st.one_of(st.none(), st.lists(ids, min_size=20, max_size=60)),
    "mask": st.sampled_from([None, None, 0, -1]),
}


@st.composite
def requests(draw):
    """One prompt and its options; most options are left at their defaults in most cases."""
    used = draw(st.sets(st.sampled_from(sorted(OPTIONS)), min_size=2, max_size=7)) | {"temperature", "seed"}
    used |= draw(st.sampled_from([set(), {"stop"}, {"stop_token_ids"}]))
    options = {name: draw(OPTIONS[name]) for name in sorted(used)}
    mask = options.pop("mask", None)
    if mask is not None:
        options |= {"mask_fn": grammar, "mask_state": np.int32(mask)}
    options["max_tokens"] = draw(st.sampled_from([14, 13, 9, 6, 3, 1, 0]))
    options["min_tokens"] = min(draw(st.sampled_from([0, 0, 1, 4])), options["max_tokens"])
    # Few letters, so that prompts repeat themselves and lookups hit.
    prompt = draw(st.lists(st.one_of(st.integers(0, 96), st.integers(68, 71)), min_size=1, max_size=CONTEXT))
    return prompt, options


FILLER = {
    "max_tokens": 1, "min_tokens": 1, "logprobs": 2, "repetition_penalty": 1.1, "logit_bias": {1: 1.0},
    "bad_words": ["a", "bcd", "ef", "gh", "aceg", "b", "c", "d"], "mask_fn": grammar, "mask_state": np.int32(0),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class FindingScript(BaseDrafter):
    """A script that is found by the text so far, in whatever slot: {"found": texts, "text": what is proposed}."""

    num_nodes: int = K

    def propose(self, params, state, view):
        size = params["found"].shape[1]
        index = jnp.arange(size)
        same = (view.tokens[:, None, :size] == params["found"]) | (index >= view.length[:, None, None])
        which = jnp.argmax(same.all(-1), axis=1)
        at = jnp.minimum(view.length[:, None] + jnp.arange(K), size - 1)
        return Draft(params["text"][which[:, None], at], jnp.full(view.length.shape, K, jnp.int32)), state


def script(kept, wrong):
    texts = [p + found[0] for p, _, found in kept]
    texts += [[3]] * (6 - len(texts))
    right, proposed = (tiny.script(texts, K, w, size=CONTEXT + K)[1]["text"] for w in ((), wrong))
    return FindingScript(), {"found": right, "text": proposed}


DRAFTERS = {
    "script": lambda: {},
    "ngram": lambda: {"speculative_config": {"method": "ngram", "num_speculative_tokens": K}},
    "layer_skip": lambda: {
        "speculative_config": {"method": "layer_skip", "num_speculative_tokens": K, "exit_layer": 1}
    },
    "draft_model": lambda: {
        "speculative_config": {
            "method": "draft_model", "num_speculative_tokens": K, "model": tiny.perturbed(model(), 0.1)
        }
    },
    "standard": lambda: {
        "speculative_config": {
            "method": "draft_model", "num_speculative_tokens": K, "model": tiny.perturbed(model(), 0.1),
            "draft_sample_method": "probabilistic",
        }
    },
}  # fmt: skip
seen = {"cases": 0, "excused": 0, "accepted": 0, "stopped": 0}


def check(name, batch, max_batch_size, wrong):
    kept = []
    for prompt, options in batch:
        if name == "standard":  # token for token it is greedy decoding; its law is tested elsewhere
            options = {**options, "temperature": 0.0}
        try:
            params = SamplingParams(**options)
            generate(model(), [prompt], None, SamplingParams(**{**options, "max_tokens": 0, "min_tokens": 0}))
        except ValueError as error:
            assert "no token to choose" in str(error) or "leave only these" in str(error)
            continue
        kept.append((prompt, params, reference.decode(model(), prompt, params)))
    # As many fillers as slots, so that no call has fewer rows.
    prompts = [*(p for p, _, _ in kept), *[[3]] * max_batch_size]
    params = [*(p for _, p, _ in kept), *[SamplingParams(**FILLER)] * max_batch_size]
    arguments = {"drafter": script(kept, wrong)} if name == "script" else DRAFTERS[name]()
    result = generate(model(), prompts, sampling=params, exact=True, max_batch_size=max_batch_size, **arguments)
    for (prompt, params, (tokens, text, reason, logprobs, closeness)), ours in zip(
        kept, result.sequences, strict=False
    ):
        seen["cases"] += 1
        seen["accepted"] += ours.stats.num_accepted_tokens
        seen["stopped"] += reason == "stop"
        if closeness < reference.CLOSE:
            seen["excused"] += 1
            continue
        assert (ours.token_ids, ours.text, ours.finish_reason) == (tokens, text, reason), (prompt, params)
        assert ours.stats.num_emitted_tokens == len(ours.accepted) == len(tokens)
        if params.logprobs is not None:
            assert len(ours.logprobs) == len(tokens)
            for token, entry, truth in zip(tokens, ours.logprobs, logprobs, strict=True):
                assert abs(entry[token].logprob - truth[token]) < 1e-3
                assert len(entry) >= min(params.logprobs, 97)


def run(name, count):
    @settings(
        max_examples=count, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None
    )
    @given(
        st.lists(requests(), min_size=2, max_size=5),
        st.sampled_from([2, BATCH]),
        st.lists(st.integers(1, CONTEXT), max_size=8),
    )
    def cases(batch, max_batch_size, wrong):
        check(name, batch, max_batch_size, wrong)

    seen.update(dict.fromkeys(seen, 0))
    cases()
    assert seen["excused"] < 0.05 * seen["cases"]
    assert seen["stopped"] > 0.1 * seen["cases"]
    assert seen["accepted"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAFTERS)
def test_many_random_requests_equal_the_reference(name):
    """Over 2,000 requests in all: at least 400 with each of the five drafters."""
    run(name, CALLS)
    assert seen["cases"] > 400
