"""Draft lengths by simple rules: Hugging Face's schedules, a table by batch size, and stops while a model drafts.

`draft_length.CostModel` weighs what drafts cost and bring; these do not ask for times. All are frozen dataclasses with
`init(batch) -> state`, `choose(...) -> int32 [batch]` and `observe(...) -> state`, see `CostModel`.
"""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

CONFIDENCE, SURVIVAL = "confidence", "survival"


@flax.struct.dataclass
class Offsets:
    """How far each row's draft length is from where it began, int32 [batch]; `kept`: the next request in a slot goes on
    from there."""

    offset: jax.Array
    kept: bool = flax.struct.field(pytree_node=False, default=False)


@dataclasses.dataclass(frozen=True)
class HeuristicSchedule:
    """Hugging Face's `heuristic`: two more where all drafts were accepted, else one less, at least one, per row.

    It begins at the most that may be drafted. `heuristic_transient` begins anew with every request; `heuristic` keeps
    the length for the requests that follow in the same slot of the same call.

    Attributes:
      widths: as of `CostModel`.
      start: draft tokens at first.
      most: draft tokens at most.
      kept: whether later requests go on from it.
      priors: of the drafter.
    """

    widths: tuple[int, ...]
    start: int
    most: int
    kept: bool = True
    priors: tuple[float, ...] = (0.7,)
    timed = judges = False

    def init(self, batch: int) -> Offsets:
        return Offsets(jnp.zeros(batch, jnp.int32), self.kept)

    def choose(self, seen, kind, count, live, nodes, times=None, proposing=0.0):
        return jnp.where(live, jnp.minimum(count, self.start + seen.offset), 0)

    def observe(self, seen, kind, drafted, accepted, live):
        now = self.start + seen.offset
        after = jnp.where(accepted >= drafted, jnp.minimum(now + 2, self.most), jnp.maximum(now - 1, 1))
        return seen.replace(offset=jnp.where(live & (drafted > 0), after - self.start, seen.offset))


@dataclasses.dataclass(frozen=True)
class BatchTable:
    """A draft length for every number of rows that still decode, as vLLM's `num_speculative_tokens_per_batch_size`.

    Attributes:
      widths: as of `CostModel`.
      entries: (lowest, highest, draft tokens), ranges that do not overlap. Outside of them nothing is drafted.
      priors: of the drafter.
    """

    widths: tuple[int, ...]
    entries: tuple[tuple[int, int, int], ...]
    priors: tuple[float, ...] = (0.7,)
    timed = judges = False

    def init(self, batch: int) -> Offsets:
        return Offsets(jnp.zeros(batch, jnp.int32))

    def choose(self, seen, kind, count, live, nodes, times=None, proposing=0.0):
        rows = live.sum()
        length = sum(jnp.where((rows >= low) & (rows <= high), k, 0) for low, high, k in self.entries)
        return jnp.where(live, jnp.minimum(count, length), 0)

    def observe(self, seen, kind, drafted, accepted, live):
        return seen


@dataclasses.dataclass(frozen=True)
class StopRule:
    """When a model stops drafting: behind the first token at which it has become too unsure. That token is kept.

    Whether it stops depends on what was drafted so far alone, so that a verified token is still drawn from q: exact
    under rules that judge one token after another.

    Attributes:
      kind: CONFIDENCE: the probability of a token falls below `threshold` (Hugging Face's
        `assistant_confidence_threshold`; Kangaroo, https://arxiv.org/abs/2404.18911, and Draft & Verify stop so).
        SURVIVAL: the probability that any token so far is refused rises above it (SpecDec++,
        https://arxiv.org/abs/2405.19715), with the drafter's own probabilities in place of a trained head's.
      threshold: from 0 to 1.
    """

    kind: str
    threshold: float

    def goes_on(self, survival: jax.Array, confidence: jax.Array) -> jax.Array:
        """bool, whether another token is drafted.

        Args:
          survival: float32, the product of the confidences of all tokens so far, the newest included.
          confidence: float32, the probability that the drafter gave to the newest one.
        """
        return confidence >= self.threshold if self.kind == CONFIDENCE else 1 - survival <= self.threshold
