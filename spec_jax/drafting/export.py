"""Writes drafters as other systems read them, and draft models as Hugging Face folders.

`read_drafter` reads every folder back to the same description and parameters. Matrices may be stored as int8 with one
scale per row; that is spec_jax's own, and other systems do not read it.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from spec_jax.drafting import tensor_names
from spec_jax.drafting.heads import BlockHead, Eagle3Head, EagleHead, Head, MedusaHead, MtpHead
from spec_jax.models.config import LlamaConfig, TensorSpec, tensor_specs, to_hf_config
from spec_jax.models.llama import FINAL_NORM
from spec_jax.models.packing import unpack_params, unpack_tree
from spec_jax.models.safetensors_files import SCALE
from spec_jax.models.safetensors_folder import SHARED_WITH

DTYPES = ("float32", "bfloat16", "float16", "int8")
LAYOUTS = {
    "speculators": (Eagle3Head, BlockHead, MtpHead),
    "eagle": (EagleHead, Eagle3Head),
    "vllm": (MedusaHead,),
}
"""Layouts and the descriptions that can be written in them."""
TABLES = ("own", "all", "different")
WEIGHTS = "model.safetensors"


def default_layout(head: Head) -> str:
    """The layout in which most systems read this kind of drafter."""
    return next(name for name, kinds in LAYOUTS.items() if isinstance(head, kinds))


def default_tables(head: Head, layout: str, dtype: str) -> str:
    """Which tables the readers of a layout want in the file: `tables` of `export_drafter`.

    speculators 0.9 leaves the embedding of an EAGLE-3 drafter uninitialised where the file has none, and vLLM's Medusa
    always names an output head; other drafters take theirs from the target. int8 is for spec_jax, which takes all.
    """
    wants = isinstance(head, MedusaHead) or (layout == "speculators" and isinstance(head, Eagle3Head))
    return "all" if wants and dtype != "int8" else "own"


def export_drafter(
    head: Head,
    params: Mapping[str, Any],
    folder: str | os.PathLike[str],
    *,
    target_name: str,
    target_config: LlamaConfig,
    layout: str | None = None,
    dtype: str = "float32",
    num_speculative_tokens: int | None = None,
    target_params: Mapping[str, Any] | None = None,
    tables: str = "own",
) -> None:
    """Writes config.json and model.safetensors.

    Args:
      head: the description.
      params: its parameters, packed where `head.packed`.
      folder: is made; files of these names in it are replaced.
      target_name: the target's name or Hugging Face repository, which other systems load it from.
      target_config: the target's.
      layout: a key of `LAYOUTS`; None: `default_layout`.
      dtype: "float32", "bfloat16", "float16" or "int8", of the weights.
      num_speculative_tokens: how many to draft, for readers that do not choose for themselves. None: a whole block,
        one for each Medusa head, else 4.
      target_params: the target's parameters in the plain layout, which every choice of `tables` but the first needs.
      tables: which embedding and output head are written. "own": those that are the drafter's; "all": also those that
        it borrows from the target, for systems that want them in the file; "different": own ones only where they differ
        from the target's rows, which is compact, but only spec_jax reads a `d2t` without an output head.

    Raises:
      ValueError: an option that is not known, or something that the layout has no place for.
    """
    layout = default_layout(head) if layout is None else layout
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r} is not known; use one of {', '.join(LAYOUTS)}")
    if not isinstance(head, LAYOUTS[layout]):
        fits = [name for name, kinds in LAYOUTS.items() if isinstance(head, kinds)]
        raise ValueError(f"the layout {layout!r} has no place for a {type(head).__name__}; use {' or '.join(fits)}")
    params = unpack_tree(dict(params), head.param_shapes()) if head.packed else dict(params)
    if tables not in TABLES:
        raise ValueError(f"tables={tables!r} is not known; use one of {', '.join(TABLES)}")
    if tables != "own" and target_params is None:
        raise ValueError(f"tables={tables!r} needs target_params")
    whole = head
    if tables == "all":
        whole, params = _with_tables(head, params, target_params, target_config)
    left_out = _same_tables(head, params, target_params, target_config) if tables == "different" else ()
    if not isinstance(head, Eagle3Head | BlockHead):
        _refuse(head, f"the {layout} layout of this kind", features=(FINAL_NORM,))
    write = _speculators if layout == "speculators" else _vllm_medusa if layout == "vllm" else _safeailab
    config, specs = write(whole, target_name, target_config, num_speculative_tokens or _default_tokens(head))
    specs = {name: spec for name, spec in specs.items() if spec.path[0] not in left_out}
    tensors = _tensors(params, specs, dtype)
    if head.mapped:
        ids = np.asarray(params["draft_ids"]).astype(np.int64)
        tensors |= {"token_map": ids} if layout == "vllm" else _id_tables(ids, target_config.vocab_size)
    _write(folder, config, tensors)


def export_model(
    config: LlamaConfig,
    params: Mapping[str, Any],
    folder: str | os.PathLike[str],
    *,
    dtype: str = "float32",
    packed: bool = False,
    shared_with: str | None = None,
) -> None:
    """Writes a draft model as a Hugging Face folder, without a tokenizer.

    Args:
      config, params: the model; `packed`: in the layout of the CPU kernels.
      folder: is made; files of these names in it are replaced.
      dtype: as in `export_drafter`.
      shared_with: name of the target whose embedding and output head it uses: they are left out, and `read_draft_model`
        takes them from the target.
    """
    params = unpack_params(dict(params), config) if packed else dict(params)
    specs = tensor_specs(config)
    hf = {"architectures": ["LlamaForCausalLM"]} | to_hf_config(config)
    if shared_with is not None:
        specs = {name: spec for name, spec in specs.items() if spec.path[0] not in ("embedding", "lm_head")}
        hf[SHARED_WITH] = shared_with
    _write(folder, hf, _tensors(params, specs, dtype))


def _default_tokens(head: Head) -> int:
    if isinstance(head, BlockHead):
        return head.block_size if head.sample_from_anchor else head.block_size - 1
    return head.num_heads if isinstance(head, MedusaHead) else 4


# --- Layouts: each returns config.json and where every tensor comes from ----------------------------------------------


def _speculators(head, target_name, target_config, tokens):
    wide = None if head.target_hidden == head.config.hidden_size else head.target_hidden
    config: dict[str, Any] = {"transformer_layer_config": _layers(head, target_config)}
    vocabulary = {"draft_vocab_size": head.config.vocab_size, "target_hidden_size": wide}
    if isinstance(head, Eagle3Head):
        kind, architecture = "eagle3", "Eagle3Speculator"
        config |= (
            vocabulary
            | _eagle3_switches(head)
            | {
                "embed_requires_grad": head.own_embedding,
                "eagle_aux_hidden_state_layer_ids": _layers_entered(head),
            }
        )
        if head.mask_token is not None:
            kind, architecture = "peagle", "PEagleSpeculator"
            config["mask_token_id"] = head.mask_token
        specs = tensor_names.eagle3_specs(head, "layers.0")
    elif isinstance(head, BlockHead):
        kind, architecture = "dflash", "DFlashSpeculator"
        config |= vocabulary | {
            "aux_hidden_state_layer_ids": _layers_entered(head),
            "block_size": head.block_size,
            "mask_token_id": head.mask_token,
            "sample_from_anchor": head.sample_from_anchor,
            "sliding_window_non_causal": not any(head.causal),
        }
        config["transformer_layer_config"] |= _sliding(head)
        specs = tensor_names.block_specs(head)
    else:
        kind, architecture = "mtp", "MTPDraftModel"
        size = head.config.hidden_size  # and no reduced vocabulary in its own classes: that is told by d2t alone
        _refuse(
            head, "the speculators layout", target_hidden=size, hidden_first=False, post_norm=True, zero_first=False
        )
        config["num_nextn_predict_layers"] = head.config.num_layers
        specs = tensor_names.table_specs(head) | tensor_names.mtp_specs(head, tensor_names.MTP_NAMES["speculators"])
    config |= {
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "architectures": [architecture],
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": tokens,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": target_name, "architectures": [_architecture(target_config)]},
        },
    }
    return config, specs


def _safeailab(head, target_name, target_config, tokens):
    config = _layers(head, target_config)
    if isinstance(head, EagleHead):
        return config | {"architectures": ["LlamaForCausalLMEagle"], "bias": head.fc_bias}, tensor_names.eagle_specs(
            head
        )
    if head.config.num_layers != 1:
        raise ValueError(f"SafeAILab's EAGLE-3 has one layer, not {head.config.num_layers}; use the speculators layout")
    config |= _eagle3_switches(head) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": head.config.vocab_size,
        "target_hidden_size": head.target_hidden,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": _layers_entered(head),
        },
    }
    if head.mask_token is not None:
        config["ptd_token_id"] = head.mask_token
    return config, tensor_names.eagle3_specs(head, "midlayer")


def _vllm_medusa(head, target_name, target_config, tokens):
    config = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "num_heads": head.num_heads,
        "num_lookahead_tokens": head.num_heads,
        "num_hidden_layers": head.num_blocks,
        "hidden_size": head.target_hidden,
        "vocab_size": target_config.vocab_size,
        "truncated_vocab_size": head.config.vocab_size,
        "medusa_fc_bias": head.bias,
        "original_lm_head": not (head.own_head and head.head_each),
        "base_model_name_or_path": target_name,
    }
    return config, tensor_names.vllm_medusa_specs(head)


def _layers(head: Head, target_config: LlamaConfig) -> dict[str, Any]:
    """The drafter's transformer layers as a config of Hugging Face, over the target's vocabulary."""
    return to_hf_config(dataclasses.replace(head.config, vocab_size=target_config.vocab_size, tie_embeddings=False))


def _eagle3_switches(head: Eagle3Head) -> dict[str, Any]:
    return {
        "norm_before_residual": head.norm_before_residual,
        "norm_before_fc": head.fc_norm == "whole",
        "fc_norm": head.fc_norm == "each",
        "norm_output": head.norm_output,
        "logit_scale": head.logit_scale,
    }


def _layers_entered(head: Head) -> list[int]:
    """The layers that read the features, one more than those that wrote them; the final norm's has none."""
    if FINAL_NORM in head.features:
        raise ValueError(f"features={head.features} has the final norm's output, which these layouts cannot name")
    return [i + 1 for i in head.features]


def _sliding(head: BlockHead) -> dict[str, Any]:
    """The windows of a block drafter's layers. All that have one have the same, and are causal or not together."""
    count = head.config.num_layers
    windows = head.windows or (None,) * count
    causal = head.causal or (False,) * count
    sizes = {window for window in windows if window is not None}
    slides = tuple(window is not None for window in windows)
    if len(sizes) > 1 or causal not in ((False,) * count, slides):
        raise ValueError(f"the layout has one window for all layers, not windows={windows} and causal={causal}")
    kinds = ["sliding_attention" if s else "full_attention" for s in slides]
    return {
        "layer_types": kinds,
        "use_sliding_window": bool(sizes),
        "sliding_window": max(sizes) + 1 if sizes else None,
        "max_window_layers": count,
    }


def _architecture(config: LlamaConfig) -> str:
    names = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "mimo": "MiMo"}
    return f"{names[config.model_type]}ForCausalLM"


def _refuse(head: Head, where: str, **allowed: Any) -> None:
    for name, value in allowed.items():
        if getattr(head, name) != value:
            raise ValueError(f"{where} has no place for {name}={getattr(head, name)!r}; it means {value!r}")


# --- Tensors ----------------------------------------------------------------------------------------------------------


def _with_tables(head, params, tables, target_config):
    """The drafter with copies of the target's tables that it borrows."""
    params = dict(params)
    if not head.own_embedding and not isinstance(head, MedusaHead):
        params["embedding"] = tables["embedding"]
        head = dataclasses.replace(head, own_embedding=True, embedding_rows=target_config.vocab_size)
    if not head.own_head:
        params["lm_head"] = _target_head(head, params, tables, target_config)
        head = dataclasses.replace(head, own_head=True)
        head = dataclasses.replace(head, head_each=False) if isinstance(head, MedusaHead) else head
    return head, params


def _same_tables(head, params, tables, target_config) -> tuple[str, ...]:
    """Those of the drafter's own tables that are the target's, to the bit."""
    found = []
    if head.own_embedding and np.array_equal(params["embedding"], tables["embedding"]):
        found.append("embedding")
    if "lm_head" in params and np.array_equal(params["lm_head"], _target_head(head, params, tables, target_config)):
        found.append("lm_head")
    return tuple(found)


def _target_head(head, params, tables, target_config):
    """What the target's output head is for this drafter."""
    table = tables[target_config.head_table]
    return np.asarray(table)[np.asarray(params["draft_ids"])] if head.mapped else table


def _id_tables(ids: np.ndarray, rows: int) -> dict[str, np.ndarray]:
    """d2t, offsets, and t2d, members, of the target's ids that are drafted."""
    return {"d2t": ids - np.arange(ids.size), "t2d": np.isin(np.arange(rows), ids)}


def _tensors(params: Mapping[str, Any], specs: Mapping[str, TensorSpec], dtype: str) -> dict[str, np.ndarray]:
    """The file's tensors by name."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r} is not supported; use one of {', '.join(DTYPES)}")
    found: dict[str, np.ndarray] = {}
    for name, spec in specs.items():
        value: Any = params
        for key in spec.path:
            value = value[key]
        value = np.asarray(value).astype(np.float32)
        value = np.ascontiguousarray((value.T if spec.transpose else value).reshape(spec.shape))
        if not np.isfinite(value).all():
            raise ValueError(f"{'/'.join(spec.path)} holds numbers that are not finite")
        if dtype == "int8" and value.ndim == 2:
            found[name], found[f"{name}{SCALE}"] = _quantised(value)
        elif dtype == "int8":
            found[name] = value
        else:
            with np.errstate(over="ignore"):  # found right below
                found[name] = value.astype(jnp.dtype(dtype))
            if not np.isfinite(found[name].astype(np.float32)).all():
                raise ValueError(f"{'/'.join(spec.path)} holds numbers beyond the range of {dtype}; use bfloat16")
    return found


def _quantised(value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int8 [rows, columns] and float32 [rows, 1]; rows of zeros have the scale 1."""
    scale = np.abs(value).max(axis=1, keepdims=True) / np.float32(127)
    scale = np.where(scale > 0, scale, np.float32(1))
    return np.clip(np.rint(value / scale), -127, 127).astype(np.int8), scale


def _write(folder: str | os.PathLike[str], config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> None:
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    new = folder / f".{WEIGHTS}"  # the drafter that is being read may be the one that is replaced
    save_file(dict(tensors), new, metadata={"format": "pt"})
    os.replace(new, folder / WEIGHTS)
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
