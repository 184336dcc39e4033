"""Tiny random checkpoints of every family, written as Hugging Face folders and as GGUF files.

The GGUF writer follows llama.cpp's converter (row permutation, tensor names from the gguf package's own table,
rope_freqs.weight), independently of the loader under test. Weights come from NumPy's legacy RandomState, whose stream
never changes, so that goldens need to store logits only.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file

from spec_jax.models.config import from_hf_config, tensor_specs

_SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_METADATA = {"format": "pt"}  # transformers refuses files without it
_YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _SIZES | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "llama-tied": _SIZES | {"model_type": "llama", "tie_word_embeddings": True},
    "llama-llama3-rope": _SIZES | {"model_type": "llama", "rope_scaling": _LLAMA3},
    "llama-linear-rope": _SIZES | {"model_type": "llama", "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "llama-biases": _SIZES | {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "mistral": _SIZES | {"model_type": "mistral", "head_dim": 32, "sliding_window": None},
    "qwen2": _SIZES | {"model_type": "qwen2", "rope_theta": 1e6},
    "qwen2-yarn-rope": _SIZES | {"model_type": "qwen2", "rope_scaling": _YARN, "tie_word_embeddings": True},
    "qwen3": _SIZES | {"model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True},
}


def random_tensors(hf_config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """float32 tensors by Hugging Face name, in the shapes of the file."""
    random = np.random.RandomState(seed)
    tensors = {}
    for name, spec in tensor_specs(from_hf_config(hf_config)).items():
        values = random.standard_normal(spec.shape)
        if name.endswith("norm.weight"):
            values = 1 + 0.1 * values
        elif name.endswith(".bias"):
            values = 0.2 * values
        else:
            values = values / math.sqrt(spec.shape[-1])
        tensors[name] = values.astype(np.float32)
    return tensors


def write_folder(
    folder: Path, hf_config: dict[str, Any], tensors: dict[str, np.ndarray], shards: int = 1, index: bool = False
) -> Path:
    """A checkpoint folder without a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_config))
    if shards == 1 and not index:
        save_file(tensors, str(folder / "model.safetensors"), metadata=_METADATA)
        return folder
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensor for i, (name, tensor) in enumerate(tensors.items()) if i % shards == shard}
        save_file(part, str(folder / file), metadata=_METADATA)
        weight_map |= dict.fromkeys(part, file)
    if index:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def write_gguf(
    path: Path,
    hf_config: dict[str, Any],
    tensors: dict[str, np.ndarray],
    kind: str = "F32",
    metadata: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
) -> Path:
    """A .gguf file. Matrices get the type `kind`, vectors stay F32, as in published files.

    Args:
      metadata: further keys, such as the tokenizer's; values are int, float, bool, str or a list of those.
      extra: further tensors by GGUF name, F32.
    """
    arch = "llama" if hf_config["model_type"] == "mistral" else hf_config["model_type"]
    heads, kv_heads = hf_config["num_attention_heads"], hf_config["num_key_value_heads"]
    head_dim = hf_config.get("head_dim") or hf_config["hidden_size"] // heads
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_context_length(hf_config["max_position_embeddings"])
    writer.add_embedding_length(hf_config["hidden_size"])
    writer.add_block_count(hf_config["num_hidden_layers"])
    writer.add_feed_forward_length(hf_config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(hf_config["rms_norm_eps"])
    writer.add_rope_freq_base(hf_config["rope_theta"])
    if "head_dim" in hf_config:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if arch == "llama":
        writer.add_rope_dimension_count(head_dim)
    scaling = hf_config.get("rope_scaling") or {"rope_type": "none"}
    extra = dict(extra or {})
    if scaling["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling["rope_type"]))
        writer.add_rope_scaling_factor(scaling["factor"])
    if scaling["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
    if scaling["rope_type"] == "llama3":
        extra["rope_freqs.weight"] = llama3_divisors(scaling, hf_config["rope_theta"], head_dim)
    for key, value in (metadata or {}).items():
        _add_key(writer, key, value)

    model_arch = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}[arch]
    names = gguf.get_tensor_name_map(model_arch, hf_config["num_hidden_layers"])
    for hf_name, tensor in tensors.items():
        if arch == "llama" and ".self_attn.q_proj." in hf_name:
            tensor = permute(tensor, heads)
        if arch == "llama" and ".self_attn.k_proj." in hf_name:
            tensor = permute(tensor, kv_heads)
        name = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        quantisation = gguf.GGMLQuantizationType["F32" if tensor.ndim == 1 else kind]
        writer.add_tensor(name, gguf.quants.quantize(tensor, quantisation), raw_dtype=quantisation)
    for name, tensor in extra.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def permute(weights: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's reordering of q and k rows: from two halves per head to neighbouring pairs."""
    halves = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weights.shape))


def llama3_divisors(scaling: dict[str, Any], theta: float, head_dim: int) -> np.ndarray:
    """Llama 3's frequency scaling as one divisor per pair."""
    low = scaling["original_max_position_embeddings"] / scaling["low_freq_factor"]
    high = scaling["original_max_position_embeddings"] / scaling["high_freq_factor"]
    divisors = []
    for pair in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * pair / head_dim)
        if wavelength < high:
            divisors.append(1.0)
        elif wavelength > low:
            divisors.append(scaling["factor"])
        else:
            smooth = scaling["original_max_position_embeddings"] / wavelength - scaling["low_freq_factor"]
            smooth /= scaling["high_freq_factor"] - scaling["low_freq_factor"]
            divisors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return np.asarray(divisors, np.float32)


def _add_key(writer: gguf.GGUFWriter, key: str, value: Any):
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
