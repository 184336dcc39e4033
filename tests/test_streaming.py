"""Streaming: joined pieces are the text of `generate`, and no piece holds half a character or half a stop string.

Guards B50 (broken characters), B10 and B13 for streams (a token behind the end; a partial stop string), and B34 (what a
stream that is dropped leaves behind).
"""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from spec_jax.generation import generate
from spec_jax.streaming import stream
from spec_jax.text import INCOMPLETE, RowText

TEXT = "aé日b😀cdéé日😀,k"


@functools.lru_cache
def tokens(spelling):
    """The text as single bytes, or as the tokenizer writes it, with a byte that is never valid in the middle."""
    pieces = tiny.ToyTokenizer().pieces
    invalid = [pieces.index(b"\xff")]
    if spelling == "bytes":
        ids = [pieces.index(bytes([b])) for b in TEXT.encode()]
    else:
        ids = tiny.ToyTokenizer().encode(TEXT)
    return ids[:7] + invalid + ids[7:]


def model():
    return tiny.with_text(tiny.tiny())


def one_text(state, token):
    """A grammar that allows one text only, and then nothing. state: its next place in the text, the text, and -1s."""
    state = jnp.where(jnp.arange(len(state)) == 0, jnp.where(token < 0, 1, state[0] + 1), state)
    return state, jnp.arange(97) == state[state[0]]


def forced(ids):
    """The options that make `ids` the text; the text is an argument, so that all texts share one program."""
    return {"mask_fn": one_text, "mask_state": np.array([0, *ids, *[-1] * (62 - len(ids))], np.int32)}


@pytest.mark.parametrize("spelling", ["bytes", "tokens"])
def test_pieces_cut_anywhere_join_to_the_full_decode(spelling):
    """Every way that two cuts can split the tokens into steps."""
    tokenizer, ids = tiny.ToyTokenizer(), tokens(spelling)
    full = tokenizer.decode(ids)
    for first in range(len(ids)):
        for second in range(first, len(ids)):
            row = RowText(tokenizer)
            pieces = [row.piece(ids[:first]), row.piece(ids[:second]), row.piece(ids), row.last_piece(full)]
            assert "".join(pieces) == full
            assert all(piece.count(INCOMPLETE) <= 1 for piece in pieces), "the only invalid byte, and no half character"


def test_a_character_is_shown_with_the_token_that_completes_it():
    tokenizer, row = tiny.ToyTokenizer(), RowText(tiny.ToyTokenizer())
    ids = [tokenizer.pieces.index(bytes([b])) for b in "a😀b".encode()]
    assert [row.piece(ids[:n]) for n in range(1, 7)] == ["a", "", "", "", "😀", "b"]


def test_an_invalid_tail_comes_at_the_end():
    tokenizer, row = tiny.ToyTokenizer(), RowText(tiny.ToyTokenizer())
    ids = [tokenizer.pieces.index(bytes([b])) for b in "a😀".encode()[:-1]]
    text = tokenizer.decode(ids)
    assert row.piece(ids) == "a"
    assert row.last_piece(text) == text[1:] != ""


def test_the_beginning_of_a_stop_string_is_held_back_until_it_is_none():
    tokenizer, row = tiny.ToyTokenizer(), RowText(tiny.ToyTokenizer(), stop=("bcd", "ck"))
    spelled = [tokenizer.pieces.index(bytes([b])) for b in b"abcbcck"]
    shown = []
    for n in range(1, len(spelled) + 1):
        found = row.find_stop(spelled[:n])
        shown.append(row.last_piece(found.text) if found else row.piece(spelled[:n]))
    assert shown == ["a", "", "", "bc", "", "bc", ""]
    assert (found.count, found.text, found.string) == (7, "abcbc", "ck")


@pytest.mark.parametrize("minimum", range(5))
def test_a_minimum_that_ends_inside_a_character(minimum):
    """A character is complete with its last byte: only behind the minimum may it, or what follows it, stop."""
    tokenizer = tiny.ToyTokenizer()
    ids = [tokenizer.pieces.index(bytes([b])) for b in "日x日".encode()]
    for strings, first in ((("日",), 3), (("x",), 4), (("日x",), 4), (("日", "x"), 3)):
        row = RowText(tokenizer, strings, minimum)
        found = row.find_stop(ids)
        ends = [n for n in (3, 4, 7) if n > minimum and any(tokenizer.decode(ids[:n]).endswith(s) for s in strings)]
        assert (found and found.count) == (ends[0] if ends else None), (strings, first)


def test_looking_for_stops_takes_time_in_proportion_to_the_text():
    """Every look decodes a few tokens, and none the whole text again."""

    class Counting(tiny.ToyTokenizer):
        decoded = 0

        def decode(self, ids):
            Counting.decoded += len(ids)
            return super().decode(ids)

    ids = tokens("tokens") * 40
    row = RowText(Counting(), ("zzz",))
    for end in range(4, len(ids), 4):
        assert row.find_stop(ids[:end]) is None
        row.piece(ids[:end])
    assert Counting.decoded < 60 * len(ids)


@pytest.mark.parametrize("k", [0, 3, *(pytest.param(k, marks=pytest.mark.slow) for k in (1, 7))])
@pytest.mark.parametrize("spelling", ["bytes", "tokens"])
def test_the_stream_of_every_run_length(spelling, k):
    """Steps of 1 to 8 tokens cut the same text in different places."""
    ids = tokens(spelling)
    sampling = {"max_tokens": 64, **GRAMMARS[spelling], "seed": 0}
    drafter = tiny.script([[5, 6] + ids], k) if k else None
    pieces, flow = [], stream(model(), [5, 6], None, sampling, drafter=drafter)
    for piece in flow:
        assert piece
        pieces.append(piece)
    full = tiny.ToyTokenizer().decode(ids)
    assert "".join(pieces) == full == flow.result.sequences[0].text
    assert flow.result.sequences[0].token_ids == ids
    assert sum(piece.count(INCOMPLETE) for piece in pieces) == full.count(INCOMPLETE) == 1
    assert len(pieces) >= 3
    again = generate(model(), [[5, 6]], None, sampling, drafter=drafter).sequences[0]
    assert again == flow.result.sequences[0]


GRAMMARS = {spelling: forced(tokens(spelling)) for spelling in ("bytes", "tokens")}


def test_the_first_piece_comes_after_one_step():
    target = model()
    flow = stream(target, [5, 6], None, {"max_tokens": 40, **GRAMMARS["tokens"]})
    assert next(flow) == "a"
    assert flow.result is None
    list(flow)
    assert flow.result.stats.num_steps == len(tokens("tokens"))


@pytest.mark.parametrize("index", range(7))
def test_nothing_is_streamed_behind_a_stop(index):
    """A stop token, and a stop string, at every offset of an accepted run."""
    target = tiny.with_text(tiny.tiny())
    prompt = tiny.prompts_of(target, (3, 9), seed=11)[1]
    full = generate(target, [prompt], None, {"max_tokens": 24}).sequences[0]
    drafter = tiny.script([prompt + full.token_ids], 7)
    string = full.text[index : index + 3]
    for stop in ({"stop_token_ids": [full.token_ids[index]]}, {"stop": [string]}):
        flow = stream(target, prompt, None, {"max_tokens": 24, **stop}, drafter=drafter)
        text = "".join(flow)
        [sequence] = flow.result.sequences
        assert text == sequence.text and sequence.finish_reason == "stop"
        if "stop" in stop:
            assert text == full.text[: full.text.index(string)]
        else:
            assert sequence.token_ids == full.token_ids[: full.token_ids.index(full.token_ids[index]) + 1]


def test_a_dropped_stream_leaves_nothing_behind():
    target = tiny.with_text(tiny.tiny())
    long, short = tiny.prompts_of(target, [40, 3], seed=2)
    config = {"method": "ngram", "num_speculative_tokens": 4}
    want = generate(target, [short], config, {"max_tokens": 9, "logprobs": 1, "seed": 0}).sequences[0]
    flow = stream(target, long, config, {"max_tokens": 200, "temperature": 1.0, "seed": 1})
    next(flow)
    flow.close()
    assert list(flow) == []
    assert generate(target, [short], config, {"max_tokens": 9, "logprobs": 1, "seed": 0}).sequences[0] == want


@pytest.mark.parametrize("budget, prompt", [(0, [1, 2]), (5, [1] * 256)], ids=["no token", "full context"])
def test_a_stream_without_a_token(budget, prompt):
    flow = stream(tiny.with_text(tiny.tiny()), prompt, None, {"max_tokens": budget})
    assert list(flow) == []
    assert flow.result.sequences[0].token_ids == []


@pytest.mark.parametrize(
    "prompt, sampling, message",
    [
        ([[1], [2]], None, "one prompt, not 2"),
        (["ab", "cd"], None, "one prompt, not 2"),
        ("ab", {"n": 2}, "n=2 samples"),
        ("", None, "prompt 0 is empty"),
        ("ab", {"temprature": 1}, "did you mean 'temperature'"),
        (3, None, "prompt must be a string"),
    ],
)
def test_bad_input_is_refused_at_once(prompt, sampling, message):
    with pytest.raises(ValueError, match=message):
        stream(tiny.with_text(tiny.tiny()), prompt, None, sampling)


def test_a_model_without_a_tokenizer_has_no_text_to_stream():
    with pytest.raises(ValueError, match="no tokenizer"):
        stream(tiny.tiny(), [1, 2])


@pytest.mark.parametrize("prompt", ["ab", ["ab"], [27, 28], [[27, 28]]])
def test_one_prompt_in_every_form(prompt):
    target = tiny.with_text(tiny.tiny())
    ids = [target.tokenizer.encode("ab")] if "ab" in (prompt, prompt[0]) else [[27, 28]]
    assert (
        "".join(stream(target, prompt, None, {"max_tokens": 5}))
        == generate(target, ids, None, {"max_tokens": 5}).sequences[0].text
    )
