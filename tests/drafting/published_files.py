"""Tiny random drafters in every published layout, with names and configs written out by hand.

They are independent of the loader under test: each says where every tensor must end up and what the description is.
"""

from __future__ import annotations

import dataclasses
import json
import struct
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tiny import tiny

from spec_jax.drafting.heads import BlockHead, Eagle3Head, EagleHead, MedusaHead, MtpHead
from spec_jax.models.config import LlamaConfig

HIDDEN, FFN, VOCAB, LAYERS, DRAFT = 32, 64, 97, 8, 24
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8


def target():
    """The model that all are for; a Llama with eight layers."""
    return tiny(seed=1, layers=LAYERS, hidden=HIDDEN, vocab=VOCAB, head_dim=HEAD_DIM)


def layers(count: int = 1, vocab: int = VOCAB, **changes: Any) -> LlamaConfig:
    """The description of a drafter's transformer layers that `hf` stands for."""
    sizes = LlamaConfig(vocab, HIDDEN, FFN, count, HEADS, KV_HEADS, HEAD_DIM, 512, 1e-6)
    return dataclasses.replace(sizes, **changes)


def hf(count: int = 1, **more: Any) -> dict[str, Any]:
    """A config.json of transformer layers."""
    config = {
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": count,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    }
    return config | more


class Published:
    """A drafter on disk: config.json, tensors, and what must come of them.

    Attributes:
      config: of config.json.
      tensors: by name in the file.
      expected: {path in the parameter tree: array}.
      head: the description.
      optional: tensors whose absence means something else.
      file: None: model.safetensors; else a PyTorch file of this name.
    """

    def __init__(self, config: dict[str, Any], seed: int = 0, file: str | None = None):
        self.config, self.file = config, file
        self.tensors: dict[str, np.ndarray] = {}
        self.expected: dict[tuple[str, ...], np.ndarray] = {}
        self.head: Any = None
        self.optional: set[str] = set()
        self.rng = np.random.default_rng(seed)

    def add(self, name: str, path: str, *shape: int, kind: str = "") -> None:
        """`kind`: "linear" for [out, in], which is transposed; "centred" for norms that multiply by 1 + w."""
        array = self.rng.standard_normal(shape).astype(np.float32)
        self.tensors[name] = array
        whole = array.T if kind == "linear" else 1 + array if kind == "centred" else array
        self.expected[tuple(path.split("/"))] = whole

    def layer(self, name: str, path: str, inputs: int = HIDDEN, norm: str = "", qk_norm: bool = False, first=True):
        q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
        for part, ours, rows, columns in (
            ("self_attn.q_proj", "q", q, inputs),
            ("self_attn.k_proj", "k", kv, inputs),
            ("self_attn.v_proj", "v", kv, inputs),
            ("self_attn.o_proj", "o", HIDDEN, q),
            ("mlp.gate_proj", "gate", FFN, HIDDEN),
            ("mlp.up_proj", "up", FFN, HIDDEN),
            ("mlp.down_proj", "down", HIDDEN, FFN),
        ):
            self.add(f"{name}.{part}.weight", f"{path}/{ours}", rows, columns, kind="linear")
        if first:
            self.add(f"{name}.input_layernorm.weight", f"{path}/attention_norm", HIDDEN, kind=norm)
        self.add(f"{name}.post_attention_layernorm.weight", f"{path}/mlp_norm", HIDDEN, kind=norm)
        if qk_norm:
            self.add(f"{name}.self_attn.q_norm.weight", f"{path}/q_norm", HEAD_DIM, kind=norm)
            self.add(f"{name}.self_attn.k_norm.weight", f"{path}/k_norm", HEAD_DIM, kind=norm)

    def ids(self, head: str | None = "lm_head.weight") -> None:
        """A reduced draft vocabulary: d2t, t2d and the rows of the output head."""
        ids = np.sort(self.rng.choice(VOCAB, DRAFT, replace=False))
        self.tensors["d2t"] = ids - np.arange(DRAFT)
        self.tensors["t2d"] = np.isin(np.arange(VOCAB), ids)
        self.expected[("draft_ids",)] = ids.astype(np.int32)
        self.optional |= {"d2t", "t2d", "lm_head.weight"}
        if head is not None:
            self.add(head, "lm_head", DRAFT, HIDDEN)

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        if self.file is not None:
            write_torch(folder / self.file, self.tensors)
        else:
            save_file(self.tensors, folder / "model.safetensors")
        return folder


# --- Layouts ----------------------------------------------------------------------------------------------------------


def eagle(bias: bool = True, embedding: bool = True, file: str | None = "pytorch_model.bin") -> Published:
    found = Published(hf() | ({} if bias else {"bias": False}), file=file)
    found.add("fc.weight", "fc/fc", HIDDEN, 2 * HIDDEN, kind="linear")
    if bias:
        found.add("fc.bias", "fc/fc_bias", HIDDEN)
    found.layer("layers.0", "layer_0", first=False)
    if embedding:
        found.add("embed_tokens.weight", "embedding", VOCAB, HIDDEN)
    found.optional = {"embed_tokens.weight", "fc.weight"}
    rows = VOCAB if embedding else 0
    found.head = EagleHead(layers(), HIDDEN, own_embedding=embedding, embedding_rows=rows, fc_bias=bias)
    return found


def eagle3(prefix: str = "", file: str | None = "pytorch_model.bin") -> Published:
    config = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFT, "norm_before_residual": True}
    found = Published(hf() | config, 1, file)
    found.add(f"{prefix}fc.weight", "fc/fc", HIDDEN, 3 * HIDDEN, kind="linear")
    found.layer(f"{prefix}midlayer", "layer_0", 2 * HIDDEN)
    found.add(f"{prefix}midlayer.hidden_norm.weight", "layer_0/hidden_norm", HIDDEN)
    found.add(f"{prefix}norm.weight", "final_norm", HIDDEN)
    found.ids()
    found.optional.add(f"{prefix}midlayer.hidden_norm.weight")
    found.head = Eagle3Head(
        layers(vocab=DRAFT), HIDDEN, (1, 3, 4), own_head=True, mapped=True, norm_before_residual=True
    )
    return found


def speculators(kind: str, inner: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A config.json of speculators."""
    method = {"proposal_type": "greedy", "speculative_tokens": 5}
    return {
        "speculators_model_type": kind,
        "transformer_layer_config": inner,
        "speculators_config": {"algorithm": kind, "proposal_methods": [method], "verifier": {"name_or_path": "toy"}},
        **more,
    }


def speculators_eagle3(fc_norm: str | None = None) -> Published:
    config = speculators(
        "eagle3",
        hf(2, model_type="qwen3"),
        draft_vocab_size=DRAFT,
        target_hidden_size=None,
        norm_before_fc=fc_norm == "whole",
        fc_norm=fc_norm == "each",
        norm_output=True,
        eagle_aux_hidden_state_layer_ids=[1, 8],
    )
    found = Published(config, 2)
    found.add("fc.weight", "fc/fc", HIDDEN, 2 * HIDDEN, kind="linear")
    if fc_norm == "whole":
        found.add("input_norm.weight", "fc/norm", 2 * HIDDEN)
    elif fc_norm == "each":
        found.add("fc_norm.0.weight", "fc/norm_0", HIDDEN)
        found.add("fc_norm.1.weight", "fc/norm_1", HIDDEN)
    found.layer("layers.0", "layer_0", 2 * HIDDEN, qk_norm=True)
    found.layer("layers.1", "layer_1", qk_norm=True)
    found.add("layers.0.hidden_norm.weight", "layer_0/hidden_norm", HIDDEN)
    found.add("norm.weight", "final_norm", HIDDEN)
    found.add("embed_tokens.weight", "embedding", VOCAB, HIDDEN)
    found.ids()
    found.optional |= {"embed_tokens.weight", "layers.0.self_attn.q_norm.weight"}
    found.head = Eagle3Head(
        layers(2, DRAFT, qk_norm=True, model_type="qwen3"),
        HIDDEN,
        (0, 7),
        own_embedding=True,
        embedding_rows=VOCAB,
        own_head=True,
        mapped=True,
        fc_norm=fc_norm,
        norm_output=True,
    )
    return found


def peagle(wide: bool = True) -> Published:
    config = speculators("peagle", hf(), draft_vocab_size=VOCAB, mask_token_id=7, logit_scale=0.5)
    found = Published(config, 3)
    found.add("fc.weight", "fc/fc", HIDDEN, 3 * HIDDEN, kind="linear")
    found.add("mask_hidden", "fc/mask_hidden", 3 * HIDDEN if wide else HIDDEN)
    found.tensors["mask_hidden"] = found.tensors["mask_hidden"][None, None]
    found.layer("layers.0", "layer_0", 2 * HIDDEN)
    found.add("layers.0.hidden_norm.weight", "layer_0/hidden_norm", HIDDEN)
    found.add("norm.weight", "final_norm", HIDDEN)
    found.add("lm_head.weight", "lm_head", VOCAB, HIDDEN)
    found.optional = {"lm_head.weight"}
    found.head = Eagle3Head(layers(), HIDDEN, (1, 3, 4), own_head=True, mask_token=7, mask_wide=wide, logit_scale=0.5)
    return found


def dflash(sliding: bool = False) -> Published:
    config = hf(2, model_type="qwen3", architectures=["DFlashDraftModel"], num_target_layers=LAYERS, block_size=6)
    config["dflash_config"] = {"mask_token_id": 96} | ({} if sliding else {"target_layer_ids": [0, 3, 7]})
    if sliding:
        kinds = ["sliding_attention", "full_attention"]
        config |= {"layer_types": kinds, "sliding_window": 9, "use_sliding_window": True}
    found = Published(config, 4)
    _block(found, 2 if sliding else 3)
    found.head = BlockHead(
        layers(2, qk_norm=True, model_type="qwen3"),
        HIDDEN,
        (1, 5) if sliding else (0, 3, 7),
        block_size=6,
        mask_token=96,
        windows=(8, None) if sliding else (),
        causal=(True, False) if sliding else (),
    )
    return found


def speculators_dflash() -> Published:
    more = {"aux_hidden_state_layer_ids": [2, 5], "block_size": 4, "mask_token_id": 3, "sample_from_anchor": True}
    inner = hf(2, model_type="qwen3", layer_types=["full_attention"] * 2, sliding_window=None)
    found = Published(speculators("dflash", inner, draft_vocab_size=DRAFT, **more), 5)
    _block(found, 2)
    found.ids()
    found.head = BlockHead(
        layers(2, DRAFT, qk_norm=True, model_type="qwen3"),
        HIDDEN,
        (1, 4),
        own_head=True,
        mapped=True,
        block_size=4,
        mask_token=3,
        sample_from_anchor=True,
    )
    return found


def _block(found: Published, features: int) -> None:
    found.add("fc.weight", "fc/fc", HIDDEN, features * HIDDEN, kind="linear")
    found.add("hidden_norm.weight", "context_norm", HIDDEN)
    found.add("norm.weight", "final_norm", HIDDEN)
    for i in range(2):
        found.layer(f"layers.{i}", f"layer_{i}", qk_norm=True)


def medusa(prefix: str = "", blocks: int = 1) -> Published:
    config = {"medusa_num_heads": 3, "medusa_num_layers": blocks, "base_model_name_or_path": "toy"}
    found = Published(config, 6, "medusa_lm_head.pt")
    for i in range(3):
        for j in range(blocks):
            found.add(f"{prefix}{i}.{j}.linear.weight", f"block_{i}_{j}/fc", HIDDEN, HIDDEN, kind="linear")
            found.add(f"{prefix}{i}.{j}.linear.bias", f"block_{i}_{j}/fc_bias", HIDDEN)
        found.add(f"{prefix}{i}.{blocks}.weight", f"lm_head_{i}", VOCAB, HIDDEN)
    found.optional = {f"{prefix}0.0.linear.bias"} | {n for n in found.tensors if n.endswith("linear.weight")}
    found.head = MedusaHead(target().config, HIDDEN, own_head=True, num_heads=3, num_blocks=blocks, head_each=True)
    return found


def vllm_medusa(shared: bool, prefix: str = "") -> Published:
    config = {"model_type": "medusa", "num_heads": 2, "num_hidden_layers": 1, "hidden_size": HIDDEN}
    config |= {"vocab_size": VOCAB, "medusa_fc_bias": not shared, "original_lm_head": shared}
    found = Published(config | ({"truncated_vocab_size": DRAFT} if shared else {}), 7)
    for i in range(2):
        found.add(f"{prefix}blocks.{i}.layers.0.weight", f"block_{i}_0/fc", HIDDEN, HIDDEN, kind="linear")
        if not shared:
            found.add(f"{prefix}blocks.{i}.layers.0.bias", f"block_{i}_0/fc_bias", HIDDEN)
            found.add(f"{prefix}lm_heads.{i}.weight", f"lm_head_{i}", VOCAB, HIDDEN)
    found.optional = {n for n in found.tensors if "blocks" in n}
    if shared:
        ids = np.random.default_rng(3).permutation(VOCAB)[:DRAFT]
        found.tensors["token_map"], found.expected[("draft_ids",)] = ids, ids.astype(np.int32)
        found.add(f"{prefix}lm_heads.0.weight", "lm_head", DRAFT, HIDDEN)
        found.optional |= {"token_map", f"{prefix}lm_heads.0.weight"}
    found.head = MedusaHead(
        dataclasses.replace(target().config, vocab_size=DRAFT if shared else VOCAB),
        HIDDEN,
        own_head=True,
        mapped=shared,
        num_heads=2,
        bias=not shared,
        head_each=not shared,
    )
    return found


def speculators_mtp() -> Published:
    found = Published(speculators("mtp", hf(model_type="qwen3"), num_nextn_predict_layers=1), 8)
    _module(found, "mtp_layers.0", 0, qk_norm=True)
    found.optional = {"mtp_layers.0.self_attn.q_norm.weight"}
    found.head = MtpHead(layers(qk_norm=True, model_type="qwen3"), HIDDEN, post_norm=True)
    return found


def _module(found: Published, name: str, index: int, qk_norm: bool = False) -> None:
    parts = {
        "token_layernorm": "embedding_norm",
        "hidden_layernorm": "hidden_norm",
        "final_layernorm": "output_norm",
    }
    for part, ours in parts.items():
        found.add(f"{name}.{part}.weight", f"layer_{index}/{ours}", HIDDEN)
    found.add(f"{name}.input_proj.weight", f"layer_{index}/fc", HIDDEN, 2 * HIDDEN, kind="linear")
    found.layer(name, f"layer_{index}", qk_norm=qk_norm)


def _in_target(found: Published, layers: LlamaConfig, **switches: Any) -> Published:
    """Puts the modules beside weights of the target, as its own folder has them."""
    found.head = MtpHead(layers, HIDDEN, **switches)
    found.tensors["model.embed_tokens.weight"] = np.zeros((VOCAB, HIDDEN), np.float32)
    found.tensors["model.layers.0.self_attn.q_proj.weight"] = np.zeros((HIDDEN, HIDDEN), np.float32)
    found.optional |= {"model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"}
    return found


def qwen3_next_mtp() -> Published:
    found = Published(hf(LAYERS, num_nextn_predict_layers=1), 9)
    found.add("mtp.pre_fc_norm_embedding.weight", "layer_0/embedding_norm", HIDDEN, kind="centred")
    found.add("mtp.pre_fc_norm_hidden.weight", "layer_0/hidden_norm", HIDDEN, kind="centred")
    found.add("mtp.norm.weight", "layer_0/output_norm", HIDDEN, kind="centred")
    found.add("mtp.fc.weight", "layer_0/fc", HIDDEN, 2 * HIDDEN, kind="linear")
    found.layer("mtp.layers.0", "layer_0", norm="centred", qk_norm=True)
    found.optional = {"mtp.layers.0.self_attn.q_norm.weight"}
    config = dataclasses.replace(target().config, num_layers=1, qk_norm=True, model_type="qwen3")
    return _in_target(found, config, post_norm=True)


def mimo_mtp() -> Published:
    found = Published(hf(LAYERS, num_nextn_predict_layers=2), 10)
    for i in range(2):
        _module(found, f"model.mtp_layers.{i}", i)
    config = dataclasses.replace(target().config, num_layers=2)
    return _in_target(found, config, hidden_first=True, post_norm=True, zero_first=True)


def deepseek_mtp(count: int = 2, tables: bool = True) -> Published:
    found = Published(hf(LAYERS, num_nextn_predict_layers=count), 11)
    for i in range(count):
        name = f"model.layers.{LAYERS + i}"
        found.add(f"{name}.enorm.weight", f"layer_{i}/embedding_norm", HIDDEN)
        found.add(f"{name}.hnorm.weight", f"layer_{i}/hidden_norm", HIDDEN)
        found.add(f"{name}.shared_head.norm.weight", f"layer_{i}/output_norm", HIDDEN)
        found.add(f"{name}.eh_proj.weight", f"layer_{i}/fc", HIDDEN, 2 * HIDDEN, kind="linear")
        found.layer(name, f"layer_{i}")
        found.optional |= {n for n in found.tensors if n.startswith(name) and "eh_proj" in n}
        for table, path in (("embed_tokens", "embedding"), ("shared_head.head", "lm_head")):
            if tables and not i:
                found.add(f"{name}.{table}.weight", path, VOCAB, HIDDEN)
            elif tables:
                first = f"model.layers.{LAYERS}.{table}.weight"
                found.tensors[f"{name}.{table}.weight"] = found.tensors[first].copy()
            found.optional.add(f"{name}.{table}.weight")
    config = dataclasses.replace(target().config, num_layers=count)
    rows = VOCAB if tables else 0
    own = {"own_embedding": tables, "embedding_rows": rows, "own_head": tables}
    return _in_target(found, config, zero_first=True, **own)


ALL = {
    "eagle": eagle,
    "eagle without bias and embedding": lambda: eagle(False, False, None),
    "eagle3": eagle3,
    "eagle3 with a prefix": lambda: eagle3("model.", None),
    "speculators eagle3": speculators_eagle3,
    "speculators eagle3, one norm": lambda: speculators_eagle3("whole"),
    "speculators eagle3, a norm each": lambda: speculators_eagle3("each"),
    "peagle": peagle,
    "peagle, narrow": lambda: peagle(False),
    "dflash": dflash,
    "dflash with a window": lambda: dflash(True),
    "speculators dflash": speculators_dflash,
    "medusa": medusa,
    "medusa, two blocks and a prefix": lambda: medusa("medusa_head.", 2),
    "vllm medusa": lambda: vllm_medusa(False),
    "vllm medusa, one head": lambda: vllm_medusa(True, "medusa_heads."),
    "speculators mtp": speculators_mtp,
    "qwen3-next mtp": qwen3_next_mtp,
    "mimo mtp": mimo_mtp,
    "deepseek mtp": deepseek_mtp,
    "deepseek mtp without tables": lambda: deepseek_mtp(1, False),
}


# --- PyTorch's files, by hand -----------------------------------------------------------------------------------------

STORAGES = {
    np.dtype(np.float32): "FloatStorage",
    np.dtype(np.float16): "HalfStorage",
    np.dtype(ml_dtypes.bfloat16): "BFloat16Storage",
    np.dtype(np.int64): "LongStorage",
    np.dtype(np.bool_): "BoolStorage",
}


def named(module: str, name: str) -> bytes:
    """The opcode that pushes a global."""
    return f"c{module}\n{name}\n".encode()


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def number(value: int) -> bytes:
    return b"J" + struct.pack("<i", value)


def counts(values: Any) -> bytes:
    return b"(" + b"".join(map(number, values)) + b"t"


def pickled_tensor(key: str, kind: str, size: int, offset: int, shape: Any, strides: Any) -> bytes:
    storage = b"(" + text("storage") + named("torch", kind) + text(key) + text("cpu") + number(size) + b"tQ"
    hooks = named("collections", "OrderedDict") + b")R"
    arguments = b"(" + storage + number(offset) + counts(shape) + counts(strides) + b"\x89" + hooks + b"t"
    return named("torch._utils", "_rebuild_tensor_v2") + arguments + b"R"


def pickled_dict(entries: dict[str, bytes]) -> bytes:
    items = b"".join(text(name) + value for name, value in entries.items())
    return b"\x80\x02" + named("collections", "OrderedDict") + b")R(" + items + b"u."


def write_torch(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """A state dict as `torch.save` writes it."""
    entries, storages = {}, {}
    for number_, (name, array) in enumerate(tensors.items()):
        strides = [stride // array.itemsize for stride in array.copy(order="C").strides]
        kind = STORAGES[array.dtype]
        entries[name] = pickled_tensor(str(number_), kind, array.size, 0, array.shape, strides)
        storages[f"data/{number_}"] = np.ascontiguousarray(array).tobytes()
    write_archive(path, pickled_dict(entries), storages)


def write_archive(path: Path, pickle: bytes, files: dict[str, bytes], compress: bool = False) -> None:
    kind = zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", kind) as archive:
        archive.writestr("archive/data.pkl", pickle)
        archive.writestr("archive/byteorder", b"little")
        for name, data in files.items():
            archive.writestr(f"archive/{name}", data)
