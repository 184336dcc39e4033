"""Prompt files: both formats, and errors that name the line."""

import collections
import json

import pytest

from spec_jax import prompts


def write(tmp_path, *lines):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return path


def test_builtin_set_has_four_prompts_in_each_of_six_categories():
    counts = collections.Counter(prompt.category for prompt in prompts.builtin_prompts())
    expected = ("chat", "code_editing", "summarising", "extraction", "maths", "translation")
    assert counts == dict.fromkeys(expected, 4)
    assert len({prompt.text for prompt in prompts.builtin_prompts()}) == 24


def test_summaries_have_passages_of_150_to_250_words():
    texts = [prompt.text for prompt in prompts.builtin_prompts() if prompt.category == "summarising"]
    assert all(150 <= len(text.split()) <= 250 for text in texts)


def test_turns_use_the_first_turn(tmp_path):
    path = write(tmp_path, {"category": "writing", "turns": ["one", "two"]}, "", {"turns": ["three"]})
    first, second = prompts.read_prompts(path)
    assert (first.category, first.text) == ("writing", "one")
    assert (second.category, second.messages) == ("other", ({"role": "user", "content": "three"},))


def test_messages_end_with_the_last_user_turn(tmp_path):
    conversation = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "hi"},
        {"role": "user", "content": "bye"},
        {"role": "assistant", "content": "the reference answer"},
    ]
    (prompt,) = prompts.read_prompts(write(tmp_path, {"messages": conversation}))
    assert list(prompt.messages) == conversation[:4]


def test_line_separators_inside_a_string_do_not_split_a_line(tmp_path):
    (prompt,) = prompts.read_prompts(write(tmp_path, '{"turns": ["a\u2028b"]}'))
    assert prompt.text == "a\u2028b"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "expected a JSON object, got list"),
        ('{"text": "x"}', "neither 'turns' .* nor 'messages'"),
        ('{"turns": []}', "'turns' must be a list of strings"),
        ('{"turns": "x"}', "'turns' must be a list of strings"),
        ('{"turns": ["x"], "category": 3}', "category=3 must be a non-empty string"),
        ('{"turns": ["x"], "category": "all"}', "reserved"),
        ('{"messages": []}', "non-empty list"),
        ('{"messages": [{"role": "user"}]}', "needs the strings 'role' and 'content'"),
        ('{"messages": [{"role": "system", "content": "x"}]}', "no message with role 'user'"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    with pytest.raises(ValueError, match=f"prompts.jsonl, line 2: .*{message}"):
        prompts.read_prompts(write(tmp_path, {"turns": ["fine"]}, line))


def test_an_empty_file_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="holds no prompts"):
        prompts.read_prompts(write(tmp_path))


def test_a_file_that_is_not_text_is_an_error(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not UTF-8"):
        prompts.read_prompts(path)


def test_limit_counts_per_category():
    every = prompts.builtin_prompts()
    assert len(prompts.limit_per_category(every, 2)) == 12
    assert prompts.limit_per_category(every, None) == every
    with pytest.raises(ValueError, match="max_prompts=0 must be at least 1"):
        prompts.limit_per_category(every, 0)
