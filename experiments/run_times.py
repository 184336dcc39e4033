"""What the steps of a run would take by separately timed parts: the promise that its decoding is held against."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

import spec_jax
from spec_jax import step_times
from spec_jax.config import SpeculativeConfig, parse_speculative_config
from spec_jax.decode_state import DecodeState
from spec_jax.generation import Call, prepare
from spec_jax.metrics import Stats
from spec_jax.requests import make_requests
from spec_jax.step_parts import PARTS, StepParts

CHOOSE_LENGTH = ("num_assistant_tokens_schedule", "num_speculative_tokens_per_batch_size")
"""Keys that choose a draft length, as ordered steps do."""
BY_TOKEN = ("draft_model", "layer_skip")
"""Methods that draft one token after another, and no more than are wanted."""
REPEATS = 7


@dataclasses.dataclass(frozen=True)
class RunTimes:
    """
    Attributes:
      rows: seconds of a step that verifies n rows, drafting left out, float [rows + 1]; index 0 is not used.
      draft: seconds of a whole proposal.
      alone: seconds of a step of plain decoding.
      by_token: whether a shorter proposal takes less, in proportion.
      skips: whether steps without a draft token need not have proposed any: the draft length is chosen.
      auxiliary: rows that every step computes beside those it verifies.
    """

    rows: np.ndarray
    draft: float
    alone: float
    by_token: bool = False
    skips: bool = False
    auxiliary: int = 0

    @property
    def steps(self) -> np.ndarray:
        """Seconds of a step that verifies n rows, with a whole proposal."""
        return self.rows + self.draft

    def promised(self, stats: Stats) -> float:
        """Seconds of a run's steps. Of those with a draft only the mean number of drafted tokens is known."""
        drafted = stats.num_draft_tokens / max(stats.num_drafts, 1)
        verified = np.interp(1 + drafted, np.arange(len(self.rows)), self.rows)
        proposed = self.draft * (drafted / (len(self.rows) - 1) if self.by_token else 1)
        without = self.rows[1] + (0 if self.skips else self.draft)
        return (stats.num_steps - stats.num_drafts) * without + stats.num_drafts * (verified + proposed)


def run_times(target: Any, prompt: Sequence[int], max_tokens: int, config: Mapping[str, Any]) -> RunTimes:
    """The times of the steps of one run behind this prompt.

    Where it drafts chains they are of ordered steps (`spec_jax.step_times`), of trees the sums of a step's parts, each
    repeated by itself (`spec_jax.step_parts`), with those of plain decoding in between.
    """
    parsed = parse_speculative_config(config)
    sampling = spec_jax.SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    if parsed.drafts_tree:
        return _of_tree(target, prompt, sampling, parsed)
    ordered = {name: value for name, value in config.items() if name not in CHOOSE_LENGTH}
    ordered |= {"verify_width": "auto", "num_speculative_tokens": parsed.num_speculative_tokens}
    spec_jax.generate(target, [prompt], ordered, sampling)
    step_times.forget_latest()  # it may be of another file
    while True:
        spec_jax.generate(target, [prompt], ordered, sampling)
        known = step_times.latest()
        if known.done:
            break
    pace = known.pace()
    times, proposing = np.asarray(pace.times), float(pace.draft)
    chosen = parsed.verify_width == "auto" or any(config.get(name) for name in CHOOSE_LENGTH)
    return RunTimes(times, proposing, float(times[1]), parsed.method in BY_TOKEN, chosen)


def _of_tree(target, prompt, sampling, config) -> RunTimes:
    drafting = step_parts(target, [prompt], sampling, config)
    plain = step_parts(target, [prompt], sampling, parse_speculative_config(None))
    nodes = drafting.decoder.drafter.num_nodes
    one = drafting.at(1)
    auxiliary = one.made.draft.auxiliary
    auxiliary = 0 if auxiliary is None else int(auxiliary.sum())
    most = nodes + 1 - auxiliary
    measured = [one, *(drafting.at(2**i) for i in range(1, most.bit_length()) if 2**i < most), drafting.at(most)]
    alone = plain.at(1)
    for _ in range(REPEATS):
        for part in PARTS:
            for times in (*measured, alone):
                times.measure(part)
    draft = statistics.median(measured[-1].seconds["draft"])
    seconds = [sum(statistics.median(t.seconds[part]) for part in PARTS if part != "draft") for t in (*measured, alone)]
    rows = [times.rows for times in measured]
    by_rows = np.interp(np.arange(most + 1), rows, np.maximum.accumulate(seconds[:-1]))
    return RunTimes(by_rows, draft, seconds[-1], auxiliary=auxiliary)


def step_parts(target: Any, prompts: Sequence[Sequence[int]], sampling: Any, config: SpeculativeConfig) -> StepParts:
    """The parts of a step of one batch behind these prompts; without a drafter in the fastest plain decoding."""
    call, state = started(target, prompts, sampling, config)
    return StepParts(call.decoder, target.params, call.drafter_params, state)


def started(
    target: Any, prompts: Sequence[Sequence[int]], sampling: Any, config: SpeculativeConfig
) -> tuple[Call, DecodeState]:
    """A call behind its prompts. Its texts may go on as far as the arrays reach."""
    width, exact = (1, False) if config.method == "none" else (None, None)
    requests = make_requests(target, [list(prompt) for prompt in prompts], [sampling] * len(prompts))
    call = prepare(target, requests, config, width, exact, len(prompts), None)
    slots = call.start()
    slots.fill()
    limit = jnp.full(len(prompts), call.capacity - call.decoder.width, jnp.int32)
    return call, slots.state.replace(limit=limit)
