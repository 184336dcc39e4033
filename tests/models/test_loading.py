"""`load_model` on Hugging Face folders: tied embeddings, shards, damaged files, dtypes, end ids, arguments."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import toy_checkpoints as toy
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models

from spec_jax import load_model
from spec_jax.models.config import from_hf_config, tensor_specs
from spec_jax.models.packing import unpack_params

LLAMA = toy.FAMILIES["llama"]


@pytest.fixture
def tensors():
    return toy.random_tensors(LLAMA)


def write(tmp_path, hf_config, tensors, **options):
    return str(toy.write_folder(tmp_path / "model", hf_config, tensors, **options))


def plain_params(model):
    """The parameters as `tensor_specs` lays them out, whether the CPU kernels are in use or not."""
    return unpack_params(model.params, model.config) if model.module.packed else model.params


@pytest.mark.parametrize("cpu_kernels", [None, False])
def test_every_tensor_lands_transposed_in_its_place(cpu_kernels, tmp_path, tensors):
    model = load_model(write(tmp_path, LLAMA, tensors), cpu_kernels=cpu_kernels)
    params = plain_params(model)
    np.testing.assert_array_equal(params["embedding"], tensors["model.embed_tokens.weight"])
    np.testing.assert_array_equal(params["lm_head"], tensors["lm_head.weight"])
    np.testing.assert_array_equal(params["layer_1"]["k"], tensors["model.layers.1.self_attn.k_proj.weight"].T)
    assert len(jax.tree.leaves(params)) == len(tensors)
    assert (model.vocab_size, model.max_model_len, model.tokenizer, model.eos_token_ids) == (96, 256, None, (2,))
    assert model.config is model.module.config and model.config.head_dim == 16


@pytest.mark.parametrize("options", [{}, {"shards": 3, "index": True}, {"shards": 3}, {"shards": 1, "index": True}])
def test_one_file_or_shards_with_or_without_index(options, tmp_path, tensors):
    model = load_model(write(tmp_path, LLAMA, tensors, **options))
    for name, spec in tensor_specs(model.config).items():
        value = plain_params(model)
        for key in spec.path:
            value = value[key]
        np.testing.assert_array_equal(value, spec.to_param(tensors[name]))


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dtypes(stored, dtype, tmp_path, tensors):
    cast = {name: tensor.astype(stored) for name, tensor in tensors.items()}
    params = plain_params(load_model(write(tmp_path, LLAMA, cast), dtype=dtype))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(dtype)}
    expected = cast["model.layers.0.mlp.up_proj.weight"].T.astype(jnp.dtype(dtype))
    np.testing.assert_array_equal(np.asarray(params["layer_0"]["up"]), expected)


def test_parameters_do_not_alias_the_file(tmp_path, tensors):
    folder = write(tmp_path, LLAMA, tensors)
    params = load_model(folder).params
    before = np.array(params["embedding"])
    with open(f"{folder}/model.safetensors", "r+b") as file:
        size = len(file.read())
        file.seek(size // 2)
        file.write(b"\xff" * (size // 2))
    np.testing.assert_array_equal(params["embedding"], before)


# --- Tied embeddings --------------------------------------------------------------------------------------------------


def test_tied_without_head(tmp_path):
    tied = toy.FAMILIES["llama-tied"]
    model = load_model(write(tmp_path, tied, toy.random_tensors(tied)))
    assert "lm_head" not in model.params


def test_tied_with_redundant_head_ignores_it(tmp_path, tensors):
    model = load_model(write(tmp_path, toy.FAMILIES["llama-tied"], tensors))
    assert "lm_head" not in model.params and model.config.tie_embeddings


def test_untied_without_head_is_an_error(tmp_path, tensors):
    del tensors["lm_head.weight"]
    with pytest.raises(ValueError, match=r"missing \(1\): lm_head.weight.*tie_word_embeddings"):
        load_model(write(tmp_path, LLAMA, tensors))


# --- Incomplete and damaged checkpoints -------------------------------------------------------------------------------


def test_missing_unexpected_and_wrong_shape_are_listed_together(tmp_path, tensors):
    del tensors["model.layers.0.mlp.up_proj.weight"]
    tensors["model.layers.0.mlp.upward.weight"] = np.ones((2, 2), np.float32)  # renamed
    tensors["model.layers.1.self_attn.q_proj.weight"] = np.ones((64, 32), np.float32)
    with pytest.raises(ValueError) as error:
        load_model(write(tmp_path, LLAMA, tensors))
    message = str(error.value)
    assert "missing (1): model.layers.0.mlp.up_proj.weight" in message
    assert "unexpected (1): model.layers.0.mlp.upward.weight" in message
    assert "wrong shape (1): model.layers.1.self_attn.q_proj.weight is [64, 32], not [64, 64]" in message


def test_a_long_list_is_cut(tmp_path, tensors):
    with pytest.raises(ValueError, match=r"missing \(18\).* and 10 more") as error:
        load_model(write(tmp_path, LLAMA | {"num_hidden_layers": 4}, tensors))
    assert len(str(error.value)) < 1500


def test_harmless_extras_are_ignored(tmp_path, tensors):
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    load_model(write(tmp_path, LLAMA, tensors))


def test_index_naming_a_missing_file(tmp_path, tensors):
    folder = write(tmp_path, LLAMA, tensors, shards=3, index=True)
    (tmp_path / "model" / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ValueError, match=r"missing file.*model-00002-of-00003.safetensors"):
        load_model(folder)


def test_index_key_in_no_shard(tmp_path, tensors):
    folder = write(tmp_path, LLAMA, tensors, shards=2, index=True)
    path = tmp_path / "model" / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.ghost.weight"] = "model-00001-of-00002.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"model.ghost.weight \(in model-00001-of-00002.safetensors\)"):
        load_model(folder)


def test_a_shard_missing_without_index_lists_its_tensors(tmp_path, tensors):
    folder = write(tmp_path, LLAMA, tensors, shards=3)
    (tmp_path / "model" / "model-00001-of-00003.safetensors").unlink()
    with pytest.raises(ValueError, match="missing .*model.embed_tokens.weight"):
        load_model(folder)


def test_truncated_anywhere(tmp_path, tensors):
    folder = write(tmp_path, LLAMA, tensors)
    path = tmp_path / "model" / "model.safetensors"
    whole = path.read_bytes()
    for size in (0, 5, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"model.safetensors is truncated or not a safetensors file"):
            load_model(folder)


def test_integer_weights_are_refused(tmp_path, tensors):
    tensors["model.norm.weight"] = np.ones(64, np.int8)
    with pytest.raises(ValueError, match=r"model.norm.weight has the type I8"):
        load_model(write(tmp_path, LLAMA, tensors))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model_type": "mamba2"}, r"model_type='mamba2'.*llama, mistral, qwen2, qwen3"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"hidden_size": None}, "lacks hidden_size"),
    ],
)
def test_configs_that_cannot_be_run(change, message, tmp_path, tensors):
    with pytest.raises(ValueError, match=message):
        load_model(write(tmp_path, LLAMA | change, tensors))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"hidden_size": [64]}, r"hidden_size=\[64\] must be an integer"),
        ({"hidden_size": 64.5}, "hidden_size=64.5 must be an integer"),
        ({"vocab_size": True}, "vocab_size=True must be an integer"),
        ({"num_attention_heads": 0}, "num_attention_heads=0 must be a positive integer"),
        ({"num_attention_heads": "4"}, "num_attention_heads='4' must be an integer"),
        ({"max_position_embeddings": -1}, "max_position_embeddings=-1 must be a positive integer"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps='small' must be a finite number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan must be a finite number"),
        ({"rope_theta": {}}, "rope_theta={} must be a finite number"),
        ({"rope_theta": 10**400}, "rope_theta=1000.* must be a finite number"),
        ({"rope_scaling": "linear"}, "rope_scaling='linear' must be an object"),
        ({"rope_parameters": [1]}, r"rope_parameters=\[1\] must be an object"),
        ({"rope_scaling": {"type": ["linear"]}}, r"rope_scaling: type=\['linear'\] must be a string"),
        ({"rope_scaling": {"type": "linear", "factor": None}}, "'linear' has no 'factor'"),
        ({"rope_scaling": {"type": "linear", "factor": "x"}}, "rope_scaling: factor='x' must be a finite number"),
        ({"rope_scaling": {"type": "yarn", "factor": 2, "beta_fast": -1}}, "beta_fast=-1.0 must be a positive number"),
        ({"sliding_window": "x"}, "sliding_window='x' must be an integer"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings='false' must be true or false"),
        ({"quantization_config": "x"}, "quantization_config='x' must be an object"),
        ({"model_type": ["llama"]}, r"model_type=\['llama'\] must be a string"),
        ({"hidden_act": 5}, "hidden_act=5 must be a string"),
        ({"partial_rotary_factor": "x"}, "partial_rotary_factor='x' must be a finite number"),
        ({"eos_token_id": [[1]]}, r"eos_token_id=\[\[1\]\] must be a token id or a list of token ids"),
        ({"eos_token_id": "abc"}, "eos_token_id='abc' must be a token id"),
        ({"head_dim": 15}, "head_dim=15 must be even"),
    ],
)
def test_malformed_configs_name_file_key_value_and_type(change, message, tmp_path, tensors):
    folder = write(tmp_path, LLAMA | change, tensors)
    with pytest.raises(ValueError, match=f"config.json: .*{message}"):
        load_model(folder)


def test_null_is_absent(tmp_path, tensors):
    keys = "rope_theta rms_norm_eps max_position_embeddings rope_scaling rope_parameters head_dim hidden_act"
    keys += " sliding_window tie_word_embeddings attention_bias mlp_bias quantization_config eos_token_id"
    absent = {key: value for key, value in LLAMA.items() if key not in keys.split()}
    ours = load_model(write(tmp_path, LLAMA | dict.fromkeys(keys.split()), tensors))
    assert ours.config == from_hf_config(absent) and ours.eos_token_ids == ()


@pytest.mark.parametrize("change", [{"num_hidden_layers": 20_000_000}, {"vocab_size": 2**40}, {"hidden_size": 2**40}])
def test_absurd_sizes_are_refused_before_anything_is_laid_out(change, tmp_path, tensors, monkeypatch):
    def laid_out(*arguments):
        raise AssertionError("sizes must be checked first")

    folder = write(tmp_path, LLAMA | change, tensors)
    monkeypatch.setattr("spec_jax.models.safetensors_folder.tensor_specs", laid_out)
    with pytest.raises(ValueError, match="config.json: .* is more than .*, the most that is accepted"):
        load_model(folder)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("text", ["[]", "5", "{", "[" * 100_000])
def test_json_that_is_no_object(name, text, tmp_path, tensors):
    folder = write(tmp_path, LLAMA, tensors)
    (tmp_path / "model" / name).write_text(text)
    with pytest.raises(ValueError, match=f"{name} (is not valid JSON|must hold a JSON object)"):
        load_model(folder)


@pytest.mark.parametrize(
    "weight_map, message",
    [
        ([1], r"weight_map=\[1\] must be an object"),
        ({"lm_head.weight": 5}, r"weight_map\['lm_head.weight'\]=5 must be the name of a file"),
        ({"lm_head.weight": ["x"]}, r"weight_map\['lm_head.weight'\]=\['x'\] must be the name of a file"),
    ],
)
def test_malformed_index(weight_map, message, tmp_path, tensors):
    folder = write(tmp_path, LLAMA, tensors)
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match=f"model.safetensors.index.json: {message}"):
        load_model(folder)


def test_repr_leaves_the_weights_out(tmp_path, tensors):
    text = repr(load_model(write(tmp_path, LLAMA, tensors)))
    assert "name=" in text and "Array" not in text and len(text) < 1500


def test_folders_that_are_no_checkpoint(tmp_path, tensors):
    with pytest.raises(ValueError, match="no config.json"):
        load_model(str(tmp_path))
    folder = write(tmp_path, LLAMA, tensors)
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "model" / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"no \*.safetensors file \(only pytorch_model.bin"):
        load_model(folder)
    (tmp_path / "model" / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json is not valid JSON"):
        load_model(folder)


def test_duplicate_tensor_across_files(tmp_path, tensors):
    folder = write(tmp_path, LLAMA, tensors, shards=2)
    extra = {"model.norm.weight": np.ones(64, np.float32), "lm_head.weight": tensors["lm_head.weight"]}
    save_file(extra, str(tmp_path / "model" / "model-extra.safetensors"))
    with pytest.raises(ValueError, match="model.norm.weight is in more than one file"):
        load_model(folder)


# --- Arguments and end ids --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"dtype": "float16"}, "dtype='float16'.*float32, bfloat16"),
        ({"max_model_len": 0}, "max_model_len=0"),
        ({"max_model_len": True}, "max_model_len=True"),
        ({"max_model_len": 257}, "max_model_len=257 exceeds max_position_embeddings=256"),
        ({"mesh": object()}, "mesh"),
    ],
)
def test_bad_arguments(arguments, message, tmp_path, tensors):
    with pytest.raises(ValueError, match=message):
        load_model(write(tmp_path, LLAMA, tensors), **arguments)


def test_max_model_len(tmp_path, tensors):
    assert load_model(write(tmp_path, LLAMA, tensors), max_model_len=100).max_model_len == 100


def test_end_ids_of_config_and_generation_config_are_joined(tmp_path, tensors):
    folder = write(tmp_path, LLAMA | {"eos_token_id": [2, 5]}, tensors)
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert load_model(folder).eos_token_ids == (2, 5, 7)


def test_end_ids_of_the_tokenizer_join_and_its_size_bounds_the_vocabulary(tmp_path, tensors):
    folder = write(tmp_path, LLAMA, tensors)
    words = {f"w{i}": i for i in range(90)}
    backend = Tokenizer(models.WordLevel(words | {"<|endoftext|>": 90}, unk_token="w0"))
    backend.add_special_tokens(["<|endoftext|>"])
    backend.save(f"{folder}/tokenizer.json")
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps({"eos_token": "w3"}))
    model = load_model(folder)
    assert model.eos_token_ids == (2, 3, 90)
    assert (model.vocab_size, model.config.vocab_size) == (91, 96)


def test_end_ids_outside_the_vocabulary_are_ignored_with_a_warning(tmp_path, tensors):
    folder = write(tmp_path, LLAMA | {"eos_token_id": [2, 96]}, tensors)
    with pytest.warns(UserWarning, match=r"\[96\]"):
        assert load_model(folder).eos_token_ids == (2,)


def test_config_of_transformers_5_equals_that_of_4():
    new = {key: value for key, value in LLAMA.items() if key != "rope_theta"}
    new["rope_parameters"] = {"rope_type": "default", "rope_theta": LLAMA["rope_theta"]}
    assert from_hf_config(new) == from_hf_config(LLAMA)
