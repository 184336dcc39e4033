"""`stream`: the text of one prompt in pieces, from segments of the same compiled loop that `generate` runs whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from spec_jax.generation import check_config, prepare
from spec_jax.metrics import GenerateResult
from spec_jax.requests import encode_prompts, make_requests, messages_of, per_prompt

LONGEST_SEGMENT = 4
"""Steps between two looks at the text once the first pieces are out; a look costs the host a round trip."""


class TextStream(Iterator[str]):
    """Pieces of text, as early as they are certain; joined they are the text that `generate` gives.

    A piece never holds half a character, nor what may be the beginning of a stop string. Ending early, by `close` or by
    dropping the stream, ends the decoding: nothing runs ahead of the pieces.

    Attributes:
      result: the `GenerateResult`, once the last piece has been taken; None before.
    """

    def __init__(self, call: Any):
        self.result: GenerateResult | None = None
        self._pieces = self._run(call)

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """Ends the decoding and frees its cache."""
        self._pieces.close()

    def _run(self, call: Any) -> Iterator[str]:
        slots = call.start()
        found, steps = {}, 1
        slots.fill()
        text = slots.row_text(0) if call.active else None
        while slots.busy:
            found = dict(slots.advance(steps))
            # One step at first, so that the first piece comes as early as it can.
            steps = min(2 * steps, LONGEST_SEGMENT)
            piece = text.piece(slots.new_ids(0)) if slots.busy else text.last_piece(found[0].text)
            if piece:
                yield piece
        self.result = call.result(slots, found)


def stream(
    target: Any,
    prompt: Any,
    speculative_config: Any = None,
    sampling: Any = None,
    verify_width: int | str | None = None,
    exact: bool | None = None,
    drafter: tuple[Any, Any] | None = None,
) -> TextStream:
    """Generates the continuation of one prompt and yields its text piece by piece.

    Args:
      prompt: a string, a list of token ids or a list of messages; a list with one of these in it does as well.
      others: as in `generate`; n must be 1.

    Returns:
      A `TextStream`; its `result` tells afterwards what `generate` would have returned.

    Raises:
      ValueError: at once, for bad input, for several prompts, and for a target without a tokenizer.
    """
    if target.tokenizer is None:
        raise ValueError(f"{target.name} has no tokenizer, so there is no text to stream; use generate")
    if not isinstance(prompt, (str, list, tuple, np.ndarray)):
        raise ValueError(f"prompt must be a string, a list of token ids or a list of messages, not {prompt!r}")
    prompts = list(prompt) if isinstance(prompt, (list, tuple)) and _holds_prompts(prompt) else [prompt]
    if len(prompts) != 1:
        raise ValueError(f"stream takes one prompt, not {len(prompts)}; use generate for several")
    config = check_config(speculative_config, drafter, verify_width)
    ids = encode_prompts(target, prompts)
    requests = make_requests(target, ids, per_prompt(sampling, 1), messages_of(prompts))
    if len(requests) != 1:
        raise ValueError(f"n={requests[0].params.n} samples cannot be streamed as one text; use n=1, or generate")
    return TextStream(prepare(target, requests, config, verify_width, exact, 1, drafter))


def _holds_prompts(prompt: Any) -> bool:
    """Whether a list holds prompts, rather than token ids or messages."""
    return len(prompt) > 0 and all(isinstance(p, (str, list, tuple)) for p in prompt)
