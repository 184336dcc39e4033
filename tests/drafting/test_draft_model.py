"""A draft model with its own cache: proposals never depend on how the text came about.

Guards B32 (draft cache out of step after full acceptance, a rejection or a pause), B16 (a drafter with a shorter or
longer context), B21 (padded vocabularies of different sizes) and B23 (another tokenizer).
"""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from spec_jax.config import SpeculativeConfig
from spec_jax.drafting.base import Seen, TargetView, View
from spec_jax.drafting.draft_model import DraftModelDrafter
from spec_jax.drafting.registry import build_drafter
from spec_jax.exactness import row_blocks
from spec_jax.generation import generate
from spec_jax.models.layers import RowBlocks

K, BATCH, CAPACITY, WIDTH, CHUNK = 4, 3, 128, 8, 16


def small(seed=2, **options):
    """A one-layer model: compiles fast."""
    return tiny.tiny(seed, layers=1, hidden=16, heads=2, kv_heads=1, **options)


# --- the cache against a fresh drafter --------------------------------------------------------------------------------


def drafter_of(model, k=K):
    rows = row_blocks(None, BATCH, WIDTH)
    return DraftModelDrafter(k, model.module, model.vocab_size, model.config.vocab_size, model.max_model_len, rows)


class Driver:
    """Drives a drafter by hand, so that accept counts are chosen freely, per row and per round."""

    def __init__(self, model, k=K):
        self.model, self.k, self.drafter = model, k, drafter_of(model, k)
        self.target = TargetView(model.params, model.module, RowBlocks(), model.vocab_size)
        self._commit, self._propose = jax.jit(self.drafter.commit), jax.jit(self.drafter.propose)

    def start(self, texts):
        """The state after prefilling all tokens but the last of every text, chunk by chunk."""
        state = self.drafter.init(self.model.params, self.target, BATCH, CAPACITY)
        counts = np.array([len(t) - 1 for t in texts])
        for first in range(0, counts.max(), CHUNK):
            tokens = np.zeros((BATCH, CHUNK), np.int32)
            for row, text in enumerate(texts):
                part = text[:-1][first : first + CHUNK]
                tokens[row, : len(part)] = part
            seen = self._seen(tokens, np.full(BATCH, first), np.clip(counts - first, 0, CHUNK), prefill=True)
            state = self._commit(self.model.params, state, seen)
        return state

    def propose(self, state, texts):
        tokens = np.zeros((BATCH, CAPACITY), np.int32)
        for row, text in enumerate(texts):
            tokens[row, : len(text)] = text
        view = View(
            tokens=jnp.asarray(tokens),
            length=jnp.asarray([len(t) for t in texts], jnp.int32),
            last=jnp.asarray([t[-1] for t in texts], jnp.int32),
            room=jnp.full(BATCH, 50),
            live=jnp.ones(BATCH, bool),
            cache=None,
            sampling=tiny.greedy_state(BATCH),
            target=self.target,
            rule="coupled",
        )
        draft, state = self._propose(self.model.params, state, view)
        return np.asarray(draft.tokens), state

    def commit(self, state, texts, runs):
        """Commits `runs` behind `texts`: the last token and all but the newest of the run have now been fed."""
        fed = np.full((BATCH, WIDTH), 13, np.int32)  # what stands behind the count is rejected and must not matter
        for row, (text, run) in enumerate(zip(texts, runs, strict=True)):
            tokens = [text[-1], *run[:-1]] if run else []
            fed[row, : len(tokens)] = tokens
        start = np.array([len(t) - 1 for t in texts])
        return self._commit(self.model.params, state, self._seen(fed, start, np.array([len(r) for r in runs])))

    def _seen(self, tokens, start, count, prefill=False):
        ints = [jnp.asarray(x, jnp.int32) for x in (tokens, start, count)]
        return Seen(ints[0], ints[0], ints[1], ints[2], {}, None, ints[0] * 0, prefill=prefill)


@functools.lru_cache
def driver(k=K):
    return Driver(small(), k)


def reference(model, text, k):
    """The draft recomputed from scratch, without a cache."""
    return tiny.numpy_greedy(model, text, k)


ACCEPT = [
    (0, 1, 2), (3, 4, 0), (4, 4, 4), (4, 0, 1), (2, 4, 4), (0, 0, 4),
    (1, 3, 0), (4, 2, 4), (4, 4, 3), (0, 4, 4), (4, 1, 4), (3, 4, 0),
]  # fmt: skip


@pytest.mark.parametrize("lengths", [(1, 2, 7), (20, 1, 33)])
def test_proposals_equal_a_fresh_drafters_after_every_accept_pattern(lengths):
    """Twelve rounds with accept counts 0..K in every row, against a fresh prefill and a recompute in NumPy."""
    d = driver()
    texts = tiny.prompts_of(d.model, lengths, seed=4)
    state = d.start(texts)
    for accepted in ACCEPT:
        proposals, state = d.propose(state, texts)
        fresh, _ = d.propose(d.start(texts), texts)
        np.testing.assert_array_equal(proposals, fresh)
        assert proposals.tolist() == [reference(d.model, t, K) for t in texts]
        runs = [[*p[:n].tolist(), (int(p[min(n, K - 1)]) + 5) % 97] for p, n in zip(proposals, accepted, strict=True)]
        state = d.commit(state, texts, runs)
        texts = [t + r for t, r in zip(texts, runs, strict=True)]


@pytest.mark.parametrize("pause", [1, 2, 5])
@pytest.mark.parametrize("before", [0, 2, K])
def test_a_pause_in_drafting_leaves_no_hole(before, pause):
    """Rounds that skip `propose` still commit, with one token or with a whole run; rows may also stand still."""
    d = driver()
    texts = tiny.prompts_of(d.model, (1, 6, 18), seed=5)
    state = d.start(texts)
    proposals, state = d.propose(state, texts)
    runs = [[*p[:before].tolist(), 7] for p in proposals]
    rng = np.random.default_rng(before * 10 + pause)
    for step in range(pause + 1):
        state = d.commit(state, texts, runs)
        texts = [t + r for t, r in zip(texts, runs, strict=True)]
        runs = [rng.integers(0, 97, n).tolist() for n in ((1, 3, 0), (WIDTH, 1, 2), (0, 0, 1))[step % 3]]
    proposals, _ = d.propose(state, texts)
    assert proposals.tolist() == [reference(d.model, t, K) for t in texts]


def test_a_pause_before_the_first_draft_leaves_no_hole():
    d = driver()
    texts = tiny.prompts_of(d.model, (1, 1, 40), seed=6)
    state = d.start(texts)
    runs = [[5], [6, 7, 8], [9, 10]]
    state = d.commit(state, texts, runs)
    texts = [t + r for t, r in zip(texts, runs, strict=True)]
    proposals, _ = d.propose(state, texts)
    assert proposals.tolist() == [reference(d.model, t, K) for t in texts]


def test_a_finished_row_stands_still():
    """A row that commits nothing keeps its cache while others go on, and so its proposals."""
    d = driver()
    texts = tiny.prompts_of(d.model, (4, 9, 2), seed=7)
    state = d.start(texts)
    for _ in range(3):
        proposals, state = d.propose(state, texts)
        assert proposals[1].tolist() == reference(d.model, texts[1], K)
        runs = [[*proposals[0].tolist(), 3], [], [4]]
        state = d.commit(state, texts, runs)
        texts = [t + r for t, r in zip(texts, runs, strict=True)]


# --- contexts of different length -------------------------------------------------------------------------------------


def draft_config(model, k=K):
    return {"method": "draft_model", "num_speculative_tokens": k, "model": model}


def test_a_row_that_outgrows_the_draft_models_context_goes_on_without_drafts():
    """Drafter 24, target 64, both the same weights: every draft is accepted until the text is 24 tokens long."""
    target = dataclasses.replace(small(), max_model_len=64)
    draft = dataclasses.replace(small(), max_model_len=24)
    prompts = tiny.prompts_of(target, (20, 3, 40), seed=8)
    result = generate(target, prompts, draft_config(draft), {"max_tokens": 40})
    for prompt, sequence in zip(prompts, result.sequences, strict=True):
        count = min(40, 64 - len(prompt))
        assert sequence.token_ids == tiny.numpy_greedy(target, prompt, count)
        # A draft feeds tokens at positions 0..23 only, so it proposes positions up to 24.
        assert all(at <= 24 for at, flag in enumerate(sequence.accepted, len(prompt)) if flag)
        assert sequence.stats.num_accepted_tokens == sequence.stats.num_draft_tokens
    drafts = [s.stats.num_drafts for s in result.sequences]
    assert drafts == [1, 5, 0]  # 20 -> 25; 3 -> 8 -> 13 -> 18 -> 23 -> 25 (two drafts and a token of the target)
    assert result.sequences[0].stats.num_draft_tokens == 4
    assert result.sequences[1].stats.num_draft_tokens == 4 * 4 + 2


def test_a_draft_model_with_a_longer_context_drafts_to_the_end():
    target = dataclasses.replace(small(), max_model_len=48)
    prompts = tiny.prompts_of(target, (20, 3, 40), seed=8)
    result = generate(target, prompts, draft_config(small()), {"max_tokens": 60})
    for prompt, sequence in zip(prompts, result.sequences, strict=True):
        assert sequence.token_ids == tiny.numpy_greedy(target, prompt, 48 - len(prompt))
        assert sequence.finish_reason == "context"
        assert sequence.stats.num_accepted_tokens == sequence.stats.num_draft_tokens > 0


# --- vocabularies -----------------------------------------------------------------------------------------------------


def padded(rows):
    """The same model of 100 usable ids with its embedding padded to `rows`, the padding full of large values."""
    base = small(vocab=100)
    config = dataclasses.replace(base.config, vocab_size=rows)
    params = dict(base.params)
    for name in ("embedding", "lm_head"):
        fill = np.full((rows - 100, params[name].shape[1]), 100.0, np.float32)
        fill[::2] *= -1  # whatever the sign of the features, some padded logit is huge
        params[name] = jnp.concatenate([params[name], fill])
    return tiny.model_of(dataclasses.replace(base.module, config=config), params, usable=100, name=f"padded-{rows}")


@pytest.mark.parametrize("target_rows, draft_rows", [(112, 128), pytest.param(128, 112, marks=pytest.mark.slow)])
def test_padded_vocabularies_of_different_sizes_work_together(target_rows, draft_rows):
    target, draft = padded(target_rows), padded(draft_rows)
    prompts = tiny.prompts_of(target, (1, 5, 9), seed=9)
    result = generate(target, prompts, draft_config(draft), {"max_tokens": 20})
    unpadded = small(vocab=100)
    assert [s.token_ids for s in result.sequences] == [tiny.numpy_greedy(unpadded, p, 20) for p in prompts]
    assert result.stats.draft_acceptance_rate == 1  # so padding is never proposed either
    rows = {"max_tokens": 20, "temperature": 1.5, "seed": 4}
    sampled = generate(target, prompts, draft_config(draft), rows)
    assert all(0 <= t < 100 for s in sampled.sequences for t in s.token_ids)
    assert sampled.stats.draft_acceptance_rate == 1  # coupled: the same law, the same noise, the same ids


def refuse(target, draft, match):
    """Construction fails, from the sizes alone: the weights of neither model are there."""
    target, draft = (dataclasses.replace(m, params=None) for m in (target, draft))
    config = SpeculativeConfig(method="draft_model", model=draft)
    with pytest.raises(ValueError, match=match):
        build_drafter(config, target, RowBlocks())
    with pytest.raises(ValueError, match=match):
        generate(target, [[1]], config)


def test_vocabularies_that_differ_beyond_padding_are_refused_naming_both_sizes():
    big, small_vocab = padded(128), small(vocab=97)
    refuse(big, small_vocab, "97.*100")
    refuse(small_vocab, big, "97.*100")
    fewer = dataclasses.replace(padded(128), vocab_size=99)
    refuse(big, fewer, "(?s)99.*100|100.*99")
    refuse(fewer, big, "(?s)99.*100|100.*99")


def test_another_tokenizer_is_refused_naming_a_token():
    def with_vocabulary(name, words):
        tokenizer = types.SimpleNamespace(vocabulary={w: i for i, w in enumerate(words)}, decode=str)
        return dataclasses.replace(small(), tokenizer=tokenizer, name=name)

    words = [f"w{i}" for i in range(97)]
    swapped = [*words[:50], words[51], words[50], *words[52:]]
    refuse(
        with_vocabulary("ours", words), with_vocabulary("theirs", swapped), "ours and theirs differ: 'w50' has id 50"
    )
    same = with_vocabulary("again", words)
    drafter, params = build_drafter(
        SpeculativeConfig(**draft_config(same)), with_vocabulary("ours", words), RowBlocks()
    )
    assert isinstance(drafter, DraftModelDrafter) and params is same.params


def test_a_draft_model_must_be_named():
    with pytest.raises(ValueError, match="method='draft_model' needs 'model'"):
        SpeculativeConfig(method="draft_model")
