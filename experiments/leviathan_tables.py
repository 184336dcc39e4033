"""Tables 1 and 4 of Leviathan et al.: what the paper prints, its formulas, and our verification rules at those alphas.

Command:   python experiments/leviathan_tables.py [--samples N] [--csv OUT] [--json]
Hardware:  any CPU; a few minutes
Expected:  table 1 by formula to its last digit; table 4's expected speed-ups within 0.07 of the formula at the printed
           alpha and c, and inside the interval that their rounding leaves. The token rule emits what the formula says,
           within 1.5 % (4000 samples); block verification 1 to 35 % more on the same drafts

The last two columns are simulated: steps of the compiled rules on drafts of two fixed laws over eight tokens, the same
behind every prefix, whose overlap sum(min(p, q)) is alpha. Tokens per step go into the paper's speed-up with its c.
A row at temperature 0 is simulated like the others, though deterministic drafts would leave block no advantage.
"Measured" is what the paper measured (T5 on a TPU v4); acceptances there depend on the prefix, as the paper says.
"""

from __future__ import annotations

import argparse
import csv
import functools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.table import Table

from spec_jax import planner
from spec_jax.checks import check_counts
from spec_jax.cli_output import console, print_json, write_csv
from spec_jax.drafting.base import Draft, DraftProbs
from spec_jax.sampling import SamplingState
from spec_jax.verify import CHAIN_RULES, verify

DATA = Path(__file__).parent / "data" / "leviathan.csv"
VOCAB = 8
ROUNDING = 0.005
"""Half of the last printed digit of alpha and c."""


def laws(alpha: float) -> tuple[np.ndarray, np.ndarray]:
    """Two laws over VOCAB tokens with overlap `alpha`: p, and q that moves 1 - alpha of p's mass to other tokens."""
    half = VOCAB // 2
    p = np.concatenate([np.full(half, (1 + (1 - alpha)) / 2 / half), np.full(half, (1 - (1 - alpha)) / 2 / half)])
    return p, p[::-1].copy()


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def run_lengths(rule: str, gamma: int, samples: int, p: jax.Array, q: jax.Array) -> jax.Array:
    """Tokens that each of `samples` independent steps emits, int32 [samples]."""
    draw, judge = jax.random.split(jax.random.key(0))
    tokens = jax.random.categorical(draw, jnp.log(q), shape=(samples, gamma)).astype(jnp.int32)
    draft = Draft(tokens, jnp.full(samples, gamma, jnp.int32), DraftProbs(jnp.broadcast_to(q, (samples, gamma, VOCAB))))
    state = SamplingState(
        temperature=jnp.ones(samples),
        top_k=jnp.zeros(samples, jnp.int32),
        top_p=jnp.ones(samples),
        min_p=jnp.zeros(samples),
        key=jax.random.split(judge, samples),
        stop_ids=jnp.full((samples, 1), -1, jnp.int32),
    )
    logits = jnp.broadcast_to(jnp.log(p), (samples, gamma + 1, VOCAB))
    parents, depth = jnp.broadcast_to(jnp.arange(gamma), tokens.shape), jnp.arange(gamma + 1)
    length = jnp.ones(samples, jnp.int32)
    verdict = verify(rule, logits, draft, parents, depth, True, length, state, VOCAB)
    return verdict.num_accepted + 1


def simulate(rule: str, alpha: float, gamma: int, samples: int) -> float:
    """Tokens per step of a rule at an overlap of `alpha`."""
    p, q = (jnp.asarray(x, jnp.float32) for x in laws(alpha))
    return float(run_lengths(rule, gamma, samples, p, q).mean())


def read_rows(path: Path = DATA) -> list[dict[str, Any]]:
    """The published rows; numbers are floats, and None where the table has no such column."""
    text = "task", "drafter"
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [{k: v if k in text else float(v) if v else None for k, v in row.items()} for row in rows]


def compare(row: Mapping[str, Any], samples: int) -> dict[str, Any]:
    """A published row beside the formulas and what the rules simulate."""
    alpha, gamma, c = row["alpha"], int(row["gamma"]), row["c"]
    speed = planner.walltime_improvement(alpha, gamma, c)
    found = {
        "formula_speed": speed,
        "lowest": planner.walltime_improvement(alpha - ROUNDING, gamma, c + ROUNDING if c else 0.0),
        "highest": planner.walltime_improvement(alpha + ROUNDING, gamma, max(c - ROUNDING, 0.0)),
        "formula_operations": planner.operations_factor(alpha, gamma),
    }
    for rule in CHAIN_RULES:
        found[rule] = simulate(rule, alpha, gamma, samples) / (gamma * c + 1)
    return {**row, "gamma": gamma, **found}


def tables(entries: Sequence[Mapping[str, Any]]) -> list[Table]:
    result = []
    for number in dict.fromkeys(entry["table"] for entry in entries):
        table = Table(title=f"Table {number:g}: speed-up over plain decoding")
        names = ["task", "drafter", "T", "alpha", "gamma", "c", "measured", "printed", "formula", "interval"]
        for name in (*names, *(f"{rule}, simulated" for rule in CHAIN_RULES)):
            table.add_column(name, justify="right")
        for e in entries:
            if e["table"] != number:
                continue
            numbers = [e["temperature"], e["alpha"], e["gamma"], e["c"], e["measured_speed"], e["printed_speed"]]
            cells = ["" if x is None else f"{x:g}" for x in numbers]
            interval = f"{e['lowest']:.2f}-{e['highest']:.2f}"
            rules = [f"{e[rule]:.3f}" for rule in CHAIN_RULES]
            table.add_row(e["task"], e["drafter"], *cells, f"{e['formula_speed']:.3f}", interval, *rules)
        result.append(table)
    return result


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=20_000, help="simulated steps per row and rule")
    parser.add_argument("--csv", metavar="OUT", help="write every row")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args(argv)
    try:
        check_counts(samples=arguments.samples)
        entries = [compare(row, arguments.samples) for row in read_rows()]
        if arguments.csv:
            write_csv(arguments.csv, entries)
    except (ValueError, OSError) as error:
        parser.exit(2, f"error: {' '.join(str(error).split())}\n")
    if arguments.json:
        print_json({"rows": entries})
    else:
        console(stderr=False).print(*tables(entries))
    if arguments.csv:
        print(f"wrote {arguments.csv}", file=sys.stderr)


if __name__ == "__main__":
    main()
