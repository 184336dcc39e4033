"""The `spec-jax` command. Nothing heavy is imported here; every command loads what it needs when it runs."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import spec_jax
from spec_jax.config import METHODS, RULES

DEFAULT_MODEL = "smollm2-135m-instruct"
PIPE_WIDTH = 160
"""Columns of a table that goes into a file or pipe, where the terminal cannot be asked."""


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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="spec-jax", description="Speculative decoding in JAX, with the output of plain decoding."
    )
    parser.add_argument("--version", action="version", version=f"spec_jax {spec_jax.__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_generate(commands)
    _add_bench(commands)
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


def _add_model_options(parser: Any) -> None:
    parser.add_argument("--model", default=DEFAULT_MODEL, help="hub name, folder, .gguf file (default: %(default)s)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="default: %(default)s")


def _add_generate(commands: Any) -> None:
    parser = _command(
        commands,
        "generate",
        _generate,
        "continue one prompt",
        'spec-jax generate "Why is the sky blue?" --method ngram --num-speculative-tokens 5 --show-acceptance',
    )
    parser.add_argument("prompt", metavar="PROMPT", help="the prompt, or - to read it from stdin")
    _add_model_options(parser)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--chat", action="store_true", default=None, help="wrap the prompt in the model's chat template")
    form.add_argument("--raw", dest="chat", action="store_false", help="continue the prompt as it stands")
    method = parser.add_argument_group("speculation")
    method.add_argument("--method", choices=METHODS, help="how tokens are drafted (default: ngram)")
    method.add_argument("--speculative-config", metavar="JSON", help="all keys at once, instead of --method and others")
    method.add_argument("--num-speculative-tokens", type=int, metavar="K", help="draft tokens per step")
    method.add_argument("--draft-model", metavar="NAME", help="the drafter of --method draft_model")
    method.add_argument("--rule", choices=RULES, help="how drafts are verified (rejection_sample_method)")
    method.add_argument("--verify-width", type=int, metavar="W", help="rows per target step, K+1 or more")
    method.add_argument(
        "--exact",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="always bit-exact, or always fastest (default: bit-exact while the batch fits one row block)",
    )
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--max-tokens", type=int, default=128, help="default: %(default)s")
    sampling.add_argument("--temperature", type=float, default=0.0, help="default: %(default)s, which is greedy")
    sampling.add_argument("--top-k", type=int)
    sampling.add_argument("--top-p", type=float)
    sampling.add_argument("--min-p", type=float)
    sampling.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    sampling.add_argument("--n", type=int, default=1, help="samples (default: %(default)s)")
    sampling.add_argument("--ignore-eos", action="store_true", help="run on to --max-tokens")
    sampling.add_argument("--stop-token-ids", type=_token_ids, metavar="ID,ID", help="end after any of these token ids")
    parser.add_argument(
        "--show-acceptance", action="store_true", help="mark which tokens were drafted and accepted in the text"
    )


def _token_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a comma-separated list of token ids, such as 0,2") from None


def _add_bench(commands: Any) -> None:
    parser = _command(
        commands,
        "bench",
        _bench,
        "compare methods with plain decoding on speed and output",
        "spec-jax bench --methods ngram:3,ngram:7,layer_skip --prompts mt_bench.jsonl --max-prompts 10",
    )
    _add_model_options(parser)
    parser.add_argument(
        "--methods",
        help="comma-separated name or name:K (default: ngram,layer_skip:2, draft_model if --draft-model is given)",
    )
    parser.add_argument("--draft-model", metavar="NAME", help="the drafter of the method draft_model")
    parser.add_argument("--prompts", metavar="FILE.jsonl", help="MT-bench `turns` (the first is used) or `messages`")
    parser.add_argument(
        "--max-prompts", type=int, default=1, help="prompts per category; 0 is all (default: %(default)s)"
    )
    parser.add_argument("--max-tokens", type=int, default=48, help="per prompt (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=2, help="medians are over these (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--temperature", type=float, default=0.0, help="default: %(default)s, which is greedy")
    parser.add_argument("--verify-width", type=int, metavar="W", help="rows per target step for all methods")
    parser.add_argument("--exact", action=argparse.BooleanOptionalAction, default=None, help="as in `generate`")
    parser.add_argument("--logdir", metavar="FOLDER", help="write TensorBoard scalars, one step per repeat")


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


def _generate(arguments: argparse.Namespace) -> int:
    from spec_jax import acceptance_view
    from spec_jax.prompts import has_chat_template

    config = _speculative_config(arguments)
    optional = {
        name: getattr(arguments, name)
        for name in ("top_k", "top_p", "min_p", "stop_token_ids")
        if getattr(arguments, name) is not None
    }
    sampling = spec_jax.SamplingParams(
        temperature=arguments.temperature,
        max_tokens=arguments.max_tokens,
        seed=arguments.seed,
        n=arguments.n,
        ignore_eos=arguments.ignore_eos,
        **optional,
    )
    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    target = spec_jax.load_model(arguments.model, dtype=arguments.dtype)
    if target.tokenizer is None:
        raise ValueError(f"model {arguments.model!r} has no tokenizer; from Python it takes token ids")
    chat = has_chat_template(target) if arguments.chat is None else arguments.chat
    if chat and not has_chat_template(target):
        raise ValueError(f"--chat: model {arguments.model!r} has no chat template; use --raw")
    result = spec_jax.generate(
        target,
        [[{"role": "user", "content": prompt}]] if chat else [prompt],
        speculative_config=config,
        sampling=sampling,
        verify_width=arguments.verify_width,
        exact=arguments.exact,
    )
    if arguments.json:
        _print_json(_generate_report(target, result, arguments.show_acceptance))
        return 0
    console = _console(stderr=False)
    colour = console.color_system is not None
    for number, sequence in enumerate(result.sequences, start=1):
        if len(result.sequences) > 1:
            print(f"--- sample {number} (seed {sequence.seed})", file=sys.stderr)
        if not arguments.show_acceptance:
            print(sequence.text)
        elif colour:
            text = acceptance_view.coloured(target.tokenizer, sequence.token_ids, sequence.accepted)
            console.print(text, soft_wrap=True)
        else:
            print(acceptance_view.bracketed(target.tokenizer, sequence.token_ids, sequence.accepted))
    if arguments.show_acceptance:
        _console().print(acceptance_view.legend(colour))
    print(_stats_line(result), file=sys.stderr)
    return 0


def _speculative_config(arguments: argparse.Namespace) -> dict[str, Any] | str:
    single = {
        "--method": arguments.method,
        "--num-speculative-tokens": arguments.num_speculative_tokens,
        "--draft-model": arguments.draft_model,
        "--rule": arguments.rule,
    }
    given = [option for option, value in single.items() if value is not None]
    if arguments.speculative_config is not None:
        if given:
            raise ValueError(f"--speculative-config already holds every key; leave out {', '.join(given)}")
        return arguments.speculative_config
    method = arguments.method or ("draft_model" if arguments.draft_model else "ngram")
    if arguments.draft_model and method != "draft_model":
        raise ValueError(f"--draft-model is only used by --method draft_model, not by {method!r}")
    config = {
        "method": method,
        "num_speculative_tokens": arguments.num_speculative_tokens,
        "model": arguments.draft_model,
        "rejection_sample_method": arguments.rule,
    }
    return {key: value for key, value in config.items() if value is not None}


def _generate_report(target: Any, result: Any, with_pieces: bool) -> dict[str, Any]:
    from spec_jax import acceptance_view

    sequences = []
    for sequence in result.sequences:
        entry = {
            "text": sequence.text,
            "token_ids": [int(token) for token in sequence.token_ids],
            "finish_reason": sequence.finish_reason,
            "seed": sequence.seed,
            "accepted": [bool(flag) for flag in sequence.accepted],
            "stats": sequence.stats.to_dict(),
        }
        if with_pieces:
            entry["pieces"] = acceptance_view.token_pieces(target.tokenizer, sequence.token_ids)
        sequences.append(entry)
    return {
        "sequences": sequences,
        "exactness": result.exactness,
        "verify_width": result.verify_width,
        "stats": result.stats.to_dict(),
    }


def _stats_line(result: Any) -> str:
    stats = result.stats
    tokens = sum(len(sequence.token_ids) for sequence in result.sequences)
    speed = "" if stats.tokens_per_second is None else f" ({stats.tokens_per_second:.1f} tok/s)"
    parts = [f"{tokens} tokens in {stats.decode_seconds:.2f} s{speed}"]
    if stats.mean_acceptance_length is not None:
        parts.append(
            f"mean acceptance length {stats.mean_acceptance_length:.2f}, {stats.draft_acceptance_rate:.0%} of "
            f"{stats.num_draft_tokens} drafted tokens accepted"
        )
    else:
        parts.append("nothing drafted")
    parts.append(f"exactness {result.exactness}, {stats.near_ties} near-ties")
    parts.append(f"prefill {stats.prefill_seconds:.2f} s, compilation {stats.compile_seconds:.1f} s")
    return "; ".join(parts)


def _bench(arguments: argparse.Namespace) -> int:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from spec_jax import bench
    from spec_jax.prompts import read_prompts

    prompts = None if arguments.prompts is None else read_prompts(arguments.prompts)
    draft_model = arguments.draft_model
    methods = _bench_methods(arguments.methods, draft_model)
    bench.plan_runs(methods, draft_model, arguments.verify_width, arguments.exact)  # refuse before loading weights
    target = spec_jax.load_model(arguments.model, dtype=arguments.dtype)
    if draft_model is not None:
        draft_model = spec_jax.load_model(draft_model, dtype=arguments.dtype)
    count, description = TextColumn("{task.completed}/{task.total}"), TextColumn("{task.description}", markup=False)
    with Progress(count, BarColumn(), TimeElapsedColumn(), description, console=_console()) as bar:
        task = bar.add_task("starting", total=None)
        report = bench.run_bench(
            target,
            methods=methods,
            draft_model=draft_model,
            prompts=prompts,
            max_prompts=arguments.max_prompts or None,
            max_tokens=arguments.max_tokens,
            repeats=arguments.repeats,
            batch_size=arguments.batch_size,
            temperature=arguments.temperature,
            verify_width=arguments.verify_width,
            exact=arguments.exact,
            logdir=arguments.logdir,
            progress=lambda done, total, text: bar.update(task, completed=done, total=total, description=text),
        )
    if arguments.json:
        _print_json(report)
    else:
        _console(stderr=False).print(bench.table(report))
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
        _print_json({"models": entries})
    else:
        _console(stderr=False).print(doctor.models_table(entries))
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    from spec_jax import doctor

    report = doctor.examine(arguments.model, arguments.dtype)
    if arguments.json:
        _print_json(report)
    else:
        for part in doctor.tables(report):
            _console(stderr=False).print(part)
    return 0 if report["exactness"]["level"] != "E0" else 1


def _print_json(report: dict[str, Any]) -> None:
    print(json.dumps(report, allow_nan=False, ensure_ascii=False))


def _console(stderr: bool = True) -> Any:
    from rich.console import Console

    class PipeConsole(Console):
        def on_broken_pipe(self) -> None:
            raise  # to `main`, instead of rich's own exit with status 1

    console = PipeConsole(stderr=stderr)
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    return console
