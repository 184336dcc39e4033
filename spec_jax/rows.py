"""Rows of logits one after another, or side by side: what the platform does with a function of a single row.

On a CPU rows run in sequence at one fixed shape, so that their bits cannot depend on how many there are; elsewhere they
run side by side.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def over_rows(function: Callable, logits: jax.Array, rows, columns, *arrays, wanted=None, nothing=None):
    """`function(row, column, logits[row, column], *arrays)` of every entry: on a CPU in sequence, elsewhere side by
    side, as many at a time as there are sequences.

    Args:
      function: of scalars, one row of logits [vocab] and one entry of each of `arrays`. It branches with `cond`.
      logits: [batch, width, vocab].
      rows, columns: int32 [n].
      arrays: [n, ...] each.
      wanted: bool [n], entries to compute; None: all. The others cost nothing on a CPU.
      nothing: what the others get, like one result.

    Returns:
      The results, [n, ...] each.
    """

    def in_sequence(wanted, rows, columns, *more):
        def one(index):
            # The row is taken inside: what is not wanted must not even be copied.
            def compute():
                row, column = rows[index], columns[index]
                return function(row, column, logits[row, column], *(x[index] for x in more))

            return compute() if wanted is None else lax.cond(wanted[index], compute, lambda: nothing)

        return lax.map(one, jnp.arange(rows.shape[0]))

    def side_by_side(wanted, rows, columns, *more):
        def one(entry):
            row, column, *more = entry
            return function(row, column, logits[row, column], *more)

        # As many at a time as there are sequences: whole laws of all rows would be the logits several times over.
        found = lax.map(one, (rows, columns, *more), batch_size=logits.shape[0])
        return found if wanted is None else jax.tree.map(functools.partial(select_rows, wanted), found, nothing)

    return lax.platform_dependent(wanted, rows, columns, *arrays, cpu=in_sequence, default=side_by_side)


def each_row(function: Callable[..., Any], *arrays: jax.Array) -> Any:
    """`function` of every row of the batch: on a CPU one after another, so that a row's loops end with its own work."""

    def in_sequence(*arrays):
        return lax.map(lambda row: function(*row), arrays)

    return lax.platform_dependent(*arrays, cpu=in_sequence, default=jax.vmap(function))


def select_rows(chosen: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    """x [n, ...] where `chosen` [n], else y [n, ...] or [...]."""
    return jnp.where(chosen.reshape(-1, *[1] * (x.ndim - 1)), x, y)


def cond(predicate: jax.Array, on_true: Callable, on_false: Callable, *operands):
    """`lax.cond` of one row that side by side, under `jax.vmap`, still leaves out `on_true` where no row asks for it.

    `lax.cond` would then compute both for every row, and the filters of a sampled row read the logits 64 times.

    Args:
      predicate: bool scalar.
      on_true, on_false: functions of `operands`, and of nothing else that is traced for a row.
    """

    @jax.custom_batching.custom_vmap
    def choose(predicate, operands):
        return lax.cond(predicate, on_true, on_false, *operands)

    @choose.def_vmap
    def _(size, batched, predicate, operands):
        axes = jax.tree.map(lambda b: 0 if b else None, batched[1])
        predicate = jnp.broadcast_to(predicate, (size,))

        def each(function):
            return jax.vmap(lambda _, operands: function(*operands), (0, axes))(jnp.arange(size), operands)

        def mixed():
            some, others = each(on_true), each(on_false)
            return jax.tree.map(functools.partial(select_rows, predicate), some, others)

        out = lax.cond(predicate.any(), mixed, lambda: each(on_false))
        return out, jax.tree.map(lambda _: True, out)

    return choose(predicate, operands)
