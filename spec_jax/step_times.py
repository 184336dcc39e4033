"""What a step costs on this device, measured in the first steps of a call and kept for the calls that follow.

The steps that measure are steps of the text like all others: only their width is ordered instead of chosen, which under
E2 does not change a token.
"""

from __future__ import annotations

import collections
from typing import Any

import jax.numpy as jnp
import numpy as np

from spec_jax.decode import Decoder
from spec_jax.draft_length import Pace

REPEATS = 3
"""Measurements of every width, of which the fastest counts: what disturbs a step only makes it slower."""
KEPT = 64

_known: collections.OrderedDict[Any, StepTimes] = collections.OrderedDict()


class StepTimes:
    """The measured step times of one decoder at one batch and capacity.

    Args:
      nodes: K, draft tokens of a row at most.
      batch: rows.
      widths: of the policy; where there are several, finished rows cost as much as live ones.
    """

    def __init__(self, nodes: int, batch: int, widths: tuple[int, ...]):
        self.nodes, self.batch, self._all_rows = nodes, batch, len(widths) > 1
        powers = [2**i for i in range((nodes + 1).bit_length()) if 2**i < nodes + 1]
        orders = [-1, *(powers if len(widths) == 1 else widths[:-1]), nodes + 1]
        self._orders = collections.deque(orders * (REPEATS + 1))  # the first round warms up
        self._warm = len(orders)
        self._seconds: dict[int, list[tuple[int, float]]] = {order: [] for order in orders}
        self._pace: Pace | None = None

    @property
    def done(self) -> bool:
        return not self._orders

    def next_order(self) -> int:
        """`Pace.forced` of the next step."""
        return self._orders[0]

    def add(self, live: int, seconds: float) -> None:
        """Records the step that `next_order` ordered, with `live` rows."""
        order = self._orders.popleft()
        if self._warm:
            self._warm -= 1
        else:
            self._seconds[order].append((live, seconds))

    def pace(self, forced: int = 0) -> Pace:
        """What the decoder is told: an order, or what was measured."""
        if not self.done:
            rows = self.batch * (self.nodes + 1) + 1
            return Pace(jnp.ones(rows, jnp.float32), jnp.float32(0), jnp.int32(forced))
        if self._pace is None:
            self._pace = self._fit()
        return self._pace

    def _fit(self) -> Pace:
        """Seconds by rows: the fastest of every order, between them a straight line, never falling."""
        fastest: dict[int, float] = {}
        alone: dict[int, float] = {}  # without a proposal
        for order, found in self._seconds.items():
            known = alone if order < 0 else fastest
            for live, seconds in found:
                rows = (self.batch if self._all_rows else live) * abs(order)
                known[rows] = min(known.get(rows, np.inf), seconds)
        rows = sorted(fastest)
        seconds = np.maximum.accumulate([fastest[r] for r in rows])
        added = [fastest[n] - alone[n] for n in alone if n in fastest]  # texts may have ended between the two
        proposing = max(float(np.median(added)), 0.0) if added else 0.0
        table = np.interp(np.arange(self.batch * (self.nodes + 1) + 1), rows, seconds - proposing)
        return Pace(jnp.asarray(table, jnp.float32), jnp.float32(proposing), jnp.int32(0))


def step_times(decoder: Decoder, batch: int, capacity: int) -> StepTimes | None:
    """What is known of this decoder's steps; None where no policy asks."""
    if decoder.policy is None:
        return None
    key = (decoder, batch, capacity)
    if key not in _known:
        _known[key] = StepTimes(decoder.drafter.num_nodes, batch, decoder.policy.widths)
        if len(_known) > KEPT:
            _known.popitem(last=False)
    _known.move_to_end(key)
    return _known[key]


def latest() -> StepTimes | None:
    """The step times used last, if any."""
    return next(reversed(_known.values()), None)


def forget() -> None:
    """Measures anew in the calls that follow."""
    _known.clear()
