"""What one step of a model reads and computes, from its Hugging Face `config.json` alone.

Dense and mixture-of-experts decoders, grouped-query and latent attention (MLA), sliding windows, T5's
encoder-decoders. Only sizes are read: a family that `load_model` does not know yet can be planned for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spec_jax.fields import get, read_json, wrong

DTYPE_BYTES = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0}
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_MOST = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Experts:
    """The routed experts of a model.

    Attributes:
      layers: layers that have them.
      count: experts of a layer.
      chosen: of them, per token.
      parameters: of one expert.
    """

    layers: int
    count: int
    chosen: int
    parameters: int

    def touched(self, rows: float) -> float:
        """How many experts of a layer `rows` tokens read on average, if they choose independently and evenly."""
        return self.count * (1 - (1 - self.chosen / self.count) ** rows)


@dataclasses.dataclass(frozen=True)
class ModelCosts:
    """Sizes of one decoder.

    Attributes:
      hidden_size, num_layers, vocab_size: as in the config.
      query_group: query heads that share one key/value head; all of them where attention is latent.
      kv_heads: key/value heads; 1 where attention is latent.
      layer_parameters: of all layers together, what every token is multiplied with; routed experts are left out.
      head_parameters: of the product with the vocabulary.
      embedding_parameters: of an embedding table that is not the head, and of an encoder: stored, hardly read.
      experts: routed experts, or None.
      kv_values: numbers kept per token and layer.
      score_size, value_size: numbers per query row that one key is multiplied with, and that one value adds to.
      windows: layers with a sliding window, and its tokens.
      weight_bytes, kv_bytes: bytes per parameter and per kept number.
    """

    hidden_size: int
    num_layers: int
    vocab_size: int
    query_group: int
    kv_heads: int
    layer_parameters: int
    head_parameters: int
    embedding_parameters: int = 0
    experts: Experts | None = None
    kv_values: int = 0
    score_size: int = 0
    value_size: int = 0
    windows: tuple[int, int] = (0, 0)
    weight_bytes: float = 2.0
    kv_bytes: float = 2.0

    @property
    def parameters(self) -> int:
        """All of them: what the model takes in memory."""
        routed = self.experts.layers * self.experts.count * self.experts.parameters if self.experts else 0
        return self.layer_parameters + self.head_parameters + self.embedding_parameters + routed

    @property
    def active_parameters(self) -> int:
        """Those that one token is multiplied with."""
        routed = self.experts.layers * self.experts.chosen * self.experts.parameters if self.experts else 0
        return self.layer_parameters + self.head_parameters + routed

    def parameters_read(self, rows: float) -> float:
        """Those that a step of `rows` tokens reads from memory."""
        routed = self.experts.layers * self.experts.touched(rows) * self.experts.parameters if self.experts else 0
        return self.layer_parameters + self.head_parameters + routed

    def layer_tokens(self, context: float) -> float:
        """Tokens attended to, summed over the layers."""
        windowed, window = self.windows
        return (self.num_layers - windowed) * context + windowed * min(context, window)


def read_costs(path: str | Path, weight_bytes: float | None = None, kv_bytes: float | None = None) -> ModelCosts:
    """`costs_from_config` of a `config.json`, or of the folder that holds it."""
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    if not file.exists():
        raise ValueError(f"config={str(path)!r} does not exist; give a config.json or the folder that holds it")
    return costs_from_config(read_json(file), weight_bytes, kv_bytes, where=str(file))


def costs_from_config(
    config: Mapping[str, Any], weight_bytes: float | None = None, kv_bytes: float | None = None, where: str = ""
) -> ModelCosts:
    """Maps the contents of a `config.json`.

    Args:
      config: the contents; of a multimodal model the part on text is used.
      weight_bytes: bytes per parameter; None: of the dtype in the config (bfloat16 where it names none).
      kv_bytes: bytes per number in the K/V cache; None: of the same dtype, whatever the weights are quantised to.
      where: the file, for errors.

    Raises:
      ValueError: names an entry that is missing or wrong.
    """
    c = {**config, **get(config, "text_config", dict, {}, where)}
    tied = get(c, "tie_word_embeddings", bool, False, where)
    dtype = str(c.get("dtype") or c.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    size = DTYPE_BYTES.get(dtype)
    if size is None:
        raise wrong("torch_dtype", dtype, f"one of {', '.join(DTYPE_BYTES)}", where)
    weight_bytes = size if weight_bytes is None else weight_bytes
    kv_bytes = size if kv_bytes is None else kv_bytes

    def number(*names: str, default: int | None = None, least: int = 1) -> int:
        for name in names:
            value = get(c, name, int, where=where)
            if value is not None:
                if not least <= value <= _MOST:
                    raise wrong(name, value, f"an integer from {least} to {_MOST}", where)
                return value
        if default is None:
            raise ValueError(f"{where}{': ' if where else ''}the config lacks {' or '.join(names)}")
        return default

    if get(c, "is_encoder_decoder", bool, False, where):
        return _encoder_decoder(c, number, tied, weight_bytes, kv_bytes)
    d, layers, vocab = number("hidden_size"), number("num_hidden_layers"), number("vocab_size")
    heads = number("num_attention_heads")
    if "kv_lora_rank" in c and c["kv_lora_rank"] is not None:
        attention = _latent_attention(number, d, heads, bool(c.get("q_lora_rank")))
    else:
        attention = _grouped_attention(number, d, heads, where)
    mlp = 3 * d * number("intermediate_size", "moe_intermediate_size")
    experts = _experts(number, d, layers)
    dense_layers = layers - (experts.layers if experts else 0)
    shared = 0
    if experts:
        shared_size = number("shared_expert_intermediate_size", default=0, least=0)
        shared_count = number("n_shared_experts", "num_shared_experts", default=0, least=0)
        shared = 3 * d * (shared_size or shared_count * number("moe_intermediate_size", default=0, least=0))
        shared += d * experts.count  # the router
    return ModelCosts(
        hidden_size=d,
        num_layers=layers,
        vocab_size=vocab,
        layer_parameters=layers * (attention.pop("parameters") + 2 * d)
        + dense_layers * mlp
        + (experts.layers * shared if experts else 0)
        + d,
        head_parameters=vocab * d,
        embedding_parameters=0 if tied else vocab * d,
        experts=experts,
        windows=_windows(c, number, layers, where),
        weight_bytes=weight_bytes,
        kv_bytes=kv_bytes,
        **attention,
    )


def _encoder_decoder(c: Mapping[str, Any], number, tied: bool, weight_bytes: float, kv_bytes: float) -> ModelCosts:
    """T5: of a decoding step only the decoder counts; the encoder and the keys and values of the source are done.

    The context is source and target together, since every layer attends to both.
    """
    d, heads, head_dim, vocab = number("d_model"), number("num_heads"), number("d_kv"), number("vocab_size")
    inner, encoder_layers = heads * head_dim, number("num_layers")
    layers = number("num_decoder_layers", default=encoder_layers)
    gated = str(c.get("feed_forward_proj", "relu")).startswith("gated-")
    mlp = (3 if gated else 2) * d * number("d_ff")
    once = layers * 2 * d * inner  # keys and values of the source
    encoder = encoder_layers * (4 * d * inner + mlp + 2 * d) + d
    return ModelCosts(
        hidden_size=d,
        num_layers=layers,
        vocab_size=vocab,
        query_group=1,
        kv_heads=heads,
        layer_parameters=layers * (6 * d * inner + mlp + 3 * d) + d,
        head_parameters=vocab * d,
        embedding_parameters=once + encoder + (0 if tied else vocab * d),
        kv_values=2 * inner,
        score_size=head_dim,
        value_size=head_dim,
        weight_bytes=weight_bytes,
        kv_bytes=kv_bytes,
    )


def _grouped_attention(number, d: int, heads: int, where: str) -> dict[str, int]:
    kv_heads = number("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise wrong("num_attention_heads", heads, f"a multiple of num_key_value_heads={kv_heads}", where)
    head_dim = number("head_dim", default=max(d // heads, 1))
    return {
        "parameters": d * head_dim * (2 * heads + 2 * kv_heads),
        "query_group": heads // kv_heads,
        "kv_heads": kv_heads,
        "kv_values": 2 * kv_heads * head_dim,
        "score_size": head_dim,
        "value_size": head_dim,
    }


def _latent_attention(number, d: int, heads: int, low_rank_queries: bool) -> dict[str, int]:
    """DeepSeek's MLA, decoded in its absorbed form: all heads share one latent key and value per token."""
    rank, rope = number("kv_lora_rank"), number("qk_rope_head_dim")
    nope, value = number("qk_nope_head_dim"), number("v_head_dim")
    q = heads * (nope + rope)
    if low_rank_queries:
        q_rank = number("q_lora_rank")
        queries = d * q_rank + q_rank * q
    else:
        queries = d * q
    return {
        "parameters": queries + d * (rank + rope) + rank * heads * (nope + value) + heads * value * d,
        "query_group": heads,
        "kv_heads": 1,
        "kv_values": rank + rope,
        "score_size": rank + rope,
        "value_size": rank,
    }


def _experts(number, d: int, layers: int) -> Experts | None:
    count = number(*_EXPERTS, default=0, least=0)
    if not count:
        return None
    chosen = number("num_experts_per_tok", "num_experts_per_token", "moe_topk")
    if chosen > count:
        raise ValueError(f"num_experts_per_tok={chosen} must be at most the {count} experts of a layer")
    inner = number("moe_intermediate_size", "intermediate_size")
    dense = number("first_k_dense_replace", default=0, least=0)
    if dense > layers:
        raise ValueError(f"first_k_dense_replace={dense} must be at most num_hidden_layers={layers}")
    every = number("moe_layer_freq", "decoder_sparse_step", default=1)
    return Experts((layers - dense) // every, count, chosen, 3 * d * inner)


def _windows(c: Mapping[str, Any], number, layers: int, where: str) -> tuple[int, int]:
    window = number("sliding_window", default=0, least=0)
    if not window or get(c, "use_sliding_window", bool, True, where) is False:
        return 0, 0
    kinds = c.get("layer_types")
    if isinstance(kinds, list):
        if len(kinds) != layers:
            raise ValueError(
                f"{where}: layer_types has {len(kinds)} entries; it must have one for each of {layers} layers"
            )
        return sum(kind == "sliding_attention" for kind in kinds), window
    every = number("sliding_window_pattern", default=0, least=0)  # one full layer in so many
    return (layers - layers // every if every else layers), window
