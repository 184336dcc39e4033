"""The target's answers to prompts, greedy and sampled, in a folder that training reads; a killed run goes on.

Command:  python experiments/training_responses.py --prompts prompts.jsonl --out FOLDER [--sampled 0.4]
          [--max-tokens 160] [--target smollm2-135m-instruct] [--seed 0]
Hardware: any; about 250 tokens a second on one CPU core, of answers and prompts alike.
Expected: shards of 256 texts, and a line of counts for every one.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence

import spec_jax
from spec_jax.checks import is_number
from spec_jax.drafting.training.data import generate_responses
from spec_jax.prompts import model_input, read_prompts


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", nargs="+", required=True, metavar="FILE")
    parser.add_argument("--out", required=True, metavar="FOLDER")
    parser.add_argument("--sampled", type=float, default=0.4, help="share of answers sampled at temperature 1")
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--max-prompt-tokens", type=int, default=600)
    parser.add_argument("--batch", type=int, default=64, help="rows decoded side by side")
    parser.add_argument("--shard", type=int, default=256, help="texts per file")
    parser.add_argument("--target", default="smollm2-135m-instruct")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(argv)
    begin = time.perf_counter()

    def tell(stats):
        print(f"{time.perf_counter() - begin:.0f} s: {stats}", flush=True)

    try:
        if not is_number(given.sampled) or not 0 <= given.sampled <= 1:
            raise ValueError(f"--sampled {given.sampled} must be in [0, 1]")
        prompts = [prompt for path in given.prompts for prompt in read_prompts(path)]
        target = spec_jax.load_model(given.target)
        rng = random.Random(given.seed)
        generate_responses(
            target,
            [model_input(target, prompt) for prompt in prompts],
            given.out,
            max_tokens=given.max_tokens,
            temperature=[float(rng.random() < given.sampled) for _ in prompts],
            batch_size=given.batch,
            shard_size=given.shard,
            max_prompt_tokens=given.max_prompt_tokens,
            seed=given.seed,
            progress=tell,
        )
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
