"""How fast is spec_jax beside other engines: same weights, prompts, threads, end-of-text ids, greedy decoding?

Command:   python experiments/peers.py --prompts mt_bench.jsonl gsm8k.jsonl --count 20 --output peers.jsonl
           (needs the extra `peers`: pip install -e '.[peers]'; --engines plain plain-e2 ngram runs without it)
Hardware:  a quiet CPU; 2 cores take about 3 hours for 4 files. With --time-budget SECONDS a part is done, and the same
           command goes on. Other load slows torch, which shares its work out evenly, more than it slows spec_jax.
Expected:  the same token ids from every engine, up to near-ties; `ngram` above 1x `plain` where text is copied.

Every prompt is decoded by all engines, in rotating order, before the next. A repeat of a file is the sum over its
prompts; ratios of tokens per second are formed within a repeat, and their median and range over repeats reported. Only
repeats with all prompts count, unless there is none. Speed is that of whole calls, prefill included and compilation
not: every engine is warmed up with the longest prompt of each cache size, and what spec_jax compiles later is
subtracted. The decode clock of spec_jax has the first token in it, that of transformers has not. An output more than
20 % of whose 8-grams are repeats counts as looping. Loops flatter drafts that copy, so results are also given without
the prompts at which any engine's output loops.

Engines: the names in SPEC_JAX and TRANSFORMERS, or NAME=JSON with a speculative_config. One that raises is reported and
left out of the results. Others join with `--engine package.module:Class` (importable, see PYTHONPATH):

    class Engine:
        name = "mine"
        def __init__(self, model_folder: str, dtype: str, threads: int): ...  # model_folder: may be a .gguf file
        def generate(self, prompt_ids: list[int], max_tokens: int) -> list[int]: ...  # the new tokens, greedy

Tokens beyond max_tokens or behind an end-of-text id do not count. A dict `last`, set by every call, may hold
compile_seconds, which are subtracted, and decode_seconds with decode_tokens. For an engine that needs a folder where
the model is a .gguf file, `transformers_agreement.transformers_model` gives a model that has `save_pretrained`.
"""

from __future__ import annotations

import argparse
import collections
import functools
import hashlib
import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import spec_jax
from spec_jax import environment, hub
from spec_jax.bench import repeated_ngram_share
from spec_jax.cli_output import console, print_json
from spec_jax.generation import capacity_for
from spec_jax.prompts import model_input, read_prompts
from spec_jax.requests import encode_prompts

ALL = "all"
LOOP = 0.2
SPEC_JAX = {  # speculative_config, exact
    "plain": ({"method": "none", "verify_width": 1}, False),
    "plain-e2": ({"method": "none"}, None),
    "ngram": ({"method": "ngram", "num_speculative_tokens": 5}, None),
    "ngram-auto": ({"method": "ngram", "verify_width": "auto"}, None),
}
TRANSFORMERS = {"transformers": {}, "transformers-lookup": {"prompt_lookup_num_tokens": 10}}
Item = collections.namedtuple("Item", ("file", "prompt", "ids"))  # a prompt: its place in its file, its tokens
BASELINES = ("plain", *TRANSFORMERS)  # the table's ratios are to these; token ids are compared with the first


class SpecJax:
    def __init__(self, name: str, target: Any, config: dict[str, Any] | str, exact: bool | None):
        self.name, self.target, self.config, self.exact, self.last = name, target, config, exact, {}

    def generate(self, prompt_ids: list[int], max_tokens: int) -> list[int]:
        options = spec_jax.SamplingParams(max_tokens=max_tokens)
        result = spec_jax.generate(self.target, [prompt_ids], self.config, options, exact=self.exact)
        ids, stats = result.sequences[0].token_ids, result.stats
        self.last = {"compile_seconds": stats.compile_seconds, "decode_seconds": stats.decode_seconds}
        self.last["decode_tokens"] = len(ids)
        return ids


class Transformers:
    """`transformers` with the weights that spec_jax loads; `options` go to its `generate`."""

    def __init__(self, name: str, path: str, dtype: str, threads: int, eos: Sequence[int], options: dict[str, Any]):
        import torch

        torch.set_num_threads(threads)
        self.name, self.model, self.last = name, _transformers_model(path, dtype), {}
        ends = {"eos_token_id": list(eos) or None, "pad_token_id": eos[0] if eos else None}
        self.options = {"do_sample": False, "use_cache": True, **ends, **options}

    def generate(self, prompt_ids: list[int], max_tokens: int) -> list[int]:
        import torch

        first = []

        def watch(ids, scores, **_):
            """Never stops; notes when the first step ended and how many tokens there were then."""
            if not first:
                first.extend((time.perf_counter(), ids.shape[1]))
            return torch.zeros(ids.shape[0], dtype=torch.bool)

        with torch.inference_mode():
            ids = torch.tensor([prompt_ids])
            options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": max_tokens, **self.options}
            (found,) = self.model.generate(ids, stopping_criteria=[watch], **options).tolist()
        self.last = {"decode_seconds": time.perf_counter() - first[0], "decode_tokens": len(found) - first[1]}
        return found[len(prompt_ids) :]


@functools.cache
def _transformers_model(path: str, dtype: str) -> Any:
    import torch
    import transformers
    from transformers_agreement import transformers_model  # the script beside this one

    transformers.logging.set_verbosity_error()
    model = transformers_model(spec_jax.load_model(path, dtype=dtype, cpu_kernels=False))
    model.set_attn_implementation("sdpa")
    return model.to(getattr(torch, dtype))


def engine_of(text: str) -> tuple[str, Callable[..., Any]]:
    """Name of a built-in engine or a NAME=JSON, and what builds it from target, path, dtype and threads."""
    if text in TRANSFORMERS:
        if not (importlib.util.find_spec("torch") and importlib.util.find_spec("transformers")):
            raise ValueError(f"{text} needs torch: pip install -e '.[peers]', or name others: --engines plain ngram")
        return text, lambda target, *where: Transformers(text, *where, target.eos_token_ids, TRANSFORMERS[text])
    name, separator, config = text.partition("=")
    if not separator and text not in SPEC_JAX:
        raise ValueError(f"engine {text!r} is neither NAME=JSON nor one of {', '.join((*SPEC_JAX, *TRANSFORMERS))}")
    settings = (config, None) if separator else SPEC_JAX[text]
    return name, lambda target, *where: SpecJax(name, target, *settings)


def engine_from(text: str) -> tuple[str, Callable[..., Any]]:
    """The same for package.module:Class."""
    module, _, attribute = text.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ValueError(f"--engine {text}: {error}; give package.module:Class") from None
    return str(getattr(found, "name", text)), lambda target, *where: found(*where)


class Log:
    """Measurements by (file, prompt, repeat, engine) and the errors of engines, kept in a file if there is a path."""

    def __init__(self, path: str | None, header: dict[str, Any]):
        self.path, self.header, self.headers = path, header, []
        self.measured: dict[tuple[str, int, int, str], dict[str, Any]] = {}
        self.failed: dict[str, str] = {}
        if path:
            Path(path).touch()  # what cannot be written must not cost a warm-up
            self._read()
        for key, value in header["arguments"].items():
            if any(old["arguments"].get(key) != value for old in self.headers):
                raise ValueError(f"{path} was measured with other {key}; give another --output")

    def _read(self) -> None:
        data = Path(self.path).read_bytes()
        whole = data.rfind(b"\n") + 1  # behind it is a line that was cut off when a run was killed
        try:
            if data and not whole:
                raise ValueError
            for number, line in enumerate(map(json.loads, data[:whole].decode().split("\n")[:-1])):
                if not number or "arguments" in line:
                    self.headers.append({key: dict(line[key]) for key in ("arguments", "machine")})
                elif "failed" in line:
                    self.failed[line["failed"]] = line["error"]
                else:
                    self.measured[tuple(line[key] for key in ("file", "prompt", "repeat", "engine"))] = line
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{self.path} was not written by this script; give another --output") from None
        os.truncate(self.path, whole)

    def _write(self, line: dict[str, Any]) -> None:
        if self.header not in self.headers:  # a run that only reports leaves no header
            self.headers.append(self.header)
            self._write(self.header)
        if self.path:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    def find(self, item: Item, repeat: int, engine: str) -> dict[str, Any] | None:
        return self.measured.get((item.file, item.prompt, repeat, engine))

    def add(self, item: Item, repeat: int, engine: str, found: dict[str, Any]) -> None:
        key = {"file": item.file, "prompt": item.prompt, "repeat": repeat, "engine": engine}
        self.measured[tuple(key.values())] = found
        self._write(key | found)

    def fail(self, engine: str, error: Exception) -> None:
        self.failed[engine] = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        print(f"error: engine {engine!r} is left out: {self.failed[engine]}", file=sys.stderr, flush=True)
        self._write({"failed": engine, "error": self.failed[engine]})


def timed(engine, ids, max_tokens, eos, clock) -> dict[str, Any]:
    """One call: its seconds without compilation, its tokens, and what the engine tells about decoding alone."""
    start = clock()
    found = engine.generate(list(ids), max_tokens)
    seconds = clock() - start
    found = [int(token) for token in found][:max_tokens]
    found = found[: next((i + 1 for i, token in enumerate(found) if token in eos), None)]
    last = getattr(engine, "last", {})
    line = {"seconds": seconds - last.get("compile_seconds", 0.0), "tokens": len(found)}
    line |= {key: last.get(key) for key in ("decode_seconds", "decode_tokens")}
    return line | {"load": os.getloadavg()[0], "ids": found}


def measure(log, engines, items, max_tokens, repeats, eos=(), deadline=float("inf"), clock=time.perf_counter) -> bool:
    """Measures what the log lacks, at least one prompt, until the deadline; returns whether everything is there.

    A prompt that a run broke off at is measured again by all engines: no ratio spans two runs.
    """

    def running():
        return [engine for engine in engines if engine.name not in log.failed]

    def attempt(engine, item):
        try:
            return timed(engine, item.ids, max_tokens, eos, clock)
        except Exception as error:
            log.fail(engine.name, error)

    groups = [(repeat, number, item) for repeat in range(repeats) for number, item in enumerate(items)]
    left = [(r, n, item) for r, n, item in groups if any(log.find(item, r, e.name) is None for e in running())]
    longest = {capacity_for(len(item.ids) + max_tokens, 8): item for item in sorted(items, key=lambda i: len(i.ids))}
    for item in longest.values() if left else ():
        print(f"warm-up with {len(item.ids)} prompt tokens", file=sys.stderr, flush=True)
        for engine in running():
            attempt(engine, item)
    for done, (repeat, number, item) in enumerate(left):
        order = running()
        if not order or (done and clock() >= deadline):
            return False
        turn, times = (repeat + number) % len(order), []
        for engine in order[turn:] + order[:turn]:
            if (found := attempt(engine, item)) is not None:
                log.add(item, repeat, engine.name, found)
                times.append(f"{engine.name} {found['seconds']:.2f} s")
        print(f"repeat {repeat + 1}, {item.file} {item.prompt + 1}: {', '.join(times)}", file=sys.stderr, flush=True)
    return True


def spread(values: Sequence[float | None]) -> dict[str, float] | None:
    known = [value for value in values if value is not None]
    return {"median": statistics.median(known), "min": min(known), "max": max(known)} if known else None


def rows_of(log: Log, names: Sequence[str], items: Sequence[Item], repeats: int) -> list[dict[str, Any]]:
    """One row per file and engine, and the same without the prompts at which an engine's output loops, if any."""
    names, rows = [name for name in names if name not in log.failed], []
    for file in [*dict.fromkeys(item.file for item in items), ALL]:
        members = [item for item in items if file in (item.file, ALL)]
        there = {r: [i for i in members if names and all(log.find(i, r, e) for e in names)] for r in range(repeats)}
        used = [r for r in there if there[r] == members] or [r for r in there if there[r]][:1]
        members = there[used[0]] if used else []
        texts = {item: [log.find(item, r, name)["ids"] for r in used for name in names] for item in members}
        clean = [i for i in members if all((repeated_ngram_share([ids]) or 0.0) <= LOOP for ids in texts[i])]
        for kept in (members, clean) if len(clean) < len(members) else (members,):
            kind = {"file": file, "loops_left_out": len(members) - len(kept), "prompts": len(kept)}
            rows += [kind | _row(log, names, name, kept, used) for name in names if kept]
    return rows


def _row(log: Log, names: Sequence[str], name: str, items: Sequence[Item], used: Sequence[int]) -> dict[str, Any]:
    def speeds(engine, kind):
        """Tokens per second of every repeat, None where the engine cannot tell."""
        calls = [[log.find(item, repeat, engine) for item in items] for repeat in used]
        parts = [[[line[f"{kind}{part}"] for line in lines] for part in ("tokens", "seconds")] for lines in calls]
        return [None if None in t + s or sum(s) <= 0 else sum(t) / sum(s) for t, s in parts]

    reference = BASELINES[0] if BASELINES[0] in names else names[0]
    expected = {item: log.find(item, used[0], reference)["ids"] for item in items}
    texts = [log.find(item, used[0], name)["ids"] for item in items]
    row = {"engine": name, "repeats": len(used), "tokens": sum(map(len, texts)), "reference": reference}
    row["same_ids"] = sum(all(log.find(i, r, name)["ids"] == expected[i] for r in used) for i in items)
    row["repeated_8gram_share"] = repeated_ngram_share(texts)
    for kind in ("", "decode_"):
        mine = speeds(name, kind)
        pairs = {other: zip(mine, speeds(other, kind), strict=True) for other in names}
        row[f"{kind}tokens_per_second"] = spread(mine)
        row[f"{kind}ratio_to"] = {o: spread([a / b if a and b else None for a, b in p]) for o, p in pairs.items()}
    return row


def table(report: dict[str, Any]) -> Any:
    from rich.markup import escape
    from rich.table import Table

    def shown(value, spec):
        return "-" if value is None else f"{value['median']:{spec}} ({value['min']:{spec}}..{value['max']:{spec}})"

    engines = list(dict.fromkeys(row["engine"] for row in report["rows"]))
    baselines = [name for name in BASELINES if name in engines] or engines[:1]
    title = "{model}, {dtype}, greedy, {max_tokens} tokens, {device}".format_map(report)
    caption = f"whole calls, median (min..max) of repeats; load average {shown(report['load'], '.1f')}"
    result = Table("prompts", "engine", title=escape(title), caption=caption)
    for heading in ("tok/s", "decode tok/s", *(f"/ {name}" for name in baselines), "same ids", "repeated 8-grams"):
        result.add_column(escape(heading), justify="right")
    for number, row in enumerate(report["rows"], start=1):
        loops, share = row["loops_left_out"], row["repeated_8gram_share"]
        speeds = (row[f"{kind}tokens_per_second"] for kind in ("", "decode_"))
        result.add_row(
            escape(row["file"]) + (f" without {loops} loops" if loops else ""),
            escape(row["engine"]),
            *("-" if speed is None else f"{speed['median']:.1f}" for speed in speeds),
            *(shown(row["ratio_to"][name], ".2f") for name in baselines),
            f"{row['same_ids']}/{row['prompts']} x {row['repeats']}",
            "-" if share is None else f"{share:.0%}",
            end_section=number % len(engines) == 0,
        )
    return result


def read_items(target: Any, paths: Sequence[str], count: int, max_tokens: int) -> list[Item]:
    """`count` prompts of every file, spread evenly over it."""
    items: list[Item] = []
    for path in paths:
        name, prompts = Path(path).stem, read_prompts(path)
        if name == ALL or any(item.file == name for item in items):
            raise ValueError(f"{path}: results go by file name, and {name!r} is taken; rename the file")
        for place in sorted({i * len(prompts) // count for i in range(count)}):
            (ids,) = encode_prompts(target, [model_input(target, prompts[place])])
            if len(ids) + max_tokens > target.max_model_len:
                raise ValueError(f"{path}, prompt {place + 1}: {len(ids)} tokens leave no room for {max_tokens} more")
            items.append(Item(name, place, tuple(ids)))
    return items


def machine() -> dict[str, Any]:
    """Device, versions and a checksum of the library's source: what may change between two runs of one command."""
    sources = sorted(p for p in Path(spec_jax.__file__).parent.rglob("*") if p.suffix in (".py", ".h", ".cc"))
    found = environment.versions() | {"source": hashlib.sha256(b"".join(p.read_bytes() for p in sources)).hexdigest()}
    found |= {name: metadata.version(name) for name in ("torch", "transformers") if importlib.util.find_spec(name)}
    return {"device": environment.describe_device(), **found}


def run(arguments: argparse.Namespace) -> int:
    deadline = time.perf_counter() + arguments.time_budget
    if min(arguments.count, arguments.max_tokens, arguments.repeats) < 1:
        raise ValueError("--count, --max-tokens and --repeats must be at least 1")
    plans = [*map(engine_of, arguments.engines), *map(engine_from, arguments.engine)]
    if not plans:
        raise ValueError("no engine is named; give --engines or --engine")
    path, threads = str(hub.find_model(arguments.model)), environment.cpu_cores()
    target = spec_jax.load_model(path, dtype=arguments.dtype)
    items = read_items(target, arguments.prompts, arguments.count, arguments.max_tokens)
    same = {name: getattr(arguments, name) for name in ("model", "dtype", "max_tokens", "engines", "engine")}
    same |= {"threads": threads, "prompts": hashlib.sha256(repr(items).encode()).hexdigest()}
    log = Log(arguments.output, {"arguments": same, "machine": machine()})
    engines = []
    for name, build in plans:
        try:
            if name not in log.failed:
                engines.append(build(target, path, arguments.dtype, threads))
        except Exception as error:
            log.fail(name, error)
    names = [engine.name for engine in engines]
    if len(set(names)) < len(names):
        raise ValueError(f"two engines have the same name: {', '.join(names)}")
    finished = measure(log, engines, items, arguments.max_tokens, arguments.repeats, target.eos_token_ids, deadline)
    report = same | {"device": environment.describe_device(), "finished": finished, "failed": log.failed}
    report |= {"loop_threshold": LOOP, "machines": [header["machine"] for header in log.headers]}
    report["load"] = spread([line["load"] for line in log.measured.values()])
    report["rows"] = rows_of(log, names, items, arguments.repeats)
    print_json(report) if arguments.json else console(stderr=False).print(table(report))
    if len(log.headers) > 1:
        print("note: measured with several devices, versions or sources of spec_jax", file=sys.stderr)
    if not finished:
        print("not everything was measured; with --output the same command goes on", file=sys.stderr)
    return 1 if log.failed else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0; 1 where an engine raised; 2 for bad input; 130 when interrupted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--prompts", nargs="+", required=True, metavar="FILE.jsonl")
    parser.add_argument("--count", type=int, default=20, help="prompts of each file, spread evenly over it")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--engines", nargs="*", default=[*SPEC_JAX, *TRANSFORMERS], metavar="NAME or NAME=JSON")
    parser.add_argument("--engine", action="append", default=[], metavar="package.module:Class")
    parser.add_argument("--output", metavar="FILE.jsonl", help="keep every measurement; a run goes on from what it has")
    parser.add_argument("--time-budget", type=float, default=float("inf"), metavar="SECONDS", help="then it stops")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    try:
        return run(parser.parse_args(argv))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
