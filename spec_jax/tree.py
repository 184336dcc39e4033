"""Draft trees: parents to depths and ancestor masks. A chain is the trivial tree.

Row 0 of a flight is the last committed token; draft node i is row i + 1. `parents[i]` is the node whose child node i
is, -1 for a child of the last committed token, and parents precede their children.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.token_tree import check_parents as check_parents  # stands there, where no backend is needed


def chain_parents(count: int) -> tuple[int, ...]:
    """Parents of a chain of `count` nodes: -1, 0, 1, ..."""
    return tuple(range(-1, count - 1))


def ancestor_mask(parents: np.ndarray | jax.Array, width: int) -> np.ndarray | jax.Array:
    """Which rows in flight each row sees, itself included: bool [..., width, width] of parents [..., nodes].

    Rows beyond the nodes are padding and see row 0 and themselves.
    """
    xp = np if isinstance(parents, np.ndarray) else jnp
    nodes = parents.shape[-1]
    row_parent = xp.concatenate(
        [
            xp.zeros((*parents.shape[:-1], 1), parents.dtype),
            parents + 1,
            xp.zeros((*parents.shape[:-1], width - 1 - nodes), parents.dtype),
        ],
        axis=-1,
    )
    step = (row_parent[..., None] == xp.arange(width)) | xp.eye(width, dtype=bool)
    reach = step
    for _ in range(max(width - 1, 1).bit_length()):  # the closure of "parent or self", by repeated squaring
        reach = (reach.astype(xp.float32) @ reach.astype(xp.float32)) > 0
    return reach


def depths(mask: np.ndarray | jax.Array) -> np.ndarray | jax.Array:
    """Depth of each row, int32 [..., width]: how many other rows in flight it sees."""
    xp = np if isinstance(mask, np.ndarray) else jnp
    return mask.sum(-1).astype(xp.int32) - 1
