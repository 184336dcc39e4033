"""Spec-Bench's table for the drafters of this project: per category, mean accepted tokens and speed-up.

Command:  python experiments/spec_bench.py --questions question.jsonl ... [--count 10] [--max-tokens 128]
          [--runs NAME=JSON ...] [--csv OUT]
Hardware: any; on a CPU nothing else should run beside it.
Expected: drafts that copy gain most where answers repeat their questions (summarization, rag), least in translation.

Questions are JSON lines with `turns` and, if they like, a `category`, as Spec-Bench (https://arxiv.org/abs/2401.07851)
and MT-bench publish them. All turns are asked, each behind the answers to those before it, in one session per method.
Methods take turns in rotating order. As in Spec-Bench, "#MAT" is tokens per target step, 1.00 for plain decoding, and
categories are those of the file. Speed is that of decoding, without prefill and compilation.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agents import Agent
from projected import costs_of_drafter, projected_speedups
from step_costs import LOOP, parse_runs, spread

import spec_jax
from spec_jax.bench import repeated_ngram_share
from spec_jax.checks import check_counts
from spec_jax.cli_output import print_json, print_rows, write_csv
from spec_jax.prompts import DEFAULT_CATEGORY

RUNS = (
    'ngram={"method": "ngram"}',
    'ngram auto={"method": "ngram", "verify_width": "auto"}',
    'suffix auto={"method": "suffix", "verify_width": "auto"}',
)
OVERALL, WITHOUT_LOOPS = "overall", "overall, without loops"


def read_questions(path: str | Path) -> list[tuple[str, list[str]]]:
    """(category, turns) of every line; ValueError naming file and line."""
    found = []
    text = Path(path).read_text(encoding="utf-8-sig")
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            turns = record["turns"]
            if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t.strip() for t in turns):
                raise ValueError("'turns' must be a list of strings, none empty")
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: expected an object with 'turns' ({error})") from None
        found.append((str(record.get("category", DEFAULT_CATEGORY)), turns))
    if not found:
        raise ValueError(f"{path} holds no questions")
    return found


def ask(target: Any, config: Mapping[str, Any], turns: Sequence[str], max_tokens: int) -> list[Any]:
    """The results of all turns of one question, in one session."""
    agent = Agent(target, dict(config), None)
    return [agent.turn(turn, max_tokens) for turn in turns]


def measure(target: Any, questions: Sequence, runs: Mapping[str, Any], max_tokens: int, tell: Any) -> list[dict]:
    """One row per question."""
    configs = {"plain": {}, **runs}
    for config in configs.values():
        ask(target, config, questions[0][1], 8)  # compiles
    rows = []
    for number, (category, turns) in enumerate(questions):
        order = list(configs)[number % len(configs) :] + list(configs)[: number % len(configs)]
        found = {name: ask(target, configs[name], turns, max_tokens) for name in order}
        ids = {name: [r.sequences[0].token_ids for r in results] for name, results in found.items()}
        row: dict[str, Any] = {"category": category, "equal": all(i == ids["plain"] for i in ids.values())}
        row["repeated"] = repeated_ngram_share(ids["plain"]) or 0.0
        row["context"] = round(statistics.mean(map(len, ids["plain"])))
        for name, results in found.items():
            for key in ("num_steps", "num_emitted_tokens", "num_draft_tokens", "decode_seconds"):
                row[f"{name}: {key}"] = sum(getattr(r.stats, key) for r in results)
        rows.append(row)
        tell(f"question {number + 1} of {len(questions)} ({category})")
    return rows


def table(target: Any, rows: Sequence[Mapping[str, Any]], runs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row per run and category, and overall, with and without loops."""
    groups = {category: [r for r in rows if r["category"] == category] for category in {r["category"]: 0 for r in rows}}
    groups |= {OVERALL: list(rows), WITHOUT_LOOPS: [r for r in rows if r["repeated"] <= LOOP]}
    lines = []
    for run in ("plain", *runs):
        drafter = costs_of_drafter(target, runs[run]) if run != "plain" else None
        for group, chosen in groups.items():
            if not chosen:
                continue
            total = {
                key: sum(r[f"{run}: {key}"] for r in chosen)
                for key in ("num_steps", "num_emitted_tokens", "num_draft_tokens", "decode_seconds")
            }
            ratios = [r["plain: decode_seconds"] / r[f"{run}: decode_seconds"] for r in chosen]
            mean, drafted = (total[k] / total["num_steps"] for k in ("num_emitted_tokens", "num_draft_tokens"))
            line = {"run": run, "category": group, "questions": len(chosen), "#MAT": mean}
            line["tokens/s"] = total["num_emitted_tokens"] / total["decode_seconds"]
            plain = sum(r["plain: decode_seconds"] for r in chosen)
            line |= {"speed-up": plain / total["decode_seconds"], "median": spread(ratios)["median"]}
            if run != "plain":
                context = round(statistics.mean(r["context"] for r in chosen))
                projected = projected_speedups(target, mean, drafted, context, drafter)
                line |= {f"projected {device}": value for device, value in projected.items()}
            lines.append(line)
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--questions", nargs="+", required=True, metavar="FILE.jsonl")
    parser.add_argument("--count", type=int, default=10, help="questions per file")
    parser.add_argument("--max-tokens", type=int, default=128, help="per turn")
    parser.add_argument("--runs", nargs="+", default=list(RUNS), metavar="NAME=JSON", help="configurations")
    parser.add_argument("--csv", metavar="OUT", help="the table")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args(argv)
    try:
        check_counts(count=arguments.count, max_tokens=arguments.max_tokens)
        runs = parse_runs(arguments.runs)
        questions = [q for path in arguments.questions for q in read_questions(path)[: arguments.count]]
        target = spec_jax.load_model(arguments.model)
        rows = measure(target, questions, runs, arguments.max_tokens, lambda line: print(line, file=sys.stderr))
    except (ValueError, OSError) as error:
        parser.exit(2, f"error: {error}\n")
    lines = table(target, rows, runs)
    if arguments.csv:
        write_csv(arguments.csv, lines)
    if arguments.json:
        print_json({"table": lines, "questions": rows})
    else:
        title = f"{len(rows)} questions, {sum(r['equal'] for r in rows)} with equal texts"
        print_rows(lines, title, sections=(WITHOUT_LOOPS,))


if __name__ == "__main__":
    main()
