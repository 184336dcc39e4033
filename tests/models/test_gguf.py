"""GGUF files: the same parameters as the safetensors folder, and clear errors for damaged ones."""

import dataclasses
import struct

import gguf
import jax
import numpy as np
import pytest
import toy_checkpoints as toy

from spec_jax import load_model
from spec_jax.models.gguf import GgufCheckpoint, hf_name, unpermute
from spec_jax.models.gguf_file import GgufFile


def assert_same_tree(ours, theirs):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@pytest.fixture
def llama():
    hf_config = toy.FAMILIES["llama"]
    return hf_config, toy.random_tensors(hf_config)


@pytest.mark.parametrize("family", toy.FAMILIES)
def test_f32_gives_the_parameters_and_config_of_the_folder(family, tmp_path):
    hf_config = toy.FAMILIES[family]
    tensors = toy.random_tensors(hf_config)
    folder = load_model(str(toy.write_folder(tmp_path / "folder", hf_config, tensors)))
    model = load_model(str(toy.write_gguf(tmp_path / "model.gguf", hf_config, tensors)))
    assert_same_tree(model.params, folder.params)

    def comparable(config):
        rope = dataclasses.replace(config.rope, theta=round(config.rope.theta), original_max_position=1)
        return dataclasses.replace(config, rope=rope, rms_norm_eps=round(config.rms_norm_eps, 9), model_type="")

    ours, theirs = comparable(model.config), comparable(folder.config)
    if family == "llama-llama3-rope":
        assert len(ours.rope.frequency_divisors) == ours.head_dim // 2
        ours = dataclasses.replace(ours, rope=theirs.rope)
    assert ours == theirs
    assert model.max_model_len == 256


@pytest.mark.parametrize(
    "kind, relative, of_block", [("F16", 2.0**-11, 0), ("BF16", 2.0**-8, 0), ("Q8_0", 2.0**-11, 1 / 254)]
)
def test_other_types_stay_within_their_rounding(kind, relative, of_block, llama, tmp_path):
    """F16 and BF16 round each value; Q8_0 to 1/127 of the largest of 32 values, itself F16."""
    file = GgufFile(toy.write_gguf(tmp_path / "model.gguf", *llama, kind))
    exact = GgufFile(toy.write_gguf(tmp_path / "exact.gguf", *llama))
    for name, entry in file.tensors.items():
        ours, truth = file.dequantize(name), exact.dequantize(name)
        assert ours.dtype == np.float32
        if len(entry.shape) == 1:
            np.testing.assert_array_equal(ours, truth)
            continue
        largest = np.abs(truth.reshape(-1, 32)).max(-1).repeat(32).reshape(truth.shape)
        error = np.abs(ours - truth)
        assert error.max() > 0
        assert (error <= relative * np.abs(truth) + of_block * largest + 1e-7).all()


def test_unpermute_undoes_the_converter_per_head():
    weights = np.arange(6 * 8 * 3, dtype=np.float32).reshape(48, 3)
    assert not np.array_equal(toy.permute(weights, 6), weights)
    np.testing.assert_array_equal(unpermute(toy.permute(weights, 6), 6), weights)
    assert not np.array_equal(unpermute(toy.permute(weights, 6), 3), weights)  # the head count matters
    bias = np.arange(48, dtype=np.float32)
    np.testing.assert_array_equal(unpermute(toy.permute(bias, 6), 6), bias)


def test_tied_exactly_when_output_is_absent(llama, tmp_path):
    hf_config, tensors = llama
    untied = load_model(str(toy.write_gguf(tmp_path / "untied.gguf", hf_config, tensors)))
    assert not untied.config.tie_embeddings and "lm_head" in untied.params
    del tensors["lm_head.weight"]
    tied = load_model(str(toy.write_gguf(tmp_path / "tied.gguf", hf_config, tensors)))
    assert tied.config.tie_embeddings and "lm_head" not in tied.params


def test_rope_divisors_of_the_wrong_length_are_refused(llama, tmp_path):
    path = toy.write_gguf(tmp_path / "m.gguf", *llama, extra={"rope_freqs.weight": np.ones(5, np.float32)})
    with pytest.raises(ValueError, match=r"rope_freqs.weight is \[5\], not \[8\]"):
        load_model(str(path))


@pytest.mark.parametrize("value", [0.0, -1.0, np.inf, np.nan])
def test_rope_divisors_that_are_no_divisors_are_refused(value, llama, tmp_path):
    divisors = np.ones(8, np.float32)
    divisors[3] = value
    path = toy.write_gguf(tmp_path / "m.gguf", *llama, extra={"rope_freqs.weight": divisors})
    with pytest.raises(ValueError, match="m.gguf: rope_freqs.weight.*positive"):
        load_model(str(path))


def test_an_absurd_layer_count_is_refused(llama, tmp_path):
    path = toy.write_gguf(tmp_path / "m.gguf", *llama)
    key = b"llama.block_count" + struct.pack("<I", 4)
    data = path.read_bytes()
    assert data.count(key + struct.pack("<I", 2)) == 1
    path.write_bytes(data.replace(key + struct.pack("<I", 2), key + struct.pack("<I", 20_000_000)))
    with pytest.raises(ValueError, match="m.gguf: num_layers=20000000 is more than 4096"):
        load_model(str(path))


def test_nested_arrays_do_not_exhaust_the_stack(tmp_path):
    key = (3).to_bytes(8, "little") + b"key" + (9).to_bytes(4, "little")
    level = (9).to_bytes(4, "little") + (1).to_bytes(8, "little")
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key + level * 100_000)
    with pytest.raises(ValueError, match="array of arrays"):
        load_model(str(path))


def test_sizes_whose_product_overflows_are_a_truncated_file(llama, tmp_path):
    file = GgufFile(toy.write_gguf(tmp_path / "m.gguf", *llama))
    name = "output_norm.weight"
    file.tensors[name] = dataclasses.replace(file.tensors[name], shape=(2**32, 2**32, 32))
    with pytest.raises(ValueError, match="truncated"):
        file.dequantize(name)


def test_sizes_come_from_the_metadata(tmp_path):
    hf_config = toy.FAMILIES["qwen3"]
    path = toy.write_gguf(tmp_path / "m.gguf", hf_config, toy.random_tensors(hf_config))
    config = load_model(str(path)).config
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 32)
    assert (config.hidden_size, config.intermediate_size, config.vocab_size) == (64, 96, 96)
    assert config.qk_norm and config.tie_embeddings


def test_tokens_bound_the_usable_ids(llama, tmp_path):
    """A padded embedding: ids without a token are not part of the vocabulary, whether the file names them or not."""
    tokens = [f"t{i}" for i in range(90)] + ["<|endoftext|>"]
    keys = {"model": "gpt2", "pre": "smollm", "eos_token_id": 3}
    for padding in ([], [f"[PAD{i}]" for i in range(91, 96)]):
        types = [1] * 90 + [3] + [5] * len(padding)
        metadata = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
        metadata |= {"tokenizer.ggml.tokens": tokens + padding, "tokenizer.ggml.token_type": types}
        model = load_model(str(toy.write_gguf(tmp_path / "m.gguf", *llama, metadata=metadata)))
        assert (model.vocab_size, model.config.vocab_size, model.eos_token_ids) == (91, 96, (3, 90))


def test_a_file_whose_tokenizer_is_not_supported_still_loads(llama, tmp_path):
    path = toy.write_gguf(tmp_path / "m.gguf", *llama, metadata={"tokenizer.ggml.model": "llama"})
    with pytest.warns(UserWarning, match="prompts must be token ids"):
        model = load_model(str(path))
    assert (model.tokenizer, model.vocab_size) == (None, 96)


def test_old_linear_scaling_key(llama, tmp_path):
    path = toy.write_gguf(tmp_path / "m.gguf", *llama, metadata={"llama.rope.scale_linear": 4.0})
    rope = load_model(str(path)).config.rope
    assert (rope.rope_type, rope.factor) == ("linear", 4.0)


@pytest.mark.parametrize(
    "metadata, message",
    [
        ({"llama.expert_count": 8}, "mixture of 8 experts"),
        ({"llama.attention.sliding_window": 32}, "sliding_window=32"),
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, "longrope"),
        ({"llama.rope.scaling.type": "yarn"}, "factor"),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 0.0}, "factor 0.0 must be at least 1"),
        ({"llama.rope.scaling.type": 5}, "m.gguf: llama.rope.scaling.type=5 must be a string"),
        ({"llama.rope.scaling.factor": "x"}, "m.gguf: llama.rope.scaling.factor='x' must be a finite number"),
        ({"llama.attention.key_length": [16, 16]}, r"m.gguf: llama.attention.key_length=\[16, 16\] must be an integer"),
        ({"llama.expert_count": "x"}, "m.gguf: llama.expert_count='x' must be an integer"),
        ({"tokenizer.ggml.model": 5}, "m.gguf: tokenizer.ggml.model=5 must be a string"),
    ],
)
def test_what_the_model_code_cannot_do_is_refused(metadata, message, llama, tmp_path):
    path = toy.write_gguf(tmp_path / "m.gguf", *llama, metadata=metadata)
    with pytest.raises(ValueError, match=message):
        load_model(str(path))


def test_unknown_architecture(llama, tmp_path):
    path = toy.write_gguf(tmp_path / "m.gguf", *llama)
    length = (5).to_bytes(8, "little")
    path.write_bytes(path.read_bytes().replace(length + b"llama", length + b"mamba", 1))
    with pytest.raises(ValueError, match=r"'mamba'.*llama, qwen2, qwen3"):
        load_model(str(path))


def test_missing_unexpected_and_wrong_shape_in_one_message(llama, tmp_path):
    hf_config, tensors = llama
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    tensors["model.norm.weight"] = np.ones(32, np.float32)
    path = toy.write_gguf(tmp_path / "m.gguf", hf_config, tensors, extra={"blk.0.odd.weight": np.ones(4, np.float32)})
    with pytest.raises(ValueError) as error:
        load_model(str(path))
    for part in ("layers.1.self_attn.k_proj", "blk.0.odd.weight", "model.norm.weight is [32], not [64]"):
        assert part in str(error.value)


def test_unknown_type_names_tensor_and_type(llama, tmp_path):
    path = toy.write_gguf(tmp_path / "m.gguf", *llama)
    name = b"blk.1.ffn_up.weight"
    data = bytearray(path.read_bytes())
    at = data.index(name) + len(name) + 4 + 2 * 8  # behind the name: rank, two sizes, then the type
    data[at : at + 4] = (999).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"blk.1.ffn_up.weight.*999"):
        load_model(str(path))
    data[at : at + 4] = gguf.GGMLQuantizationType.Q8_K.to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"blk.1.ffn_up.weight.*Q8_K"):
        load_model(str(path))


def test_truncated_anywhere_is_one_clear_error(llama, tmp_path):
    whole = toy.write_gguf(tmp_path / "m.gguf", *llama).read_bytes()
    path = tmp_path / "cut.gguf"
    for size in (0, 3, 6, 20, 100, 700, 1500, len(whole) // 2, len(whole) - 40):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="truncated|not a GGUF file"):
            load_model(str(path))


def test_damaged_headers_give_value_errors(llama, tmp_path):
    """Any single damaged byte in the header is either harmless or one ValueError."""
    whole = toy.write_gguf(tmp_path / "m.gguf", *llama).read_bytes()
    path, random = tmp_path / "damaged.gguf", np.random.RandomState(0)
    refused = 0
    for _ in range(300):
        data = bytearray(whole)
        data[random.randint(0, 2600)] = random.randint(0, 256)
        path.write_bytes(data)
        try:
            GgufCheckpoint(path).read_params("float32")
        except ValueError:
            refused += 1
    assert refused > 50


def test_not_gguf_at_all(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\x03\x04 something else")
    with pytest.raises(ValueError, match="not a GGUF file"):
        load_model(str(path))


def test_names_follow_the_gguf_packages_table():
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, 3)
    for family in ("llama", "qwen2", "qwen3", "llama-biases"):
        for hf in toy.random_tensors(toy.FAMILIES[family]):
            assert hf_name(names.get_name(hf, try_suffixes=(".weight", ".bias"))) == hf
    assert hf_name("rope_freqs.weight") == "rope_freqs.weight"
