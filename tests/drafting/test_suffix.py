"""Suffix decoding: every proposal is that of a trie with counts, built anew from the text in plain Python."""

import functools
import math

import jax
import numpy as np
import pytest
import tiny

from spec_jax.drafting.suffix import best_walk
from spec_jax.generation import generate

CAPACITY, VOCAB = 48, 60


class Node:
    def __init__(self):
        self.count, self.last, self.children = 0, -1, {}


def trie_of(text, depth):
    """All substrings of up to `depth` tokens with their counts; `last`: where one last ended."""
    root = Node()
    for start in range(len(text)):
        node = root
        for end in range(start, min(start + depth, len(text))):
            node = node.children.setdefault(text[end], Node())
            node.count, node.last = node.count + 1, max(node.last, end)
    return root


def reference(text, k, depth=24, factor=1.0, min_prob=0.1):
    """(score, draft, probs) of the best suffix; of equal scores the longest suffix's."""
    root, best = trie_of(text, depth), (np.float32(0), [], [])
    for size in range(1, min(len(text), depth)):
        node = root
        for token in text[-size:]:
            node = node.children[token]
        limit = min(k, math.floor(factor * size + 1e-6))
        prob, score, draft, probs = np.float32(1), np.float32(0), [], []
        while node.children and len(draft) < limit:
            token, child = max(node.children.items(), key=lambda x: (x[1].count, x[1].last))
            prob = prob * (np.float32(child.count) / np.float32(node.count))
            if prob < np.float32(min_prob):
                break
            score, node = score + prob, child
            draft.append(token)
            probs.append(float(prob))
        if score >= best[0] and draft:
            best = (score, draft, probs)
    return best


@functools.partial(jax.jit, static_argnums=(2, 3, 4, 5, 6))
def _walks(tokens, lengths, *options):
    return jax.vmap(lambda text, length: best_walk(text, length, *options))(tokens, lengths)


def proposals(texts, k, depth=24, factor=1.0, min_prob=0.1, fill=0):
    tokens = np.full((len(texts), CAPACITY), fill, np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    lengths = np.array([len(t) for t in texts], np.int32)
    walk = jax.tree.map(np.asarray, _walks(tokens, lengths, k, depth, factor, min_prob, VOCAB))
    return [(s, t[:c].tolist()) for s, t, c in zip(walk.score, walk.tokens, walk.count, strict=True)]


def test_the_golden_value():
    """Of `golden_vectors.json`: counts include the suffix itself, which nothing has followed yet."""
    text = [1, 2, 3, 7, 1, 2, 4, 1, 2, 3, 7, 1, 9, 1, 2, 3]
    ((score, draft),) = proposals([text], 2)
    assert draft == [7, 1] and score == pytest.approx(1.333334, abs=1e-5)
    assert reference(text, 2)[1:] == ([7, 1], pytest.approx([0.666667, 0.666667], abs=1e-5))


OPTIONS = [
    {"k": 1},
    {"k": 4},
    {"k": 15},
    {"k": 7, "depth": 6},
    {"k": 9, "depth": 12, "factor": 2.5},
    {"k": 5, "factor": 0.5, "min_prob": 0.4},
    {"k": 20, "depth": 40, "factor": 4.0, "min_prob": 0.0},
    {"k": 3, "depth": 2, "min_prob": 0.3},
]


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_proposals_equal_those_of_a_trie(batch, options):
    rng = np.random.default_rng(batch + len(str(options)))
    drafted = 0
    for trial in range(40):
        alphabet = (1, 2, 3, 6, VOCAB)[trial % 5]
        texts = [rng.integers(0, alphabet, rng.integers(1, CAPACITY + 1)).tolist() for _ in range(batch)]
        if trial % 4 == 0:  # phrases again and again, with slips
            phrase = rng.integers(0, VOCAB, 7).tolist()
            text = (phrase * 7)[: rng.integers(1, CAPACITY + 1)]
            texts[0] = [t if rng.random() > 0.05 else 0 for t in text]
        found = proposals(texts, **options)
        for (score, draft), text in zip(found, texts, strict=True):
            want = reference(text, **options)
            assert draft == want[1], text
            assert score == pytest.approx(want[0], abs=1e-5)
            drafted += len(draft)
    assert drafted > 20  # the comparison is not one of empty lists


@pytest.mark.parametrize("fill", [0, 2, VOCAB - 1])
def test_what_stands_behind_the_text_never_matters(fill):
    texts = [[2, 7, 2], [7], [0, 0, 5, 0, 0], [2, 2], [7, 2, 0, 7, 2], [0] * CAPACITY]
    assert proposals(texts, 4, fill=fill) == proposals(texts, 4, fill=9)
    assert [draft for _, draft in proposals(texts, 4, fill=fill)] == [reference(t, 4)[1] for t in texts]


@pytest.mark.parametrize("prompts", [[[7], [7, 8], [5] * 12], [[0, 9, 0, 9], [4, 5, 6, 7] * 4, [1, 2, 3]]], ids=str)
def test_text_is_plain_decodings_and_every_step_drafts_what_the_trie_says(prompts):
    model, sampling = tiny.tiny(), {"max_tokens": 40}
    result = generate(model, prompts, {"method": "suffix", "num_speculative_tokens": 6}, sampling)
    assert [s.token_ids for s in result.sequences] == tiny.plain(model, prompts, sampling)
    for prompt, sequence in zip(prompts, result.sequences, strict=True):
        drafts, drafted, accepted = tiny.replay(prompt, sequence.token_ids, lambda text: reference(text, 6)[1])
        stats = sequence.stats
        assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (drafts, drafted, accepted)
    assert result.stats.num_accepted_tokens > 0
