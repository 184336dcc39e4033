"""Plain against speculative decoding on the same prompts, measured so that the ratio can be believed.

Every group of prompts is decoded by all methods in turn before the next group starts, and the order rotates, so a slow
minute of the machine hits all of them alike. Compilation and prefill are outside the decode clock. Ratios are taken
within one repeat against the fastest plain decoding and the median over repeats is reported; counts are summed before
any ratio is formed.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import spec_jax
from spec_jax import environment
from spec_jax.checks import check_counts
from spec_jax.config import choose_width
from spec_jax.generation import encode_prompts
from spec_jax.prompts import Prompt, builtin_prompts, limit_per_category, model_input
from spec_jax.scalars import ScalarWriter

METHODS = ("ngram", "suffix", "sam", "recycling", "jacobi", "lookahead", "layer_skip", "draft_model")
DEFAULT_METHODS = ("ngram:auto", "ngram", "layer_skip:2")
ALL = "all"
NGRAM = 8
Progress = Callable[[int, int, str], None]


@dataclasses.dataclass(frozen=True)
class Run:
    """One way to decode: plain at one width, or one method with one draft length."""

    label: str
    verify_width: int | str
    num_speculative_tokens: int = 0
    config: dict[str, Any] | None = dataclasses.field(default=None, compare=False)
    exact: bool | None = None

    @property
    def is_plain(self) -> bool:
        return self.config is None


@dataclasses.dataclass
class Tally:
    """Counts of one run on one category in one repeat; they add up, so totals never average ratios."""

    tokens: int = 0
    seconds: float = 0.0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    near_ties: int = 0

    def __add__(self, other: Tally) -> Tally:
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Tally(*(mine + theirs for mine, theirs in pairs))

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else math.nan

    @property
    def mean_acceptance_length(self) -> float | None:
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else None

    @property
    def draft_acceptance_rate(self) -> float | None:
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None


def run_bench(
    target: Any,
    *,
    methods: Sequence[str] = DEFAULT_METHODS,
    draft_model: Any = None,
    prompts: Sequence[Prompt] | None = None,
    max_prompts: int | None = None,
    max_tokens: int = 48,
    repeats: int = 2,
    batch_size: int = 1,
    temperature: float = 0.0,
    seed: int = 0,
    verify_width: int | str | None = None,
    exact: bool | None = None,
    logdir: str | Path | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measures `methods` (each `name` or `name:K`) and returns the report that `spec-jax bench --json` prints.

    `max_prompts` counts per category. Batches never mix categories, so a category with fewer prompts than `batch_size`
    runs as a smaller batch. `progress` is called with steps done, steps in total and a description.
    """
    check_counts(max_tokens=max_tokens, repeats=repeats, batch_size=batch_size)
    if target.tokenizer is None:
        raise ValueError(
            f"model {target.name!r} has no tokenizer, so bench cannot encode prompts; add a tokenizer.json"
        )
    runs = plan_runs(methods, draft_model, verify_width, exact)
    chosen = limit_per_category(builtin_prompts() if prompts is None else prompts, max_prompts)
    sampling = spec_jax.SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed)
    check_prompts(target, chosen)
    report = None
    try:
        with ScalarWriter(logdir) as writer:  # opened first: a folder that cannot be written must not cost a bench
            measured = _measure(target, runs, chosen, sampling, repeats, batch_size, progress)
            report = {"model": target.name, "device": environment.describe_device()}
            report |= {"versions": environment.versions(), **measured.report()}
            for repeat in range(repeats):
                writer.write(repeat, measured.scalars(repeat))
    except OSError as error:
        if report is None:
            raise
        warnings.warn(f"the scalars could not be written to {logdir}: {error}", stacklevel=2)
    return report


def check_prompts(target: Any, prompts: Sequence[Prompt]) -> None:
    """Raises ValueError naming category and place of the first prompt that `target` cannot continue."""
    counts: dict[str, int] = {}
    for prompt in prompts:
        counts[prompt.category] = counts.get(prompt.category, 0) + 1
        name = f"prompt {counts[prompt.category]} of category {prompt.category!r}"
        try:
            (ids,) = encode_prompts(target, [model_input(target, prompt)])
        except ValueError as error:
            raise ValueError(f"{name}: {str(error).removeprefix('prompt 0 ')}") from None
        if len(ids) >= target.max_model_len:
            raise ValueError(f"{name} fills the model's context of {target.max_model_len} tokens; shorten it")


def _measure(
    target: Any,
    runs: list[Run],
    prompts: Sequence[Prompt],
    sampling: Any,
    repeats: int,
    batch_size: int,
    progress: Progress | None,
) -> _Measurements:
    measured = _Measurements(runs, prompts, repeats)
    groups = _groups(prompts, batch_size)
    total, done = repeats * len(groups) * len(runs), 0
    for repeat in range(repeats):
        for number, group in enumerate(groups):
            turn = number % len(runs)
            for run in runs[turn:] + runs[:turn]:
                if progress is not None:
                    progress(done, total, f"{run.label} on {prompts[group[0]].category}, repeat {repeat + 1}")
                result = spec_jax.generate(
                    target,
                    [model_input(target, prompts[index]) for index in group],
                    speculative_config=run.config,
                    sampling=sampling,
                    verify_width=run.verify_width,
                    exact=run.exact,
                )
                measured.record(repeat, run, group, result)
                done += 1
    if progress is not None:
        progress(done, total, "done")
    return measured


def plan_runs(
    methods: Sequence[str], draft_model: Any, verify_width: int | str | None, exact: bool | None
) -> list[Run]:
    """All runs of a bench: plain at every width the methods use, plain at width 1, then the methods.

    `name:auto` is a method with verify_width="auto".
    """
    if not methods:
        raise ValueError(f"methods is empty; name at least one of {', '.join(METHODS)}")
    speculative = []
    for spec in methods:
        name, length = _parse_method(spec)
        asked = "auto" if length == "auto" else verify_width
        config = {"method": name}
        if asked == "auto":
            config["verify_width"] = "auto"
        elif length is not None:
            config["num_speculative_tokens"] = length
        if name == "draft_model":
            if draft_model is None:
                raise ValueError("method 'draft_model' needs a draft model; add --draft-model NAME")
            config["model"] = draft_model
        resolved = spec_jax.SpeculativeConfig(**config)
        width = asked if asked == "auto" else choose_width(resolved.num_speculative_tokens, asked)
        run = Run(name, width, resolved.num_speculative_tokens, config, exact)
        if run in speculative:
            raise ValueError(f"methods names {spec!r} twice")
        speculative.append(run)
    widths = sorted({_plain_width(run) for run in speculative})
    plain = [Run(f"plain W={width}", width, exact=exact) for width in widths]
    return [*plain, Run("plain W=1", 1, exact=False), *speculative]


def repeated_ngram_share(outputs: Sequence[Sequence[int]], n: int = NGRAM) -> float | None:
    """Share of n-grams that already stood earlier in the same output; loops flatter every drafter that copies."""
    total = repeated = 0
    for ids in outputs:
        seen = set()
        for start in range(len(ids) - n + 1):
            gram = tuple(ids[start : start + n])
            total += 1
            repeated += gram in seen
            seen.add(gram)
    return repeated / total if total else None


def table(report: dict[str, Any]) -> Any:
    """The report as a `rich` table, one line per method and category."""
    from rich.markup import escape
    from rich.table import Table

    result = Table(title=escape(f"{report['model']} on {report['device']}"), caption=_CAPTION, caption_justify="left")
    result.add_column("method")
    result.add_column("category")
    for heading in ("K", "W", "plain tok/s", "tok/s", "speed-up", "mean length", "accepted", "repeats", "near-ties"):
        result.add_column(heading, justify="right")
    result.add_column("exact")
    for row in report["rows"]:
        plain = report["plain"][row["category"]]
        result.add_row(
            row["method"],
            escape(row["category"]),
            str(row["num_speculative_tokens"]),
            str(row["verify_width"]),
            f"{plain['tokens_per_second']:.1f} (W={plain['verify_width']})",
            f"{row['tokens_per_second']:.1f}",
            f"{row['speedup']:.2f}x",
            _shown(row["mean_acceptance_length"], ".2f"),
            _shown(row["draft_acceptance_rate"], ".0%"),
            _shown(row["repeated_8gram_share"], ".0%"),
            str(row["near_ties"]),
            f"yes ({row['exactness']})" if row["exact"] else f"[bold red]NO[/] ({row['exactness']})",
            style="bold" if row["category"] == ALL else None,
            end_section=row["category"] == ALL,
        )
    return result


_CAPTION = (
    "speed-up: against the fastest plain decoding of that category, of the methods' width and W=1 without row padding. "
    "mean length: tokens per target step with drafts, the target's own included. accepted: of all drafted tokens. "
    "repeats: share of 8-grams that already stood in the same output. "
    "exact: token ids equal plain decoding's (promised level)."
)


def _shown(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)


class _Measurements:
    """Everything recorded during a bench, and the report made of it."""

    def __init__(self, runs: Sequence[Run], prompts: Sequence[Prompt], repeats: int):
        self.runs = runs
        self.prompts = prompts
        self.repeats = repeats
        self.categories = list(dict.fromkeys(prompt.category for prompt in prompts))
        self.levels: dict[Run, str] = {}
        self.seconds = {"compile": 0.0, "prefill": 0.0, "decode": 0.0}
        self.tallies: dict[tuple[Run, str, int], Tally] = {}
        self.outputs: dict[tuple[Run, int], list[list[int]]] = {}

    def record(self, repeat: int, run: Run, group: Sequence[int], result: Any) -> None:
        """Adds one call of `generate` on the prompts `group`, which share a category."""
        stats = result.stats
        emitted = [[int(token) for token in sequence.token_ids] for sequence in result.sequences]
        counted = Tally(
            sum(len(ids) for ids in emitted),
            stats.decode_seconds,
            stats.num_drafts,
            stats.num_draft_tokens,
            stats.num_accepted_tokens,
            stats.near_ties,
        )
        for category in (self.prompts[group[0]].category, ALL):
            key = run, category, repeat
            self.tallies[key] = self.tallies.get(key, Tally()) + counted
        for part in self.seconds:
            self.seconds[part] += getattr(stats, f"{part}_seconds")
        # E0, E1, E2 sort as they rank: the weakest level of any call is the one that held for the run.
        self.levels[run] = min(self.levels.get(run, result.exactness), result.exactness)
        for index, ids in zip(group, emitted, strict=True):
            self.outputs.setdefault((run, index), []).append(ids)

    def report(self) -> dict[str, Any]:
        plain, rows = {}, []
        for category in [*self.categories, ALL]:
            fastest = self._fastest_plain(category)
            plain[category] = {
                "tokens_per_second": self._median_speed(fastest, category),
                "verify_width": fastest.verify_width,
            }
        for run in (run for run in self.runs if not run.is_plain):
            for category in [*self.categories, ALL]:
                rows.append(self._row(run, category))
        return {"plain": plain, "rows": rows, "seconds": self.seconds}

    def scalars(self, repeat: int) -> dict[str, float | None]:
        """TensorBoard tags and values of one repeat."""
        values: dict[str, float | None] = {}
        for run in self.runs:
            name = run.label.replace(" ", "_") if run.is_plain else _tag(run)
            for category in [*self.categories, ALL]:
                tally = self.tallies[run, category, repeat]
                values[f"tokens_per_second/{name}/{category}"] = tally.tokens_per_second
                if not run.is_plain:
                    values[f"speedup/{name}/{category}"] = self._speedup(run, category, repeat)
                    values[f"mean_acceptance_length/{name}/{category}"] = tally.mean_acceptance_length
                    values[f"draft_acceptance_rate/{name}/{category}"] = tally.draft_acceptance_rate
        return values

    def _row(self, run: Run, category: str) -> dict[str, Any]:
        first = self.tallies[run, category, 0]
        members = [i for i, prompt in enumerate(self.prompts) if category in (prompt.category, ALL)]
        reference = next(other for other in self.runs if other.is_plain and other.verify_width == _plain_width(run))
        exact = all(ids == self.outputs[reference, i][0] for i in members for ids in self.outputs[run, i])
        return {
            "method": run.label,
            "category": category,
            "num_speculative_tokens": run.num_speculative_tokens,
            "verify_width": run.verify_width,
            "tokens_per_second": self._median_speed(run, category),
            "speedup": statistics.median(self._speedup(run, category, repeat) for repeat in range(self.repeats)),
            "mean_acceptance_length": first.mean_acceptance_length,
            "draft_acceptance_rate": first.draft_acceptance_rate,
            "exact": exact,
            "exactness": self.levels[run],
            "near_ties": first.near_ties,
            "repeated_8gram_share": repeated_ngram_share([self.outputs[run, i][0] for i in members]),
        }

    def _median_speed(self, run: Run, category: str) -> float:
        return statistics.median(self.tallies[run, category, r].tokens_per_second for r in range(self.repeats))

    def _fastest_plain(self, category: str) -> Run:
        return max((run for run in self.runs if run.is_plain), key=lambda run: self._median_speed(run, category))

    def _speedup(self, run: Run, category: str, repeat: int) -> float:
        plain = self.tallies[self._fastest_plain(category), category, repeat]
        return self.tallies[run, category, repeat].tokens_per_second / plain.tokens_per_second


def _tag(run: Run) -> str:
    """A run's name in TensorBoard."""
    return f"{run.label}_auto" if run.verify_width == "auto" else f"{run.label}_k{run.num_speculative_tokens}"


def _plain_width(run: Run) -> int:
    """The width of the plain decoding that a run's tokens are compared with; any will do under E2."""
    return choose_width(0, None) if run.verify_width == "auto" else run.verify_width


def _parse_method(spec: str) -> tuple[str, int | str | None]:
    name, colon, length = spec.strip().partition(":")
    if name not in METHODS:
        raise ValueError(f"method {name!r} is not known to bench; allowed: {', '.join(METHODS)} (plain always runs)")
    if not colon:
        return name, None
    if length == "auto":
        return name, length
    if not length.isdecimal() or int(length) < 1:
        raise ValueError(
            f"method {spec!r}: the draft length after ':' must be a positive integer or 'auto', such as {name}:5"
        )
    return name, int(length)


def _groups(prompts: Sequence[Prompt], batch_size: int) -> list[list[int]]:
    """Indices of prompts in batches of at most `batch_size`, each within one category."""
    groups = []
    for category in dict.fromkeys(prompt.category for prompt in prompts):
        members = [i for i, prompt in enumerate(prompts) if prompt.category == category]
        groups += [members[start : start + batch_size] for start in range(0, len(members), batch_size)]
    return groups
