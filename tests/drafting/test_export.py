"""Drafters that are exported are read back as they were, in every layout that has a place for them."""

import dataclasses
import json
from types import SimpleNamespace

import jax
import numpy as np
import published_files as published
import pytest
from safetensors.numpy import load_file
from test_checkpoints import assert_same, flat
from tiny import packed

import spec_jax
from spec_jax import cli, cli_export
from spec_jax.drafting import export
from spec_jax.drafting.checkpoints import DrafterFolder, read_drafter
from spec_jax.drafting.export import LAYOUTS, default_layout, export_drafter
from spec_jax.models.config import from_hf_config, to_hf_config
from spec_jax.models.packing import pack_params
from spec_jax.models.rope import RopeConfig

TARGET = published.target()
OURS = {"target_name": "owner/toy", "target_config": TARGET.config}
EXPORTED = [name for name in published.ALL if name not in ("mimo mtp", "deepseek mtp", "deepseek mtp without tables")]
"""Those whose forward pass a layout can say."""


def tree(expected):
    """A parameter tree of {path: array}."""
    params = {}
    for (*parents, leaf), array in expected.items():
        branch = params
        for parent in parents:
            branch = branch.setdefault(parent, {})
        branch[leaf] = array
    return params


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


@pytest.fixture(params=EXPORTED)
def drafter(request):
    return published.ALL[request.param]()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_round_trip(drafter, layout, tmp_path):
    head, params = drafter.head, tree(drafter.expected)
    if not isinstance(head, LAYOUTS[layout]):
        with pytest.raises(ValueError, match=f"the layout '{layout}' has no place for a {type(head).__name__}; use "):
            export_drafter(head, params, tmp_path, layout=layout, **OURS)
        return
    if layout == "eagle" and head.config.num_layers > 1:
        with pytest.raises(ValueError, match="has one layer, not 2; use the speculators layout"):
            export_drafter(head, params, tmp_path, layout=layout, **OURS)
        return
    export_drafter(head, params, tmp_path / "out", layout=layout, **OURS)
    found, again, _ = read_drafter(tmp_path / "out", TARGET)
    assert found == head
    assert_same(again, drafter.expected)
    head, packed_params = dataclasses.replace(head, packed=True), pack_params(jax.tree.map(jax.numpy.asarray, params))
    export_drafter(head, packed_params, tmp_path / "packed", layout=layout, **OURS)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "packed" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()


@pytest.mark.parametrize(("dtype", "step"), [("bfloat16", 2**-8), ("float16", 2**-11), ("int8", None)])
def test_dtypes(drafter, dtype, step, tmp_path):
    export_drafter(drafter.head, tree(drafter.expected), tmp_path, dtype=dtype, **OURS)
    found, params, _ = read_drafter(tmp_path, TARGET)
    assert found == drafter.head
    for path, array in flat(params).items():
        want = drafter.expected[path]
        if path == ("draft_ids",) or (dtype == "int8" and want.ndim == 1):
            np.testing.assert_array_equal(array, want)
        elif dtype == "int8":  # rows of the file, which are columns of linear weights here
            axis = 1 if path[-1] in ("embedding",) or path[-1].startswith("lm_head") else 0
            assert (np.abs(array - want) <= np.abs(want).max(axis=axis, keepdims=True) / 254 * 1.001).all()
        else:
            assert (np.abs(array - want) <= step * np.abs(want) + 1e-7).all()


def test_int8_is_kept_to_the_bit_by_another_round(tmp_path):
    drafter = published.peagle()
    export_drafter(drafter.head, tree(drafter.expected), tmp_path / "one", dtype="int8", **OURS)
    head, params, _ = read_drafter(tmp_path / "one", TARGET)
    export_drafter(head, params, tmp_path / "two", dtype="int8", **OURS)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    for name in one:
        if one[name].dtype == np.int8:
            np.testing.assert_array_equal(one[name], two[name])
    assert one["fc.weight_scale"].shape == (published.HIDDEN, 1)


def test_rows_of_zeros(tmp_path):
    drafter = published.peagle()
    drafter.expected[("fc", "fc")] = np.zeros_like(drafter.expected[("fc", "fc")])
    export_drafter(drafter.head, tree(drafter.expected), tmp_path, dtype="int8", **OURS)
    assert not np.asarray(read_drafter(tmp_path, TARGET)[1]["fc"]["fc"]).any()


# --- Configs ----------------------------------------------------------------------------------------------------------


def test_the_config_of_speculators(tmp_path):
    drafter = published.speculators_eagle3("whole")
    export_drafter(drafter.head, tree(drafter.expected), tmp_path, num_speculative_tokens=3, **OURS)
    config = config_of(tmp_path)
    assert config["speculators_config"] == {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
        ],
        "verifier": {"name_or_path": "owner/toy", "architectures": ["LlamaForCausalLM"]},
    }
    assert config["architectures"] == ["Eagle3Speculator"] and config["speculators_version"]
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 8] and config["draft_vocab_size"] == published.DRAFT
    assert config["transformer_layer_config"]["vocab_size"] == published.VOCAB
    assert (config["norm_before_fc"], config["fc_norm"], config["norm_output"]) == (True, False, True)
    tensors = load_file(tmp_path / "model.safetensors")
    assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (np.int64, np.bool_)


@pytest.mark.parametrize(("name", "tokens"), [("dflash", 5), ("speculators dflash", 4), ("peagle", 4), ("medusa", 3)])
def test_default_number_of_tokens(name, tokens, tmp_path):
    drafter = published.ALL[name]()
    export_drafter(drafter.head, tree(drafter.expected), tmp_path, **OURS)
    found = DrafterFolder(tmp_path, TARGET).layout.num_speculative_tokens
    assert found == (None if name == "medusa" else tokens)
    assert name != "medusa" or config_of(tmp_path)["num_lookahead_tokens"] == tokens


ROPES = [
    RopeConfig(),
    RopeConfig(theta=5e5),
    RopeConfig(rope_type="linear", factor=2.0),
    RopeConfig(rope_type="llama3", factor=8.0, original_max_position=512, low_freq_factor=1.5, high_freq_factor=3.5),
    RopeConfig(rope_type="yarn", factor=4.0, beta_fast=16.0, attention_factor=1.25, truncate=False),
]


@pytest.mark.parametrize("rope", ROPES)
def test_configs_are_read_back(rope):
    config = dataclasses.replace(TARGET.config, rope=rope)
    assert from_hf_config(to_hf_config(config)) == config


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize(("qkv_bias", "output_bias"), [(False, False), (True, False), (True, True)])
def test_switches_are_read_back(qk_norm, qkv_bias, output_bias):
    config = dataclasses.replace(TARGET.config, qk_norm=qk_norm, qkv_bias=qkv_bias, output_bias=output_bias)
    if qk_norm and qkv_bias and not output_bias:
        with pytest.raises(ValueError, match="a config.json cannot say output_bias=False"):
            to_hf_config(config)
    else:
        assert dataclasses.replace(from_hf_config(to_hf_config(config)), model_type="llama") == config


def test_what_a_config_cannot_say():
    divisors = tuple(float(i + 1) for i in range(4))
    config = dataclasses.replace(TARGET.config, rope=RopeConfig(frequency_divisors=divisors))
    with pytest.raises(ValueError, match="a config.json cannot say rope=RopeConfig"):
        to_hf_config(config)


# --- Tables -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dflash", "eagle3", "speculators mtp", "eagle without bias and embedding"])
def test_all_tables(name, tmp_path):
    drafter = published.ALL[name]()
    params, target_params = tree(drafter.expected), TARGET.params
    export_drafter(drafter.head, params, tmp_path, tables="all", target_params=target_params, **OURS)
    head, params, remark = read_drafter(tmp_path, TARGET)
    assert head.own_embedding and head.own_head and remark == ""
    expected = {("embedding",): TARGET.params["embedding"], ("lm_head",): TARGET.params["lm_head"]} | drafter.expected
    assert_same(params, expected)


def test_all_tables_of_medusa(tmp_path):
    drafter = published.vllm_medusa(True)
    del drafter.expected[("lm_head",)], drafter.expected[("draft_ids",)]
    sizes = dataclasses.replace(drafter.head.config, vocab_size=published.VOCAB)
    head = dataclasses.replace(drafter.head, own_head=False, mapped=False, config=sizes)
    export_drafter(head, tree(drafter.expected), tmp_path / "own", **OURS)
    assert read_drafter(tmp_path / "own", TARGET)[0] == head
    params = tree(drafter.expected)
    export_drafter(head, params, tmp_path / "all", tables="all", target_params=TARGET.params, **OURS)
    found, params, _ = read_drafter(tmp_path / "all", TARGET)
    assert found == dataclasses.replace(head, own_head=True)
    np.testing.assert_array_equal(params["lm_head"], TARGET.params["lm_head"])


@pytest.mark.parametrize("name", ["eagle3", "speculators dflash", "vllm medusa, one head", "speculators eagle3"])
def test_tables_that_are_the_target_s_are_left_out(name, tmp_path):
    drafter = published.ALL[name]()
    ids = drafter.expected[("draft_ids",)]
    options = OURS | {"tables": "different", "target_params": TARGET.params}
    export_drafter(drafter.head, tree(drafter.expected), tmp_path / "all", **options)
    assert_same(read_drafter(tmp_path / "all", TARGET)[1], drafter.expected)
    drafter.expected[("lm_head",)] = np.asarray(TARGET.params["lm_head"])[ids]
    export_drafter(drafter.head, tree(drafter.expected), tmp_path / "left", **options)
    assert not any("lm_head" in tensor for tensor in load_file(tmp_path / "left" / "model.safetensors"))
    head, params, remark = read_drafter(tmp_path / "left", packed(TARGET), packed=False)
    assert head == drafter.head and "output head of" in remark
    assert_same(params, drafter.expected)


# --- Mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "change", "options", "message"),
    [
        (
            "eagle3",
            {},
            {"layout": "speculator"},
            "layout='speculator' is not known; use one of speculators, eagle, vllm",
        ),
        ("eagle3", {}, {"dtype": "int4"}, "dtype='int4' is not supported"),
        ("eagle3", {}, {"tables": "none"}, "tables='none' is not known"),
        ("eagle3", {}, {"tables": "all"}, "tables='all' needs target_params"),
        ("eagle3", {"features": (1, -1, 2)}, {}, "the final norm's output, which these layouts cannot name"),
        ("speculators mtp", {"hidden_first": True}, {}, "no place for hidden_first=True; it means False"),
        ("speculators mtp", {"post_norm": False}, {}, "no place for post_norm=False"),
        ("speculators mtp", {"zero_first": True}, {}, "no place for zero_first=True"),
        ("speculators mtp", {"features": (3,)}, {}, r"no place for features=\(3,\)"),
        ("dflash", {"windows": (3, 4)}, {}, "one window for all layers"),
        ("dflash", {"causal": (True, False)}, {}, "one window for all layers"),
    ],
)
def test_what_a_layout_has_no_place_for(name, change, options, message, tmp_path):
    drafter = published.ALL[name]()
    head = dataclasses.replace(drafter.head, **change)
    with pytest.raises(ValueError, match=message):
        export_drafter(head, tree(drafter.expected), tmp_path / "out", **OURS | options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("value", "dtype", "message"), [(np.nan, "float32", "not finite"), (1e6, "float16", "range of")]
)
def test_numbers_that_cannot_be_stored(value, dtype, message, tmp_path):
    drafter = published.peagle()
    drafter.expected[("layer_0", "up")][2, 3] = value
    with pytest.raises(ValueError, match=f"layer_0/up holds numbers.*{message}"):
        export_drafter(drafter.head, tree(drafter.expected), tmp_path, dtype=dtype, **OURS)


# --- The command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def command(monkeypatch, tmp_path):
    """`spec-jax export` for the toy target: (name of a published drafter, options) -> exit status."""
    monkeypatch.setitem(vars(spec_jax), "load_model", lambda name, cpu_kernels: TARGET)

    def run(name, *options):
        folder = published.ALL[name]().write(tmp_path / "drafter")
        return cli.main(["export", str(folder), "--out", str(tmp_path / "out"), *options])

    return SimpleNamespace(run=run, out=tmp_path / "out")


def test_the_command_changes_the_layout(command, capsys):
    assert command.run("eagle3", "--dtype", "float32", "--target-name", "owner/toy", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["method"], report["read"], report["layout"]) == ("eagle3", "SafeAILab EAGLE-3", "speculators")
    assert report["bytes"] == (command.out / "model.safetensors").stat().st_size
    config = config_of(command.out)
    assert config["speculators_config"]["verifier"]["name_or_path"] == "owner/toy"
    embedding = {("embedding",): TARGET.params["embedding"]}  # which speculators does not take from the target
    assert_same(read_drafter(command.out, TARGET)[1], embedding | published.eagle3().expected)


def test_the_command_keeps_the_number_of_tokens_and_says_what_it_did(command, capsys):
    assert command.run("peagle", "--tables", "own") == 0
    printed = capsys.readouterr()
    assert "speculators peagle as speculators, bfloat16, 0.0 MB" in printed.out
    assert "uses the embedding of" in printed.err
    assert DrafterFolder(command.out, TARGET).layout.num_speculative_tokens == 5


def test_a_drafter_can_be_replaced_by_itself(command, tmp_path):
    folder = published.dflash().write(tmp_path / "drafter")
    assert cli.main(["export", str(folder), "--out", str(folder), "--dtype", "float32"]) == 0
    assert_same(read_drafter(folder, TARGET)[1], published.dflash().expected)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--layout", "vllm"), "error: the layout 'vllm' has no place for a Eagle3Head; use speculators or eagle"),
        (("--layout", "x"), "error: argument --layout: invalid choice: 'x'"),
        (("--num-speculative-tokens", "0"), "error: num_speculative_tokens=0 must be a positive integer"),
    ],
)
def test_mistakes_are_one_line(command, capsys, options, message):
    assert command.run("eagle3", *options) == 2
    assert capsys.readouterr().err.startswith(message)


def test_the_command_offers_what_there_is():
    assert (cli_export.LAYOUTS, cli_export.DTYPES, cli_export.TABLES) == (tuple(LAYOUTS), export.DTYPES, export.TABLES)
    assert {default_layout(published.ALL[name]().head) for name in EXPORTED} == set(LAYOUTS)
