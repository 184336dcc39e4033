"""How many draft tokens a step verifies: chosen anew per step and row from running acceptance and measured step times.

A draft token costs the time that one more row adds to the target's forward pass, and it pays with the probability that
it and all before it are accepted. The best length is where tokens per second are highest, and it may be 0. Under E2 the
text does not depend on it.
"""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np


@flax.struct.dataclass
class Pace:
    """What steps cost on this device, and orders for the steps that measure it.

    Attributes:
      times: float32 [batch * (nodes + 1) + 1], seconds of a step that computes n rows of the target, drafting left out.
      draft: float32 [], seconds of one proposal.
      forced: int32 []; 0: the policy decides; n > 0: every row proposes and computes n rows, drafts or not; -1: none
        proposes.
    """

    times: jax.Array
    draft: jax.Array
    forced: jax.Array


def default_pace(batch: int, nodes: int) -> Pace:
    """Where nothing was measured: drafting is free and a row costs a twentieth of the first one."""
    times = (1 + 0.05 * np.arange(batch * (nodes + 1) + 1)).astype(np.float32)
    return Pace(times, np.float32(0), np.int32(0))


@flax.struct.dataclass
class Acceptance:
    """Running counts of draft tokens, by row and kind of proposal; both fade as new ones come in.

    Attributes:
      accepted: float32 [batch, kinds], draft tokens accepted.
      tried: float32 [batch, kinds], draft tokens whose predecessors were all accepted.
    """

    accepted: jax.Array
    tried: jax.Array


@dataclasses.dataclass(frozen=True)
class CostModel:
    """Drafts as many tokens as promise the most tokens per second.

    Attributes:
      widths: the compiled widths of a step, ascending, of which the narrowest that holds every row's drafts runs. One
        width: rows that are not needed are not computed, so a step costs what its rows cost.
      priors: per kind of proposal (`Draft.kind`) the acceptance rate that is assumed as long as nothing was seen.
      weight: draft tokens that the prior counts as.
      fade: weight of what was seen, per step that verifies a proposal of its kind.
      rest: the same for steps that do not, so that a drafter that was given up is tried again, now and then.
    """

    widths: tuple[int, ...]
    priors: tuple[float, ...] = (0.7,)
    weight: float = 4.0
    fade: float = 0.95
    rest: float = 0.99
    timed = True  # it asks what steps cost
    judges = True  # what it chooses depends on the kind of a proposal

    def init(self, batch: int) -> Acceptance:
        zero = jnp.zeros((batch, len(self.priors)), jnp.float32)
        return Acceptance(zero, zero)

    def choose(
        self,
        seen: Acceptance,
        kind: jax.Array,
        count: jax.Array,
        live: jax.Array,
        nodes: int,
        times: jax.Array,
        proposing: jax.Array | float = 0.0,
    ) -> jax.Array:
        """The draft tokens to verify, int32 [batch], at most `count`.

        Args:
          kind: int32 [batch], kind of each row's proposal.
          count: int32 [batch], tokens proposed.
          live: bool [batch].
          nodes: the most that `count` may be.
          times: as in `Pace`.
          proposing: seconds that a proposal would still cost.
        """
        rate = self._rate(seen, kind)
        depth = jnp.arange(1, nodes + 1)
        gains = jnp.where((depth <= count[:, None]) & live[:, None], rate[:, None] ** depth, 0.0)
        if len(self.widths) > 1:
            return self._by_width(gains, count, live, times, proposing)
        # Rows cost alike wherever they stand: take the likeliest tokens first, and stop where the next costs too much.
        order = jnp.argsort(-gains.reshape(-1), stable=True)
        gained = jnp.cumsum(gains.reshape(-1)[order])
        rows = live.sum()
        taken = jnp.arange(gains.size + 1)
        tokens = rows + jnp.pad(gained, (1, 0))
        cost = times[jnp.minimum(rows + taken, times.shape[0] - 1)] + jnp.where(taken > 0, proposing, 0.0)
        speed = jnp.where(taken <= (gains > 0).sum(), tokens / cost, 0.0)
        best = jnp.argmax(speed)
        rank = jnp.zeros(gains.size, jnp.int32).at[order].set(jnp.arange(gains.size, dtype=jnp.int32))
        return ((rank.reshape(gains.shape) < best) & (gains > 0)).sum(axis=1, dtype=jnp.int32)

    def _by_width(self, gains, count, live, times, proposing):
        """Every row pays for the widest, so once a width is chosen all rows use it."""
        batch, nodes = gains.shape
        best, chosen = jnp.float32(-1), jnp.int32(0)
        for width in self.widths:
            tokens = live.sum() + gains[:, : width - 1].sum()
            speed = tokens / (times[min(batch * width, times.shape[0] - 1)] + (proposing if width > 1 else 0.0))
            best, chosen = jnp.maximum(best, speed), jnp.where(speed > best, width - 1, chosen)
        return jnp.minimum(count, chosen)

    def _rate(self, seen: Acceptance, kind: jax.Array) -> jax.Array:
        rows = jnp.arange(kind.shape[0])
        prior = jnp.asarray(self.priors, jnp.float32)[kind] * self.weight
        estimate = (seen.accepted[rows, kind] + prior) / (seen.tried[rows, kind] + self.weight)
        return jnp.clip(estimate, 0.01, 0.99)

    def observe(
        self, seen: Acceptance, kind: jax.Array, drafted: jax.Array, accepted: jax.Array, live: jax.Array
    ) -> Acceptance:
        """The counts after a step that verified `drafted` and accepted `accepted` tokens, int32 [batch]."""
        mine = (jnp.arange(len(self.priors)) == kind[:, None]) & live[:, None]
        tried = jnp.minimum(accepted + 1, drafted)
        past = jnp.where(mine, jnp.where(drafted > 0, self.fade, self.rest)[:, None], 1.0)
        return Acceptance(
            seen.accepted * past + jnp.where(mine, accepted[:, None], 0),
            seen.tried * past + jnp.where(mine, tried[:, None], 0),
        )
