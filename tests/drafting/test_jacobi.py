"""Jacobi decoding: every proposal is the last step's predictions behind the run, kept by plain Python."""

import numpy as np
import pytest
import tiny
from made_up import Loop

from spec_jax.drafting.jacobi import JacobiDrafter
from spec_jax.generation import generate


class Guess:
    def __init__(self, k):
        self.k, self.known = k, []

    def prefill(self, tokens, next_tokens):
        pass

    def propose(self, text):
        old = [text[max(len(text) - self.k + i, 0)] if len(text) - self.k + i >= 0 else text[-1] for i in range(self.k)]
        return self.known + old[len(self.known) :], list(range(-1, self.k - 1)), [], []

    def learn(self, text, flight, parents, real, logits, path):
        self.known = [int(np.argmax(logits[row])) for row in range(len(path), len(flight))]


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("k", [1, 6])
def test_proposals_equal_those_of_the_fixed_point(batch, k):
    loop = Loop(JacobiDrafter(k, 4), [Guess(k) for _ in range(batch)], 4, seed=k, faithful=0.95)
    for _ in range(40):
        loop.step()
    assert loop.accepted > 0


@pytest.mark.slow
def test_text_is_plain_decodings_also_where_a_policy_cuts_the_drafts():
    model, sampling, prompts = tiny.packed(tiny.tiny()), {"max_tokens": 60}, [[7], [0, 9, 0, 9], [4, 5, 6, 7] * 4]
    plain = tiny.plain(model, prompts, sampling)
    for more in ({}, {"verify_width": "auto"}):
        result = generate(model, prompts, {"method": "jacobi", **more}, sampling, max_batch_size=2)
        assert [s.token_ids for s in result.sequences] == plain
        assert result.stats.num_accepted_tokens > 0
