"""The Llama family's configuration and the map from Hugging Face tensors to parameters.

One frozen `LlamaConfig` covers Llama, SmolLM2, Mistral (without a window), Qwen2, MiMo and Qwen3: they differ in
biases, query/key norms, tied embeddings and rotary scaling only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from spec_jax.checks import check_counts
from spec_jax.fields import get
from spec_jax.models.rope import RopeConfig, rope_from_hf, rope_to_hf

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "mimo")
_QKV_BIAS = ("qwen2", "mimo")
MAX_LAYERS = 4096
"""Far more than any model has. Tensor names are listed per layer before a file is compared with them, so that a wrong
number in a config must not decide how much memory this takes."""
MAX_SIZE = 2**31 - 1
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Sizes and switches of one model; hashable, so it is static under jit."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5
    rope: RopeConfig = RopeConfig()
    tie_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    model_type: str = "llama"

    def __post_init__(self):
        for name in (*_SIZES, "max_position_embeddings"):
            value = getattr(self, name)
            check_counts(**{name: value})
            limit = MAX_LAYERS if name == "num_layers" else MAX_SIZE
            if value > limit:
                raise ValueError(
                    f"{name}={value} is more than {limit}, the most that is accepted; is the file damaged?"
                )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even for rotary embeddings")
        if not 0 <= self.rms_norm_eps < 1:
            raise ValueError(f"rms_norm_eps={self.rms_norm_eps!r} must be at least 0 and below 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}")

    @property
    def query_group(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def head_table(self) -> str:
        """Name of the parameter that is the output head."""
        return "embedding" if self.tie_embeddings else "lm_head"


def from_hf_config(config: Mapping[str, Any]) -> LlamaConfig:
    """Maps the contents of a `config.json`. Raises ValueError naming what is not supported."""
    model_type = get(config, "model_type", str)
    if get(config, "is_encoder_decoder", bool):
        raise ValueError(f"model_type={model_type!r} is an encoder-decoder; only decoder-only models are supported")
    if model_type not in MODEL_TYPES:
        raise ValueError(f"model_type={model_type!r} is not supported; supported: {', '.join(MODEL_TYPES)}")
    context = get(config, "max_position_embeddings", int, 2048)
    window = get(config, "sliding_window", int)
    windowed = bool(window) and get(config, "use_sliding_window", bool, model_type == "mistral")
    if windowed and window < context:
        raise ValueError(f"sliding_window={window} is not supported yet; models with full attention only")
    rope_parameters = get(config, "rope_parameters", dict, {})
    rotary = get(rope_parameters, "partial_rotary_factor", float, get(config, "partial_rotary_factor", float, 1.0))
    if rotary != 1:
        raise ValueError(f"partial_rotary_factor={rotary!r} is not supported; all of head_dim must be rotated")
    activation = get(config, "hidden_act", str, "silu")
    if activation not in ("silu", "swish"):
        raise ValueError(f"hidden_act={activation!r} is not supported; this family uses 'silu'")
    required = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    sizes = {name: get(config, name, int) for name in required}
    missing = [name for name, value in sizes.items() if value is None]
    if missing:
        raise ValueError(f"config.json lacks {', '.join(missing)}")
    heads, width = sizes["num_attention_heads"], sizes["hidden_size"]
    if heads < 1:
        raise ValueError(f"num_attention_heads={heads} must be a positive integer")
    attention_bias = get(config, "attention_bias", bool, False)
    return LlamaConfig(
        vocab_size=sizes["vocab_size"],
        hidden_size=width,
        intermediate_size=sizes["intermediate_size"],
        num_layers=sizes["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=get(config, "num_key_value_heads", int, heads),
        head_dim=get(config, "head_dim", int, width // heads),
        max_position_embeddings=context,
        rms_norm_eps=get(config, "rms_norm_eps", float, 1e-6),
        rope=rope_from_hf(config),
        tie_embeddings=get(config, "tie_word_embeddings", bool, False),
        qkv_bias=model_type in _QKV_BIAS or attention_bias,
        output_bias=attention_bias and model_type not in _QKV_BIAS,
        mlp_bias=get(config, "mlp_bias", bool, False),
        qk_norm=model_type == "qwen3",
        model_type=model_type,
    )


def fitting_type(config: LlamaConfig) -> str:
    """A model type whose models have the switches of `config`: its own where that is so."""
    kind, half_biased = config.model_type, config.qkv_bias and not config.output_bias
    if config.qk_norm == (kind == "qwen3") and half_biased == (kind in _QKV_BIAS):
        return kind
    return "qwen3" if config.qk_norm else "qwen2" if half_biased else "llama"


def to_hf_config(config: LlamaConfig) -> dict[str, Any]:
    """What `from_hf_config` reads as `config`, but for a model type that does not fit its switches.

    Raises ValueError where a config.json cannot say it.
    """
    found = {
        "model_type": fitting_type(config),
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        **rope_to_hf(config.rope),
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
        "hidden_act": "silu",
    }
    again = dataclasses.replace(from_hf_config(found), model_type=config.model_type)
    lost = [f.name for f in dataclasses.fields(config) if getattr(again, f.name) != getattr(config, f.name)]
    if lost:
        values = ", ".join(f"{name}={getattr(config, name)}" for name in lost)
        raise ValueError(f"a config.json cannot say {values:.300}")
    return found


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """Where one Hugging Face tensor goes: `path` in the parameter tree; `shape` is the shape in the file.

    Linear weights lie in the file as [out, in] and in the tree as [in, out] (`transpose`).
    """

    path: tuple[str, ...]
    shape: tuple[int, ...]
    transpose: bool = False

    def to_param(self, array: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(array.T) if self.transpose else array


def tensor_specs(config: LlamaConfig) -> dict[str, TensorSpec]:
    """Every tensor a checkpoint of this config must hold, by its Hugging Face name."""
    d = config.hidden_size
    specs = {
        "model.embed_tokens.weight": TensorSpec(("embedding",), (config.vocab_size, d)),
        "model.norm.weight": TensorSpec(("final_norm",), (d,)),
    }
    if not config.tie_embeddings:
        specs["lm_head.weight"] = TensorSpec(("lm_head",), (config.vocab_size, d))
    for i in range(config.num_layers):
        specs |= layer_specs(config, f"model.layers.{i}.", f"layer_{i}")
    return specs


def layer_specs(config: LlamaConfig, prefix: str, layer: str, inputs: int | None = None) -> dict[str, TensorSpec]:
    """The tensors of one layer, named `prefix` and Hugging Face's names, for the branch `layer` of the tree.

    `inputs`: the size of what attention reads; None: the hidden size.
    """
    d, f, h = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv, inputs = config.num_heads * h, config.num_kv_heads * h, d if inputs is None else inputs
    sizes = {
        "self_attn.q_proj": ("q", q, inputs, config.qkv_bias),
        "self_attn.k_proj": ("k", kv, inputs, config.qkv_bias),
        "self_attn.v_proj": ("v", kv, inputs, config.qkv_bias),
        "self_attn.o_proj": ("o", d, q, config.output_bias),
        "mlp.gate_proj": ("gate", f, d, config.mlp_bias),
        "mlp.up_proj": ("up", f, d, config.mlp_bias),
        "mlp.down_proj": ("down", d, f, config.mlp_bias),
    }
    specs = {}
    for hf, (ours, rows, columns, bias) in sizes.items():
        specs[f"{prefix}{hf}.weight"] = TensorSpec((layer, ours), (rows, columns), transpose=True)
        if bias:
            specs[f"{prefix}{hf}.bias"] = TensorSpec((layer, f"{ours}_bias"), (rows,))
    specs[f"{prefix}input_layernorm.weight"] = TensorSpec((layer, "attention_norm"), (d,))
    specs[f"{prefix}post_attention_layernorm.weight"] = TensorSpec((layer, "mlp_norm"), (d,))
    if config.qk_norm:
        specs[f"{prefix}self_attn.q_norm.weight"] = TensorSpec((layer, "q_norm"), (h,))
        specs[f"{prefix}self_attn.k_norm.weight"] = TensorSpec((layer, "k_norm"), (h,))
    return specs


def param_shapes(config: LlamaConfig) -> dict[str, Any]:
    """The shapes of the parameter tree in the plain layout, a nested dict of tuples."""
    return shapes_of(tensor_specs(config))


def shapes_of(specs: Mapping[str, TensorSpec]) -> dict[str, Any]:
    """The shapes of the parameter tree that these tensors make up."""
    tree: dict[str, Any] = {}
    for spec in specs.values():
        *parents, leaf = spec.path
        branch = tree
        for parent in parents:
            branch = branch.setdefault(parent, {})
        branch[leaf] = spec.shape[::-1] if spec.transpose else spec.shape
    return tree
