"""What the `spec-jax` commands print: JSON, and the texts, log-probabilities and numbers of `generate`."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from spec_jax.text import INCOMPLETE

PIPE_WIDTH = 160
"""Columns of a table that goes into a file or pipe, where the terminal cannot be asked."""
TOKEN_WIDTH = 16
"""Columns of a token in front of its log-probability; a longer one shifts its own line only."""


def print_json(report: dict[str, Any]) -> None:
    print(json.dumps(report, allow_nan=False, ensure_ascii=False))


def write_csv(file: str, rows: Sequence[Mapping[str, Any]], columns: Sequence[str] | None = None) -> None:
    """Writes a table; columns: all that occur where none are given, empty in rows that lack one."""
    with open(file, "w", newline="", encoding="utf-8") as target:
        columns = columns or list(dict.fromkeys(name for row in rows for name in row))
        writer = csv.DictWriter(target, columns, lineterminator="\n", restval="")
        writer.writeheader()
        writer.writerows(rows)


def print_rows(rows: Sequence[Mapping[str, Any]], title: str, sections: Sequence[str] = ()) -> None:
    """Prints rows as a table on stdout; a column per key, numbers with two decimals.

    Args:
      sections: a line is drawn behind rows that have one of these values.
    """
    from rich.table import Table

    columns = list(dict.fromkeys(key for row in rows for key in row))
    table = Table(*columns, title=title)
    for row in rows:
        values = [row.get(column, "") for column in columns]
        cells = (f"{value:.2f}" if isinstance(value, float) else str(value) for value in values)
        table.add_row(*cells, end_section=any(value in sections for value in values))
    console(stderr=False).print(table)


def console(stderr: bool = True) -> Any:
    from rich.console import Console

    class PipeConsole(Console):
        def on_broken_pipe(self) -> None:
            raise  # to `main`, instead of rich's own exit with status 1

    result = PipeConsole(stderr=stderr)
    if not result.is_terminal:
        result.width = PIPE_WIDTH
    return result


def generate_report(target: Any, result: Any, with_pieces: bool) -> dict[str, Any]:
    """What `spec-jax generate --json` prints."""
    from spec_jax import acceptance_view

    sequences = []
    for sequence in result.sequences:
        entry = {
            "prompt_index": sequence.prompt_index,
            "text": sequence.text,
            "token_ids": [int(token) for token in sequence.token_ids],
            "finish_reason": sequence.finish_reason,
            "stop_reason": sequence.stop_reason,
            "seed": sequence.seed,
            "accepted": [bool(flag) for flag in sequence.accepted],
            "logprobs": None if sequence.logprobs is None else token_logprobs(target.tokenizer, sequence),
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


def token_logprobs(tokenizer: Any, sequence: Any) -> list[list[dict[str, Any]]]:
    """Per token the token itself, then the likeliest others, each as {token_id, token, logprob, rank}."""
    rows, before = [], None
    for token, likely in zip(sequence.token_ids, sequence.logprobs, strict=True):
        row = []
        for other, found in likely.items():
            text = _token_text(tokenizer, before, other)
            row.append({"token_id": int(other), "token": text, "logprob": found.logprob, "rank": found.rank})
        rows.append(row)
        before = token
    return rows


def _token_text(tokenizer: Any, before: int | None, token: int) -> str:
    """The text of a token behind the one before it: alone, some decoders drop the space that it begins with."""

    def decode(*ids: int) -> str:
        return tokenizer.decode(ids, skip_special_tokens=False)

    head = "" if before is None else decode(before)
    both = decode(token) if before is None else decode(before, token)
    # Behind half a character it may complete that, and is shown for itself.
    return decode(token) if head.endswith(INCOMPLETE) or not both.startswith(head) else both[len(head) :]


def _logprob_lines(tokenizer: Any, sequence: Any) -> Iterator[str]:
    """One line per token: its text, log-probability and rank, then the likeliest others."""
    for token, *others in token_logprobs(tokenizer, sequence):
        likely = ", ".join(f"{_quoted(other['token'])} {other['logprob']:.3f}" for other in others)
        head = f"{_quoted(token['token']):<{TOKEN_WIDTH}} {token['logprob']:8.3f}  rank {token['rank']:<5}"
        yield f"{head}  {likely}".rstrip()


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def print_sequences(target: Any, result: Any, show_acceptance: bool, many_prompts: bool, sampled: bool) -> None:
    """The texts on stdout, each under a header line where there are several.

    Args:
      sampled: whether seeds matter.
    """
    from spec_jax import acceptance_view

    out = console(stderr=False)
    colour = out.color_system is not None
    samples = len([s for s in result.sequences if s.prompt_index == 0])
    for number, sequence in enumerate(result.sequences):
        names = [f"prompt {sequence.prompt_index + 1}"] * many_prompts
        names += [f"sample {number % samples + 1}"] * (samples > 1)
        if names:
            seed = f" (seed {sequence.seed})" if sampled or samples > 1 else ""
            # Of many prompts on stdout: in a file, nothing else would tell where a text ends.
            print(f"--- {', '.join(names)}{seed}", file=sys.stdout if many_prompts else sys.stderr)
        if not show_acceptance:
            print(sequence.text)
        elif colour:
            text = acceptance_view.coloured(target.tokenizer, sequence.token_ids, sequence.accepted)
            out.print(text, soft_wrap=True)
        else:
            print(acceptance_view.bracketed(target.tokenizer, sequence.token_ids, sequence.accepted))
        print_logprobs(target, sequence)
    if show_acceptance:
        console().print(acceptance_view.legend(colour))


def print_logprobs(target: Any, sequence: Any) -> None:
    """The log-probabilities below a text, where they were asked for."""
    if sequence.logprobs is not None:
        for line in _logprob_lines(target.tokenizer, sequence):
            print(line)


def stats_line(result: Any, sampled: bool) -> str:
    """The numbers of a call in one line.

    Args:
      sampled: whether the seed matters; it is shown where no header shows it.
    """
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
    lossy = result.exactness == "lossy"
    parts.append("LOSSY rule" if lossy else f"exactness {result.exactness}, {stats.near_ties} near-ties")
    if stats.remark:
        parts.append(stats.remark)
    if stats.num_cached_tokens:
        parts.append(f"{stats.num_cached_tokens} prompt tokens from the cache")
    if sampled and len(result.sequences) == 1:
        parts.append(f"seed {result.sequences[0].seed}")
    parts.append(f"prefill {stats.prefill_seconds:.2f} s, compilation {stats.compile_seconds:.1f} s")
    return "; ".join(parts)
