"""The bytes of a vocabulary's tokens, which decoding shows only as far as they are whole characters.

Three kinds of decoders are understood: byte-level ones, SentencePiece's with bytes in place of characters that the
vocabulary lacks, and Metaspace.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spec_jax.tokenizer import Tokenizer

_cache: weakref.WeakKeyDictionary[Tokenizer, tuple[list, list]] = weakref.WeakKeyDictionary()


def token_bytes(tokenizer: Tokenizer) -> tuple[list[bytes | None], list[bytes | None]]:
    """What every id adds to a text, and what it is at the start of one; None for special tokens and ids without token.

    A token may hold part of a character, which decoding does not show, so the decoder is inverted by its description.
    Then every token is decoded, alone and behind another one, to see that the description was read rightly. An added
    token that the decoder does not give back as it is written is None as well.

    Raises ValueError for a decoder that cannot be inverted.
    """
    if tokenizer in _cache:
        return _cache[tokenizer]
    decoder, added = tokenizer.describe_decoding()
    spell, head = _inverse(decoder)
    words: list[bytes | None] = [None] * tokenizer.vocab_size
    heads, anchor = list(words), None
    for i in range(tokenizer.vocab_size):
        token = None if i in tokenizer.special_ids else tokenizer.id_to_token(i)
        if token is not None and (i not in added or spell(token) == token.encode()):
            words[i], heads[i] = spell(token), head(token)
            if anchor is None and token.isascii() and token.isalnum():
                anchor = i
    if anchor is None:
        raise ValueError("the tokenizer has no token of ASCII letters or digits to try its decoder with")
    for i, word in enumerate(words):
        if word is not None:
            shown = tokenizer.decode([i]), tokenizer.decode([anchor, i])
            if shown != (_shown(heads[i]), _shown(heads[anchor] + word)):
                raise ValueError(f"the tokenizer decodes {tokenizer.id_to_token(i)!r} in a way that is not understood")
    _cache[tokenizer] = words, heads
    return words, heads


def _shown(text: bytes) -> str:
    return text.decode("utf-8", errors="replace")


def _inverse(decoder: dict[str, Any] | None) -> tuple[Callable[[str], bytes], Callable[[str], bytes]]:
    """From a token as the vocabulary spells it to its bytes inside a text, and to those at the start of one.

    Args:
      decoder: as `tokenizer.json` describes it.
    """
    steps = decoder["decoders"] if decoder and decoder["type"] == "Sequence" else [decoder]
    match steps:
        case [{"type": "ByteLevel"}]:

            def spell(token):
                return bytes(map(_BYTE_OF.get, token)) if _BYTE_OF.keys() >= set(token) else token.encode()

            return spell, spell
        case [{"type": "Metaspace", "replacement": mark, "prepend_scheme": scheme}]:

            def spell(token):
                return token.replace(mark, " ").encode()

            return spell, spell if scheme == "never" else lambda token: token.replace(mark, "").encode()
        case [
            {"type": "Replace", "pattern": {"String": mark}, "content": content},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            *rest,
        ] if len(mark) == 1 and rest in ([], [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]):

            def spell(token):
                byte = re.fullmatch("<0x([0-9A-Fa-f]{2})>", token)
                return bytes.fromhex(byte[1]) if byte else token.replace(mark, content).encode()

            return spell, (lambda token: spell(token).removeprefix(b" ")) if rest else spell
    raise ValueError(f"the bytes of tokens cannot be told for the tokenizer's decoder {decoder!r:.300}")


def _byte_alphabet() -> dict[str, int]:
    """The characters that byte-level vocabularies write bytes with: those that can be printed stand for themselves."""
    printable = [byte for byte in range(256) if 33 <= byte <= 126 or (byte >= 161 and byte != 173)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
