"""`spec-jax generate`: every sampling option, streaming, many prompts, log-probabilities and grammars."""

import dataclasses
import io
import json
import re
import sys

import pytest

import spec_jax
from spec_jax import cli, grammar
from spec_jax.sampling_params import SamplingParams

NO_IDS = "is not a comma-separated list of token ids, such as 0,2"
NO_RANGES = "is not a list of token ids and ranges of them, such as 0,5-9"
NO_FLOAT = "invalid float value: 'x'"
NO_INT = "invalid int value: 'x'"

# field: (option, text on the command line, value in the library, {bad text: message})
OPTIONS = {
    "n": ("--n", "3", 3, {"0": "n=0 is not allowed", "x": NO_INT}),
    "temperature": (
        "--temperature",
        "0.5",
        0.5,
        {"-1": "temperature=-1.0", "nan": "temperature=nan", "x": NO_FLOAT},
    ),
    "top_k": ("--top-k", "4", 4, {"-2": "top_k=-2 is not allowed", "1.5": "invalid int value: '1.5'"}),
    "top_p": ("--top-p", "0.9", 0.9, {"0": "top_p=0.0 is not allowed", "x": NO_FLOAT}),
    "min_p": ("--min-p", "0.1", 0.1, {"1.1": "min_p=1.1 is not allowed", "x": NO_FLOAT}),
    "seed": ("--seed", "7", 7, {"-1": "seed=-1 is not allowed", "x": NO_INT}),
    "max_tokens": ("--max-tokens", "9", 9, {"-1": "max_tokens=-1 is not allowed", "x": NO_INT}),
    "min_tokens": ("--min-tokens", "5", 5, {"129": "min_tokens=129 .* at most max_tokens=128", "x": NO_INT}),
    "stop": ("--stop", "END", ("END",), {"": "stop=.* is not allowed", "\ufffd": "stop=.* is not allowed"}),
    "stop_token_ids": (
        "--stop-token-ids",
        "1,2",
        (1, 2),
        {"x": NO_IDS, "1,": NO_IDS, "": NO_IDS, "1 2": NO_IDS, "1.5": NO_IDS, "1-3": NO_IDS, "1,-1": "stop_token_ids="},
    ),
    "ignore_eos": ("--ignore-eos", None, True, {}),
    "logprobs": ("--logprobs", "2", 2, {"21": "logprobs=21 is not allowed", "-1": "logprobs=-1", "x": NO_INT}),
    "repetition_penalty": ("--repetition-penalty", "1.2", 1.2, {"0": "repetition_penalty=0.0", "x": NO_FLOAT}),
    "presence_penalty": ("--presence-penalty", "-0.5", -0.5, {"3": "presence_penalty=3.0", "x": NO_FLOAT}),
    "frequency_penalty": ("--frequency-penalty", "0.5", 0.5, {"-3": "frequency_penalty=-3.0", "x": NO_FLOAT}),
    "logit_bias": (
        "--logit-bias",
        "5=1.5,6=-inf",
        {5: 1.5, 6: float("-inf")},
        {
            "5": "'5' in '5' is not ID=VALUE, such as 42=-5 or 42=-inf",
            "5=1,x=2": "'x=2' in '5=1,x=2' is not ID=VALUE",
            "5=": "is not ID=VALUE",
            "5=1,5=2": "gives the token id 5 twice",
            "5=nan": "logit_bias=.* is not allowed",
            "5=inf": "logit_bias=.* is not allowed",
            "5=101": "logit_bias=.* is not allowed",
        },
    ),
    "bad_words": ("--bad-words", "damn", ("damn",), {"": "bad_words=.* is not allowed"}),
    "allowed_token_ids": (
        "--allowed-token-ids",
        "3,5-7",
        (3, 5, 6, 7),
        {
            "x": NO_RANGES,
            "": NO_RANGES,
            "7-5": NO_RANGES,
            "1-": NO_RANGES,
            "1--2": NO_RANGES,
            "0-99999999999": "goes beyond any vocabulary",
        },
    ),
    "mask_fn": (
        "--regex",
        "yes|no",
        None,
        {"(": "the pattern '\\(' cannot be compiled"},
    ),
}
BAD = [(option, text, message) for option, _, _, bad in OPTIONS.values() for text, message in bad.items()]


@pytest.fixture
def core(core, monkeypatch):
    monkeypatch.setitem(vars(spec_jax), "stream", core.stream)
    return core


@pytest.fixture
def grammars(monkeypatch):
    """Records what grammars are asked for, in place of building them."""
    asked = []

    def build(kind):
        def built(source, target):
            asked.append((kind, source))
            return built

        return built

    monkeypatch.setattr(grammar, "regex_grammar", build("regex"))
    monkeypatch.setattr(grammar, "json_schema_grammar", build("schema"))
    return asked


def refused(capsys, *arguments):
    """The one line with which the command refuses its arguments."""
    assert cli.main(["generate", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.fullmatch(r"error: .*\n", captured.err)
    return captured.err


def prompt_file(tmp_path, *records):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps(record) for record in records), encoding="utf-8")
    return str(path)


# --- sampling options -------------------------------------------------------------------------------------------------


def test_every_field_has_an_option():
    # The first state of a grammar is the grammar's own affair: those of the command line start at the default.
    assert set(OPTIONS) == {field.name for field in dataclasses.fields(SamplingParams)} - {"mask_state"}


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_reaches_the_library_and_changes_nothing_else(core, grammars, name):
    option, text, value, _ = OPTIONS[name]
    assert cli.main(["generate", "hi", option] + [text] * (text is not None)) == 0
    (call,) = core.calls
    assert call.prompts == ["hi"]
    if name == "mask_fn":
        assert grammars == [("regex", text)]
        assert call.sampling.mask_fn is grammar.regex_grammar and call.sampling == SamplingParams()
    else:
        assert call.sampling == SamplingParams(**{name: value}) != SamplingParams()
        assert call.sampling.mask_fn is None


def test_what_is_not_given_is_the_librarys_default(core):
    assert cli.main(["generate", "hi"]) == 0
    (call,) = core.calls
    assert call.sampling == SamplingParams()
    assert (call.max_batch_size, call.progress, call.verify_width, call.exact) == (None, None, None, None)


@pytest.mark.parametrize(("option", "text", "message"), BAD)
def test_a_bad_value_is_one_line(core, capsys, option, text, message):
    assert re.search(message, refused(capsys, "hi", f"{option}={text}"))
    assert core.calls == []


def test_a_flag_takes_no_value(capsys):
    assert "ignored explicit argument '1'" in refused(capsys, "hi", "--ignore-eos=1")


def test_texts_may_be_given_several_times(core):
    options = ["--stop", "a", "--stop", "b,c", "--bad-words", "x", "--bad-words", "y z"]
    assert cli.main(["generate", "hi", *options]) == 0
    assert core.calls[0].sampling == SamplingParams(stop=["a", "b,c"], bad_words=["x", "y z"])


def test_options_that_contradict_each_other(core, capsys):
    assert "min_tokens=5" in refused(capsys, "hi", "--min-tokens", "5", "--max-tokens", "4")


# --- grammars ---------------------------------------------------------------------------------------------------------


def test_a_schema_comes_from_a_file_or_from_the_command_line(core, grammars, tmp_path):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(schema), encoding="utf-8")
    for given in (str(path), json.dumps(schema), " " + json.dumps(schema)):
        assert cli.main(["generate", "hi", "--json-schema", given]) == 0
        assert grammars.pop() == ("schema", schema)
        assert core.calls.pop().sampling.mask_fn is grammar.json_schema_grammar


def test_a_schema_that_cannot_be_read(core, capsys, tmp_path):
    path = tmp_path / "schema.json"
    for content, message in (("{", "schema.json is not valid JSON"), ("[1]", "must hold a JSON object, not list")):
        path.write_text(content, encoding="utf-8")
        assert message in refused(capsys, "hi", "--json-schema", str(path))
    path.write_bytes(b"\xff\xfe")
    assert "schema.json is not valid JSON" in refused(capsys, "hi", "--json-schema", str(path))
    for given in ("{", "{'a': 1}", '{"a":' * 100_000):
        assert "is not valid JSON" in refused(capsys, "hi", "--json-schema", given)
    for given in ("nowhere.json", "true", ""):
        assert "error: " in refused(capsys, "hi", "--json-schema", given)
    assert core.calls == []


def test_a_schema_that_the_library_refuses(core, capsys):
    line = refused(capsys, "hi", "--json-schema", '{"type": "integer", "minimum": 3}')
    assert "minimum" in line


def test_one_grammar_at_most(capsys):
    line = refused(capsys, "hi", "--regex", "a", "--json-schema", "{}")
    assert "argument --json-schema: not allowed with argument --regex" in line


@pytest.mark.parametrize("options", [["--regex", "a"], ["--json-schema", "{}"]])
def test_grammars_without_their_extra(core, capsys, monkeypatch, options):
    monkeypatch.setitem(sys.modules, "outlines_core", None)
    assert refused(capsys, "hi", *options) == "error: grammars need outlines-core: pip install 'spec_jax[grammar]'\n"


# --- streaming --------------------------------------------------------------------------------------------------------


class Screen(io.StringIO):
    """Records what has been seen of the text at every flush."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def flush(self):
        self.seen.append(self.getvalue())


def test_pieces_are_flushed_as_they_come(core, monkeypatch, capsys):
    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    assert cli.main(["generate", "hi", "--stream", "--temperature", "0.5", "--verify-width", "16", "--exact"]) == 0
    text = "äöü answer to hi"
    assert screen.seen[: len(text)] == [text[: i + 1] for i in range(len(text))]
    assert screen.getvalue() == text + "\n"
    (call,) = core.calls
    assert call.streamed and call.prompts == ["hi"] and call.sampling.temperature == 0.5
    assert (call.config, call.verify_width, call.exact) == ({"method": "ngram"}, 16, True)
    assert "exactness E2" in capsys.readouterr().err


def test_the_stream_prints_what_the_whole_text_prints(core, capsys):
    for options in ([], ["--logprobs", "1"], ["--n", "1"]):
        printed = []
        for stream in ([], ["--stream"]):
            assert cli.main(["generate", "hi", *options, *stream]) == 0
            printed.append(capsys.readouterr())
        assert printed[0] == printed[1]
    assert [call.streamed for call in core.calls] == [False, True] * 3


def test_the_stream_uses_the_chat_template(core):
    core.target.tokenizer.has_chat_template = True
    assert cli.main(["generate", "hi", "--stream"]) == 0
    assert core.calls[0].prompts == [[{"role": "user", "content": "hi"}]]


@pytest.mark.parametrize(
    "options", [["--json"], ["--n", "2"], ["--show-acceptance"], ["--max-batch-size", "2"], ["--prompts", "x.jsonl"]]
)
def test_what_the_stream_cannot_do(core, capsys, options):
    prompt = [] if "--prompts" in options else ["hi"]
    line = refused(capsys, *prompt, "--stream", *options)
    assert re.match(f"error: --stream cannot be used with {' '.join(options[: 1 + ('--n' in options)])}, ", line)


@pytest.mark.parametrize(("pieces", "shown"), [([], ""), (["half", " a te"], "half a te\n")])
def test_interrupting_the_stream_ends_its_line(core, monkeypatch, capsys, pieces, shown):
    def stream(*args, **options):
        yield from pieces
        raise KeyboardInterrupt

    monkeypatch.setitem(vars(spec_jax), "stream", stream)
    assert cli.main(["generate", "hi", "--stream"]) == 130
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == (shown, "interrupted\n")


# --- many prompts -----------------------------------------------------------------------------------------------------


def test_a_file_of_prompts(core, capsys, tmp_path):
    path = prompt_file(tmp_path, {"turns": ["one", "two"]}, {"messages": [{"role": "user", "content": "three"}]})
    core.output = lambda call: list(b"text")
    assert cli.main(["generate", "--prompts", path, "--max-batch-size", "1"]) == 0
    (call,) = core.calls
    assert (call.prompts, call.max_batch_size, call.progress) == (["one", "three"], 1, True)
    captured = capsys.readouterr()
    assert captured.out == "--- prompt 1\ntext\n--- prompt 2\ntext\n"
    assert "8 tokens in" in captured.err and "6 prompt tokens from the cache" in captured.err


def test_samples_of_many_prompts(core, capsys, tmp_path):
    path = prompt_file(tmp_path, {"turns": ["one"]}, {"turns": ["two"]})
    core.output = lambda call: list(b"t")
    assert cli.main(["generate", "--prompts", path, "--n", "2"]) == 0
    headers = [f"--- prompt {p}, sample {s} (seed {s - 1})" for p in (1, 2) for s in (1, 2)]
    assert capsys.readouterr().out == "".join(f"{header}\nt\n" for header in headers)


def test_prompts_as_json_have_no_header(core, capsys, tmp_path):
    path = prompt_file(tmp_path, {"turns": ["one"]}, {"turns": ["two"]})
    assert cli.main(["generate", "--json", "--prompts", path, "--n", "2"]) == 0
    found = json.loads(capsys.readouterr().out)["sequences"]
    assert [sequence["prompt_index"] for sequence in found] == [0, 0, 1, 1]


def test_conversations_keep_their_roles_where_there_is_a_template(core, tmp_path):
    core.target.tokenizer.has_chat_template = True
    core.target.tokenizer.apply_chat_template = lambda messages: [1]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    path = prompt_file(tmp_path, {"messages": messages})
    for option, prompts in (([], [messages]), (["--raw"], ["Be brief.\n\nhi"])):
        assert cli.main(["generate", "--prompts", path, *option]) == 0
        assert core.calls.pop().prompts == prompts


def test_prompt_files_that_cannot_be_used(core, capsys, tmp_path):
    assert "nowhere.jsonl" in refused(capsys, "--prompts", "nowhere.jsonl")
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"turns": ["a"]}\n{"turns"', encoding="utf-8")
    assert "prompts.jsonl, line 2: not valid JSON" in refused(capsys, "--prompts", str(path))
    path.write_text("", encoding="utf-8")
    assert "prompts.jsonl holds no prompts" in refused(capsys, "--prompts", str(path))
    long = prompt_file(tmp_path, {"turns": ["a"]}, {"turns": ["a" * 5000]})
    assert "prompts.jsonl, prompt 2: has 5000 tokens" in refused(capsys, "--prompts", long)
    assert core.calls == []


# --- log-probabilities and results ------------------------------------------------------------------------------------


def test_one_line_per_token(core, capsys):
    core.output = lambda call: list('o"é'.encode())
    assert cli.main(["generate", "hi", "--logprobs", "2"]) == 0
    text, *lines = capsys.readouterr().out.splitlines()
    assert text == 'o"é'
    assert [line.split() for line in lines] == [
        [token, "-1.500", "rank", "2", '"A"', "-0.500,", '"B"', "-1.500"]
        for token in ('"o"', '"\\""', '"\ufffd"', '"\ufffd"')  # é is two tokens, each of them half a character
    ]


def test_log_probabilities_alone(core, capsys):
    core.output = lambda call: list(b"ok")
    assert cli.main(["generate", "hi", "--logprobs", "0", "--show-acceptance"]) == 0
    text, *lines = capsys.readouterr().out.splitlines()
    assert text == "o⟦k⟧"
    assert [line.split() for line in lines] == [['"o"', "-1.500", "rank", "2"], ['"k"', "-1.500", "rank", "2"]]


def test_results_as_json(core, capsys):
    core.output = lambda call: list(b"ok.")
    core.finish = {"finish_reason": "stop", "stop_reason": "."}
    assert cli.main(["generate", "hi", "--json", "--logprobs", "1"]) == 0
    (sequence,) = json.loads(capsys.readouterr().out)["sequences"]
    likely = {"token_id": 65, "token": "A", "logprob": -0.5, "rank": 1}
    assert sequence["logprobs"] == [
        [{"token_id": ord(token), "token": token, "logprob": -1.5, "rank": 2}, likely] for token in "ok."
    ]
    assert (sequence["finish_reason"], sequence["stop_reason"]) == ("stop", ".")
    assert sequence["stats"]["num_cached_tokens"] == 3
    assert cli.main(["generate", "hi", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sequences"][0]["logprobs"] is None


def test_tokens_keep_the_space_that_a_decoder_drops_at_the_start(core, capsys):
    words = {1: " a", 2: " b", 3: "</s>"}

    def decode(ids, skip_special_tokens=True):
        kept = [i for i in ids if not (skip_special_tokens and i == 3)]
        return "".join(words[i] for i in kept).removeprefix(" ")

    core.target.tokenizer.decode = decode
    core.output = lambda call: [1, 2, 3]
    assert cli.main(["generate", "hi", "--json", "--logprobs", "0"]) == 0
    (sequence,) = json.loads(capsys.readouterr().out)["sequences"]
    assert [row[0]["token"] for row in sequence["logprobs"]] == ["a", " b", "</s>"]
    assert sequence["text"] == "a b"


def test_the_seed_is_shown_where_it_matters(core, capsys, tmp_path):
    path = prompt_file(tmp_path, {"turns": ["one"]}, {"turns": ["two"]})
    assert cli.main(["generate", "--prompts", path, "--temperature", "1"]) == 0
    assert "--- prompt 2 (seed 0)" in capsys.readouterr().out
    for options, shown in (([], False), (["--temperature", "1"], True)):
        assert cli.main(["generate", "hi", *options]) == 0
        assert ("; seed 0;" in capsys.readouterr().err) == shown
    assert cli.main(["generate", "hi", "--n", "2"]) == 0
    assert "--- sample 2 (seed 1)" in capsys.readouterr().err
