"""Does the planner find the speed-ups that papers report, from their acceptance and their device?

Command:   python experiments/paper_speedups.py [--paper NAME ...] [--csv OUT] [--plot FILE] [--json]
Hardware:  none; it takes a second and imports no jax. Everything projected, nothing run.
Expected:  median error of 294 speed-ups of 15 tables 13.8 % (roofline alone 21.3 %), each paper once 14.7 % (18.5 %);
           12.1 % at batch 1, 32 % at larger batches, where engines lose more than the planner charges. Half or twice
           one constant of the stacks gives 9 to 20 % (12 to 21 % with each paper once): what a step of eager PyTorch
           takes on the host matters most, 11 to 20 % for plain steps, 9 to 18 % for speculative ones, 10 to 17 % for
           the operations of a layer. Without the operations that a speculative step of eager PyTorch adds (counted
           after the first comparison had shown every tree method too fast) it is 18.5 and 20.4 %.
           Plain steps on GPUs are met within 9.3 %
           (vLLM's host time was read off one of the five)

`data/published_speedups.csv` holds what was published: a row is one cell of a table. Its columns:
  model, device, chips, batch, context, dtype   the target (`data/architectures.json`), and what it ran on. The context
             is an estimate of the mean prompt and output. Several chips share every layer (tensor parallel), but under
             eager PyTorch one holds the layers after another's, which takes as long as one chip
  stack      what ran it, of `spec_jax.stacks`: the only thing that overheads depend on
  drafter    of `spec_jax.draft_costs`, or a model; mtp:V: a head of V tokens; heads: one layer per token, all at once
  nodes, levels, branch   draft tokens verified at once, levels of a tree (of a chain as many, of lookup none), and
             nodes extended in each. Where a paper does not say, its code's defaults
  acceptance, reading     tau: tokens per step, the target's own one included. All papers here count so. alpha: the
             probability that a draft token is accepted (Leviathan et al.)
  published, unit         the speed-up over plain decoding; unit ms: a plain step, which checks overheads by themselves
  note       what had to be assumed, and why a row is far off

Projected twice: "roofline" from the data sheet's bandwidth and operations alone, "with overheads" by the row's stack.
The constants of a stack are counts and general measurements (`spec_jax/stacks.py`); none is fitted to a speed-up.
Error = projected / published - 1. Medians are of its absolute value; "each paper once" is the median of the papers'
medians, so that a paper with many cells weighs no more than others.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spec_jax import draft_costs, planner
from spec_jax.checks import nearest
from spec_jax.cli_output import console, print_json, write_csv
from spec_jax.devices import find_device
from spec_jax.model_costs import DTYPE_BYTES, ModelCosts, costs_from_config
from spec_jax.roofline import Load
from spec_jax.stacks import IDEAL, Stack, find_stack

DATA = Path(__file__).parent / "data"
OUTLIER = 0.4
SPEEDUP, MILLISECONDS = "speed-up", "ms"
TAU, ALPHA = "tau", "alpha"
COUNTS = ("chips", "batch", "context", "nodes", "levels", "branch")
NUMBERS = ("acceptance", "published")


@dataclasses.dataclass(frozen=True)
class Row:
    """One published figure; the fields are the columns that the module's docstring explains."""

    paper: str
    source: str
    model: str
    device: str
    chips: int
    batch: int
    context: int
    dtype: str
    stack: str
    method: str
    drafter: str
    nodes: int
    levels: int
    branch: int
    dataset: str
    acceptance: float
    reading: str
    published: float
    unit: str
    note: str

    @property
    def tokens(self) -> float:
        """Per step, the target's own included."""
        if self.reading == TAU:
            return self.acceptance
        return planner.AcceptanceRates((self.acceptance,)).expected_tokens(self.nodes)


def read_rows(path: Path) -> list[Row]:
    """The rows of a CSV file with the columns of `Row`. ValueError names the line, the column and what is allowed."""
    columns = [field.name for field in dataclasses.fields(Row)]
    rows = []
    with open(path, newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if missing := set(columns) - set(reader.fieldnames or ()):
            raise ValueError(f"{path}: columns {sorted(missing)} are missing; needed: {', '.join(columns)}")
        for entry in reader:
            values = {name: (entry[name] or "").strip() for name in columns}
            where = f"{path}, line {reader.line_num}"
            for name in (*COUNTS, *NUMBERS):
                kind, least = (int, name not in ("nodes", "levels")) if name in COUNTS else (float, 0.0)
                try:
                    number = kind(values[name])
                    if not least <= number < float("inf"):
                        raise ValueError
                except ValueError:
                    allowed = f"an integer of at least {int(least)}" if kind is int else "a number, 0 or more"
                    raise ValueError(f"{where}: {name}={values[name]!r} must be {allowed}") from None
                values[name] = number
            for name, allowed in (("reading", (TAU, ALPHA)), ("unit", (SPEEDUP, MILLISECONDS)), ("dtype", DTYPE_BYTES)):
                if values[name] not in allowed:
                    raise ValueError(f"{where}: {name}={values[name]!r} must be one of {', '.join(allowed)}")
            if values["published"] == 0:
                raise ValueError(f"{where}: published={values['published']} must be above 0")
            rows.append(Row(**values))
    if not rows:
        raise ValueError(f"{path}: there is no row below the header")
    return rows


class Planner:
    """Projects rows with `spec_jax.planner`; `architectures` are contents of `config.json` by name."""

    def __init__(self, architectures: Mapping[str, Mapping[str, Any]]):
        self.architectures = architectures

    def costs(self, name: str, dtype: str) -> ModelCosts:
        if name not in self.architectures:
            raise ValueError(f"model={name!r} is not known; allowed: {', '.join(self.architectures)}")
        return costs_from_config({**self.architectures[name], "torch_dtype": dtype}, where=name)

    def drafter(self, row: Row, target: ModelCosts) -> draft_costs.DraftCosts:
        kind, _, value = row.drafter.partition(":")
        if row.drafter in self.architectures:
            return draft_costs.draft_model(self.costs(row.drafter, row.dtype))
        if kind == "mtp" and value.isdigit():
            found = draft_costs.mtp(target)
            head = int(value) * target.hidden_size
            return dataclasses.replace(found, costs=dataclasses.replace(found.costs, head_parameters=head))
        if row.drafter == "heads":  # they run in the target's own pass, on all of its rows, and share its output layer
            per_layer = target.layer_parameters // target.num_layers
            layers = dataclasses.replace(
                target, num_layers=row.nodes, layer_parameters=row.nodes * per_layer, head_parameters=0
            )
            return draft_costs.DraftCosts("heads", layers, draft_costs.BLOCK)
        return draft_costs.find_drafter(row.drafter, target)

    def project(self, row: Row, stack: Stack) -> planner.Step:
        """The step of a row as `stack` would run it."""
        target, device = self.costs(row.model, row.dtype), find_device(row.device)
        tensor = 1 if row.stack == "eager" else row.chips
        load = Load(row.batch, row.context, tensor, stack=stack)
        drafter = self.drafter(row, target)
        return planner.speculative_step(device, target, drafter, load, row.tokens, row.nodes, row.levels, row.branch)


def compare(rows: Sequence[Row], architectures: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Every row with what is projected for it, without and with the overheads of its stack."""
    found, plans = [], Planner(architectures)
    for row in rows:
        entry = dataclasses.asdict(row)
        for name, stack in (("roofline", IDEAL), ("projected", find_stack(row.stack))):
            step = plans.project(row, stack)
            entry[name] = step.speedup if row.unit == SPEEDUP else 1e3 * step.plain_seconds
            entry["error" if name == "projected" else "roofline_error"] = entry[name] / row.published - 1
        found.append(entry)
    return found


def summary(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Median absolute errors of the speed-ups: per paper, over all rows, and with each paper once."""
    papers = {}
    for entry in entries:
        if entry["unit"] == SPEEDUP:
            papers.setdefault(entry["paper"], []).append(entry)

    def medians(error: str) -> dict[str, Any]:
        of_paper = {paper: statistics.median(abs(entry[error]) for entry in found) for paper, found in papers.items()}
        everything = [abs(entry[error]) for found in papers.values() for entry in found]
        return {
            "all_rows": statistics.median(everything) if everything else None,
            "each_paper_once": statistics.median(of_paper.values()) if of_paper else None,
            "papers": of_paper,
        }

    outliers = [entry for found in papers.values() for entry in found if abs(entry["error"]) > OUTLIER]
    return {
        "rows": {paper: len(found) for paper, found in papers.items()},
        "with_overheads": medians("error"),
        "roofline": medians("roofline_error"),
        "outliers": outliers,
    }


def tables(entries: Sequence[Mapping[str, Any]], found: Mapping[str, Any]) -> list[Any]:
    from rich.table import Table

    result = []
    for paper in dict.fromkeys(entry["paper"] for entry in entries):
        table = Table(title=paper, title_justify="left")
        for heading in ("source", "model, device", "batch", "method", "nodes", "data", "tau"):
            table.add_column(heading)
        for heading in ("published", "roofline", "with overheads", "error %"):
            table.add_column(heading, justify="right")
        for entry in (entry for entry in entries if entry["paper"] == paper):
            tokens = f"{Row(**{f.name: entry[f.name] for f in dataclasses.fields(Row)}).tokens:.2f}"
            chips = f" x{entry['chips']}" if entry["chips"] > 1 else ""
            where = f"{entry['model']}, {entry['device']}{chips}"
            unit = " ms" if entry["unit"] == MILLISECONDS else ""
            cells = [f"{entry[name]:.2f}{unit}" for name in ("published", "roofline", "projected")]
            line = [entry["source"], where, str(entry["batch"]), entry["method"], str(entry["nodes"]), entry["dataset"]]
            table.add_row(*line, tokens, *cells, f"{100 * entry['error']:+.0f}")
        result.append(table)
    last = Table(title="Median absolute error of speed-ups, %", title_justify="left")
    for heading in ("paper", "rows", "roofline", "with overheads"):
        last.add_column(heading, justify="left" if heading == "paper" else "right")
    bare, full = found["roofline"], found["with_overheads"]
    for paper, count in found["rows"].items():
        last.add_row(paper, str(count), f"{100 * bare['papers'][paper]:.0f}", f"{100 * full['papers'][paper]:.0f}")
    if found["rows"]:
        last.add_section()
        for name, label in (("all_rows", "all rows"), ("each_paper_once", "each paper once")):
            count = sum(found["rows"].values()) if name == "all_rows" else len(found["rows"])
            last.add_row(label, str(count), f"{100 * bare[name]:.1f}", f"{100 * full[name]:.1f}")
    outliers = Table(title=f"Further off than {100 * OUTLIER:.0f} %", title_justify="left")
    for heading in ("paper", "row", "published", "with overheads", "why"):
        outliers.add_column(heading)
    for entry in found["outliers"]:
        row = f"{entry['method']}, {entry['model']}, {entry['device']}, batch {entry['batch']}, {entry['dataset']}"
        outliers.add_row(
            entry["paper"], row, f"{entry['published']:.2f}", f"{entry['projected']:.2f}", entry["note"] or "not known"
        )
    return [*result, outliers, last]


def plot(file: str, entries: Sequence[Mapping[str, Any]]) -> None:
    """Draws projected over published speed-ups, a colour per paper."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install -e '.[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(8, 7))
    colours = pyplot.get_cmap("tab20").colors
    speedups = [entry for entry in entries if entry["unit"] == SPEEDUP]
    for index, paper in enumerate(dict.fromkeys(entry["paper"] for entry in speedups)):
        points = [(e["published"], e["projected"]) for e in speedups if e["paper"] == paper]
        axis.scatter(*zip(*points, strict=True), s=16, color=colours[index % len(colours)], label=paper)
    most = max((max(e["published"], e["projected"]) for e in speedups), default=1.0)
    axis.plot([0, most], [0, most], color="black", linewidth=1)
    for factor in (0.8, 1.2):
        axis.plot([0, most], [0, factor * most], color="grey", linestyle=":", linewidth=1)
    axis.set(xlabel="published speed-up", ylabel="projected speed-up", title="dotted: 20 % off")
    axis.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(file)
    pyplot.close(figure)


def run(arguments: argparse.Namespace) -> None:
    rows = read_rows(Path(arguments.data))
    papers = list(dict.fromkeys(row.paper for row in rows))
    for name in arguments.paper or ():
        if name not in papers:
            raise ValueError(f"paper={name!r} is not known{nearest(name, papers)}; allowed: {', '.join(papers)}")
    if arguments.paper:
        rows = [row for row in rows if row.paper in arguments.paper]
    architectures = json.loads((DATA / "architectures.json").read_text(encoding="utf-8"))
    entries = compare(rows, architectures)
    found = summary(entries)
    if arguments.csv:
        write_csv(arguments.csv, entries)
    if arguments.plot:
        plot(arguments.plot, entries)
    if arguments.json:
        print_json({"rows": entries, "summary": found})
    else:
        console(stderr=False).print(*tables(entries, found))
    for file in filter(None, (arguments.csv, arguments.plot)):
        print(f"wrote {file}", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--paper", nargs="+", metavar="NAME", help="only these, as the tables name them")
    parser.add_argument("--data", metavar="FILE.csv", default=str(DATA / "published_speedups.csv"))
    parser.add_argument("--csv", metavar="OUT", help="write every row with what is projected for it")
    parser.add_argument("--plot", metavar="FILE", help="draw projected over published speed-ups (extra: plot)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args(argv)
    try:
        run(arguments)
    except (ValueError, OSError) as error:
        parser.exit(2, f"error: {' '.join(str(error).split())}\n")


if __name__ == "__main__":
    main()
