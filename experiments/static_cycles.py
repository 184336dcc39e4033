"""Which KV block takes the verification kernel the fewest cycles on each TPU generation, by its compiler's schedule?

Command:   python experiments/static_cycles.py [--generations v5e,v6e] [--blocks 512,1024,2048] [--json]
Hardware:  any x86-64 Linux without a TPU, with the compiler (extra `tpu`); 2 CPU cores take about four minutes.
Expected:  with libtpu 0.0.52 blocks of 2048 slots gain 15 and 12 to 14 % on v6e (8 and 128 rows), 26 and 17 % on 7x,
           where 4096 gains 34 and 22 % but takes twice the time of 1024 on contexts that short; v5e and v5p gain
           nothing at 8 rows, where memory is the bound, v5p 6 % at 128. libtpu 0.0.42.1 makes no profiles for 7x.

Every shape is compiled alone, with its lengths fixed, and the compiler writes its static profile: the cycles of the
schedule, and of transfers by a model of its own that is optimistic by a third and more. That ranks kernels; it is no
latency. Seconds are max(cycles / clock, bytes / bandwidth), where the clock follows from published figures. What is
timed is a step of the kernel: one KV block of committed slots, for as many KV heads as fit.
"Gain" is over the heuristic of `spec_jax.kernels.block_sizes`, of the sum over contexts, since a block is read to its
end: long blocks gain on long contexts and lose on short ones.
"""

from __future__ import annotations

import argparse
import dataclasses
import glob
import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

from spec_jax import environment
from spec_jax.cache import round_up
from spec_jax.checks import check_counts, nearest
from spec_jax.cli_output import console, print_json
from spec_jax.devices import DEVICES
from spec_jax.kernels import block_sizes

TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
"""Of the generations that have static profiles: v4 has none."""
UNITS = {"v5e": 4, "v5p": 2 * 4, "v6e": 4 * 4}
"""Arrays of 128 x 128 multipliers of a chip: MXUs of each core, of which one of v6e counts as four. Of 7x nothing is
published; of v6e the vendor's pages say two MXUs or four, and two would mean 3.5 GHz."""
FASTEST = 2e9
"""Cycles per second that an unknown clock is taken for where blocks are ranked. The faster it is, the more the memory
decides, and the less long blocks gain."""
DEVICES_OF_CHIP = {"tpu7x": 2}
"""Where a device of JAX is a part of a chip, with as large a part of its bandwidth."""
LANES = block_sizes.LANES
KERNEL = "verification_attention"
CYCLES = re.compile(r"estimated_cycles: ([0-9.e+]+)")
STEPS = 16
"""Steps of the kernel that `block_shape` times: the first one's transfers overlap with nothing."""
CONTEXTS = range(256, 8192 + 1, 256)


@dataclasses.dataclass(frozen=True)
class Shape:
    """One call of the kernel.

    Attributes:
      width: tokens in flight of every sequence, K + 1.
      group: query heads per KV head.
      rows: of a tile, tokens times group and padding.
      block: slots of a KV block.
      committed: slots of every sequence in front of those in flight.
      capacity, batch, kv_heads, head_dim, dtype: of the cache.
      heads: of one step of the kernel. Of more than one the profile counts 0 cycles, unless a sequence is one block.
    """

    width: int
    group: int
    rows: int
    block: int
    committed: int
    capacity: int
    batch: int
    kv_heads: int
    head_dim: int = 128
    dtype: str = "bfloat16"
    heads: int = 1

    def kv_bytes(self, tiles: int) -> float:
        """What is read of K and V: whole blocks and whole lanes, once per tile."""
        blocks = -(-min(self.committed + self.width, self.capacity) // self.block)
        slots = min(blocks * self.block, self.capacity)
        itemsize = {"bfloat16": 2.0, "float32": 4.0}[self.dtype]
        return 2 * tiles * self.batch * self.kv_heads * slots * round_up(self.head_dim, LANES) * itemsize


def clock(generation: str) -> float | None:
    """Cycles per second, from the published operations per second and the number of MXUs; None where unknown."""
    units = UNITS.get(generation)
    return DEVICES[generation].flops / (units * 2 * 128 * 128) if units else None


def bound_seconds(generation: str, shape: Shape, cycles: int, tiles: int = 1, hertz: float | None = None):
    """The longer of the schedule and of reading K and V at the published bandwidth; None without a clock.

    Args:
      hertz: where the clock is not known.
    """
    hertz = clock(generation) or hertz
    bandwidth = DEVICES[generation].bandwidth / DEVICES_OF_CHIP.get(generation, 1)
    return max(cycles / hertz, shape.kv_bytes(tiles) / bandwidth) if hertz else None


def check_generations(names: Sequence[str]) -> None:
    for name in names:
        if name not in TOPOLOGIES:
            allowed = ", ".join(TOPOLOGIES)
            raise ValueError(f"generation={name!r} has no static profile{nearest(name, [*TOPOLOGIES])}; use {allowed}")


def compiler_version() -> str:
    """Of libtpu. ValueError where it is not installed."""
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError("static cycles need the compiler for TPUs: pip install -e '.[tpu]'")
    return metadata.version("libtpu")


def static_cycles(
    generation: str, shapes: Sequence[Shape], tell: Callable[[str], Any] = lambda line: None
) -> list[int | None]:
    """Cycles of the kernel for each shape; None where it does not fit the chip's memory, or has no profile.

    The compiler reads its flags when it is loaded, and ends the process where it fails to make a profile, so it runs in
    processes of its own. `tell` hears of progress and of failures.

    Raises:
      ValueError: a generation that this compiler has no profile for.
    """
    check_generations([generation])
    version, found = compiler_version(), []

    def progress():
        tell(f"{generation}: {len(found)} of {len(shapes)}")

    while len(found) < len(shapes):
        reason = _in_a_process(generation, shapes[len(found) :], found, progress)
        if len(found) < len(shapes):
            tell(f"{generation}: no profile of {shapes[len(found)]}: {reason}")
            found.append(None)
            if len(found) == min(2, len(shapes)) and not any(found):  # none will do
                raise ValueError(f"libtpu {version} makes no static profile for {generation}: {reason}")
    return found


def _in_a_process(generation: str, shapes: Sequence[Shape], found: list[int | None], tell: Callable[[], Any]) -> str:
    """Appends to `found` the cycles of as many shapes as the compiler lives to tell; returns why it ended early."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as errors:
        flags = f"--xla_jf_dump_static_llo_profile_to={folder} --xla_tpu_check_llo_types=false"
        variables = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "TPU_ACCELERATOR_TYPE": "v5litepod-4",
            "TPU_WORKER_HOSTNAMES": "localhost",
            "TPU_SKIP_MDS_QUERY": "1",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "LIBTPU_INIT_ARGS": f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {flags}".strip(),
        }
        work = {"generation": generation, "folder": folder, "shapes": [dataclasses.asdict(s) for s in shapes]}
        command = [sys.executable, __file__, "--compile", json.dumps(work)]
        with subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
            for line in process.stdout:
                found.append(json.loads(line))
                tell()
        errors.seek(0)
        lines = [line.strip() for line in errors if "failed" in line or "Error" in line]
    return lines[0][-200:] if lines else f"it ended with status {process.returncode}"


def compile_all(work: dict[str, Any]) -> None:
    """In a process of its own: compiles shape after shape and prints the cycles of each."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import topologies
    from jax.experimental.layout import Format, Layout
    from jax.sharding import Mesh, make_single_device_sharding

    from spec_jax.kernels import tpu
    from spec_jax.kernels.block_sizes import BlockSizes
    from spec_jax.kernels.packing import Packing

    topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[work["generation"]])
    chip = topology.devices[0]
    jax.config.update("jax_enable_compilation_cache", False)  # what is not compiled has no profile

    def compile_one(shape: Shape) -> None:
        packing = Packing(shape.width, shape.kv_heads, shape.group, shape.rows)
        words = -(-(shape.width + 1) // 32)
        cache = (shape.batch, shape.kv_heads, shape.capacity, shape.head_dim)
        tiles = (shape.batch, packing.tiles, shape.rows)
        operands = (
            ((shape.batch, shape.kv_heads, packing.tiles, shape.rows, shape.head_dim), shape.dtype),
            ((*tiles, words), jnp.uint32),
            ((*tiles, 1), jnp.int32),
            (cache, shape.dtype),
            (cache, shape.dtype),
        )
        sizes = BlockSizes(shape.rows, shape.block, shape.heads)
        lengths = {"committed": shape.committed, "in_flight": shape.width}

        def call(q, *rest):
            # Made and used by other operations, queries and outputs stand in the chip's memory, as in a model.
            return 2 * tpu.for_static_profile(2 * q, *rest, **lengths, scale=shape.head_dim**-0.5, sizes=sizes)

        # Else heads of 64 lie with the slots along the lanes, and are copied first.
        one = make_single_device_sharding(chip)

        def place(ndim):
            return Format(Layout(tuple(range(ndim))), one)

        jax.jit(call).lower(*(jax.ShapeDtypeStruct(*x, sharding=place(len(x[0]))) for x in operands)).compile()

    for entry in work["shapes"]:
        for file in glob.glob(os.path.join(work["folder"], "*")):
            os.remove(file)
        try:
            with jax.set_mesh(Mesh(np.array([chip]), ("chip",))):
                compile_one(Shape(**entry))
        except jax.errors.JaxRuntimeError as error:
            if "vmem" not in str(error).lower():
                raise
            print("null", flush=True)
            continue
        (file,) = glob.glob(os.path.join(work["folder"], f"{KERNEL}*"))
        with open(file, encoding="utf-8", errors="replace") as profile:
            print(max(int(float(x)) for x in CYCLES.findall(profile.read())), flush=True)


def block_shape(rows: int, block: int, head_dim: int, kv_heads: int) -> Shape:
    """Sequences of one whole KV block of committed slots, as many as 16 steps of the kernel take."""
    group = 8
    width = rows // group
    shapes = (1, width, kv_heads * group, head_dim), (1, kv_heads, block, head_dim)
    sizes = block_sizes.tpu_sizes(*shapes, "bfloat16", block=block)
    batch = max(STEPS * sizes.heads // kv_heads, 1)
    return Shape(width, group, sizes.rows, block, block, block, batch, kv_heads, head_dim, heads=sizes.heads)


def cost_of_contexts(generation: str, shape: Shape, cycles: int) -> float:
    """Seconds of attention at each context of `CONTEXTS`, added up, per KV head: each block begun costs a whole one."""
    of_block = bound_seconds(generation, shape, cycles, hertz=FASTEST) / (shape.batch * shape.kv_heads)
    return sum(-(-context // shape.block) for context in CONTEXTS) * of_block


def compare_blocks(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for every generation, head size, number of rows and KV block."""
    found = []
    for generation in arguments.generations:
        cases = list(itertools.product(arguments.head_dims, arguments.rows, arguments.blocks))
        shapes = [block_shape(rows, block, head_dim, arguments.kv_heads) for head_dim, rows, block in cases]
        cycles = static_cycles(generation, shapes, lambda line: print(line, file=sys.stderr))
        entries = []
        for (head_dim, rows, block), shape, count in zip(cases, shapes, cycles, strict=True):
            entry = {"generation": generation, "head_dim": head_dim, "rows": rows, "block": block}
            entry |= {"heads": shape.heads, "cycles": count}
            entry["cost"] = None if count is None else cost_of_contexts(generation, shape, count)
            entries.append(entry)
        for entry in entries:
            same = [e for e in entries if (e["head_dim"], e["rows"]) == (entry["head_dim"], entry["rows"])]
            (usual,) = (e["cost"] for e in same if e["block"] == block_sizes.TPU.block)
            entry["gain"] = 1 - entry["cost"] / usual if entry["cost"] and usual else None
        found += entries
    return found


def table(entries: Sequence[dict[str, Any]]) -> Any:
    from rich.table import Table

    result = Table(title=f"Compiler's static estimate, libtpu {compiler_version()}", title_justify="left")
    for heading in ("generation", "head_dim", "rows", "block", "heads of a step", "cycles of a step", "gain, %"):
        result.add_column(heading, justify="right")
    for entry in entries:
        cells = [str(entry[name]) for name in ("generation", "head_dim", "rows", "block", "heads")]
        cycles = "too large" if entry["cycles"] is None else f"{entry['cycles'] / STEPS:.0f}"
        gain = "" if entry["gain"] is None else f"{100 * entry['gain']:+.1f}"
        result.add_row(*cells, cycles, gain)
    return result


def integers(text: str) -> list[int]:
    return sorted({int(part) for part in text.split(",")})


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generations", type=lambda text: text.split(","), default=[*TOPOLOGIES], metavar="NAME,...")
    parser.add_argument("--blocks", type=integers, default="256,512,1024,2048,4096", metavar="SLOTS,...")
    parser.add_argument(
        "--rows", type=integers, default="8,128", metavar="R,...", help="query rows, of 8 heads a token"
    )
    parser.add_argument("--head-dims", type=integers, default="64,128", metavar="D,...")
    parser.add_argument("--kv-heads", type=int, default=8, help="of a chip; as many go into a step as fit")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--compile", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    try:
        if arguments.compile:
            compile_all(arguments.compile)
            return
        check_generations(arguments.generations)
        check_counts(kv_heads=arguments.kv_heads)
        if any(rows < 8 or rows % 8 or rows > block_sizes.TPU.rows for rows in arguments.rows):
            raise ValueError(f"--rows={arguments.rows} must be multiples of 8, at most {block_sizes.TPU.rows}")
        arguments.blocks = sorted({*arguments.blocks, block_sizes.TPU.block})
        entries = compare_blocks(arguments)
        versions = environment.versions() | {"libtpu": compiler_version()}
        if arguments.json:
            print_json({"versions": versions, "rows": entries})
        else:
            console(stderr=False).print(table(entries))
    except (ValueError, OSError) as error:
        parser.exit(2, f"error: {' '.join(str(error).split())}\n")


if __name__ == "__main__":
    main()
