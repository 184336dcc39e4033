"""Seconds of one verification attention on the device at hand, for tile_ablation.py: several shapes, taking turns."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from spec_jax.cache import BLOCK, round_up
from spec_jax.kernels import attention, cpu
from spec_jax.kernels.masks import chain_ancestors

IMPLEMENTATIONS = ("mosaic_tpu", "mosaic_gpu", "cpu", "reference")


@dataclasses.dataclass(frozen=True)
class Cache:
    """What is attended to: sequences, KV heads of each, size of a head, and slots of a sequence, in flight or not."""

    batch: int
    kv_heads: int
    head_dim: int
    context: int

    @property
    def capacity(self) -> int:
        return round_up(self.context, BLOCK)


@dataclasses.dataclass(frozen=True)
class Case:
    """What runs: one of `IMPLEMENTATIONS`; `width` tokens in flight of `group` query heads per KV head; rows of a tile,
    which the kernel "cpu" has not."""

    implementation: str
    width: int
    group: int
    tile_rows: int


def implementations() -> list[str]:
    """Those with which decoding attends on the default device."""
    if jax.default_backend() == "cpu":
        return ["cpu"] * (cpu.unavailable() is None) + ["reference"]
    kind = jax.devices()[0].device_kind
    return ["mosaic_tpu" if kind.startswith("TPU") else "mosaic_gpu" if attention.HOPPER.match(kind) else "reference"]


def operation(case: Case, cache: Cache, inner: int) -> Callable[..., Any]:
    """A compiled call that attends `inner` times, one after another: (q, k, v) -> (out, k, v), k and v in place."""
    batch, width, ancestors = cache.batch, case.width, jnp.asarray(chain_ancestors(case.width))
    start = jnp.full(batch, cache.context - width, jnp.int32)

    def one(_, operands):
        q, k, v = operands
        if case.implementation == "cpu":  # which writes the rows in flight itself
            new = jnp.ones((batch, width, cache.kv_heads, cache.head_dim), q.dtype)
            active, write = jnp.ones((batch, width), bool), jnp.ones(batch, bool)
            return cpu.attention(q, new, new, k, v, start, ancestors, active, write)
        options = {"tile_rows": case.tile_rows, "implementation": case.implementation}
        return attention.attention(q, k, v, start, ancestors, **options), k, v

    @functools.partial(jax.jit, donate_argnums=(1, 2))
    def call(q, k, v):
        return jax.lax.fori_loop(0, inner, one, (q, k, v))

    return call


def seconds(
    cases: Sequence[Case], cache: Cache, dtype: str, repeats: int, inner: int, tell: Callable[[str], Any]
) -> list[list[float]]:
    """Of one attention of each case, `repeats` times; compiled before the clock runs.

    Args:
      dtype: float32 or bfloat16.
      inner: attentions of one timing, so that it is not the launch that is timed.
      tell: hears of progress.
    """
    keys = jax.random.split(jax.random.key(0), 2)
    k, v = (
        jax.random.normal(key, (cache.batch, cache.kv_heads, cache.capacity, cache.head_dim), dtype) for key in keys
    )
    calls, found = [], [[] for _ in cases]
    for case in cases:
        shape = (cache.batch, case.width, cache.kv_heads * case.group, cache.head_dim)
        call, q = operation(case, cache, inner), jax.random.normal(jax.random.key(1), shape, dtype)
        _, k, v = jax.block_until_ready(call(q, k, v))
        calls.append((call, q))
    for repeat in range(repeats):
        for taken, (call, q) in zip(found, calls, strict=True):
            begin = time.perf_counter()
            _, k, v = jax.block_until_ready(call(q, k, v))
            taken.append((time.perf_counter() - begin) / inner)
        tell(f"timed: repeat {repeat + 1} of {repeats}")
    return found
