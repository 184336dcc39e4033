"""How many tokens does a step emit under every verification rule, on the very same drafts of a real model?

Command:   python experiments/verification_rules.py [--prompts FILE.jsonl ...] [--count N] [--csv OUT] [--json]
Hardware:  any CPU; 2 cores take about 30 minutes for the built-in prompts
Expected:  block and traversal at least as many as standard on chains, traversal at least as many as recursive on trees,
           most so at temperature 1; exact match (coupled on drafts that do not share its noise) fewest. Lossy rules
           emit more of likely drafts. Rows are in `experiments/results/verification_rules.csv`

Texts are sampled from the target by one rule; in every step the draft is verified once and then judged by all rules,
several times each with noise of its own, so that rules differ by what they do and not by what was drafted. Drafts come
from the target itself without some of its layers (`--drafter` names another). A Sequoia tree is made per temperature
from the acceptances of siblings that are measured first. Means are over prompts, and so are their standard errors;
ratios are to the first rule of each shape, prompt by prompt.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.table import Table

import spec_jax
from spec_jax import rule_names
from spec_jax.checks import check_counts
from spec_jax.cli_output import console, print_json, write_csv
from spec_jax.config import parse_speculative_config
from spec_jax.generation import prepare
from spec_jax.prompts import builtin_prompts, model_input, read_prompts
from spec_jax.requests import encode_prompts, make_requests
from spec_jax.token_tree import parse_tree, paths_of, sequoia_tree

DRAFTER = {"method": "layer_skip", "draft_layers": [*range(10), *range(14, 30)]}
CHAIN = {"num_speculative_tokens": 6, "draft_sample_method": "probabilistic"}
BINARY = [
    [0],
    [1],
    *([a, b] for a in (0, 1) for b in (0, 1)),
    *([a, b, c] for a in (0, 1) for b in (0, 1) for c in (0, 1)),
]
SIBLINGS = 8
LOSSY = tuple(rule_names.LOSSY)
ON_TREES = ("lossy_typical", "lossy_relaxed")
SAMPLED = {"draft_sample_method": "probabilistic"}
SHAPES: Mapping[str, tuple[Mapping[str, Any], tuple[str, ...]]] = {
    "chain": (CHAIN, ("standard", "block", "traversal", "recursive", "kseq", "coupled", *LOSSY)),
    "tree": (SAMPLED | {"speculative_token_tree": BINARY}, ("recursive", "traversal", "coupled", *ON_TREES)),
    "tree, with replacement": (
        SAMPLED | {"speculative_token_tree": BINARY, "draft_with_replacement": True},
        ("recursive", "kseq", "traversal", "coupled"),
    ),
    "tree, likeliest": ({"speculative_token_tree": BINARY}, ("recursive", "traversal", "coupled", *ON_TREES)),
}
"""By name: how drafts are made, and the rules; the first writes the text, and ratios are to it."""
SEQUOIA = ("recursive", "traversal")


@functools.lru_cache
def judged_step(decoder: Any, rules: tuple[str, ...], repeats: int) -> Any:
    """(parameters, drafter's parameters, state) -> the state behind a step, and by rule what it makes of the draft:
    accepted drafts and the first row of the path, int32 [repeats, prompts] each."""

    def judge(rule, state, draft, flight, logits, repeat):
        keys = jax.vmap(lambda key: jax.random.fold_in(key, repeat))(state.sampling.key)
        other = state.replace(sampling=state.sampling.replace(key=keys))
        by = dataclasses.replace(decoder, rule=rule, rule_options=rule_names.options_of(rule, {}))
        verdict, _ = by.verify(other, draft, flight, logits, None)
        return verdict.num_accepted, verdict.path[:, 1]

    def step(params, drafter_params, state):
        draft, drafter_state = decoder.draft(params, drafter_params, state, None, None)
        flight, out = decoder.forward(params, state, draft)
        noise = 1000 + jnp.arange(repeats)
        found = {
            rule: jax.lax.map(functools.partial(judge, rule, state, draft, flight, out.logits), noise) for rule in rules
        }
        verdict, _ = decoder.verify(state, draft, flight, out.logits, None)
        return decoder.commit(drafter_params, state, drafter_state, draft, flight, out, verdict, ()), found

    return jax.jit(step, donate_argnums=2)


def run_steps(
    target: Any,
    prompts: list[Any],
    config: Mapping[str, Any],
    rules: tuple[str, ...],
    temperature: float,
    steps: int,
    repeats: int,
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Steps of one batch of prompts whose drafts every rule judges; the first rule writes the text.

    Returns:
      By rule: accepted drafts, and the first row of the path, int [steps, repeats, prompts] each.
    """
    tree = config.get("speculative_token_tree")
    most = 1 + (config["num_speculative_tokens"] if tree is None else max(map(len, tree)))
    options = {"temperature": temperature, "max_tokens": steps * most + 1, "ignore_eos": True}
    params = [spec_jax.SamplingParams(seed=seed, **options) for seed in range(len(prompts))]
    requests = make_requests(target, encode_prompts(target, prompts), params, [None] * len(prompts))
    asked = parse_speculative_config({**config, "rejection_sample_method": rules[0]})
    call = prepare(target, requests, asked, None, None, len(prompts), None)
    slots = call.start()
    slots.fill()
    step, state, found = judged_step(call.decoder, rules, repeats), slots.state, []
    for _ in range(steps):
        state, one = step(target.params, call.drafter_params, state)
        found.append(jax.device_get(one))
    return {rule: tuple(np.stack([one[rule][i] for one in found]) for i in (0, 1)) for rule in rules}


def summary(found: Mapping[str, tuple[np.ndarray, np.ndarray]], rules: Sequence[str]) -> list[dict[str, Any]]:
    """One row per rule: tokens per step, and its ratio to the first rule, with standard errors over prompts."""
    per_prompt = {rule: 1 + found[rule][0].mean(axis=(0, 1)) for rule in rules}
    first, rows = per_prompt[rules[0]], []
    for rule, tokens in per_prompt.items():
        scale = len(tokens) ** 0.5
        ratio = tokens / first
        rows.append(
            {
                "rule": rule,
                "tokens_per_step": float(tokens.mean()),
                "error": float(tokens.std(ddof=1) / scale),
                "ratio": float(tokens.mean() / first.mean()),
                "ratio_error": float(ratio.std(ddof=1) / scale),
                "lossless": rule in rule_names.LOSSLESS,
            }
        )
    return rows


def acceptances(found: tuple[np.ndarray, np.ndarray]) -> list[float]:
    """How often each of SIBLINGS siblings is the accepted one, in draw order."""
    accepted, row = found
    return [float(((accepted == 1) & (row == place + 1)).mean()) for place in range(SIBLINGS)]


def in_batches(target: Any, prompts: list[Any], batch: int, *more: Any) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """`run_steps` of all prompts."""
    parts = [run_steps(target, prompts[i : i + batch], *more) for i in range(0, len(prompts), batch)]
    return {rule: tuple(np.concatenate([p[rule][i] for p in parts], axis=-1) for i in (0, 1)) for rule in parts[0]}


def read(arguments: argparse.Namespace, target: Any) -> list[Any]:
    given = [read_prompts(path)[: arguments.count] for path in arguments.prompts or ()]
    prompts = [p for file in given for p in file] if given else builtin_prompts()[: arguments.count]
    prompts = prompts[: len(prompts) // arguments.batch * arguments.batch]
    if len(prompts) < 2:
        raise ValueError(
            f"--batch {arguments.batch} needs as many prompts, and two at least; give more or a smaller one"
        )
    return [model_input(target, prompt) for prompt in prompts]


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    target = spec_jax.load_model(arguments.model)
    prompts, drafter, rows = read(arguments, target), json.loads(arguments.drafter), []
    sizes = arguments.steps, arguments.repeats
    for temperature in arguments.temperatures:
        shapes = dict(SHAPES)
        star = drafter | SAMPLED | {"speculative_token_tree": [[i] for i in range(SIBLINGS)]}
        found = in_batches(target, prompts, arguments.batch, star, ("recursive",), temperature, *sizes)
        measured = acceptances(found["recursive"])
        tree = paths_of(sequoia_tree(measured, len(parse_tree(BINARY))).parents)
        shapes["tree, Sequoia"] = (SAMPLED | {"speculative_token_tree": [list(path) for path in tree]}, SEQUOIA)
        console().print(f"T={temperature}: acceptances {np.round(measured, 3).tolist()}, Sequoia's tree {tree}")
        for name, (config, rules) in shapes.items():
            found = in_batches(target, prompts, arguments.batch, drafter | dict(config), rules, temperature, *sizes)
            rows += [{"temperature": temperature, "shape": name, **row} for row in summary(found, rules)]
            console().print(f"T={temperature}, {name}: done")
    return rows


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    table = Table("T", "draft", "rule", "tokens per step", "of the first rule")
    for row in rows:
        name = row["rule"] if row["lossless"] else f"[yellow]{row['rule']}[/]"
        tokens, ratio = (
            f"{row[a]:.3f} ± {row[b]:.3f}" for a, b in (("tokens_per_step", "error"), ("ratio", "ratio_error"))
        )
        table.add_row(str(row["temperature"]), row["shape"], name, tokens, ratio)
    console(stderr=False).print(table)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--drafter", default=json.dumps(DRAFTER), help="speculative_config keys, as JSON")
    parser.add_argument("--prompts", nargs="+", metavar="FILE.jsonl", help="default: the built-in ones")
    parser.add_argument("--count", type=int, default=16, help="prompts per file")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=24, help="steps per prompt")
    parser.add_argument("--repeats", type=int, default=8, help="judgements of each draft")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.3, 0.7, 1.0])
    parser.add_argument("--csv", metavar="OUT")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(argv)
    try:
        check_counts(
            **{name: getattr(arguments, name) for name in ("count", "batch", "steps", "repeats")},
        )
        if not all(t > 0 for t in arguments.temperatures):
            raise ValueError(f"--temperatures {arguments.temperatures} must be above 0: at 0 all rules keep the same")
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
