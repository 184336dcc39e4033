"""The exactness ladder: which row blocks give which level, and the check that measures it on this device.

E2: logits are the same bits whatever the drafter, K, width, batch, bucket or session (canonical rows). E1: the same
bits for plain and speculative decoding of one width and batch. E0: every token follows from the logits of its own run.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import cache as kv
from spec_jax.kernels.attention import chain_ancestors
from spec_jax.models.layers import RowBlocks

CPU_BLOCK, CPU_MINIMUM = 32, 4
"""Measured on x86-64 with XLA 0.10.2 and 0.12 in float32 and bfloat16: products of 4..32 rows agree bit for bit; one
row, and more than 32, take other paths."""
TILE = 128
"""Rows of an accelerator's attention and matrix tile."""


def row_blocks(exact: bool | None, batch: int, width: int) -> RowBlocks:
    """The row blocks that `exact` asks for on the default device; see `generate`."""
    if exact not in (None, True, False):
        raise ValueError(f"exact={exact!r} must be True, False or None")
    if exact is False:
        return RowBlocks()
    cpu = jax.default_backend() == "cpu"
    block = CPU_BLOCK if cpu else TILE
    if exact or batch * width <= block:
        return RowBlocks(block=block, minimum=CPU_MINIMUM if cpu else block, tile=block)
    return RowBlocks(block=batch * width, minimum=CPU_MINIMUM if cpu else 1)


def level_of(rows: RowBlocks, exact: bool | None, tree: bool) -> str:
    """The level that a run with these row blocks is under: trees and `exact=False` promise E0 only."""
    if exact is False or tree:
        return "E0"
    return "E2" if rows.tile is not None else "E1"


@dataclasses.dataclass(frozen=True)
class Check:
    """One comparison of logits: whether it was bit-identical, and the largest difference."""

    name: str
    level: str
    passed: bool
    max_abs_diff: float


@dataclasses.dataclass(frozen=True)
class ExactnessReport:
    """What `check_exactness` measured.

    Attributes:
      level: the highest level all of whose checks passed.
      row_block: rows of one canonical block.
      dtype: the model's dtype.
      device: what it ran on.
      checks: every comparison.
    """

    level: str
    row_block: int
    dtype: str
    device: str
    checks: tuple[Check, ...]


def check_exactness(target: Any, tokens: int = 48, seed: int = 0) -> ExactnessReport:
    """Compares logit bits on this device: row place, width, batch, prefill against decode, and bucket.

    The same random text is run through the target in different ways; every way must give the same bits for E2. E1 only
    asks that a row's place in a flight of one width does not matter.

    Args:
      target: a loaded `Model`.
      tokens: length of the text, at least 16.
    """
    if tokens < 16:
        raise ValueError(f"tokens={tokens} must be at least 16 to cover the widths")
    tokens = min(tokens, target.max_model_len)
    text = np.random.default_rng(seed).integers(0, target.vocab_size, (8, tokens)).astype(np.int32)
    canonical = row_blocks(True, 1, 8)
    one_width = row_blocks(None, 8, 8) if 8 * 8 > canonical.block else RowBlocks(block=64)

    def logits(batch=1, width=8, capacity=kv.BLOCK, rows=canonical, lead=0):
        return _forced_logits(target, text[:batch], width, kv.round_up(tokens + 2 * width, capacity), rows, lead)[0]

    reference = logits()
    reference_e1 = logits(batch=8, rows=one_width)
    runs = [
        ("row place in the flight", "E1", lambda: logits(batch=8, rows=one_width, lead=3), reference_e1),
        ("row place in the flight, canonical", "E2", lambda: logits(lead=3), reference),
        *((f"width {w} against 8", "E2", lambda w=w: logits(width=w), reference) for w in (1, 4, 16)),
        *((f"batch {b} against 1", "E2", lambda b=b: logits(batch=b), reference) for b in (3, 8)),
        ("prefill in chunks of 32", "E2", lambda: logits(width=32), reference),
        ("bucket of 1024 slots", "E2", lambda: logits(capacity=1024), reference),
    ]
    checks = []
    for name, level, run, against in runs:
        got = run()
        difference = float(np.abs(got.astype(np.float64) - against).max())
        alive = bool(np.isfinite(got).all() and got.std() > 0)  # equal NaNs or zeros would prove nothing
        checks.append(Check(name, level, alive and bool((got == against).all()), difference))
    failed = {c.level for c in checks if not c.passed}
    level = "E0" if "E1" in failed else "E1" if "E2" in failed else "E2"
    device = jax.devices()[0].device_kind
    return ExactnessReport(level, canonical.block, target.module.dtype, device, tuple(checks))


def _forced_logits(target, text, width, capacity, rows, lead) -> np.ndarray:
    """Logits [batch, tokens, vocab] of `text`, fed `width` rows at a time; the first flight advances by `lead` only."""
    module, c = target.module, target.config
    batch, tokens = text.shape
    depth, ancestors = np.arange(width, dtype=np.int32), chain_ancestors(width)

    @jax.jit
    def forward(params, fed, cache):
        return module.apply({"params": params}, fed, cache, depth=depth, ancestors=ancestors, rows=rows)

    cache = kv.init_cache(c.num_layers, batch, c.num_kv_heads, capacity, c.head_dim, module.dtype)
    out, at = [], 0
    while at < tokens:
        count = min(lead if lead and at == 0 else width, tokens - at)
        fed = np.zeros((batch, width), np.int32)
        ahead = text[:, at : at + width]
        fed[:, : ahead.shape[1]] = ahead
        result = forward(target.params, jnp.asarray(fed), cache)
        cache = result.cache.replace(length=cache.length + count)
        out.append(np.asarray(result.logits)[:, :count])
        at += count
    return np.concatenate(out, axis=1)
