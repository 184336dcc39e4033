"""Reads a .gguf file as if it were a Hugging Face checkpoint: the same config, tensor names and layouts.

Three things differ in the file. The rotary pairing of Llama-type models: llama.cpp rotates neighbouring pairs and its
converter reorders the rows of q and k for that, so they are put back here (query/key counts differ under grouped
attention). Tied embeddings: a file without `output.weight` shares the embedding. Llama 3's frequency scaling: not
in the metadata but as a tensor `rope_freqs.weight` of per-pair divisors.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np

from spec_jax import fields
from spec_jax.models.config import LlamaConfig, from_hf_config, tensor_specs
from spec_jax.models.gguf_file import GgufFile
from spec_jax.models.tensors import check_shapes, read_params
from spec_jax.tokenizer import Tokenizer, tokenizer_from_gguf

ARCHITECTURES = ("llama", "qwen2", "qwen3")  # Mistral's converter writes "llama"
ROPE_DIVISORS = "rope_freqs.weight"
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GgufCheckpoint:
    """One .gguf file. Raises ValueError for an unknown architecture, an unusable tensor set or a damaged file.

    Attributes:
      config: the model's `LlamaConfig`.
    """

    def __init__(self, path: Path):
        self.file = GgufFile(path)
        self.config = self._config()
        self._names = {hf_name(name): name for name in self.file.tensors if name != ROPE_DIVISORS}
        check_shapes(
            tensor_specs(self.config),
            {hf: self.file.tensors[name].shape for hf, name in self._names.items()},
            str(path),
        )

    def read_params(self, dtype: str) -> dict[str, Any]:
        """The parameter tree in `dtype`."""
        return read_params(tensor_specs(self.config), self._read, dtype)

    def read_tokenizer(self) -> Tokenizer | None:
        """None, with a warning that gives the reason, if the file's tokenizer is of a kind that is not supported."""
        return tokenizer_from_gguf(self.file.metadata, str(self.file.path))

    def eos_token_ids(self) -> tuple[int, ...]:
        """End ids that the file states, outside its tokenizer: none in this format."""
        return ()

    def _read(self, name: str) -> np.ndarray:
        array = self.file.dequantize(self._names[name])
        if self.config.model_type == "llama" and ".self_attn.q_proj." in name:
            return unpermute(array, self.config.num_heads)
        if self.config.model_type == "llama" and ".self_attn.k_proj." in name:
            return unpermute(array, self.config.num_kv_heads)
        return array

    def _config(self) -> LlamaConfig:
        path, metadata, tensors = self.file.path, self.file.metadata, self.file.tensors
        architecture = fields.get(metadata, "general.architecture", str, where=str(path))
        if architecture not in ARCHITECTURES:
            raise ValueError(f"{path} has the architecture {architecture!r}; supported: {', '.join(ARCHITECTURES)}")

        def get(key: str, kind: Any, default: Any = None) -> Any:
            return fields.get(metadata, f"{architecture}.{key}", kind, default, where=str(path))

        experts = get("expert_count", int, 0)
        if experts:
            raise ValueError(f"{path} is a mixture of {experts} experts; only dense models are supported")
        if "token_embd.weight" not in tensors:
            raise ValueError(f"{path} has no tensor token_embd.weight; is it a complete model?")
        if not tensors["token_embd.weight"].shape:
            raise ValueError(f"the tensor token_embd.weight in {path} has no dimensions")
        for key in ("feed_forward_length", "attention.head_count", "attention.head_count_kv"):
            per_layer = metadata.get(f"{architecture}.{key}")
            if isinstance(per_layer, list):
                raise ValueError(f"{path} has a {key} per layer ({per_layer!r:.80}); only equal layers are supported")
        heads, width = get("attention.head_count", int), get("embedding_length", int)
        config = {
            "model_type": architecture,
            "vocab_size": tensors["token_embd.weight"].shape[0],
            "hidden_size": width,
            "intermediate_size": get("feed_forward_length", int),
            "num_hidden_layers": get("block_count", int),
            "num_attention_heads": heads,
            "num_key_value_heads": get("attention.head_count_kv", int, heads),
            "head_dim": get("attention.key_length", int),
            "max_position_embeddings": get("context_length", int, 2048),
            "rms_norm_eps": get("attention.layer_norm_rms_epsilon", float, 1e-5),
            "rope_theta": get("rope.freq_base", float, 10000.0),
            "rope_scaling": _rope_scaling(get, path),
            "sliding_window": get("attention.sliding_window", int),
            "use_sliding_window": True,
            "tie_word_embeddings": "output.weight" not in tensors,
            "attention_bias": "blk.0.attn_q.bias" in tensors,
            "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        }
        try:
            result = from_hf_config(config)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        if result.output_bias and "blk.0.attn_output.bias" not in tensors:
            result = dataclasses.replace(result, output_bias=False)
        rotated = get("rope.dimension_count", int, result.head_dim)
        if rotated != result.head_dim:
            sizes = f"{rotated} of {result.head_dim} head dimensions"
            raise ValueError(f"{path} rotates {sizes}; only full rotation is supported")
        if ROPE_DIVISORS in tensors:
            divisors = self.file.dequantize(ROPE_DIVISORS)
            if divisors.shape != (result.head_dim // 2,):
                shape = f"{list(divisors.shape)}, not {[result.head_dim // 2]}"
                raise ValueError(f"the tensors in {path} do not fit its config: {ROPE_DIVISORS} is {shape}")
            try:
                rope = dataclasses.replace(result.rope, frequency_divisors=tuple(float(x) for x in divisors))
            except ValueError as error:
                raise ValueError(f"{path}: {ROPE_DIVISORS}: {error}") from None
            result = dataclasses.replace(result, rope=rope)
        return result


def hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; an unknown name is returned as it is, to be reported as unexpected."""
    stem, _, kind = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    block, _, part = stem.removeprefix("blk.").partition(".")
    if stem.startswith("blk.") and block.isdigit() and part in _LAYER:
        return f"model.layers.{block}.{_LAYER[part]}.{kind}"
    return name


def unpermute(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows of one projection [heads * head_dim, ...] from neighbouring pairs back to two halves per head."""
    pairs = array.reshape(heads, array.shape[0] // heads // 2, 2, *array.shape[1:])
    return pairs.swapaxes(1, 2).reshape(array.shape)


def _rope_scaling(get, path: Path) -> dict[str, Any] | None:
    """The `rope_scaling` entry of a config.json, from the file's `rope.scaling.*` keys."""
    kind, factor = get("rope.scaling.type", str), get("rope.scaling.factor", float)
    old = get("rope.scale_linear", float)  # the key of files before August 2023
    if kind is None and old is not None:
        kind, factor = "linear", old
    if kind is None or kind == "none":
        return None
    if factor is None:
        raise ValueError(f"{path} has rope scaling of type {kind!r} without rope.scaling.factor")
    if factor < 1:
        raise ValueError(f"{path}: the rope scaling factor {factor!r} must be at least 1")
    scaling = {"rope_type": kind, "factor": factor}
    if kind != "yarn":
        return scaling
    scaling |= {
        "original_max_position_embeddings": get("rope.scaling.original_context_length", int),
        "beta_fast": get("rope.scaling.yarn_beta_fast", float),
        "beta_slow": get("rope.scaling.yarn_beta_slow", float),
    }
    multiplier = get("rope.scaling.attn_factor", float)
    if multiplier is not None:  # llama.cpp multiplies its own sharpening by this; config.json holds the product
        scaling["attention_factor"] = multiplier * (0.1 * math.log(factor) + 1.0)
    return scaling
