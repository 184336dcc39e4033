"""The experiments on drafters: bad arguments are one line, and tiny runs give tables that add up."""

import json

import numpy as np
import pytest
import tiny

import spec_jax

QUESTIONS = [
    {"category": "copying", "turns": ["abc abc abc abc", "abc abc"]},
    {"category": "other", "turns": ["the sky is", "why"]},
    {"category": "copying", "turns": ["one two one two one"]},
]


@pytest.fixture
def questions(tmp_path, monkeypatch):
    """A file of questions; the model behind every name is a tiny one."""
    monkeypatch.setattr(spec_jax, "load_model", lambda *_, **__: tiny.with_text(tiny.tiny()), raising=False)
    path = tmp_path / "questions.jsonl"
    path.write_text("\n".join(map(json.dumps, QUESTIONS)))
    return str(path)


RUNS = {
    "recycling": {"method": "recycling"},
    "lookahead": {"method": "lookahead"},
    "layer_skip": {"method": "layer_skip"},
}


def run(name, *arguments, capsys):
    tiny.experiment(name).main([*arguments, "--json"])
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name, arguments, words", [
    ("spec_bench", ["--questions", "missing.jsonl"], "missing.jsonl"),
    ("spec_bench", ["--questions", "QUESTIONS", "--runs", "nonsense"], "neither NAME=JSON"),
    ("spec_bench", ["--questions", "QUESTIONS", "--count", "0"], "count=0"),
    ("agents", ["--tasks", "0"], "tasks=0"),
    ("agents", ["--prompts", "missing.jsonl"], "missing.jsonl"),
    ("draft_length", ["--prompts", "QUESTIONS", "--drafter", "[1]"], "must be a JSON object"),
    ("draft_length", ["--prompts", "missing.jsonl"], "missing.jsonl"),
    ("step_costs", ["--prompts", "QUESTIONS", "--max-tokens", "0"], "max_tokens=0"),
    ("step_costs", ["--prompts", "QUESTIONS", "--runs", 'plain={"method": "ngram"}'], "is taken"),
    ("step_costs", ["--prompts", "QUESTIONS", "--runs", "auto", "auto"], "is taken"),
    ("step_costs", ["--prompts", "QUESTIONS", "--output", "/nowhere/at/all.json"], "/nowhere/at/all.json"),
    ("step_costs", ["--prompts", "QUESTIONS", "--runs", 'x={"method": "ngram", "num_speculative_tokens": 0}'],
     "drafts nothing"),
    ("draft_length", ["--prompts", "QUESTIONS", "--lengths", "0"], "lengths[0]=0"),
    ("skip_search", ["--layers", "40"], "--layers 40"),
    ("history_costs", ["--history", "missing.jsonl", "--prompts", "QUESTIONS"], "missing.jsonl"),
    ("history_costs", ["--history", "QUESTIONS", "--prompts", "QUESTIONS", "--batch-sizes", "0"], "batch_sizes[0]=0"),
])  # fmt: skip
def test_bad_arguments_are_one_line(name, arguments, words, questions, capsys):
    arguments = [questions if argument == "QUESTIONS" else argument for argument in arguments]
    with pytest.raises(SystemExit) as exit:
        tiny.experiment(name).main(arguments)
    printed = capsys.readouterr()
    assert exit.value.code == 2 and printed.out == ""
    assert printed.err.count("\n") == 1 and words in printed.err


@pytest.mark.slow
def test_spec_bench_tells_categories_apart(questions, capsys):
    report = run("spec_bench", "--questions", questions, "--max-tokens", "24", capsys=capsys)
    lines = {(line["run"], line["category"]): line for line in report["table"]}
    assert {category for _, category in lines} >= {"copying", "other", "overall"}
    assert all(row["equal"] for row in report["questions"])
    for (name, _), line in lines.items():
        assert line["#MAT"] == 1.0 if name == "plain" else line["#MAT"] >= 1.0
        assert line["speed-up"] > 0 and (name == "plain" or line["projected h200"] > 0)
    assert lines["ngram", "overall"]["questions"] == 3


@pytest.mark.slow
def test_agents_share_a_history(questions, monkeypatch, capsys):
    """The second agent of a task writes what the first one wrote: the history drafts it."""
    agents = tiny.experiment("agents")
    monkeypatch.setattr(agents, "TURNS", ("again", "once more"))
    agents.main(["--prompts", questions, "--tasks", "2", "--max-tokens", "24", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert len(report["turns"]) == 2 * 2 * 3 and all(turn["equal"] for turn in report["turns"])
    second = [turn for turn in report["turns"] if turn["agent"] == 1]
    alone, shared = (sum(t[f"{name}: tokens per step"] for t in second) for name in ("suffix", "suffix, history"))
    assert shared > 1.5 * alone


@pytest.mark.slow
def test_draft_lengths_and_step_costs(questions, tmp_path, capsys):
    report = run("draft_length", "--prompts", questions, "--max-tokens", "24", "--lengths", "1", "3", capsys=capsys)
    runs = [row["run"] for row in report["rows"]]
    assert runs == ["K=1", "K=3", "auto", "heuristic", "heuristic, transient"]
    assert all(row["all: tokens per step"] >= 1 for row in report["rows"])
    output = tmp_path / "out.json"
    runs = [f"{name}={json.dumps(config)}" for name, config in RUNS.items()]
    options = ["--prompts", questions, "--max-tokens", "24", "--output", str(output)]
    tiny.experiment("step_costs").main([*options, "--runs", "auto", *runs])
    (found,) = json.loads(output.read_text()).values()
    assert found["equal"] == found["prompts"] == 3 and found["all"]["auto_speedup"]["pairs"] == 3
    for name in RUNS:
        alone, *steps = found["times_ms"][name]
        assert 0 < alone and steps == sorted(steps), name
        assert found["all"][f"{name}_speedup_over_promised"]["pairs"] == 3
    # Of the 23 nodes of lookahead 12 are verified, and a step without any computes the others.
    assert len(found["times_ms"]["lookahead"]) == 1 + 13 and found["rows"][0]["drafted_per_step"]["lookahead"] >= 11


@pytest.mark.slow
def test_the_cost_of_a_history(questions, capsys):
    size = ["--tokens", "900", "--context", "24", "--nodes", "4", "--trials", "2", "--batch-sizes", "1", "2"]
    report = run("history_costs", "--history", questions, "--prompts", questions, *size, capsys=capsys)
    assert [row["batch"] for row in report["rows"]] == [1] * 3 + [2] * 3
    for row in report["rows"]:
        assert 0 < row["share of a step, median"] <= row["share, most"], row
        assert 0 < row["proposed"] <= 4, row  # the contexts stand in the history


def test_a_history_is_as_long_as_asked():
    experiment = tiny.experiment("history_costs")
    texts = [np.arange(7), np.arange(20, 25)]
    history = experiment.history_of(texts, 40)
    assert len(history) == 40
    assert len(experiment.history_of(texts, 5)) == 5


@pytest.mark.slow
def test_a_search_finds_layers_that_agree_more(questions, capsys):
    size = ["--count", "3", "--max-tokens", "12", "--width", "24", "--layers", "1", "--tries", "2", "--rounds", "2"]
    report = run("skip_search", "--prompts", questions, *size, capsys=capsys)
    assert len(report["draft_layers"]) == 1
    assert 0 <= report["agreement_of_the_first_layers"] <= report["agreement"] <= 1
