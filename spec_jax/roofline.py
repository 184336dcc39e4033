"""How long one forward pass takes on a chip: bytes over bandwidth or operations over peak, tile by tile.

Products and attention run one after another, so each has its own bound, and the two are added. Attention packs the
query rows of one sequence (tokens times query group) into tiles: every tile reads the sequence's K/V once, and an empty
row of a tile costs what a full one costs. What software adds is in `stacks`; without it this is the chip's bound.
"""

from __future__ import annotations

import dataclasses

from spec_jax.checks import check_counts
from spec_jax.devices import Device
from spec_jax.model_costs import ModelCosts
from spec_jax.stacks import IDEAL, Stack

ALL_REDUCE_LATENCY = 5e-6
"""Seconds of one all-reduce of nothing between the chips of one host."""


@dataclasses.dataclass(frozen=True)
class Load:
    """What a chip is asked to do.

    Attributes:
      batch: sequences.
      context: tokens of each in the cache.
      tensor: chips that share every layer.
      overhead: seconds per forward pass that neither bytes nor operations explain (launches, the host).
      stack: the software, which reaches a part of the peaks and adds gaps and dispatch; `IDEAL` adds nothing.
    """

    batch: int = 1
    context: int = 1024
    tensor: int = 1
    overhead: float = 0.0
    stack: Stack = IDEAL

    def __post_init__(self):
        check_counts(batch=self.batch, context=self.context, tensor=self.tensor)
        if not 0 <= self.overhead < 10:
            raise ValueError(f"overhead={self.overhead!r} must be seconds, 0 or more")


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Seconds of one forward pass, by part.

    Attributes:
      products: weight products; `products_bound` is "memory" or "compute".
      attention: attention; `attention_bound` likewise.
      collectives: between the chips.
      gaps: between the kernels.
      waiting: of the device for the host, which dispatches beside it.
      overhead: as in `Load`.
      tiles: attention tiles per sequence and key/value head.
      tile_rows: rows of these tiles in all; `used_rows` of them hold a query.
    """

    products: float
    products_bound: str
    attention: float
    attention_bound: str
    collectives: float
    gaps: float
    waiting: float
    overhead: float
    tiles: int
    tile_rows: int
    used_rows: int

    @property
    def seconds(self) -> float:
        return self.products + self.attention + self.collectives + self.gaps + self.waiting + self.overhead

    @property
    def fill(self) -> float:
        """Share of the tiles' rows that hold a query."""
        return self.used_rows / self.tile_rows


def step_time(device: Device, costs: ModelCosts, load: Load, width: int) -> StepTime:
    """One forward pass of `width` tokens of every sequence.

    Args:
      device: one of the `load.tensor` chips.
      width: tokens in flight per sequence, K + 1 for a verification step.
    """
    stack = load.stack
    bandwidth, flops = device.bandwidth * stack.bandwidth_share, device.flops * stack.compute_share
    rows = load.batch * width
    read = costs.parameters_read(rows) * costs.weight_bytes / load.tensor
    computed = 2.0 * costs.active_parameters * device.product_rows(rows) / load.tensor
    products, products_bound = _longer(read / bandwidth, computed / flops)

    used = width * costs.query_group
    tiles, tile_rows = device.tiles_of(used)
    tokens = costs.layer_tokens(load.context + width)
    split = min(load.tensor, costs.kv_heads)  # more chips than key/value heads keep copies of them
    kv = load.batch * tokens * costs.kv_values * costs.kv_bytes * tiles / split
    per_key = 2.0 * (costs.score_size + costs.value_size)
    scores = load.batch * tokens * costs.kv_heads * tile_rows * per_key / split
    attention, attention_bound = _longer(kv / bandwidth, scores / flops)
    collectives, gaps = _all_reduces(device, costs, load.tensor, rows), stack.gaps(costs.num_layers)
    busy = products + attention + collectives + gaps

    return StepTime(
        products,
        products_bound,
        attention,
        attention_bound,
        collectives,
        gaps,
        max(stack.host(costs.num_layers) - busy, 0.0),
        load.overhead,
        tiles,
        tile_rows,
        used,
    )


def _longer(memory: float, compute: float) -> tuple[float, str]:
    return (compute, "compute") if compute > memory else (memory, "memory")


def _all_reduces(device: Device, costs: ModelCosts, chips: int, rows: int) -> float:
    """Two per layer, each as a reduce-scatter and an all-gather of bfloat16 activations around a ring."""
    if chips == 1:
        return 0.0
    if not device.link:
        raise ValueError(f"tensor={chips} needs a device with links between chips, which {device.title} has not")
    moved = 2 * (chips - 1) / chips * rows * costs.hidden_size * 2.0
    return 2 * costs.num_layers * (moved / device.link + ALL_REDUCE_LATENCY)
