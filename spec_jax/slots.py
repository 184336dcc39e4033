"""The slots of a batch: requests enter where others have ended, and the host looks at text between segments of a loop.

One compiled loop serves everything. It runs until a row ends that another request waits for, or for as many steps as
may pass before the host wants to see the text (stop strings, streaming). Every prompt is prefilled alone and then put
into its slots, so that what a request runs does not depend on when a slot came free.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.compilation import compiled
from spec_jax.decode import Decoder
from spec_jax.decode_state import CONTEXT, LENGTH, RUNNING, STOP, DecodeState, Prefilled, Rows, start_state
from spec_jax.drafting.text_guide import TextGuide
from spec_jax.metrics import Completion
from spec_jax.prefixes import SharedPrefixes
from spec_jax.requests import MAX_INT, Layout, Request, row_arrays
from spec_jax.results import completion
from spec_jax.step_times import step_times
from spec_jax.text import RowText, StringStop

STOP_STEPS = 4
"""Steps between two looks for stop strings: what a row runs beyond one is wasted, and so is every look."""

Source = Callable[[Request], tuple[Prefilled, int] | None]


class Slots:
    """A batch of slots and the requests that wait for them.

    Args:
      decoder: the static decoder.
      requests: with max_tokens > 0 and room in the context.
      batch: how many slots.
      layout: which options the requests use.
      capacity: tokens per slot.
      source: (request) -> caches that hold the beginning of its prompt and how many tokens of it, or None.
      guide: drafts from the host, one step at a time (`drafting.text_guide`); None: the loop needs no host.

    Attributes:
      state: the decode state; its rows of ended requests keep their caches until a request takes the slot.
      slot_of: the last slot of every request, by its index.
      seconds: wall clock spent in compilation, prefill and decoding.
      forward_rows: rows of target forward passes so far, idle slots and padding included.
    """

    def __init__(
        self,
        target: Any,
        decoder: Decoder,
        drafter_params: Any,
        requests: Sequence[Request],
        batch: int,
        layout: Layout,
        capacity: int,
        source: Source | None = None,
        guide: TextGuide | None = None,
    ):
        self.target, self.decoder, self.layout, self.capacity, self.batch = target, decoder, layout, capacity, batch
        self.drafter_params = drafter_params
        self.slot_of: dict[int, int] = {}
        self.seconds = np.zeros(3)
        self._prefill_rows = 0
        self._waiting = collections.deque(requests)
        self._held: list[Request | None] = [None] * batch
        self._texts: dict[int, RowText] = {}
        self._cut: dict[int, StringStop] = {}
        self._cached: dict[int, int] = {}
        self._source, self._guide = source, guide
        self._times = step_times(decoder, batch, capacity)
        self._newest: tuple[list[int], Prefilled] | None = None
        units = [r.prompt for i, r in enumerate(requests) if i == 0 or r.prompt != requests[i - 1].prompt]
        self._prefixes = SharedPrefixes(units, decoder.prefill_chunk)
        self._blank = decoder.blank(target.params, drafter_params, 1, capacity)
        self.state = self._empty_state()
        self._length, self._finish = np.ones(batch, np.int32), np.full(batch, LENGTH, np.int32)

    def _empty_state(self) -> DecodeState:
        sampling, grammar_states = row_arrays(self.layout, {}, self.batch, self.target.config.vocab_size)
        one = jnp.ones(self.batch, jnp.int32)
        empty = self.decoder.blank(self.target.params, self.drafter_params, self.batch, self.capacity)
        rows = Rows(one, one, jnp.full(self.batch, LENGTH, jnp.int32), sampling, grammar_states)
        tokens = jnp.zeros((self.batch, self.capacity), jnp.int32)
        acceptance = self.decoder.start_acceptance(self.batch)
        state = start_state(tokens, rows, empty.cache, empty.drafter, self.layout.logprobs, acceptance)
        return _owned(state, keep=self.layout.grammars)

    @property
    def busy(self) -> bool:
        """Whether any request is still to be served."""
        return bool(self._waiting) or any(r is not None for r in self._held)

    @property
    def refilled(self) -> bool:
        """Whether any slot has been used twice."""
        return len(set(self.slot_of.values())) < len(self.slot_of)

    @property
    def forward_rows(self) -> int:
        return self._prefill_rows + int(self.state.steps) * self.batch * self.decoder.width

    def fill(self) -> None:
        """Prefills waiting requests and puts them into the free slots; samples of one prompt are prefilled once."""
        free = collections.deque(i for i, held in enumerate(self._held) if held is None)
        while free and self._waiting:
            group = [self._waiting.popleft()]
            while len(group) < len(free) and self._waiting and _alike(self._waiting[0], group[0]):
                group.append(self._waiting.popleft())
            self._start(group, [free.popleft() for _ in group])
        if not self._waiting:
            self._newest = self._blank = None  # a row of memory each

    def _start(self, group: list[Request], slots: list[int]) -> None:
        prefilled = self._prefilled(group[0])
        for request in group[1:]:
            self._cached[request.index] = len(request.prompt) - 1
        prompt = group[0].prompt
        rows = dict(zip(slots, group, strict=True))
        vocab = self.target.config.vocab_size
        sampling, grammar_states = row_arrays(self.layout, rows, self.batch, vocab, shared=True)
        grammars, self.state = _without_grammars(self.state)
        wanted = np.full(self.batch, 1, np.int64)
        for slot, request in rows.items():
            # A budget may be larger than an int32, the model's context is not.
            wanted[slot] = min(len(prompt) + request.params.max_tokens, MAX_INT)
            self.slot_of[request.index], self._held[slot] = slot, request
            self._texts[slot] = RowText(self.target.tokenizer, request.params.stop, request.params.min_tokens)
            self._length[slot], self._finish[slot] = len(prompt), RUNNING
        limit = np.minimum(wanted, self.target.max_model_len)
        reason = np.where(wanted > self.target.max_model_len, CONTEXT, LENGTH)
        length = np.full(self.batch, len(prompt), np.int32)
        arguments = (
            self.state,
            prefilled,
            self._prompt_array(prompt),
            jnp.asarray(np.resize(np.array(slots, np.int32), self.batch)),
            jnp.int32(len(slots)),
            Rows(*(jnp.asarray(x, jnp.int32) for x in (length, limit, reason)), sampling, grammar_states),
        )
        # The program need not know the grammars, so that another function does not compile it anew.
        self.state = _with_grammars(self._run("fill", self.decoder.for_prefill(), 1, arguments), grammars)

    def _prompt_array(self, prompt: list[int]) -> jax.Array:
        tokens = np.zeros((1, self.capacity), np.int32)
        tokens[0, : len(prompt)] = prompt
        return jnp.asarray(tokens)

    def _prefilled(self, request: Request) -> Prefilled:
        """The caches behind a prompt, from the nearest place that some of it has been prefilled at already."""
        prompt = request.prompt
        if self._newest is not None and self._newest[0] == prompt:
            self._cached[request.index] = len(prompt) - 1
            return self._newest[1]
        row, start, ends = self._prefixes.take(prompt)
        own = None if self._source is None else self._source(request)
        if own is not None and own[1] > start:
            (row, start), ends = own, []  # a session's cache has been written in other chunks: not for others
        if row is None:
            row = self._blank
        self._cached[request.index] = start
        tokens = self._prompt_array(prompt)
        for end in [*ends, len(prompt) - 1]:
            if end > start:
                bounds = jnp.full(1, start, jnp.int32), jnp.full(1, end, jnp.int32)
                arguments = (self.target.params, self.drafter_params, row, tokens, *bounds)
                row = self._run("prefill", self.decoder.for_prefill(), 1, arguments)
                chunk = self.decoder.prefill_chunk
                self._prefill_rows += -(-(end - start) // chunk) * chunk
                start = end
            if end in ends:
                self._prefixes.keep(prompt[:end], row)
        self._newest = (prompt, row)
        return row

    def _run(self, name: str, decoder: Decoder, timer: int, arguments: tuple) -> Any:
        program, seconds = compiled(decoder, name, *arguments)
        self.seconds[0] += seconds
        start = time.perf_counter()
        result = jax.block_until_ready(program(*arguments))
        self.seconds[timer] += time.perf_counter() - start
        return result

    def advance(self, steps: int = MAX_INT, until_end: bool = False) -> list[tuple[int, Completion]]:
        """Runs the loop for at most `steps` steps and returns the requests that have ended, by their index.

        Args:
          until_end: come back as soon as any row has ended, also where no request waits for its slot.
        """
        if any(held is not None and held.params.stop for held in self._held):
            steps = min(steps, STOP_STEPS)
        live = sum(held is not None for held in self._held)
        min_live = live if until_end or self._waiting else 1
        taken = self._times.take() if self._times is not None and steps else None
        if taken is not None:
            steps = 1
        elif self._times is not None:
            steps = self._times.steps(steps)
        if self._guide is not None and steps:
            steps = 1
            held = {i: r.prompt + self.new_ids(i) for i, r in enumerate(self._held) if r is not None}
            self.drafter_params = self._guide.drafts(held, self.batch)
        limits = jnp.int32(steps), jnp.int32(min_live)
        arguments = (self.target.params, self.drafter_params, self.state, *limits)
        if self._times is not None:
            arguments = (*arguments, self._times.pace(taken))
        before = self.seconds[2]
        self.state = self._run("run", self.decoder, 2, arguments)
        if taken is not None:
            self._times.add(taken, live, self.seconds[2] - before)
        elif self._times is not None:
            self._times.rest(self.seconds[2] - before)
        length, finish = jax.device_get((self.state.length, self.state.finish))
        self._length, self._finish = np.array(length), np.array(finish)
        self._stop_at_strings()
        return self._collect()

    def new_ids(self, slot: int) -> list[int]:
        """The new tokens of the request in a slot, so far."""
        request = self._held[slot]
        return np.asarray(self.state.tokens)[slot, len(request.prompt) : self._length[slot]].tolist()

    def row_text(self, slot: int) -> RowText:
        return self._texts[slot]

    def _stop_at_strings(self) -> None:
        """Ends the rows whose text has come to a stop string, at the token that completes it."""
        watched = [i for i, held in enumerate(self._held) if held is not None and held.params.stop]
        cut = {}
        if watched:
            tokens = np.asarray(self.state.tokens)
        for slot in watched:
            request = self._held[slot]
            ids = tokens[slot, len(request.prompt) : self._length[slot]].tolist()
            if self._finish[slot] == STOP and ids and ids[-1] in request.stop_ids:
                ids.pop()  # a stop token is no part of the text
            found = self._texts[slot].find_stop(ids)
            if found is not None:
                cut[slot] = found
                self._length[slot] = len(request.prompt) + found.count
                self._finish[slot] = STOP
        if cut:
            self._cut |= cut
            length = jnp.asarray(self._length)
            self.state = self.state.replace(
                length=length, finish=jnp.asarray(self._finish), cache=self.state.cache.replace(length=length - 1)
            )

    def _collect(self) -> list[tuple[int, Completion]]:
        ended = [i for i, held in enumerate(self._held) if held is not None and self._finish[i] != RUNNING]
        if not ended:
            return []
        read = (self.state.tokens, self.state.trace)
        whole = len(ended) * 2 >= self.batch
        if whole:
            read = jax.device_get(read)
        found = []
        for slot in ended:
            row = jax.tree.map(lambda x, slot=slot: x[slot], read) if whole else jax.device_get(_row(read, slot))
            request, self._held[slot] = self._held[slot], None
            sequence = completion(
                self.target,
                request,
                *row,
                length=int(self._length[slot]),
                finish=int(self._finish[slot]),
                cut=self._cut.pop(slot, None),
                nodes=self.decoder.drafter.num_nodes,
                cached=self._cached.pop(request.index),
            )
            found.append((request.index, sequence))
        return found


def _alike(one: Request, other: Request) -> bool:
    """Whether two requests can enter their slots together: samples of one prompt."""
    return one.params is other.params and one.prompt == other.prompt


def _without_grammars(state: DecodeState) -> tuple[tuple[Any, ...], DecodeState]:
    p = state.sampling.processors
    if p is None:
        return (), state
    return p.mask_fns, _with_grammars(state, ())


def _with_grammars(state: DecodeState, grammars: tuple[Any, ...]) -> DecodeState:
    p = state.sampling.processors
    if p is None:
        return state
    return state.replace(sampling=state.sampling.replace(processors=p.replace(mask_fns=grammars)))


def _row(tree: Any, slot: int) -> Any:
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, slot, keepdims=False), tree)


def _owned(tree: Any, keep: Any) -> Any:
    """The tree with copies of the arrays that are in it twice or belong to the caller (`keep`): it will be donated."""
    seen = {id(x) for x in jax.tree.leaves(keep)}

    def own(x):
        if id(x) in seen:
            return jnp.copy(x)
        seen.add(id(x))
        return x

    return jax.tree.map(own, tree)
