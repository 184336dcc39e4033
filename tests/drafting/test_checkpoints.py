"""Learned drafters on disk: every published layout lands where it belongs, and everything wrong is named."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import published_files as published
import pytest
from safetensors.numpy import load_file, save_file
from tiny import packed, tiny

from spec_jax import load_model
from spec_jax.drafting import checkpoints
from spec_jax.drafting.checkpoints import DrafterFolder, find_drafter, known_drafters, read_draft_model, read_drafter
from spec_jax.drafting.export import export_model
from spec_jax.models.model import Model
from spec_jax.models.packing import unpack_tree

TARGET = published.target()


@pytest.fixture(params=published.ALL)
def drafter(request):
    return published.ALL[request.param]()


def read(folder, target=TARGET, **options):
    return read_drafter(str(folder), target, **options)


def flat(params):
    """{path: array} of a parameter tree."""
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    return {tuple(key.key for key in path): np.asarray(leaf) for path, leaf in leaves}


def assert_same(params, expected):
    found = flat(params)
    assert set(found) == set(expected)
    for path, array in expected.items():
        np.testing.assert_array_equal(found[path], array, err_msg="/".join(path))


# --- Every layout -----------------------------------------------------------------------------------------------------


def test_every_tensor_lands_in_its_place(drafter, tmp_path):
    head, params, remark = read(drafter.write(tmp_path / "drafter"))
    assert head == drafter.head
    assert_same(params, drafter.expected)
    shapes = jax.tree.map(lambda x: x.shape, params)
    assert shapes == head.param_shapes()
    borrows = not (head.own_head and (head.own_embedding or hasattr(head, "num_heads")))
    assert (f"of {TARGET.name}" in remark) == borrows


def test_a_missing_tensor_is_named(drafter, tmp_path):
    for name in set(drafter.tensors) - drafter.optional:
        whole = drafter.tensors
        drafter.tensors = {other: tensor for other, tensor in whole.items() if other != name}
        with pytest.raises(ValueError, match="missing") as error:
            read(drafter.write(tmp_path / "drafter"))
        assert name.removeprefix("model.") in str(error.value)
        drafter.tensors = whole


def test_an_extra_tensor_is_named(drafter, tmp_path):
    first = next(name for name in drafter.tensors if name not in ("d2t", "t2d"))
    extra = first.rpartition(".")[0] + ".spare"
    drafter.tensors[extra] = np.zeros(3, np.float32)
    with pytest.raises(ValueError, match=r"unexpected \(1\): .*spare"):
        read(drafter.write(tmp_path / "drafter"))


def test_a_wrong_shape_is_named(drafter, tmp_path):
    name = next(name for name, tensor in drafter.tensors.items() if tensor.ndim == 2)
    drafter.tensors[name] = drafter.tensors[name][:-1]
    with pytest.raises(ValueError, match=r"wrong shape \(1\): .* is \[\d+, \d+\], not \[\d+, \d+\]"):
        read(drafter.write(tmp_path / "drafter"))


def test_packed_parameters_are_the_same(drafter, tmp_path):
    folder = drafter.write(tmp_path / "drafter")
    head, params, _ = read(folder, packed(TARGET))
    assert head == dataclasses.replace(drafter.head, packed=True)
    assert_same(unpack_tree(params, head.param_shapes()), drafter.expected)


def test_bfloat16(tmp_path):
    drafter = published.speculators_dflash()
    head, params, _ = read(drafter.write(tmp_path / "drafter"), dtype="bfloat16")
    assert head == dataclasses.replace(drafter.head, dtype="bfloat16")
    dtypes = {path: leaf.dtype for path, leaf in flat(params).items()}
    assert dtypes.pop(("draft_ids",)) == np.int32 and set(dtypes.values()) == {jnp.dtype("bfloat16")}
    with pytest.raises(ValueError, match="dtype='float16' is not supported"):
        read(tmp_path / "drafter", dtype="float16")


# --- What absence means -----------------------------------------------------------------------------------------------


def test_ids_without_an_output_head_are_rows_of_the_target_s(tmp_path):
    drafter = published.eagle3()
    del drafter.tensors["lm_head.weight"]
    for target in (TARGET, packed(TARGET)):
        head, params, remark = read(drafter.write(tmp_path / "drafter"), target, packed=False)
        assert head == drafter.head
        rows = np.asarray(TARGET.params["lm_head"])[drafter.expected[("draft_ids",)]]
        np.testing.assert_array_equal(params["lm_head"], rows)
        assert remark == f"uses the embedding and the output head of {TARGET.name}"


def test_number_of_tokens_that_the_publisher_says(tmp_path):
    found = DrafterFolder(published.peagle().write(tmp_path / "drafter"), TARGET)
    assert (found.layout.method, found.layout.num_speculative_tokens) == ("eagle3", 5)


def test_a_config_that_miscounts_heads_is_said(tmp_path):
    drafter = published.medusa()
    drafter.config["medusa_num_heads"] = 5
    assert "medusa_num_heads=5; the file holds 3" in read(drafter.write(tmp_path / "drafter"))[2]


def test_buffers_of_old_versions_are_left_out(tmp_path):
    drafter = published.eagle()
    drafter.tensors["layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    read(drafter.write(tmp_path / "drafter"))


# --- Wrong drafters ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "name", "message"),
    [
        ({"hidden": 64}, "eagle3", "features of size 32, and those of .* have size 64"),
        ({"hidden": 64}, "dflash", "features of size 32, and those of .* have size 64"),
        ({"hidden": 64}, "speculators mtp", "features of size 32"),
        ({"hidden": 64}, "eagle", "features of size 32"),
        ({"hidden": 64}, "vllm medusa", "features of size 32"),
        ({"hidden": 64}, "medusa", r"0.0.linear.weight is \[32, 32\], not \[64, 64\]"),
        ({"vocab": 98}, "eagle", "embed_tokens.weight has 97 rows, fewer than the 98 ids"),
        ({"vocab": 98}, "vllm medusa", r"lm_heads.0.weight is \[97, 32\], not \[98, 32\]"),
        ({"vocab": 2000}, "eagle3", "vocabulary of 97 ids, and .* has 2000"),
        ({"vocab": 80}, "peagle", "lm_head.weight has 97 rows and .* 80"),
        ({"layers": 7}, "dflash", "num_target_layers=8, and .* has 7 layers"),
        ({"layers": 7}, "speculators eagle3", r"=\[1, 8\] must be numbers from 1 to 7"),
        ({"layers": 3}, "eagle3", r"=\[2, 1, 0\] must be numbers from 1 to 3"),
    ],
)
def test_a_drafter_for_another_target(target, name, message, tmp_path):
    folder = published.ALL[name]().write(tmp_path / "drafter")
    with pytest.raises(ValueError, match=message):
        read(folder, tiny(**{"seed": 1, "layers": published.LAYERS} | target))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("speculators eagle3", {"speculators_model_type": "dspark"}, "'dspark' is not supported; .*eagle3, peagle"),
        ("speculators eagle3", {"norm_before_fc": True, "fc_norm": True}, "both true"),
        ("eagle3", {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state=false"),
        ("eagle3", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}, "from 1 to 8"),
        ("eagle3", {"draft_vocab_size": 0}, "vocab_size=0"),
        ("eagle3", {"model_type": "mamba"}, "model_type='mamba'"),
        ("eagle3", {"quantization_config": {"quant_method": "gptq"}}, "is quantised"),
        ("peagle", {"mask_token_id": None}, "lacks mask_token_id"),
        ("peagle", {"mask_token_id": 97}, "mask_token_id.*=97 is outside the 97 rows"),
        ("dflash", {"dflash_config": {"target_layer_ids": [-1]}}, "from 0 to 7"),
        ("dflash", {"dflash_config": {"mask_token_id": 1, "final_logit_softcapping": 20.0}}, "softcapping=20"),
        ("dflash", {"block_size": 1}, "block_size=1 must be"),
        ("dflash", {"block_size": None}, "block_size=None must be"),
        ("dflash", {"projector_type": "domino"}, "the kind domino"),
        ("dflash with a window", {"layer_types": ["sliding_attention"]}, "layer_types has 1 entries for 2 layers"),
        ("dflash with a window", {"layer_types": ["chunked", "x"]}, "layer_types has chunked, x; supported"),
        ("vllm medusa", {"num_heads": 10**9}, "num_heads=1000000000"),
        ("vllm medusa", {"num_heads": 3}, r"missing \(3\): blocks.2.layers.0.weight"),
    ],
)
def test_a_config_that_cannot_be_used(name, change, message, tmp_path):
    drafter = published.ALL[name]()
    drafter.config |= change
    with pytest.raises(ValueError, match=message):
        read(drafter.write(tmp_path / "drafter"))


@pytest.mark.parametrize(
    ("drafter", "tensor", "message"),
    [
        ("deepseek mtp", "model.layers.8.self_attn.kv_a_proj_with_mqa.weight", "multi-head latent attention"),
        ("deepseek mtp", "model.layers.8.mlp.experts.0.up_proj.weight", "a mixture of experts"),
        ("qwen3-next mtp", "mtp.layers.0.mlp.gate.weight", "a mixture of experts"),
        ("eagle3", "midlayer.self_attn.q_a_proj.weight", "multi-head latent attention"),
        ("dflash", "markov_head.markov_w1.weight", "DSpark"),
        ("dflash", "candidate_selector.predecessor_codebook", "DFlash2"),
        ("dflash", "prefix_gru.weight_ih_l0", "Domino"),
        ("dflash", "lilicorr.token_proj.weight", "LiLiCorr"),
    ],
)
def test_parts_that_are_not_supported(drafter, tensor, message, tmp_path):
    drafter = published.ALL[drafter]()
    drafter.tensors[tensor] = np.zeros((4, 4), np.float32)
    with pytest.raises(ValueError, match=message):
        read(drafter.write(tmp_path / "drafter"))


def test_gated_attention_is_refused(tmp_path):
    drafter = published.qwen3_next_mtp()
    name = "mtp.layers.0.self_attn.q_proj.weight"
    drafter.tensors[name] = np.concatenate([drafter.tensors[name]] * 2)
    with pytest.raises(ValueError, match="gated attention is not supported"):
        read(drafter.write(tmp_path / "drafter"))


def test_copies_must_be_equal(tmp_path):
    drafter = published.deepseek_mtp()
    drafter.tensors["model.layers.9.embed_tokens.weight"][3, 4] += 1
    with pytest.raises(ValueError, match=r"layers.9.embed_tokens.weight differs from model.layers.8.embed_tokens"):
        read(drafter.write(tmp_path / "drafter"))


def test_a_model_is_no_drafter(tmp_path):
    model = tiny(seed=2)
    export_model(model.config, model.params, tmp_path / "model")
    with pytest.raises(ValueError, match="no known drafter has tensors named .*; EAGLE, EAGLE-3"):
        read(tmp_path / "model")


# --- Tables of ids ----------------------------------------------------------------------------------------------------


def _ids_instead_of_offsets(tensors):
    tensors["d2t"] = tensors["d2t"] + np.arange(published.DRAFT)


def _twice(tensors):
    tensors["d2t"][1] = tensors["d2t"][0] - 1


def _negative(tensors):
    tensors["d2t"][0] = -1


def _other_members(tensors):
    tensors["t2d"] = ~tensors["t2d"]


def _short_members(tensors):
    tensors["t2d"] = tensors["t2d"][:-40]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_ids_instead_of_offsets, r"the id \d+ \(\d+ \+ \d+: the table holds offsets\); the ids .* 0..96"),
        (_negative, r"draft token 0 the id -1"),
        (_twice, r"d2t names the id \d+ twice"),
        (_other_members, "t2d and d2t disagree on 97 ids"),
        (_short_members, "t2d and d2t disagree on"),
        (lambda t: t.pop("d2t"), r"missing \(1\): d2t"),
        (lambda t: t.update(d2t=t["d2t"][:-1]), r"wrong shape \(1\): d2t is \[23\], not \[24\]"),
        (lambda t: t.update(d2t=t["d2t"].astype(np.float32)), "d2t has the type F32"),
        (lambda t: t.update({"norm.weight": np.ones(32, np.int64)}), "norm.weight has the type I64, not one of F32"),
    ],
)
@pytest.mark.parametrize("file", [None, "pytorch_model.bin"])
def test_tables_that_cannot_be(damage, message, file, tmp_path):
    drafter = published.eagle3(file=file)
    damage(drafter.tensors)
    with pytest.raises(ValueError, match=message):
        read(drafter.write(tmp_path / "drafter"))


def test_a_table_without_members_is_enough(tmp_path):
    drafter = published.eagle3()
    del drafter.tensors["t2d"]
    assert_same(read(drafter.write(tmp_path / "drafter"))[1], drafter.expected)


# --- int8 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axes", [1, 2])
def test_scaled_int8_is_read_as_what_it_stands_for(axes, tmp_path):
    drafter = published.peagle()
    folder = drafter.write(tmp_path / "drafter")
    values = np.arange(-32, 32, dtype=np.int8).repeat(48).reshape(32, 96)
    scales = np.linspace(0.01, 0.1, 32, dtype=np.float32)
    drafter.tensors["fc.weight"], drafter.tensors["fc.weight_scale"] = values, scales[:, None] if axes == 2 else scales
    drafter.expected[("fc", "fc")] = (values * scales[:, None]).T
    assert_same(read(drafter.write(folder))[1], drafter.expected)
    drafter.tensors["fc.weight_scale"] = scales[:-1]
    with pytest.raises(ValueError, match=r"fc.weight_scale is \[31\], which does not fit \[32, 96\]"):
        read(drafter.write(folder))
    del drafter.tensors["fc.weight_scale"]
    with pytest.raises(ValueError, match="fc.weight has the type I8"):
        read(drafter.write(folder))


# --- Finding them -----------------------------------------------------------------------------------------------------


def test_built_in_names(monkeypatch, tmp_path):
    monkeypatch.setattr(checkpoints, "BUILT_IN", tmp_path)
    published.peagle().write(tmp_path / "toy-peagle")
    published.eagle().write(tmp_path / "toy-eagle")
    assert known_drafters() == ["toy-eagle", "toy-peagle"]
    assert find_drafter("toy-eagle") == tmp_path / "toy-eagle"
    assert read_drafter("toy-eagle", TARGET)[0] == published.eagle().head
    with pytest.raises(
        ValueError, match=r"'toy-eagl' \(did you mean 'toy-eagle'\?\); known by name: toy-eagle, toy-pe"
    ):
        find_drafter("toy-eagl")
    with pytest.raises(ValueError, match="model=3 must be the name of a drafter"):
        find_drafter(3)


def test_every_built_in_drafter_has_a_card():
    assert all((checkpoints.BUILT_IN / name / "README.md").is_file() for name in known_drafters())


@pytest.mark.parametrize("damage", ["truncated", "no config", "no weights", "not json"])
def test_damaged_folders(damage, tmp_path):
    folder = published.peagle().write(tmp_path / "drafter")
    weights, config = folder / "model.safetensors", folder / "config.json"
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif damage == "not json":
        config.write_text("{")
    else:
        (config if damage == "no config" else weights).unlink()
    with pytest.raises(ValueError, match=str(folder)):
        read(folder)


def test_safetensors_come_before_pytorch_s_files(tmp_path):
    folder = published.peagle().write(tmp_path / "drafter")
    (folder / "pytorch_model.bin").write_bytes(b"not read")
    read(folder)


# --- A target's own folder --------------------------------------------------------------------------------------------


def test_a_target_is_loaded_beside_its_modules(tmp_path):
    model, drafter = tiny(seed=2, layers=8), published.deepseek_mtp()
    export_model(model.config, model.params, tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    modules = {
        name: array for name, array in drafter.tensors.items() if name.startswith(("model.layers.8", "model.layers.9"))
    }
    save_file(load_file(weights) | modules, weights)
    target = load_model(str(tmp_path / "model"), cpu_kernels=False)
    assert_same(target.params, flat(model.params))
    head, params, _ = read(tmp_path / "model", target)
    assert isinstance(head, type(drafter.head)) and head.own_embedding
    assert_same(params, drafter.expected)


# --- Draft models -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8"])
@pytest.mark.parametrize("seed", [2, 3])
def test_a_draft_model_s_folder_is_a_model_s(seed, dtype, tmp_path):
    model = tiny(seed=seed, qk_norm=seed == 3, model_type="qwen3" if seed == 3 else "llama")
    export_model(model.config, model.params, tmp_path / "model", dtype=dtype)
    found = load_model(str(tmp_path / "model"), cpu_kernels=False)
    assert found.config == model.config
    for path, array in flat(model.params).items():
        steps = {"float32": 0, "bfloat16": 2**-8, "float16": 2**-10, "int8": 1 / 127}[dtype]
        error = np.abs(flat(found.params)[path] - array)
        assert (error <= steps * np.abs(array).max()).all()


@pytest.mark.parametrize("layout", [TARGET, packed(TARGET)], ids=["plain", "packed"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_draft_model_uses_the_target_s_tables(layout, tied, tmp_path):
    target: Model = tiny(seed=1, layers=8, tie_embeddings=True) if tied else TARGET
    target = packed(target) if layout.module.packed else target
    small = tiny(seed=4, tie_embeddings=tied)
    export_model(small.config, small.params, tmp_path / "draft", shared_with="the target")
    assert not any("embed" in name for name in load_file(tmp_path / "draft" / "model.safetensors"))
    found = read_draft_model(tmp_path / "draft", target)
    assert found.params["embedding"] is target.params["embedding"]
    assert ("lm_head" in found.params) == (not tied)
    assert (found.config, found.module.packed) == (small.config, target.module.packed)
    assert (found.vocab_size, found.tokenizer) == (target.vocab_size, target.tokenizer)
    expected = packed(small).params if target.module.packed else small.params
    for name in ("layer_0", "layer_1", "final_norm"):
        jax.tree.map(np.testing.assert_array_equal, found.params[name], expected[name])
    with pytest.raises(ValueError, match="uses the embedding of the target; it has none of its own"):
        load_model(str(tmp_path / "draft"))
    with pytest.raises(ValueError, match="its hidden_size is 32, not the 64"):
        read_draft_model(tmp_path / "draft", tiny(seed=1, hidden=64, tie_embeddings=tied))


def test_an_ordinary_draft_model_is_loaded_as_such(tmp_path):
    model = tiny(seed=2)
    export_model(model.config, model.params, tmp_path / "model")
    assert json.loads((tmp_path / "model" / "config.json").read_text())["num_hidden_layers"] == 2
    assert read_draft_model(tmp_path / "model", TARGET).config == model.config
