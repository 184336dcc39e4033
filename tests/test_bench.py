"""`bench`: what it runs, in which order, and how the report is formed from it."""

import dataclasses
import io
import json
import subprocess
import sys

import pytest
from fake_core import ByteTokenizer
from rich.console import Console

from spec_jax import bench, doctor
from spec_jax.prompts import Prompt


def prompt(category, text):
    return Prompt(category, ({"role": "user", "content": text},))


PROMPTS = [prompt("chat", "a"), prompt("maths", "b"), prompt("chat", "c")]


def run(core, **options):
    options = {"methods": ["ngram:5"], "prompts": PROMPTS, "repeats": 2} | options
    return bench.run_bench(core.target, **options)


def row(report, method, category):
    (found,) = [row for row in report["rows"] if (row["method"], row["category"]) == (method, category)]
    return found


def test_report_has_every_method_and_category(core):
    report = run(core, methods=["ngram:5", "layer_skip:3"])
    assert set(report) == {"model", "device", "versions", "plain", "rows", "seconds"}
    assert list(report["plain"]) == ["chat", "maths", "all"]
    assert [(row["method"], row["category"]) for row in report["rows"]] == [
        (method, category) for method in ("ngram", "layer_skip") for category in ("chat", "maths", "all")
    ]
    assert set(report["rows"][0]) == {
        "method",
        "category",
        "num_speculative_tokens",
        "verify_width",
        "tokens_per_second",
        "speedup",
        "mean_acceptance_length",
        "draft_acceptance_rate",
        "exact",
        "exactness",
        "near_ties",
        "repeated_8gram_share",
    }
    assert report["seconds"]["compile"] == len(core.calls)
    json.dumps(report, allow_nan=False)


@pytest.mark.parametrize(("narrow", "fastest", "width", "speedup"), [(20.0, 20.0, 1, 2.0), (5.0, 10.0, 8, 4.0)])
def test_speedup_is_against_the_fastest_plain_decoding(core, narrow, fastest, width, speedup):
    core.tokens_per_second["plain W=1"] = narrow
    report = run(core)
    assert report["plain"]["all"] == {"tokens_per_second": pytest.approx(fastest), "verify_width": width}
    assert row(report, "ngram", "all")["speedup"] == pytest.approx(speedup)


def test_plain_runs_at_the_methods_width_and_at_one_row(core):
    run(core, exact=True, repeats=1)
    assert {(call.label, call.verify_width, call.exact) for call in core.calls} == {
        ("plain", 8, True),
        ("plain W=1", 1, False),
        ("ngram", 8, True),
    }


def test_all_runs_visit_a_group_before_the_next_and_the_order_rotates(core):
    run(core, repeats=1)
    seen = [(call.prompts[0], call.label) for call in core.calls]
    assert [text for text, _ in seen] == ["a"] * 3 + ["c"] * 3 + ["b"] * 3
    assert [label for _, label in seen[::3]] == ["plain", "plain W=1", "ngram"]
    assert all({label for _, label in seen[i : i + 3]} == {"plain", "plain W=1", "ngram"} for i in (0, 3, 6))


def test_batches_stay_within_one_category(core):
    run(core, repeats=1, batch_size=2)
    assert {tuple(call.prompts) for call in core.calls} == {("a", "c"), ("b",)}


def test_counts_are_summed_before_ratios_are_formed(core):
    core.drafts = lambda call: {"a": (4, 16, 7), "c": (1, 4, 4), "b": (5, 20, 0)}[call.prompts[0]]
    report = run(core)
    assert row(report, "ngram", "chat")["mean_acceptance_length"] == pytest.approx(1 + 11 / 5)
    assert row(report, "ngram", "chat")["draft_acceptance_rate"] == pytest.approx(11 / 20)
    assert row(report, "ngram", "all")["mean_acceptance_length"] == pytest.approx(1 + 11 / 10)
    assert row(report, "ngram", "all")["near_ties"] == 3


def test_nothing_drafted_is_none(core):
    core.drafts = lambda call: (0, 0, 0)
    found = row(run(core), "ngram", "all")
    assert found["mean_acceptance_length"] is None
    assert found["draft_acceptance_rate"] is None


def test_a_differing_output_is_not_exact_even_in_the_last_repeat_only(core):
    honest = core.output

    def differ_late(call):
        wrong = call.label == "ngram" and call.prompts == ["b"] and call.number >= 9
        return [*honest(call), 33] if wrong else honest(call)

    core.output = differ_late
    report = run(core)
    assert [row(report, "ngram", category)["exact"] for category in ("chat", "maths", "all")] == [True, False, False]


def test_speed_is_the_median_over_repeats(core):
    core.tokens_per_second["ngram"] = 40.0
    honest = core.output

    def slow_at_first(call):
        core.tokens_per_second["ngram"] = 4.0 if call.number < 9 else 40.0
        return honest(call)

    core.output = slow_at_first
    found = row(run(core, repeats=3), "ngram", "all")
    assert found["tokens_per_second"] == pytest.approx(40.0)
    assert found["speedup"] == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("ids", "share"),
    [(range(7), None), (range(30), 0.0), ([1] * 10, 2 / 3), (list(range(8)) * 2, 1 / 9)],
)
def test_repeated_ngram_share(ids, share):
    assert bench.repeated_ngram_share([list(ids)]) == (None if share is None else pytest.approx(share))


def test_an_output_that_equals_another_one_is_not_a_repetition():
    assert bench.repeated_ngram_share([list(range(8)), list(range(8))]) == 0.0


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        ([], "methods is empty"),
        (["ngran"], "method 'ngran' is not known to bench; allowed: ngram, suffix, .*draft_model"),
        (["none"], "plain always runs"),
        (["ngram:0"], "positive integer"),
        (["ngram:x"], "positive integer or 'auto', such as ngram:5"),
        (["ngram:5", "ngram:5"], "twice"),
        (["draft_model"], "add --draft-model"),
    ],
)
def test_bad_methods(methods, message):
    with pytest.raises(ValueError, match=message):
        bench.plan_runs(methods, None, None, None)


def test_every_width_gets_its_own_plain_run():
    runs = bench.plan_runs(["ngram:3", "ngram:8", "ngram:15"], None, None, None)
    assert [(run.label, run.verify_width) for run in runs if run.is_plain] == [
        ("plain W=8", 8),
        ("plain W=16", 16),
        ("plain W=1", 1),
    ]
    assert [run.verify_width for run in runs if not run.is_plain] == [8, 16, 16]


@pytest.mark.parametrize("name", ["max_tokens", "repeats", "batch_size"])
def test_bad_numbers(core, name):
    with pytest.raises(ValueError, match=f"{name}=0 must be a positive integer"):
        run(core, **{name: 0})


def test_a_model_without_tokenizer_is_refused(core):
    core.target.tokenizer = None
    with pytest.raises(ValueError, match="'fake' has no tokenizer"):
        run(core)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x" * 41, "prompt 2 of category 'chat': has 41 tokens, more than the model's context of 40"),
        ("x" * 40, "prompt 2 of category 'chat' fills the model's context of 40 tokens"),
        ("", "prompt 2 of category 'chat': is empty"),
    ],
)
def test_a_prompt_that_cannot_be_continued_is_named_before_the_first_run(core, text, message):
    core.target.max_model_len = 40
    with pytest.raises(ValueError, match=message):
        run(core, prompts=[*PROMPTS[:2], prompt("chat", text)])
    assert core.calls == []


def test_a_logdir_that_cannot_be_written_is_found_before_the_first_run(core, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        run(core, logdir=tmp_path / "file" / "logs")
    assert core.calls == []


def test_a_disk_that_fills_up_does_not_cost_the_report(core, tmp_path, monkeypatch):
    def full(self, step, scalars):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bench.ScalarWriter, "write", full)
    with pytest.warns(UserWarning, match="could not be written to .*No space left"):
        assert run(core, logdir=tmp_path)["rows"]


def test_table_shows_every_row(core):
    core.output = lambda call: list(range(40 + (call.label == "ngram")))
    console = Console(width=200, file=io.StringIO())
    console.print(bench.table(run(core)))
    text = console.file.getvalue()
    assert "ngram" in text and "2.00x" in text and "NO" in text and "20.0 (W=1)" in text


def test_tensorboard_scalars_can_be_read_back(core, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(core, repeats=3, logdir=tmp_path)
    events = EventAccumulator(str(tmp_path)).Reload()
    for tag, value in (("speedup/ngram_k5/all", 2.0), ("tokens_per_second/plain_W=1/chat", 20.0)):
        found = [(event.step, event.tensor_proto.float_val[0]) for event in events.Tensors(tag)]
        assert found == [(step, pytest.approx(value)) for step in range(3)]


@pytest.mark.slow
def test_a_random_model_decodes_exactly():
    target = dataclasses.replace(doctor.random_model("float32"), tokenizer=ByteTokenizer())
    report = bench.run_bench(
        target, methods=["ngram:3", "layer_skip:2"], prompts=PROMPTS[:2], max_tokens=12, repeats=1, exact=True
    )
    assert all(found["exact"] for found in report["rows"])
    assert all(found["tokens_per_second"] > 0 and found["speedup"] > 0 for found in report["rows"])
    assert 1 <= row(report, "layer_skip", "all")["mean_acceptance_length"] <= 3


@pytest.mark.slow
def test_the_default_model_decodes_exactly(tmp_path):
    options = ["--json", "--max-prompts", "1", "--max-tokens", "16", "--repeats", "1", "--logdir", str(tmp_path)]
    found = subprocess.run(
        [sys.executable, "-m", "spec_jax", "bench", *options], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    report = json.loads(found.stdout)
    categories = {found["category"] for found in report["rows"]}
    assert len(categories) == 7 and len(report["rows"]) == len(bench.DEFAULT_METHODS) * len(categories)
    assert all(found["exact"] for found in report["rows"])
    editing = [found for found in report["rows"] if (found["method"], found["category"]) == ("ngram", "code_editing")]
    assert len(editing) == 2 and all(found["mean_acceptance_length"] > 1.2 for found in editing)
    assert list(tmp_path.iterdir())
