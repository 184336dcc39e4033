"""Two vocabularies side by side: which tokens of one are tokens of the other, by their bytes.

Timor et al., speculative decoding for heterogeneous vocabularies (https://arxiv.org/abs/2502.05202): a draft model
with another tokenizer proposes what both vocabularies have, and reads tokens that it lacks by a piece of their text.
"""

from __future__ import annotations

import weakref
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.token_bytes import token_bytes

LEAST_SHARED = 0.05
"""Share of the draft model's tokens that the target must have, so that token-level drafting makes sense."""


@flax.struct.dataclass
class VocabularyMap:
    """From the target's ids to the draft model's.

    Attributes:
      feed: int32 [target ids], the draft token that is read in place of each: the same one, else the last piece of its
        text.
      shared: int32 [target ids], the same token, -1 where the draft model has none.
    """

    feed: jax.Array
    shared: jax.Array


_kept: weakref.WeakKeyDictionary[Any, weakref.WeakKeyDictionary[Any, VocabularyMap]] = weakref.WeakKeyDictionary()


def kept_map(target: Any, draft: Any) -> VocabularyMap:
    """`map_vocabulary` of two models, which takes a quarter of a second, for as long as both are there."""
    of_target = _kept.setdefault(target, weakref.WeakKeyDictionary())
    if draft not in of_target:
        of_target[draft] = map_vocabulary(target, draft, target.config.vocab_size)
    return of_target[draft]


def map_vocabulary(target: Any, draft: Any, rows: int) -> VocabularyMap:
    """The map between two loaded models, both with tokenizers.

    End-of-text tokens stand for each other. Where several tokens are spelled alike, the lowest id counts.

    Args:
      rows: rows of the target's head; ids beyond its tokenizer are in no other vocabulary.

    Raises:
      ValueError: a model without a tokenizer, one whose tokens' bytes cannot be told, or too little in common.
    """
    for model in (target, draft):
        if model.tokenizer is None:
            raise ValueError(f"use_heterogeneous_vocab compares tokenizers, and {model.name} has none")
    ours, theirs = token_bytes(target.tokenizer)[0], token_bytes(draft.tokenizer)[0]
    place: dict[bytes, int] = {}
    for i, word in enumerate(theirs):
        if word:
            place.setdefault(word, i)
    shared = np.full(rows, -1, np.int32)
    for i, word in enumerate(ours):
        if word is not None:
            shared[i] = place.get(word, -1)
    first = {}
    for i in np.flatnonzero(shared >= 0):  # a draft token has one meaning
        if first.setdefault(shared[i], i) != i:
            shared[i] = -1
    share = len(first) / max(len(place), 1)
    if share < LEAST_SHARED:
        raise ValueError(f"{draft.name} shares {share:.1%} of its tokens with {target.name}, too few to draft token by "
                         f"token; use_heterogeneous_vocab='text' drafts by text")  # fmt: skip
    if target.eos_token_ids and draft.eos_token_ids:
        shared[list(target.eos_token_ids)] = draft.eos_token_ids[0]
    feed = np.maximum(shared, 0)
    for i in np.flatnonzero(shared[: len(ours)] < 0):
        text = (ours[i] or b"").decode("utf-8", errors="ignore")
        pieces = draft.tokenizer.encode(text, add_special_tokens=False) if text else []
        feed[i] = pieces[-1] if pieces else 0
    return VocabularyMap(jnp.asarray(feed), jnp.asarray(shared))
