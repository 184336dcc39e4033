"""Texts of the past that drafters may copy from: other requests, earlier steps of an agent, a corpus."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from typing import Any

from spec_jax.checks import is_int

MAX_ID = 2**31


class TokenHistory:
    """Token ids of past texts, oldest first; what does not fit any more is forgotten text by text.

    It grows between calls, where its owner says so:

        history = spec_jax.TokenHistory()
        config = {"method": "suffix", "history": history}
        result = spec_jax.generate(target, prompts, config)
        history.add(*(sequence.token_ids for sequence in result.sequences))

    Args:
      texts: of token ids.
      max_tokens: that are kept, at least 1. A longer text is kept from its end.

    Raises:
      ValueError: a max_tokens that is no positive integer, or texts that are not ids.
    """

    def __init__(self, texts: Iterable[Sequence[int]] = (), max_tokens: int = 1_000_000):
        if not is_int(max_tokens) or max_tokens < 1:
            raise ValueError(f"max_tokens={max_tokens!r} must be a positive integer: tokens that are kept")
        self.max_tokens = max_tokens
        self._texts: collections.deque[tuple[int, ...]] = collections.deque()
        self._count = 0
        self._index: tuple[int, Any] | None = None
        self.add(*texts)

    def __len__(self) -> int:
        """Tokens that are kept."""
        return self._count

    def add(self, *texts: Sequence[int]) -> None:
        """Adds texts behind the others."""
        for text in texts:
            ids = tuple(text.tolist() if hasattr(text, "tolist") else text)
            if isinstance(text, str) or not all(is_int(i) and 0 <= i < MAX_ID for i in ids):
                raise ValueError(f"a history holds token ids, not {text!r:.80}; encode texts first")
            ids = ids[-self.max_tokens :]
            self._texts.append(ids)
            self._count, self._index = self._count + len(ids), None
        while self._count > self.max_tokens:
            self._count -= len(self._texts.popleft())

    def index(self, depth: int) -> Any:
        """The `SuffixIndex` of what is kept, on the default device; built where something was added."""
        if self._index is None or self._index[0] != depth:
            import jax

            from spec_jax.suffix_index import build  # they take the backend, which the history need not

            self._index = depth, jax.device_put(build(self._texts, depth))
        return self._index[1]
