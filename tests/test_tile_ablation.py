"""experiments/tile_ablation.py: rows and tiles by hand, verdicts of planted steps, one clear line for bad input."""

import csv
import json
import os
import sys

import pytest
from tiny import experiment

from spec_jax.kernels import block_sizes

static_cycles = experiment("static_cycles")
timed_attention = experiment("timed_attention")
script = experiment("tile_ablation")
CACHE = script.Cache(batch=1, kv_heads=1, head_dim=16, context=200)


@pytest.mark.parametrize(
    ("point", "tiles", "tile_rows"),
    [
        (("mosaic_tpu", "cut", 128, 8, 1), 1, 16),  # 8 rows, in a register of 16
        (("mosaic_tpu", "cut", 128, 8, 5), 1, 48),
        (("mosaic_tpu", "cut", 128, 8, 16), 1, 128),
        (("mosaic_tpu", "cut", 128, 8, 17), 2, 128),
        (("mosaic_tpu", "cut", 256, 8, 17), 1, 144),
        (("mosaic_tpu", "cut", 128, 1, 257), 3, 128),
        (("mosaic_tpu", "cut", 128, 12, 10), 1, 128),  # 120 rows: ten tokens of twelve heads, an eleventh does not fit
        (("mosaic_tpu", "cut", 128, 12, 11), 2, 128),
        (("mosaic_tpu", "whole", 128, 8, 1), 1, 128),
        (("mosaic_gpu", "cut", 128, 8, 9), 1, 128),
        (("reference", "whole", 32, 4, 9), 2, 32),
        (("cpu", "rows", 32, 4, 9), 9, 4),
    ],
)
def test_rows_of_a_point(point, tiles, tile_rows):
    found = script.Point(*point)
    assert (found.tiles, found.tile_rows) == (tiles, tile_rows)
    columns = found.columns()
    assert columns["k"] == point[4] - 1 and columns["rows"] == point[4] * point[3]
    assert columns["computed_rows"] == tiles * tile_rows >= columns["rows"]


def test_the_static_sweep_computes_what_the_kernel_would():
    """As many rows of a tile as `block_sizes` gives the kernel."""
    for point in script.sweep("mosaic_tpu", "cut", (256,), (1, 4, 8), quick=False):
        q, kv = (1, point.width, 2 * point.group, 128), (1, 2, 4096, 128)
        assert block_sizes.tpu_sizes(q, kv, "bfloat16").rows == point.tile_rows


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize(("tile", "group"), [(128, 1), (128, 8), (256, 4), (32, 8), (16, 16)])
def test_a_sweep_stands_on_both_sides_of_the_boundary(tile, group, quick):
    found = script.widths(tile, group, quick)
    assert found == sorted(set(found)) and found[0] == 1
    for tiles in (1,) if quick else (1, 2):
        last = tiles * (tile // group)
        assert last in found and last + 1 in found


def rows_of(cost, tile=32, group=4, spread=0.0, unit="seconds"):
    key = {"kind": "timed", "device": "a", "implementation": "reference", "fill": "whole", "tile": tile, "group": group}
    return [key | {"rows": group * w, unit: cost(w), "spread": spread} for w in script.widths(tile, group)]


def test_a_planted_step_is_found_and_measured():
    (found,) = script.verdicts(rows_of(lambda w: 3.0 * -(-w // 8)), threshold=0.05)
    assert (found["inside"], found["step"], found["second"]) == (1.0, 2.0, 1.5)
    assert found["free"] and found["jumps"] and found["free_rows"] == 32
    (line,) = script.summary([found])
    assert "free inside the tile in 1 of 1" in line and "at the boundary in 1 of 1 (2.00 to 2.00)" in line


@pytest.mark.parametrize(
    ("cost", "free"),
    [(lambda w: 1.0, True), (lambda w: 1.0 + w, False), (lambda w: float(w), False)],
    ids=["flat", "a line", "as the rows"],
)
def test_without_a_step_none_is_found(cost, free):
    """Not where the cost grows as the rows do: one more token is an eighth more of them."""
    (found,) = script.verdicts(rows_of(cost), threshold=0.05)
    assert found["free"] == free and not found["jumps"]
    assert found["free_rows"] == (4 * max(script.widths(32, 4)) if free else 4)
    assert "at the boundary in 0 of 1" in script.summary([found])[0]


def test_a_step_within_the_noise_is_none_and_cycles_and_seconds_are_judged_apart():
    noisy = rows_of(lambda w: 1.3 if w > 8 else 1.0, spread=0.5)
    assert not script.verdicts(noisy, 0.05)[0]["jumps"]
    both = [row | {"cycles": 100 * -(-row["rows"] // 32)} for row in rows_of(lambda w: 1.0)]
    cycles, seconds = script.verdicts(both, 0.05)
    assert (cycles["unit"], cycles["step"], cycles["jumps"]) == ("cycles", 2.0, True)
    assert (seconds["unit"], seconds["step"], seconds["jumps"]) == ("seconds", 1.0, False)


def test_one_side_of_the_boundary_alone_gives_no_verdict():
    assert script.verdicts([row for row in rows_of(lambda w: 1.0) if row["rows"] <= 32], 0.05) == []


def test_the_planners_figure_is_bytes_or_operations_of_the_tiles():
    cache = script.Cache(batch=4, kv_heads=2, head_dim=128, context=4000)
    points = [script.Point("mosaic_tpu", "cut", 128, 8, width) for width in (1, 16, 17)]
    rows = script.simulated("v5e", points, cache, "bfloat16")
    read = 4 * 4000 * 2 * 2 * 128 * 2 / 819e9
    assert [row["seconds"] for row in rows] == pytest.approx([read, read, 2 * read])
    assert [(row["tiles"], row["computed_rows"]) for row in rows] == [(1, 8), (1, 128), (2, 136)]
    assert {row["kind"] for row in rows} == {"simulated"} and {row["implementation"] for row in rows} == {"planner"}


def test_bytes_and_clocks():
    shape = static_cycles.Shape(4, 8, 32, 1024, committed=1500, capacity=4096, batch=3, kv_heads=2, head_dim=64)
    assert shape.kv_bytes(tiles=2) == 2 * 2 * 3 * 2 * 2048 * 128 * 2  # two blocks, and lanes of 128
    assert static_cycles.clock("v5e") == pytest.approx(1.5e9, rel=0.01)
    assert static_cycles.clock("tpu7x") is None and static_cycles.bound_seconds("tpu7x", shape, 1000) is None
    assert static_cycles.bound_seconds("v5e", shape, 10**9) == pytest.approx(1e9 / static_cycles.clock("v5e"))
    assert static_cycles.bound_seconds("v5e", shape, 1) == pytest.approx(shape.kv_bytes(1) / 819e9)


def test_blocks_are_ranked_by_whole_blocks():
    short, long = (static_cycles.block_shape(8, block, 128, 8) for block in (1024, 2048))
    assert short.heads == 8 and short.batch == 16 and long.batch * 8 // long.heads == 16
    compute = 10**7  # per call, far above what memory takes
    a, b = (static_cycles.cost_of_contexts("v5e", s, compute * s.batch) for s in (short, long))
    assert b / a == pytest.approx(sum(-(-c // 2048) for c in range(256, 8193, 256)) / sum(range(1, 9)) / 4)


def test_timed_on_this_machine(tmp_path, capsys):
    file = tmp_path / "rows.csv"
    options = ["--batch", "1", "--kv-heads", "1", "--head-dim", "16", "--context", "200", "--groups", "8"]
    options += ["--tiles", "16", "--quick", "--repeats", "2", "--csv", str(file), "--json"]
    script.main(["--kinds", "timed", *options])
    report = json.loads(capsys.readouterr().out)
    assert {entry["implementation"] for entry in report["verdicts"]} == set(timed_attention.implementations())
    assert all(entry["inside"] > 0 and entry["step"] > 0 for entry in report["verdicts"])
    with open(file, newline="") as source:
        rows = list(csv.DictReader(source))
    assert len(rows) == len(report["rows"]) and {row["kind"] for row in rows} == {"timed"}
    for row in rows:
        assert float(row["seconds"]) > 0 and row["dtype"] == "float32" and "jax" in row["versions"]
        assert float(row["relative"]) == 1.0 or row["k"] != "0"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kinds", "static,meassured"], "kind='meassured' is not known; allowed: simulated, static, timed"),
        (["--generations", "v4"], "generation='v4' has no static profile"),
        (["--tiles", "100"], "tile=100 must be a multiple of 16, at most 256"),
        (["--tiles", "512"], "tile=512 must be a multiple of 16, at most 256"),
        (["--tiles", "16", "--groups", "32"], "group=32 must be from 1 to 16"),
        (["--groups", "0"], "group=0 must be from 1 to 32"),
        (["--block", "100"], "block=100 must be a multiple of 128"),
        (["--context", "300"], "context=300 must hold the 513 tokens"),
        (["--batch", "0"], "batch=0 must be a positive integer"),
        (["--repeats", "1"], "repeats=1 must be at least 2"),
        (["--threshold", "2"], "threshold=2.0 must be between 0 and 1"),
    ],
)
def test_bad_input_is_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        script.main(arguments)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and message in line


def test_without_the_compiler_the_static_part_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(static_cycles.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="2"):
        script.main(["--kinds", "static", "--generations", "v5e"])
    assert "pip install -e '.[tpu]'" in capsys.readouterr().err


def test_a_plot_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    script.plot(str(tmp_path / "plot.png"), rows_of(float) + rows_of(float, unit="cycles", group=8))
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.aot
def test_more_rows_never_take_fewer_cycles(monkeypatch):
    """The compiler's static profile of the real kernel, in the process that the script starts for it."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    cache = script.Cache(batch=2, kv_heads=1, head_dim=128, context=2000)
    points = [script.Point("mosaic_tpu", "cut", 128, 8, width) for width in (1, 17)]
    few, many = script.static("v5e", points, cache, 1024, lambda line: None)
    assert (few["tiles"], many["tiles"]) == (1, 2)
    assert 0 < few["cycles"] <= 1.03 * many["cycles"]
    assert few["seconds"] >= few["cycles"] / static_cycles.clock("v5e")
