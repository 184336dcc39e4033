"""Acceptance statistics with vLLM's definitions, and the results that callers see.

A "draft" is a verification step that had at least one draft token. `mean_acceptance_length` counts the bonus or
residual token of every draft; a quotient without drafts is None, not 0 or NaN.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spec_jax.session import Session


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stats:
    """Counts of one sequence or of a whole call; totals are sums of counts, never means of ratios.

    Attributes:
      num_steps: verification steps that emitted a token (target forward passes of a row after prefill).
      num_drafts: steps with at least one draft token.
      num_draft_tokens: draft tokens proposed to verification.
      num_accepted_tokens: draft tokens accepted and emitted.
      num_emitted_tokens: tokens returned.
      num_cached_tokens: prompt tokens that were not prefilled for this sequence: a session's cache, another sample of
        the same prompt, or another prompt with the same beginning held them.
      acceptance_histogram: drafts by the number of their tokens accepted, index 0..K.
      near_ties: emitted tokens whose lead over the runner-up was below `verify.NEAR_TIE`: where greedy text may differ
        between programs whose logits are not bit-identical. Sampled rows under `standard` are not counted.
      num_forward_rows: rows of the target's forward passes in the whole call, prefill, idle slots and padding
        included; 0 for a single sequence.
      compile_seconds, prefill_seconds, decode_seconds: wall clock of the call; 0 for a single sequence.
      remark: of the call, what must be known beside its figures, such as "synthetic"; else empty.
    """

    num_steps: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_emitted_tokens: int = 0
    num_cached_tokens: int = 0
    acceptance_histogram: tuple[int, ...] = (0,)
    near_ties: int = 0
    num_forward_rows: int = 0
    compile_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    remark: str = ""

    @property
    def mean_acceptance_length(self) -> float | None:
        """1 + accepted tokens per draft; None where nothing was drafted."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else None

    @property
    def draft_acceptance_rate(self) -> float | None:
        """Accepted share of the draft tokens; None where nothing was drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def per_position_acceptance_rate(self) -> list[float] | None:
        """Share of drafts whose token at position i was accepted, i = 0..K-1: unconditional, never increasing."""
        if not self.num_drafts:
            return None
        counts = self.acceptance_histogram
        return [sum(counts[i + 1 :]) / self.num_drafts for i in range(len(counts) - 1)]

    @property
    def tokens_per_second(self) -> float | None:
        """Emitted tokens per second of decoding (without compilation and prefill); None where nothing was timed."""
        return self.num_emitted_tokens / self.decode_seconds if self.decode_seconds > 0 else None

    def to_dict(self) -> dict:
        """Every count and every ratio, ready for JSON."""
        ratios = (
            "mean_acceptance_length",
            "draft_acceptance_rate",
            "per_position_acceptance_rate",
            "tokens_per_second",
        )
        return dataclasses.asdict(self) | {name: getattr(self, name) for name in ratios}


def total(parts: Sequence[Stats]) -> Stats:
    """The sum of several statistics."""
    width = max((len(p.acceptance_histogram) for p in parts), default=1)
    histogram = [0] * width
    for part in parts:
        for i, count in enumerate(part.acceptance_histogram):
            histogram[i] += count
    sums = {
        f.name: sum(getattr(p, f.name) for p in parts)
        for f in dataclasses.fields(Stats)
        if f.name not in ("acceptance_histogram", "remark")
    }
    remark = "; ".join(dict.fromkeys(p.remark for p in parts if p.remark))
    return Stats(**sums, acceptance_histogram=tuple(histogram), remark=remark)


@dataclasses.dataclass(frozen=True)
class Logprob:
    """Natural-log probability of a token under the raw logits, and its rank among all ids, 1 for the likeliest."""

    logprob: float
    rank: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """One generated continuation of one prompt.

    Attributes:
      prompt_index: which prompt it continues.
      token_ids: the new tokens; a stop token, or the token that completes a stop string, is the last of them.
      text: their text without the stop token or stop string, None where the model has no tokenizer.
      finish_reason: "stop", "length" (max_tokens) or "context" (the model's context is full).
      stop_reason: the id of `stop_token_ids` or the string of `stop` that ended it; None for the model's own
        end-of-text ids, for options that leave no token, and for the other reasons.
      seed: the seed that gives this text again with n=1.
      accepted: per token, True where a draft token was accepted.
      gaps: per token, its lead over the runner-up in units of the logits after the options: where it is tiny, programs
        whose logits are not bit-identical may write another text. inf where the rule has none.
      logprobs: per token {token id: Logprob} of the token itself, first, and of the likeliest ids, where asked for.
      stats: this sequence's counts.
    """

    prompt_index: int
    token_ids: list[int]
    text: str | None
    finish_reason: str
    stop_reason: int | str | None = None
    seed: int
    accepted: list[bool]
    gaps: list[float] = dataclasses.field(repr=False, default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    stats: Stats


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateResult:
    """What `generate` returns.

    Attributes:
      sequences: prompt-major, n per prompt.
      exactness: "E2", "E1" or "E0", the level that this call ran under (see README); "lossy" under a rule that changes
        the output.
      verify_width: rows of one verification step.
      stats: sums over the sequences, and the call's times.
      session: continues the sequences, see `session.Session`.
    """

    sequences: list[Completion]
    exactness: str
    verify_width: int
    stats: Stats
    session: Session | None = dataclasses.field(default=None, repr=False, compare=False)
