"""Verification attention: a few query rows per sequence against a ragged KV cache, under an ancestor mask.

The rows in flight (the last committed token and the draft nodes) are already written to the cache behind the
committed ones, so that one softmax covers both and a row's bits do not depend on where a draft began.

A row of a tree has the bits that it would have in a chain where its ancestors stand in adjacent slots. Where siblings
stand in between, the same terms are added in another grouping, and float32 results differ in the last bit (six in ten
rows of a 3 x 2 tree; bfloat16 outputs then round to the same). Equal bits would take the last KV blocks once per leaf,
its path moved to adjacent slots: for that tree six times their arithmetic.
"""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp

from spec_jax.cache import BLOCK
from spec_jax.kernels import block_sizes, reference
from spec_jax.kernels.masks import WORD

IMPLEMENTATIONS = ("reference", "mosaic_tpu", "mosaic_gpu")
HOPPER = re.compile(r"NVIDIA (H100|H200|H800|H20|GH200)\b")
"""The device kinds that the GPU kernel is compiled for: others have no wgmma, and its compiler ends the process."""


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    start: jax.Array,
    ancestors: jax.Array,
    *,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    tile_rows: int | None = None,
    block: int | None = None,
    split: int | None = None,
    implementation: str | None = None,
    interpret=False,
) -> jax.Array:
    """Softmax attention of the rows in flight over committed and in-flight slots, float32 accumulation.

    KV blocks stand at absolute positions and are combined in order with the online softmax (Milakov & Gimelshein,
    2018), so a row's bits depend neither on the capacity nor on its batch mates. Blocks in which no row of a
    sequence sees anything are not read.

    Args:
      q: [batch, width, heads, head_dim], rotated; float32 or bfloat16, as k and v.
      k, v: [batch, kv_heads, capacity, head_dim], in-flight rows written from slot `start` on.
      start: int32 [batch], committed slots.
      ancestors: uint32 [batch or 1, width, words], see `masks.pack_ancestors`; every row sees itself.
      scale: of the scores, above 0; None: head_dim ** -0.5.
      window: positions that a row sees, its own included, at least `width`; None: all.
      soft_cap: scores become soft_cap * tanh(scores / soft_cap) (Gemma 2); None: as they are.
      tile_rows: run in tiles of this many query rows (tokens times query group), one sequence at a time, so that bits
        depend neither on the width nor on the batch. None: as many as there are.
      block: slots of a KV block of a kernel, a multiple of 128, or 64 on a GPU; None: see `block_sizes`.
      split: slots that the GPU kernel takes at a time, each as a softmax of its own, combined in order; a multiple of
        `block`. None: see `block_sizes`. The others take a sequence as a whole.
      implementation: one of `IMPLEMENTATIONS`, and no other then; None: the kernel of the device that is traced for,
        which is that of the mesh in context or else the default one, and the reference where it has none.
      interpret: run a kernel on any device without compiling it: True or `pltpu.InterpretParams` for the TPU kernel,
        `plgpu.InterpretGPUParams` (jax 0.12) for the GPU kernel.

    Returns:
      [batch, width, heads, head_dim] in q's dtype.

    Raises:
      ValueError: shapes that do not fit together, or that the named implementation cannot take.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    _check(q, k, v, start, ancestors, scale, window, soft_cap, implementation)
    options = {"scale": scale, "window": window, "soft_cap": soft_cap}
    kind = _device_kind()
    if implementation is None:
        implementation = _best(kind, q, k)
    _check_device(implementation, kind, interpret)
    _check_sizes(implementation, tile_rows, block, split)
    if implementation == "reference":
        return reference.attention(q, k, v, start, ancestors, **options, tile_rows=tile_rows)
    # Pallas takes its time to load, and a CPU needs none of it.
    if implementation == "mosaic_gpu":
        from spec_jax.kernels import gpu

        sizes = block_sizes.gpu_sizes(q.shape, k.shape, k.dtype, tile_rows=tile_rows, block=block, split=split)
        return gpu.attention(q, k, v, start, ancestors, **options, sizes=sizes, interpret=interpret)
    from spec_jax.kernels import tpu

    sizes = block_sizes.tpu_sizes(q.shape, k.shape, k.dtype, tile_rows=tile_rows, block=block, kind=kind)
    return tpu.attention(q, k, v, start, ancestors, **options, sizes=sizes, interpret=interpret)


def _best(kind: str, q: jax.Array, k: jax.Array) -> str:
    """The implementation for the device that is traced for."""
    if kind.startswith("TPU"):
        return "mosaic_tpu"
    return "mosaic_gpu" if HOPPER.match(kind) and block_sizes.fits_gpu(q.shape, k.shape, k.dtype) else "reference"


def _device_kind() -> str:
    """What Pallas goes by too: the mesh's device, attached or only described, or else the default one."""
    described = jax.sharding.get_abstract_mesh().abstract_device
    return described.device_kind if described else (jax.config.jax_default_device or jax.devices()[0]).device_kind


def _check_device(implementation: str, kind: str, interpret) -> None:
    """A kernel for another device would end in an error of its compiler, or end the process."""
    if implementation == "mosaic_gpu" and interpret is True:
        raise ValueError("interpret=True is not known for the GPU kernel; give plgpu.InterpretGPUParams() (jax 0.12)")
    if implementation == "mosaic_gpu" and not interpret and not HOPPER.match(kind):
        raise ValueError(
            f"implementation='mosaic_gpu' needs a Hopper GPU (H100, H200), and the device is {kind!r}; "
            "use implementation=None, or interpret"
        )
    if implementation == "mosaic_tpu" and not interpret and not kind.startswith("TPU"):
        raise ValueError(
            f"implementation='mosaic_tpu' needs a TPU, and the device is {kind!r}; "
            "use implementation=None, or interpret"
        )


def _check_sizes(implementation: str, tile_rows: int | None, block: int | None, split: int | None) -> None:
    if tile_rows is not None and tile_rows < 1:
        raise ValueError(f"tile_rows={tile_rows} must be at least 1, or None")
    if block is not None and implementation == "reference":
        raise ValueError(f"block={block} belongs to a kernel; the reference always takes {BLOCK} slots at a time")
    if split is not None and implementation != "mosaic_gpu":
        raise ValueError(f"split={split} belongs to the GPU kernel; {implementation} does not split a sequence")


def _check(q, k, v, start, ancestors, scale, window, soft_cap, implementation):
    """One clear error for shapes that do not fit together, before anything is traced."""
    batch, width, heads, head_dim = q.shape
    kv_heads, capacity = k.shape[1], k.shape[2]
    if heads % kv_heads:
        raise ValueError(f"heads={heads} must be a multiple of kv_heads={kv_heads}")
    if capacity % BLOCK:
        raise ValueError(f"the cache capacity {capacity} must be a multiple of {BLOCK}")
    if k.shape != v.shape or k.shape[0] != batch or k.shape[3] != head_dim:
        raise ValueError(
            f"k {k.shape} and v {v.shape} must be [{batch}, kv_heads, capacity, {head_dim}] for q {q.shape}"
        )
    if not q.dtype == k.dtype == v.dtype or q.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"q, k and v must all be float32 or all bfloat16, got {q.dtype}, {k.dtype} and {v.dtype}")
    words = -(-width // WORD)
    if start.shape != (batch,) or ancestors.shape not in ((1, width, words), (batch, width, words)):
        wanted = f"[{batch}] and [1 or {batch}, {width}, {words}]"
        raise ValueError(f"start {start.shape} and ancestors {ancestors.shape} must be {wanted}")
    if window is not None and window < width:
        raise ValueError(f"window={window} must be at least the {width} rows in flight: use fewer draft tokens")
    if not scale > 0:
        raise ValueError(f"scale={scale} must be above 0")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap={soft_cap} must be above 0; None caps nothing")
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(f"implementation={implementation!r} must be one of {', '.join(IMPLEMENTATIONS)}, or None")
