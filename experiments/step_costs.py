"""Is anything lost outside the target's forward pass, and is `verify_width="auto"` ever slower than plain decoding?

Command: python experiments/step_costs.py --prompts FILE.jsonl ... [--count 20] [--max-tokens 128]
Hardware: any; on a CPU nothing else should run beside it.
Expected: speculative decoding reaches at least 0.9 of what its separately timed steps promise, tokens per step x T(1) /
(T(rows) + T(draft)); "auto" is never below 0.97 of plain decoding on any file. The figures measured are in the README.

Per file: the times of a step of n rows, with its drafting, are measured by ordered steps (`spec_jax.step_times`) on its
first prompt. Then every prompt is decoded plainly, with n-gram drafts of fixed length and with "auto", in rotating
order, so that each prompt is one interleaved pair for every ratio. Outputs of which more than a fifth of the 8-grams
have occurred before are loops, which flatter n-gram drafts; the ratios are given without them too.
"""

import argparse
import json
import statistics
from pathlib import Path

import numpy as np

import spec_jax
from spec_jax import step_times
from spec_jax.bench import repeated_ngram_share
from spec_jax.generation import encode_prompts
from spec_jax.prompts import model_input, read_prompts

LOOP = 0.2
AUTO = {"method": "ngram", "verify_width": "auto"}
RUNS = {
    "plain": {},
    "narrow": {"verify_width": 1, "exact": False},
    "fixed": {"speculative_config": {"method": "ngram"}},
    "auto": {"speculative_config": AUTO},
}
"""Options of `generate`; "narrow" is the fastest plain decoding, one row and no promise."""


def spread(values: list[float]) -> dict[str, float]:
    """Median and quartiles of a list of ratios."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return {"median": middle, "quartiles": [low, high], "pairs": len(values)}


def promised_seconds(stats, times: np.ndarray) -> float:
    """Seconds of a run's steps by the separately measured times of steps of n rows, drafting included.

    Steps without a draft compute one row. Of the others only the mean number of drafted tokens is known.
    """
    drafted = stats.num_draft_tokens / max(stats.num_drafts, 1)
    with_draft = np.interp(1 + drafted, np.arange(len(times)), times)
    return (stats.num_steps - stats.num_drafts) * times[1] + stats.num_drafts * with_draft


def measure_times(target, prompt, max_tokens: int) -> np.ndarray:
    """Seconds of a step of n rows behind this prompt, drafting included; index 0 is not used."""
    step_times.forget()
    sampling = spec_jax.SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    while not (known := step_times.latest()) or not known.done:
        spec_jax.generate(target, [prompt], AUTO, sampling)
    pace = known.pace()
    return np.asarray(pace.times) + float(pace.draft)


def measure_file(target, prompts, max_tokens: int, tell) -> dict:
    """Everything about one file."""
    sampling = spec_jax.SamplingParams(max_tokens=max_tokens)
    longest = max(prompts, key=len)
    for prompt in (prompts[0], longest):  # compiles
        for options in RUNS.values():
            spec_jax.generate(target, [prompt], sampling=spec_jax.SamplingParams(max_tokens=4), **options)
    times = measure_times(target, prompts[0], max_tokens)
    rows = []
    for number, prompt in enumerate(prompts):
        order = list(RUNS)
        order = order[number % len(order) :] + order[: number % len(order)]
        found = {name: spec_jax.generate(target, [prompt], sampling=sampling, **RUNS[name]) for name in order}
        ids = {name: result.sequences[0].token_ids for name, result in found.items()}
        stats = {name: result.stats for name, result in found.items()}
        row = {
            "equal": all(ids[name] == ids["plain"] for name in RUNS),
            "repeated": repeated_ngram_share([ids["plain"]]) or 0.0,
            "seconds": {name: s.decode_seconds for name, s in stats.items()},
            "tokens_per_step": {name: s.num_emitted_tokens / s.num_steps for name, s in stats.items()},
            "promise_kept": {name: float(promised_seconds(s, times) / s.decode_seconds) for name, s in stats.items()},
        }
        rows.append(row)
        tell(json.dumps({"prompt": number, **row}))
    return {"times_ms": [round(1e3 * float(t), 2) for t in times[1:]], "rows": rows, **summary(rows)}


def summary(rows: list[dict]) -> dict:
    """Medians over pairs, of all outputs and of those that do not loop."""
    out = {
        "equal": sum(r["equal"] for r in rows),
        "prompts": len(rows),
        "loops": sum(r["repeated"] > LOOP for r in rows),
    }
    out["repeated_8gram_share"] = statistics.mean(r["repeated"] for r in rows)
    for label, chosen in (("all", rows), ("without_loops", [r for r in rows if r["repeated"] <= LOOP])):
        if not chosen:
            continue
        narrow = [r["seconds"]["plain"] / r["seconds"]["narrow"] for r in chosen]
        part = out[label] = {"plain_over_narrow_seconds": spread(narrow)}
        for name in ("fixed", "auto"):
            part[f"{name}_speedup"] = spread([r["seconds"]["plain"] / r["seconds"][name] for r in chosen])
            total = sum(r["seconds"]["plain"] for r in chosen) / sum(r["seconds"][name] for r in chosen)
            part[f"{name}_speedup"]["of_totals"] = total
            part[f"{name}_tokens_per_step"] = statistics.mean(r["tokens_per_step"][name] for r in chosen)
            kept = [r["promise_kept"][name] / r["promise_kept"]["plain"] for r in chosen]
            part[f"{name}_speedup_over_promised"] = spread(kept)
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--prompts", nargs="+", required=True, help="JSONL files of prompts")
    parser.add_argument("--count", type=int, default=20, help="prompts per file")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--output", help="write everything measured to this JSON file")
    arguments = parser.parse_args()
    target = spec_jax.load_model(arguments.model, dtype=arguments.dtype)
    report = {}
    for path in arguments.prompts:
        prompts = [model_input(target, p) for p in read_prompts(path)[: arguments.count]]
        prompts = encode_prompts(target, prompts)
        found = measure_file(target, prompts, arguments.max_tokens, lambda line: print(line, flush=True))
        report[Path(path).stem] = found
        print(Path(path).stem, json.dumps({k: v for k, v in found.items() if k != "rows"}, indent=1), flush=True)
        if arguments.output:
            Path(arguments.output).write_text(json.dumps(report))


if __name__ == "__main__":
    main()
