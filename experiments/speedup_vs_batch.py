"""At which batch does speculation stop paying on this device, and does the roofline predict it?

Command:   python experiments/speedup_vs_batch.py --output speedup_vs_batch.jsonl [--prompts mt_bench.jsonl]
Hardware:  any, one device; 2 CPU cores take about two hours (--time-budget does a part, the same command goes on).
Expected:  the longer the drafts, the smaller the batch from which they lose. SmolLM2-135M on a quiet 2-core x86-64 (24
           tokens of 4 MT-bench prompts, which repeat little; 2 repeats) at batch 1, 4, 16: K=5 0.95, 0.77, 0.45; auto
           1.01, 0.97, 0.77. Step times predict 0.96, 0.78, 0.42 and 0.98, 0.87, 0.74; the roofline 1.05, 0.90, 0.39
           and 1.04, 1.05, 1.00. At batch 16 auto drafts nothing; its forward pass of 16 rows is slower beside 112
           that are not computed (54 against 48 ms, `bench --profile`).

Measured: greedy decoding at `max_batch_size=batch`, cycling through the same prompts at every batch size. Slots are
refilled, and the clock stops when one would stay empty: the batch is always full. Plain decoding (K = 0) and prompt
lookup (K fixed, or verify_width="auto") take turns in rotating order. Speed is without prefill and compilation; its
ratio to plain decoding at the same batch is formed within a repeat, and median and range over repeats are reported.
`exact=False`: nothing is padded, and with the packed CPU kernels absent drafts are not computed.

Predicted: speed-up = tokens of a speculative step x T(plain step) / (tokens of a plain step x T(speculative step)).
Tokens and rows of a step are the measured means; T comes from what is measured separately:
  roofline    T = max(bytes / bandwidth, flops / peak). Bytes: parameters once, K/V of the batch. Flops: 2 x parameters
              x rows, and attention. Bandwidth: an array of 512 MiB is read. Peak: a product of 512 rows
  step times  T(rows): whole steps of the same batch and K, drafting included, ordered to compute so many rows
The fastest measurement counts: what disturbs one only slows it. Without the packed kernels "auto" does not tell which
rows it computed, and its prediction is an upper bound. A crossover between two batches is on a line over log2(batch).
"""

from __future__ import annotations

import argparse
import collections
import importlib.util
import json
import math
import os
import statistics
import sys
import time
import timeit
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import spec_jax
from spec_jax import environment
from spec_jax.cli_output import console, print_json
from spec_jax.compilation import compiled
from spec_jax.config import SpeculativeConfig
from spec_jax.decode_state import LENGTH
from spec_jax.draft_length import Pace
from spec_jax.generation import prepare
from spec_jax.kernels import cpu
from spec_jax.metrics import Completion, total
from spec_jax.models.layers import RowBlocks, joined_linear
from spec_jax.models.packing import pack
from spec_jax.peaks import spread
from spec_jax.prompts import builtin_prompts, model_input, read_prompts
from spec_jax.requests import encode_prompts, make_requests
from spec_jax.results import completion
from spec_jax.scalars import ScalarWriter
from spec_jax.slots import Slots
from spec_jax.step_times import step_times

PLAIN, AUTO = "0", "auto"
READ_BYTES, PRODUCT = 1 << 29, (512, 4096, 4096)  # PRODUCT: rows, inputs, outputs
STEPS, ROUNDS = 4, 4  # steps of one measurement of T(rows), and how often each is made
PER_SLOT = 2  # sequences for every slot, at least

# What a step reads and computes: weights that every row is multiplied with, their bytes, bytes of K and V of one token,
# operations of one row per token that it attends to.
Sizes = collections.namedtuple("Sizes", ("parameters", "parameter_bytes", "kv_bytes", "attention_flops"))
# Means over the steps of a run: tokens emitted, sequences read, rows computed, tokens that a row attends to.
Step = collections.namedtuple("Step", ("tokens", "sequences", "rows", "context"))


def roofline(sizes: Sizes, step: Step, bandwidth: float, peak: float) -> float:
    """Seconds of a step that is bound by the memory's bandwidth or by arithmetic, whichever takes longer."""
    read = sizes.parameter_bytes + sizes.kv_bytes * step.sequences * step.context
    flops = step.rows * (2 * sizes.parameters + sizes.attention_flops * step.context)
    return max(read / bandwidth, flops / peak)


def interpolated(points: Mapping[str, float], rows: float) -> float:
    """Seconds of a step of `rows` rows, on straight lines between measured points and constant beyond them."""
    known = sorted((int(r), seconds) for r, seconds in points.items())
    return float(np.interp(rows, *zip(*known, strict=True)))


def predicted_speedup(plain: Step, plain_seconds: float, speculative: Step, seconds: float) -> float:
    return (speculative.tokens / seconds) / (plain.tokens / plain_seconds)


def crossover(speedups: Mapping[int, float]) -> float | None:
    """The batch at which a speed-up first falls below 1: the smallest if it never pays, None if it always does."""
    small, above = None, None
    for batch, now in sorted(speedups.items()):
        if now < 1:
            return float(batch) if small is None else small * (batch / small) ** ((above - 1) / (above - now))
        small, above = batch, now
    return None


def sizes_of(target: Any) -> Sizes:
    c, params = target.config, dict(target.params)
    if not c.tie_embeddings:
        params.pop("embedding")  # a few of its rows are looked up, no more
    leaves = jax.tree.leaves(params)
    per_head, itemsize = c.num_layers * c.head_dim, jnp.dtype(target.module.dtype).itemsize
    attention, kv_bytes = 4 * per_head * c.num_heads, 2 * per_head * c.num_kv_heads * itemsize
    return Sizes(sum(x.size for x in leaves), sum(x.nbytes for x in leaves), kv_bytes, attention)


def measure_device(target: Any) -> dict[str, float]:
    """Bytes per second of reading memory, and operations per second of a product as the target's layers run it."""

    def fastest(function, *arguments):  # of ten calls, of which the first compiles
        return min(timeit.repeat(lambda: jax.block_until_ready(function(*arguments)), number=1, repeat=10))

    dtype, packed, (rows, inputs, outputs) = target.module.dtype, target.module.packed, PRODUCT
    array, active = jnp.ones(READ_BYTES // 4, jnp.float32), jnp.ones(rows, bool)
    bandwidth = array.nbytes / fastest(jax.jit(cpu.read if packed else jnp.sum), array)
    weight, blocks = jnp.ones((inputs, outputs), dtype), RowBlocks(independent=packed)
    product = jax.jit(lambda x, w: joined_linear(x, {"down": w}, ("down",), (outputs,), blocks, active))
    seconds = fastest(product, jnp.ones((rows, inputs), dtype), pack(weight) if packed else weight)
    return {"bandwidth": bandwidth, "peak": 2.0 * rows * inputs * outputs / seconds}


class Decoding:
    """The target, its prompts, and the runs that are compared, by name: PLAIN, K or AUTO."""

    def __init__(self, target: Any, ids: Sequence[Sequence[int]], lengths: Sequence[int], max_tokens: int):
        self.target, self.ids, self.max_tokens = target, ids, max_tokens
        options = {str(k): {"num_speculative_tokens": k} for k in lengths} | {AUTO: {"verify_width": AUTO}}
        self.runs = {run: SpeculativeConfig(method="ngram", **option) for run, option in options.items()}
        self.runs = {PLAIN: SpeculativeConfig(), **self.runs}
        self.nodes = {run: config.num_speculative_tokens for run, config in self.runs.items()}
        most = max(map(len, ids)) + max(max_tokens, STEPS * (max(self.nodes.values()) + 1))
        if most > target.max_model_len:
            raise ValueError(f"prompts and {most} tokens in all exceed the context of {target.max_model_len}")

    def _call(self, batch: int, config: Any, **sampling: Any) -> Any:
        """Every prompt equally often, and PER_SLOT or more for each slot."""
        ids = list(self.ids) * -(-batch * PER_SLOT // len(self.ids))
        sampling = spec_jax.SamplingParams(**{"max_tokens": self.max_tokens} | sampling)
        requests = make_requests(self.target, ids, [sampling] * len(ids))
        return prepare(self.target, requests, config, None, False, batch, None)

    def _run(self, call: Any, until_first: bool = False) -> tuple[Slots, dict[int, Completion]]:
        """Decodes until a slot would stay empty, or until the first sequence ends."""
        slots, found, ended = call.start(), {}, ()
        while not ended or (len(call.active) - len(slots.slot_of) >= len(ended) and not until_first):
            slots.fill()
            ended = slots.advance(until_end=True)
            found.update(ended)
        return slots, found

    def warm_up(self, batch: int) -> None:
        """Compiles every run, and lets AUTO measure its steps."""
        for config in self.runs.values():
            for _ in range(8):
                call = self._call(batch, config)
                self._run(call, until_first=True)
                times = step_times(call.decoder, call.batch, call.capacity)
                if times is None or times.done:
                    break

    def decode(self, run: str, batch: int) -> dict[str, Any]:
        """Counts and seconds of a full batch, and the token ids of every sequence that was begun."""
        call = self._call(batch, self.runs[run])
        slots, found = self._run(call)
        length, *rows = jax.device_get((slots.state.length, slots.state.tokens, slots.state.trace))
        for request in (r for r in call.active if r.index in slots.slot_of and r.index not in found):
            slot = slots.slot_of[request.index]
            row = jax.tree.map(lambda x, slot=slot: x[slot], rows)
            options = {"finish": LENGTH, "cut": None, "nodes": self.nodes[run], "cached": 0}
            found[request.index] = completion(self.target, request, *row, length=int(length[slot]), **options)
        stats, line = total([s.stats for s in found.values()]), {"seconds": float(slots.seconds[2])}
        line |= {"tokens": stats.num_emitted_tokens, "steps": int(slots.state.steps), "drafts": stats.num_drafts}
        line |= {"draft_tokens": stats.num_draft_tokens, "accepted": stats.num_accepted_tokens, "exactness": call.level}
        return line | {"ids": {index: sequence.token_ids for index, sequence in found.items()}}

    def step_seconds(self, batch: int) -> dict[str, dict[str, float]]:
        """T: per run seconds of a step by its rows."""
        found = {k: self._timed_steps(batch, k) for k in {*self.nodes.values()}}
        return {run: found[k] for run, k in self.nodes.items()}

    def _timed_steps(self, batch: int, k: int) -> dict[str, float]:
        ordered = {"method": "ngram", "num_speculative_tokens": k, "verify_width": AUTO} if k else {}
        call = self._call(batch, SpeculativeConfig(**ordered), max_tokens=STEPS * (k + 1), ignore_eos=True)
        decoder, slots, found = call.decoder, call.start(), {}
        slots.fill()
        for width in [*(w for w in (1, 2, 4, 8, 16) if w <= k), k + 1] * ROUNDS:
            state = jax.tree.map(jnp.copy, slots.state)  # every measurement begins at the same text; a run donates
            arguments = (self.target.params, call.drafter_params, state, jnp.int32(STEPS), jnp.int32(1))
            if k:
                arguments = (*arguments, Pace(jnp.ones(batch * (k + 1) + 1), jnp.float32(0), jnp.int32(width)))
            program, _ = compiled(decoder, "run", *arguments)
            start = time.perf_counter()
            jax.block_until_ready(program(*arguments))
            seconds = (time.perf_counter() - start) / STEPS
            found[str(batch * width)] = min(seconds, found.get(str(batch * width), seconds))
        return found


class Log(dict):
    """What was measured, by key: ("device",), ("steps", batch) or ("runs", batch, repeat); a file keeps it."""

    def __init__(self, path: str | None, arguments: dict[str, Any]):
        self.path = path
        if path:
            Path(path).touch()  # what cannot be written must not cost a warm-up
            data = Path(path).read_bytes()
            whole = data.rfind(b"\n") + 1  # behind it is a line that was cut off when a run was killed
            try:
                self.update((tuple(line["key"]), line["value"]) for line in map(json.loads, data[:whole].splitlines()))
                old = self["arguments",] if data else arguments
                other = ", ".join(key for key in arguments if old.get(key) != arguments[key])
            except (ValueError, KeyError, TypeError, AttributeError):
                raise ValueError(f"{path} was not written by this script; give another --output") from None
            if other:
                raise ValueError(f"{path} was measured with other {other}; give another --output")
            os.truncate(path, whole)
        if ("arguments",) not in self:
            self.add(("arguments",), arguments)

    def add(self, key: tuple[Any, ...], value: Any) -> None:
        self[key] = value
        if self.path:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps({"key": key, "value": value, "load": os.getloadavg()[0]}) + "\n")


def one_repeat(decoding: Any, batch: int, repeat: int) -> dict[str, dict[str, Any]]:
    """What every run measured; their order rotates."""
    runs = collections.deque(decoding.runs)
    runs.rotate(-repeat)
    found = {run: decoding.decode(run, batch) for run in runs}
    texts = {run: found[run].pop("ids") for run in runs}
    for run in runs:  # as far as both were decoded
        pairs = [(ids, texts[PLAIN][index]) for index, ids in texts[run].items() if index in texts[PLAIN]]
        same = sum(all(a == b for a, b in zip(*pair, strict=False)) for pair in pairs)
        found[run] |= {"sequences": len(pairs), "same_ids": same}
    return {run: found[run] for run in decoding.runs}


def measure(log, decoding, batches, repeats, deadline=math.inf, clock=time.perf_counter) -> bool:
    """Measures what the log lacks, at least one repeat, until the deadline; returns whether everything is there."""
    warm = None
    for batch, repeat in [(b, r) for b in batches for r in range(repeats) if ("runs", b, r) not in log]:
        if warm is not None and clock() >= deadline:
            return False
        if batch != warm:
            print(f"batch {batch}: warm-up", file=sys.stderr, flush=True)
            decoding.warm_up(batch)
            if ("steps", batch) not in log:
                log.add(("steps", batch), decoding.step_seconds(batch))
        log.add(("runs", batch, repeat), one_repeat(decoding, batch, repeat))
        warm = batch
        print(f"batch {batch}, repeat {repeat + 1} of {repeats}", file=sys.stderr, flush=True)
    return True


def rows_of(log: Log, sizes: Sizes, context: float, packed: bool) -> list[dict[str, Any]]:
    """One row per batch and run: what was measured, and what is predicted for its mean step."""
    rows, keys = [], sorted(key for key in log if key[0] == "runs")
    for batch in dict.fromkeys(key[1] for key in keys):
        repeats = [log[key] for key in keys if key[1] == batch]
        for run in repeats[0]:
            found = [runs[run] for runs in repeats]
            totals = {key: sum(line[key] for line in found) for key in found[0] if key != "exactness"}
            tokens, drafted = totals["tokens"] / totals["steps"], totals["draft_tokens"] / totals["steps"]
            computed = batch + (drafted if packed or run == AUTO else batch * int(run))  # else every row of a width
            step, speeds = Step(tokens, batch, computed, context), [line["tokens"] / line["seconds"] for line in found]
            times = {"roofline": roofline(sizes, step, **log["device",])}
            times["step_times"] = interpolated(log["steps", batch][run], computed)
            if run == PLAIN:
                plain, plain_times, plain_speeds = step, times, speeds
            row = {"batch": batch, "k": run, "repeats": len(found), "tokens_per_second": spread(speeds)}
            row["speedup"] = spread([a / b for a, b in zip(speeds, plain_speeds, strict=True)])
            row["predicted_speedup"] = {n: predicted_speedup(plain, plain_times[n], step, times[n]) for n in times}
            row["step_seconds"] = spread([line["seconds"] / line["steps"] for line in found])
            row["mean_acceptance_length"] = 1 + totals["accepted"] / totals["drafts"] if totals["drafts"] else None
            row |= {"predicted_step_seconds": times, "tokens_per_step": tokens, "rows_per_step": computed}
            row |= {key: totals[key] for key in ("same_ids", "sequences")} | {"exactness": found[0]["exactness"]}
            rows.append(row)
    return rows


def lines_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, dict[int, float]]]:
    """Speed-ups by K, then by name (measured, or predicted how), then by batch."""
    found: dict[str, Any] = {row["k"]: collections.defaultdict(dict) for row in rows if row["k"] != PLAIN}
    for row in (row for row in rows if row["k"] != PLAIN):
        found[row["k"]]["measured"][row["batch"]] = row["speedup"]["median"]
        for name, value in row["predicted_speedup"].items():
            found[row["k"]][f"predicted_{name}"][row["batch"]] = value
    return found


NAMES = "batch|K|tok/s|speed-up|predicted (r)|(T)|length|tokens/step|rows|s/step|predicted (r)|(T)|same ids"
CELLS = (
    "{batch}|{k}|{tokens_per_second[median]:.1f}|{speedup[median]:.2f} ({speedup[min]:.2f}..{speedup[max]:.2f})|"
    "{predicted_speedup[roofline]:.2f}|{predicted_speedup[step_times]:.2f}|{mean_acceptance_length!s:.4}|"
    "{tokens_per_step:.1f}|{rows_per_step:.1f}|{step_seconds[median]:.4f}|{predicted_step_seconds[roofline]:.4f}|"
    "{predicted_step_seconds[step_times]:.4f}|{same_ids}/{sequences} ({exactness})"
)


def tables(report: dict[str, Any]) -> tuple[Any, Any]:
    from rich.table import Table

    title = "{model}, {dtype}, greedy, {max_tokens} tokens, {device}".format_map(report)
    device = f"{report['bandwidth'] / 1e9:.1f} GB/s and {report['peak'] / 1e9:.0f} GFLOP/s"
    table = Table(title=title, caption=f"predicted (r): roofline of {device}; (T): step times T(rows)")
    for name in NAMES.split("|"):
        table.add_column(name, justify="right")
    for row in report["rows"]:
        table.add_row(*CELLS.format_map(row).split("|"), end_section=row["k"] == AUTO)
    ends = Table("K", "measured", "predicted (r)", "predicted (T)", title="speed-up falls below 1 at batch")
    batches = [row["batch"] for row in report["rows"]]
    words = {None: f"above {max(batches)}", min(batches): f"at most {min(batches)}"}
    for run, found in report["crossover"].items():
        ends.add_row(run, *(words.get(batch, f"{batch or 0:.1f}") for batch in found.values()))
    return table, ends


def plot(path: str, report: dict[str, Any]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot(xscale="log", xlabel="batch", ylabel="speed-up over plain decoding")
    axes.axhline(1.0, color="grey", linewidth=0.8)
    for number, (run, lines) in enumerate(lines_of(report["rows"]).items()):
        for (name, line), style in zip(lines.items(), ("o-", "--", ":"), strict=True):
            axes.plot(list(line), list(line.values()), style, color=f"C{number}", label=f"K={run}, {name}")
    axes.set_xticks(*[sorted({row["batch"] for row in report["rows"]})] * 2)
    axes.legend(fontsize="small")
    figure.savefig(path)


def integers(text: str) -> list[int]:
    return sorted({int(part) for part in text.split(",")})


def run_all(arguments: argparse.Namespace) -> None:
    deadline = time.perf_counter() + arguments.time_budget
    batches, lengths = arguments.batch_sizes, [k for k in arguments.lengths if k]
    if min(arguments.count, arguments.max_tokens, arguments.repeats, *batches) < 1 or min(arguments.lengths) < 0:
        raise ValueError("--count, --max-tokens, --repeats and --batch-sizes must be at least 1, --lengths at least 0")
    if arguments.plot and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install -e '.[plot]'")
    prompts = read_prompts(arguments.prompts) if arguments.prompts else builtin_prompts()
    places = sorted({i * len(prompts) // arguments.count for i in range(arguments.count)})
    spec_jax.enable_compilation_cache()
    target = spec_jax.load_model(arguments.model, dtype=arguments.dtype)
    ids = encode_prompts(target, [model_input(target, prompts[place]) for place in places])
    decoding = Decoding(target, ids, lengths, arguments.max_tokens)
    report = {name: getattr(arguments, name) for name in ("model", "dtype", "max_tokens")} | {"lengths": lengths}
    report |= {"prompts": len(ids), "device": environment.describe_device(), "packed": target.module.packed}
    log = Log(arguments.output, report | {"prompt_ids": ids})
    with ScalarWriter(arguments.logdir) as writer:  # opened first: a folder that cannot be written must not cost a run
        if ("device",) not in log:
            log.add(("device",), measure_device(target))
        finished = measure(log, decoding, batches, arguments.repeats, deadline)
        sizes, context = sizes_of(target), statistics.mean(map(len, ids)) + arguments.max_tokens / 2
        rows = rows_of(log, sizes, context, target.module.packed)
        report |= {"versions": environment.versions(), "finished": finished, **log["device",], **sizes._asdict()}
        report |= {"context": context, "rows": rows, "crossover": {}}
        for run, lines in lines_of(rows).items():
            report["crossover"][run] = {name: crossover(line) for name, line in lines.items()}
            for name, batch, value in ((name, *point) for name, line in lines.items() for point in line.items()):
                writer.write(batch, {f"speedup/k{run}/{name}": value})
        for row in rows:
            writer.write(row["batch"], {f"tokens_per_second/k{row['k']}": row["tokens_per_second"]["median"]})
    print_json(report) if arguments.json else console(stderr=False).print(*tables(report))
    if arguments.plot:
        plot(arguments.plot, report)
    if not finished:
        print("not everything was measured; with --output the same command goes on", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--prompts", metavar="FILE.jsonl", help="default: the built-in ones")
    parser.add_argument("--count", type=int, default=8, help="different prompts, spread evenly over the file")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--batch-sizes", type=integers, default="1,2,4,8,16,32", metavar="B,B,...")
    parser.add_argument("--lengths", type=integers, default="1,3,5,7", metavar="K,K,...", help="0 is always there")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", metavar="FILE.jsonl", help="keep every measurement; a run goes on from what it has")
    parser.add_argument("--time-budget", type=float, default=math.inf, metavar="SECONDS", help="then it stops")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--logdir", help="write TensorBoard scalars by batch")
    parser.add_argument("--plot", metavar="FILE", help="draw speed-up over batch (extra: plot)")
    arguments = parser.parse_args(argv)
    try:
        run_all(arguments)
    except KeyboardInterrupt:
        parser.exit(130, "interrupted\n")
    except (ValueError, OSError) as error:
        parser.exit(2, f"error: {' '.join(str(error).split())}\n")


if __name__ == "__main__":
    main()
