"""What a learned drafter is made of: its sizes and switches, and the shapes of its parameters.

One frozen description per family, hashable and static under jit. The forward passes read it while decoding and while
training, the loaders build it from a published config, and the exporter writes it back.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from spec_jax.models.config import LlamaConfig, layer_specs, shapes_of


@dataclasses.dataclass(frozen=True)
class Head:
    """What all families share.

    Attributes:
      config: of the drafter's transformer layers, as of a model. `vocab_size` is the number of ids it can draft, `rope`
        and `max_position_embeddings` hold for its positions; Medusa uses its sizes alone.
      target_hidden: the size of one of the target's features.
      features: layers whose outputs are read, in the order of their concatenation; `models.llama.FINAL_NORM` (-1) for
        the final norm's output. "Entering layer i" in a published config is the output of layer i - 1 here.
      own_embedding: whether token embeddings are the drafter's; else the target's.
      own_head: whether the output head is the drafter's; else the target's.
      mapped: whether row i of the head is the target's id `draft_ids[i]`; else ids are the target's own.
      embedding_rows: rows of the drafter's own embedding, which takes the target's ids.
      dtype: "float32" or "bfloat16".
      packed: the parameters are packed for the CPU kernels.
    """

    config: LlamaConfig
    target_hidden: int
    features: tuple[int, ...] = (-1,)
    own_embedding: bool = False
    own_head: bool = False
    mapped: bool = False
    embedding_rows: int = 0
    dtype: str = "float32"
    packed: bool = False

    def param_shapes(self) -> dict[str, Any]:
        """The parameter tree in the plain layout, a nested dict of shapes; linear weights are [inputs, outputs].

        "embedding" [target ids, hidden], "lm_head" [draft ids, hidden] and "draft_ids" (int32) [draft ids] stand at
        the top where the description says that they are the drafter's own.
        """
        tables = {}
        if self.own_embedding:
            tables["embedding"] = (self.embedding_rows, self.config.hidden_size)
        if self.own_head:
            tables["lm_head"] = (self.config.vocab_size, self.config.hidden_size)
        if self.mapped:
            tables["draft_ids"] = (self.config.vocab_size,)
        return tables | self._body()

    def _body(self) -> dict[str, Any]:
        raise NotImplementedError

    def _layer(self, index: int, inputs: int | None = None, **more: tuple[int, ...]) -> dict[str, Any]:
        """The shapes of one transformer layer whose attention reads `inputs` numbers, with `more` of its own."""
        return shapes_of(layer_specs(self.config, "", f"layer_{index}", inputs))[f"layer_{index}"] | more


@dataclasses.dataclass(frozen=True)
class EagleHead(Head):
    """EAGLE-1 and EAGLE-2 (https://arxiv.org/abs/2401.15077): fc over [embedding; feature], then layers whose first has
    no norm in front of its attention. Its output stands for the target's feature behind the final norm.

    Attributes:
      fc_bias: whether fc has a bias.
    """

    fc_bias: bool = True

    def _body(self):
        size = self.config.hidden_size
        fc = {"fc": (size + self.target_hidden, size)} | ({"fc_bias": (size,)} if self.fc_bias else {})
        layers = {f"layer_{i}": self._layer(i) for i in range(self.config.num_layers)}
        layers["layer_0"].pop("attention_norm")
        return {"fc": fc} | layers


@dataclasses.dataclass(frozen=True)
class Eagle3Head(Head):
    """EAGLE-3 (https://arxiv.org/abs/2503.01840), 3.1 and P-EAGLE (https://arxiv.org/abs/2602.01469).

    Layer 0 attends over [norm(embedding); hidden_norm(g)]; further layers are ordinary ones.

    Attributes:
      norm_before_residual: the residual is hidden_norm(g) instead of g.
      fc_norm: None, "whole" (one norm over the concatenated features in front of fc) or "each" (one per feature).
      norm_output: the next step is fed norm(u) instead of u (EAGLE-3.1).
      mask_token: of P-EAGLE: the id whose embedding stands for tokens that are not known yet; None: token by token.
      mask_wide: the learned stand-in for unknown features is as wide as the concatenated features, and goes through fc.
      logit_scale: factor of the logits.
    """

    norm_before_residual: bool = False
    fc_norm: str | None = None
    norm_output: bool = False
    mask_token: int | None = None
    mask_wide: bool = False
    logit_scale: float = 1.0

    def _body(self):
        size, wide = self.config.hidden_size, self.target_hidden * len(self.features)
        fc = {"fc": (wide, size)}
        if self.fc_norm == "whole":
            fc["norm"] = (wide,)
        elif self.fc_norm == "each":
            fc |= {f"norm_{i}": (self.target_hidden,) for i in range(len(self.features))}
        if self.mask_token is not None:
            fc["mask_hidden"] = (wide if self.mask_wide else size,)
        layers = {f"layer_{i}": self._layer(i) for i in range(1, self.config.num_layers)}
        layers["layer_0"] = self._layer(0, 2 * size, hidden_norm=(size,))
        return {"fc": fc, "final_norm": (size,)} | layers


@dataclasses.dataclass(frozen=True)
class MtpHead(Head):
    """Multi-token prediction: DeepSeek-V3 (https://arxiv.org/abs/2412.19437), Qwen3-Next, MiMo, FastMTP
    (https://arxiv.org/abs/2509.18362).

    Module i is fc over [norm(embedding); norm(hidden)], one ordinary layer and a norm in front of the head. Step k runs
    module k modulo their number.

    Attributes:
      hidden_first: fc reads [norm(hidden); norm(embedding)] (MiMo).
      post_norm: the next step is fed the output behind the last norm (Qwen3-Next), not in front of it (DeepSeek in
        vLLM).
      zero_first: the embedding of position 0 is zero (DeepSeek in vLLM).
    """

    hidden_first: bool = False
    post_norm: bool = False
    zero_first: bool = False

    def _body(self):
        size, wide = self.config.hidden_size, self.target_hidden
        more = {"embedding_norm": (size,), "hidden_norm": (wide,), "fc": (size + wide, size), "output_norm": (size,)}
        return {f"layer_{i}": self._layer(i, **more) for i in range(self.config.num_layers)}


@dataclasses.dataclass(frozen=True)
class MedusaHead(Head):
    """Medusa (https://arxiv.org/abs/2401.10774): head i guesses the token i + 2 places ahead from one feature, through
    residual blocks x + silu(fc(x)).

    Attributes:
      num_heads: heads, which is the most that a chain drafts.
      num_blocks: residual blocks of each head.
      bias: whether their products have one.
      head_each: with `own_head`, every head has an output head of its own, "lm_head_i"; else one for all.
    """

    num_heads: int = 4
    num_blocks: int = 1
    bias: bool = True
    head_each: bool = False

    def param_shapes(self):
        shapes = super().param_shapes()
        if self.head_each and "lm_head" in shapes:
            table = shapes.pop("lm_head")
            shapes |= {f"lm_head_{i}": table for i in range(self.num_heads)}
        return shapes

    def _body(self):
        size = self.target_hidden
        block = {"fc": (size, size)} | ({"fc_bias": (size,)} if self.bias else {})
        return {f"block_{i}_{j}": dict(block) for i in range(self.num_heads) for j in range(self.num_blocks)}


@dataclasses.dataclass(frozen=True)
class BlockHead(Head):
    """The backbone of block drafters, DFlash (https://arxiv.org/abs/2602.06036): ordinary layers over a block of the
    last token and mask tokens, whose K and V also come from the target's features.

    Attributes:
      block_size: rows of the block as trained: the last token and the mask tokens; fewer may be run.
      mask_token: the id whose embedding stands for tokens that are not known yet.
      sample_from_anchor: whether the row of the last token drafts too (DSpark): K is the block size then.
      windows: per layer how many positions in front of its own it sees, None: all; empty: all layers see all.
      causal: whether rows of the block see only those in front of them, per layer; empty: none is.
    """

    block_size: int = 8
    mask_token: int = 0
    sample_from_anchor: bool = False
    windows: tuple[int | None, ...] = ()
    causal: tuple[bool, ...] = ()

    def _body(self):
        size = self.config.hidden_size
        fc = {"fc": (self.target_hidden * len(self.features), size)}
        layers = {f"layer_{i}": self._layer(i) for i in range(self.config.num_layers)}
        return {"fc": fc, "context_norm": (size,), "final_norm": (size,)} | layers
