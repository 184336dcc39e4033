"""Suffix-automaton lookup: every proposal is that of automata built token by token in plain Python."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from spec_jax.drafting.base import View
from spec_jax.drafting.sam import BEHIND, SamDrafter
from spec_jax.generation import generate
from spec_jax.history import TokenHistory
from spec_jax.suffix_index import build

CAPACITY, VOCAB = 48, 60


class Automaton:
    """An online suffix automaton; every state knows where its strings first ended."""

    def __init__(self):
        self.next, self.link, self.size, self.first = [{}], [-1], [0], [-1]
        self.last = 0

    def _state(self, edges, link, size, first):
        self.next.append(edges), self.link.append(link), self.size.append(size), self.first.append(first)
        return len(self.next) - 1

    def add(self, token, at):
        new, p = self._state({}, 0, self.size[self.last] + 1, at), self.last
        while p >= 0 and token not in self.next[p]:
            self.next[p][token] = new
            p = self.link[p]
        if p >= 0:
            q = self.next[p][token]
            if self.size[p] + 1 == self.size[q]:
                self.link[new] = q
            else:
                clone = self._state(dict(self.next[q]), self.link[q], self.size[p] + 1, self.first[q])
                self.link[q] = self.link[new] = clone
                while p >= 0 and self.next[p].get(token) == q:
                    self.next[p][token] = clone
                    p = self.link[p]
        self.last = new

    def follow(self, state, size, token):
        """The longest suffix of a matched string and one more token that occurs."""
        while state and token not in self.next[state]:
            state = self.link[state]
            size = self.size[state]
        return (self.next[state][token], size + 1) if token in self.next[state] else (0, 0)


def own_match(text, k, longest):
    """(tokens, size) by the automaton of the text: the match in front of the newest token, led on by it."""
    automaton, state, size = Automaton(), 0, 0
    for at, token in enumerate(text):
        state, size = automaton.follow(state, size, token)
        automaton.add(token, at)
    while state and automaton.size[automaton.link[state]] >= longest:
        state = automaton.link[state]
    best = ([], 0)
    while state:
        found = text[automaton.first[state] + 1 :][:k]
        size = min(size, automaton.size[state], longest)
        if len(found) > len(best[0]):
            best = (found, size)
        state = automaton.link[state]
    return best


def other_match(texts, text, k, longest, depth):
    automaton = Automaton()
    joined = []
    for number, other in enumerate(texts):
        joined += [*other, -1 - number]
    for at, token in enumerate(joined):
        automaton.add(token, at)
    state, size = 0, 0
    for token in text:
        state, size = automaton.follow(state, size, token)
    while state and automaton.size[automaton.link[state]] >= longest:
        state = automaton.link[state]
    if not state:
        return [], 0
    found = []
    for token in joined[automaton.first[state] + 1 :][:k]:
        if token < 0:
            break
        found.append(token)
    return (found, min(size, longest)) if found else ([], 0)


def reference(text, k, shortest, longest, texts=()):
    found = own_match(text, k, longest)
    if texts:
        other = other_match(texts, text, k, longest, longest + 1)
        found = other if other[1] - BEHIND > found[1] else found
    return found[0] if found[1] >= shortest else []


@functools.partial(jax.jit, static_argnums=0)
def _proposed(drafter, params, tokens, lengths):
    view = View(tokens, lengths, *[None] * 6, rule="coupled")
    draft, _ = drafter.propose(params, (), view)
    return draft.tokens, draft.count


def proposals(texts, k, shortest, longest, history=()):
    tokens = np.full((len(texts), CAPACITY), 7, np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    params = build(history, longest + 1) if history else ()
    lengths = jnp.asarray([len(t) for t in texts], jnp.int32)
    found, count = jax.device_get(_proposed(SamDrafter(k, shortest, longest), params, tokens, lengths))
    return [t[:c].tolist() for t, c in zip(found, count, strict=True)]


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("k, shortest, longest", [(5, 1, 64), (3, 3, 9), (12, 2, 16)])
@pytest.mark.parametrize("with_history", [pytest.param(False, marks=pytest.mark.slow), True])
def test_proposals_equal_those_of_automata(batch, k, shortest, longest, with_history):
    rng = np.random.default_rng(batch)
    drafted = 0
    for trial in range(30):
        alphabet = (1, 2, 3, 6, VOCAB)[trial % 5]
        texts = [rng.integers(0, alphabet, rng.integers(1, CAPACITY + 1)).tolist() for _ in range(batch)]
        if trial % 3 == 0:  # a phrase again and again
            texts[0] = (rng.integers(0, VOCAB, 9).tolist() * 6)[: rng.integers(1, CAPACITY + 1)]
        history = [rng.integers(0, alphabet, 30).tolist() for _ in range(3)] if with_history else ()
        if with_history and trial % 2:
            texts[-1] = texts[-1][:10] + history[1][5:20]
        if with_history and trial % 4 > 1:  # what was written again, the same or with another end
            history += [list(history[0]), history[1][:24] + [VOCAB - 1]]
        want = [reference(text, k, shortest, longest, history) for text in texts]
        assert proposals(texts, k, shortest, longest, history) == want
        drafted += sum(map(len, want))
    assert drafted > 40


@pytest.mark.slow
def test_text_is_plain_decodings_and_every_step_drafts_what_the_automaton_says():
    model, sampling, prompts = tiny.tiny(), {"max_tokens": 40}, [[7], [0, 9, 0, 9], [4, 5, 6, 7] * 4]
    plain = tiny.plain(model, prompts, sampling)
    for history in (None, TokenHistory([plain[2], [1, 2, 3] * 5, plain[0]])):
        config = {"method": "sam", "num_speculative_tokens": 6, "sam_min_match": 2, "history": history}
        result = generate(model, prompts, config, sampling)
        assert [s.token_ids for s in result.sequences] == plain
        others = () if history is None else (plain[2], [1, 2, 3] * 5, plain[0])
        propose = functools.partial(reference, k=6, shortest=2, longest=32, texts=others)
        for prompt, sequence in zip(prompts, result.sequences, strict=True):
            want = tiny.replay(prompt, sequence.token_ids, propose)
            stats = sequence.stats
            assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == want
        assert result.stats.num_accepted_tokens > 0
