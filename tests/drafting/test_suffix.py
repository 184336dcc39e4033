"""Suffix decoding: every proposal is that of tries with counts, built anew from the texts in plain Python."""

import functools
import math

import jax
import numpy as np
import pytest
import tiny

from spec_jax.drafting.suffix import SuffixDrafter
from spec_jax.generation import generate
from spec_jax.suffix_index import build

CAPACITY, VOCAB = 48, 60


class Node:
    def __init__(self):
        self.count, self.last, self.children = 0, -1, {}


def trie_of(texts, depth):
    """All substrings of up to `depth` tokens with their counts; `last`: where one last began."""
    root, at = Node(), 0
    for text in texts:
        for start in range(len(text)):
            node = root
            for end in range(start, min(start + depth, len(text))):
                node = node.children.setdefault(text[end], Node())
                node.count, node.last = node.count + 1, at + start
        at += len(text) + 1
    return root


def walk_from(node, limit, min_prob, tree):
    """(score, tokens, parents, probs) by frequency: the likeliest text that is not there yet, while there is one."""
    nodes, probs, draft, parents = [node], [np.float32(1)], [], []
    waiting = [sorted(node.children.items(), key=lambda x: (-x[1].count, -x[1].last))]
    while len(draft) < limit:
        open_to = range(len(nodes)) if tree else [len(nodes) - 1]
        offers = [
            (probs[v] * (np.float32(waiting[v][0][1].count) / np.float32(nodes[v].count)), -v)
            for v in open_to
            if waiting[v]
        ]
        prob, v = max(offers, default=(0, 0))
        if not offers or prob < np.float32(min_prob):
            break
        token, child = waiting[-v].pop(0)
        draft.append(token), parents.append(-v - 1), probs.append(prob), nodes.append(child)
        waiting.append(sorted(child.children.items(), key=lambda x: (-x[1].count, -x[1].last)))
    return sum(probs[1:], np.float32(0)), draft, parents, [float(p) for p in probs[1:]]


def reference(text, k, depth=24, factor=1.0, min_prob=0.1, tree=False, history=()):
    """The best suffix's walk; of equal scores the longest suffix's, and before others that of the text itself."""
    best = (np.float32(0), [], [], [])
    for texts in ([text], history):
        root, found = trie_of(texts, depth), (np.float32(0), [], [], [])
        for size in range(1, min(len(text) + 1, depth)):
            node = root
            for token in text[-size:]:
                node = node.children.get(token, Node())
            limit = min(k, math.floor(factor * size + 1e-6), depth - size)
            walk = walk_from(node, limit, min_prob, tree)
            found = walk if walk[0] >= found[0] and walk[1] else found
        best = found if found[0] > best[0] else best
    return best


@functools.partial(jax.jit, static_argnums=0)
def _walks(drafter, index, tokens, lengths):
    return drafter.walks(index, tokens, lengths, VOCAB)


def proposals(texts, k, depth=24, factor=1.0, min_prob=0.1, tree=False, history=(), fill=0):
    """(score, tokens, parents) of every text."""
    tokens = np.full((len(texts), CAPACITY), fill, np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    lengths = np.array([len(t) for t in texts], np.int32)
    index = build(history, depth) if history else ()
    walk = jax.tree.map(np.asarray, _walks(SuffixDrafter(k, depth, factor, min_prob, tree), index, tokens, lengths))
    rows = zip(walk.score, walk.tokens, walk.parents, walk.count, strict=True)
    return [(score, t[:c].tolist(), p[:c].tolist()) for score, t, p, c in rows]


def test_the_golden_value():
    """Of `golden_vectors.json`: counts include the suffix itself, which nothing has followed yet."""
    text = [1, 2, 3, 7, 1, 2, 4, 1, 2, 3, 7, 1, 9, 1, 2, 3]
    ((score, draft, _),) = proposals([text], 2)
    assert draft == [7, 1] and score == pytest.approx(1.333334, abs=1e-5)
    assert reference(text, 2)[1:] == ([7, 1], [-1, 0], pytest.approx([0.666667, 0.666667], abs=1e-5))


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
TREES = [{"k": 7}, {"k": 20, "depth": 40, "factor": 4.0, "min_prob": 0.0}, {"k": 6, "depth": 5, "min_prob": 0.02}]


def compared(texts, options, history=()):
    """Checks the proposals of some texts; returns how many tokens they are, and how many of them branch off."""
    drafted, branches = 0, 0
    for (score, *walk), text in zip(proposals(texts, history=history, **options), texts, strict=True):
        want = reference(text, history=history, **options)
        assert walk == list(want[1:3]), text
        assert score == pytest.approx(want[0], abs=1e-5)
        drafted += len(walk[0])
        branches += sum(parent != place - 1 for place, parent in enumerate(walk[1]))
    return drafted, branches


@pytest.mark.parametrize("tree", [True, False])
@pytest.mark.parametrize("batch", [1, 5])
def test_proposals_from_a_history_equal_those_of_tries(batch, tree):
    rng = np.random.default_rng(batch)
    found = np.zeros(2, int)
    for trial in range(24):
        alphabet = (2, 3, 6, VOCAB)[trial % 4]
        history = [rng.integers(0, alphabet, rng.integers(0, 40)).tolist() for _ in range(4)] + [[1, 2] * 9]
        texts = [rng.integers(0, alphabet, rng.integers(1, CAPACITY + 1)).tolist() for _ in range(batch)]
        if trial % 4 == 3:  # only the history knows what comes
            texts = [text[:1] + history[trial % 3][: CAPACITY // 3] for text in texts]
        options = ({"k": 8, "tree": tree}, {"k": 12, "depth": 7, "factor": 3.0, "min_prob": 0.02, "tree": tree})
        found += compared(texts, options[trial % 2], history)
    assert found[0] > 40 and (found[1] > 10) == tree


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize(
    "options",
    [*OPTIONS[4:7], {"tree": True, **TREES[1]}]
    + [pytest.param(o, marks=pytest.mark.slow) for o in (*OPTIONS[:4], OPTIONS[7])]
    + [pytest.param({"tree": True, **o}, marks=pytest.mark.slow) for o in (TREES[0], TREES[2])],
    ids=str,
)
def test_proposals_equal_those_of_a_trie(batch, options):
    rng = np.random.default_rng(batch + len(str(options)))
    drafted, branches = 0, 0
    for trial in range(40):
        alphabet = (1, 2, 3, 6, VOCAB)[trial % 5]
        texts = [rng.integers(0, alphabet, rng.integers(1, CAPACITY + 1)).tolist() for _ in range(batch)]
        if trial % 4 == 0:  # phrases again and again, with slips
            phrase = rng.integers(0, VOCAB, 7).tolist()
            text = (phrase * 7)[: rng.integers(1, CAPACITY + 1)]
            texts[0] = [t if rng.random() > 0.05 else 0 for t in text]
        drafted, branches = np.add((drafted, branches), compared(texts, options))
    assert drafted > 20  # the comparison is not one of empty lists
    assert (branches > 3) == ("tree" in options)


@pytest.mark.parametrize("fill", [0, 2, VOCAB - 1])
def test_what_stands_behind_the_text_never_matters(fill):
    texts = [[2, 7, 2], [7], [0, 0, 5, 0, 0], [2, 2], [7, 2, 0, 7, 2], [0] * CAPACITY]
    assert proposals(texts, 4, fill=fill) == proposals(texts, 4, fill=9)
    assert [draft for _, draft, _ in proposals(texts, 4, fill=fill)] == [reference(t, 4)[1] for t in texts]


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
