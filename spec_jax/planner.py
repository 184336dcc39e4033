"""The draft length for a model, a chip and a load: tile bound, roofline and acceptance in one table.

A verification step of K draft tokens puts (K + 1) x G query rows into the attention tile, G query heads per key/value
head; beyond the tile the cache is read twice. Within it the best K weighs the tokens that a step is expected to emit
against the time of verifying and of drafting them. Acceptance and the speed-up follow Leviathan et al.
(https://arxiv.org/abs/2211.17192), whose formulas are here too. Plain Python: no backend is loaded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from spec_jax.checks import check_counts, is_int
from spec_jax.devices import Device
from spec_jax.draft_costs import DraftCosts
from spec_jax.model_costs import ModelCosts
from spec_jax.roofline import Load, step_time

MAX_DRAFT_TOKENS = 127
"""Draft lengths beyond this are not looked at, whatever the tile: one tile of 128 rows with a query group of one."""


def max_draft_tokens(groups: int, tile: int) -> int:
    """The longest chain whose rows fit one attention tile: (K + 1) * groups <= tile.

    Args:
      groups: query heads per key/value head.
      tile: query rows of one attention tile.

    Raises:
      ValueError: where not even plain decoding fits.
    """
    check_counts(groups=groups, tile=tile)
    if groups > tile:
        raise ValueError(
            f"groups={groups} query heads per key/value head exceed tile={tile}: plain decoding needs "
            f"{-(-groups // tile)} tiles already; give a tile of {groups} rows or more"
        )
    return tile // groups - 1


@dataclasses.dataclass(frozen=True)
class AcceptanceRates:
    """The probability that a draft token is accepted, given that all before it were.

    Attributes:
      rates: by position, from the first draft token on; the last one holds for all later positions. One number is
        Leviathan's alpha.
    """

    rates: tuple[float, ...]

    def __post_init__(self):
        if not self.rates:
            raise ValueError("acceptance needs one rate at least")
        for rate in self.rates:
            if not 0 <= rate <= 1:
                raise ValueError(f"acceptance={rate!r} must be a probability, from 0 to 1")

    def expected_tokens(self, length: int) -> float:
        """Tokens of a step with `length` draft tokens, the target's own one included (mean acceptance length)."""
        total, alive = 1.0, 1.0
        for position in range(length):
            alive *= self.rates[min(position, len(self.rates) - 1)]
            total += alive
        return total

    @classmethod
    def from_mean_length(cls, mean: float, length: int) -> AcceptanceRates:
        """The one rate at which steps of `length` draft tokens emit `mean` tokens on average."""
        if not 1 <= mean <= length + 1:
            raise ValueError(f"a mean acceptance length of {mean!r} must be from 1 to {length + 1} at K={length}")
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if cls((middle,)).expected_tokens(length) < mean else (low, middle)
        return cls(((low + high) / 2,))


def walltime_improvement(alpha: float, gamma: int, c: float = 0.0) -> float:
    """Leviathan's theorem 3.8: speed-up of `gamma` draft tokens, each at `c` of the target's time."""
    return AcceptanceRates((alpha,)).expected_tokens(gamma) / (gamma * c + 1)


def operations_factor(alpha: float, gamma: int, c_hat: float = 0.0) -> float:
    """Leviathan's theorem 3.11: arithmetic operations per token, of those of plain decoding.

    Args:
      c_hat: operations per token of the drafter, of those of the target.
    """
    return (gamma * c_hat + gamma + 1) / AcceptanceRates((alpha,)).expected_tokens(gamma)


def optimal_gamma(alpha: float, c: float, most: int = 1000) -> int:
    """The number of draft tokens with the largest `walltime_improvement`, 0 where none improves."""
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha={alpha!r} must be a probability, from 0 to 1")
    if c < 0 or (alpha == 1 and c == 0):
        raise ValueError(f"c={c!r} must be positive; with alpha=1 and c=0 more is always better")
    return max(range(most + 1), key=lambda gamma: walltime_improvement(alpha, gamma, c))


@dataclasses.dataclass(frozen=True)
class Length:
    """One draft length under one load.

    Attributes:
      num_draft_tokens: K.
      expected_tokens: per step, the target's own included.
      verify_seconds, draft_seconds: of one step.
      speedup: over plain decoding.
      within_tile: whether (K + 1) * G rows fit one tile.
      fill: share of the tiles' rows that hold a query.
      full_tokens: draft tokens that the same tiles could hold.
      full_seconds: of verifying those: what filling the tile would add is `full_seconds - verify_seconds`.
      bound: what bounds products and attention of the verification.
    """

    num_draft_tokens: int
    expected_tokens: float
    verify_seconds: float
    draft_seconds: float
    speedup: float
    within_tile: bool
    fill: float
    full_tokens: int
    full_seconds: float
    bound: tuple[str, str]

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What `plan` found for one load.

    Attributes:
      load: the load.
      max_draft_tokens: the tile bound, at most the longest length looked at; 0 where plain decoding overflows the tile.
      plain_seconds: of a plain decoding step.
      lengths: of every draft length from 0 on, also beyond the tile.
      best: the fastest within the tile; K = 0 where speculation does not pay.
      best_anywhere: the fastest of all lengths.
    """

    load: Load
    max_draft_tokens: int
    plain_seconds: float
    lengths: tuple[Length, ...]
    best: Length
    best_anywhere: Length


@dataclasses.dataclass(frozen=True)
class Step:
    """Seconds of a plain and of a speculative step, and the speed-up.

    Attributes:
      plain_seconds: of a plain step.
      verify_seconds: of the target's pass over the draft nodes, with the host's work around it.
      draft_seconds: of drafting.
      speedup: over plain decoding.
    """

    plain_seconds: float
    verify_seconds: float
    draft_seconds: float
    speedup: float


def speculative_step(
    device: Device,
    costs: ModelCosts,
    drafter: DraftCosts,
    load: Load,
    tokens: float,
    nodes: int,
    levels: int | None = None,
    branch: int = 1,
) -> Step:
    """One step of a chain or a tree whose mean acceptance length is known.

    Args:
      tokens: that a step emits on average, the target's own one included (mean acceptance length).
      nodes: draft tokens that are verified at once.
      levels: of a tree, which a drafter grows one by one; None: a chain, as many as nodes.
      branch: nodes that are extended in every level.

    Raises:
      ValueError: where `tokens` cannot be, or a count is none.
    """
    levels = nodes if levels is None else levels
    for name, value in (("nodes", nodes), ("levels", levels)):
        if not is_int(value) or value < 0:
            raise ValueError(f"{name}={value!r} must be an integer, 0 or more")
    check_counts(branch=branch)
    if not 1 <= tokens <= nodes + 1:
        raise ValueError(f"a mean acceptance length of {tokens!r} must be from 1 to {nodes + 1} with nodes={nodes}")
    plain = step_time(device, costs, load, 1).seconds + load.stack.plain_host
    host = load.stack.drafted_host if nodes else load.stack.plain_host
    verify = step_time(device, costs, load, nodes + 1).seconds + host
    draft = drafter.seconds(device, load, levels, plain, branch)
    if branch > 1:
        draft += load.stack.tree(levels, nodes)
    return Step(plain, verify, draft, tokens * plain / (verify + draft))


def plan(
    device: Device,
    costs: ModelCosts,
    acceptance: AcceptanceRates,
    drafter: DraftCosts,
    load: Load,
    longest: int | None = None,
) -> Plan:
    """Weighs every draft length for one load.

    Args:
      longest: the longest draft to look at; None: twice what a tile holds, at most `MAX_DRAFT_TOKENS`.
    """
    groups = costs.query_group
    bound = max(device.tile // groups - 1, 0)
    if longest is None:
        longest = min(2 * bound + 1, MAX_DRAFT_TOKENS)
    if not is_int(longest) or not 0 <= longest <= MAX_DRAFT_TOKENS:
        raise ValueError(f"longest={longest!r} must be an integer from 0 to {MAX_DRAFT_TOKENS}")
    lengths = []
    for k in range(longest + 1):
        tokens = acceptance.expected_tokens(k)
        step = speculative_step(device, costs, drafter, load, tokens, k)
        verify = step_time(device, costs, load, k + 1)
        full = max(verify.tile_rows // groups - 1, k)
        lengths.append(
            Length(
                k,
                tokens,
                step.verify_seconds,
                step.draft_seconds,
                step.speedup,
                verify.tiles == 1,
                verify.fill,
                full,
                step_time(device, costs, load, full + 1).seconds + step.verify_seconds - verify.seconds,
                (verify.products_bound, verify.attention_bound),
            )
        )

    def fastest(candidates: Sequence[Length]) -> Length:
        return max(candidates, key=lambda length: (length.speedup, -length.num_draft_tokens))

    inside = [length for length in lengths if length.within_tile or length.num_draft_tokens == 0]
    return Plan(load, min(bound, longest), step.plain_seconds, tuple(lengths), fastest(inside), fastest(lengths))


def memory_bytes(costs: ModelCosts, drafter: DraftCosts, load: Load, length: int) -> dict[str, float]:
    """Bytes per chip of the target's and the drafter's parameters and K/V, for drafts of up to `length` tokens."""
    chips = load.tensor
    tokens = load.batch * load.context
    return {
        "target_parameters": costs.parameters * costs.weight_bytes / chips,
        "target_kv": tokens * costs.num_layers * costs.kv_values * costs.kv_bytes / min(chips, costs.kv_heads),
        "drafter_parameters": drafter.parameter_bytes(length) / chips,
        "drafter_kv": tokens * drafter.kv_bytes_per_token / chips,
    }
