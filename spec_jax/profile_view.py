"""The report of `spec_jax.profiling` as tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spec_jax.step_parts import PARTS

RATIOS = ("step_ratio", "forward_ratio", "step_bound_ratio", "forward_bound_ratio")


def tables(report: dict[str, Any]) -> list[Any]:
    """The report as `rich` tables: the parts of a step by rows, and the loop, the host and the memory by method."""
    from rich.markup import escape
    from rich.table import Table

    speed, bound, trace = report["bandwidth"], report["bound"], report["trace"]
    where = f"{report['model']} on {report['device']}, {report['dtype']}, batch {report['batch_size']}"
    reading = (
        f" bound: {bound['bytes'] / 1e6:.0f} MB of parameters and K/V, read at "
        f"{speed['bytes_per_second']['median'] / 1e9:.1f} GB/s ({speed['read_with']}): "
        f"{bound['milliseconds']['median']:.2f} ms."
    )
    parts = Table(title=escape(f"{where}: ms of a step"), caption=_PARTS + reading, caption_justify="left")
    memory = Table(title=escape(f"{where}: the loop, the host and the memory"), caption_justify="left")
    memory.caption = _MEMORY if trace is None else _MEMORY + escape(_opening(trace["path"]))
    for table in (parts, memory):
        table.add_column("method")
        table.add_column("K", justify="right")
        table.add_column("W", justify="right")
    ratios = "T/T(1), step", "forward", "/ bound, step", "forward"
    for heading in ("rows", *PARTS, "unexplained", "step", "min-max", *ratios):
        parts.add_column(heading, justify="right")
    drafter = "drafter: parameters", "its state", "its temporaries"
    for heading in ("loop ms/step", "host ms/step", "host share", "peak MB", "temporaries", *drafter):
        memory.add_column(heading, justify="right")
    last = None
    for row in report["rows"]:
        names = row["method"], row["num_speculative_tokens"], row["verify_width"]
        if last not in (None, names):
            parts.add_section()
        repeated, last = last == names, names
        ms = row["milliseconds"]
        parts.add_row(
            *([""] * 3 if repeated else map(str, names)),
            str(row["rows"]),
            *(_milliseconds(ms[part]["median"]) for part in PARTS),
            f"{row['unexplained']:.2f} ({row['shares']['unexplained']:.0%})",
            f"{ms['step']['median']:.2f}",
            f"{ms['step']['min']:.2f}-{ms['step']['max']:.2f}",
            *(f"{row[name]:.2f}" for name in RATIOS),
        )
    for entry in report["methods"]:
        found = entry["memory"]
        sizes = found["peak"], found["temporaries"], *found["drafter"].values()
        memory.add_row(
            *(str(entry[name]) for name in ("method", "num_speculative_tokens", "verify_width")),
            f"{entry['loop']['median']:.2f}",
            f"{entry['host']['median']:.3f}",
            f"{entry['host_share']:.1%}",
            *("-" if size is None else f"{size / 1e6:.1f}" for size in sizes),
        )
    return [parts, memory]


def _milliseconds(value: float) -> str:
    return f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def _opening(path: str) -> str:
    folder = str(Path(path).parents[3])
    return f" trace: pip install xprof, then tensorboard --logdir {folder}, page Profile. File: {path}"


_PARTS = (
    "rows: computed of every text in a step. draft, forward, verify and commit: each alone, many times in one program. "
    "step: one of the compiled loop. unexplained: what the parts leave over. T/T(1): to plain decoding at W=1. "
    "/ bound: to reading the memory once."
)
_MEMORY = (
    "loop: the compiled loop where `generate` decodes, per step. host: what it adds to that behind the prefill. peak, "
    "temporaries: of the loop, in MB, arguments included in the peak. drafter: its share; temporaries: against plain "
    "decoding of that width."
)
