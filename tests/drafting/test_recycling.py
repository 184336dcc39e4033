"""Token recycling: every proposal is read off a matrix that plain Python keeps beside it."""

import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from made_up import Loop

from spec_jax.config import SpeculativeConfig
from spec_jax.drafting.likeliest import likeliest_tokens
from spec_jax.drafting.recycling import RecyclingDrafter
from spec_jax.drafting.registry import build_drafter
from spec_jax.generation import generate
from spec_jax.models.layers import RowBlocks
from spec_jax.token_tree import parse_tree, paths_of

TREE = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1))


class Matrix:
    def __init__(self, paths, ranks):
        self.paths, self.ranks, self.after = paths, ranks, {}

    def prefill(self, tokens, next_tokens):
        for token, after in zip(tokens, next_tokens, strict=True):
            known = [t for t in self.after.get(token, []) if t != after]
            self.after[token] = [after, *known][: self.ranks]

    def propose(self, text):
        node_of, tokens, parents = {(): (-1, text[-1])}, [], []
        for path in self.paths:
            before = node_of.get(path[:-1])
            known = self.after.get(before[1], []) if before else []
            if path[-1] < len(known):
                node_of[path] = (len(tokens), known[path[-1]])
                tokens.append(known[path[-1]]), parents.append(before[0])
        return tokens, parents, [], []

    def learn(self, text, flight, parents, real, logits, path):
        for row, token in enumerate(flight):
            if real[row]:
                self.after[token] = np.argsort(-logits[row], kind="stable")[: self.ranks].tolist()


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("vocab", [5, 40])
def test_proposals_equal_those_of_the_matrix(batch, vocab):
    parents = parse_tree(TREE)
    drafter = RecyclingDrafter(tuple(parents), vocab)
    references = [Matrix(paths_of(parents), drafter.ranks) for _ in range(batch)]
    loop = Loop(drafter, references, vocab, seed=batch)
    for _ in range(40):
        loop.step()
    assert loop.drafted > 100 * batch and loop.accepted > 20 * batch


@pytest.mark.parametrize("size", [3, 97, 256, 1000])
def test_the_likeliest_tokens_are_those_of_a_sort(size):
    rng = np.random.default_rng(size)
    logits = np.round(rng.normal(size=(2, 3, size)) * 2).astype(np.float32)  # with ties
    logits[0, 0, 1:] = -np.inf
    logits[1, 2] = np.nan
    wanted, columns = np.array([[True, True], [True, False]]), np.array([[0, 2], [1, 2]])
    found = np.asarray(likeliest_tokens(*map(jnp.asarray, (logits, columns, wanted)), 5, size - 1))
    for row, place in zip(*wanted.nonzero(), strict=True):
        scores = logits[row, columns[row, place], : size - 1]
        want = [i for i in np.argsort(-scores, kind="stable")[:5] if scores[i] > -np.inf]
        assert found[row, place].tolist() == want + [-1] * (5 - len(want))
    assert (found[1, 1] == -1).all()


@pytest.mark.slow
def test_text_is_plain_decodings():
    model, sampling, prompts = tiny.tiny(), {"max_tokens": 60}, [[7], [0, 9, 0, 9], [4, 5, 6, 7] * 4]
    result = generate(model, prompts, {"method": "recycling", "num_speculative_tokens": 12}, sampling, max_batch_size=2)
    assert [s.token_ids for s in result.sequences] == tiny.plain(model, prompts, sampling)
    assert result.stats.num_accepted_tokens > 30


def test_the_tree_is_the_one_given_or_one_of_as_many_nodes():
    model = tiny.tiny()

    def drafter(**options):
        return build_drafter(SpeculativeConfig(method="recycling", **options), model, RowBlocks())[0]

    assert drafter(speculative_token_tree=[[0], [1], [0, 0]]).tree == (-1, -1, 0)
    assert drafter().num_nodes == 20 and drafter(num_speculative_tokens=7).num_nodes == 7
    for bad, words in (
        ({"speculative_token_tree": "eagle2"}, "paths of ranks"),
        ({"verify_width": "auto"}, "leave it out"),
        ({"rejection_sample_method": "block"}, "verifies chains"),
    ):
        with pytest.raises(ValueError, match=words):
            SpeculativeConfig(method="recycling", **bad)
