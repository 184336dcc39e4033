"""experiments/paper_speedups.py: every published row is projected, by hand twice, and medians are what they say."""

import csv
import json
import statistics
import subprocess
import sys

import pytest
from tiny import experiment

from spec_jax.draft_costs import FAMILIES
from spec_jax.stacks import IDEAL, STACKS, find_stack

script = experiment("paper_speedups")
FILE = script.DATA / "published_speedups.csv"
ROWS = script.read_rows(FILE)
ARCHITECTURES = json.loads((script.DATA / "architectures.json").read_text())
ENTRIES = script.compare(ROWS, ARCHITECTURES)


def find(**columns):
    (entry,) = (e for e in ENTRIES if all(e[name] == value for name, value in columns.items()))
    return entry


def test_every_row_has_a_projection_and_every_outlier_a_reason():
    with open(FILE, newline="") as file:
        assert len(list(csv.DictReader(file))) == len(ROWS) == len(ENTRIES) > 250
    for entry in ENTRIES:
        assert 0 < entry["roofline"] < 40 and 0 < entry["projected"] < 40
        assert entry["error"] == pytest.approx((entry["projected"] - entry["published"]) / entry["published"])
        if entry["unit"] == "speed-up":
            assert abs(entry["error"]) <= script.OUTLIER or len(entry["note"]) > 40
    assert {row.stack for row in ROWS} == STACKS.keys() - {IDEAL.name}
    known = {*FAMILIES, *ARCHITECTURES, "lookup", "mtp", "heads"}
    assert {row.drafter.partition(":")[0] for row in ROWS} <= known


def test_the_median_error_of_speedups_is_below_a_fifth_and_overheads_lower_it():
    found = script.summary(ENTRIES)
    speedups = [e for e in ENTRIES if e["unit"] == "speed-up"]
    for errors, name in (("error", "with_overheads"), ("roofline_error", "roofline")):
        of_paper = {}
        for entry in speedups:
            of_paper.setdefault(entry["paper"], []).append(abs(entry[errors]))
        # The middle one, or the mean of the two in the middle.
        medians = {}
        for paper, values in [*of_paper.items(), ("all", sum(of_paper.values(), []))]:
            values, middle = sorted(values), len(values) // 2
            medians[paper] = values[middle] if len(values) % 2 else (values[middle - 1] + values[middle]) / 2
        assert found[name]["all_rows"] == pytest.approx(medians.pop("all"))
        assert found[name]["papers"] == pytest.approx(medians)
        assert found[name]["each_paper_once"] == pytest.approx(statistics.median(medians.values()))
    assert sum(found["rows"].values()) == len(speedups)
    assert {id(e) for e in found["outliers"]} == {id(e) for e in speedups if abs(e["error"]) > 0.4}
    assert found["with_overheads"]["all_rows"] < found["roofline"]["all_rows"]
    assert found["with_overheads"]["all_rows"] < 0.2 and found["with_overheads"]["each_paper_once"] < 0.2


def test_a_row_of_eager_pytorch_by_hand():
    # Prompt lookup on Vicuna-7B: the host needs 10 us for each of 61 operations of 32 layers and 47 more, 20 ms; the
    # A100 only 13 ms. A plain step adds 2 ms, a speculative one 3.5 ms, and the search costs nothing.
    host = 10e-6 * (32 * 61 + 47)
    entry = find(paper="Spec-Bench 2025", method="lookup", model="llama-2-7b", device="a100")
    assert entry["projected"] == pytest.approx(1.75 * (host + 2e-3) / (host + 3.5e-3))
    assert (entry["acceptance"], entry["published"]) == (1.75, 1.66)
    # Without overheads eleven rows cost what one row costs, but for the K/V of ten more tokens.
    assert entry["roofline"] == pytest.approx(1.75, rel=1e-3)


def test_a_row_of_cuda_graphs_by_hand():
    # MiMo-7B with one draft token on an A10: weights and K/V over 0.85 of 600 GB/s, 3 us per kernel, and 1 ms of the
    # host, which only the speculative step pays.
    bandwidth, d = 0.85 * 600e9, 4096
    layer = d * 128 * (2 * 32 + 2 * 8) + 3 * d * 11008 + 2 * d
    head, kv = 151680 * d, 2 * 8 * 128

    def seconds(layers, parameters, width):
        read = 2 * (parameters + head) + 2 * layers * kv * (500 + width)
        return read / bandwidth + 3e-6 * (10 * layers + 30)

    target = 36 * layer + d
    plain, verify = (seconds(36, target, width) for width in (1, 2))
    draft = seconds(1, target // 36 + 2 * d * d, 1)
    entry = find(paper="FastMTP 2025", method="Vanilla MTP", nodes=1)
    assert entry["projected"] == pytest.approx(1.70 * plain / (verify + 1e-3 + draft))
    assert entry["published"] == pytest.approx(41.67 / 31.55, abs=1e-3)


def test_plain_steps_check_the_overheads_by_themselves():
    steps = [e for e in ENTRIES if e["unit"] == "ms"]
    gpu = [e for e in steps if e["stack"] != "xla"]
    assert len(gpu) == 5 and all(abs(e["error"]) < 0.1 < abs(e["roofline_error"]) for e in gpu)
    assert all(e["note"] for e in steps if abs(e["error"]) > 0.2)


def test_acceptance_is_read_as_the_paper_counts_it():
    entry = find(paper="Leviathan 2023", dataset="EnDe T=0", drafter="t5-1.1-small")
    row = script.Row(**{name: entry[name] for name in script.Row.__dataclass_fields__})
    assert row.tokens == pytest.approx((1 - 0.75**8) / (1 - 0.75))
    assert all(1 <= row.acceptance <= row.nodes + 1 for row in ROWS if row.reading == "tau")
    assert all(0 < row.acceptance < 1 for row in ROWS if row.reading == "alpha")


def test_the_command_needs_no_jax_and_writes_what_it_prints(tmp_path):
    code = "import sys; sys.modules['jax'] = None; import runpy; runpy.run_path(sys.argv.pop(1), run_name='__main__')"
    output = tmp_path / "out.csv"
    command = [sys.executable, "-c", code, script.__file__, "--json", "--csv", str(output), "--paper", "Medusa 2024"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    report = json.loads(found.stdout)
    assert report["summary"]["rows"] == {"Medusa 2024": 4} and "wrote" in found.stderr
    with open(output, newline="") as file:
        written = list(csv.DictReader(file))
    assert [float(row["projected"]) for row in written] == [row["projected"] for row in report["rows"]]


def test_the_tables_name_papers_medians_and_outliers(capsys):
    script.main(["--paper", "Leviathan 2023", "Gloeckle 2024"])
    printed = capsys.readouterr().out
    for text in ("t5-1.1-xxl, v4", "all rows", "each paper once", "own formula", "Further off than 40 %"):
        assert text in printed
    assert "Medusa" not in printed


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("device", "h300", "device='h300' is not known; allowed: v4"),
        ("model", "gpt-5", "model='gpt-5' is not known; allowed: llama-2-7b"),
        ("stack", "jit", "stack='jit' is not known; allowed: ideal, xla"),
        ("drafter", "eagles", "drafter='eagles' is not known; allowed: lookup"),
        ("batch", "0", "line 2: batch='0' must be an integer of at least 1"),
        ("nodes", "x", "line 2: nodes='x' must be an integer of at least 0"),
        ("acceptance", "nan", "line 2: acceptance='nan' must be a number, 0 or more"),
        ("acceptance", "9", "a mean acceptance length of 9.0 must be from 1 to 8 with nodes=7"),
        ("reading", "bonus", "line 2: reading='bonus' must be one of tau, alpha"),
        ("dtype", "int3", "line 2: dtype='int3' must be one of float32"),
        ("published", "0", "line 2: published=0.0 must be above 0"),
    ],
)
def test_a_wrong_row_is_one_clear_line(tmp_path, capsys, column, value, message):
    with open(FILE, newline="") as file:
        row = next(csv.DictReader(file)) | {"reading": "tau", "acceptance": "3.0"} | {column: value}
    path = tmp_path / "rows.csv"
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, row)
        writer.writeheader()
        writer.writerow(row)
    with pytest.raises(SystemExit) as caught:
        script.main(["--data", str(path)])
    error = capsys.readouterr().err
    assert caught.value.code == 2 and error.startswith("error: ") and message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--paper", "Medusa 2023"],
            "paper='Medusa 2023' is not known (did you mean 'Medusa 2024'?); allowed: Leviathan",
        ),
        (["--data", "nowhere.csv"], "nowhere.csv"),
        (["--data", __file__], "are missing; needed: paper, source"),
    ],
)
def test_wrong_options_are_one_clear_line(capsys, options, message):
    with pytest.raises(SystemExit) as caught:
        script.main(options)
    error = capsys.readouterr().err
    assert caught.value.code == 2 and message in error and error.count("\n") == 1


def test_stacks_are_found_by_name_and_the_ideal_one_adds_nothing():
    assert all(find_stack(name) is stack for name, stack in STACKS.items())
    assert IDEAL.gaps(32) == IDEAL.host(32) == IDEAL.tree(7, 60) == 0
    assert find_stack("eager").tree(7, 59) == pytest.approx(10e-6 * (7 * 25 + 59 * 3))
    with pytest.raises(ValueError, match="stack='cuda' is not known; allowed: ideal, xla, vllm, sglang, eager"):
        find_stack("cuda")


def test_the_plot_is_written(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    file = tmp_path / "plot.png"
    script.main(["--plot", str(file), "--json"])
    assert file.read_bytes().startswith(b"\x89PNG") and f"wrote {file}" in capsys.readouterr().err
