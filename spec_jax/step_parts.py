"""What each part of a decode step costs: the part runs many times inside one compiled program.

The program works on a real state behind a real prefill and takes its memory over, so that neither dispatch nor a copy
of the cache is measured.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spec_jax.decode import Decoder
from spec_jax.decode_state import DecodeState
from spec_jax.draft_length import Pace, default_pace
from spec_jax.drafting.base import Draft
from spec_jax.models.llama import ForwardOutput
from spec_jax.verify import Verification

PARTS = ("draft", "forward", "verify", "commit")
MEASURED = ("step", "forward", "draft", "verify", "commit")
SECONDS = 0.04
"""A measurement repeats its part for about this long, beside which the dispatch of its program is nothing."""
FEWEST, MOST, MOST_STEPS = 2, 10_000, 64
"""Runs per measurement; steps are fewer, because the text grows with them."""


@flax.struct.dataclass
class Made:
    """What the parts of one step make for each other."""

    draft: Draft
    flight: jax.Array
    logits: jax.Array
    features: dict[int, jax.Array]
    verdict: Verification


def _draft(decoder, params, drafter_params, state, made, pace):
    draft, drafter_state = decoder.draft(params, drafter_params, state, None, pace)
    cache = state.cache if draft.target_cache is None else draft.target_cache
    made = made.replace(draft=draft.replace(target_cache=None))
    return state.replace(drafter=drafter_state, cache=cache), made, made.draft


def _forward(decoder, params, drafter_params, state, made, pace):
    flight, out = decoder.forward(params, state, made.draft, pace)
    made = made.replace(flight=flight, logits=out.logits, features=out.features)
    return state.replace(cache=out.cache), made, (made.flight, made.logits, made.features)


def _verify(decoder, params, drafter_params, state, made, pace):
    verdict, _ = decoder.verify(state, made.draft, made.flight, made.logits, None)
    return state, made.replace(verdict=verdict), verdict


def _commit(decoder, params, drafter_params, state, made, pace):
    out = ForwardOutput(made.logits, made.features, state.cache)
    new = decoder.commit(drafter_params, state, state.drafter, made.draft, made.flight, out, made.verdict, ())
    # The next run commits the same tokens at the same place.
    cache = new.cache.replace(length=state.cache.length)
    return new.replace(length=state.length, finish=state.finish, cache=cache), made, (new.length, new.finish)


def repeated(decoder: Decoder, part: Callable) -> Callable:
    """(params, drafter_params, pace, state, made, count) -> (state, made): runs a part `count` times, in place."""

    def run(params, drafter_params, pace, state, made, count):
        def body(_, carry):
            # Behind the barrier nothing is known to be the same in every iteration, so nothing leaves the loop, be it
            # work on the parameters alone; `zero` hangs on the results of the iteration before, so that none is left
            # out.
            state, made, zero, given = lax.optimization_barrier((*carry, (params, drafter_params, pace)))
            *models, now = given
            cache = state.cache.replace(length=state.cache.length + zero)
            state = state.replace(length=state.length + zero, cache=cache)
            state, made, results = part(decoder, *models, state, made, now)
            some = sum(x[(0,) * x.ndim].astype(jnp.float32) for x in jax.tree.leaves(results) if x.size)
            return state, made, (some == 1.5e30).astype(jnp.int32)

        return lax.fori_loop(0, count, body, (state, made, jnp.int32(0)))[:2]

    return run


@dataclasses.dataclass(frozen=True)
class _Limited:
    """A drafter that proposes at most params[1] tokens, so that a step computes no more rows than are ordered."""

    inner: Any

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def commit(self, params, state, seen):
        return self.inner.commit(params[0], state, seen)

    def propose(self, params, state, view):
        draft, state = self.inner.propose(params[0], state, view)
        return draft.replace(count=jnp.minimum(draft.count, params[1])), state


class StepParts:
    """The parts of one decoder's step, and its whole loop, on one state.

    Args:
      decoder: as `generate` would run it, without options that read the committed text (`processors`).
      state: rows in front of their first step, which is taken over. Their limits should leave room for MOST_STEPS.

    Attributes:
      state: the same, behind a draft and a forward pass.
      programs: by name of `MEASURED`; see `repeated`. They take over state and what was made.
    """

    def __init__(self, decoder: Decoder, params: Any, drafter_params: Any, state: DecodeState):
        self._models, self.state = (params, drafter_params), state
        self.decoder = dataclasses.replace(decoder, drafter=_Limited(decoder.drafter))
        functions = dict(zip(PARTS, (_draft, _forward, _verify, _commit), strict=True))
        programs = {name: repeated(self.decoder, part) for name, part in functions.items()} | {"step": self._step}
        self.programs = {name: jax.jit(program, donate_argnums=(3, 4)) for name, program in programs.items()}

    def _step(self, params, drafter_params, pace, state, made, count):
        return self.decoder.run(params, drafter_params, state, count, 1, pace), made

    def at(self, rows: int) -> PartTimes:
        """For steps that compute `rows` rows of every text; all its rows where the model cannot leave any out."""
        return PartTimes(self, rows)

    def arguments(self, rows: int) -> tuple[Any, Any, Pace]:
        """What the programs take first."""
        params, drafter_params = self._models
        pace = default_pace(self.state.length.shape[0], self.decoder.drafter.num_nodes)
        return params, (drafter_params, jnp.int32(rows - 1)), pace.replace(forced=jnp.int32(rows))

    def nothing(self, arguments: tuple[Any, Any, Pace]) -> Made:
        """Zeros in the shapes of what the parts make."""

        def step(params, drafter_params, pace, state):
            draft, _ = self.decoder.draft(params, drafter_params, state, None, pace)
            flight, out = self.decoder.forward(params, state, draft, pace)
            verdict, _ = self.decoder.verify(state, draft, flight, out.logits, None)
            return Made(draft.replace(target_cache=None), flight, out.logits, out.features, verdict)

        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(step, *arguments, self.state))


class PartTimes:
    """Seconds of the parts at one number of computed rows.

    Attributes:
      made: by one step.
      seconds: of `MEASURED`, one entry per call of `measure`.
    """

    def __init__(self, parts: StepParts, rows: int):
        self.rows, self._parts = rows, parts
        self._arguments = parts.arguments(rows)
        self.made = parts.nothing(self._arguments)
        for part in PARTS[:-1]:  # a step up to its commit
            parts.state, self.made = parts.programs[part](*self._arguments, parts.state, self.made, jnp.int32(1))
        self._counts = dict.fromkeys(MEASURED, FEWEST)
        for part in MEASURED * 4:  # the first run compiles, and few runs overrate a part by the dispatch
            count = int(np.ceil(SECONDS / self._measured(part)))
            self._counts[part] = min(max(count, FEWEST), MOST_STEPS if part == "step" else MOST)
        self.seconds: dict[str, list[float]] = {part: [] for part in MEASURED}

    def measure(self, part: str) -> None:
        """Adds one measurement."""
        self.seconds[part].append(self._measured(part))

    def _measured(self, part):
        program, count = self._parts.programs[part], self._counts[part]
        before = int(self._parts.state.steps)
        copies = jax.tree.map(jnp.copy, (self._parts.state, self.made, jnp.int32(count)))
        arguments = jax.block_until_ready((*self._arguments, *copies))
        start = time.perf_counter()
        state, _ = jax.block_until_ready(program(*arguments))
        seconds = time.perf_counter() - start
        return seconds / (int(state.steps) - before if part == "step" else count)
