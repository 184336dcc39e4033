"""Which draft length, and does a policy that adapts beat the best fixed one?

Command:  python experiments/draft_length.py --prompts FILE.jsonl ... [--drafter '{"method": "ngram"}'] [--count 10]
Hardware: any; on a CPU nothing else should run beside it.
Expected: the best fixed length differs from file to file; the cost model ("auto") is near the best of them on each.

Every prompt is decoded with each fixed length K and under each policy, in rotating order (`step_costs.measure_file`),
so that each prompt is one interleaved pair for every ratio. Policies: the cost model, Hugging Face's schedules, and for
models that draft chains the confidence and the survival threshold. Beside the speed-up over plain decoding stands the
planner's projection for accelerators from the same acceptances.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from step_costs import measure_file

import spec_jax
from spec_jax.checks import check_counts
from spec_jax.cli_output import print_json, print_rows, write_csv
from spec_jax.config import parse_speculative_config
from spec_jax.prompts import model_input, read_prompts
from spec_jax.requests import encode_prompts

POLICIES: dict[str, dict[str, Any]] = {
    "auto": {"verify_width": "auto"},
    "heuristic": {"num_assistant_tokens_schedule": "heuristic"},
    "heuristic, transient": {"num_assistant_tokens_schedule": "heuristic_transient"},
    "confidence 0.4": {"assistant_confidence_threshold": 0.4},
    "survival 0.3": {"draft_survival_threshold": 0.3},
}


def runs_of(drafter: Mapping[str, Any], lengths: Sequence[int], longest: int) -> dict[str, dict[str, Any]]:
    """Fixed lengths, and every policy that goes with this drafter."""
    found = {f"K={k}": {**drafter, "num_speculative_tokens": k} for k in lengths}
    for name, options in POLICIES.items():
        config = {**drafter, "num_speculative_tokens": longest, **options}
        try:
            parse_speculative_config(config)
        except ValueError:
            continue  # the thresholds are for models
        found[name] = config
    return found


def rows_of(name: str, report: Mapping[str, Any], runs: Sequence[str]) -> list[dict[str, Any]]:
    """One row per run of a file."""
    rows = []
    for run in runs:
        row: dict[str, Any] = {"file": name, "run": run}
        for label in ("all", "without_loops"):
            part = report.get(label)
            if part is None:
                continue
            speed = part[f"{run}_speedup"]
            row |= {f"{label}: speed-up": speed["median"], f"{label}: of totals": speed["of_totals"]}
            row[f"{label}: tokens per step"] = part[f"{run}_tokens_per_step"]
            row |= {f"{label}: projected {device}": x for device, x in part[f"{run}_projected"].items()}
        rows.append(row)
    return rows


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    drafter = json.loads(arguments.drafter)
    if not isinstance(drafter, dict):
        raise ValueError(f"--drafter {arguments.drafter!r} must be a JSON object, a speculative_config")
    runs, target, rows = runs_of(drafter, arguments.lengths, arguments.longest), None, []
    for path in arguments.prompts:
        prompts = read_prompts(path)[: arguments.count]
        target = target or spec_jax.load_model(arguments.model)
        ids = encode_prompts(target, [model_input(target, prompt) for prompt in prompts])
        report = measure_file(target, ids, arguments.max_tokens, runs, lambda line: print(line, file=sys.stderr))
        if report["equal"] < len(ids):
            raise ValueError(f"{path}: {len(ids) - report['equal']} texts differ from plain decoding")
        rows += rows_of(Path(path).stem, report, list(runs))
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--drafter", default='{"method": "ngram"}', help="speculative_config keys, as JSON")
    parser.add_argument("--prompts", nargs="+", required=True, metavar="FILE.jsonl")
    parser.add_argument("--count", type=int, default=10, help="prompts per file")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1, 3, 5, 7], help="fixed draft lengths")
    parser.add_argument("--longest", type=int, default=7, help="K of the policies")
    parser.add_argument("--csv", metavar="OUT")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args(argv)
    try:
        check_counts(count=arguments.count, max_tokens=arguments.max_tokens, longest=arguments.longest)
        check_counts(**{f"lengths[{i}]": k for i, k in enumerate(arguments.lengths)})
        rows = run(arguments)
    except (ValueError, OSError) as error:
        parser.exit(2, f"error: {error}\n")
    if arguments.csv:
        write_csv(arguments.csv, rows)
    if arguments.json:
        print_json({"rows": rows})
    else:
        print_rows(rows, "speed-up over plain decoding; projected: by the planner, not run")


if __name__ == "__main__":
    main()
