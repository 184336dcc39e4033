"""Tokenizers from GGUF metadata and Hugging Face folders, chat templates, and the end ids they state."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from spec_jax.tokenizer import Tokenizer, tokenizer_from_folder, tokenizer_from_gguf

CHATML = (
    "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ t", "h e", "Ġt he", "c a", "ca t", "1 2", "12 3", "Ġ a"]
HELLO = [{"role": "user", "content": "the cat"}]


def byte_alphabet() -> list[str]:
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def metadata(pre: str | None = "smollm", **changes) -> dict:
    """GGUF keys of a byte-level BPE with three control tokens, the 256 bytes and a few merges."""
    tokens = SPECIAL + byte_alphabet() + [merge.replace(" ", "") for merge in MERGES]
    keys = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": CHATML,
    }
    keys |= {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return {key: value for key, value in keys.items() if value is not None}


def build(pre: str | None = "smollm", **changes) -> Tokenizer:
    return tokenizer_from_gguf(metadata(pre, **changes), "toy.gguf")


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.id_to_token(i) for i in tokenizer.encode(text)]


# --- GGUF -------------------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=40))
def test_text_survives_a_round_trip(text):
    if any(special in text for special in SPECIAL):
        return
    for tokenizer in TOKENIZERS:
        assert tokenizer.decode(tokenizer.encode(text)) == text


TOKENIZERS = [build("smollm"), build("gpt-2"), build("llama-bpe", add_bos_token=False)]


def test_digits_are_split_as_the_pre_tokenizer_says():
    assert pieces(build("smollm"), "123") == ["1", "2", "3"]
    assert pieces(build("gpt-2"), "123") == ["123"]
    assert pieces(build("qwen2"), "123") == ["1", "2", "3"]
    assert pieces(build("llama-bpe"), "1234")[1:] == ["123", "4"]


def test_spaces_belong_to_the_next_word_and_merges_apply_in_order():
    assert pieces(build(), "cat the the") == ["cat", "Ġthe", "Ġthe"]
    assert pieces(build(), "a  the") == ["a", "Ġ", "Ġthe"]


def test_llama3_takes_whole_words_from_the_vocabulary_first():
    """`ignore_merges`: a word that is a token is that token even if no merge leads to it."""
    keys = metadata("llama-bpe", add_bos_token=False)
    keys["tokenizer.ggml.tokens"] = [*keys["tokenizer.ggml.tokens"], "dog"]
    keys["tokenizer.ggml.token_type"] = [*keys["tokenizer.ggml.token_type"], 1]
    assert pieces(tokenizer_from_gguf(keys, "toy"), "dog") == ["dog"]
    keys["tokenizer.ggml.pre"] = "gpt-2"
    assert pieces(tokenizer_from_gguf(keys, "toy"), "dog") == ["d", "o", "g"]


def test_qwen_normalises_to_composed_characters():
    assert build("qwen2").encode("e\u0301") == build("qwen2").encode("\u00e9")
    assert build("smollm").encode("e\u0301") != build("smollm").encode("\u00e9")


def test_special_tokens_are_single_ids_and_left_out_of_text():
    tokenizer = build()
    ids = tokenizer.encode("the<|im_end|>cat")
    assert ids.count(2) == 1
    assert tokenizer.decode(ids) == "thecat"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "the<|im_end|>cat"
    assert tokenizer.special_ids == {0, 1, 2}


def test_bos_is_added_once_where_the_file_says_so():
    assert build(add_bos_token=True).encode("cat")[0] == 1
    assert build(add_bos_token=True).encode("cat").count(1) == 1
    assert 1 not in build(add_bos_token=False).encode("cat")
    assert 1 not in build().encode("cat")
    assert build("llama-bpe").encode("cat")[0] == 1  # this pre-tokenizer's models want it unless told otherwise
    assert build(add_bos_token=True).apply_chat_template(HELLO).count(1) == 2  # two <|im_start|>, none added


def test_half_a_character_is_a_replacement_mark_and_nothing_is_lost():
    tokenizer = build()
    ids = tokenizer.encode("x🙂é東")
    assert tokenizer.decode(ids) == "x🙂é東"
    assert tokenizer.decode(ids[:3]) == "x\ufffd"
    assert tokenizer.decode(ids[2:]).endswith("é東")


def test_padding_tokens_are_not_part_of_the_vocabulary():
    keys = metadata()
    size = len(keys["tokenizer.ggml.tokens"])
    keys["tokenizer.ggml.tokens"] = [*keys["tokenizer.ggml.tokens"], f"[PAD{size}]", f"[PAD{size + 1}]"]
    keys["tokenizer.ggml.token_type"] = [*keys["tokenizer.ggml.token_type"], 5, 5]
    tokenizer = tokenizer_from_gguf(keys, "toy")
    assert tokenizer.vocab_size == size
    with pytest.raises(ValueError, match=f"token id {size} is outside the vocabulary; ids are 0..{size - 1}"):
        tokenizer.decode([5, size])
    with pytest.raises(ValueError, match="-1"):
        tokenizer.decode([-1])


def test_missing_pre_tokenizer_is_a_warning():
    with pytest.warns(UserWarning, match="does not name its pre-tokenizer"):
        tokenizer = build(None)
    assert pieces(tokenizer, "123") == ["123"]


@pytest.mark.parametrize("changes, named", [({"pre": "tekken"}, "'tekken'"), ({"model": "llama"}, "'llama'")])
def test_unsupported_tokenizers_leave_token_id_prompts(changes, named):
    with pytest.warns(UserWarning, match=f"{named} is not supported.*token ids"):
        assert build(**changes) is None


def test_no_tokenizer_at_all():
    assert tokenizer_from_gguf({}, "toy") is None


def test_damaged_vocabularies():
    with pytest.raises(ValueError, match="token types"):
        build(token_type=[1, 1])
    with pytest.raises(ValueError, match="differ"):
        build(tokens=["a", "a"], token_type=[1, 1], merges=[])
    with pytest.raises(ValueError, match="damaged.*out of vocabulary"):
        build(merges=["a nothing"])


# --- End ids ----------------------------------------------------------------------------------------------------------


def test_end_ids_join_metadata_and_well_known_special_tokens():
    assert build().eos_token_ids == (0, 2)  # <|endoftext|> is special; <|im_end|> is stated
    assert build(eos_token_id=0).eos_token_ids == (0, 2)  # <|im_end|> is in the chat template
    assert build(eot_token_id=1).eos_token_ids == (0, 1, 2)


def test_end_of_turn_counts_only_if_special_and_in_the_template():
    keys = metadata(eos_token_id=0)
    assert tokenizer_from_gguf(keys | {"tokenizer.chat_template": "{{ messages }}"}, "toy").eos_token_ids == (0,)
    types = [3, 3, 1] + keys["tokenizer.ggml.token_type"][3:]
    assert tokenizer_from_gguf(keys | {"tokenizer.ggml.token_type": types}, "toy").eos_token_ids == (0,)


# --- Chat templates ---------------------------------------------------------------------------------------------------


def test_chat_template():
    tokenizer = build()
    messages = [{"role": "system", "content": "a"}, *HELLO]
    ids = tokenizer.apply_chat_template(messages)
    text = "<|im_start|>system\na<|im_end|>\n<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(ids, skip_special_tokens=False) == text == tokenizer.render_chat(messages)
    assert (ids.count(1), ids.count(2)) == (3, 2)
    without = tokenizer.apply_chat_template(messages, add_generation_prompt=False)
    assert ids[: len(without)] == without and len(without) < len(ids)


@pytest.mark.parametrize(
    "messages, named",
    [
        ([], r"\[\]"),
        ("hello", "'hello'"),
        ({"role": "user", "content": "x"}, "role"),
        ([{"role": "user"}], "'content' of message 0 is None"),
        ([{"role": 3, "content": "x"}], "'role' of message 0 is 3"),
        ([*HELLO, "x"], "message 1 is 'x'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "'content' of message 0"),
    ],
)
def test_malformed_messages(messages, named):
    with pytest.raises(ValueError, match=f"chat messages are a non-empty list of dicts.*{named}"):
        build().apply_chat_template(messages)


def template(source: str) -> Tokenizer:
    return tokenizer_from_gguf(metadata() | {"tokenizer.chat_template": source}, "toy")


def test_template_helpers():
    assert template("{{ bos_token }}|{{ eos_token }}").render_chat(HELLO) == "<|im_start|>|<|im_end|>"
    assert template("{{ messages[0] | tojson }}").render_chat(HELLO) == '{"role": "user", "content": "the cat"}'
    assert len(template("{{ strftime_now('%Y') }}").render_chat(HELLO)) == 4
    assert template("{% if tools %}x{% endif %}\n  {% if true %}\ny{% endif %}").render_chat(HELLO) == "y"
    loop = "{% for m in messages %}{% if m.role == 'user' %}{% break %}{% endif %}x{% endfor %}"
    assert template(loop).render_chat(HELLO) == ""


def test_template_errors_are_one_clear_line():
    with pytest.raises(ValueError, match="rejects these messages: roles must alternate"):
        template("{{ raise_exception('roles must alternate') }}").render_chat(HELLO)
    with pytest.raises(ValueError, match="no chat template"):
        template(None).apply_chat_template(HELLO)


@pytest.mark.parametrize(
    "source, reason",
    [
        ("{{ 1/0 }}", "ZeroDivisionError: division by zero"),
        ("{% for i in range(10**9) %}{% endfor %}", "[Rr]ange"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ 'x'.encode('zz') }}", "LookupError: unknown encoding: zz"),
        ("{{ 'x'.index('zzz') }}", "ValueError: substring not found"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ strftime_now(5) }}", "TypeError"),
        ("{{ raise_exception('') }}", "TemplateError"),
    ],
)
def test_whatever_a_template_does_wrong_is_a_value_error(source, reason):
    with pytest.raises(ValueError, match=f"chat template (fails on|rejects) these messages: .*{reason}"):
        template(source).render_chat(HELLO)


@pytest.mark.parametrize("source", ["{% for %}", "{% endif %}", "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}"])
def test_a_template_that_does_not_compile_leaves_plain_prompts(source):
    with pytest.warns(UserWarning, match="does not compile.*plain prompts"):
        tokenizer = template(source + "<|im_end|>")
    assert not tokenizer.has_chat_template
    assert tokenizer.decode(tokenizer.encode("the cat")) == "the cat"
    with pytest.raises(ValueError, match="chat template does not compile"):
        tokenizer.apply_chat_template(HELLO)


def test_template_is_sandboxed():
    with pytest.raises(ValueError, match="unsafe"):
        template("{{ ''.__class__.__mro__[1].__subclasses__() }}").render_chat(HELLO)
    with pytest.raises(ValueError, match="rejects"):
        template("{{ messages.append(1) }}").render_chat(HELLO)


# --- Hugging Face folders ---------------------------------------------------------------------------------------------


def write_tokenizer(folder, config=None, adds_bos=False, jinja=None):
    tokens = SPECIAL + byte_alphabet()
    backend = Backend(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing("<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    backend.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if jinja is not None:
        (folder / "chat_template.jinja").write_text(jinja)


def test_folder_without_a_tokenizer(tmp_path):
    assert tokenizer_from_folder(tmp_path) is None


def test_truncation_and_padding_of_the_file_are_switched_off(tmp_path):
    write_tokenizer(tmp_path)
    tokenizer = tokenizer_from_folder(tmp_path)
    for text in ("ab", "abcdefgh" * 10):
        assert len(tokenizer.encode(text)) == len(text) and tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.vocab_size == 3 + 256


@pytest.mark.parametrize(
    "adds_bos, config, count", [(True, {}, 1), (False, {"add_bos_token": True}, 1), (False, {}, 0)]
)
def test_bos_follows_the_post_processor_or_the_config(adds_bos, config, count, tmp_path):
    write_tokenizer(tmp_path, {"bos_token": {"content": "<|im_start|>"}} | config, adds_bos)
    tokenizer = tokenizer_from_folder(tmp_path)
    assert tokenizer.encode("ab").count(1) == count
    assert tokenizer.bos_token_id == 1


def test_both_bos_sources_add_it_once(tmp_path):
    write_tokenizer(tmp_path, {"bos_token": "<|im_start|>", "add_bos_token": True}, adds_bos=True)
    assert tokenizer_from_folder(tmp_path).encode("ab").count(1) == 1


def test_template_file_wins_over_the_config(tmp_path):
    write_tokenizer(tmp_path, {"chat_template": "config", "eos_token": "<|im_end|>"}, jinja="file {{ eos_token }}")
    tokenizer = tokenizer_from_folder(tmp_path)
    assert tokenizer.render_chat(HELLO) == "file <|im_end|>"
    assert tokenizer.eos_token_ids == (0, 2)


def test_named_templates_use_the_default_one(tmp_path):
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    write_tokenizer(tmp_path, {"chat_template": named})
    assert tokenizer_from_folder(tmp_path).render_chat(HELLO) == "d"


def test_damaged_files(tmp_path):
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match="tokenizer_config.json is not valid JSON"):
        tokenizer_from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="tokenizer.json cannot be read"):
        tokenizer_from_folder(tmp_path)


@pytest.mark.parametrize(
    "config, message",
    [
        ([1], "must hold a JSON object, not list"),
        ({"chat_template": 5}, "chat_template=5 must be a string"),
        ({"chat_template": [{"template": "t"}]}, "an entry of chat_template={'template': 't'} must be an object"),
        ({"chat_template": [5]}, "an entry of chat_template=5 must be an object"),
        ({"chat_template": [{"name": [], "template": "t"}]}, "an entry of chat_template"),
        ({"eos_token": 5}, "eos_token=5 must be a string"),
        ({"bos_token": ["x"]}, r"bos_token=\['x'\] must be a string"),
        ({"bos_token": {"content": 5}}, "bos_token: content=5 must be a string"),
        ({"add_bos_token": "yes"}, "add_bos_token='yes' must be true or false"),
    ],
)
def test_malformed_tokenizer_configs(config, message, tmp_path):
    write_tokenizer(tmp_path, config)
    with pytest.raises(ValueError, match=f"tokenizer_config.json:? {message}"):
        tokenizer_from_folder(tmp_path)


def test_null_is_absent_in_a_tokenizer_config(tmp_path):
    write_tokenizer(tmp_path, dict.fromkeys(["chat_template", "eos_token", "bos_token", "add_bos_token"]))
    tokenizer = tokenizer_from_folder(tmp_path)
    assert (tokenizer.has_chat_template, tokenizer.bos_token_id, tokenizer.eos_token_ids) == (False, None, (0,))


def test_a_template_file_that_is_no_text(tmp_path):
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="chat_template.jinja is not UTF-8 text"):
        tokenizer_from_folder(tmp_path)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"tokens": [1, 2]}, r"tokenizer.ggml.tokens=\[1, 2\] must be a list of strings"),
        ({"tokens": 5}, "tokenizer.ggml.tokens=5 must be a list of strings"),
        ({"tokens": [], "token_type": [], "merges": []}, "no tokens"),
        ({"token_type": ["x"]}, "token_type=.* must be a list of integers"),
        ({"merges": [1]}, "merges=.* must be a list of strings"),
        ({"eos_token_id": "x"}, "eos_token_id='x' must be an integer"),
        ({"add_bos_token": "x"}, "add_bos_token='x' must be true or false"),
        ({"model": 5}, "model=5 must be a string"),
    ],
)
def test_malformed_metadata(changes, message):
    with pytest.raises(ValueError, match=message):
        build(**changes)
    with pytest.raises(ValueError, match="toy: tokenizer.chat_template=5 must be a string"):
        template(5)


def test_a_negative_id_is_no_token():
    assert build(bos_token_id=-1).bos_token_id is None


def test_encode_takes_text_only():
    with pytest.raises(ValueError, match="encode takes a str, got list"):
        build().encode(["a"])
    with pytest.raises(ValueError, match="not valid Unicode"):
        build().encode("\ud800")


# --- The default model ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_smollm2():
    from spec_jax.hub import find_model
    from spec_jax.models.gguf_file import GgufFile

    tokenizer = tokenizer_from_gguf(GgufFile(find_model("smollm2-135m-instruct")).metadata, "smollm2")
    assert (tokenizer.vocab_size, tokenizer.bos_token_id, tokenizer.eos_token_ids) == (49152, 1, (0, 2))
    assert pieces(tokenizer, "Hello world 2024!") == ["Hello", "Ġworld", "Ġ", "2", "0", "2", "4", "!"]
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert (ids[0], ids.count(1), ids.count(2)) == (1, 3, 2)  # a system message comes from the template
    text = "def f(x):\n\treturn x ** 2  # naïve 東京 🙂 don't\r\n\n   1,234.5"
    assert tokenizer.decode(tokenizer.encode(text)) == text
