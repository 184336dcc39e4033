"""Drafts by text, from a model of any tokenizer: a loop on the host, for pairs that share too few tokens.

Every step of the target waits for the host, which decodes the texts, lets the draft model continue them and encodes the
continuations. It is exact like every drafter, and slow; `Stats.remark` says so.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.drafting.base import BaseDrafter, Draft


@dataclasses.dataclass(frozen=True)
class GivenDrafter(BaseDrafter):
    """Proposes its parameters: `tokens` int32 [batch, K] and `count` int32 [batch], new ones for every step.

    Attributes:
      num_nodes: K.
      source: where they come from.
    """

    num_nodes: int
    source: str

    @property
    def remark(self):
        return f"host loop: {self.source} drafts text, one step of the target at a time"

    def propose(self, params, state, view):
        return Draft(params["tokens"], params["count"]), state


class TextGuide:
    """Continues the texts in the slots of a batch with another model.

    Args:
      target, draft: loaded models with tokenizers.
      nodes: K, draft tokens of the target.
    """

    def __init__(self, target: Any, draft: Any, nodes: int):
        for model in (target, draft):
            if model.tokenizer is None:
                raise ValueError(f"use_heterogeneous_vocab='text' drafts by text, and {model.name} has no tokenizer")
        self._target, self._draft, self._nodes = target, draft, nodes

    def empty(self, batch: int) -> dict[str, jax.Array]:
        """The parameters of a `GivenDrafter` that proposes nothing."""
        return {"tokens": jnp.zeros((batch, self._nodes), jnp.int32), "count": jnp.zeros(batch, jnp.int32)}

    def drafts(self, texts: dict[int, list[int]], batch: int) -> dict[str, jax.Array]:
        """The parameters of the next step.

        Args:
          texts: by slot, the committed tokens.
        """
        from spec_jax.generation import generate  # which imports this module by the registry

        encoded = {}
        for slot, ids in texts.items():
            text = self._target.tokenizer.decode(ids, skip_special_tokens=False)
            ids = self._draft.tokenizer.encode(text)
            if ids and len(ids) + self._nodes < self._draft.max_model_len:
                encoded[slot] = ids
        tokens, count = np.zeros((batch, self._nodes), np.int32), np.zeros(batch, np.int32)
        if encoded:
            prompts = list(encoded.values())
            prompts += prompts[:1] * (batch - len(prompts))  # one batch size, one program
            found = generate(self._draft, prompts, None, {"max_tokens": self._nodes}, max_batch_size=batch)
            for slot, sequence in zip(encoded, found.sequences, strict=False):
                ids = self._target.tokenizer.encode(sequence.text, add_special_tokens=False)[: self._nodes]
                tokens[slot, : len(ids)], count[slot] = ids, len(ids)
        return {"tokens": jnp.asarray(tokens), "count": jnp.asarray(count)}
