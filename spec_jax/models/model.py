"""A loaded target or draft model: module, parameters, tokenizer and the ids that end a text."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spec_jax.models.config import LlamaConfig
    from spec_jax.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """What `load_model` returns. Compared by identity: two loads of one checkpoint are two models.

    Attributes:
      module: the Flax Linen module, frozen and hashable, so it can be a static argument of `jax.jit`.
      params: nested dict of arrays in the module's dtype; paths as in `spec_jax.models.config.tensor_specs`, or in the
        layout of `spec_jax.models.packing` where `module.packed`.
      tokenizer: None where the checkpoint has none that can be used; prompts must then be token ids.
      eos_token_ids: every id that ends a text, ascending; empty if the checkpoint names none.
      name: the name or path that was asked for.
      max_model_len: prompt plus output never exceed this many tokens.
      vocab_size: ids 0..vocab_size-1 can be used. The embedding may hold more rows than that, because checkpoints pad
        it; the padded rows mean nothing and must be neither fed nor emitted.
    """

    module: Any
    params: dict[str, Any] = dataclasses.field(repr=False)  # printing every weight would take minutes
    tokenizer: Tokenizer | None
    eos_token_ids: tuple[int, ...]
    name: str
    max_model_len: int
    vocab_size: int

    def __post_init__(self):
        rows = self.module.config.vocab_size
        if not 1 <= self.vocab_size <= rows:
            raise ValueError(f"vocab_size={self.vocab_size!r} must be between 1 and the embedding's {rows} rows")
        if self.max_model_len < 1:
            raise ValueError(f"max_model_len={self.max_model_len!r} must be a positive integer")

    @property
    def config(self) -> LlamaConfig:
        return self.module.config
