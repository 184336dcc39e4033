"""What the tensors of published drafters are called: for each naming a map from its names to parameter paths.

The loaders look names up in these maps, the exporter writes along them. Tables of ids (`d2t`, `t2d`, `token_map`) are
not weights and are left out here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from spec_jax.drafting.heads import BlockHead, Eagle3Head, EagleHead, Head, MedusaHead, MtpHead
from spec_jax.models.config import TensorSpec, layer_specs

EMBEDDING = "embed_tokens.weight"
LM_HEAD = "lm_head.weight"


@dataclasses.dataclass(frozen=True)
class ZeroCentredSpec(TensorSpec):
    """The weight of a norm that multiplies by 1 + w (Qwen3-Next)."""

    def to_param(self, array: np.ndarray) -> np.ndarray:
        return 1 + array.astype(np.float32)


@dataclasses.dataclass(frozen=True)
class FlatSpec(TensorSpec):
    """A vector that lies in the file with axes of length 1 in front."""

    def to_param(self, array: np.ndarray) -> np.ndarray:
        return array.reshape(-1)


def _linear(path: tuple[str, ...], outputs: int, inputs: int) -> TensorSpec:
    return TensorSpec(path, (outputs, inputs), transpose=True)


def table_specs(head: Head, embedding: str = EMBEDDING, lm_head: str = LM_HEAD) -> dict[str, TensorSpec]:
    """The embedding and the output head, where they are the drafter's own."""
    specs = {}
    if head.own_embedding:
        specs[embedding] = TensorSpec(("embedding",), (head.embedding_rows, head.config.hidden_size))
    if head.own_head:
        specs[lm_head] = TensorSpec(("lm_head",), (head.config.vocab_size, head.config.hidden_size))
    return specs


def eagle_specs(head: EagleHead) -> dict[str, TensorSpec]:
    """SafeAILab's EAGLE-1 and EAGLE-2."""
    size = head.config.hidden_size
    specs = table_specs(head) | {"fc.weight": _linear(("fc", "fc"), size, size + head.target_hidden)}
    if head.fc_bias:
        specs["fc.bias"] = TensorSpec(("fc", "fc_bias"), (size,))
    for i in range(head.config.num_layers):
        specs |= layer_specs(head.config, f"layers.{i}.", f"layer_{i}")
    del specs["layers.0.input_layernorm.weight"]
    return specs


def eagle3_specs(head: Eagle3Head, first: str) -> dict[str, TensorSpec]:
    """EAGLE-3, 3.1 and P-EAGLE; `first` is how its first layer is called: "midlayer" or "layers.0"."""
    size, wide = head.config.hidden_size, head.target_hidden * len(head.features)
    specs = table_specs(head) | {
        "fc.weight": _linear(("fc", "fc"), size, wide),
        "norm.weight": TensorSpec(("final_norm",), (size,)),
    }
    if head.fc_norm == "whole":
        specs["input_norm.weight"] = TensorSpec(("fc", "norm"), (wide,))
    elif head.fc_norm == "each":
        for i in range(len(head.features)):
            specs[f"fc_norm.{i}.weight"] = TensorSpec(("fc", f"norm_{i}"), (head.target_hidden,))
    if head.mask_token is not None:
        specs["mask_hidden"] = FlatSpec(("fc", "mask_hidden"), (1, 1, wide if head.mask_wide else size))
    for i in range(head.config.num_layers):
        name = f"layers.{i}" if i else first
        specs |= layer_specs(head.config, f"{name}.", f"layer_{i}", None if i else 2 * size)
    specs[f"{first}.hidden_norm.weight"] = TensorSpec(("layer_0", "hidden_norm"), (size,))
    return specs


def block_specs(head: BlockHead) -> dict[str, TensorSpec]:
    """DFlash, as z-lab and speculators name it."""
    size = head.config.hidden_size
    specs = table_specs(head) | {
        "fc.weight": _linear(("fc", "fc"), size, head.target_hidden * len(head.features)),
        "hidden_norm.weight": TensorSpec(("context_norm",), (size,)),
        "norm.weight": TensorSpec(("final_norm",), (size,)),
    }
    for i in range(head.config.num_layers):
        specs |= layer_specs(head.config, f"layers.{i}.", f"layer_{i}")
    return specs


def medusa_specs(head: MedusaHead, prefix: str = "") -> dict[str, TensorSpec]:
    """FasterDecoding's Medusa: `{head}.{block}.linear`, and behind a head's blocks its output head."""
    size, specs = head.target_hidden, {}
    for i in range(head.num_heads):
        for j in range(head.num_blocks):
            specs |= _medusa_block(head, i, j, f"{prefix}{i}.{j}.linear")
        specs[f"{prefix}{i}.{head.num_blocks}.weight"] = TensorSpec((f"lm_head_{i}",), (head.config.vocab_size, size))
    return specs


def vllm_medusa_specs(head: MedusaHead, prefix: str = "", shared: str = LM_HEAD) -> dict[str, TensorSpec]:
    """vLLM's Medusa; `shared` is the name of an output head that all heads share."""
    size, specs = head.target_hidden, {}
    for i in range(head.num_heads):
        for j in range(head.num_blocks):
            specs |= _medusa_block(head, i, j, f"{prefix}blocks.{i}.layers.{j}")
        if head.own_head and head.head_each:
            specs[f"{prefix}lm_heads.{i}.weight"] = TensorSpec((f"lm_head_{i}",), (head.config.vocab_size, size))
    if head.own_head and not head.head_each:
        specs[f"{prefix}{shared}"] = TensorSpec(("lm_head",), (head.config.vocab_size, size))
    return specs


def _medusa_block(head: MedusaHead, i: int, j: int, name: str) -> dict[str, TensorSpec]:
    size, path = head.target_hidden, f"block_{i}_{j}"
    specs = {f"{name}.weight": _linear((path, "fc"), size, size)}
    if head.bias:
        specs[f"{name}.bias"] = TensorSpec((path, "fc_bias"), (size,))
    return specs


@dataclasses.dataclass(frozen=True)
class MtpNames:
    """How one publisher names the parts of a multi-token prediction module.

    Attributes:
      layer: in front of the names of the transformer layer; `{}` is the module's index.
      parts: names of `embedding_norm`, `hidden_norm`, `fc` and `output_norm`, in full, of module `{}`.
      zero_centred: norms multiply by 1 + w.
      switches: of `MtpHead`, which follow from the publisher's forward pass.
    """

    layer: str
    parts: tuple[str, str, str, str]
    zero_centred: bool = False
    switches: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def _parts(prefix: str, names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{prefix}{name}.weight" for name in names)


_SPECULATORS_PARTS = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")  # MiMo's too
MTP_NAMES = {
    "speculators": MtpNames(
        "mtp_layers.{}.",
        _parts("mtp_layers.{}.", _SPECULATORS_PARTS),
        switches={"post_norm": True},
    ),
    "qwen3_next": MtpNames(
        "mtp.layers.{}.",
        ("mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.fc.weight", "mtp.norm.weight"),
        zero_centred=True,
        switches={"post_norm": True},
    ),
    "mimo": MtpNames(
        "model.mtp_layers.{}.",
        _parts("model.mtp_layers.{}.", _SPECULATORS_PARTS),
        switches={"hidden_first": True, "post_norm": True, "zero_first": True},
    ),
    "deepseek": MtpNames(
        "model.layers.{}.",
        _parts("model.layers.{}.", ("enorm", "hnorm", "eh_proj", "shared_head.norm")),
        switches={"zero_first": True},
    ),
}


def mtp_specs(head: MtpHead, names: MtpNames, first: int = 0) -> dict[str, TensorSpec]:
    """Multi-token prediction modules, the first of which is numbered `first`; without tables."""
    size, wide, specs = head.config.hidden_size, head.target_hidden, {}
    for i in range(head.config.num_layers):
        layer = f"layer_{i}"
        specs |= layer_specs(head.config, names.layer.format(first + i), layer)
        embedding_norm, hidden_norm, fc, output_norm = (part.format(first + i) for part in names.parts)
        specs |= {
            embedding_norm: TensorSpec((layer, "embedding_norm"), (size,)),
            hidden_norm: TensorSpec((layer, "hidden_norm"), (wide,)),
            fc: _linear((layer, "fc"), size, size + wide),
            output_norm: TensorSpec((layer, "output_norm"), (size,)),
        }
    if names.zero_centred:
        specs = {
            name: ZeroCentredSpec(spec.path, spec.shape) if spec.path[-1].endswith("norm") else spec
            for name, spec in specs.items()
        }
    return specs
