"""Accelerators as the planner sees them: published peaks of one chip, and the rows that its attention tiles take.

The figures are the vendors' data sheets, dense bfloat16 with sums in float32. Nothing here is measured, and no backend
is loaded.
"""

from __future__ import annotations

import dataclasses
import math
import re

ROW_TILE = 8
"""Rows to which a TPU pads a weight product."""
TPU_TILES = (8, 16, 32, 64, 128, 256)
"""Query rows that a TPU kernel can be compiled for; the last one used is as many rows as the MXU has."""
GPU_TILES = (8, 16, 32, 64, 128)
"""Query rows of the attention kernels that GPU libraries ship (TensorRT-LLM's and FlashInfer's selectors agree)."""
UNPADDED = 1024
"""Query rows up to which a CPU is planned for."""


@dataclasses.dataclass(frozen=True)
class Device:
    """One chip.

    Attributes:
      name: as `--device` takes it.
      title: for tables.
      flops: operations per second, bfloat16 (on the machine at hand: float32).
      bandwidth: bytes per second of the memory that holds weights and K/V.
      memory: bytes of it.
      link: bytes per second between chips, all links of one chip together; 0: there is only one chip.
      tiles: query rows (tokens times query group) of one attention tile, ascending.
      row_tile: rows to which a weight product is padded; 0: to the tiles of `tiles`.
    """

    name: str
    title: str
    flops: float
    bandwidth: float
    memory: float
    link: float
    tiles: tuple[int, ...]
    row_tile: int = ROW_TILE

    @property
    def tile(self) -> int:
        """Query rows of the largest tile: beyond it the K/V cache is read once more."""
        return self.tiles[-1]

    @property
    def ridge(self) -> float:
        """Rows at which a product with bfloat16 weights takes as long as reading them."""
        return self.flops / self.bandwidth

    def tiles_of(self, rows: int) -> tuple[int, int]:
        """How many tiles `rows` query rows take, and the rows that these have in all, empty ones included."""
        full, rest = divmod(rows, self.tile)
        last = next((tile for tile in self.tiles if tile >= rest), self.tile) if rest else 0
        return full + bool(rest), full * self.tile + last

    def product_rows(self, rows: int) -> int:
        """The rows that a weight product of `rows` rows computes, padding included."""
        return -(-rows // self.row_tile) * self.row_tile if self.row_tile else self.tiles_of(rows)[1]


def _chip(name: str, title: str, teraflops: float, bandwidth: float, memory: float, link: float, tiles) -> Device:
    # A TPU streams rows through the MXU, eight at a time; GPU libraries have kernels for tiles of powers of two.
    padding = 0 if tiles is GPU_TILES else ROW_TILE
    return Device(name, title, teraflops * 1e12, bandwidth * 1e9, memory * 1e9, link * 1e9, tuple(tiles), padding)


DEVICES = {
    device.name: device
    for device in (
        # Tflop/s, then GB/s of the memory, its GB, GB/s of the links
        _chip("v4", "TPU v4", 275, 1200, 32, 300, TPU_TILES[:-1]),
        _chip("v5e", "TPU v5e", 197, 819, 16, 200, TPU_TILES[:-1]),
        _chip("v5p", "TPU v5p", 459, 2765, 95, 600, TPU_TILES[:-1]),
        _chip("v6e", "TPU v6e", 918, 1640, 32, 448, TPU_TILES),
        _chip("tpu7x", "TPU7x", 2307, 7380, 192, 1200, TPU_TILES),
        _chip("rtx3090", "NVIDIA RTX 3090", 71, 936, 24, 112.5, GPU_TILES),
        _chip("a6000", "NVIDIA RTX A6000", 154.8, 768, 48, 112.5, GPU_TILES),
        _chip("a10", "NVIDIA A10", 125, 600, 24, 64, GPU_TILES),
        _chip("a100-40g", "NVIDIA A100 40GB", 312, 1555, 40, 600, GPU_TILES),
        _chip("a100", "NVIDIA A100 80GB", 312, 2039, 80, 600, GPU_TILES),
        _chip("h100", "NVIDIA H100 SXM", 989, 3350, 80, 900, GPU_TILES),
        _chip("h200", "NVIDIA H200", 989, 4800, 141, 900, GPU_TILES),
        _chip("b200", "NVIDIA B200", 2250, 8000, 192, 1800, GPU_TILES),
    )
}
ALIASES = {"7x": "tpu7x", "v7x": "tpu7x", "ironwood": "tpu7x", "trillium": "v6e"}
_TPU_KINDS = {"tpu v5 lite": "v5e", "tpu v5": "v5p", "tpu v6 lite": "v6e", "tpu v7x": "tpu7x"}
_OTHER = {"pcie", "nvl", "mig", "ti", "super", "laptop", "lite"}
"""Words of a chip whose figures are not those of the chip that the others name."""
HERE = "here"
"""The name of the machine at hand, which is measured."""


def find_device(name: str) -> Device:
    """The device of that name, `here` for the machine at hand. ValueError names the known ones."""
    key = ALIASES.get(name.lower(), name.lower())
    if key == HERE:
        return this_machine()
    if key not in DEVICES:
        raise ValueError(f"device={name!r} is not known; allowed: {', '.join((*DEVICES, HERE))}")
    return DEVICES[key]


def known_device(kind: str) -> Device | None:
    """The chip that a backend describes in these words (`NVIDIA A100-SXM4-40GB`, `TPU v5 lite`), or None."""
    kind = " ".join(re.findall("[a-z0-9]+", kind.lower()))
    for words, name in _TPU_KINDS.items():
        if kind == words:
            return DEVICES[name]
    if _OTHER & set(kind.split()):
        return None
    for device in DEVICES.values():
        words = device.title.lower().replace(" sxm", "").replace(" 80gb", "").split()
        if set(words) <= set(kind.split()):
            return device
    return None


def this_machine() -> Device:
    """The device of this process: known by its kind, or measured."""
    from spec_jax import environment, peaks

    found = known_device(environment.devices()[0]["kind"])
    if found is not None:
        return found
    found = peaks.measure()
    # The CPU's kernels compute the rows that there are: every number of them is a tile of its own.
    return Device(
        HERE,
        environment.describe_device(),
        found.flops_per_second,
        found.bytes_per_second,
        found.memory or math.inf,
        0.0,
        tuple(range(1, UNPADDED + 1)),
        row_tile=1,
    )
