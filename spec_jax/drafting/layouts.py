"""From a published drafter's config.json and the names and shapes of its tensors to a description and a map of names.

Which publisher a folder comes from is told by its config where that says so (speculators, DFlash), else by its names.
Everything that is not supported is refused here, before any tensor is read.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from spec_jax.drafting import tensor_names
from spec_jax.drafting.heads import BlockHead, Eagle3Head, EagleHead, MedusaHead, MtpHead
from spec_jax.drafting.layout_base import (
    Layout,
    check_mask_token,
    check_target,
    features_of,
    layers_of,
    layout_of,
    refuse_gated,
    refuse_new_parts,
    rows_of,
    tables_of,
)
from spec_jax.drafting.tensor_names import LM_HEAD, MTP_NAMES
from spec_jax.fields import get
from spec_jax.models.config import MAX_LAYERS, fitting_type
from spec_jax.models.llama import FINAL_NORM
from spec_jax.models.safetensors_folder import mtp_tensors

_SPECULATORS = ("eagle3", "peagle", "dflash", "mtp")
_SUCCESSORS = {
    "markov_head.": "DSpark",
    "confidence_head.": "DSpark",
    "prefix_gru.": "Domino",
    "candidate_selector.": "DFlash2",
    "lilicorr.": "LiLiCorr",
}
_BUFFER = "rotary_emb.inv_freq"  # of old versions, recomputed from the config
_ZERO_CENTRED = ("qwen3_next", "qwen3_5_text")


def find_layout(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], target: Any) -> Layout:
    """The layout of a drafter for `target`, a `Model`.

    Raises ValueError for what is unknown, not supported, or made for another target.
    """
    kind = get(config, "speculators_model_type", str)
    shapes = {name: tuple(shape) for name, shape in shapes.items() if not name.endswith(_BUFFER)}
    names = {name.removeprefix("model."): shape for name, shape in shapes.items()}  # some exporters' prefix
    if len(names) < len(shapes):
        names = shapes
    successor = next((title for name in names for part, title in _SUCCESSORS.items() if part in name), None)
    if successor or get(config, "projector_type", str, "dflash") != "dflash":
        raise ValueError(f"drafters of the kind {successor or config['projector_type']} are not supported yet")
    modules = mtp_tensors(shapes)
    if kind is not None:
        if kind not in _SPECULATORS:
            raise ValueError(f"speculators_model_type={kind!r} is not supported; supported: {', '.join(_SPECULATORS)}")
        if kind == "mtp":
            return _speculators_mtp(config, shapes, target)
        return _dflash(config, shapes, target) if kind == "dflash" else _eagle3(config, names, target, kind)
    if modules:
        return _target_mtp(config, {name: shapes[name] for name in shapes if name in modules}, target)
    if "dflash_config" in config or "DFlashDraftModel" in get(config, "architectures", list, []):
        return _dflash(config, names, target)
    for prefix in ("medusa_heads.", "medusa_head.", ""):
        if f"{prefix}blocks.0.layers.0.weight" in shapes:
            return _vllm_medusa(config, shapes, target, prefix)
        if f"{prefix}0.0.linear.weight" in shapes:  # beside the target's tensors where they have a prefix
            ours = {name: shape for name, shape in shapes.items() if name.startswith(prefix)}
            return _medusa(config, ours, target, prefix)
    if "midlayer.hidden_norm.weight" in names or "layers.0.hidden_norm.weight" in names:
        return _eagle3(config, names, target, None)
    if "fc.weight" in names:
        return _eagle(config, names, target)
    some = ", ".join(list(shapes)[:4])
    raise ValueError(
        f"no known drafter has tensors named {some}, ...; EAGLE, EAGLE-3, P-EAGLE, Medusa, DFlash and MTP modules as "
        f"their authors, speculators or vLLM store them are known"
    )


# --- EAGLE ------------------------------------------------------------------------------------------------------------


def _eagle(config, shapes, target) -> Layout:
    refuse_new_parts(shapes)
    check_target(get(config, "hidden_size", int, 0), target)
    tables = tables_of(config, shapes, target)
    head = EagleHead(
        config=layers_of(config, target, vocab_size=tables.pop("draft_vocab")),
        target_hidden=target.config.hidden_size,
        fc_bias=get(config, "bias", bool, True),
        **tables,
    )
    return layout_of("SafeAILab EAGLE", "eagle", head, tensor_names.eagle_specs(head), shapes, config)


def _eagle3(config, shapes, target, kind: str | None) -> Layout:
    """EAGLE-3 as SafeAILab (`kind` None) or speculators store it."""
    refuse_new_parts(shapes)
    inner = config if kind is None else get(config, "transformer_layer_config", dict, {})
    first = "midlayer" if "midlayer.hidden_norm.weight" in shapes else "layers.0"
    aux = get(config, "eagle_config", dict, {})
    if not get(aux, "use_aux_hidden_state", bool, True):
        raise ValueError("eagle_config.use_aux_hidden_state=false is not supported; EAGLE-3 reads several layers")
    check_target(get(config, "target_hidden_size", int, get(inner, "hidden_size", int, 0)), target)
    layers, key = target.config.num_layers, "eagle_aux_hidden_state_layer_ids"
    ids = get(config, key, list[int], get(aux, key, list[int], [2, layers // 2, layers - 3]))
    tables = tables_of(config, shapes, target)
    changes = {"vocab_size": tables.pop("draft_vocab"), "qk_norm": f"{first}.self_attn.q_norm.weight" in shapes}
    if first == "midlayer":
        changes["num_layers"] = 1
    head = Eagle3Head(
        config=layers_of(inner, target, **changes),
        target_hidden=target.config.hidden_size,
        features=features_of(ids, 1, key, target),
        norm_before_residual=get(config, "norm_before_residual", bool, False),
        fc_norm=_fc_norm(config),
        norm_output=get(config, "norm_output", bool, False),
        logit_scale=get(config, "logit_scale", float, 1.0),
        **tables,
    )
    if kind == "peagle" or "mask_hidden" in shapes:
        keys = ("mask_token_id", "ptd_token_id", "pard_token")
        token = next((get(config, name, int) for name in keys if get(config, name, int) is not None), None)
        rows = head.embedding_rows or target.config.vocab_size
        wide = math.prod(shapes.get("mask_hidden", ())) == head.target_hidden * len(head.features)
        token = check_mask_token(token, rows, " (or ".join(keys[:2]) + ")")
        head = dataclasses.replace(head, mask_token=token, mask_wide=wide)
    specs = tensor_names.eagle3_specs(head, first)
    if "mask_hidden" in shapes and math.prod(shapes["mask_hidden"]) == math.prod(specs["mask_hidden"].shape):
        specs["mask_hidden"] = dataclasses.replace(specs["mask_hidden"], shape=tuple(shapes["mask_hidden"]))
    title = f"speculators {kind}" if kind else "SafeAILab EAGLE-3"
    return layout_of(title, "eagle3", head, specs, shapes, config)


def _fc_norm(config: Mapping[str, Any]) -> str | None:
    whole = get(config, "norm_before_fc", bool, False)
    each = get(config, "fc_norm", bool, get(config, "use_aux_norm", bool, False))
    if whole and each:
        raise ValueError("norm_before_fc and fc_norm are both true; one of them at most can be")
    return "whole" if whole else "each" if each else None


# --- DFlash -----------------------------------------------------------------------------------------------------------


def _dflash(config, shapes, target) -> Layout:
    """DFlash as z-lab or speculators store it: the same names, two configs."""
    refuse_new_parts(shapes)
    own = get(config, "dflash_config", dict, {})
    speculators = "speculators_model_type" in config
    inner = dict(get(config, "transformer_layer_config", dict, {}) if speculators else config)
    for name, neutral in (("output_multiplier", 1.0), ("final_logit_softcapping", 0.0), ("input_embedding_scale", 1.0)):
        value = get(own, name, float, get(config, name, float, neutral))
        if value != neutral:
            raise ValueError(f"{name}={value} is not supported")
    check_target(get(config, "target_hidden_size", int, get(inner, "hidden_size", int, 0)), target)
    made_for = get(config, "num_target_layers", int, target.config.num_layers)
    if made_for != target.config.num_layers:
        raise ValueError(
            f"num_target_layers={made_for}, and {target.name} has {target.config.num_layers} layers; use a drafter "
            f"that was trained for this target"
        )
    windows, causal = _windows(config, inner)
    if windows and len(windows) != get(inner, "num_hidden_layers", int, 0):
        raise ValueError(f"layer_types has {len(windows)} entries for {inner.get('num_hidden_layers')} layers")
    for name in ("sliding_window", "use_sliding_window"):
        inner.pop(name, None)
    tables = tables_of(config, shapes, target)
    layers = layers_of(inner, target, vocab_size=tables.pop("draft_vocab"))
    count = target.config.num_layers
    if speculators:
        ids, first, key = [2, count // 2, count - 3], 1, "aux_hidden_state_layer_ids"
        size = get(config, "block_size", int, 8)
    else:
        ids, first, key = _evenly(count, layers.num_layers), 0, "target_layer_ids"
        size = get(own, "block_size", int, get(config, "block_size", int))
    token = get(own, "mask_token_id", int, get(config, "mask_token_id", int))
    if size is None or size < 2:
        raise ValueError(f"block_size={size} must be an integer of at least 2: the last token and what is drafted")
    head = BlockHead(
        config=layers,
        target_hidden=target.config.hidden_size,
        features=features_of(get(config, key, list[int], get(own, key, list[int], ids)), first, key, target),
        block_size=size,
        mask_token=check_mask_token(token, tables["embedding_rows"] or target.config.vocab_size, "mask_token_id"),
        sample_from_anchor=get(config, "sample_from_anchor", bool, False),
        windows=windows,
        causal=causal,
        **tables,
    )
    title = "speculators dflash" if speculators else "z-lab DFlash"
    return layout_of(title, "dflash", head, tensor_names.block_specs(head), shapes, config)


def _evenly(layers: int, count: int) -> list[int]:
    """z-lab's default: layers 1 to the last but two, evenly."""
    return [layers // 2] if count == 1 else [round(1 + i * (layers - 4) / (count - 1)) for i in range(count)]


def _windows(config, inner) -> tuple[tuple[int | None, ...], tuple[bool, ...]]:
    """`BlockHead.windows` and `causal`. Only layers with a window may be causal; a window counts the token itself."""
    kinds = get(inner, "layer_types", list[str], [])
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown:
        raise ValueError(f"layer_types has {', '.join(unknown)}; supported: full_attention, sliding_attention")
    window = get(inner, "sliding_window", int)
    if "sliding_attention" not in kinds or not get(inner, "use_sliding_window", bool, True) or window is None:
        return (), ()
    if "speculators_model_type" in config:
        causal = not get(config, "sliding_window_non_causal", bool, False)
    else:
        causal = get(config, "is_causal", bool, True)
    slides = [kind == "sliding_attention" for kind in kinds]
    return tuple(window - 1 if s else None for s in slides), tuple(s and causal for s in slides) if causal else ()


# --- Medusa -----------------------------------------------------------------------------------------------------------


def _medusa(config, shapes, target, prefix: str) -> Layout:
    """FasterDecoding's: how many heads and blocks there are is what the file holds, as in their loader."""
    heads, blocks = _counts(rf"{re.escape(prefix)}(\d+)\.(\d+)\.linear\.weight", shapes)
    said = get(config, "medusa_num_heads", int, heads)
    notes = () if said == heads else (f"its config says medusa_num_heads={said}; the file holds {heads} heads",)
    head = MedusaHead(
        config=dataclasses.replace(target.config, tie_embeddings=False),
        target_hidden=target.config.hidden_size,
        own_head=True,
        num_heads=heads,
        num_blocks=blocks,
        bias=f"{prefix}0.0.linear.bias" in shapes,
        head_each=True,
    )
    specs = tensor_names.medusa_specs(head, prefix)
    return Layout("FasterDecoding Medusa", "medusa", head, specs, shapes, notes=notes)


def _vllm_medusa(config, shapes, target, prefix: str) -> Layout:
    check_target(get(config, "hidden_size", int, target.config.hidden_size), target)
    heads, blocks = _counts(rf"{re.escape(prefix)}blocks\.(\d+)\.layers\.(\d+)\.weight", shapes)
    heads, blocks = get(config, "num_heads", int, heads), get(config, "num_hidden_layers", int, blocks)
    if not 1 <= heads <= MAX_LAYERS or not 1 <= blocks <= MAX_LAYERS:
        raise ValueError(f"num_heads={heads} and num_hidden_layers={blocks} must be from 1 to {MAX_LAYERS}")
    ids = next((name for name in (f"{prefix}token_map", "token_map") if name in shapes), None)
    shared = get(config, "original_lm_head", bool, False)
    one = next((name for name in (LM_HEAD, "lm_heads.0.weight") if prefix + name in shapes), None)
    rows = target.config.vocab_size
    head = MedusaHead(
        config=dataclasses.replace(
            target.config,
            vocab_size=get(config, "truncated_vocab_size", int, rows) if ids else rows,
            tie_embeddings=False,
        ),
        target_hidden=target.config.hidden_size,
        own_head=one is not None or ids is not None or not shared,
        mapped=ids is not None,
        num_heads=heads,
        num_blocks=blocks,
        bias=get(config, "medusa_fc_bias", bool, False),
        head_each=not shared,
    )
    specs = tensor_names.vllm_medusa_specs(head, prefix, one or LM_HEAD)
    rows = shared and head.mapped and one is None
    if rows:
        del specs[prefix + LM_HEAD]
    return Layout("vLLM Medusa", "medusa", head, specs, shapes, draft_ids=ids, offsets=False, target_rows=rows)


def _counts(pattern: str, names: Iterable[str]) -> tuple[int, int]:
    """Heads and blocks of each: one more than the greatest numbers in these names."""
    found = [match for match in (re.fullmatch(pattern, name) for name in names) if match]
    heads, blocks = (max(int(match[group]) for match in found) + 1 for group in (1, 2))
    if heads * blocks > len(found):
        raise ValueError(f"there are {len(found)} blocks, numbered as if {heads} heads had {blocks} each")
    return heads, blocks


# --- Multi-token prediction -------------------------------------------------------------------------------------------


def _speculators_mtp(config, shapes, target) -> Layout:
    refuse_new_parts(shapes)
    inner = dict(get(config, "transformer_layer_config", dict, {}))
    names = MTP_NAMES["speculators"]
    if inner.get("model_type") in _ZERO_CENTRED:
        inner["model_type"] = "qwen3"
        names = dataclasses.replace(names, zero_centred=True)
    check_target(get(inner, "hidden_size", int, 0), target)
    tables = tables_of(config, shapes, target)
    layers = layers_of(
        inner,
        target,
        vocab_size=tables.pop("draft_vocab"),
        num_layers=get(config, "num_nextn_predict_layers", int, 1),
        qk_norm="mtp_layers.0.self_attn.q_norm.weight" in shapes,
    )
    refuse_gated(shapes, "mtp_layers.0.", layers)
    head = MtpHead(config=layers, target_hidden=target.config.hidden_size, **names.switches, **tables)
    specs = tensor_names.table_specs(head) | tensor_names.mtp_specs(head, names)
    return layout_of("speculators mtp", "mtp", head, specs, shapes, config)


def _target_mtp(config, shapes, target) -> Layout:
    """Modules inside a target's checkpoint, whose layers have the target's sizes."""
    refuse_new_parts(shapes)
    if any(name.startswith("mtp.") for name in shapes):
        title, names, first, count = "Qwen3-Next's MTP", MTP_NAMES["qwen3_next"], 0, 1
    elif any(name.startswith("model.mtp_layers.") for name in shapes):
        title, names, first = "MiMo's MTP", MTP_NAMES["mimo"], 0
        count = len({name.split(".")[2] for name in shapes})
    else:
        numbers = {int(name.split(".")[2]) for name in shapes}
        title, names, first, count = "DeepSeek's MTP", MTP_NAMES["deepseek"], min(numbers), len(numbers)
    prefix = names.layer.format(first)
    gate, norm, bias = (
        f"{prefix}{part}" for part in ("mlp.gate_proj.weight", "self_attn.q_norm.weight", "self_attn.q_proj.bias")
    )
    layers = dataclasses.replace(
        target.config,
        num_layers=count,
        intermediate_size=rows_of(shapes, gate, target.config.intermediate_size),
        qk_norm=norm in shapes,
        qkv_bias=bias in shapes,
        tie_embeddings=False,
    )
    layers = dataclasses.replace(layers, model_type=fitting_type(layers))
    refuse_gated(shapes, prefix, layers)
    embedding, lm_head = f"{prefix}embed_tokens.weight", f"{prefix}shared_head.head.weight"
    head = MtpHead(
        config=layers,
        target_hidden=target.config.hidden_size,
        features=(FINAL_NORM,),
        own_embedding=embedding in shapes,
        embedding_rows=rows_of(shapes, embedding),
        own_head=lm_head in shapes,
        **names.switches,
    )
    specs = tensor_names.table_specs(head, embedding, lm_head) | tensor_names.mtp_specs(head, names, first)
    copies = {}
    for i in range(1, count):
        for table in (embedding, lm_head):
            other = names.layer.format(first + i) + table.removeprefix(prefix)
            if other in shapes:
                copies[other] = table
    said = get(config, "num_nextn_predict_layers", int, count)
    notes = () if said == count else (f"its config says num_nextn_predict_layers={said}; the file holds {count}",)
    return Layout(title, "mtp", head, specs, shapes, copies=copies, notes=notes)
