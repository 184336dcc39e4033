"""What does it cost to draft from a long history, beside the step that verifies the draft?

Command:  python experiments/history_costs.py --history FILE.jsonl ... --prompts FILE.jsonl [--tokens 1000000]
Hardware: any; on a CPU nothing else should run beside it.
Expected: below a tenth of a step, with a history of a million tokens at a context of 2048: lookups in a suffix array
take as many probes as its length has bits.

The history is made of the texts of the files. Where they are too few they are taken again, with every twentieth token
replaced at random, so that they do not end in equal texts. The contexts are texts of the prompts, one behind another.
Drafting and whole steps are timed as in `spec-jax bench --profile` (`spec_jax.step_parts`), behind several contexts,
since the cost depends on what matches.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from run_times import started

import spec_jax
from spec_jax.checks import check_counts
from spec_jax.cli_output import print_json, print_rows
from spec_jax.config import parse_speculative_config
from spec_jax.prompts import read_prompts
from spec_jax.step_parts import StepParts

METHODS: dict[str, dict[str, Any]] = {
    "suffix": {"method": "suffix"},
    "suffix, tree": {"method": "suffix", "suffix_decoding_use_tree": True},
    "sam": {"method": "sam"},
}
REPEATS = 7
REPLACED = 20
"""One token in so many differs where a text is taken again."""


def history_of(texts: Sequence[np.ndarray], tokens: int, seed: int = 0) -> spec_jax.TokenHistory:
    """A history of `tokens` tokens."""
    rng, history = np.random.default_rng(seed), spec_jax.TokenHistory(max_tokens=tokens)
    ids, left, again = np.concatenate(texts), tokens, False
    while left:
        for text in texts:
            if not left:
                break
            changed = np.where(rng.integers(REPLACED, size=len(text)) == 0, rng.choice(ids, len(text)), text)
            part = (changed if again else text)[:left]
            history.add(part)
            left -= len(part)
        again = True
    return history


def measure(target: Any, history: Any, contexts: np.ndarray, nodes: int, tell: Any) -> list[dict[str, Any]]:
    """One row per method, for a batch of contexts, int32 [trials, batch, tokens]."""
    sampling, rows, batch = spec_jax.SamplingParams(max_tokens=128, ignore_eos=True), [], contexts.shape[1]
    for name, options in METHODS.items():
        config = parse_speculative_config({**options, "history": history, "num_speculative_tokens": nodes})
        drafts, shares, proposed, parts = [], [], [], None
        for context in contexts:
            call, state = started(target, context.tolist(), sampling, config)
            if parts is None:  # which compiles
                parts = StepParts(call.decoder, target.params, call.drafter_params, state)
            parts.state = state
            times = parts.at(1 + nodes)
            for _ in range(REPEATS):
                times.measure("draft"), times.measure("step")
            draft, step = (statistics.median(times.seconds[part]) for part in ("draft", "step"))
            drafts.append(1e3 * draft)
            shares.append(draft / step)
            proposed.append(float(np.mean(times.made.draft.count)))
            tell(f"{name}, batch {batch}: {1e3 * draft:.2f} ms of {1e3 * step:.1f} ms")
        rows.append({
            "method": name, "batch": batch, "proposed": statistics.mean(proposed),
            "draft ms, median": statistics.median(drafts), "draft ms, most": max(drafts),
            "share of a step, median": statistics.median(shares), "share, most": max(shares),
        })  # fmt: skip
    return rows


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    target = spec_jax.load_model(arguments.model)

    def encoded(paths):
        texts = [target.tokenizer.encode(prompt.text) for path in paths for prompt in read_prompts(path)]
        return [np.asarray(text, np.int32) for text in texts if len(text)]

    history = history_of(encoded(arguments.history), arguments.tokens)
    flat, rows = np.concatenate(encoded([arguments.prompts])), []
    for batch in arguments.batch_sizes:
        trials = -(-arguments.trials // batch)
        starts = np.arange(trials * batch) * arguments.context // 3
        at = starts[:, None] + np.arange(arguments.context)
        contexts = flat[at % len(flat)].reshape(trials, batch, -1)
        rows += measure(target, history, contexts, arguments.nodes, lambda line: print(line, file=sys.stderr))
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--history", nargs="+", required=True, metavar="FILE.jsonl", help="texts to copy from")
    parser.add_argument("--prompts", required=True, metavar="FILE.jsonl", help="what contexts are made of")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="of the history")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--nodes", type=int, default=15, help="K")
    parser.add_argument("--trials", type=int, default=4, help="contexts per batch size, at least")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args(argv)
    try:
        counts = {name: getattr(arguments, name) for name in ("tokens", "context", "nodes", "trials")}
        check_counts(**counts, **{f"batch_sizes[{i}]": b for i, b in enumerate(arguments.batch_sizes)})
        rows = run(arguments)
    except (ValueError, OSError) as error:
        parser.exit(2, f"error: {error}\n")
    if arguments.json:
        print_json({"rows": rows})
    else:
        print_rows(rows, f"drafting from a history of {arguments.tokens} tokens behind {arguments.context}")


if __name__ == "__main__":
    main()
