"""Prompts that begin alike are prefilled once: a snapshot of the caches behind the shared beginning serves the others.

A snapshot is taken where a prefill chunk ends, so a prompt that starts from one runs exactly the chunks it would have
run alone, less the shared ones: nothing can differ, whatever the exactness level.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

from spec_jax.decode_state import Prefilled

KEPT = 4
"""Snapshots kept at once; each is a cache of one row."""


class SharedPrefixes:
    """The beginnings that the prompts still to come have in common.

    Args:
      prompts: the token ids of every prefill to come, in order.
      chunk: tokens of a prefill chunk.
    """

    def __init__(self, prompts: Sequence[Sequence[int]], chunk: int):
        self._chunk = chunk
        self._waiting: collections.Counter[int] = collections.Counter()
        self._kept: collections.OrderedDict[tuple[int, ...], Prefilled] = collections.OrderedDict()
        for prompt in prompts:
            self._waiting.update(self._keys(prompt))

    def _keys(self, prompt: Sequence[int]) -> list[int]:
        """One hash per whole chunk of the prompt; a chunk's hash covers everything before it too."""
        keys, key = [], 0
        for end in range(self._chunk, len(prompt), self._chunk):  # the last token is not prefilled
            key = hash((key, tuple(prompt[end - self._chunk : end])))
            keys.append(key)
        return keys

    def take(self, prompt: Sequence[int]) -> tuple[Prefilled | None, int, list[int]]:
        """Called once per prefill: where to start from, and where others want a snapshot.

        Returns:
          the longest snapshot of a beginning of `prompt`, or None; its length; and the longer lengths, ascending, at
          which some of the prompts to come part from this one.
        """
        keys = self._keys(prompt)
        self._waiting.subtract(keys)
        waiting = [self._waiting[key] for key in keys] + [0]
        ends = [(i + 1) * self._chunk for i in range(len(keys)) if waiting[i] > waiting[i + 1]]
        found, length = None, 0
        for tokens in list(self._kept):
            if len(tokens) > length and tokens == tuple(prompt[: len(tokens)]):
                found, length = self._kept[tokens], len(tokens)
        if found is not None:
            self._kept.move_to_end(tuple(prompt[:length]))
            if not waiting[length // self._chunk - 1]:  # nobody else will ask for it
                del self._kept[tuple(prompt[:length])]
        return found, length, [end for end in ends if end > length]

    def keep(self, tokens: Sequence[int], prefilled: Prefilled) -> None:
        """Stores the snapshot behind `tokens`."""
        self._kept[tuple(tokens)] = prefilled
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)
