"""experiments/speedup_vs_batch.py: what it predicts, by hand, and how it measures, keeps and goes on; no real model."""

import dataclasses
import importlib.util
import json
import math

import pytest
from tiny import experiment, tiny, with_text

import spec_jax
from spec_jax.kernels import cpu
from spec_jax.models.packing import pack_params

script = experiment("speedup_vs_batch")
Step = script.Step

# 10 weights of 4 bytes; 8 bytes of K/V per token; 2 operations per row and token of context.
SIZES = script.Sizes(10, 40, 8, 2)


def test_a_step_of_few_rows_is_bound_by_bandwidth_and_one_of_many_by_arithmetic():
    # bytes 40 + 8 * 2 * 5 = 120, flops rows * (20 + 2 * 5) = 30 * rows
    assert script.roofline(SIZES, Step(1, 2, 2, 5), bandwidth=60, peak=60) == 2.0
    assert script.roofline(SIZES, Step(1, 2, 4, 5), bandwidth=60, peak=60) == 2.0
    assert script.roofline(SIZES, Step(1, 2, 6, 5), bandwidth=60, peak=60) == 3.0
    assert (
        script.roofline(SIZES, Step(1, 0, 1, 0), bandwidth=20, peak=1000) == 2.0
    )  # parameters once, whatever the rows


def test_seconds_between_measured_row_counts_lie_on_a_line_and_end_at_the_last():
    points = {"4": 1.0, "8": 3.0, "16": 4.0}
    assert [script.interpolated(points, rows) for rows in (1, 4, 6, 8, 12, 99)] == [1.0, 1.0, 2.0, 3.0, 3.5, 4.0]


def test_predicted_speedup_is_the_ratio_of_tokens_per_second():
    plain, speculative = Step(4, 4, 4, 0), Step(10, 4, 12, 0)
    assert script.predicted_speedup(plain, 2.0, speculative, 4.0) == pytest.approx(1.25)  # 10 / 4 against 4 / 2


@pytest.mark.parametrize(
    ("speedups", "batch"),
    [
        ({1: 1.5, 4: 1.25, 16: 0.75}, 8.0),  # halfway between 4 and 16 on a logarithmic axis
        ({16: 0.9, 1: 1.2, 2: 1.0, 4: 1.1}, 4 * 4**0.5),
        ({1: 0.9, 2: 1.5}, 1.0),
        ({1: 2.0, 4: 1.0}, None),
        ({}, None),
    ],
)
def test_crossover(speedups, batch):
    assert script.crossover(speedups) == (None if batch is None else pytest.approx(batch))


def test_sizes_count_what_a_step_reads():
    target = tiny(layers=1)
    weights = script.sizes_of(target)
    layer = 32 * (32 + 16 + 16) + 32 * 32 + 3 * 32 * 64 + 2 * 32  # q, k, v; o; gate, up, down; norms
    assert weights.parameters == layer + 32 + 97 * 32  # final norm and head, without the input embedding
    assert weights.parameter_bytes == 4 * weights.parameters
    assert weights.kv_bytes == 2 * 1 * 2 * 8 * 4
    assert weights.attention_flops == 4 * 1 * 4 * 8
    module = target.module.clone(config=dataclasses.replace(target.config, tie_embeddings=True))
    params = {name: entry for name, entry in target.params.items() if name != "lm_head"}
    assert script.sizes_of(dataclasses.replace(target, module=module, params=params)) == weights


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class Scripted:
    """Decodes on a clock: a plain step of B rows takes 1 + B / 8 seconds, one with K drafts 1 + B (K + 1) / 8."""

    runs = dict.fromkeys(("0", "3", "auto"))

    def __init__(self, clock):
        self.clock, self.calls, self.warm = clock, [], []

    def warm_up(self, batch):
        self.warm.append(batch)

    def step_seconds(self, batch):
        line = {str(batch * n): 1 + batch * n / 8 for n in (1, 4, 8)}
        return dict.fromkeys(self.runs, line)

    def decode(self, run, batch):
        self.calls.append(run)
        k = {"0": 0, "3": 3, "auto": 1}[run]
        seconds = 10 * (1 + batch * (k + 1) / 8)
        self.clock.now += seconds
        rows, drafts = 10 * batch, 10 * batch * (k > 0)  # of 10 steps; one draft of every row and step is accepted
        line = {"tokens": rows + drafts, "seconds": seconds, "steps": 10, "drafts": drafts, "draft_tokens": k * rows}
        line |= {"accepted": drafts, "exactness": "E1" if run == "3" else "E2"}
        # The last text is begun by plain decoding only, and the first one differs with K = 3.
        ids = {i: [7, 8] if run != "3" or i else [7, 9, 9] for i in range(batch + (run == "0"))}
        return line | {"ids": ids}


@pytest.fixture
def clock():
    return Clock()


def device(log):
    log.add(("device",), {"bandwidth": 40.0, "peak": 160.0})
    return log


def test_the_order_of_runs_rotates(clock):
    decoding = Scripted(clock)
    assert script.measure(script.Log(None, {}), decoding, [2], 2, clock=clock)
    assert decoding.calls == ["0", "3", "auto", "3", "auto", "0"]
    assert decoding.warm == [2]


def test_rows_hold_measured_and_predicted_ratios(clock):
    log = device(script.Log(None, {}))
    script.measure(log, Scripted(clock), [1, 8], 2, clock=clock)
    rows = {(row["batch"], row["k"]): row for row in script.rows_of(log, SIZES, 0.0, packed=True)}
    row = rows[8, "3"]
    assert row["tokens_per_second"] == dict.fromkeys(("median", "min", "max"), 16 / 5)
    assert row["speedup"]["median"] == pytest.approx((16 / 5) / (8 / 2))
    assert (row["rows_per_step"], row["tokens_per_step"]) == (32, 16)
    assert row["mean_acceptance_length"] == 2.0 and rows[8, "0"]["mean_acceptance_length"] is None
    # Roofline: 40 / 40 = 1 s of reading, or rows * 20 / 160 = rows / 8 s: 1 s for 8 rows, 4 s for 32.
    assert row["predicted_step_seconds"] == {"roofline": 4.0, "step_times": 5.0}
    assert row["predicted_speedup"] == {"roofline": pytest.approx(0.5), "step_times": pytest.approx(0.8)}
    assert rows[1, "3"]["predicted_speedup"]["roofline"] == pytest.approx(2.0)
    assert (row["same_ids"], row["sequences"], row["exactness"]) == (14, 16, "E1")  # of 2 repeats
    assert rows[8, "auto"]["same_ids"] == 16 and rows[8, "auto"]["exactness"] == "E2"


def test_other_kernels_compute_every_row(clock):
    log = device(script.Log(None, {}))
    decoding = Scripted(clock)
    script.measure(log, decoding, [2], 1, clock=clock)
    log["runs", 2, 0]["3"]["draft_tokens"] = 10
    rows = {(p, r["k"]): r for p in (True, False) for r in script.rows_of(log, SIZES, 0.0, packed=p)}
    assert rows[True, "3"]["rows_per_step"] == 3.0  # 2 sequences and 10 drafts in 10 steps
    assert rows[False, "3"]["rows_per_step"] == 8.0 and rows[False, "0"]["rows_per_step"] == 2.0
    assert rows[False, "auto"]["rows_per_step"] == 4.0


def test_the_ratio_is_formed_within_a_repeat(clock):
    log = device(script.Log(None, {}))
    script.measure(log, Scripted(clock), [1], 3, clock=clock)
    for repeat, slow in enumerate((1.0, 10.0, 1.0)):
        for line in log["runs", 1, repeat].values():
            line["seconds"] *= slow
    row = next(row for row in script.rows_of(log, SIZES, 0.0, packed=True) if row["k"] == "3")
    assert row["speedup"]["min"] == pytest.approx(row["speedup"]["max"])
    assert row["tokens_per_second"]["max"] == pytest.approx(10 * row["tokens_per_second"]["min"])


def test_a_budget_stops_between_repeats_and_the_file_goes_on(clock, tmp_path):
    path = str(tmp_path / "log.jsonl")
    decoding = Scripted(clock)
    assert not script.measure(device(script.Log(path, {"n": 1})), decoding, [1, 2], 2, deadline=1.0, clock=clock)
    assert len(decoding.calls) == 3  # one repeat at least
    with open(path, "a") as file:
        file.write('{"key": ["runs", 1, 1], "val')  # a run was killed
    log, rest = script.Log(path, {"n": 1}), Scripted(clock)
    assert script.measure(log, rest, [1, 2], 2, clock=clock)
    assert rest.warm == [1, 2] and len(rest.calls) == 9
    whole = script.Log(path, {"n": 1})
    assert whole == log and [key for key in whole if key[0] == "runs"] == [
        ("runs", b, r) for b in (1, 2) for r in (0, 1)
    ]
    again = Scripted(clock)
    assert script.measure(whole, again, [2, 1], 2, clock=clock) and not again.warm


@pytest.mark.parametrize(
    "text", ["no json\n", "[1]\n", '{"key": 1}\n', "cut off", '{"key": ["device"], "value": {}}\n']
)
def test_a_file_of_something_else_is_left_alone(tmp_path, text):
    path = tmp_path / "other.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match="was not written by this script"):
        script.Log(str(path), {"n": 1})
    assert path.read_text() == text


def test_other_arguments_need_another_file(tmp_path):
    path = str(tmp_path / "log.jsonl")
    script.Log(path, {"n": 1, "m": 2})
    with pytest.raises(ValueError, match="other n; give another"):
        script.Log(path, {"n": 3, "m": 2})


def test_prompts_must_fit_the_context():
    with pytest.raises(ValueError, match="exceed the context of 256"):
        script.Decoding(tiny(layers=1), [[1] * 250], [1], 4)


PROMPTS = ["a cat and a cat and a cat", "the dog, the dog, the dog", "one", "no no no no no"]


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Calls the script on a tiny model, packed where that can be, with two short prompts and small parts."""
    target = with_text(tiny(layers=1))
    if cpu.unavailable() is None:
        module = target.module.clone(packed=True)
        target = dataclasses.replace(target, module=module, params=pack_params(dict(target.params)))
    monkeypatch.setitem(vars(spec_jax), "load_model", lambda name, dtype: target)
    monkeypatch.setattr(script, "READ_BYTES", 1 << 16)
    monkeypatch.setattr(script, "PRODUCT", (8, 32, 32))
    monkeypatch.setattr(script, "STEPS", 2)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in PROMPTS))

    def call(*arguments):
        script.main(["--prompts", str(prompts), "--count", "2", "--max-tokens", "8", *arguments])

    return call


@pytest.mark.slow
def test_the_whole_script_on_a_tiny_model(small, tmp_path, capsys):
    options = ["--batch-sizes", "2", "--lengths", "0,7", "--repeats", "1", "--output", str(tmp_path / "log.jsonl")]
    small(*options, "--json", "--logdir", str(tmp_path / "logs"))
    report = json.loads(capsys.readouterr().out)
    assert report["finished"] and report["lengths"] == [7]
    assert [(row["batch"], row["k"]) for row in report["rows"]] == [(2, k) for k in ("0", "7", "auto")]
    for row in report["rows"]:
        assert row["same_ids"] == row["sequences"] >= 3
        assert all(value > 0 and math.isfinite(value) for value in row["predicted_step_seconds"].values())
        if row["k"] == "0":
            assert set(row["predicted_speedup"].values()) == {1.0}
            assert row["tokens_per_step"] == row["rows_per_step"] == 2  # the batch is always full
    assert set(report["crossover"]) == {"7", "auto"}
    assert set(report["crossover"]["7"]) == {"measured", "predicted_roofline", "predicted_step_times"}
    assert list((tmp_path / "logs").glob("events*"))
    small(*options)  # everything is there: only reports
    out, err = capsys.readouterr()
    assert "speed-up falls below 1 at batch" in out and "predicted (r)" in out and "warm-up" not in err


def test_without_matplotlib_a_plot_is_refused_at_once(small, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="2"):
        small("--plot", str(tmp_path / "plot.png"))
    assert "pip install -e '.[plot]'" in capsys.readouterr().err


def test_a_plot_is_drawn(tmp_path, clock):
    pytest.importorskip("matplotlib")
    log = device(script.Log(None, {}))
    script.measure(log, Scripted(clock), [1, 8], 1, clock=clock)
    script.plot(str(tmp_path / "plot.png"), {"rows": script.rows_of(log, SIZES, 0.0, packed=True)})
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "arguments",
    [("--batch-sizes", "0,1"), ("--batch-sizes", "1,x"), ("--lengths", "-1"), ("--repeats", "0"), ("--lengths", "")],
)
def test_bad_input_is_one_line(small, capsys, arguments):
    with pytest.raises(SystemExit, match="2"):
        small(f"{arguments[0]}={arguments[1]}")
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "error: " in line)
    assert arguments[0] in line
