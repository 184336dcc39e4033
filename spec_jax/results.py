"""From one row of the decode state to the `Completion` that a caller sees."""

from __future__ import annotations

from typing import Any

import numpy as np

from spec_jax.decode_state import CONTEXT, LENGTH, STOP, Logprobs, Trace
from spec_jax.metrics import Completion, Logprob, Stats
from spec_jax.requests import Request
from spec_jax.text import StringStop
from spec_jax.verify import NEAR_TIE

REASONS = {STOP: "stop", LENGTH: "length", CONTEXT: "context"}


def completion(
    target: Any,
    request: Request,
    tokens: np.ndarray,
    trace: Trace,
    *,
    length: int,
    finish: int,
    cut: StringStop | None,
    nodes: int,
    cached: int,
) -> Completion:
    """The result of a row that has ended.

    Args:
      tokens: int32 [capacity], prompt and output.
      trace: of the row, leaves [capacity, ...].
      length: tokens of prompt and output; what lies beyond is ignored.
      finish: why it ended.
      cut: the stop string that ended it, if any.
      nodes: draft nodes per step.
      cached: prompt tokens that were not prefilled for this request.

    Raises:
      ValueError: where a token was chosen from logits that are not numbers.
    """
    new = slice(len(request.prompt), length)
    ids = tokens[new].tolist()
    accepted = trace.accepted[new].tolist()
    gaps = trace.gap[new].tolist()
    if any(gap != gap for gap in gaps):
        raise ValueError(
            f"{target.name} gave logits that are not numbers for prompt {request.prompt_index}; its weights are "
            f"damaged or overflow in {target.module.dtype}"
        )
    near_ties = sum(gap < NEAR_TIE[target.module.dtype] for gap in gaps)
    logprobs = None
    if request.params.logprobs is not None:
        logprobs = _logprobs(trace.logprobs, new, ids, request.params.logprobs)
    on_stop_id = finish == STOP and cut is None and bool(ids) and ids[-1] in request.stop_ids
    if cut is not None:
        text, stop_reason = cut.text, cut.string
    else:
        text = text_of(target, ids[:-1] if on_stop_id else ids)
        is_eos = on_stop_id and not request.params.ignore_eos and ids[-1] in target.eos_token_ids
        stop_reason = ids[-1] if on_stop_id and not is_eos else None
    return Completion(
        prompt_index=request.prompt_index,
        token_ids=ids,
        text=text,
        finish_reason=REASONS[finish],
        stop_reason=stop_reason,
        seed=request.seed,
        accepted=accepted,
        gaps=gaps,
        logprobs=logprobs,
        stats=stats_of(trace.drafted[new].tolist(), accepted, nodes, near_ties, cached),
    )


def untouched(target: Any, request: Request, nodes: int) -> Completion:
    """A row that may not emit anything: no token was asked for, or the prompt fills the context."""
    return Completion(
        prompt_index=request.prompt_index,
        token_ids=[],
        text=text_of(target, []),
        finish_reason="length" if request.params.max_tokens == 0 else "context",
        seed=request.seed,
        accepted=[],
        gaps=[],
        logprobs=None if request.params.logprobs is None else [],
        stats=Stats(acceptance_histogram=(0,) * (nodes + 1)),
    )


def text_of(target: Any, ids: list[int]) -> str | None:
    return None if target.tokenizer is None else target.tokenizer.decode(ids)


def stats_of(drafted: list[int], accepted: list[bool], nodes: int, near_ties: int = 0, cached: int = 0) -> Stats:
    """Counts of the tokens that were kept. `drafted` marks the first token of every step, see `Trace`."""
    starts = [i for i, count in enumerate(drafted) if count >= 0]
    histogram = [0] * (nodes + 1)
    drafts = 0
    for start, end in zip(starts, [*starts, len(drafted)][1:], strict=True):
        if drafted[start] > 0:
            drafts += 1
            histogram[sum(accepted[start:end])] += 1
    return Stats(
        num_steps=len(starts),
        num_drafts=drafts,
        num_draft_tokens=sum(drafted[start] for start in starts),
        num_accepted_tokens=sum(accepted),
        num_emitted_tokens=len(drafted),
        num_cached_tokens=cached,
        acceptance_histogram=tuple(histogram),
        near_ties=near_ties,
    )


def _logprobs(found: Logprobs, new: slice, ids: list[int], top: int) -> list[dict[int, Logprob]]:
    chosen, ranks = found.chosen[new].tolist(), found.rank[new].tolist()
    top_ids, values = found.top_ids[new, :top].tolist(), found.top[new, :top].tolist()
    out = []
    for token, value, rank, likely, their in zip(ids, chosen, ranks, top_ids, values, strict=True):
        entry = {token: Logprob(value, rank)}
        for other, other_value in zip(likely, their, strict=True):
            entry.setdefault(other, Logprob(other_value, 1 + their.index(other_value)))  # equal values, equal ranks
        out.append(entry)
    return out
