"""Which layers of the target draft best? A search over sets of layers, as in Draft & Verify and SWIFT.

Command:  python experiments/skip_search.py [--prompts FILE.jsonl] [--rounds 30] [--layers 15]
Hardware: any. SmolLM2-135M on 2 CPU cores takes about ten minutes.
Expected: the best set accepts several times what the first layers of the same number do: on a model that was not
trained to exit early, the last layers matter most for the next token.

Draft & Verify (https://arxiv.org/abs/2309.08168) searches the layers to skip by Bayesian optimisation, SWIFT
(https://arxiv.org/abs/2410.06916) by random search too. Here layers are left out one after another, each time the best
of a few drawn at random; then one that runs is exchanged for one that does not, where the layers agree more often with
the whole model's greedy next token. The agreement is measured teacher-forced, in one pass over texts that the target
wrote itself, which is what a draft of one token would be accepted at. The set goes into {"method": "layer_skip",
"draft_layers": [...]}.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import spec_jax
from spec_jax import cache as kv
from spec_jax.checks import check_counts
from spec_jax.cli_output import console, print_json
from spec_jax.kernels.masks import chain_ancestors
from spec_jax.models.layers import RowBlocks
from spec_jax.prompts import builtin_prompts, model_input, read_prompts


@functools.partial(jax.jit, static_argnums=0)
def _next_tokens(module: Any, params: Any, tokens: jax.Array, runs: jax.Array) -> jax.Array:
    """Greedy next tokens int32 [batch, width] of the layers that run, bool [layers]."""
    c, width = module.config, tokens.shape[1]
    cache = kv.init_cache(c, tokens.shape[0], width, module.dtype)

    def forward(bound, tokens, cache):
        flight = bound.flight(cache, width, np.arange(width, dtype=np.int32), chain_ancestors(width))
        x = bound.embed(tokens)
        for layer in range(c.num_layers):  # every layer is computed, and taken where it runs: one program for all sets
            y, cache, _ = bound.layers(x, cache, flight, RowBlocks(), start=layer, stop=layer + 1)
            x = jnp.where(runs[layer], y, x)
        return bound.head(bound.final_norm(x, RowBlocks()), RowBlocks())

    logits = module.apply({"params": params}, tokens, cache, method=forward)
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def written_texts(target: Any, prompts: Sequence[Any], max_tokens: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens int32 [prompts, width] with outputs of the target at their ends, and which places are outputs, bool."""
    result = spec_jax.generate(target, list(prompts), None, spec_jax.SamplingParams(max_tokens=max_tokens))
    tokens, mine = np.zeros((len(prompts), width), np.int32), np.zeros((len(prompts), width), bool)
    for row, (ids, sequence) in enumerate(zip(result.session.token_ids, result.sequences, strict=True)):
        kept = ids[-width:]
        tokens[row, : len(kept)] = kept
        count = min(len(sequence.token_ids), len(kept) - 1)
        mine[row, len(kept) - count - 1 : len(kept) - 1] = True  # places whose next token the target wrote
    return tokens, mine


class Search:
    """Agreement of sets of layers with the whole model."""

    def __init__(self, target: Any, tokens: np.ndarray, mine: np.ndarray):
        self._target, self._tokens, self._mine = target, jnp.asarray(tokens), mine
        self.count = target.config.num_layers
        self._want = self._next(range(self.count))

    def _next(self, layers: Sequence[int]) -> np.ndarray:
        runs = np.isin(np.arange(self.count), list(layers))
        return np.asarray(_next_tokens(self._target.module, self._target.params, self._tokens, runs))

    def agreement(self, layers: Sequence[int]) -> float:
        return float((self._next(layers) == self._want)[self._mine].mean())

    def best(self, size: int, tries: int, rounds: int, seed: int, tell: Any) -> tuple[list[int], float]:
        """A set of `size` layers: `tries` layers are tried for each that is left out, and then `rounds` exchanges."""
        rng, chosen, score = np.random.default_rng(seed), list(range(self.count)), 1.0
        while len(chosen) > size:
            out = rng.permutation(chosen)[:tries]
            score, best = max((self.agreement([i for i in chosen if i != o]), int(o)) for o in out)
            chosen.remove(best)
            tell(f"{len(chosen)} layers: {score:.3f}")
        for number in range(rounds):
            out, into = rng.choice(chosen), rng.choice([i for i in range(self.count) if i not in chosen])
            other = sorted({*chosen, int(into)} - {int(out)})
            found = self.agreement(other)
            if found >= score:
                chosen, score = other, found
            tell(f"round {number + 1} of {rounds}: {score:.3f}")
        return [int(i) for i in chosen], score


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--prompts", metavar="FILE.jsonl", help="default: the built-in ones")
    parser.add_argument("--count", type=int, default=8, help="prompts")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--width", type=int, default=192, help="tokens of each text that are looked at, from its end")
    parser.add_argument("--layers", type=int, default=15, help="layers that draft")
    parser.add_argument("--tries", type=int, default=6, help="layers that are tried for each that is left out")
    parser.add_argument("--rounds", type=int, default=30, help="exchanges that are tried at the end")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args(argv)
    try:
        names = ("count", "max_tokens", "width", "layers", "tries", "rounds")
        check_counts(**{name: getattr(arguments, name) for name in names})
        target = spec_jax.load_model(arguments.model, cpu_kernels=False)
        if arguments.layers >= target.config.num_layers:
            raise ValueError(f"--layers {arguments.layers} must be fewer than the {target.config.num_layers} there are")
        prompts = read_prompts(arguments.prompts) if arguments.prompts else builtin_prompts()
        texts = [model_input(target, prompt) for prompt in prompts[: arguments.count]]
        search = Search(target, *written_texts(target, texts, arguments.max_tokens, arguments.width))
        tell = functools.partial(print, file=sys.stderr)
        chosen, score = search.best(arguments.layers, arguments.tries, arguments.rounds, arguments.seed, tell)
    except (ValueError, OSError) as error:
        parser.exit(2, f"error: {error}\n")
    first = search.agreement(range(arguments.layers))
    report = {"draft_layers": chosen, "agreement": score, "agreement_of_the_first_layers": first}
    if arguments.json:
        print_json(report)
    else:
        console(stderr=False).print(report)


if __name__ == "__main__":
    main()
