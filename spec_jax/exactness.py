"""The exactness ladder: which row blocks give which level, and the check that measures it on this device.

E2: logits are the same bits whatever the drafter, K, width, batch, bucket or session (canonical rows). E1: the same
bits for plain and speculative decoding of one width and batch. E0: every token follows from the logits of its own run.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import cache as kv
from spec_jax.kernels.masks import chain_ancestors
from spec_jax.models.config import tensor_specs
from spec_jax.models.layers import RowBlocks, linear, unembed

CPU_BLOCK = 32
"""Rows of a canonical block on a CPU. XLA's products of more than 32 rows take another path in every shape measured."""
COUNTS = (4, 8, 16)
"""Row counts below a CPU's block that products are tried at; which of them agree with a whole block depends on the
product's shape (960 inputs: not 4 rows; 768 inputs: none; SmolLM2-135M: all), so it is measured."""
SMALL = 1 << 16
"""Products with fewer weights cost nothing and always run at a whole block."""
TILE = 128
"""Rows of an accelerator's attention and matrix tile; products always run at whole tiles there."""


def row_blocks(exact: bool | None, batch: int, width: int, module: Any = None) -> RowBlocks:
    """The row blocks that `exact` asks for on the default device; see `generate`.

    Args:
      module: the model whose products are tried at smaller row counts, once per shape and process (a few seconds on a
        CPU). None: every product runs at a whole block, which has the same bits and takes longer.
    """
    if exact is not None and not isinstance(exact, bool):
        raise ValueError(f"exact={exact!r} must be True, False or None")
    if module is not None and module.packed:
        return RowBlocks(independent=True)
    if exact is False:
        return RowBlocks()
    cpu = jax.default_backend() == "cpu"
    block = CPU_BLOCK if cpu else TILE
    if exact or batch * width <= block:
        products = measured_products(module) if cpu and module is not None else ()
        return RowBlocks(block=block, products=products, tile=block)
    return RowBlocks(block=batch * width)


def for_model(rows: RowBlocks, module: Any) -> RowBlocks:
    """The same row blocks for another model, whose products have other shapes and whose weights may lie otherwise."""
    if module.packed or rows.independent:
        return row_blocks(True, 1, 1, module)
    if not rows.products or jax.default_backend() != "cpu":
        return rows
    return dataclasses.replace(rows, products=measured_products(module))


def measured_products(module: Any) -> tuple:
    """`RowBlocks.products` of a model: every shape of product it has and the row counts that agree with a block."""
    c, shapes = module.config, set()
    for spec in tensor_specs(c).values():
        if spec.transpose:
            shapes.add(("linear", spec.shape[1], spec.shape[0]))
    shapes.add(("unembed", c.hidden_size, c.vocab_size))
    found = ((shape, agreeing_counts(*shape, module.dtype)) for shape in sorted(shapes))
    return tuple((shape, counts) for shape, counts in found if counts)


@functools.lru_cache
def agreeing_counts(kind: str, inputs: int, outputs: int, dtype: str) -> tuple[int, ...]:
    """The row counts of `COUNTS` at which this product gives, on this CPU, the bits it gives at a whole block."""
    if inputs * outputs < SMALL:
        return ()
    rng = np.random.default_rng(0)
    shape = (inputs, outputs) if kind == "linear" else (outputs, inputs)
    weight = jnp.asarray(np.resize(rng.standard_normal(SMALL + 1, np.float32) / inputs**0.5, shape), dtype)
    x = jnp.asarray(rng.standard_normal((CPU_BLOCK, inputs), np.float32), dtype)
    product = jax.jit(lambda x: (linear if kind == "linear" else unembed)(x, weight, RowBlocks(block=CPU_BLOCK)))
    whole = np.asarray(product(x))

    def agrees(count):
        return all((np.asarray(product(x[s])) == whole[s]).all() for s in (slice(count), slice(-count, None)))

    return tuple(count for count in COUNTS if agrees(count))


def level_of(rows: RowBlocks, exact: bool | None, tree: bool) -> str:
    """The level that a run with these row blocks is under: trees and `exact=False` promise E0 only."""
    if tree or (exact is False and not rows.independent):
        return "E0"
    return "E2" if rows.any_width else "E1"


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
      row_block: rows of one canonical block; None where rows are independent of each other (CPU kernels).
      dtype: the model's dtype.
      device: what it ran on.
      checks: every comparison.
    """

    level: str
    row_block: int | None
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
    canonical = row_blocks(True, 1, 8, target.module)
    one_width = RowBlocks(block=64)

    def logits(batch=1, width=8, capacity=kv.BLOCK, rows=canonical, lead=0):
        return _forced_logits(target, text[:batch], width, kv.round_up(tokens + 2 * width, capacity), rows, lead)[0]

    reference = logits()
    reference_e1 = logits(batch=8, rows=one_width)
    runs = [
        ("row place in the flight", "E1", lambda: logits(batch=8, rows=one_width, lead=3), reference_e1),
        ("row place in the flight, canonical", "E2", lambda: logits(lead=3), reference),
        *((f"width {w} against 8", "E2", lambda w=w: logits(width=w), reference) for w in (1, 5, 16)),
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

    cache = kv.init_cache(c, batch, capacity, module.dtype)
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
