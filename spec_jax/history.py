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
        self._indices: dict[int, Any] = {}  # by depth
        if isinstance(texts, (str, bytes)) or not isinstance(texts, Iterable):
            raise ValueError(f"texts={texts!r:.80} must be a list of texts, each a list of token ids")
        self.add(*texts)

    def __len__(self) -> int:
        """Tokens that are kept."""
        return self._count

    def add(self, *texts: Sequence[int]) -> None:
        """Adds texts behind the others: all of them, or none where one is not a list of ids."""
        checked = [ids for ids in map(_checked, texts) if ids]
        for ids in checked:
            ids = ids[-self.max_tokens :]
            self._texts.append(ids)
            self._count += len(ids)
            self._indices = {}
        while self._count > self.max_tokens:
            self._count -= len(self._texts.popleft())

    def index(self, depth: int) -> Any:
        """The `SuffixIndex` of what is kept, on the default device; built where something was added."""
        if depth not in self._indices:
            import jax

            from spec_jax.suffix_index import build  # they take the backend, which the history need not

            self._indices[depth] = jax.device_put(build(self._texts, depth))
        return self._indices[depth]


def _checked(text: Any) -> tuple[int, ...]:
    """The ids of one text."""
    listed = text.tolist() if hasattr(text, "tolist") else text
    if isinstance(listed, (str, bytes)) or not isinstance(listed, Iterable):
        raise ValueError(f"a history holds texts, each a list of token ids, not {text!r:.80}; encode texts first, and "
                         f"give one text as [ids]")  # fmt: skip
    ids = tuple(listed)
    if not all(is_int(i) and 0 <= i < MAX_ID for i in ids):
        raise ValueError(f"a history holds token ids, from 0 to {MAX_ID - 1}, not {text!r:.80}; encode texts first")
    return ids
