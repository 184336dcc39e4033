"""The text of a row while it grows: stop strings wherever they end, and pieces that never hold half a character.

A row's text is always the decoding of all its tokens so far, never of one run alone: a character's bytes, and a stop
string, may be spread over tokens and over steps. Both questions are asked per token, so the answers do not depend on
how many tokens a step has accepted.
"""

from __future__ import annotations

import dataclasses
from typing import Any

INCOMPLETE = "\ufffd"
"""What the bytes of an unfinished character decode to."""


@dataclasses.dataclass(frozen=True)
class StringStop:
    """A stop string was found: how many tokens the row keeps, the text in front of the string, and which it was."""

    count: int
    text: str
    string: str


class RowText:
    """The new text of one row.

    Args:
      tokenizer: None gives no text.
      stop: stop strings.
      min_tokens: a string that is complete before the token after these does not stop.
    """

    def __init__(self, tokenizer: Any, stop: tuple[str, ...] = (), min_tokens: int = 0):
        self._tokenizer = tokenizer
        self._stop = stop
        self._min_tokens = min_tokens
        self._checked = 0
        self._floor: int | None = None
        self._sent = 0

    def find_stop(self, ids: list[int]) -> StringStop | None:
        """The first token of `ids`, all new tokens so far, that completes a stop string; None if none does.

        Of several strings that are complete there, the one that begins first cuts the text.
        """
        first, self._checked = self._checked, len(ids)
        if not self._stop or not self._search(ids):
            return None
        for count in range(first + 1, len(ids) + 1):
            found = self._search(ids[:count])
            if found is not None:
                at, string, text = found
                return StringStop(count, text[:at], string)
        return None

    def _search(self, ids: list[int]) -> tuple[int, str, str] | None:
        if len(ids) <= self._min_tokens:
            return None
        if self._floor is None:
            self._floor = len(self._tokenizer.decode(ids[: self._min_tokens])) if self._min_tokens else 0
        text = self._tokenizer.decode(ids)
        found = []
        for string in self._stop:
            # Searched from where a string that ends beyond the floor can begin.
            at = text.find(string, max(self._floor - len(string) + 1, 0))
            if at >= 0:
                found.append((at, string, text))
        return min(found, default=None)

    def piece(self, ids: list[int]) -> str:
        """What can be shown of `ids`, all new tokens so far, beyond the pieces given already.

        Held back are half a character at the end, and an end that may be the beginning of a stop string.
        """
        text = self._tokenizer.decode(ids)
        safe = len(text.rstrip(INCOMPLETE))
        longest = max(map(len, self._stop), default=0)
        for at in range(max(safe - longest + 1, self._sent), safe):
            if any(string.startswith(text[at:safe]) for string in self._stop):
                safe = at
                break
        return self._take(text, safe)

    def last_piece(self, text: str) -> str:
        """What is still to be shown of the final text."""
        return self._take(text, len(text))

    def _take(self, text: str, until: int) -> str:
        piece = text[self._sent : until]
        self._sent = max(self._sent, until)
        return piece
