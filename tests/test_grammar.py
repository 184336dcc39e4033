"""Grammars as token automata, against Python's `re`, on tokenizers of three kinds."""

import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grammar_cases import (
    EOS,
    TARGETS,
    accepts,
    backend_of,
    byte_level,
    in_bytes,
    json_grammar,
    masks,
    model_with,
    random_walk,
    regex,
    smollm2,
    step,
)
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tiny import model_of
from tokenizers import decoders

import spec_jax.grammar
from spec_jax.grammar import json_schema_grammar, regex_grammar
from spec_jax.models.config import LlamaConfig
from spec_jax.models.llama import Llama, init_params
from spec_jax.tokenizer import Tokenizer

PATTERNS = [
    "a|ab",  # leftmost-first matching would never come to "ab"
    "(yes|yes a|ye)?",
    "a*",
    "^ab?$|b",
    "[ab ]{2,4}",
    "(é|東|🙂){1,3}a?",
    r'a"[^"\\\n]{0,3}"',
    r"-?(0|[1-9][0-9]{0,3})(\.[0-9]+)?",
    "(?i)YES|.{1,2}",
    "(?x) a  b | 1 2",
    r"\{( a)+?\}",
    "(?:ab$|a)b*",
    r"a\$|b\\$",
]


# --- Regular expressions ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_texts_are_allowed_if_and_only_if_they_match(name, data):
    target = TARGETS[name]
    pattern = data.draw(st.sampled_from(PATTERNS))
    matching = st.from_regex(re.compile(pattern), fullmatch=True)
    text = data.draw(matching | st.text('ab yes12é東🙂"{}\\$.', max_size=6))
    ids = target.tokenizer.encode(text)
    assume(target.tokenizer.decode(ids) == text)  # a vocabulary without bytes loses characters
    assert accepts(regex(pattern, target), ids) == bool(re.fullmatch(pattern, text))


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_random_walks_decode_to_matches(pattern, name):
    target, rng = TARGETS[name], np.random.default_rng(0)
    texts = {target.tokenizer.decode(random_walk(regex(pattern, target), rng)) for _ in range(10)}
    assert [text for text in texts if not re.fullmatch(pattern, text)] == []
    assert len(texts) > 1


def test_characters_may_be_split_over_tokens_in_every_way():
    target = TARGETS["byte-level"]
    grammar = regex("a東é", target)
    ids = [target.tokenizer.token_to_id(token) for token in map(in_bytes, "a東é")]
    assert ids == [target.tokenizer.token_to_id("a"), None, None]  # no token is the whole character

    def tokens(*pieces):
        return [target.tokenizer.token_to_id(piece) for piece in pieces]

    spelled = in_bytes("a東é")
    single = tokens(*spelled)
    joined = tokens(spelled[:2], *spelled[2:])  # the letter with the first byte
    pair = tokens("a", spelled[1:3], *spelled[3:])  # the first two bytes
    for ids in (single, joined, pair):
        assert None not in ids and target.tokenizer.decode(ids) == "a東é"
        assert accepts(grammar, ids)
    assert not accepts(grammar, single[:-1])
    assert not accepts(grammar, single[:1] + single[2:])
    after_first_byte = np.flatnonzero(masks(grammar, single[:2])[-1])
    assert after_first_byte.tolist() == single[2:3]  # "東" and no other character


def test_a_token_that_leads_nowhere_is_not_allowed():
    """Tokens are not all bytes: a match that the vocabulary cannot finish must not be begun."""
    backend = backend_of(["a", "b", "c"], [("b", "c")], decoders.ByteLevel())
    target = model_with(backend)
    a, b, bc = (target.tokenizer.token_to_id(token) for token in ("a", "b", "bc"))
    assert np.flatnonzero(masks(regex_grammar("ax|bc", target), [])[0]).tolist() == [b, bc]
    assert not masks(regex_grammar("ax|bc", target), [])[0, a]
    with pytest.raises(ValueError, match=r"the pattern 'x\+': no sequence of tokens of the model 'toy' matches it"):
        regex_grammar("x+", target)


# --- The automaton ----------------------------------------------------------------------------------------------------


def test_the_first_call_changes_nothing_and_illegal_tokens_are_final():
    target = TARGETS["byte-level"]
    grammar = regex("ab|b", target)
    a, b = (target.tokenizer.token_to_id(token) for token in "ab")
    size, dead = target.vocab_size, grammar.next_state.shape[0] - 1
    state, mask = step(grammar, jnp.int32(0), jnp.int32(-1))
    assert (int(state), state.dtype, mask.dtype, mask.shape) == (0, jnp.int32, jnp.bool_, (size,))
    assert mask[a] and mask[b] and not mask[0]
    middle, mask = step(grammar, state, jnp.int32(a))
    assert np.flatnonzero(mask).tolist() == [b]
    assert int(step(grammar, middle, jnp.int32(-1))[0]) == int(middle) != dead
    for token in (a, 0, 1, size, 2**31 - 1):
        state, mask = step(grammar, middle, jnp.int32(token))
        assert int(state) == dead and not mask.any()
        for further in (a, b, 0, -1):
            state, mask = step(grammar, state, jnp.int32(further))
            assert int(state) == dead and not mask.any()
    target = byte_level(added=["zz"])  # as the last token, which must not stand for those behind it
    grammar = regex_grammar("z*", target)
    assert masks(grammar, [target.vocab_size - 1])[-1].any()
    assert not masks(grammar, [target.vocab_size])[-1].any()


@pytest.mark.parametrize("eos", EOS)
def test_nothing_is_allowed_after_the_end(eos):
    target = TARGETS["byte-level"]
    assert np.flatnonzero(masks(regex("", target), [])).tolist() == list(EOS)
    allowed = masks(regex("a*", target), [target.tokenizer.token_to_id("a"), eos])
    assert allowed[0, eos] and allowed[1, eos]
    assert not allowed[2].any()


@pytest.mark.parametrize("name", TARGETS)
def test_special_tokens_are_never_text(name):
    """In no state, although their names match and the decoder leaves them out."""
    grammar = regex("(?s).*", TARGETS[name])
    assert masks(grammar, [])[0].sum() > 20
    reachable = np.asarray(grammar.next_state)[:, np.asarray(grammar.class_of)] >= 0
    assert not reachable[:, 1].any()
    assert reachable[:, 0].any() and (reachable[:, 0] == reachable[:, 2]).all()


def test_end_tokens_are_no_text_even_if_they_are_ordinary_tokens():
    plain = TARGETS["byte-level"]
    dot = plain.tokenizer.token_to_id(".")
    target = model_of(plain.module, {}, usable=plain.vocab_size, tokenizer=plain.tokenizer, eos=[dot])
    a = plain.tokenizer.token_to_id("a")
    assert not masks(regex_grammar(r"a[.]", plain), [a])[-1, 0]
    with pytest.raises(ValueError, match="no sequence of tokens"):
        regex_grammar("a[.]", target)
    assert np.flatnonzero(masks(regex_grammar("a", target), [a])[-1]).tolist() == [dot]


def test_ids_outside_the_models_vocabulary_are_not_used():
    small = byte_level(vocab_size=3 + 256)  # the merges are beyond it
    mask = masks(regex_grammar("(?s).*", small), [])[0]
    assert mask.shape == (259,) and mask[small.tokenizer.token_to_id("a")]


def test_grammars_of_the_same_shapes_share_one_program():
    traced = []

    @jax.jit
    def run(grammar, state, token):
        traced.append(1)
        return grammar(state, token)

    target = TARGETS["byte-level"]
    token = jnp.int32(target.tokenizer.token_to_id("a"))
    results = [run(regex_grammar(pattern, target), jnp.int32(0), token)[1] for pattern in ("ab", "a(1|2){2,9}")]
    assert len(traced) == 1
    assert results[0].sum() == 1 and results[1].sum() == 3  # "b"; "1", "2" and "12"


def test_tables_are_small_and_padded_to_powers_of_two():
    target = TARGETS["byte-level"]
    for grammar in (regex("a", target), regex("[a-z]{0,200}", target), json_grammar('{"type": "object"}', target)):
        states, classes = grammar.next_state.shape
        assert states & (states - 1) == classes & (classes - 1) == 0
        assert grammar.next_state.dtype == grammar.class_of.dtype == jnp.int32
        used = np.unique(np.asarray(grammar.next_state), axis=1).shape[1]
        assert used - 2 < len(np.unique(grammar.class_of)) <= used  # equal columns are one class
        assert (np.asarray(grammar.next_state)[-1] == -1).all()
    assert regex("[a-z]{0,200}", target).next_state.shape[0] == 256
    allows = (np.asarray(regex("a", target).next_state) >= 0).any(axis=1)
    assert allows.sum() == 2  # in front of the token and behind it
    assert len(jax.tree.leaves(grammar)) == 2


def test_grammars_are_compared_by_identity():
    """As a field of `SamplingParams` they are compared and hashed, which arrays are not made for."""
    one, other = (regex_grammar("a", TARGETS["byte-level"]) for _ in range(2))
    assert one == one and one != other and len({one, other}) == 2


def test_rows_can_be_mapped():
    target = TARGETS["byte-level"]
    grammar = regex("ab|b", target)
    a, b = (target.tokenizer.token_to_id(token) for token in "ab")
    states, allowed = jax.jit(jax.vmap(grammar))(jnp.zeros(3, jnp.int32), jnp.array([-1, a, b]))
    for row, token in enumerate((-1, a, b)):
        state, mask = step(grammar, jnp.int32(0), jnp.int32(token))
        assert states[row] == state and (allowed[row] == mask).all()


# --- Tokenizers -------------------------------------------------------------------------------------------------------


def test_added_tokens_are_literal_text():
    target = byte_level(added=["  ", "yes!", "é"])
    double, yes, acute = (target.tokenizer.token_to_id(token) for token in ("  ", "yes!", "é"))
    mask = masks(regex_grammar("(  |yes!|é|Ã)+", target), [])[0]
    assert mask[double] and mask[yes]
    assert target.tokenizer.decode([acute]) == "\ufffd"  # read as the byte that "é" stands for
    assert not mask[acute] and not masks(regex_grammar("(?s).*", target), [])[0, acute]


def test_a_space_at_the_start_is_the_one_that_the_decoder_drops():
    for name in ("sentencepiece", "metaspace"):
        target = TARGETS[name]
        assert target.tokenizer.decode([target.tokenizer.token_to_id("▁ab")]) == "ab"
        assert accepts(regex("ab", target), [target.tokenizer.token_to_id("▁ab")])
        assert accepts(regex("ab ab", target), [target.tokenizer.token_to_id("▁ab")] * 2)
        assert not accepts(regex(" ab", target), [target.tokenizer.token_to_id("▁ab")])
    target = TARGETS["sentencepiece that keeps the space"]
    assert accepts(regex(" ab", target), [target.tokenizer.token_to_id("▁ab")])


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.WordPiece(),
        decoders.BPEDecoder(),
        decoders.Sequence([decoders.ByteFallback(), decoders.Strip(" ", 1, 0)]),
        decoders.Sequence([decoders.ByteLevel(), decoders.Strip("a", 1, 0)]),
    ],
)
def test_decoders_that_cannot_be_inverted(decoder):
    with pytest.raises(ValueError, match="the bytes of tokens cannot be told for the tokenizer's decoder"):
        regex_grammar("a", model_with(backend_of("ab", decoder=decoder)))


def test_a_decoder_that_does_otherwise_than_it_says(monkeypatch):
    target = byte_level()
    decode = Tokenizer.decode
    monkeypatch.setattr(Tokenizer, "decode", lambda self, ids: decode(self, ids).upper())
    with pytest.raises(ValueError, match="decodes 'a' in a way that is not understood"):
        regex_grammar("a", target)


def test_a_vocabulary_is_read_once(monkeypatch):
    target, calls = byte_level(), []
    decode = Tokenizer.decode
    monkeypatch.setattr(Tokenizer, "decode", lambda self, ids: calls.append(ids) or decode(self, ids))
    regex_grammar("a", target)
    assert len(calls) > target.vocab_size
    calls.clear()
    regex_grammar("b", target)
    assert not calls


# --- Errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pattern, reason",
    [
        (5, "pattern=5 must be a str"),
        ("(a", r"the pattern '\(a' cannot be compiled.*unterminated subpattern at position 0"),
        ("a)(b", r"cannot be compiled.*unbalanced parenthesis at position 1"),
        ("[b-a]", "cannot be compiled.*bad character range"),
        ("(?=a)b", "cannot be compiled.*look-around"),
        (r"(a)\1", "cannot be compiled.*back-references"),
        (r"\ba", "cannot be compiled.*word boundaries"),
        ("(^a|b)c", "cannot be compiled.*anchors"),
        ("a$b", "cannot be compiled: a branch matches nothing"),
        (r"[^\s\S]", "cannot be compiled: nothing matches it"),
        ("\ud800", "cannot be compiled"),
    ],
)
def test_patterns_that_cannot_be_used(pattern, reason):
    with pytest.raises(ValueError, match=reason):
        regex_grammar(pattern, TARGETS["byte-level"])


@pytest.mark.parametrize("make, text", [(regex_grammar, "a"), (json_schema_grammar, "{}")])
def test_models_that_cannot_be_used(make, text):
    good = TARGETS["byte-level"]
    without = model_of(good.module, {}, eos=EOS)
    with pytest.raises(ValueError, match="the model 'toy' has no tokenizer"):
        make(text, without)
    endless = model_of(good.module, {}, tokenizer=good.tokenizer)
    with pytest.raises(ValueError, match="the model 'toy' has no end-of-text ids"):
        make(text, endless)


@pytest.mark.parametrize("make, text", [(regex_grammar, "a"), (json_schema_grammar, "{}")])
def test_the_missing_package_is_named(make, text, monkeypatch):
    monkeypatch.setitem(sys.modules, "outlines_core", None)
    with pytest.raises(ImportError, match=r"pip install 'spec_jax\[grammar\]'"):
        make(text, TARGETS["byte-level"])


# --- Whole runs -------------------------------------------------------------------------------------------------------


def test_the_example_of_the_documentation_runs_as_printed():
    toy = TARGETS["byte-level"]
    module, rng = Llama(LlamaConfig(toy.vocab_size + 5, 16, 32, 1, 2, 1, 8, 64)), np.random.default_rng(4)
    shapes = jax.eval_shape(lambda: init_params(module))  # drawing from these takes no compilation
    params = jax.tree.map(lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape), leaf.dtype), shapes)
    target = model_of(module, params, usable=toy.vocab_size, tokenizer=toy.tokenizer, eos=EOS)
    lines = [line.strip() for line in spec_jax.grammar.__doc__.splitlines() if line.startswith("    ")]
    names = {"target": target, "prompts": ["yes", "12 ab"]}
    exec("\n".join(lines), names)
    for sequence in names["result"].sequences:
        # What a random model writes may run into the limit before the full stop.
        end = r"\." if sequence.finish_reason == "stop" else r"\.?"
        assert re.fullmatch(f"(yes|no), because [a-z ]+{end}", sequence.text)


@pytest.mark.slow
def test_smollm2_regex():
    target, rng = smollm2(), np.random.default_rng(2)
    pattern = r"(The|A) [a-z]{2,12} (is|was) [0-9]{1,3}(\.[0-9]{2})? €, (東京|naïve|🙂)!"
    grammar = regex_grammar(pattern, target)
    for text in ("The cat is 12.50 €, 東京!", "A function was 7 €, 🙂!", "The end is 0 €, naïve!"):
        assert re.fullmatch(pattern, text) and accepts(grammar, target.tokenizer.encode(text))
        assert not accepts(grammar, target.tokenizer.encode(text + "!"))
    for _ in range(20):
        assert re.fullmatch(pattern, target.tokenizer.decode(random_walk(grammar, rng)))
