"""`spec-jax generate`: its options, what they become in the library, and the run."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

import spec_jax
from spec_jax import fields
from spec_jax.config import METHODS
from spec_jax.rule_names import RULES, full_name
from spec_jax.sampling_params import MAX_LOGPROBS, SamplingParams

EXAMPLE = 'spec-jax generate "Why is the sky blue?" --method ngram --num-speculative-tokens 5 --show-acceptance'
DEFAULT_MODEL = "smollm2-135m-instruct"
MAX_ID = 1 << 24
"""Beyond any vocabulary: a range of ids becomes a list, which a mistyped end must not make endless."""


def add_model_options(parser: Any) -> None:
    """`--model` and `--dtype`, which other commands have as well."""
    parser.add_argument("--model", default=DEFAULT_MODEL, help="hub name, folder, .gguf file (default: %(default)s)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="default: %(default)s")


def add_options(parser: Any) -> None:
    """All options. A sampling option has the name of its field, and None stands for "not given"."""
    parser.usage = "%(prog)s [OPTIONS] PROMPT\n       %(prog)s [OPTIONS] --prompts FILE.jsonl"
    add_model_options(parser)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--chat", action="store_true", default=None, help="use the model's chat template")
    form.add_argument("--raw", dest="chat", action="store_false", help="continue the prompt as it stands")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("prompt", nargs="?", metavar="PROMPT", help="the prompt, or - to read it from stdin")
    source.add_argument("--prompts", metavar="FILE.jsonl", help="many: MT-bench `turns` (the first) or `messages`")
    parser.add_argument("--max-batch-size", type=int, metavar="B", help="texts at once (default: what memory allows)")
    method = parser.add_argument_group("speculation")
    method.add_argument("--method", choices=METHODS, help="how tokens are drafted (default: ngram)")
    method.add_argument("--speculative-config", metavar="JSON", help="all keys at once, instead of --method and others")
    method.add_argument("--num-speculative-tokens", type=int, metavar="K", help="draft tokens per step")
    method.add_argument("--draft-model", metavar="NAME", help="the drafter of --method draft_model")
    method.add_argument(
        "--rule",
        metavar="RULE",
        type=rule,
        help=f"how drafts are verified (rejection_sample_method): {', '.join(RULES)}. The lossy ones change the output",
    )
    method.add_argument("--verify-width", type=width, metavar="W", help="rows per target step, K+1 or more, or auto")
    method.add_argument(
        "--exact",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="always bit-exact, or always fastest (default: bit-exact while the batch fits one row block)",
    )
    default = SamplingParams()
    choice = parser.add_argument_group("sampling")
    choice.add_argument(
        "--temperature", type=float, metavar="T", help=f"default: {default.temperature:g}, which is greedy"
    )
    choice.add_argument("--top-k", type=int, metavar="K", help="keep the K likeliest tokens")
    choice.add_argument("--top-p", type=float, metavar="P", help="keep the likeliest tokens that have this mass")
    choice.add_argument("--min-p", type=float, metavar="P", help="keep tokens P times as likely as the likeliest")
    choice.add_argument("--seed", type=int, help="default: a fresh one, which is shown")
    choice.add_argument("-n", "--n", type=int, metavar="N", help=f"samples per prompt (default: {default.n})")
    end = parser.add_argument_group("length and end")
    end.add_argument("--max-tokens", type=int, metavar="N", help=f"new tokens at most (default: {default.max_tokens})")
    end.add_argument("--min-tokens", type=int, metavar="N", help="no end before this many")
    end.add_argument("--stop", action="append", metavar="TEXT", help="end in front of this text; repeatable")
    end.add_argument("--stop-token-ids", type=_token_ids, metavar="ID,ID", help="end after any of these token ids")
    end.add_argument("--ignore-eos", action="store_true", default=None, help="go on at the model's end-of-text ids")
    tokens = parser.add_argument_group("which tokens")
    tokens.add_argument("--repetition-penalty", type=float, metavar="X", help="above 1: less of prompt and new text")
    tokens.add_argument("--presence-penalty", type=float, metavar="X", help="above 0: less of what is in the new text")
    tokens.add_argument("--frequency-penalty", type=float, metavar="X", help="the same, as often as it is there")
    tokens.add_argument(
        "--logit-bias", type=_biases, metavar="ID=VALUE,ID=VALUE", help="added to the logits; -inf forbids a token"
    )
    tokens.add_argument("--bad-words", action="append", metavar="TEXT", help="never write this text; repeatable")
    tokens.add_argument("--allowed-token-ids", type=_id_ranges, metavar="ID,ID-ID", help="write no other tokens")
    grammar = tokens.add_mutually_exclusive_group()
    grammar.add_argument("--regex", metavar="PATTERN", help="write what matches it (needs the extra `grammar`)")
    grammar.add_argument("--json-schema", metavar="FILE", help="write JSON that fits this schema, or {...} itself")
    output = parser.add_argument_group("output")
    output.add_argument("--stream", action="store_true", help="print the text piece by piece, as it comes")
    output.add_argument(
        "--logprobs",
        type=int,
        metavar="N",
        help=f"log-probability per token, and the N likeliest (0-{MAX_LOGPROBS})",
    )
    output.add_argument("--show-acceptance", action="store_true", help="mark which tokens were drafted and accepted")


def rule(text: str) -> str:
    """The type of `--rule`."""
    try:
        return full_name(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def width(text: str) -> int | str:
    """The type of `--verify-width`."""
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be a positive integer or auto") from None


def _token_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a comma-separated list of token ids, such as 0,2") from None


def _id_ranges(text: str) -> list[int]:
    ids = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*([0-9]+)\s*(?:-\s*([0-9]+)\s*)?", part)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if first > last:
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of token ids and ranges of them, such as 0,5-9")
        if last >= MAX_ID:
            raise argparse.ArgumentTypeError(f"{text!r} goes beyond any vocabulary")
        ids.extend(range(first, last + 1))
    return ids


def _biases(text: str) -> dict[int, float]:
    biases = {}
    for part in text.split(","):
        token, _, value = part.partition("=")
        try:
            token, value = int(token), float(value)
        except ValueError:
            message = f"{part!r} in {text!r} is not ID=VALUE, such as 42=-5 or 42=-inf"
            raise argparse.ArgumentTypeError(message) from None
        if token in biases:
            raise argparse.ArgumentTypeError(f"{text!r} gives the token id {token} twice")
        biases[token] = value
    return biases


def run(arguments: argparse.Namespace) -> int:
    """The command. Everything that can be checked without the model is refused before it is loaded."""
    from spec_jax.cli_output import generate_report, print_json, print_sequences, stats_line
    from spec_jax.prompts import read_prompts

    if arguments.stream:
        _check_stream(arguments)
    config = _speculative_config(arguments)
    sampling = _sampling(arguments)
    schema = None if arguments.json_schema is None else _schema(arguments.json_schema)
    listed = None if arguments.prompts is None else read_prompts(arguments.prompts)
    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    spec_jax.enable_compilation_cache()
    target = spec_jax.load_model(arguments.model, dtype=arguments.dtype)
    prompts = _model_inputs(target, arguments, prompt, listed)
    mask_fn = _grammar(arguments.regex, schema, target)
    if mask_fn is not None:
        sampling = dataclasses.replace(sampling, mask_fn=mask_fn)
    options = {
        "speculative_config": config,
        "sampling": sampling,
        "verify_width": arguments.verify_width,
        "exact": arguments.exact,
    }
    if arguments.stream:
        result = _stream(target, prompts[0], options)
    else:
        progress = None if listed is None else True
        batch = arguments.max_batch_size
        result = spec_jax.generate(target, prompts, max_batch_size=batch, progress=progress, **options)
    if arguments.json:
        print_json(generate_report(target, result, arguments.show_acceptance))
        return 0
    sampled = sampling.temperature > 0
    if not arguments.stream:
        print_sequences(target, result, arguments.show_acceptance, many_prompts=listed is not None, sampled=sampled)
    print(stats_line(result, sampled), file=sys.stderr)
    return 0


def _check_stream(arguments: argparse.Namespace) -> None:
    reasons = {
        "--json": (arguments.json, "which prints one object at the end"),
        f"--n {arguments.n}": ((arguments.n or 1) > 1, "whose texts would come at once"),
        "--show-acceptance": (arguments.show_acceptance, "which marks the whole text"),
        "--prompts": (arguments.prompts is not None, "whose texts would come at once"),
        "--max-batch-size": (arguments.max_batch_size is not None, "because it shows one text only"),
    }
    for option, (given, reason) in reasons.items():
        if given:
            raise ValueError(f"--stream cannot be used with {option}, {reason}")


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


def _sampling(arguments: argparse.Namespace) -> SamplingParams:
    """The options that were given, others as the library has them. A grammar needs the model and comes later."""
    values = {field.name: getattr(arguments, field.name, None) for field in dataclasses.fields(SamplingParams)}
    return SamplingParams(**{name: value for name, value in values.items() if value is not None})


def _schema(given: str) -> dict[str, Any]:
    """A JSON schema from a file or from the command line itself."""
    if given.lstrip().startswith("{"):
        try:
            return json.loads(given)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"--json-schema {given!r:.200} is not valid JSON: {error}") from None
    try:
        return fields.read_json(Path(given))
    except FileNotFoundError:
        raise ValueError(f"--json-schema {given!r:.200} is no file, and no JSON text that begins with {{") from None


def _grammar(pattern: str | None, schema: dict[str, Any] | None, target: Any) -> Any:
    """The `mask_fn`, or None."""
    if pattern is None and schema is None:
        return None
    from spec_jax import grammar

    try:
        return (
            grammar.json_schema_grammar(schema, target) if pattern is None else grammar.regex_grammar(pattern, target)
        )
    except ImportError as error:  # the extra is missing: its message says how to get it
        raise ValueError(str(error)) from None


def _model_inputs(target: Any, arguments: argparse.Namespace, prompt: str | None, listed: list | None) -> list:
    """The prompts as `generate` takes them: conversations or texts."""
    from spec_jax.prompts import has_chat_template
    from spec_jax.requests import encode_prompts

    if target.tokenizer is None:
        raise ValueError(f"model {arguments.model!r} has no tokenizer; from Python it takes token ids")
    chat = has_chat_template(target) if arguments.chat is None else arguments.chat
    if chat and not has_chat_template(target):
        raise ValueError(f"--chat: model {arguments.model!r} has no chat template; use --raw")
    if listed is None:
        return [[{"role": "user", "content": prompt}]] if chat else [prompt]
    prompts = [list(item.messages) if chat else item.text for item in listed]
    for number, item in enumerate(prompts, start=1):  # one by one, so that a message names the prompt
        try:
            encode_prompts(target, [item])
        except ValueError as error:
            raise ValueError(
                f"{arguments.prompts}, prompt {number}: {str(error).removeprefix('prompt 0').lstrip(': ')}"
            ) from None
    return prompts


def _stream(target: Any, prompt: Any, options: dict[str, Any]) -> Any:
    from spec_jax.cli_output import print_logprobs

    stream, begun = spec_jax.stream(target, prompt, **options), False
    try:
        for piece in stream:
            print(piece, end="", flush=True)
            begun = True
    except KeyboardInterrupt:
        if begun:
            print()  # the message that follows begins a line of its own
        raise
    print()
    print_logprobs(target, stream.result.sequences[0])
    return stream.result
