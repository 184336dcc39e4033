"""Is speculative decoding of a real model bit-identical to plain decoding, whatever the drafter, K, batch and bucket?

Command:   python experiments/exactness.py --dtype float32 [--quick] [--out exactness.jsonl]
Hardware:  any; made for a CPU (SmolLM2-135M-Instruct, about 30 minutes on 2 cores, --quick about 6)
Expected:  every line says text "equal" and logits "equal" (E2), in float32 and in bfloat16.

Every run records a checksum of the logit bits at each emitted position. The reference is plain decoding of each prompt
alone at batch 1; a run is equal where all tokens and all checksums of all rows are.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import spec_jax
from spec_jax.cache import BLOCK
from spec_jax.compilation import compiled
from spec_jax.config import choose_width, parse_speculative_config
from spec_jax.decode import Decoder
from spec_jax.decode_state import LENGTH
from spec_jax.drafting.registry import build_drafter
from spec_jax.exactness import row_blocks
from spec_jax.models.config import LlamaConfig
from spec_jax.models.llama import Llama, init_params
from spec_jax.models.model import Model
from spec_jax.requests import sampling_state

PROMPTS = [
    "Write a short note that thanks a neighbour for watering the plants.",
    "def add(a, b):\n    return a + b\n\nRewrite the function above so that it adds three numbers:",
    "Count from one to ten, one number per line.",
    "The capital of France is",
    "List three facts about the moon, each in one sentence, and then list them again.",
    "2 + 2 = 4. 3 + 3 =",
    "Translate to French: Good morning, how are you?",
    "Repeat after me: red green blue red green blue red green",
]


@dataclasses.dataclass(frozen=True)
class Recorder:
    """A drafter that behaves like `inner` and keeps a checksum of the logits at every committed position."""

    inner: Any

    num_nodes = property(lambda self: self.inner.num_nodes)
    parents = property(lambda self: self.inner.parents)
    dynamic_tree = property(lambda self: self.inner.dynamic_tree)
    needs = property(lambda self: self.inner.needs)

    def init(self, params, target, batch, capacity):
        return self.inner.init(params, target, batch, capacity), jnp.zeros((batch, capacity), jnp.uint32)

    def commit(self, params, state, seen):
        inner, sums = state
        inner = self.inner.commit(params, inner, seen)
        if not seen.prefill:
            bits = jax.lax.bitcast_convert_type(seen.logits, jnp.uint32)
            weights = jnp.arange(bits.shape[-1], dtype=jnp.uint32) * jnp.uint32(2654435761) + jnp.uint32(1)
            row_sum = (bits * weights).sum(-1, dtype=jnp.uint32)  # [batch, width]; wraps, and depends on every bit
            along = jnp.take_along_axis(row_sum, seen.path, axis=1)
            column = jnp.arange(along.shape[1])
            at = jnp.where(column < seen.count[:, None], seen.start[:, None] + 1 + column, sums.shape[1])
            sums = sums.at[jnp.arange(at.shape[0])[:, None], at].set(along, mode="drop")
        return inner, sums

    def for_prefill(self):
        return Recorder(self.inner.for_prefill())

    def propose(self, params, state, view):
        draft, inner = self.inner.propose(params, state[0], view)
        return draft, (inner, state[1])


def record(target, prompts, inner, params, exact, capacity, max_tokens):
    """Tokens and logit checksums of every prompt's continuation, and the acceptance length."""
    batch, width = len(prompts), choose_width(inner.num_nodes, None)
    rows = row_blocks(exact, batch, width, target.module)
    decoder = Decoder(target.module, Recorder(inner), target.vocab_size, width, "coupled", rows, 32)
    lengths = np.array([len(p) for p in prompts], np.int32)
    tokens = np.zeros((batch, capacity), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    arrays = map(jnp.asarray, (tokens, lengths, lengths + max_tokens, np.full(batch, LENGTH, np.int32)))
    arguments = (target.params, params, *arrays, sampling_state([], batch))
    init, _ = compiled(decoder.for_prefill(), "init", *arguments)
    state = init(*arguments)
    arguments = (target.params, params, state, jnp.int32(10**6))
    run, _ = compiled(decoder, "run", *arguments)
    state = run(*arguments)
    host = jax.device_get((state.tokens, state.drafter[1], state.trace))
    spans = [slice(n, n + max_tokens) for n in lengths]
    drafts = sum(int((host[2].drafted[r, s] > 0).sum()) for r, s in enumerate(spans))
    accepted = sum(int(host[2].accepted[r, s].sum()) for r, s in enumerate(spans))
    length = 1 + accepted / drafts if drafts else None
    return (
        [host[0][r, s].tolist() for r, s in enumerate(spans)],
        [host[1][r, s].tolist() for r, s in enumerate(spans)],
        length,
    )


def tiny_drafter(target: Model) -> Model:
    """A random two-layer model over the target's vocabulary: its drafts are always wrong."""
    c = target.config
    config = LlamaConfig(c.vocab_size, 64, 128, 2, 4, 2, 16, c.max_position_embeddings, tie_embeddings=True)
    module = Llama(config, target.module.dtype)
    return dataclasses.replace(target, module=module, params=init_params(module), name="tiny-random")


def settings(target: Model, quick: bool):
    """(name, speculative_config, batch, capacity) of every run."""
    own = {"method": "draft_model", "model": target}
    random = {"method": "draft_model", "model": tiny_drafter(target)}
    for batch in (3,) if quick else (3, 1, 8):
        yield "none", None, batch, 1024
        for name, config in (
            ("ngram", {"method": "ngram"}),
            ("layer_skip", {"method": "layer_skip"}),
            ("draft_model tiny", random),
            ("draft_model self", own),
        ):
            for k in (4,) if quick else (1, 3, 4, 7):
                yield name, config | {"num_speculative_tokens": k}, batch, 4 * BLOCK


def run_matrix(target: Model, *, quick: bool, exact: bool | None, max_tokens: int, report):
    """Runs every setting and calls `report(line)` with a dict for each; returns all lines."""
    prompts = [target.tokenizer.encode(p) for p in PROMPTS]
    lines = []
    none = build_drafter(parse_speculative_config(None), target, row_blocks(exact, 1, 8, target.module))
    reference = [record(target, [p], *none, exact, 4 * BLOCK, max_tokens) for p in prompts]
    for name, config, batch, capacity in settings(target, quick):
        config = parse_speculative_config(config)
        drafter, params = build_drafter(config, target, row_blocks(exact, batch, 8, target.module))
        start = time.perf_counter()
        text, sums, length = record(target, prompts[:batch], drafter, params, exact, capacity, max_tokens)
        line = {
            "drafter": name, "k": config.num_speculative_tokens, "batch": batch, "capacity": capacity,
            "text": "equal" if text == [r[0][0] for r in reference[:batch]] else "differs",
            "logits": "equal" if sums == [r[1][0] for r in reference[:batch]] else "differ",
            "mean_acceptance_length": length, "seconds": round(time.perf_counter() - start, 1),
        }  # fmt: skip
        lines.append(line)
        report(line)
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--quick", action="store_true", help="K=4 and batch 3 only")
    parser.add_argument("--out", help="append each line to this file as JSON")
    arguments = parser.parse_args()
    target = spec_jax.load_model(arguments.model, dtype=arguments.dtype)
    versions = {"jax": jax.__version__, "python": platform.python_version(), "dtype": arguments.dtype}

    def report(line):
        print(json.dumps(line), flush=True)
        if arguments.out:
            with open(arguments.out, "a") as file:
                file.write(json.dumps(versions | line) + "\n")

    lines = run_matrix(target, quick=arguments.quick, exact=True, max_tokens=arguments.max_tokens, report=report)
    equal = sum(line["text"] == "equal" and line["logits"] == "equal" for line in lines)
    print(f"{equal} of {len(lines)} runs bit-identical ({versions})")
    sys.exit(equal != len(lines))


if __name__ == "__main__":
    main()
