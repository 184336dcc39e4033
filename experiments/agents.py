"""Where suffix decoding shines: agents that write much the same again, in short steps, with a shared history.

Command:  python experiments/agents.py [--prompts humaneval.jsonl] [--tasks 6] [--agents 2] [--csv OUT]
Hardware: any; on a CPU nothing else should run beside it. 2 cores take about a quarter of an hour.
Expected: suffix decoding with the history at least 1.5 times as fast as plain decoding, and no slower than n-gram.

Every task is a text to work on. Each of its agents opens a session of its own, gets the task, and is then told in
further turns to write its answer again, as agents do when a test has failed. Agents of one task do not see each other's
sessions, as workers that vote or retry do not; what they have written is the shared history. All methods go through the
same turns, each with sessions of its own, in rotating order: every turn is one interleaved pair for every ratio. The
texts are equal. Outputs of which more than a fifth of the 8-grams repeat are loops; figures are given without them too.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from projected import projected_speedups
from step_costs import LOOP, spread

import spec_jax
from spec_jax.bench import repeated_ngram_share
from spec_jax.checks import check_counts
from spec_jax.cli_output import print_json, print_rows, write_csv
from spec_jax.prompts import builtin_prompts, has_chat_template, read_prompts

TURNS = (
    "One of the tests failed. Check your answer and write all of it again.",
    "Now write the final version of your whole answer once more, without comments.",
)
"""What an agent is told behind its task."""
METHODS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ngram": {"method": "ngram"},
    "ngram auto": {"method": "ngram", "verify_width": "auto"},
    "suffix": {"method": "suffix", "verify_width": "auto", "num_speculative_tokens": 15},
    "suffix, history": {"method": "suffix", "verify_width": "auto", "num_speculative_tokens": 15},
}


class Agent:
    """One agent under one method: its session, and the history that it shares with the others of this method."""

    def __init__(self, target: Any, config: dict[str, Any], history: Any):
        self._target, self._config, self._history, self._session = target, config, history, None

    def turn(self, text: str, max_tokens: int) -> Any:
        sampling = spec_jax.SamplingParams(max_tokens=max_tokens)
        message = [{"role": "user", "content": text}] if has_chat_template(self._target) else text
        if self._session is None:
            result = spec_jax.generate(self._target, [message], self._config or None, sampling)
        else:
            result = self._session.generate([message], sampling)
        self._session = result.session
        if self._history is not None:
            self._history.add(result.sequences[0].token_ids)
        return result


def run(target: Any, tasks: Sequence[str], agents: int, max_tokens: int, tell: Any) -> list[dict[str, Any]]:
    """One row per turn: what every method took."""
    history = spec_jax.TokenHistory()
    configs = {name: dict(config) for name, config in METHODS.items()}
    configs["suffix, history"]["history"] = history
    rows, number = [], 0
    for task, text in enumerate(tasks):
        for agent in range(agents):
            members = {
                name: Agent(target, config, history if "history" in config else None)
                for name, config in configs.items()
            }
            for turn, words in enumerate((text, *TURNS)):
                order = list(members)[number % len(members) :] + list(members)[: number % len(members)]
                found = {name: members[name].turn(words, max_tokens) for name in order}
                ids = {name: result.sequences[0].token_ids for name, result in found.items()}
                stats = {name: result.stats for name, result in found.items()}
                row = {
                    "task": task,
                    "agent": agent,
                    "turn": turn,
                    "equal": all(i == ids["plain"] for i in ids.values()),
                }
                row |= {"repeated": repeated_ngram_share([ids["plain"]]) or 0.0, "context": len(ids["plain"])}
                for name, s in stats.items():
                    row[f"{name}: seconds"] = s.decode_seconds
                    row[f"{name}: tokens per step"] = s.num_emitted_tokens / max(s.num_steps, 1)
                    row[f"{name}: drafted per step"] = s.num_draft_tokens / max(s.num_steps, 1)
                rows.append(row)
                number += 1
                tell(f"task {task}, agent {agent}, turn {turn}: " + ", ".join(
                    f"{name} {row['plain: seconds'] / row[f'{name}: seconds']:.2f}" for name in configs))  # fmt: skip
    return rows


def summary(target: Any, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per method: speed-ups over plain decoding, over all turns and without loops."""
    found = []
    for name in METHODS:
        line: dict[str, Any] = {"method": name}
        for label, chosen in (("all", rows), ("without loops", [r for r in rows if r["repeated"] <= LOOP])):
            if not chosen:
                continue
            seconds = [(r["plain: seconds"], r[f"{name}: seconds"]) for r in chosen]
            line[f"{label}: turns"] = len(chosen)
            line[f"{label}: of totals"] = sum(a for a, _ in seconds) / sum(b for _, b in seconds)
            line[f"{label}: median"] = spread([a / b for a, b in seconds])["median"]
            tokens, drafted = (
                statistics.mean(r[f"{name}: {key}"] for r in chosen) for key in ("tokens per step", "drafted per step")
            )
            line[f"{label}: tokens per step"] = tokens
            if name != "plain":
                context = round(statistics.mean(r["context"] for r in chosen))
                projected = projected_speedups(target, tokens, drafted, context)
                line |= {f"{label}: projected {device}": value for device, value in projected.items()}
        found.append(line)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--prompts", metavar="FILE.jsonl", help="texts to work on; default: the built-in ones")
    parser.add_argument("--tasks", type=int, default=6)
    parser.add_argument("--agents", type=int, default=2, help="per task")
    parser.add_argument("--max-tokens", type=int, default=96, help="per turn")
    parser.add_argument("--csv", metavar="OUT", help="every turn")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args(argv)
    try:
        check_counts(tasks=arguments.tasks, agents=arguments.agents, max_tokens=arguments.max_tokens)
        prompts = read_prompts(arguments.prompts) if arguments.prompts else builtin_prompts()
        target = spec_jax.load_model(arguments.model)
        tasks = [prompt.text for prompt in prompts[: arguments.tasks]]
        run(target, tasks[:1], 1, 8, lambda line: None)  # compiles
        rows = run(target, tasks, arguments.agents, arguments.max_tokens, lambda line: print(line, file=sys.stderr))
    except (ValueError, OSError) as error:
        parser.exit(2, f"error: {error}\n")
    lines = summary(target, rows)
    if arguments.csv:
        write_csv(arguments.csv, rows)
    if arguments.json:
        print_json({"summary": lines, "turns": rows})
    else:
        print_rows(lines, f"{len(rows)} turns, {sum(r['equal'] for r in rows)} with equal texts: speed-up over plain")


if __name__ == "__main__":
    main()
