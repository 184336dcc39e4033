"""Block sizes of the attention kernels: given ones, or else those found for the device, or else what fits all of them.

A row's bits depend on the slots of a KV block, so that number depends neither on the capacity nor on the batch nor on
the width.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from spec_jax.cache import BLOCK, round_up

LANES = 128


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """What one step of a kernel works on.

    Attributes:
      rows: packed query rows (tokens times query group) of a tile.
      block: slots of a KV block.
      heads: KV heads of one step.
    """

    rows: int
    block: int
    heads: int


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a device's kernel can hold.

    Attributes:
      rows: of a tile at most.
      block: slots of a KV block.
      buffers: bytes for the K and V blocks in flight, two of each.
      scores: bytes of the float32 scores of one step.
    """

    rows: int
    block: int
    buffers: int
    scores: int


TPU = Limits(rows=256, block=1024, buffers=8 << 20, scores=1 << 20)
"""Fits the 16 MB that a kernel of a v5e may use, the smallest of all generations."""

# KV blocks by device kind, head size and dtype, where one gains over `TPU.block`. Of the compiler's static estimate, by
#   python experiments/static_cycles.py
# (libtpu 0.0.52, 2026-11-30): in the sum over contexts up to 8192 slots, 2048 takes 15 and 12 to 14 % less than 1024 at
# 8 and 128 rows on v6e, 26 and 17 % on 7x. 4096 takes another 6 to 11 % off on 7x, but twice the time of 1024 where the
# context is that short. v5e and v5p gain nothing: there the memory is the bound. v4 has no static profile. Nothing here
# was timed on a device.
TPU_BLOCKS = {
    ("TPU v6 lite", 64, "bfloat16"): 2048,
    ("TPU v6 lite", 128, "bfloat16"): 2048,
    ("TPU7x", 64, "bfloat16"): 2048,
    ("TPU7x", 128, "bfloat16"): 2048,
}


def tpu_sizes(
    q_shape: tuple[int, ...],
    kv_shape: tuple[int, ...],
    dtype,
    *,
    tile_rows: int | None = None,
    block: int | None = None,
    heads: int | None = None,
    kind: str | None = None,
) -> BlockSizes:
    """Block sizes of the TPU kernel.

    Args:
      q_shape: batch, width, heads, head_dim.
      kv_shape: batch, kv_heads, capacity, head_dim.
      dtype: of all three.
      tile_rows, block, heads: given ones; None: chosen here.
      kind: of the device, as JAX names it, for `TPU_BLOCKS`.

    Raises:
      ValueError: a given one that the kernel cannot take.
    """
    _, width, query_heads, head_dim = q_shape
    kv_heads = kv_shape[1]
    group = query_heads // kv_heads
    if group > TPU.rows:
        raise ValueError(f"{group} query heads per KV head do not fit a tile of {TPU.rows} rows")
    if tile_rows is None:
        tile_rows = min(width * group, TPU.rows // group * group)
    if not 1 <= tile_rows <= TPU.rows:
        raise ValueError(f"tile_rows={tile_rows} must be from 1 to {TPU.rows}, the rows of the largest tile")
    rows = round_up(max(tile_rows, group), 32 // jnp.dtype(dtype).itemsize)  # registers: 8 rows of 4 bytes or 16 of 2
    if block is None:
        block = TPU_BLOCKS.get((kind, head_dim, jnp.dtype(dtype).name), TPU.block)
    if block < BLOCK or block % BLOCK:
        raise ValueError(f"block={block} must be a multiple of {BLOCK}")
    # Lanes are padded to whole registers in VMEM.
    per_head = 4 * block * round_up(head_dim, LANES) * jnp.dtype(dtype).itemsize
    if per_head > TPU.buffers:
        most = TPU.buffers * block // per_head // BLOCK * BLOCK
        raise ValueError(f"block={block} must be at most {most} for head_dim={head_dim}, or two of K and V do not fit")
    if heads is None:
        most = max(min(TPU.buffers // per_head, TPU.scores // (4 * rows * block)), 1)
        heads = max(n for n in range(1, kv_heads + 1) if kv_heads % n == 0 and n <= most)
    if heads < 1 or kv_heads % heads:
        raise ValueError(f"heads={heads} of a step must divide the {kv_heads} KV heads")
    return BlockSizes(rows, block, heads)


WARPGROUP_ROWS = 64
"""Rows of one wgmma."""
SHARED_MEMORY = 232448 - 8192
"""Bytes that a block of threads of a Hopper GPU may take, less what the compiler adds for barriers and reductions."""
SPLIT = 512
MAX_STAGES = 6


@dataclasses.dataclass(frozen=True)
class GpuBlockSizes:
    """What a block of threads of the GPU kernel works on.

    Attributes:
      rows: of a tile, 64 for each of its computing warpgroups.
      block: slots of a KV block.
      split: slots of one block of threads.
      stages: KV blocks in shared memory.
    """

    rows: int
    block: int
    split: int
    stages: int


def gpu_sizes(
    q_shape: tuple[int, ...],
    kv_shape: tuple[int, ...],
    dtype,
    *,
    tile_rows: int | None = None,
    block: int | None = None,
    split: int | None = None,
) -> GpuBlockSizes:
    """Block sizes of the GPU kernel.

    Args:
      q_shape: batch, width, heads, head_dim.
      kv_shape: batch, kv_heads, capacity, head_dim.
      dtype: of all three.
      tile_rows, block, split: given ones; None: chosen here.

    Raises:
      ValueError: a given one that the kernel cannot take.
    """
    _, width, query_heads, head_dim = q_shape
    group = query_heads // kv_shape[1]
    if head_dim % 16 or (head_dim > 128 and head_dim != 256):
        raise ValueError(f"head_dim={head_dim} must be a multiple of 16 up to 128, or 256, for the GPU kernel")
    size = jnp.dtype(dtype).itemsize
    block = WARPGROUP_ROWS if block is None else block
    if block not in (64, 128):
        raise ValueError(f"block={block} must be 64 or 128")
    split = SPLIT if split is None else split
    if split < block or split % block:
        raise ValueError(f"split={split} must be a multiple of block={block}")

    def stages(rows):
        """As many as fit beside the queries and the float32 sums on their way out; of float32 also beside the three
        bfloat16 parts of one KV block and of the weights."""
        parts = 1 if size == 2 else 3
        fixed = rows * (2 * parts * head_dim + 4 * min(head_dim, 128))
        fixed += 0 if size == 2 else 6 * block * (head_dim + rows)
        return min((SHARED_MEMORY - fixed) // (2 * block * head_dim * size), MAX_STAGES)

    # float32 has one warpgroup, and its parts for itself.
    most = 2 * WARPGROUP_ROWS if size == 2 and stages(2 * WARPGROUP_ROWS) >= 2 else WARPGROUP_ROWS
    least = 2 if size == 2 else 1
    if tile_rows is None:
        tile_rows = min(width * group, most)
    tile_rows = max(tile_rows, group) if tile_rows > 0 else tile_rows
    if not 1 <= tile_rows <= most:
        raise ValueError(
            f"tiles of {tile_rows} rows (tile_rows, or the query heads per KV head) must be from 1 to {most} "
            f"for head_dim={head_dim} in {jnp.dtype(dtype).name}"
        )
    rows = round_up(tile_rows, WARPGROUP_ROWS)
    if stages(rows) < least:
        name = jnp.dtype(dtype).name
        raise ValueError(f"head_dim={head_dim} in {name} with block={block} does not fit the shared memory of a GPU")
    return GpuBlockSizes(rows, block, split, stages(rows))


def fits_gpu(q_shape: tuple[int, ...], kv_shape: tuple[int, ...], dtype) -> bool:
    """Whether the GPU kernel can take these at all; see `gpu_sizes`."""
    try:
        gpu_sizes(q_shape, kv_shape, dtype)
    except ValueError:
        return False
    return True
