"""Lookahead decoding: window and pool of every row are those of a plain Python version beside it."""

import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from made_up import Loop

from spec_jax.config import SpeculativeConfig
from spec_jax.drafting import lookahead
from spec_jax.drafting.base import Seen
from spec_jax.drafting.lookahead import LookaheadDrafter, merged
from spec_jax.generation import generate


class Window:
    """N rows of W guesses, and for every key its newest distinct n-grams."""

    def __init__(self, n, w, g, from_prompt):
        self.n, self.w, self.g, self.from_prompt = n, w, g, from_prompt
        self.rows, self.pool, self.age, self.text = None, {}, 0, []

    def remember(self, key, gram):
        known = [other for other in self.pool.get(key, []) if other != gram]
        self.pool[key] = [gram, *known][: self.g]

    def prefill(self, tokens, next_tokens):
        cells = [tokens[i % len(tokens)] for i in range((self.n - 1) * self.w)]
        self.rows = [cells[i * self.w : (i + 1) * self.w] for i in range(self.n - 1)]
        old = len(self.text)
        self.text = (self.text or [tokens[0]])[: old or 1] + next_tokens
        if self.from_prompt:
            ends = range(max(old or 1, self.n - 1), len(self.text)) if old else range(self.n - 1, len(self.text))
            for end in ends:
                first, *gram = self.text[end - self.n + 1 : end + 1]
                self.remember(first, tuple(gram))

    def propose(self, text):
        tokens, parents, node_of = [], [], {}
        for gram in self.pool.get(text[-1], []):
            for size in range(1, self.n):
                if gram[:size] not in node_of:
                    parents.append(node_of.get(gram[: size - 1], -1))
                    node_of[gram[:size]] = len(tokens)
                    tokens.append(gram[size - 1])
        self.rows[0][0] = text[-1]
        base = self.g * (self.n - 1) - 1  # the node that entry (0, 0) would be

        def node(row, column):
            return -1 if (row, column) == (0, 0) else base + row * self.w + column

        cells = [(i, j) for i in range(self.n - 1) for j in range(self.w)][1:]
        above = [node(i - 1, j) if i else node(0, j - 1) for i, j in cells]
        return tokens, parents, [self.rows[i][j] for i, j in cells], above

    def learn(self, text, flight, parents, real, logits, path):
        newest = [int(np.argmax(logits[len(flight) - self.w + j])) for j in range(self.w)]
        whole = [*self.rows, newest]
        if self.age >= self.n - 2:
            for j in range(self.w):
                self.remember(whole[0][j], tuple(whole[i][j] for i in range(1, self.n)))
        hit = len(path) - 1
        self.rows = [[row[min(j + hit, self.w - 1)] for j in range(self.w)] for row in whole[1:]]
        self.age += 1


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("n, w, g, from_prompt", [(3, 2, 1, False), (4, 4, 3, True), (3, 5, 4, True)])
def test_proposals_equal_those_of_window_and_pool(batch, n, w, g, from_prompt):
    drafter = LookaheadDrafter(n, w, g, 12, from_prompt)
    loop = Loop(drafter, [Window(n, w, g, from_prompt) for _ in range(batch)], 12, seed=n + w, faithful=0.9)
    for _ in range(40):
        loop.step()
    assert loop.drafted > 40 * batch and loop.accepted > 10 * batch


def test_a_new_key_takes_the_place_of_one_with_the_same_remainder(monkeypatch):
    monkeypatch.setattr(lookahead, "BUCKETS", 4)
    pool = lookahead.Pool(jnp.full((1, 4), -1, jnp.int32), jnp.full((1, 4, 2, 2), -1, jnp.int32))
    keys, grams = jnp.array([[1, 5, 2, 5, 5, 5]]), jnp.array([[[7, 7], [1, 2], [3, 3], [4, 4], [1, 2], [6, 6]]])
    pool = lookahead.add_grams(pool, keys, grams, jnp.array([[True, True, True, True, True, False]]))
    found = {key: np.asarray(lookahead.look_up(pool, jnp.array([key])))[0].tolist() for key in (1, 2, 5)}
    none = [-1, -1]
    assert found == {1: [none, none], 2: [[3, 3], none], 5: [[1, 2], [4, 4]]}


@pytest.mark.parametrize("gap", [0, 4])
def test_ngrams_of_the_prompt_do_not_reach_over_text_that_was_not_read(gap):
    """A session's next turn is prefilled from behind tokens that were decoded, not read as a prompt."""
    drafter = LookaheadDrafter(3, 2, 2, 20)
    state = drafter.init((), None, 1, 64)
    for start, text in ((0, [1, 2, 3, 4]), (3 + gap, [4, 5, 6])):
        tokens, after = np.array([text[:-1]], np.int32), np.array([text[1:]], np.int32)
        count = np.array([len(text) - 1], np.int32)
        path = np.arange(len(text) - 1, dtype=np.int32)[None]
        seen = Seen(tokens, after, np.array([start], np.int32), count, {}, None, path, True)
        state = drafter.commit((), state, seen)
    keys = [k for k in range(20) if (np.asarray(lookahead.look_up(state.pool, jnp.array([k]))) >= 0).any()]
    assert keys == ([1, 2, 3, 4] if gap == 0 else [1, 2, 4])


def test_chains_are_merged_without_equal_siblings():
    tokens, parents, count = merged(jnp.array([[[5, 6, 7], [5, 8, 9], [5, 6, 1], [-1, -1, -1]]]))
    assert tokens[0, : int(count[0])].tolist() == [5, 6, 7, 8, 9, 1]
    assert parents[0, : int(count[0])].tolist() == [-1, 0, 1, 0, 3, 1]


@pytest.mark.slow
def test_text_is_plain_decodings():
    model, sampling, prompts = tiny.tiny(), {"max_tokens": 60}, [[7], [0, 9, 0, 9], [4, 5, 6, 7] * 4]
    result = generate(model, prompts, {"method": "lookahead"}, sampling, max_batch_size=2)
    assert [s.token_ids for s in result.sequences] == tiny.plain(model, prompts, sampling)
    assert result.stats.num_accepted_tokens > 10
    assert result.stats.acceptance_histogram[3] > 0  # all N - 1 tokens of an n-gram count


@pytest.mark.parametrize("bad, words", [
    ({"lookahead_ngram_size": 2}, "from 3 to"),
    ({"lookahead_window": 1}, "from 2 to"),
    ({"lookahead_guesses": 0}, "from 1 to"),
    ({"num_speculative_tokens": 5}, "23 nodes; leave it out"),
    ({"verify_width": "auto"}, "leave it out"),
    ({"lookahead_pool_from_prompt": 3}, "must be True or False"),
])  # fmt: skip
def test_bad_sizes_are_refused(bad, words):
    with pytest.raises(ValueError, match=words):
        SpeculativeConfig(method="lookahead", **bad)
