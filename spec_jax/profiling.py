"""Where the time and the memory of decoding go: the parts of a step, the memory's bandwidth, the loop and the host.

Everything is measured in turn within a repeat, in an order that rotates, so that a slow minute of the machine hits all
figures alike; ratios are formed within a repeat.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from spec_jax import bench, environment
from spec_jax.checks import check_counts
from spec_jax.compilation import compiled
from spec_jax.config import choose_width
from spec_jax.decode_state import DecodeState
from spec_jax.draft_length import default_pace
from spec_jax.generation import check_config, prepare
from spec_jax.peaks import Bandwidth, spread
from spec_jax.prompts import Prompt, builtin_prompts, limit_per_category, model_input
from spec_jax.requests import encode_prompts, make_requests
from spec_jax.sampling_params import SamplingParams
from spec_jax.step_parts import MEASURED, PARTS, PartTimes, StepParts
from spec_jax.step_times import step_times

REPEATS = 7
ONE_ROW = "plain W=1"
TRACE_STEPS = 4


def profile(
    target: Any,
    *,
    methods: Sequence[str] = bench.DEFAULT_METHODS,
    draft_model: Any = None,
    drafter: tuple[Any, Any] | None = None,
    prompts: Sequence[Prompt] | None = None,
    max_prompts: int | None = None,
    max_tokens: int = 48,
    repeats: int = REPEATS,
    batch_size: int = 1,
    temperature: float = 0.0,
    seed: int = 0,
    verify_width: int | str | None = None,
    exact: bool | None = None,
    logdir: str | Path | None = None,
    progress: bench.Progress | None = None,
) -> dict[str, Any]:
    """Measures the steps of `methods` and of plain decoding on the first `batch_size` prompts.

    Args:
      methods: as for `bench.run_bench`, like every argument that is not named here.
      drafter: (drafter, its parameters), profiled instead of `methods`.
      max_tokens: tokens per text where `generate` decodes as a whole; no text ends earlier.
      repeats: medians are over these.
      logdir: a folder for a trace of a few steps of every method, for TensorBoard's profiler.

    Returns:
      A dict, ready for JSON. A spread is {median, min, max} over the repeats.
        model, device, versions, dtype, packed, batch_size, repeats.
        prompt_tokens: the length of every prompt.
        bandwidth: bytes_per_second, the spread at which `read_with` reads an array of `bytes`.
        bound: `bytes` that every step must read, and the spread `milliseconds` that this takes at the least: the
          target's parameters once (an embedding that is not the head too is left out: few of its rows are read) and
          the prompts' K/V. What a drafter reads is not in it.
        rows: a list, one entry per method and number of rows that a step computes of each text, with
          method, num_speculative_tokens, verify_width, rows.
          milliseconds: {draft, forward, verify, commit, step}, a spread each; `step` is one of the whole loop.
          unexplained: milliseconds of the step that its parts leave over, below 0 where the loop is faster than they.
          shares: {draft, forward, verify, commit, unexplained} of the step, which sum to 1.
          step_ratio, forward_ratio: T(W) / T(1), of the step and the forward pass, to plain decoding at W=1.
          step_bound_ratio, forward_bound_ratio: to `bound`.
        methods: a list, one entry per method, with method, num_speculative_tokens, verify_width, exactness.
          loop: the spread of milliseconds per step of the compiled loop where `generate` decodes, with draft lengths
            as they come. host: that of what the host adds per step, behind the prefill. host_share: of their sum.
          memory: bytes of the loop: arguments, temporaries, outputs, alias (outputs that take the memory of arguments),
            peak (all without alias), and drafter: {parameters, state, temporaries}; the last is the difference to plain
            decoding at this width, None where that was not run.
        trace: {path, bytes} of the profiler's trace, None without a logdir.

    Raises:
      ValueError: for bad input.
      OSError: where the trace cannot be written.
    """
    check_counts(max_tokens=max_tokens, repeats=repeats, batch_size=batch_size)
    if target.tokenizer is None:
        raise ValueError(f"model {target.name!r} has no tokenizer to encode prompts with; add a tokenizer.json")
    own = drafter is not None
    runs = _runs_of(drafter, verify_width, exact) if own else bench.plan_runs(methods, draft_model, verify_width, exact)
    chosen = limit_per_category(builtin_prompts() if prompts is None else prompts, max_prompts)[:batch_size]
    if len(chosen) < batch_size:
        raise ValueError(f"batch_size={batch_size} is more than the {len(chosen)} prompts; give more of them, or raise "
                         "max_prompts, which is per category")  # fmt: skip
    bench.check_prompts(target, chosen)
    if logdir is not None:  # a folder that cannot be written must not cost a profile
        Path(logdir).mkdir(parents=True, exist_ok=True)
    ids = encode_prompts(target, [model_input(target, prompt) for prompt in chosen])
    sampling = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed, ignore_eos=True)
    tell = progress or (lambda *_: None)
    found = []
    for number, run in enumerate(runs):
        tell(number, len(runs), f"compiling {run.label}")
        found.append(_Method(target, run, None if run.is_plain else drafter, ids, sampling))
    times = [t for method in found for t in method.times]
    trace = None if logdir is None else _write_trace(found, Path(logdir))

    bandwidth = Bandwidth(_bytes(target.params))
    # What is compared with each other is measured close to each other.
    jobs = [bandwidth.measure, *(lambda t=t, part=part: t.measure(part) for part in MEASURED for t in times)]
    jobs += [method.decode for method in found]
    for repeat in range(repeats):
        tell(repeat, repeats, "measuring")
        turn = repeat * len(jobs) // repeats
        for job in jobs[turn:] + jobs[:turn]:
            job()
    tell(repeats, repeats, "done")

    bound = _bytes_to_read(target, ids)
    bound_seconds = [bound / speed for speed in bandwidth.speeds]
    one = next(method for method in found if method.run.label == ONE_ROW).times[0].seconds
    return {
        "model": target.name,
        "device": environment.describe_device(),
        "versions": environment.versions(),
        "dtype": target.module.dtype,
        "packed": target.module.packed,
        "batch_size": batch_size,
        "repeats": repeats,
        "prompt_tokens": [len(prompt) for prompt in ids],
        "bandwidth": bandwidth.report(),
        "bound": {"bytes": bound, "milliseconds": spread(bound_seconds, 1000)},
        "rows": [method.names() | _row(t, one, bound_seconds) for method in found for t in method.times],
        "methods": [method.report(found) for method in found],
        "trace": trace,
    }


def _runs_of(drafter: Any, verify_width: int | str | None, exact: bool | None) -> list[bench.Run]:
    """What `bench.plan_runs` is for methods, for a drafter of one's own."""
    check_config(None, drafter)
    nodes = drafter[0].num_nodes
    width = choose_width(nodes, verify_width)
    own = bench.Run(type(drafter[0]).__name__, verify_width or width, nodes, {"method": "none"}, exact)
    return [bench.Run(f"plain W={width}", width, exact=exact), bench.Run(ONE_ROW, 1, exact=False), own]


def _bytes(tree: Any) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def _bytes_to_read(target: Any, prompts: Sequence[Sequence[int]]) -> int:
    c = target.config
    slots = sum(len(prompt) - 1 for prompt in prompts)
    cache = 2 * slots * c.num_layers * c.num_kv_heads * c.head_dim * jnp.dtype(target.module.dtype).itemsize
    return cache + _bytes({k: v for k, v in target.params.items() if c.tie_embeddings or k != "embedding"})


def _row(times: PartTimes, one: dict[str, list[float]], bound: Sequence[float]) -> dict[str, Any]:
    """One entry of `rows`, from the seconds of plain decoding at W=1 and those that the bandwidth allows."""

    def ratio(part, others):
        return statistics.median(x / y for x, y in zip(times.seconds[part], others, strict=True))

    shares = {part: ratio(part, times.seconds["step"]) for part in PARTS}
    shares["unexplained"] = 1 - sum(shares.values())
    return {
        "rows": times.rows,
        "milliseconds": {part: spread(seconds, 1000) for part, seconds in times.seconds.items()},
        "unexplained": 1000 * statistics.median(times.seconds["step"]) * shares["unexplained"],
        "shares": shares,
        "step_ratio": ratio("step", one["step"]),
        "forward_ratio": ratio("forward", one["forward"]),
        "step_bound_ratio": ratio("step", bound),
        "forward_bound_ratio": ratio("forward", bound),
    }


class _Method:
    """One way to decode the prompts, compiled, and what was measured of it."""

    def __init__(self, target: Any, run: bench.Run, drafter: Any, ids: Sequence[list[int]], sampling: SamplingParams):
        self.run = run
        config = check_config(run.config, drafter, run.verify_width)
        requests = make_requests(target, ids, [sampling] * len(ids))
        self._call = call = prepare(target, requests, config, run.verify_width, run.exact, len(ids), drafter)
        slots = call.start()
        slots.fill()
        self.memory = self._read_memory(slots.state)
        # No text may end while its steps are measured: they may go on as far as the arrays reach.
        state = slots.state.replace(limit=jnp.full(len(ids), call.capacity - call.decoder.width, jnp.int32))
        parts = StepParts(call.decoder, target.params, call.drafter_params, state)
        self.times = [parts.at(rows) for rows in self._row_counts()]
        measured, self._seconds = step_times(call.decoder, call.batch, call.capacity), []
        self.decode()  # compiles
        while measured is not None and not measured.done:  # a policy first finds out what steps cost
            self.decode()
        self._seconds.clear()

    def _row_counts(self) -> list[int]:
        """Rows that a step computes: below its width only where a model or a policy leaves out those not needed."""
        decoder = self._call.decoder
        if decoder.module.packed:
            most = decoder.drafter.num_nodes + 1
            return [*(2**i for i in range(most.bit_length()) if 2**i < most), most]
        return [decoder.width] if decoder.policy is None else list(decoder.policy.widths)

    def _read_memory(self, state: DecodeState) -> dict[str, Any]:
        c = self._call
        pace = () if c.decoder.policy is None else (default_pace(c.batch, c.decoder.drafter.num_nodes),)
        limits = jnp.int32(1), jnp.int32(1)
        program, _ = compiled(c.decoder, "run", c.target.params, c.drafter_params, state, *limits, *pace)
        found = program.memory_analysis()
        sizes = {"arguments": found.argument_size_in_bytes, "temporaries": found.temp_size_in_bytes}
        sizes["outputs"], alias = found.output_size_in_bytes, found.alias_size_in_bytes
        drafter = {"parameters": _bytes(c.drafter_params), "state": _bytes(state.drafter)}
        return sizes | {"alias": alias, "peak": sum(sizes.values()) - alias, "drafter": drafter}

    def decode(self) -> None:
        """Decodes as `generate` does, and notes the seconds of the loop and of the host per step."""
        slots = self._call.start()
        slots.fill()
        start = time.perf_counter()
        while slots.busy:
            slots.advance()
        wall, loop, steps = time.perf_counter() - start, float(slots.seconds[2]), int(slots.state.steps)
        self._seconds.append((loop / steps, (wall - loop) / steps))

    def trace(self) -> None:
        """Runs a few steps under the method's name."""
        with jax.profiler.TraceAnnotation(self.run.label):
            slots = self._call.start()
            slots.fill()
            slots.advance(TRACE_STEPS)

    def names(self) -> dict[str, Any]:
        nodes = self._call.decoder.drafter.num_nodes
        return {"method": self.run.label, "num_speculative_tokens": nodes, "verify_width": self.run.verify_width}

    def report(self, others: Sequence[_Method]) -> dict[str, Any]:
        """One entry of `methods`; plain decoding of the same width is among `others`."""
        width, memory = self._call.decoder.width, self.memory
        plain = next((m.memory for m in others if m.run.is_plain and m._call.decoder.width == width), None)
        more = None if plain is None else memory["temporaries"] - plain["temporaries"]
        loop, host = zip(*self._seconds, strict=True)
        return self.names() | {
            "exactness": self._call.level,
            "loop": spread(loop, 1000),
            "host": spread(host, 1000),
            "host_share": statistics.median(mine / (mine + other) for mine, other in zip(host, loop, strict=True)),
            "memory": memory | {"drafter": memory["drafter"] | {"temporaries": more}},
        }


def _write_trace(found: Sequence[_Method], logdir: Path) -> dict[str, Any]:
    """Traces a few steps of every method into `logdir`/plugins/profile."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # Python's own calls would bury the steps
    with jax.profiler.trace(str(logdir), profiler_options=options):
        for method in found:
            method.trace()
    files = sorted((logdir / "plugins" / "profile").glob("*/*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    if not files or not files[-1].stat().st_size:
        raise OSError(f"the profiler wrote no trace below {logdir}")
    return {"path": str(files[-1]), "bytes": files[-1].stat().st_size}
