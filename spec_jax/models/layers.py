"""Layers shared by the model families, and the canonical row blocks that make their bits independent of the width.

A matrix product rounds differently for one row and for several. `RowBlocks` fixes the row counts at which products
and norms run, so that a token's logits are the same bits whether it was decoded alone, verified with K drafts, in a
batch, or prefilled (DESIGN: exactness E2).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from spec_jax.cache import round_up
from spec_jax.kernels import cpu
from spec_jax.kernels.reference import precision
from spec_jax.models.packing import JOINED, split


@dataclasses.dataclass(frozen=True)
class RowBlocks:
    """The row counts at which a forward pass may run; hashable, static under jit.

    Attributes:
      block: products and norms see at most this many rows, more rows run block by block, and norms are padded to a
        whole block. None: as many rows as there are, fused as XLA likes (E0).
      products: ((kind, inputs, outputs), counts) of the products that may also run at fewer rows, because they were
        measured to give the same bits there as at a whole block (`exactness.row_blocks`); a product that is not named
        runs at whole blocks. None: products run at as many rows as there are (E1).
      tile: query rows of one attention product, always padded to a whole tile. None: as many as there are, so that
        bits depend on the batch and the width (E1).
      independent: the model's weights are packed for the CPU kernels, whose rows do not depend on each other at all;
        nothing is padded then.
    """

    block: int | None = None
    products: tuple[tuple[tuple[str, int, int], tuple[int, ...]], ...] | None = None
    tile: int | None = None
    independent: bool = False

    @property
    def canonical(self) -> bool:
        return self.block is not None

    @property
    def any_width(self) -> bool:
        """Whether bits depend on neither batch nor width (E2)."""
        return self.independent or self.tile is not None

    def product_rows(self, kind: str, inputs: int, outputs: int, count: int) -> int:
        """The rows at which a product of `count` rows runs: the smallest count known to be safe."""
        if self.products is None:
            return count
        counts = dict(self.products).get((kind, inputs, outputs), ())
        return min((c for c in counts if c >= count), default=self.block)


def rows_for(packed: bool, rows: RowBlocks) -> RowBlocks:
    """The layout of the weights decides how rows run, before anything else."""
    return RowBlocks(independent=True) if packed else rows


def flat_active(active: jax.Array | None, count: int) -> jax.Array:
    """bool [count] of `active` [batch, width]; None: all rows are wanted."""
    return jnp.ones(count, bool) if active is None else active.reshape(-1)


def by_rows(function: Callable[[jax.Array], jax.Array], x: jax.Array, rows: RowBlocks, *, at_least: int) -> jax.Array:
    """Applies `function`, which treats rows independently, to `x` [rows, ...] in canonical row counts.

    Up to one block of rows is padded to `at_least` rows; more rows run block after block. The barriers keep XLA from
    fusing neighbours into the computation, which would round it differently in another program.
    """
    if not rows.canonical:
        return function(x)
    count = x.shape[0]
    if count <= rows.block:
        padded = _pad_rows(x, max(count, at_least))
        return lax.optimization_barrier(function(lax.optimization_barrier(padded)))[:count]
    blocks = _pad_rows(x, round_up(count, rows.block)).reshape(-1, rows.block, *x.shape[1:])
    out = lax.map(lambda b: lax.optimization_barrier(function(lax.optimization_barrier(b))), blocks)
    return out.reshape(-1, *out.shape[2:])[:count]


def _pad_rows(x: jax.Array, count: int) -> jax.Array:
    return jnp.pad(x, ((0, count - x.shape[0]),) + ((0, 0),) * (x.ndim - 1)) if count > x.shape[0] else x


def linear(x: jax.Array, weight: jax.Array, rows: RowBlocks, bias: jax.Array | None = None) -> jax.Array:
    """x [rows, in] times weight [in, out] (plus bias), in x's dtype with float32 accumulation."""
    if rows.canonical and weight.shape[1] == 1:  # XLA rounds a product with a vector differently inside a loop
        wide = None if bias is None else jnp.pad(bias, (0, 1))
        return linear(x, jnp.pad(weight, ((0, 0), (0, 1))), rows, wide)[:, :1]

    def product(x):
        y = jnp.einsum("ri,io->ro", x, weight, preferred_element_type=jnp.float32, precision=precision(x))
        return (y if bias is None else y + bias.astype(jnp.float32)).astype(x.dtype)

    return by_rows(product, x, rows, at_least=rows.product_rows("linear", *weight.shape, x.shape[0]))


def joined_linear(
    x: jax.Array,
    weights: dict[str, jax.Array],
    names: tuple[str, ...],
    sizes: tuple[int, ...],
    rows: RowBlocks,
    active: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
    """`linear` of x with several weights and their biases; a packed model holds them joined into one.

    `active` bool [rows] is for packed models, here as below: other rows of their results hold anything.
    """
    if not rows.independent:
        return tuple(linear(x, weights[name], rows, weights.get(f"{name}_bias")) for name in names)
    whole = next(whole for whole, parts in JOINED.items() if parts == names)
    y = cpu.product(x, weights[whole], sum(sizes), active, weights.get(f"{whole}_bias"))
    return tuple(split(y, sizes))


def gated_linear(
    x: jax.Array, weights: dict[str, jax.Array], size: int, rows: RowBlocks, active: jax.Array | None = None
) -> jax.Array:
    """silu(x times gate) * (x times up), [rows, size]."""
    if rows.independent:
        joined = cpu.product(x, weights["gate_up"], 2 * size, active, weights.get("gate_up_bias"))
        return cpu.swiglu(joined, active)
    gate, up = joined_linear(x, weights, ("gate", "up"), (size, size), rows, active)
    return jax.nn.silu(gate) * up


def unembed(
    x: jax.Array, weight: jax.Array, rows: RowBlocks, vocab_size: int | None = None, active: jax.Array | None = None
) -> jax.Array:
    """x [rows, embed] times the transposed embedding [vocab, embed]: float32 logits [rows, vocab].

    A packed embedding holds whole panels, so `vocab_size` says how many of its rows count.
    """
    if rows.independent:
        return cpu.product(x, weight, vocab_size, active, dtype=jnp.float32)
    if rows.canonical and weight.shape[0] == 1:  # see `linear`
        return unembed(x, jnp.pad(weight, ((0, 1), (0, 0))), rows)[:, :1]

    def product(x):
        return jnp.einsum("re,ve->rv", x, weight, preferred_element_type=jnp.float32, precision=precision(x))

    return by_rows(product, x, rows, at_least=rows.product_rows("unembed", *weight.shape[::-1], x.shape[0]))


def embed(tokens: jax.Array, weight: jax.Array, rows: RowBlocks) -> jax.Array:
    """Rows of the embedding. Ids must lie in the vocabulary."""
    return weight[tokens // cpu.PANEL, :, tokens % cpu.PANEL] if rows.independent else weight[tokens]


def rms_norm(
    x: jax.Array, weight: jax.Array, eps: float, rows: RowBlocks, active: jax.Array | None = None
) -> jax.Array:
    """Root-mean-square norm over the last axis of x [rows, ..., embed], computed in float32."""
    if rows.independent:
        return cpu.rms_norm(x, weight, eps, active)

    def norm(x):
        wide = x.astype(jnp.float32)
        scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
        return (wide * scale).astype(x.dtype) * weight.astype(x.dtype)

    return by_rows(norm, x, rows, at_least=rows.block or 1)
