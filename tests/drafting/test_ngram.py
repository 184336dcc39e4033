"""Prompt lookup: every proposal is what followed the chosen earlier match, and nothing is invented.

Guards B18: prompts shorter than the n-gram, no match at all, a match at the very end, a continuation shorter than K,
id 0 as a real token, padding that equals real tokens; and the tail matching itself.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from spec_jax.drafting.ngram import lookup
from spec_jax.generation import generate

CAPACITY = 40
_lookup = functools.partial(jax.jit, static_argnums=(2, 3, 4))(lookup)


def reference(text, k, longest, shortest):
    """The documented choice in plain Python: longest suffix, then most following tokens (at most k), then newest."""
    best, proposal = None, []
    for size in range(shortest, longest + 1):
        if size >= len(text):
            continue
        suffix = text[-size:]
        for end in range(size, len(text)):
            if text[end - size : end] != suffix:
                continue
            follow = text[end : end + k]
            rank = (size, len(follow), end)
            if best is None or rank > best:
                best, proposal = rank, follow
    return proposal


def proposals(texts, k, longest=3, shortest=1, fill=0):
    tokens = np.full((len(texts), CAPACITY), fill, np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    lengths = jnp.asarray([len(t) for t in texts], jnp.int32)
    drafted, count, _ = _lookup(jnp.asarray(tokens), lengths, k, longest, shortest)
    return [d[:c].tolist() for d, c in zip(np.asarray(drafted), np.asarray(count), strict=True)]


@pytest.mark.parametrize(
    "text, k, longest, expected",
    [
        ([5, 6, 7, 8, 9, 1, 2, 5, 6, 7], 2, 3, [8, 9]),
        ([1, 2, 1, 2, 1, 2], 1, 3, [1]),
        ([1, 2, 1, 2, 1, 2], 2, 3, [1, 2]),
        ([4, 4, 4, 4], 2, 3, [4]),  # the three-token suffix matches once, with one token behind it
        ([4, 4, 4, 4], 2, 1, [4, 4]),  # enough tokens behind the match beat a newer match
        ([1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 3], 1, 3, [8]),  # of equal matches the newest
        ([1, 2, 3, 9, 7, 3, 8, 6, 2, 3], 1, 3, [9]),  # a longer suffix beats a newer match of a shorter one
        ([3, 1, 2, 3], 4, 3, [1, 2, 3]),  # a continuation shorter than K stays short
        ([0, 5, 0], 2, 3, [5, 0]),  # id 0 is a token like any other
        ([7], 3, 3, []),
        ([7, 8], 3, 3, []),
        ([7, 7], 3, 3, [7]),
        ([1, 2, 3, 4, 5, 6], 3, 3, []),  # all different
    ],
)
def test_golden_proposals(text, k, longest, expected):
    assert reference(text, k, longest, 1) == expected
    assert proposals([text], k, longest) == [expected]


def test_a_suffix_shorter_than_the_minimum_proposes_nothing():
    assert proposals([[1, 2, 9, 2]], 3, 3, 2) == [[]]
    assert proposals([[5, 2, 9, 5, 2]], 3, 3, 2) == [[9, 5, 2]]


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("k, longest, shortest", [(1, 3, 1), (4, 3, 1), (5, 2, 2), (7, 5, 3)])
def test_proposals_equal_the_plain_reference(batch, k, longest, shortest):
    rng = np.random.default_rng(k * 10 + batch)
    hits = 0
    for trial in range(60):
        alphabet = (2, 3, 6, 50)[trial % 4]
        texts = [rng.integers(0, alphabet, rng.integers(1, CAPACITY + 1)).tolist() for _ in range(batch)]
        if trial % 5 == 0:  # a repeated phrase
            phrase = rng.integers(0, 50, 6).tolist()
            texts[0] = (phrase * 7)[: rng.integers(1, CAPACITY + 1)]
        expected = [reference(t, k, longest, shortest) for t in texts]
        assert proposals(texts, k, longest, shortest) == expected
        hits += sum(map(bool, expected))
    assert hits > 20  # the comparison is not one of empty lists


@pytest.mark.parametrize("fill", [0, 2, 7, 96])
def test_what_stands_behind_the_text_never_matters(fill):
    texts = [[2, 7, 2], [7], [0, 0, 5, 0, 0], [2, 2], [7, 2, 0, 7, 2]]
    assert proposals(texts, 4, fill=fill) == [reference(t, 4, 3, 1) for t in texts]


def test_rows_do_not_see_each_other():
    texts = [[1, 2, 3, 1, 2], [9, 8, 7], [3], [5, 5, 5, 5], [1, 2, 1]]
    assert proposals(texts, 4) == [proposals([t], 4)[0] for t in texts]


@pytest.mark.parametrize(
    "prompts",
    [
        [[7], [7, 8], [7, 8, 9]],
        [[7, 8, 9, 10], [5] * 12, [0, 0, 0]],
        [list(range(20, 40)), [0, 9, 0], [4, 5, 6, 7, 4, 5]],
    ],
    ids=["short", "repeated", "distinct"],
)
def test_awkward_prompts_decode_like_plain(prompts):
    model, sampling = tiny.tiny(), {"max_tokens": 24}
    result = generate(model, prompts, {"method": "ngram", "num_speculative_tokens": 4}, sampling)
    assert [s.token_ids for s in result.sequences] == tiny.plain(model, prompts, sampling)
    for prompt, sequence in zip(prompts, result.sequences, strict=True):
        drafts, drafted, accepted = tiny.replay(prompt, sequence.token_ids, lambda text: reference(text, 4, 3, 1))
        stats = sequence.stats
        assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (drafts, drafted, accepted)
