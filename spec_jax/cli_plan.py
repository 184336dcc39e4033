"""`spec-jax plan`: the draft length for a model, a chip and a load. Loads no backend unless the chip is `here`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from spec_jax import draft_costs, planner
from spec_jax.cli_output import console, print_json
from spec_jax.devices import ALIASES, DEVICES, HERE, Device, find_device
from spec_jax.model_costs import ModelCosts, read_costs
from spec_jax.roofline import Load
from spec_jax.stacks import IDEAL, STACKS, find_stack

EXAMPLE = "spec-jax plan --config path/to/config.json --device h200,v6e --batch 1,8,64 --drafter eagle3 --alpha 0.8"
ALPHA = 0.7
_DEFAULTS = {"batch": "1", "context": 1024, "tensor": 1, "overhead_us": 0.0}
_DEFAULTS |= {"stack": IDEAL.name, "drafter": draft_costs.LOOKUP}
_DEFAULTS |= dict.fromkeys(("alpha", "acceptance", "longest", "weight_bytes", "kv_bytes", "plot"))
"""Of the options that the tile alone has no use for."""


def add_options(parser: Any) -> None:
    parser.add_argument("--config", metavar="PATH", help="the target's config.json, or the folder that holds it")
    names = ", ".join((*DEVICES, HERE))
    parser.add_argument("--device", metavar="NAME,NAME", help=f"chips: {names} (measured); default: h100")
    tile = parser.add_argument_group("the tile alone")
    tile.add_argument("--groups", type=int, metavar="G", help="query heads per key/value head, instead of --config")
    tile.add_argument("--tile", type=int, metavar="ROWS", help="query rows of one attention tile, instead of --device")
    load = parser.add_argument_group("load")
    load.add_argument("--batch", metavar="B,B", help="sequences at once (default: %(default)s)")
    load.add_argument("--context", type=int, metavar="TOKENS", help="of each (default: %(default)s)")
    load.add_argument("--tensor", type=int, metavar="CHIPS", help="that share a layer (default: %(default)s)")
    load.add_argument("--overhead-us", type=float, metavar="T", help="per forward pass, microseconds")
    names = ", ".join(STACKS)
    load.add_argument("--stack", metavar="NAME", help=f"the software, by what it adds: {names} (default: %(default)s)")
    drafting = parser.add_argument_group("drafting")
    names = ", ".join(draft_costs.NAMES)
    drafting.add_argument("--drafter", metavar="NAME", help=f"{names}, or a draft model's config.json")
    drafting.add_argument(
        "--alpha", type=float, metavar="P", help=f"acceptance of every draft token (default: {ALPHA})"
    )
    drafting.add_argument(
        "--acceptance", metavar="P,P,P", help="by position, each given that all before it were accepted"
    )
    drafting.add_argument(
        "--longest", type=int, metavar="K", help="draft tokens looked at (default: two tiles of them)"
    )
    sizes = parser.add_argument_group("storage")
    sizes.add_argument("--weight-bytes", type=float, metavar="X", help="per parameter (default: of the config's dtype)")
    sizes.add_argument("--kv-bytes", type=float, metavar="X", help="per number of the cache (default: the same)")
    parser.add_argument("--plot", metavar="FILE", help="draw speed-ups over draft lengths (extra `plot`)")
    parser.set_defaults(**_DEFAULTS)


def run(arguments: argparse.Namespace) -> int:
    if arguments.config is None:
        return _tile_only(arguments)
    for name in ("groups", "tile"):
        if getattr(arguments, name) is not None:
            raise ValueError(f"--{name} is read from --config and --device; leave it out, or leave out --config")
    report, plans = _plan(arguments)
    if arguments.plot is not None:
        _plot(report, plans, Path(arguments.plot))
    if arguments.json:
        print_json(report)
        return 0
    out = console(stderr=False)
    for table in _tables(report, plans):
        out.print(table)
    return 0


def _tile_only(arguments: argparse.Namespace) -> int:
    for name, default in _DEFAULTS.items():
        if getattr(arguments, name) != default:
            raise ValueError(
                f"--{name.replace('_', '-')} says nothing about the tile alone; leave it out, or give --config"
            )
    if arguments.groups is None:
        raise ValueError("nothing to plan: give --config, or --groups with --tile or --device")
    if arguments.tile is None and arguments.device is None:
        raise ValueError("--groups needs --tile, or --device for the tiles of a chip")
    tiles = {}
    if arguments.tile is not None:
        tiles["tile"] = arguments.tile
    for device in _devices(arguments.device) if arguments.device is not None else ():
        tiles[device.title] = device.tile
    found = []
    for title, tile in tiles.items():
        most = planner.max_draft_tokens(arguments.groups, tile)
        rows = (most + 1) * arguments.groups
        found.append(
            {"device": title, "groups": arguments.groups, "tile": tile, "max_draft_tokens": most, "rows": rows}
        )
    if arguments.json:
        print_json(found[0] if len(found) == 1 else {"tiles": found})
    else:
        for entry in found:
            print(
                f"{entry['device']}: up to {entry['max_draft_tokens']} draft tokens; with the last committed token they"
                f" take {entry['rows']} of {entry['tile']} rows"
            )
    return 0


def _numbers(text: str, kind: type, option: str) -> list[Any]:
    try:
        return [kind(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ValueError(f"{option} {text!r} must be numbers with commas between them") from None


def _devices(names: str) -> list[Device]:
    found = [find_device(name.strip()) for name in names.split(",") if name.strip()]
    if not found:
        raise ValueError(f"--device {names!r} names no device; allowed: {', '.join((*DEVICES, *ALIASES, HERE))}")
    return found


def _drafter(name: str, target: ModelCosts, arguments: argparse.Namespace) -> draft_costs.DraftCosts:
    if not name.strip():
        raise ValueError(f"--drafter {name!r} must be one of {', '.join(draft_costs.NAMES)}, or a config.json")
    path = Path(name)
    if path.suffix == ".json" or path.is_dir():
        return draft_costs.draft_model(read_costs(path, arguments.weight_bytes, arguments.kv_bytes))
    return draft_costs.find_drafter(name, target)


def _plan(arguments: argparse.Namespace) -> tuple[dict[str, Any], list[tuple[Device, planner.Plan]]]:
    if arguments.alpha is not None and arguments.acceptance is not None:
        raise ValueError("--alpha is one rate for all positions, --acceptance one per position; give one of them")
    rates = [ALPHA if arguments.alpha is None else arguments.alpha]
    if arguments.acceptance is not None:
        rates = _numbers(arguments.acceptance, float, "--acceptance")
    acceptance = planner.AcceptanceRates(tuple(rates))
    for option in ("weight_bytes", "kv_bytes"):
        value = getattr(arguments, option)
        if value is not None and not 0 < value <= 16:
            raise ValueError(f"--{option.replace('_', '-')} {value} must be bytes, above 0 and at most 16")
    if not arguments.config:
        raise ValueError("--config '' must be a config.json, or the folder that holds it")
    if not 0 <= arguments.overhead_us < float("inf"):
        raise ValueError(f"--overhead-us {arguments.overhead_us} must be microseconds, 0 or more")
    costs = read_costs(arguments.config, arguments.weight_bytes, arguments.kv_bytes)
    drafter = _drafter(arguments.drafter, costs, arguments)
    batches = _numbers(arguments.batch, int, "--batch")
    if not batches:
        raise ValueError(f"--batch {arguments.batch!r} names no batch")
    stack = find_stack(arguments.stack)
    plans, entries = [], []
    for device in _devices("h100" if arguments.device is None else arguments.device):
        for batch in batches:
            load = Load(batch, arguments.context, arguments.tensor, 1e-6 * arguments.overhead_us, stack)
            found = planner.plan(device, costs, acceptance, drafter, load, arguments.longest)
            memory = planner.memory_bytes(costs, drafter, load, found.best.num_draft_tokens)
            plans.append((device, found))
            entries.append(
                {
                    "device": device.name,
                    "batch": batch,
                    "max_draft_tokens": found.max_draft_tokens,
                    "num_draft_tokens": found.best.num_draft_tokens,
                    "plain_seconds": found.plain_seconds,
                    "best": found.best.to_dict(),
                    "best_anywhere": found.best_anywhere.to_dict(),
                    "lengths": [length.to_dict() for length in found.lengths],
                    "memory_bytes": memory,
                    "fits": sum(memory.values()) <= device.memory,
                }
            )
    report = {
        "config": arguments.config,
        "parameters": costs.parameters,
        "active_parameters": costs.active_parameters,
        "groups": costs.query_group,
        "context": arguments.context,
        "tensor": arguments.tensor,
        "stack": stack.name,
        "drafter": drafter.name,
        "acceptance": rates,
        "kind": "projected: roofline of published peaks, nothing was run"
        if HERE not in [device.name for device, _ in plans]
        else "projected: roofline of peaks measured here",
        "plans": entries,
    }
    return report, plans


def _tables(report: dict[str, Any], plans: list[tuple[Device, planner.Plan]]) -> list[Any]:
    from rich.markup import escape
    from rich.table import Table

    size, active = report["parameters"] / 1e9, report["active_parameters"] / 1e9
    rates = ", ".join(f"{rate:g}" for rate in report["acceptance"])
    title = (
        f"{report['config']}: {size:.2f} G parameters ({active:.2f} G per token), query group {report['groups']}; "
        f"context {report['context']}, {report['tensor']} chip(s), stack {report['stack']}, "
        f"drafter {report['drafter']}, acceptance {rates}"
    )
    best = Table(title=escape(title), caption=escape(f"{report['kind']}. {_BEST}"), caption_justify="left")
    tile = Table(title="The tile and the memory at the best K", caption=_TILE, caption_justify="left")
    for heading in _BEST_COLUMNS:
        best.add_column(heading, justify="left" if heading == "device" else "right")
    for heading in _TILE_COLUMNS:
        tile.add_column(heading, justify="left" if heading in ("device", "bound by") else "right")
    for (device, found), entry in zip(plans, report["plans"], strict=True):
        length, beyond, memory = found.best, found.best_anywhere, entry["memory_bytes"]
        gains = beyond.num_draft_tokens > length.num_draft_tokens
        best.add_row(
            device.title,
            str(found.load.batch),
            str(found.max_draft_tokens),
            str(length.num_draft_tokens),
            f"{length.expected_tokens:.2f}",
            f"{1e3 * found.plain_seconds:.3f}",
            f"{1e3 * length.verify_seconds:.3f}",
            f"{1e3 * length.draft_seconds:.3f}",
            f"{length.speedup:.2f}",
            f"K={beyond.num_draft_tokens}: {beyond.speedup:.2f}" if gains else "no gain",
        )
        tile.add_row(
            device.title,
            str(found.load.batch),
            str(device.tile),
            f"{length.fill:.0%}",
            f"K={length.full_tokens}: +{1e3 * (length.full_seconds - length.verify_seconds):.3f}",
            "/".join(length.bound),
            f"{sum(memory.values()) / 1e9:.1f}" + ("" if entry["fits"] else ", too much"),
            f"{(memory['drafter_parameters'] + memory['drafter_kv']) / 1e9:.2f}",
        )
    return [best, tile]


_BEST_COLUMNS = (
    *("device", "batch", "K that fits", "best K", "tokens/step", "plain ms", "verify ms", "draft ms", "speed-up"),
    "beyond the tile",
)
_TILE_COLUMNS = ("device", "batch", "tile", "filled", "filling it: ms", "bound by", "GB", "of it the drafter")
_BEST = "K that fits: (K + 1) x group query rows fill at most one attention tile."
_TILE = (
    "tile: rows of the largest. filled: of the smallest tile that holds the rows. filling it: what verifying as many "
    "draft tokens as that tile holds would add. bound by: products/attention. GB: parameters and K/V per chip."
)


def _plot(report: dict[str, Any], plans: list[tuple[Device, planner.Plan]], file: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install 'spec_jax[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(device.title for device, _ in plans))
    figure, axes = pyplot.subplots(1, len(names), figsize=(5 * len(names), 4), squeeze=False, sharey=True)
    for axis, name in zip(axes[0], names, strict=True):
        bound = None
        for device, found in plans:
            if device.title == name:
                x = [length.num_draft_tokens for length in found.lengths]
                axis.plot(x, [length.speedup for length in found.lengths], label=f"batch {found.load.batch}")
                bound = found.max_draft_tokens
        axis.axvline(bound, linestyle=":", color="grey", label="one tile")
        axis.set(title=name, xlabel="draft tokens", ylabel="projected speed-up")
        axis.legend()
    figure.tight_layout()
    figure.savefig(file)
    pyplot.close(figure)
    print(f"wrote {file}", file=sys.stderr)
