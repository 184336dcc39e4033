"""Shows which tokens of a text were drafted and accepted, and which the target chose itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spec_jax.text import INCOMPLETE

DRAFTED_STYLE = "green"
TARGET_STYLE = "bold yellow"


def token_pieces(tokenizer: Any, token_ids: Sequence[int]) -> list[str]:
    """The text each token adds. Inside a character that is "", and the token that completes it adds it whole."""
    pieces, shown = [], ""
    for count in range(1, len(token_ids) + 1):
        text = tokenizer.decode(list(token_ids[:count]))
        unfinished = text.endswith(INCOMPLETE) and count < len(token_ids)
        if unfinished or not text.startswith(shown):
            pieces.append("")  # decoders may revise the end of a text; the next stable prefix catches up
            continue
        pieces.append(text[len(shown) :])
        shown = text
    return pieces


def coloured(tokenizer: Any, token_ids: Sequence[int], accepted: Sequence[bool]) -> Any:
    """A `rich` text with accepted drafts in one colour and the target's own tokens in another."""
    from rich.text import Text

    text = Text()
    for piece, was_drafted in zip(token_pieces(tokenizer, token_ids), accepted, strict=True):
        text.append(piece, style=DRAFTED_STYLE if was_drafted else TARGET_STYLE)
    return text


def bracketed(tokenizer: Any, token_ids: Sequence[int], accepted: Sequence[bool]) -> str:
    """The same without colour: runs of accepted drafts stand in ⟦ ⟧."""
    parts, inside = [], False
    for piece, was_drafted in zip(token_pieces(tokenizer, token_ids), accepted, strict=True):
        if piece and was_drafted != inside:
            parts.append("⟦" if was_drafted else "⟧")
            inside = was_drafted
        parts.append(piece)
    return "".join(parts) + ("⟧" if inside else "")


def legend(colour: bool) -> Any:
    """One line that explains the view."""
    from rich.text import Text

    if not colour:
        return Text("⟦drafted and accepted⟧ chosen by the target itself")
    return Text.assemble(("drafted and accepted", DRAFTED_STYLE), "  ", ("chosen by the target itself", TARGET_STYLE))
