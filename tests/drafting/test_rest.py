"""Retrieval: every proposal is the likeliest part of a trie of the corpus; corpus files are read, kept and refused."""

import functools
import io

import jax
import numpy as np
import pytest
import tiny
from test_suffix import CAPACITY, VOCAB, Node, trie_of, walk_from

from spec_jax import datastore, suffix_index
from spec_jax.drafting.base import View
from spec_jax.drafting.rest import RestDrafter
from spec_jax.generation import generate
from spec_jax.history import TokenHistory


def reference(text, corpus, k, longest, shortest, tree, depth):
    root = trie_of(corpus, depth)
    for size in range(min(longest, len(text)), shortest - 1, -1):
        node = root
        for token in text[-size:]:
            node = node.children.get(token, Node())
        if node.count:
            return walk_from(node, k, 0.0, tree)[1:3]
    return [], []


@functools.partial(jax.jit, static_argnums=0)
def _proposed(drafter, params, tokens, lengths):
    draft, _ = drafter.propose(params, (), View(tokens, lengths, *[None] * 6, rule="coupled"))
    return draft.tokens, draft.parents, draft.count


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("tree", [True, False])
def test_proposals_equal_the_likeliest_part_of_a_trie(batch, tree):
    rng = np.random.default_rng(batch)
    drafted = 0
    for trial in range(24):
        alphabet, longest, shortest, k = (2, 3, 6, VOCAB)[trial % 4], 5, 1 + trial % 2, 7
        corpus = [rng.integers(0, alphabet, rng.integers(0, 40)).tolist() for _ in range(4)]
        texts = [rng.integers(0, alphabet, rng.integers(1, CAPACITY)).tolist() for _ in range(batch)]
        if trial % 4 == 3 and len(corpus[0]) > 3:
            texts = [text[:8] + corpus[0][:3] for text in texts]
        tokens = np.zeros((batch, CAPACITY), np.int32)
        for row, text in enumerate(texts):
            tokens[row, : len(text)] = text
        drafter, index = RestDrafter(k, longest, shortest, tree), suffix_index.build(corpus, longest + 6)
        found = _proposed(drafter, index, tokens, np.array([len(t) for t in texts], np.int32))
        found, parents, count = (None if x is None else np.asarray(x) for x in found)
        for row, text in enumerate(texts):
            want, want_parents = reference(text, corpus, k, longest, shortest, tree, longest + 6)
            assert found[row, : count[row]].tolist() == want
            if tree:
                assert parents[row, : count[row]].tolist() == want_parents
            drafted += len(want)
    assert drafted > 60


@pytest.mark.slow
def test_text_is_plain_decodings():
    model, sampling, prompts = tiny.tiny(), {"max_tokens": 30}, [[7], [0, 9, 0, 9], [4, 5, 6, 7] * 4]
    plain = tiny.plain(model, prompts, sampling)
    store = TokenHistory(plain)
    for tree in (True, False):
        config = {"method": "rest", "datastore": store, "num_speculative_tokens": 6, "rest_use_tree": tree}
        result = generate(model, prompts, config, sampling)
        assert [s.token_ids for s in result.sequences] == plain
        assert result.stats.num_accepted_tokens > 40


def test_a_corpus_file_is_indexed_once(tmp_path, monkeypatch):
    monkeypatch.setenv("SPEC_JAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datastore, "_loaded", type(datastore._loaded)())
    tokenizer = tiny.with_text(tiny.tiny()).tokenizer
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"text": "some text"}\n\n"more text"\n')
    index = datastore.load_datastore(corpus, tokenizer, 9)
    texts = [tokenizer.encode(text, add_special_tokens=False) for text in ("some text", "more text")]
    want = suffix_index.build(texts, 9)
    jax.tree.map(np.testing.assert_array_equal, index, want)
    assert datastore.load_datastore(corpus, tokenizer, 9) is index
    (kept,) = (tmp_path / "cache" / "datastores").iterdir()
    datastore._loaded.clear()
    monkeypatch.setattr(datastore, "build", None)  # from the file now
    jax.tree.map(np.testing.assert_array_equal, datastore.load_datastore(corpus, tokenizer, 9), want)
    monkeypatch.undo()
    monkeypatch.setenv("SPEC_JAX_CACHE", str(tmp_path / "cache"))
    datastore._loaded.clear()
    whole = kept.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 255
    with io.BytesIO() as other, np.load(kept) as arrays:
        np.savez(other, **{name: np.zeros(3, np.int32) for name in arrays})
        shapes = other.getvalue()
    for damaged in (b"damaged", b"", whole[:4], whole[:900], bytes(flipped), shapes):
        kept.write_bytes(damaged)
        datastore._loaded.clear()
        jax.tree.map(np.testing.assert_array_equal, datastore.load_datastore(corpus, tokenizer, 9), want)
        assert kept.read_bytes() != damaged and list(kept.parent.iterdir()) == [kept]  # built again


def test_bad_corpora_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("SPEC_JAX_CACHE", str(tmp_path / "cache"))
    model = tiny.with_text(tiny.tiny())

    def run(path):
        return generate(model, [[5, 6]], {"method": "rest", "datastore": str(path)}, {"max_tokens": 2})

    bad = tmp_path / "bad.jsonl"
    for content, words in (
        (b'{"text": "a"}\n{"words": 3}\n', "line 2: must be a string"),
        (b'"a"\nnot json\n', "line 2: not valid JSON"),
        (b"\xff\xfe\xff", "not UTF-8"),
        (b"\n\n", "holds no text"),
    ):
        bad.write_bytes(content)
        with pytest.raises(ValueError, match=words):
            run(bad)
    with pytest.raises(FileNotFoundError, match="datastore='.*missing.txt' must be a corpus file"):
        run(tmp_path / "missing.txt")
    for path in (tmp_path, "a\0b", "~nobody_of_this_name/x"):
        with pytest.raises(ValueError, match="must be a corpus file"):
            run(path)
    monkeypatch.setattr(datastore, "MAX_BYTES", 10)
    bad.write_text('"twelve letters"')
    with pytest.raises(ValueError, match="has 16 bytes; at most 10"):
        run(bad)
    with pytest.raises(ValueError, match="has no tokenizer"):
        generate(tiny.tiny(), [[5]], {"method": "rest", "datastore": str(bad)}, {"max_tokens": 2})
    monkeypatch.setattr(suffix_index, "MAX_TOKENS", 8)
    with pytest.raises(ValueError, match="an index at most 8"):
        suffix_index.build([[1] * 9], 4)


def test_a_history_forgets_its_oldest_texts_and_takes_ids_only():
    history = TokenHistory([[1, 2, 3], [4, 5]], max_tokens=6)
    assert len(history) == 5
    first = history.index(4)
    assert history.index(4) is first
    history.add(np.array([6, 7]))
    assert len(history) == 4 and np.asarray(history.index(4).text)[:6].tolist() == [4, 5, -1, 6, 7, -1]
    history.add(range(10))
    assert len(history) == 6 and np.asarray(history.index(4).text)[:6].tolist() == [4, 5, 6, 7, 8, 9]
    kept = len(history)
    for bad in (["text"], [b"bytes"], [[-1]], [[2**31]], [[1.5]], [3, 4], [None], [np.int64(3)], [[1], ["x"]]):
        with pytest.raises(ValueError, match="token ids"):
            history.add(*bad)
        assert len(history) == kept
    history.add([], [])
    assert len(history) == kept
    deep, shallow = history.index(9), history.index(4)
    assert history.index(9) is deep and history.index(4) is shallow
    for bad in ("text", 3):
        with pytest.raises(ValueError, match="must be a list of texts"):
            TokenHistory(bad)
    with pytest.raises(ValueError, match="max_tokens"):
        TokenHistory(max_tokens=0)
