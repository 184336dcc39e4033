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

OVERLAP = 8
"""Known tokens that are decoded again in front of new ones."""


@dataclasses.dataclass(frozen=True)
class StringStop:
    """A stop string was found: how many tokens the row keeps, the text in front of the string, and which it was."""

    count: int
    text: str
    string: str


class RowText:
    """The new text of one row, read as it grows: every look decodes a few tokens only, however long the text is.

    Args:
      tokenizer: None gives no text.
      stop: stop strings.
      min_tokens: a string that is complete before the token after these does not stop.
    """

    def __init__(self, tokenizer: Any, stop: tuple[str, ...] = (), min_tokens: int = 0):
        self._tokenizer = tokenizer
        self._stop = stop
        self._longest = max(map(len, stop), default=0)
        self._min_tokens = min_tokens
        # `_text` is the text of the first `_count` tokens, which end with a whole character.
        self._text, self._count = "", 0
        self._checked = 0
        self._final = 0  # characters in which no stop string can end any more
        self._sent = 0

    def _read(self, ids: list[int]) -> str:
        """The text of `ids`, all new tokens so far: the known text, and what the tokens behind it add.

        A decoder may treat the first token it sees in its own way, so a few known tokens are decoded along.
        """
        start = max(self._count - OVERLAP, 0)
        known, fresh = (self._tokenizer.decode(ids[start:end]) for end in (self._count, len(ids)))
        if not fresh.startswith(known):
            return self._tokenizer.decode(ids)
        text = self._text + fresh[len(known) :]
        if not text.endswith(INCOMPLETE):
            self._text, self._count = text, len(ids)
        return text

    def find_stop(self, ids: list[int]) -> StringStop | None:
        """The first token of `ids`, all new tokens so far, that completes a stop string; None if none does.

        Of several strings that are complete there, the one that begins first cuts the text.
        """
        first, self._checked = self._checked, len(ids)
        if not self._stop:
            return None
        for count in range(first + 1, len(ids) + 1):
            text = self._read(ids[:count])
            if count > self._min_tokens:
                # Where a string can begin that ends behind what has been looked at.
                found = [(text.find(s, max(self._final - len(s) + 1, 0)), s) for s in self._stop]
                found = [(at, string) for at, string in found if at >= 0]
                if found:
                    at, string = min(found)
                    return StringStop(count, text[:at], string)
            self._final = len(text.rstrip(INCOMPLETE))
        return None

    def piece(self, ids: list[int]) -> str:
        """What can be shown of `ids`, all new tokens so far, beyond the pieces given already.

        Held back are half a character at the end, and an end that may be the beginning of a stop string.
        """
        text = self._read(ids)
        safe = len(text.rstrip(INCOMPLETE))
        for at in range(max(safe - self._longest + 1, self._sent), safe):
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
