"""What a step costs on this device, measured in the first steps of a call and kept for the calls that follow.

The steps that measure are steps of the text like all others: only their width is ordered instead of chosen, which under
E2 does not change a token. A machine may have been busy just then, so now and then a further round of them is measured,
and the oldest one is forgotten.
"""

from __future__ import annotations

import collections
import threading
from typing import Any

import numpy as np

from spec_jax.decode import Decoder
from spec_jax.draft_length import Pace, default_pace

ROUNDS = 5
"""Measurements of every width, in turns, behind a first one that serves until then."""
PAUSE = 3
"""Steps between two that measure, once every width was measured: a first call must not be spent on measuring."""
WINDOW = 9
"""Rounds that count: the latest ones."""
SHARE = 0.02
"""The most of the decoding time that goes to further rounds."""
POLISHES = 4
KEPT = 64

_known: collections.OrderedDict[Any, StepTimes] = collections.OrderedDict()
_lock = threading.Lock()


class StepTimes:
    """The measured step times of one decoder at one batch and capacity.

    Args:
      nodes: K, draft tokens of a row at most.
      batch: rows.
      widths: of the policy; where there are several, finished rows cost as much as live ones.
    """

    def __init__(self, nodes: int, batch: int, widths: tuple[int, ...]):
        self.nodes, self.batch, self._all_rows = nodes, batch, len(widths) > 1
        # Kernels that compute the needed rows take them in groups: halfway between powers of two the slope changes.
        counts = sorted({1, 2, *(k * 2**i for i in range(1, 16) for k in (2, 3))})
        chosen = [n for n in counts if n < nodes + 1] if len(widths) == 1 else widths[:-1]
        self._round_of = [-1, *chosen, nodes + 1]
        self._rounds = ROUNDS + 1  # the first one warms up, and is forgotten
        self._orders = collections.deque((turn, order) for turn in range(self._rounds) for order in self._round_of)
        self._seconds: list[tuple[int, int, int, float]] = []  # round, order, live rows, seconds
        self._rested = 0.0  # seconds of steps since the last round
        self._paused = False  # whether other steps ran since the last one that measured
        self._fitted: tuple[Any, Pace] | None = None  # to which measurements

    @property
    def done(self) -> bool:
        """Whether every measurement that is due has been taken."""
        return not self._orders

    def take(self) -> tuple[int, int] | None:
        """The round and the order (`Pace.forced`) of a step that shall measure; None where none shall now.

        Each is given to one caller, so that calls in several threads may share the work.
        """
        try:
            if PAUSE and self._orders[0][0] and not self._paused:
                return None
            self._paused = False
            return self._orders.popleft()
        except IndexError:
            return None

    def steps(self, most: int) -> int:
        """How many of `most` steps may run before the next one that measures."""
        return most if self.done else min(most, max(PAUSE, 1))

    def add(self, taken: tuple[int, int], live: int, seconds: float) -> None:
        """Records the step that was `taken`, with `live` rows."""
        turn, order = taken
        self._seconds.append((turn, order, live, seconds))

    def rest(self, seconds: float) -> None:
        """Tells of steps that did not measure; where they took long enough, another round is due."""
        self._paused, found = True, list(self._seconds)  # other threads may add to it
        if not self.done or not found:
            return
        self._rested += seconds
        cost = float(np.mean([s for *_, s in found])) * len(self._round_of)
        if self._rested * SHARE < cost:
            return
        self._rested, turn, self._rounds = 0.0, self._rounds, self._rounds + 1
        self._seconds = [one for one in found if one[0] > turn - WINDOW]
        self._orders.extend((turn, order) for order in self._round_of)

    def pace(self, taken: tuple[int, int] | None = None) -> Pace:
        """What the decoder is told: an order, or what was measured."""
        if taken is not None:
            return default_pace(self.batch, self.nodes).replace(forced=np.int32(taken[1]))
        found, fitted = list(self._seconds), self._fitted  # steps of other threads may come in late
        known = len(found), *found[-1:]
        if fitted is None or fitted[0] != known:
            fitted = self._fitted = known, self._fit(found)
        return fitted[1]

    def _fit(self, found: list[tuple[int, int, int, float]]) -> Pace:
        """Seconds by rows, between the measured ones a straight line, never falling."""
        later = [one for one in found if one[0]]
        # The first round until another one has measured everything.
        found = later if {order for _, order, *_ in later} >= set(self._round_of) else found
        if not {order for _, order, *_ in found} >= set(self._round_of):  # they are still at it, or lost an order
            return default_pace(self.batch, self.nodes)
        proposed: dict[int, float] = {}
        alone: dict[int, float] = {}  # without a proposal
        for (order, live), seconds in _polished(found).items():
            known = alone if order < 0 else proposed
            rows = (self.batch if self._all_rows else live) * abs(order)
            known[rows] = min(known.get(rows, np.inf), seconds)
        rows = sorted(proposed)
        seconds = np.maximum.accumulate([proposed[r] for r in rows])
        added = [proposed[n] - alone[n] for n in alone if n in proposed]  # texts may have ended between the two
        proposing = max(float(np.median(added)), 0.0) if added else 0.0
        table = np.interp(np.arange(self.batch * (self.nodes + 1) + 1), rows, seconds - proposing)
        return Pace(table.astype(np.float32), np.float32(proposing), np.int32(0))


def _polished(found: list[tuple[int, int, int, float]]) -> dict[tuple[int, int], float]:
    """Seconds by order and live rows, freed of slow minutes and of single slow steps.

    The policy goes by ratios. A busy machine slows a round as a whole, and now and then one step of it: the first is a
    factor that the round's steps share, the second is what a median leaves out (Tukey's median polish, in logarithms).
    """
    rounds = dict.fromkeys((turn for turn, *_ in found), 0.0)
    kinds = dict.fromkeys(((order, live) for _, order, live, _ in found), 0.0)
    for _ in range(POLISHES):
        for kind in kinds:
            kinds[kind] = float(np.median([np.log(s) - rounds[t] for t, *k, s in found if tuple(k) == kind]))
        for turn in rounds:
            rounds[turn] = float(np.median([np.log(s) - kinds[tuple(k)] for t, *k, s in found if t == turn]))
    usual = float(np.median(list(rounds.values())))
    return {kind: float(np.exp(value + usual)) for kind, value in kinds.items()}


def step_times(decoder: Decoder, batch: int, capacity: int) -> StepTimes | None:
    """What is known of this decoder's steps; None where no policy asks."""
    if decoder.policy is None or not decoder.policy.timed:
        return None
    key = (decoder, batch, capacity)
    with _lock:
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


def forget_latest() -> None:
    """Measures the step times that were used last anew."""
    _known.popitem()
