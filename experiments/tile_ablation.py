"""Is draft length K free while (K+1) x G fits the attention tile, and does verification jump where it does not?

Command:   python experiments/tile_ablation.py [--csv FILE] [--plot FILE] [--quick]
Hardware:  any; ten minutes on 2 CPU cores. Static cycles need the compiler for TPUs (extra `tpu`), no TPU; they are
           left out without it.
Expected:  results/tile_ablation.csv (libtpu 0.0.52, jax 0.12.0.1; AMD EPYC, 2 cores, a busy machine; 2026-11-30).
           Static, one KV head per step, G = 4 and 8 (with G = 1 more beyond 128 rows: more tokens, more ancestor bits):
             device   32 rows   64 rows   128 rows   256 rows   step at 128, at 256
             v5e        1.02      1.06      1.20       1.52        1.98, 1.95   of K = 0, and over the last inside
             v5p        1.03      1.12      1.44       1.98        1.96, 1.89
             v6e        1.01      1.05      1.18       1.52        2.00, 1.93
             7x         1.01      1.06      1.19       1.56        2.01, 2.01
           With the heads per step that decoding takes, a full tile takes more (static_cycles.py, 128 rows over 8: v5e
           1.20, v5p 1.84, v6e 1.38, 7x 1.31). So the step is there, and K is free up to 32 rows, but not to the end
           of the tile, where the planner projects 1.0 up to 128 rows. One tile of 256 is cheaper than two of 128.
           Timed: the reference steps by 2.0 to 2.2 at its tile of 32 rows and is flat inside (1.00 to 1.05, within the
           noise); the CPU's own kernel has no step, and its cost grows with the rows.

G query heads share a KV head, so that K + 1 tokens in flight are (K+1) x G rows of the attention kernel, in tiles.
Every row of the CSV says of what `kind` it is:
  simulated  the planner's roofline (`spec_jax.roofline`): published peaks, one tile after another
  static     cycles of the TPU kernel by its compiler's schedule, see static_cycles.py. An estimate, for ranking; where
             the clock is known, also the longer of cycles / clock and K/V bytes / bandwidth, in seconds
  timed      on the device at hand: the kernel on a TPU or GPU; on a CPU both ways in which decoding attends there, its
             own kernel ("cpu") and the XLA reference. Medians, all points taking turns
and how tiles are filled (`fill`):
  cut        the last tile has the rows that it needs, rounded up to registers (the kernels, by default)
  whole      every tile has all its rows (`tile_rows`, where the bits must not depend on K; the reference on a CPU)
  rows       there are no tiles: each row is computed for itself (the CPU's own kernel; its boundary is only a mark)

The context counts the rows in flight, so that every K reads as many KV blocks. Verdict, per device, tile and G:
  inside   cost at the last K inside the tile over K = 0. Free: at most 1 + threshold; the table has the most rows of
           the sweep up to which that holds
  step     cost at the first K beyond over the last inside. A jump: more than the rows grow by, by more than the
           threshold and than the noise (the quartiles' distance of repeats)
  second   the same at two tiles
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import static_cycles
import timed_attention

from spec_jax import environment
from spec_jax.cache import BLOCK, round_up
from spec_jax.checks import check_counts, nearest
from spec_jax.cli_output import console, print_json, write_csv
from spec_jax.devices import HERE, TPU_TILES, find_device
from spec_jax.kernels.packing import Packing
from spec_jax.model_costs import ModelCosts
from spec_jax.roofline import Load, step_time

Cache = timed_attention.Cache
SIMULATED, STATIC, TIMED = KINDS = ("simulated", "static", "timed")
CUT, WHOLE, ROWS = "cut", "whole", "rows"
PLANNER, TPU, GPU, CPU, REFERENCE = "planner", *timed_attention.IMPLEMENTATIONS
TILES = {TPU: (128, 256), GPU: (64, 128), CPU: (32,), REFERENCE: (32,)}
REGISTER = {TPU: 16, GPU: 64}
"""Rows to which a kernel rounds a tile that is cut, in bfloat16."""
ITEMSIZE = {"bfloat16": 2.0, "float32": 4.0}
UNITS = ("cycles", "seconds")


@dataclasses.dataclass(frozen=True)
class Point:
    """One draft length: `width` = K + 1 tokens of `group` query heads each, in tiles of `tile` rows."""

    implementation: str
    fill: str
    tile: int
    group: int
    width: int

    @property
    def tile_rows(self) -> int:
        """Rows of one tile as it is computed."""
        if self.fill == ROWS:
            return self.group
        if self.fill == WHOLE:
            return self.tile
        return round_up(min(self.width * self.group, self.tile), REGISTER.get(self.implementation, 1))

    @property
    def tiles(self) -> int:
        return Packing(self.width, 1, self.group, self.tile_rows).tiles

    def columns(self) -> dict[str, Any]:
        found = {"implementation": self.implementation, "fill": self.fill, "tile": self.tile, "group": self.group}
        found |= {"k": self.width - 1, "rows": self.width * self.group}
        return found | {"tiles": self.tiles, "computed_rows": self.tiles * self.tile_rows}


def widths(tile: int, group: int, quick: bool = False) -> list[int]:
    """K + 1 of a sweep: 1, up to the boundary, one beyond it, and the same at two tiles."""
    tokens = tile // group
    inside = {1, tokens} if quick else {max(tokens // part, 1) for part in (tokens, 8, 4, 2, 1)}
    beyond = {tokens + 1} if quick else {tokens + 1, tokens + tokens // 2, 2 * tokens, 2 * tokens + 1}
    return sorted(inside | beyond)


def sweep(implementation: str, fill: str, tiles: Sequence[int], groups: Sequence[int], quick: bool) -> list[Point]:
    return [Point(implementation, fill, t, g, w) for t in tiles for g in groups for w in widths(t, g, quick)]


def simulated(name: str, points: Sequence[Point], cache: Cache, dtype: str) -> list[dict[str, Any]]:
    """The planner's seconds, on a device whose tiles are those of the points."""
    found, chip = [], find_device(name)
    for point in points:
        tiles = {CUT: (*(t for t in TPU_TILES if t < point.tile), point.tile), WHOLE: (point.tile,), ROWS: chip.tiles}
        device = dataclasses.replace(chip, tiles=tiles[point.fill])
        values = {"kv_values": 2 * cache.kv_heads * cache.head_dim, "kv_bytes": ITEMSIZE[dtype]}
        sizes = {"score_size": cache.head_dim, "value_size": cache.head_dim} | values
        costs = ModelCosts(1, 1, 1, point.group, cache.kv_heads, 0, 0, **sizes)
        load = Load(batch=cache.batch, context=cache.context - point.width)
        took = step_time(device, costs, load, point.width)
        columns = point.columns() | {"implementation": PLANNER, "tiles": took.tiles, "computed_rows": took.tile_rows}
        found.append({"kind": SIMULATED, "device": chip.title, **columns, "seconds": took.attention, "dtype": dtype})
    return found


def static(name: str, points: Sequence[Point], cache: Cache, block: int, tell) -> list[dict[str, Any]]:
    """Cycles of the TPU kernel on one generation, bfloat16; what it makes no profile of is left out."""

    def shape(point: Point) -> static_cycles.Shape:
        heads = {"kv_heads": cache.kv_heads, "head_dim": cache.head_dim, "batch": cache.batch}
        lengths = {"committed": cache.context - point.width, "capacity": cache.capacity}
        return static_cycles.Shape(point.width, point.group, point.tile_rows, block, **lengths, **heads)

    shapes = list(dict.fromkeys(map(shape, points)))
    cycles = dict(zip(shapes, static_cycles.static_cycles(name, shapes, tell), strict=True))
    device, found = find_device(name), []
    for point in points:
        count = cycles[shape(point)]
        if count is not None:
            seconds = static_cycles.bound_seconds(name, shape(point), count, point.tiles)
            row = {"kind": STATIC, "device": device.title, **point.columns(), "cycles": count, "seconds": seconds}
            found.append(row | {"block": block, "dtype": "bfloat16"})
    return found


def timed(points: Sequence[Point], cache: Cache, dtype: str, repeats: int, inner: int, tell) -> list[dict[str, Any]]:
    """Medians on the device at hand."""

    def case(point: Point) -> timed_attention.Case:
        tokens = min(point.width, point.tile // point.group)
        tile_rows = point.tile if point.fill == WHOLE else tokens * point.group
        return timed_attention.Case(point.implementation, point.width, point.group, tile_rows)

    taken = timed_attention.seconds([case(point) for point in points], cache, dtype, repeats, inner, tell)
    found = []
    for point, seconds in zip(points, taken, strict=True):
        low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
        row = {"kind": TIMED, "device": environment.describe_device(), **point.columns(), "seconds": median}
        found.append(row | {"spread": (high - low) / median, "dtype": dtype})
    return found


def here() -> list[tuple[str, str]]:
    """The implementations of the device at hand, each with a fill."""
    names = timed_attention.implementations()
    fills = {CPU: (ROWS,), REFERENCE: (WHOLE,)}
    return [(name, fill) for name in names for fill in fills.get(name, (CUT, WHOLE))]


KEY = ("kind", "device", "implementation", "fill", "tile", "group")


def across(cost: dict[int, float], boundary: int) -> tuple[float, float] | None:
    """From the most rows up to a boundary to the fewest beyond: what cost grows by, and what rows do."""
    below, above = [r for r in cost if r <= boundary], [r for r in cost if r > boundary]
    if not below or not above:
        return None
    return cost[min(above)] / cost[max(below)], min(above) / max(below)


def verdicts(rows: Sequence[dict[str, Any]], threshold: float) -> list[dict[str, Any]]:
    """For every device, tile, group and unit: what is free, and where it jumps; see the module's docstring."""
    cases: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        cases.setdefault(tuple(row[name] for name in KEY), []).append(row)
    found = []
    for key, case in cases.items():
        tile = key[KEY.index("tile")]
        for unit in UNITS:
            cost = {row["rows"]: row[unit] for row in case if row.get(unit)}
            spread = max(row.get("spread") or 0.0 for row in case)

            first, second = (across(cost, boundary) for boundary in (tile, 2 * tile))
            if first is None:
                continue
            inside = cost[max(r for r in cost if r <= tile)] / cost[min(cost)]
            entry = dict(zip(KEY, key, strict=True)) | {"unit": unit, "inside": inside, "step": first[0]}
            entry |= {"second": second and second[0], "noise": spread, "free": inside <= 1 + threshold}
            dear = [r for r in sorted(cost) if cost[r] > cost[min(cost)] * (1 + threshold)]
            entry["free_rows"] = max(r for r in cost if not dear or r < dear[0])
            entry["jumps"] = first[0] > first[1] * (1 + max(threshold, spread))
            found.append(entry)
    return found


def summary(found: Sequence[dict[str, Any]]) -> list[str]:
    """A sentence per kind, device, implementation, fill and unit, from the figures alone."""
    lines = []
    names = ("kind", "device", "implementation", "fill", "unit")
    for key in dict.fromkeys(tuple(entry[name] for name in names) for entry in found):
        same = [entry for entry in found if tuple(entry[name] for name in names) == key]

        def of(name, same=same):
            values = [entry[name] for entry in same if entry[name] is not None]
            return f"{min(values):.2f} to {max(values):.2f}" if values else "not measured"

        count, kind, (device, *how) = len(same), key[0], key[1:]
        free, jumps = sum(entry["free"] for entry in same), sum(entry["jumps"] for entry in same)
        rows = [entry["free_rows"] for entry in same]
        lines.append(
            f"{kind}, {device} ({', '.join(how)}): K is free inside the tile in {free} of {count} cases "
            f"({of('inside')}), up to {min(rows)} to {max(rows)} rows; a step at the boundary in {jumps} of {count} "
            f"({of('step')}), at two tiles {of('second')}"
        )
    return lines


def tables(found: Sequence[dict[str, Any]]) -> Any:
    from rich.table import Table

    table = Table(title="Verdict", title_justify="left")
    for heading in "kind|device|kernel|fill|tile|G|unit|inside|free|free rows|step|second|jumps".split("|"):
        table.add_column(heading)
    for entry in found:
        cells = [str(entry[name]) for name in (*KEY, "unit")]
        inside, first = (f"{entry[name]:.2f}" for name in ("inside", "step"))
        second = "" if entry["second"] is None else f"{entry['second']:.2f}"
        words = ["yes" if entry[name] else "no" for name in ("free", "jumps")]
        table.add_row(*cells, inside, words[0], str(entry["free_rows"]), first, second, words[1])
    return table


def plot(file: str, rows: Sequence[dict[str, Any]]) -> None:
    """Cost relative to K = 0 over tiles' worth of rows, a panel per kind, device and implementation."""
    from matplotlib.figure import Figure

    def case(row, names):
        return tuple(row[name] for name in names)

    names = ("kind", "device", "implementation", "fill")
    panels = list(dict.fromkeys(case(row, names) for row in rows))
    columns = min(3, len(panels))
    figure = Figure(figsize=(5 * columns, 3.5 * -(-len(panels) // columns)), layout="constrained")
    for number, panel in enumerate(panels):
        axis = figure.add_subplot(-(-len(panels) // columns), columns, number + 1)
        inside = [row for row in rows if case(row, names) == panel]
        for tile, group in dict.fromkeys((row["tile"], row["group"]) for row in inside):
            line = [row for row in inside if (row["tile"], row["group"]) == (tile, group)]
            unit = "cycles" if line[0].get("cycles") else "seconds"
            x, y = [row["rows"] / tile for row in line], [row[unit] / line[0][unit] for row in line]
            axis.plot(x, y, "o-", markersize=3, label=f"tile {tile}, G={group}")
        for boundary in (1, 2):
            axis.axvline(boundary, color="grey", linewidth=0.8, linestyle=":")
        axis.set_title(", ".join(panel), fontsize="small")
        axis.set(xlabel="(K+1) x G / tile", ylabel="cost over K = 0", ylim=(0, None))
        axis.legend(fontsize="x-small")
    figure.savefig(file)


COLUMNS = (*KEY, "k", "rows", "tiles", "computed_rows", "relative", *UNITS, "spread", "block")
SHARED = ("batch", "kv_heads", "head_dim", "context", "dtype", "versions")


def rounded(row: dict[str, Any]) -> dict[str, Any]:
    """A row for the CSV: six digits, and no cell for what it has not."""
    short = {name: f"{value:.6g}" for name, value in row.items() if isinstance(value, float)}
    return {name: value for name, value in row.items() if value is not None} | short


def check(arguments: argparse.Namespace) -> None:
    for kind in arguments.kinds:
        if kind not in KINDS:
            raise ValueError(f"kind={kind!r} is not known{nearest(kind, KINDS)}; allowed: {', '.join(KINDS)}")
    static_cycles.check_generations(arguments.generations)
    counts = {name: getattr(arguments, name) for name in ("batch", "kv_heads", "head_dim", "context", "inner")}
    check_counts(**{name: count for name, count in counts.items() if count is not None})
    tiles = arguments.tiles or sorted({*TILES[TPU], *TILES[GPU], *TILES[CPU]})
    for tile in tiles:
        if tile < 16 or tile % 16 or tile > max(TILES[TPU]):
            raise ValueError(f"tile={tile} must be a multiple of 16, at most {max(TILES[TPU])}")
    smallest = min(arguments.tiles or TILES[CPU])
    for group in arguments.groups:
        if not 1 <= group <= smallest:
            raise ValueError(f"group={group} must be from 1 to {smallest}, the rows of the smallest tile")
    if arguments.block < BLOCK or arguments.block % BLOCK:
        raise ValueError(f"block={arguments.block} must be a multiple of {BLOCK}")
    longest = 2 * max(tiles) // min(arguments.groups) + 1
    if arguments.context < longest:
        raise ValueError(f"context={arguments.context} must hold the {longest} tokens of the longest flight")
    if arguments.repeats < 2:
        raise ValueError(f"repeats={arguments.repeats} must be at least 2")
    if not 0 < arguments.threshold < 1:
        raise ValueError(f"threshold={arguments.threshold} must be between 0 and 1")
    if arguments.plot and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install -e '.[plot]'")


def measure(arguments: argparse.Namespace, tell) -> list[dict[str, Any]]:
    """The rows of every kind that was asked for."""
    sizes = {name: getattr(arguments, name) for name in ("batch", "kv_heads", "head_dim", "context")}
    cache, rows = Cache(**sizes), []
    versions = environment.versions()

    def points(implementation, fill):
        tiles = arguments.tiles or TILES[implementation]
        return sweep(implementation, fill, tiles, arguments.groups, arguments.quick)

    def add(found, **more):
        text = " ".join(f"{name} {version}" for name, version in (versions | more).items())
        shared = {name: getattr(cache, name) for name in ("batch", "kv_heads", "head_dim", "context")}
        rows.extend(row | shared | {"versions": text} for row in found)

    for name in arguments.generations:
        if SIMULATED in arguments.kinds:
            add(simulated(name, points(TPU, CUT), cache, "bfloat16"))
        if STATIC in arguments.kinds:
            try:
                add(
                    static(name, points(TPU, CUT), cache, arguments.block, tell),
                    libtpu=static_cycles.compiler_version(),
                )
            except ValueError as error:
                tell(f"{name} left out: {error}")
    if TIMED in arguments.kinds:
        import jax

        cpu = jax.default_backend() == "cpu"
        dtype, inner = ("float32", 1) if cpu else ("bfloat16", 64)  # a launch must not be what is timed
        chosen = [point for how in here() for point in points(*how)]
        if SIMULATED in arguments.kinds:
            add(simulated(HERE, chosen, cache, dtype))
        add(timed(chosen, cache, dtype, arguments.repeats, arguments.inner or inner, tell))
    if not rows:
        raise ValueError("nothing was measured; see the reasons above")
    first: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        base = first.setdefault(tuple(row[name] for name in KEY), row)
        unit = "cycles" if row.get("cycles") else "seconds"
        row["relative"] = row[unit] / base[unit]
    return rows


def run(arguments: argparse.Namespace) -> None:
    check(arguments)
    rows = measure(arguments, lambda line: print(line, file=sys.stderr, flush=True))
    found = verdicts(rows, arguments.threshold)
    if arguments.csv:
        write_csv(arguments.csv, [rounded(row) for row in rows], (*COLUMNS, *SHARED))
    if arguments.plot:
        plot(arguments.plot, rows)
    if arguments.json:
        print_json({"rows": rows, "verdicts": found, "summary": summary(found)})
        return
    console(stderr=False).print(tables(found))
    print(*summary(found), sep="\n")


def names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    generations = ",".join(static_cycles.TOPOLOGIES)
    parser.add_argument("--kinds", type=names, default=",".join(KINDS), metavar="KIND,...")
    parser.add_argument("--generations", type=names, default=generations, metavar="NAME,...", help="of TPUs")
    parser.add_argument(
        "--groups", type=static_cycles.integers, default="1,4,8", metavar="G,...", help="query heads per KV head"
    )
    parser.add_argument(
        "--tiles", type=static_cycles.integers, metavar="ROWS,...", help="default: those of each implementation"
    )
    parser.add_argument("--block", type=int, default=1024, help="slots of a KV block of the TPU kernel (static)")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--context", type=int, default=4000, help="slots of every sequence, those in flight included")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--inner", type=int, help="attentions of one timing (default: 1 on a CPU, else 64)")
    parser.add_argument("--threshold", type=float, default=0.05, help="what counts as a rise")
    parser.add_argument("--quick", action="store_true", help="three K per tile")
    parser.add_argument("--csv", metavar="FILE", help="write every row")
    parser.add_argument("--plot", metavar="FILE", help="draw cost over rows (extra: plot)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args(argv)
    try:
        run(arguments)
    except (ValueError, OSError) as error:
        parser.exit(2, f"error: {' '.join(str(error).split())}\n")


if __name__ == "__main__":
    main()
