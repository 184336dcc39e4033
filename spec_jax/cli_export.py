"""`spec-jax export`: a drafter in, the layout that another system reads out."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import spec_jax
from spec_jax.cli_generate import DEFAULT_MODEL
from spec_jax.cli_output import print_json

EXAMPLE = "spec-jax export path/to/drafter --out exported --layout speculators --dtype bfloat16"
LAYOUTS = ("speculators", "eagle", "vllm")
DTYPES = ("float32", "bfloat16", "float16", "int8")
TABLES = ("own", "all", "different")


def add_options(parser: Any) -> None:
    parser.add_argument("drafter", metavar="DRAFTER", help="its folder, a drafter known by name, a repository id")
    parser.add_argument("--out", metavar="FOLDER", required=True, help="is made; its config and weights are replaced")
    parser.add_argument("--target", metavar="MODEL", default=DEFAULT_MODEL, help="default: %(default)s")
    parser.add_argument(
        "--target-name",
        metavar="NAME",
        help="what others load the target by, such as a repository id (default: as given)",
    )
    parser.add_argument("--layout", choices=LAYOUTS, help="default: what most systems read of this kind of drafter")
    parser.add_argument(
        "--dtype", choices=DTYPES, default="bfloat16", help="int8 is read by spec_jax only (default: %(default)s)"
    )
    parser.add_argument(
        "--tables",
        choices=TABLES,
        help="embedding and output head: the drafter's own, also those that it borrows from the target, or only what "
        "differs from the target's (default: what readers of the layout want)",
    )
    parser.add_argument("--num-speculative-tokens", type=int, metavar="K", help="for the config (default: as it was)")


def run(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    from spec_jax.checks import check_counts
    from spec_jax.drafting.checkpoints import DrafterFolder, find_drafter
    from spec_jax.drafting.export import WEIGHTS, default_layout, default_tables, export_drafter

    tokens = arguments.num_speculative_tokens
    if tokens is not None:
        check_counts(num_speculative_tokens=tokens)
    folder = find_drafter(arguments.drafter)
    target = spec_jax.load_model(arguments.target, cpu_kernels=False)
    drafter = DrafterFolder(folder, target)
    head, params, remark = drafter.read("float32", packed=False)
    layout = arguments.layout or default_layout(head)
    export_drafter(
        head,
        params,
        arguments.out,
        target_name=arguments.target_name or arguments.target,
        target_config=target.config,
        layout=layout,
        dtype=arguments.dtype,
        num_speculative_tokens=tokens or drafter.layout.num_speculative_tokens,
        target_params=target.params,
        tables=arguments.tables or default_tables(head, layout, arguments.dtype),
    )
    report = {
        "method": drafter.layout.method,
        "read": drafter.layout.title,
        "layout": layout,
        "dtype": arguments.dtype,
        "folder": arguments.out,
        "bytes": (Path(arguments.out) / WEIGHTS).stat().st_size,
        "remark": remark,
    }
    if arguments.json:
        print_json(report)
        return 0
    print(f"{arguments.out}: {report['read']} as {layout}, {arguments.dtype}, {report['bytes'] / 1e6:.1f} MB")
    if remark:
        print(remark, file=sys.stderr)
    return 0
