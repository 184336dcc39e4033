"""The `spec-jax` command: outputs, exit statuses and one clear line for every mistake."""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import spec_jax
from spec_jax import acceptance_view, cli, doctor

ROOT = Path(__file__).parents[1]


@pytest.fixture
def exactness(monkeypatch):
    checks = [SimpleNamespace(name="row place", level="E1", passed=True, max_abs_diff=0.0)]
    report = SimpleNamespace(level="E2", checks=checks, row_block=32)
    monkeypatch.setitem(vars(spec_jax), "check_exactness", lambda target: report)
    monkeypatch.setattr(doctor, "random_model", lambda dtype: SimpleNamespace(name="random"))
    return report


@pytest.mark.parametrize("command", ["generate", "bench", "export", "models", "doctor"])
def test_help_shows_an_example(command, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([command, "-h"])
    assert stop.value.code == 0
    assert f"example:\n  spec-jax {command}" in capsys.readouterr().out


def test_generate_prints_text_on_stdout_and_numbers_on_stderr(core, capsys):
    assert cli.main(["generate", "hi", "--method", "ngram"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "äöü answer to hi\n"
    assert "exactness E2" in captured.err and "mean acceptance length 2.75" in captured.err


def test_generate_json_is_one_object(core, capsys):
    assert cli.main(["generate", "hi", "--json", "--show-acceptance"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"sequences", "exactness", "verify_width", "stats"}
    (sequence,) = found["sequences"]
    assert "".join(sequence["pieces"]) == sequence["text"] == "äöü answer to hi"
    assert len(sequence["accepted"]) == len(sequence["token_ids"])
    assert found["stats"]["draft_acceptance_rate"] == 7 / 16


def test_generate_passes_options_on(core):
    command = "generate hi --method layer_skip --num-speculative-tokens 3 --rule coupled --verify-width 16 --exact"
    sampling = "--max-tokens 9 --temperature 0.5 --top-k 4 --top-p 0.9 --min-p 0.1 --seed 7 --n 2"
    stopping = "--ignore-eos --stop-token-ids 1,2"
    assert cli.main([*command.split(), *sampling.split(), *stopping.split()]) == 0
    (call,) = core.calls
    assert call.config == {"method": "layer_skip", "num_speculative_tokens": 3, "rejection_sample_method": "coupled"}
    assert (call.verify_width, call.exact, call.prompts) == (16, True, ["hi"])
    asked = call.sampling
    assert (asked.max_tokens, asked.temperature, asked.top_k, asked.top_p, asked.min_p) == (9, 0.5, 4, 0.9, 0.1)
    assert (asked.seed, asked.n, asked.ignore_eos, list(asked.stop_token_ids)) == (7, 2, True, [1, 2])


def test_options_with_values_leave_the_prompt_alone(core):
    assert cli.main(["generate", "--stop-token-ids", "2", "hi"]) == 0
    assert core.calls[0].prompts == ["hi"] and list(core.calls[0].sampling.stop_token_ids) == [2]


@pytest.mark.parametrize("arguments", [["models", "--json"], ["models"], ["-h"], ["--version"]])
def test_a_reader_that_goes_away_is_no_error(arguments):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "spec_jax", *arguments]
    try:
        found = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False)
    finally:
        os.close(writer)
    assert found.returncode in (0, 141)  # argparse itself swallows the error where output is not buffered
    assert found.stderr == ""


def test_generate_takes_the_whole_config_as_json(core):
    text = '{"method": "ngram", "num_speculative_tokens": 2}'
    assert cli.main(["generate", "hi", "--speculative-config", text]) == 0
    assert core.calls[0].config == text


def test_generate_reads_stdin(core, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe"))
    assert cli.main(["generate", "-"]) == 0
    assert core.calls[0].prompts == ["from a pipe"]


def test_the_chat_template_is_used_where_there_is_one(core):
    core.target.tokenizer.has_chat_template = True
    for option, prompts in (([], [[{"role": "user", "content": "hi"}]]), (["--raw"], ["hi"])):
        assert cli.main(["generate", "hi", *option]) == 0
        assert core.calls[-1].prompts == prompts


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "hi", "--model", "missing"], "error: model 'missing' is not known; use one of: fake"),
        (["generate", "hi", "--chat"], "error: --chat: model .* has no chat template; use --raw"),
        (["generate", "hi", "--max-tokens", "-1"], "error: .*max_tokens"),
        (["generate", "hi", "--draft-model", "x", "--method", "ngram"], "error: --draft-model is only used by"),
        (["generate", "hi", "--speculative-config", "{}", "--method", "ngram"], "error: .*leave out --method"),
        (
            ["generate", "hi", "--max-batch-size", "x"],
            "error: argument --max-batch-size: invalid int value: 'x'; see .* -h",
        ),
        (["generate", "hi", "--prompts", "x.jsonl"], "error: argument --prompts: not allowed with argument PROMPT"),
        (["generate", "hi", "--no-such-option"], "error: unrecognized arguments: --no-such-option"),
        (["bench", "--repeats", "x"], "error: argument --repeats: invalid int value: 'x'; see spec-jax bench -h"),
        (["nonsense"], "error: argument COMMAND: invalid choice: 'nonsense'"),
        ([], "error: the following arguments are required: COMMAND; see spec-jax -h"),
        (["bench", "--methods", "ngran"], "error: method 'ngran' is not known"),
        (["bench", "--methods", "ngram", "--draft-model", "x"], "error: --draft-model 'x' is used by none of"),
        (["bench", "--methods", ","], "error: methods is empty"),
        (["bench", "--prompts", "nowhere.jsonl"], "error: .*nowhere.jsonl"),
        (["bench", "--max-prompts", "-1"], "error: max_prompts=-1 must be at least 1"),
        (["bench", "--repeats", "0"], "error: repeats=0"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(core, capsys, arguments, message):
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = [line for line in captured.err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert re.search(message, lines[0])
    assert "Traceback" not in captured.err


def test_interrupt_is_status_130(core, monkeypatch, capsys):
    def interrupt(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setitem(vars(spec_jax), "generate", interrupt)
    assert cli.main(["generate", "hi"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_bench_prints_a_table(core, capsys):
    assert cli.main(["bench", "--max-prompts", "1", "--max-tokens", "4"]) == 0
    captured = capsys.readouterr()
    assert "code_editing" in captured.out and "layer_skip" in captured.out
    assert "--max-prompts 0" in captured.err


def test_bench_json_is_one_object(core, capsys):
    assert cli.main(["bench", "--json", "--max-prompts", "1", "--methods", "ngram:3"]) == 0
    assert {row["category"] for row in json.loads(capsys.readouterr().out)["rows"]} >= {"chat", "all"}


def test_bench_loads_the_draft_model_once(core):
    options = ["--max-prompts", "1", "--methods", "draft_model:2", "--draft-model", "fake"]
    assert cli.main(["bench", "--json", *options]) == 0
    drafted = [call for call in core.calls if call.label == "draft_model"]
    assert drafted and all(call.config["model"] is core.target for call in drafted)


def test_models(capsys):
    assert cli.main(["models", "--json"]) == 0
    (entry,) = [e for e in json.loads(capsys.readouterr().out)["models"] if e["name"] == "smollm2-135m-instruct"]
    assert entry["licence"] == "Apache-2.0" and entry["bytes"] > 9e7 and isinstance(entry["cached"], bool)
    assert cli.main(["models"]) == 0
    assert "smollm2-135m-instruct" in capsys.readouterr().out


def test_doctor(exactness, capsys):
    assert cli.main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"versions", "devices", "cores", "models", "kernels", "exactness"}
    assert set(found["versions"]) == {"python", "jax", "jaxlib", "flax", "numpy", "spec_jax"}
    assert found["exactness"]["level"] == "E2" and found["exactness"]["checks"][0]["passed"] is True
    assert cli.main(["doctor"]) == 0
    assert "exactness E2, row block 32" in capsys.readouterr().out


def test_doctor_measures_a_random_model(capsys):
    assert cli.main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["exactness"]
    assert found["level"] in ("E1", "E2") and {c["level"] for c in found["checks"]} == {"E1", "E2"}


def test_doctor_fails_where_only_e0_holds(exactness, capsys):
    exactness.level = "E0"
    assert cli.main(["doctor", "--json"]) == 1


def test_pieces_never_split_a_character():
    tokenizer = SimpleNamespace(decode=lambda ids: bytes(ids).decode(errors="replace"))
    ids = list("aé€😀b".encode())
    pieces = acceptance_view.token_pieces(tokenizer, ids)
    assert [piece for piece in pieces if piece] == list("aé€😀b")
    assert len(pieces) == len(ids)
    assert acceptance_view.token_pieces(tokenizer, ids[:-2]) == ["a", "", "é", "", "", "€", "", "", "\ufffd"]


def test_brackets_surround_runs_of_accepted_tokens():
    tokenizer = SimpleNamespace(decode=lambda ids: bytes(ids).decode(errors="replace"))
    accepted = [False, True, True, False, True]
    assert acceptance_view.bracketed(tokenizer, list(b"abcde"), accepted) == "a⟦bc⟧d⟦e⟧"
    text = acceptance_view.coloured(tokenizer, list(b"abcde"), accepted)
    assert text.plain == "abcde"
    assert [str(span.style) for span in text.spans] == [
        acceptance_view.DRAFTED_STYLE if flag else acceptance_view.TARGET_STYLE for flag in accepted
    ]


def test_show_acceptance_without_colour_uses_brackets(core, capsys):
    assert cli.main(["generate", "hi", "--show-acceptance"]) == 0
    captured = capsys.readouterr()
    assert "⟦" in captured.out and "⟦drafted and accepted⟧" in captured.err


def test_module_can_be_run():
    found = subprocess.run(
        [sys.executable, "-m", "spec_jax", "generate"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert found.returncode == 2
    assert found.stderr == "error: one of the arguments PROMPT --prompts is required; see spec-jax generate -h\n"
