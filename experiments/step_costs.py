"""Is anything lost outside the target's forward pass, and is `verify_width="auto"` ever slower than plain decoding?

Command: python experiments/step_costs.py --prompts FILE.jsonl ... [--count 20] [--max-tokens 128]
         [--runs fixed auto 'suffix={"method": "suffix", "verify_width": "auto"}' ...]
Hardware: any; on a CPU nothing else should run beside it.
Expected: speculative decoding reaches at least 0.9 of what its separately timed steps promise, tokens per step x T(1) /
(T(rows) + T(draft)); "auto" is never below 0.97 of plain decoding on any file. The figures measured are in the README.

Per file: the times of a step of n rows, with its drafting, are measured on its first prompt, for every run
(`run_times.py`). Then every prompt is decoded plainly and by every run, in rotating
order, so that each prompt is one interleaved pair for every ratio. Outputs of which more than a fifth of the 8-grams
have occurred before are loops, which flatter drafts that copy; the ratios are given without them too. Beside them
stands what the planner projects for accelerators from the same acceptances, under "projected".
"""

import argparse
import json
import statistics
from pathlib import Path

from projected import costs_of_drafter, projected_speedups
from run_times import run_times

import spec_jax
from spec_jax.bench import repeated_ngram_share
from spec_jax.checks import check_counts
from spec_jax.config import parse_speculative_config
from spec_jax.generation import encode_prompts
from spec_jax.prompts import model_input, read_prompts

LOOP = 0.2
AUTO = {"method": "ngram", "verify_width": "auto"}
PLAIN = {"plain": {}, "narrow": {"verify_width": 1, "exact": False}}
"""Options of `generate`; "narrow" is the fastest plain decoding, one row and no promise."""
RUNS = {"fixed": {"method": "ngram"}, "auto": AUTO}
"""Speculative configurations that have a name."""


def parse_runs(texts: list[str]) -> dict[str, dict]:
    """NAME of `RUNS`, or NAME=JSON, to configurations."""
    found = {}
    for text in texts:
        name, separator, config = text.partition("=")
        if not separator and name not in RUNS:
            raise ValueError(f"--runs {text!r} is neither NAME=JSON nor one of {', '.join(RUNS)}")
        if name in PLAIN or name in found:
            raise ValueError(f"--runs: the name {name!r} is taken")
        try:
            found[name] = json.loads(config) if separator else RUNS[name]
            parsed = parse_speculative_config(found[name])
            if not parsed.num_speculative_tokens:
                raise ValueError("it drafts nothing, which is plain decoding and measured anyway")
        except ValueError as error:
            raise ValueError(f"--runs {name}: {error}") from None
    return found


def spread(values: list[float]) -> dict[str, float]:
    """Median and quartiles of a list of ratios."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return {"median": middle, "quartiles": [low, high], "pairs": len(values)}


def measure_file(target, prompts, max_tokens: int, runs: dict[str, dict], tell) -> dict:
    """Everything about one file. Prompts are lists of token ids."""
    sampling = spec_jax.SamplingParams(max_tokens=max_tokens)
    options = PLAIN | {name: {"speculative_config": config} for name, config in runs.items()}
    longest = max(prompts, key=len)
    for prompt in (prompts[0], longest):  # compiles
        for chosen in options.values():
            spec_jax.generate(target, [prompt], sampling=spec_jax.SamplingParams(max_tokens=4), **chosen)
    times = {name: run_times(target, prompts[0], max_tokens, config) for name, config in runs.items()}
    rows = []
    for number, prompt in enumerate(prompts):
        order = list(options)
        order = order[number % len(order) :] + order[: number % len(order)]
        found = {name: spec_jax.generate(target, [prompt], sampling=sampling, **options[name]) for name in order}
        ids = {name: result.sequences[0].token_ids for name, result in found.items()}
        stats = {name: result.stats for name, result in found.items()}
        row = {
            "equal": all(ids[name] == ids["plain"] for name in options),
            "repeated": repeated_ngram_share([ids["plain"]]) or 0.0,
            "seconds": {name: s.decode_seconds for name, s in stats.items()},
            "tokens_per_step": {name: s.num_emitted_tokens / s.num_steps for name, s in stats.items()},
            "context": len(prompt) + len(ids["plain"]) // 2,
            "drafted_per_step": {
                name: stats[name].num_draft_tokens / stats[name].num_steps + times[name].auxiliary for name in runs
            },
            "promise_kept": {
                name: [
                    float(times[name].promised(stats[name]) / stats[name].decode_seconds),
                    float(stats["plain"].num_steps * times[name].alone / stats["plain"].decode_seconds),
                ]
                for name in runs
            },
        }
        rows.append(row)
        tell(json.dumps({"prompt": number, **row}))
    report = {
        name: [round(1e3 * float(t), 2) for t in (found.alone, *found.steps[1:])] for name, found in times.items()
    }
    return {"times_ms": report, "rows": rows, **summary(target, rows, runs)}


def summary(target, rows: list[dict], runs: dict[str, dict]) -> dict:
    """Medians over pairs, of all outputs and of those that do not loop."""
    out = {
        "equal": sum(r["equal"] for r in rows),
        "prompts": len(rows),
        "loops": sum(r["repeated"] > LOOP for r in rows),
    }
    drafters = {name: costs_of_drafter(target, config) for name, config in runs.items()}
    out["repeated_8gram_share"] = statistics.mean(r["repeated"] for r in rows)
    for label, chosen in (("all", rows), ("without_loops", [r for r in rows if r["repeated"] <= LOOP])):
        if not chosen:
            continue
        narrow = [r["seconds"]["plain"] / r["seconds"]["narrow"] for r in chosen]
        part = out[label] = {"plain_over_narrow_seconds": spread(narrow)}
        for name, drafter in drafters.items():
            part[f"{name}_speedup"] = spread([r["seconds"]["plain"] / r["seconds"][name] for r in chosen])
            total = sum(r["seconds"]["plain"] for r in chosen) / sum(r["seconds"][name] for r in chosen)
            part[f"{name}_speedup"]["of_totals"] = total
            tokens, drafted = (
                statistics.mean(r[key][name] for r in chosen) for key in ("tokens_per_step", "drafted_per_step")
            )
            part[f"{name}_tokens_per_step"] = tokens
            context = round(statistics.mean(r["context"] for r in chosen))
            part[f"{name}_projected"] = projected_speedups(target, tokens, drafted, context, drafter)
            kept = [r["promise_kept"][name] for r in chosen]
            part[f"{name}_speedup_over_promised"] = spread([ours / plain for ours, plain in kept])
    return out


def run(arguments: argparse.Namespace) -> None:
    runs = parse_runs(arguments.runs)
    if arguments.output:
        Path(arguments.output).touch()  # what cannot be written must not cost a run
    target = spec_jax.load_model(arguments.model, dtype=arguments.dtype)
    report = {}
    for path in arguments.prompts:
        prompts = [model_input(target, p) for p in read_prompts(path)[: arguments.count]]
        prompts = encode_prompts(target, prompts)
        found = measure_file(target, prompts, arguments.max_tokens, runs, lambda line: print(line, flush=True))
        report[Path(path).stem] = found
        print(Path(path).stem, json.dumps({k: v for k, v in found.items() if k != "rows"}, indent=1), flush=True)
        if arguments.output:
            Path(arguments.output).write_text(json.dumps(report))


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--prompts", nargs="+", required=True, help="JSONL files of prompts")
    parser.add_argument("--count", type=int, default=20, help="prompts per file")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--runs", nargs="+", default=list(RUNS), metavar="NAME or NAME=JSON", help="configurations")
    parser.add_argument("--output", help="write everything measured to this JSON file")
    arguments = parser.parse_args(argv)
    try:
        check_counts(count=arguments.count, max_tokens=arguments.max_tokens)
        run(arguments)
    except (ValueError, OSError) as error:
        parser.exit(2, f"error: {error}\n")


if __name__ == "__main__":
    main()
