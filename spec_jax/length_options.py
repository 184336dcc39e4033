"""Checks of the options of a `SpeculativeConfig` that say how far is drafted."""

from __future__ import annotations

from typing import Any

from spec_jax.checks import is_int, is_number, settle

SCHEDULES = ("constant", "heuristic", "heuristic_transient")
LOOKING_AHEAD = ("block", "traversal")
"""Rules that judge a sampled token by what follows it: a length that depends on what was drawn is none of theirs."""


def check_lengths(config: Any) -> None:
    """Schedules, tables and thresholds, and what goes with them."""
    schedule, table = config.num_assistant_tokens_schedule, config.num_speculative_tokens_per_batch_size
    if schedule not in (None, *SCHEDULES):
        raise ValueError(f"num_assistant_tokens_schedule={schedule!r} must be one of {', '.join(SCHEDULES)}")
    schedule = None if schedule == "constant" else schedule
    if table is not None:
        settle(config, "num_speculative_tokens_per_batch_size", _checked_table(table, config))
    chosen = [
        name
        for name, given in (
            ("verify_width='auto'", config.verify_width == "auto"),
            (f"num_assistant_tokens_schedule={schedule!r}", schedule),
            ("num_speculative_tokens_per_batch_size", table is not None),
        )
        if given
    ]
    if len(chosen) > 1:
        raise ValueError(f"{' and '.join(chosen)} all choose the draft length; give one of them")
    if chosen and config.drafts_tree:
        fix = "; give rest_use_tree=False" if config.method == "rest" else "; leave it out"
        raise ValueError(f"{chosen[0]} chooses how much of a chain is verified, and method={config.method!r} drafts a "
                         f"tree here{fix}")  # fmt: skip
    if schedule == "heuristic" and config.rule != "coupled":
        raise ValueError(f"num_assistant_tokens_schedule='heuristic' hands a draft length on to the next request, "
                         f"on whose noise it depends where the two have one seed; rejection_sample_method="
                         f"{config.rule!r} would lose the law: use 'heuristic_transient', or 'coupled'")  # fmt: skip
    for name in ("assistant_confidence_threshold", "draft_survival_threshold"):
        value = getattr(config, name)
        if value is None:
            continue
        if not is_number(value) or not 0 <= value <= 1:
            raise ValueError(f"{name}={value!r} must be a number from 0 to 1")
        last = config.drafters[1] if config.method == "hybrid" else config
        if last.method not in ("draft_model", "layer_skip") or config.drafts_tree or _by_text(last):
            raise ValueError(f"{name} stops a model that drafts a chain token by token (draft_model, layer_skip); "
                             f"method={config.method!r} does not, as it was asked for here")  # fmt: skip
        if config.draft_sample_method == "probabilistic" and config.verify_width == "auto":
            raise ValueError(f"{name} lets the draft length depend on sampled tokens, and verify_width='auto' may drop "
                             f"a draft for being short, which changes the law of tokens; give one of them")  # fmt: skip
        if config.draft_sample_method == "probabilistic" and config.rule in LOOKING_AHEAD:
            raise ValueError(f"{name} lets the draft length depend on sampled tokens, and rejection_sample_method="
                             f"{config.rule!r} judges tokens by what follows them; use 'standard'")  # fmt: skip
    if None not in (config.assistant_confidence_threshold, config.draft_survival_threshold):
        raise ValueError("give assistant_confidence_threshold or draft_survival_threshold, not both")


def _by_text(config: Any) -> bool:
    return config.use_heterogeneous_vocab == "text"


def _checked_table(table: Any, config: Any) -> tuple[tuple[int, int, int], ...]:
    own = config.method == "none"  # the drafter may be the caller's own, whose length is not known here
    most = float("inf") if own else config.num_speculative_tokens
    rows = table if isinstance(table, (list, tuple)) else ()
    ok = bool(rows) and all(isinstance(row, (list, tuple)) and len(row) == 3 and all(map(is_int, row)) for row in rows)
    if not ok or not all(1 <= low <= high and 0 <= k <= most for low, high, k in rows):
        raise ValueError(f"num_speculative_tokens_per_batch_size={table!r:.200} must be a list of [lowest, highest, K] "
                         f"with 1 <= lowest <= highest and K from 0 to num_speculative_tokens={most}")  # fmt: skip
    ordered = sorted(tuple(int(x) for x in row) for row in rows)
    for (_, high, _), (low, _, _) in zip(ordered, ordered[1:], strict=False):
        if low <= high:
            raise ValueError(f"num_speculative_tokens_per_batch_size={table!r:.200} says twice what {low} rows draft")
    return tuple(ordered)
