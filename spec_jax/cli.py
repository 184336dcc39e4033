"""The `spec-jax` command. Nothing heavy is imported here; every command loads what it needs when it runs."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import spec_jax
from spec_jax import cli_export, cli_generate, cli_plan
from spec_jax.cli_output import console, print_json


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status.

    0; 1: a check failed; 2: bad input; 130: interrupted; 141: the reader of the output went away.
    """
    try:
        try:
            arguments = _parser().parse_args(argv)
            return arguments.run(arguments)
        finally:  # here, where a closed pipe can still be told from a failure, and also for -h, which exits
            if sys.stdout is not None:
                sys.stdout.flush()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # What is left in the buffer goes nowhere, or Python would report the closed pipe once more when it exits.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


class _Parser(argparse.ArgumentParser):
    """Mistakes become an error of one line like all others; argparse would print the whole usage in front."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see {self.prog} -h")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="spec-jax", description="Speculative decoding in JAX, with the output of plain decoding.")
    parser.add_argument("--version", action="version", version=f"spec_jax {spec_jax.__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_generate(commands)
    _add_bench(commands)
    _add_plan(commands)
    _add_export(commands)
    _add_models(commands)
    _add_doctor(commands)
    return parser


def _command(commands: Any, name: str, run: Callable[[argparse.Namespace], int], summary: str, example: str) -> Any:
    parser = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout, progress on stderr")
    return parser


def _add_generate(commands: Any) -> None:
    summary = "continue a prompt, or many"
    cli_generate.add_options(_command(commands, "generate", cli_generate.run, summary, cli_generate.EXAMPLE))


def _add_bench(commands: Any) -> None:
    parser = _command(
        commands,
        "bench",
        _bench,
        "compare methods with plain decoding on speed and output",
        "spec-jax bench --methods ngram:3,ngram:7,layer_skip --prompts mt_bench.jsonl --max-prompts 10",
    )
    cli_generate.add_model_options(parser)
    parser.add_argument(
        "--methods",
        help="comma-separated name, name:K or name:auto (default: ngram:auto,ngram,layer_skip:2, draft_model if given)",
    )
    parser.add_argument("--draft-model", metavar="NAME", help="the drafter of the method draft_model")
    parser.add_argument("--prompts", metavar="FILE.jsonl", help="MT-bench `turns` (the first is used) or `messages`")
    parser.add_argument(
        "--max-prompts", type=int, default=1, help="prompts per category; 0 is all (default: %(default)s)"
    )
    parser.add_argument("--max-tokens", type=int, default=48, help="per prompt (default: %(default)s)")
    parser.add_argument("--repeats", type=int, help="medians are over these (default: 2, with --profile 7)")
    parser.add_argument("--batch-size", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--temperature", type=float, default=0.0, help="default: %(default)s, which is greedy")
    parser.add_argument("--verify-width", type=cli_generate.width, metavar="W", help="rows per target step, or auto")
    parser.add_argument("--exact", action=argparse.BooleanOptionalAction, default=None, help="as in `generate`")
    parser.add_argument(
        "--profile",
        action="store_true",
        help="show instead where the time and the memory of a step go, on the first prompts as one batch",
    )
    parser.add_argument(
        "--logdir", metavar="FOLDER", help="write TensorBoard scalars, one step per repeat; with --profile a trace"
    )


def _add_plan(commands: Any) -> None:
    summary = "choose the draft length for a model, a chip and a load"
    cli_plan.add_options(_command(commands, "plan", cli_plan.run, summary, cli_plan.EXAMPLE))


def _add_export(commands: Any) -> None:
    summary = "write a learned drafter in the layout that another system reads"
    cli_export.add_options(_command(commands, "export", cli_export.run, summary, cli_export.EXAMPLE))


def _add_models(commands: Any) -> None:
    _command(commands, "models", _models, "list the models known by name", "spec-jax models")


def _add_doctor(commands: Any) -> None:
    parser = _command(
        commands,
        "doctor",
        _doctor,
        "report devices, versions and which exactness holds here",
        "spec-jax doctor --model smollm2-135m-instruct",
    )
    parser.add_argument("--model", help="measure exactness on this model (default: a small random one)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="default: %(default)s")


def _bench(arguments: argparse.Namespace) -> int:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from spec_jax import bench, profile_view, profiling
    from spec_jax.checks import check_counts
    from spec_jax.prompts import read_prompts

    prompts = None if arguments.prompts is None else read_prompts(arguments.prompts)
    draft_model = arguments.draft_model
    methods = _bench_methods(arguments.methods, draft_model)
    # Refuse before loading weights.
    bench.plan_runs(methods, draft_model, arguments.verify_width, arguments.exact)
    repeats = {} if arguments.repeats is None else {"repeats": arguments.repeats}
    check_counts(max_tokens=arguments.max_tokens, batch_size=arguments.batch_size, **repeats)
    spec_jax.SamplingParams(temperature=arguments.temperature)
    spec_jax.enable_compilation_cache()
    target = spec_jax.load_model(arguments.model, dtype=arguments.dtype)
    if draft_model is not None:
        draft_model = spec_jax.load_model(draft_model, dtype=arguments.dtype)
    measure = profiling.profile if arguments.profile else bench.run_bench
    count, description = TextColumn("{task.completed}/{task.total}"), TextColumn("{task.description}", markup=False)
    with Progress(count, BarColumn(), TimeElapsedColumn(), description, console=console()) as bar:
        task = bar.add_task("starting", total=None)
        report = measure(
            target,
            methods=methods,
            draft_model=draft_model,
            prompts=prompts,
            max_prompts=arguments.max_prompts or None,
            max_tokens=arguments.max_tokens,
            batch_size=arguments.batch_size,
            temperature=arguments.temperature,
            verify_width=arguments.verify_width,
            exact=arguments.exact,
            logdir=arguments.logdir,
            progress=lambda done, total, text: bar.update(task, completed=done, total=total, description=text),
            **repeats,
        )
    if arguments.json:
        print_json(report)
    elif arguments.profile:
        for part in profile_view.tables(report):
            console(stderr=False).print(part)
    else:
        console(stderr=False).print(bench.table(report))
        spent = ", ".join(f"{part} {seconds:.0f} s" for part, seconds in report["seconds"].items())
        print(f"time of all runs together: {spent}", file=sys.stderr)
        if prompts is None and arguments.max_prompts:
            print("All built-in prompts: spec-jax bench --max-prompts 0 --max-tokens 128 --repeats 3", file=sys.stderr)
    return 0


def _bench_methods(listed: str | None, draft_model: str | None) -> list[str]:
    from spec_jax.bench import DEFAULT_METHODS

    if listed is None:
        return [*DEFAULT_METHODS] + ["draft_model"] * (draft_model is not None)
    methods = [name.strip() for name in listed.split(",") if name.strip()]
    if draft_model is not None and not any(name.startswith("draft_model") for name in methods):
        raise ValueError(f"--draft-model {draft_model!r} is used by none of --methods {listed}; add draft_model")
    return methods


def _models(arguments: argparse.Namespace) -> int:
    from spec_jax import doctor

    entries = doctor.known_models()
    if arguments.json:
        print_json({"models": entries})
    else:
        console(stderr=False).print(doctor.models_table(entries))
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    from spec_jax import doctor

    report = doctor.examine(arguments.model, arguments.dtype)
    if arguments.json:
        print_json(report)
    else:
        for part in doctor.tables(report):
            console(stderr=False).print(part)
    return 0 if report["exactness"]["level"] != "E0" else 1
