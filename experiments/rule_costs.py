"""What does a verification rule add to a step, beside the target's forward pass?

Command:   python experiments/rule_costs.py [--batch 8] [--csv OUT] [--json]
Hardware:  any; on a CPU nothing else should run beside it, and 2 cores take about half an hour; --rules takes fewer
Expected:  less than 3 % of the forward pass for chains; on a CPU trees under traversal and kseq take up to 4 %, and
           top_p adds 3 to 4 % to rules that look at the laws of all rows

SmolLM2 drafts for itself with some of its layers: chains of 7 tokens and trees of 7 nodes, 8 rows in flight of 49152
logits each. Each part of a step runs many times in one compiled program (`spec_jax.step_parts`), behind the same
prompts, rules taking turns. What a rule adds is its time less that of plain decoding, which chooses one token per
sequence too, over the time of the forward pass; medians over repeats and over several steps.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

import spec_jax
from spec_jax import rule_names
from spec_jax.checks import check_counts
from spec_jax.cli_output import console, print_json, write_csv
from spec_jax.config import parse_speculative_config
from spec_jax.generation import prepare
from spec_jax.prompts import builtin_prompts, model_input
from spec_jax.requests import encode_prompts, make_requests
from spec_jax.step_parts import StepParts

ROWS = 8
DRAFTER = {"method": "layer_skip", "draft_layers": [*range(10), *range(14, 30)]}
TREE = [[0], [1], [0, 0], [0, 1], [1, 0], [1, 1], [0, 0, 0]]
SAMPLINGS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {},
    "temperature 1": {"temperature": 1.0},
    "temperature 1, top_p 0.9": {"temperature": 1.0, "top_p": 0.9},
}


def configurations() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Draft, rule and speculative_config."""
    for rule in rule_names.RULES:
        sampled = {} if rule == "coupled" else {"draft_sample_method": "probabilistic"}
        config = DRAFTER | sampled | {"rejection_sample_method": rule}
        yield "chain", rule, config | {"num_speculative_tokens": ROWS - 1}
        if rule not in rule_names.CHAIN_RULES:
            replacement = {"draft_with_replacement": True} if rule == "kseq" else {}
            yield "tree", rule, config | replacement | {"speculative_token_tree": TREE}


def step_parts(
    target: Any, prompts: Sequence[Any], config: Mapping[str, Any] | None, sampling: Mapping[str, Any]
) -> Any:
    """The parts of a step of all prompts side by side."""
    options = {"max_tokens": 400, "ignore_eos": True, **sampling}
    params = [spec_jax.SamplingParams(seed=seed, **options) for seed in range(len(prompts))]
    requests = make_requests(target, encode_prompts(target, prompts), params, [None] * len(prompts))
    call = prepare(target, requests, parse_speculative_config(config), ROWS, None, len(prompts), None)
    slots = call.start()
    slots.fill()
    return StepParts(call.decoder, target.params, call.drafter_params, slots.state)


def measure(parts: Mapping[Any, Any], steps: int, repeats: int) -> dict[Any, dict[str, float]]:
    """Median seconds of forward pass and verification, by key of `parts`."""
    seconds: dict[Any, dict[str, list[float]]] = {key: {"forward": [], "verify": []} for key in parts}
    for _ in range(steps):
        times = {key: part.at(ROWS) for key, part in parts.items()}
        for _ in range(repeats):
            for found in times.values():
                for name in ("step", "forward", "verify"):  # a step, so that the next time measures another one
                    found.measure(name)
        for key, found in times.items():
            for name, values in seconds[key].items():
                values += found.seconds[name]
    return {key: {name: statistics.median(x) for name, x in found.items()} for key, found in seconds.items()}


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    target = spec_jax.load_model(arguments.model)
    prompts = [model_input(target, prompt) for prompt in builtin_prompts()[: arguments.batch]]
    rows = []
    for name, sampling in SAMPLINGS.items():
        chosen = {(draft, rule): config for draft, rule, config in configurations() if rule in arguments.rules}
        keys = list(chosen)
        for start in range(0, len(keys), 4):  # a few at a time: every state holds a cache
            parts = {key: step_parts(target, prompts, chosen[key], sampling) for key in keys[start : start + 4]}
            parts[None] = step_parts(target, prompts, None, sampling)
            found = measure(parts, arguments.steps, arguments.repeats)
            forward = statistics.median(x["forward"] for x in found.values())
            for draft, rule in keys[start : start + 4]:
                verify = found[draft, rule]["verify"]
                rows.append(
                    {
                        "sampling": name,
                        "draft": draft,
                        "rule": rule,
                        "forward_ms": 1e3 * forward,
                        "verify_ms": 1e3 * verify,
                        "share": verify / forward,
                        "added": (verify - found[None]["verify"]) / forward,
                    }
                )
                console().print(f"{name}, {draft}, {rule}: {rows[-1]['added']:+.1%}")
    return rows


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    table = Table("sampling", "draft", "rule", "forward ms", "verification ms", "of the forward pass", "added to plain")
    for row in rows:
        numbers = f"{row['forward_ms']:.1f}", f"{row['verify_ms']:.2f}", f"{row['share']:.1%}", f"{row['added']:+.1%}"
        table.add_row(row["sampling"], row["draft"], row["rule"], *numbers)
    console(stderr=False).print(table)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2, help="steps that are measured")
    parser.add_argument("--repeats", type=int, default=7, help="measurements of each")
    parser.add_argument("--rules", nargs="+", default=rule_names.LOSSLESS, choices=rule_names.RULES)
    parser.add_argument("--csv", metavar="OUT")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(argv)
    try:
        check_counts(batch=arguments.batch, steps=arguments.steps, repeats=arguments.repeats)
        rows = run(arguments)
    except ValueError as error:
        parser.exit(2, f"error: {error}\n")
    if arguments.csv:
        write_csv(arguments.csv, rows)
    if arguments.json:
        print_json({"rows": rows})
    else:
        show(rows)


if __name__ == "__main__":
    main(sys.argv[1:])
