"""Batches of whole texts packed into rows of one length, as a stream that depends on seed and step alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from spec_jax.checks import check_counts, is_int


class Batch(NamedTuple):
    """One step's rows.

    Attributes:
      tokens: int32 [batch, length]; 0 in padding.
      loss: bool [batch, length], True at tokens to be learned: those of answers. The logits that foresee the token at t
        come from t - 1, so a trainer of next tokens counts position t where loss[t + 1] is True. The first token of a
        text is never marked, so that t then belongs to the same text; a trainer that looks j tokens ahead must also
        check segments[t] == segments[t + j].
      segments: int32 [batch, length], 1, 2, ... for the texts of a row, 0 in padding. A token attends to earlier ones
        of its own segment.
      positions: int32 [batch, length], from 0 in every text; 0 in padding.
    """

    tokens: np.ndarray
    loss: np.ndarray
    segments: np.ndarray
    positions: np.ndarray


@dataclasses.dataclass(frozen=True)
class PackingStats:
    """How the texts fit into rows.

    Attributes:
      texts: that are in the rows.
      rows: of one epoch.
      tokens, loss_tokens: of one epoch, without padding.
      padding: share of an epoch's positions that hold none.
      prompts_too_long: texts that are left out, because their prompt leaves no room for an answer in a row.
      texts_cut, tokens_cut: texts longer than a row, and the tokens at their ends that are left out.
    """

    texts: int
    rows: int
    tokens: int
    loss_tokens: int
    padding: float
    prompts_too_long: int
    texts_cut: int
    tokens_cut: int


class BatchStream(Iterator[Batch]):
    """Endless batches. Every epoch goes through all rows once, in an order of its own; a batch may span two epochs.

    Args:
      texts: (token ids, tokens of the prompt) each.
      batch, length: rows, and tokens per row.
      seed: of the orders.
      start_step: the first step that iteration gives.
      learn_prompts: mark the prompts' tokens too, all but the first of a text.

    Attributes:
      step: the next step.
      stats: how the texts fit.
    """

    def __init__(
        self,
        texts: Sequence[tuple[np.ndarray, int]],
        batch: int,
        length: int,
        seed: int = 0,
        start_step: int = 0,
        learn_prompts: bool = False,
    ):
        check_counts(batch=batch, length=length)
        for name, value in (("seed", seed), ("start_step", start_step)):
            if not is_int(value) or value < 0:
                raise ValueError(f"{name}={value!r} must be an integer that is not negative")
        fitting = [(tokens[:length], prompt) for tokens, prompt in texts if prompt < length]
        cut = [len(tokens) - length for tokens, prompt in texts if prompt < length < len(tokens)]
        if not fitting:
            raise ValueError(f"the prompts of all {len(texts)} texts fill rows of length={length}; use longer rows")
        self._texts, self._length, self._batch, self._seed = fitting, length, batch, seed
        self._learn_prompts = learn_prompts
        self._rows = _pack([len(tokens) for tokens, _ in fitting], length)
        self._order: tuple[int, np.ndarray] | None = None
        self.step = int(start_step)
        total = sum(len(tokens) for tokens, _ in fitting)
        prompts = sum(1 if learn_prompts else prompt for _, prompt in fitting)
        self.stats = PackingStats(
            texts=len(fitting),
            rows=len(self._rows),
            tokens=total,
            loss_tokens=total - prompts,
            padding=1 - total / (len(self._rows) * length),
            prompts_too_long=len(texts) - len(fitting),
            texts_cut=len(cut),
            tokens_cut=sum(cut),
        )

    @property
    def steps_per_epoch(self) -> float:
        """Batches in which every row comes once."""
        return len(self._rows) / self._batch

    def __next__(self) -> Batch:
        self.step += 1
        return self.at(self.step - 1)

    def at(self, step: int) -> Batch:
        """The batch of one step, which leaves the iteration where it is."""
        shape = self._batch, self._length
        found = Batch(np.zeros(shape, np.int32), np.zeros(shape, bool), *(np.zeros(shape, np.int32) for _ in range(2)))
        for row in range(self._batch):
            epoch, place = divmod(step * self._batch + row, len(self._rows))
            self._fill(found, row, self._rows[self._order_of(epoch)[place]])
        return found

    def _order_of(self, epoch: int) -> np.ndarray:
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, np.random.default_rng((self._seed, epoch)).permutation(len(self._rows))
        return self._order[1]

    def _fill(self, found: Batch, row: int, members: Sequence[int]) -> None:
        begin = 0
        for segment, index in enumerate(members, start=1):
            tokens, prompt = self._texts[index]
            place = slice(begin, begin + len(tokens))
            found.tokens[row, place] = tokens
            found.loss[row, begin + (1 if self._learn_prompts else prompt) : place.stop] = True
            found.segments[row, place] = segment
            found.positions[row, place] = np.arange(len(tokens))
            begin = place.stop


def _pack(lengths: Sequence[int], length: int) -> list[list[int]]:
    """Rows of text indices: the longest texts first, each into the fullest row that has room (best fit decreasing)."""
    rows: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(length + 1)]  # rows by the room they have left
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        size = lengths[index]
        room = next((r for r in range(size, length + 1) if by_room[r]), None)
        if room is None:
            rows.append([])
            row, room = len(rows) - 1, length
        else:
            row = by_room[room].pop()
        rows[row].append(index)
        by_room[room - size].append(row)
    return rows
