"""The planner against published tables and hand-counted sizes; the command in a process that must not load jax."""

import csv
import dataclasses
import json
import pathlib
import subprocess
import sys

import pytest

from spec_jax import cli, draft_costs, planner
from spec_jax.devices import DEVICES, find_device, known_device
from spec_jax.model_costs import costs_from_config
from spec_jax.planner import AcceptanceRates, Load, max_draft_tokens, plan, speculative_step
from spec_jax.roofline import step_time
from spec_jax.stacks import STACKS

GOLDENS = pathlib.Path(__file__).parent / "goldens"
LLAMA_8B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
DEEPSEEK_V3 = {
    "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "num_attention_heads": 128,
    "num_hidden_layers": 61, "num_key_value_heads": 128, "kv_lora_rank": 512, "q_lora_rank": 1536,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 129280,
}  # fmt: skip


def rows(name):
    with open(GOLDENS / name, newline="") as file:
        return list(csv.DictReader(file))


def test_every_row_of_the_tile_bound():
    found = rows("tile_bound_draft_len.csv")
    assert len(found) > 40
    for row in found:
        groups, tile = int(row["G_q_heads_per_kv"]), int(row["tile"])
        assert max_draft_tokens(groups, tile) == int(row["max_K_draft"])
        # One draft token more takes a second tile.
        device = dataclasses.replace(DEVICES["h100"], tiles=(tile,))
        most = max_draft_tokens(groups, tile)
        assert device.tiles_of((most + 1) * groups)[0] == 1 and device.tiles_of((most + 2) * groups)[0] == 2


@pytest.mark.parametrize(("groups", "tile"), [(16, 8), (0, 128), (8, 0), (True, 8), (2.0, 8)])
def test_a_tile_that_holds_no_row_is_refused(groups, tile):
    with pytest.raises(ValueError, match="groups=|tile="):
        max_draft_tokens(groups, tile)


def test_leviathans_table_of_operations_and_speed():
    found = rows("leviathan_table1_ops_speed.csv")
    assert len(found) == 6
    for row in found:
        alpha, gamma = float(row["alpha"]), int(row["gamma"])
        assert planner.operations_factor(alpha, gamma) == pytest.approx(float(row["formula_ops"]), abs=1e-4)
        assert planner.walltime_improvement(alpha, gamma) == pytest.approx(float(row["formula_speed"]), abs=1e-4)
        assert planner.operations_factor(alpha, gamma) == pytest.approx(float(row["operations_x"]), abs=0.006)
        assert planner.walltime_improvement(alpha, gamma) == pytest.approx(float(row["speed_x"]), abs=0.006)


def test_optimal_draft_lengths():
    found = rows("leviathan_optimal_gamma.csv")
    assert len(found) == 30
    for row in found:
        alpha, c = float(row["alpha"]), float(row["c"])
        gamma, published = planner.optimal_gamma(alpha, c), int(row["gamma_star"])
        if (alpha, c) == (0.5, 0.2):  # 1.5/1.2 = 1.75/1.4: one and two draft tokens are equally fast, and one is fewer
            assert (gamma, published) == (1, 2)
        else:
            assert gamma == published
        assert planner.walltime_improvement(alpha, gamma, c) == pytest.approx(float(row["speedup_at_star"]), rel=1e-4)
    assert planner.optimal_gamma(0.1, 0.5) == 0


def test_acceptance_by_position_and_back_from_its_mean():
    assert AcceptanceRates((0.9, 0.5)).expected_tokens(3) == pytest.approx(1 + 0.9 + 0.45 + 0.225)
    assert AcceptanceRates((0.9,)).expected_tokens(0) == 1
    for length, mean in ((1, 1.7), (5, 3.3), (7, 8.0), (4, 1.0)):
        rates = AcceptanceRates.from_mean_length(mean, length)
        assert rates.expected_tokens(length) == pytest.approx(mean)
    for bad in ((), (1.1,), (-0.1,), (float("nan"),)):
        with pytest.raises(ValueError, match="acceptance"):
            AcceptanceRates(bad)
    with pytest.raises(ValueError, match="from 1 to 4"):
        AcceptanceRates.from_mean_length(4.5, 3)


def test_sizes_of_published_models():
    llama = costs_from_config(LLAMA_8B)
    assert llama.parameters == 8_030_261_248 - 0  # as the model's card counts them
    assert (llama.query_group, llama.kv_values * llama.kv_bytes * llama.num_layers) == (4, 131072)
    deepseek = costs_from_config(DEEPSEEK_V3)
    assert deepseek.parameters == pytest.approx(671e9, rel=0.01)
    assert deepseek.active_parameters == pytest.approx(37e9, rel=0.02)
    assert (deepseek.query_group, deepseek.kv_values) == (128, 576)
    experts = deepseek.experts
    assert experts.layers == 58 and experts.touched(1) == pytest.approx(8)
    assert experts.touched(4096) == pytest.approx(256, rel=1e-3)
    tied = costs_from_config(LLAMA_8B | {"tie_word_embeddings": True})
    assert llama.parameters - tied.parameters == 128256 * 4096
    nested = costs_from_config({"text_config": LLAMA_8B})
    assert nested == llama
    windowed = costs_from_config(LLAMA_8B | {"sliding_window": 512})
    assert windowed.layer_tokens(2000) == 32 * 512 and windowed.layer_tokens(100) == 3200
    kinds = ["sliding_attention", "full_attention"] * 16
    assert costs_from_config(LLAMA_8B | {"sliding_window": 512, "layer_types": kinds}).windows == (16, 512)
    for count in (31, 99):
        with pytest.raises(
            ValueError, match=f"layer_types has {count} entries; it must have one for each of 32 layers"
        ):
            costs_from_config(LLAMA_8B | {"sliding_window": 512, "layer_types": ["sliding_attention"] * count})


def test_a_decoding_step_of_t5_reads_its_decoder():
    def t5(d, ff, heads, layers):
        sizes = {"d_model": d, "d_ff": ff, "d_kv": 64, "num_heads": heads, "num_layers": layers, "vocab_size": 32128}
        return costs_from_config(sizes | {"is_encoder_decoder": True, "feed_forward_proj": "gated-gelu"})

    # As the checkpoints of version 1.1 count them, but for 32 x heads relative positions on either side.
    assert t5(512, 1024, 6, 8).parameters + 2 * 32 * 6 == 76_961_152
    xxl = t5(4096, 10240, 64, 24)
    assert xxl.parameters + 2 * 32 * 64 == 11_135_332_352
    layer = 4 * 4096**2 + 2 * 4096**2 + 3 * 4096 * 10240 + 3 * 4096  # the source's keys and values are computed once
    assert xxl.parameters_read(1) == 24 * layer + 4096 + 32128 * 4096
    assert (xxl.query_group, xxl.kv_values) == (1, 2 * 4096)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"num_attention_heads": 30}, "multiple of num_key_value_heads=8"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"vocab_size": "many"}, "vocab_size='many'"),
        ({"torch_dtype": "int3"}, "torch_dtype='int3'"),
        ({"num_local_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok=5"),
    ],
)
def test_a_wrong_config_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        costs_from_config(LLAMA_8B | change)


def test_ridges_are_those_of_the_data_sheets():
    ridges = {"a100": 153, "h100": 295, "h200": 206, "b200": 281, "v4": 229, "v5e": 240, "v5p": 166, "v6e": 560}
    for name, ridge in ridges.items():
        assert find_device(name).ridge == pytest.approx(ridge, rel=0.005)
    with pytest.raises(ValueError, match="device='h300' is not known; allowed: v4"):
        find_device("h300")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40g"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA RTX A6000", "a6000"),
        ("NVIDIA GeForce RTX 3090", "rtx3090"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("TPU v4", "v4"),
        ("TPU v5 lite", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v6 lite", "v6e"),
        ("cpu", None),
        ("NVIDIA A30", None),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("TPU v4 lite", None),
        ("TPU7x", "tpu7x"),
    ],
)
def test_a_backends_words_for_a_chip(kind, name):
    assert known_device(kind) is (DEVICES[name] if name else None)


def test_the_machine_at_hand_is_measured_and_pads_nothing(monkeypatch):
    from spec_jax import peaks

    monkeypatch.setattr(peaks, "measure", lambda: peaks.Peaks(20e9, 150e9, 8 << 30))
    here, costs = find_device("here"), costs_from_config(LLAMA_8B)
    assert (here.bandwidth, here.flops, here.tiles_of(12)) == (20e9, 150e9, (1, 12))
    one, five = (step_time(here, costs, Load(1, 512), width).seconds for width in (1, 5))
    assert one == pytest.approx((costs.parameters_read(1) * 2 + 131072 * 513) / 20e9) and five > one


def test_peaks_are_positive_and_read_from_memory():
    from spec_jax import peaks

    bandwidth = peaks.Bandwidth(1 << 20)
    bandwidth.measure()
    assert bandwidth.speeds[0] > 0 and bandwidth.report()["bytes"] == 1 << 20


def test_a_small_batch_is_bound_by_memory_and_a_large_one_by_operations():
    costs, device = costs_from_config(LLAMA_8B), DEVICES["h100"]
    one = step_time(device, costs, Load(1, 1024), 1)
    read = (costs.parameters - costs.embedding_parameters) * 2 / device.bandwidth
    assert one.products == pytest.approx(read) and one.products_bound == "memory"
    assert one.attention == pytest.approx(131072 * 1025 / device.bandwidth)
    many = step_time(device, costs, Load(512, 1024), 8)
    assert many.products == pytest.approx(2 * costs.active_parameters * 4096 / device.flops)
    assert many.products_bound == "compute"
    # 32 rows of 4 query heads fill the tile; one row more reads the cache twice.
    full, more = (step_time(device, costs, Load(1, 8192), width) for width in (32, 33))
    assert (full.tiles, full.fill, more.tiles) == (1, 1.0, 2)
    assert more.attention > 1.9 * full.attention
    two = step_time(device, costs, Load(1, 1024, tensor=2), 1)
    assert two.products == pytest.approx(one.products / 2) and two.collectives > 0


def test_products_are_padded_to_the_tiles_of_a_gpu_and_to_eight_rows_on_a_tpu():
    gpu, tpu = DEVICES["a100"], DEVICES["v5e"]
    assert [gpu.product_rows(rows) for rows in (1, 9, 64, 81, 129, 4096)] == [8, 16, 64, 128, 136, 4096]
    assert [tpu.product_rows(rows) for rows in (1, 9, 81, 4096)] == [8, 16, 88, 4096]


def test_what_software_adds_by_hand():
    costs, device = costs_from_config(LLAMA_8B), DEVICES["h100"]
    bare = step_time(device, costs, Load(1, 1024), 1)
    graphs = step_time(device, costs, Load(1, 1024, stack=STACKS["vllm"]), 1)
    assert graphs.gaps == pytest.approx(3e-6 * (32 * 10 + 30)) and graphs.waiting == 0
    assert graphs.seconds == pytest.approx((bare.products + bare.attention) / 0.85 + graphs.gaps)
    # 32 layers of 61 operations and 47 more, 10 us each: the device waits for the host.
    eager = step_time(device, costs, Load(1, 1024, stack=STACKS["eager"]), 1)
    assert eager.seconds == pytest.approx(10e-6 * (32 * 61 + 47)) and eager.waiting > 0.01
    many = step_time(device, costs, Load(512, 1024, stack=STACKS["eager"]), 8)
    assert many.waiting == 0 and many.products == pytest.approx(2 * costs.active_parameters * 4096 / device.flops / 0.7)
    # A drafter of one layer costs operations where the host is the bound, and parameters where the memory is.
    shares = {}
    for name in ("ideal", "eager"):
        load = Load(stack=STACKS[name])
        step = speculative_step(device, costs, draft_costs.eagle3(costs), load, 3.0, 5)
        shares[name] = step.draft_seconds / 5 / step.plain_seconds
        assert step.speedup == pytest.approx(3 * step.plain_seconds / (step.verify_seconds + step.draft_seconds))
    assert shares["eager"] == pytest.approx(108 / (32 * 61 + 47 + 200)) and shares["eager"] < shares["ideal"]


def test_a_tree_verifies_all_of_its_nodes_and_drafts_its_levels():
    costs, device, load = costs_from_config(LLAMA_8B), DEVICES["h200"], Load(stack=STACKS["eager"])
    drafter = draft_costs.eagle(costs)
    chain = speculative_step(device, costs, drafter, load, 3.0, 6)
    tree = speculative_step(device, costs, drafter, load, 3.0, 60, 6, 10)
    assert tree.draft_seconds - chain.draft_seconds == pytest.approx(10e-6 * (6 * 25 + 60 * 3))
    assert tree.plain_seconds == chain.plain_seconds and tree.speedup < chain.speedup
    found = plan(device, costs, AcceptanceRates((0.8,)), drafter, load, 6)
    best = speculative_step(device, costs, drafter, load, found.lengths[6].expected_tokens, 6)
    assert found.lengths[6].speedup == best.speedup and found.lengths[0].speedup == 1
    for options, message in (
        ((7.5, 6), "from 1 to 7 with nodes=6"),
        ((1.0, -1), "nodes=-1"),
        ((1.0, 6, 1.5), "levels=1.5"),
        ((1.0, 6, 6, 0), "branch=0"),
    ):
        with pytest.raises(ValueError, match=message):
            speculative_step(device, costs, drafter, load, *options)


def test_the_best_length_shrinks_with_the_batch_and_with_dear_drafts():
    costs, device, rates = costs_from_config(LLAMA_8B), DEVICES["h100"], AcceptanceRates((0.8,))
    lookup = draft_costs.lookup()
    best = [plan(device, costs, rates, lookup, Load(batch)).best.num_draft_tokens for batch in (1, 16, 64, 256)]
    assert best == sorted(best, reverse=True) and best[0] > best[-1]
    dear = [plan(device, costs, rates, draft_costs.relative(c), Load()).best for c in (0, 0.05, 0.2, 2.0)]
    lengths = [length.num_draft_tokens for length in dear]
    assert lengths == sorted(lengths, reverse=True) and lengths[-1] == 0 and dear[-1].speedup == 1
    assert lengths[1] == planner.optimal_gamma(0.8, 0.05)  # a step of a few rows costs what one row costs


@pytest.mark.parametrize("name", ["lookup", "c=0.1", "layer_skip:8", *draft_costs.FAMILIES])
def test_every_family_costs_more_for_more_tokens_and_less_than_the_target(name):
    costs, device, load = costs_from_config(LLAMA_8B), DEVICES["h200"], Load(4)
    drafter = draft_costs.find_drafter(name, costs)
    plain = step_time(device, costs, load, 1).seconds
    seconds = [drafter.seconds(device, load, length, plain) for length in (0, 1, 4, 8)]
    assert seconds[0] == 0 and seconds == sorted(seconds) and seconds[1] < 0.5 * plain
    assert drafter.parameter_bytes(4) < 0.5 * costs.parameters * costs.weight_bytes


@pytest.mark.parametrize("name", ["eagles", "c=x", "layer_skip", "layer_skip:99", "c=-1"])
def test_an_unknown_drafter_is_named(name):
    with pytest.raises(ValueError, match=r"drafter=|layers=|draft cost"):
        draft_costs.find_drafter(name, costs_from_config(LLAMA_8B))


# --- The command ------------------------------------------------------------------------------------------------------


def run_without_jax(*options):
    """`spec-jax plan` where importing jax is an error."""
    code = "import sys; sys.modules['jax'] = None; from spec_jax.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "plan", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_command_answers_without_jax(tmp_path):
    found = run_without_jax("--groups", "8", "--tile", "128", "--json")
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["max_draft_tokens"] == 15
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA_8B))
    found = run_without_jax("--config", str(file), "--device", "h200,v6e", "--batch", "1,64", "--json")
    assert found.returncode == 0, found.stderr
    report = json.loads(found.stdout)
    assert [(p["device"], p["batch"]) for p in report["plans"]] == [
        ("h200", 1), ("h200", 64), ("v6e", 1), ("v6e", 64)
    ]  # fmt: skip
    assert [p["max_draft_tokens"] for p in report["plans"]] == [31, 31, 63, 63]
    assert report["kind"].startswith("projected") and all(p["fits"] for p in report["plans"])


def test_the_table_names_the_chip_the_lengths_and_the_speed_up(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    assert cli.main(["plan", "--config", str(tmp_path), "--device", "v5e", "--drafter", "eagle3"]) == 0
    out = capsys.readouterr().out
    assert "TPU v5e" in out and "8.03 G parameters" in out and "too much" in " ".join(out.split())


def test_the_plot_holds_a_curve_for_every_device_and_batch(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib").use("Agg")
    from matplotlib import pyplot

    figures = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    file = tmp_path / "plan.png"
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    options = ["--device", "h200,v6e", "--batch", "1,64", "--longest", "20", "--stack", "vllm"]
    assert cli.main(["plan", "--config", str(tmp_path), *options, "--json", "--plot", str(file)]) == 0
    monkeypatch.undo()
    out, err = capsys.readouterr()
    assert f"wrote {file}" in err and file.read_bytes().startswith(b"\x89PNG")
    report, (figure,) = json.loads(out), figures
    assert report["stack"] == "vllm" and [axis.get_title() for axis in figure.axes] == ["NVIDIA H200", "TPU v6e"]
    curves = [line for axis in figure.axes for line in axis.get_lines() if line.get_label().startswith("batch")]
    assert len(curves) == len(report["plans"]) == 4
    for curve, found in zip(curves, report["plans"], strict=True):
        assert curve.get_label() == f"batch {found['batch']}"
        assert list(curve.get_xdata()) == list(range(21))
        assert list(curve.get_ydata()) == [length["speedup"] for length in found["lengths"]]
    for axis, found in zip(figure.axes, report["plans"][::2], strict=True):
        (bound,) = (line for line in axis.get_lines() if line.get_label() == "one tile")
        assert set(bound.get_xdata()) == {found["max_draft_tokens"]}
    pyplot.close(figure)


def test_a_plot_without_matplotlib_is_one_clear_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    assert cli.main(["plan", "--config", str(tmp_path), "--plot", str(tmp_path / "plan.png")]) == 2
    assert capsys.readouterr().err == "error: --plot needs matplotlib: pip install 'spec_jax[plot]'\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "give --config"),
        (["--groups", "8"], "--groups needs --tile"),
        (["--groups", "256", "--tile", "128"], "groups=256"),
        (["--config", "nowhere.json"], "does not exist"),
        (["--config", "CONFIG", "--device", "h300"], "device='h300'"),
        (["--config", "CONFIG", "--batch", "1,x"], "--batch '1,x'"),
        (["--config", "CONFIG", "--batch", "0"], "batch=0"),
        (["--config", "CONFIG", "--alpha", "1.5"], "acceptance=1.5"),
        (["--config", "CONFIG", "--alpha", "0.5", "--acceptance", "0.5"], "give one of them"),
        (["--config", "CONFIG", "--groups", "8"], "--groups is read from --config"),
        (["--config", "CONFIG", "--weight-bytes", "0"], "--weight-bytes 0"),
        (["--config", "CONFIG", "--longest", "-1"], "longest=-1"),
        (["--config", "CONFIG", "--longest", "128"], "longest=128 must be an integer from 0 to 127"),
        (["--config", "CONFIG", "--device", ""], "--device '' names no device"),
        (["--config", "CONFIG", "--drafter", ""], "--drafter '' must be one of"),
        (["--config", ""], "--config '' must be a config.json"),
        (
            ["--config", "CONFIG", "--stack", "cuda"],
            "stack='cuda' is not known; allowed: ideal, xla, vllm, sglang, eager",
        ),
        (["--config", "CONFIG", "--overhead-us", "-5"], "--overhead-us -5.0 must be microseconds"),
        (["--groups", "3", "--tile", "64", "--batch", "x"], "--batch says nothing about the tile alone"),
        (["--groups", "3", "--tile", "64", "--stack", "vllm"], "--stack says nothing about the tile alone"),
        (["--groups", "3", "--tile", "64", "--alpha", "0.7"], "--alpha says nothing about the tile alone"),
    ],
)
def test_bad_input_is_one_clear_line(tmp_path, capsys, options, message):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    assert cli.main(["plan", *(str(tmp_path) if o == "CONFIG" else o for o in options)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
