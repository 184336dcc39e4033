"""The rows in flight of one step: the last committed token, the draft nodes behind it, and padding up to the width."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import tree as tree_lib
from spec_jax.drafting.base import Draft


def shape_of(draft: Draft, drafter: Any, width: int) -> tuple[np.ndarray | jax.Array, jax.Array, bool]:
    """Which rows in flight each row sees, bool [..., width, width], the nodes' row parents, and whether they chain."""
    if draft.parents is not None:
        parents = jnp.asarray(draft.parents, jnp.int32)
        return tree_lib.ancestor_mask(parents, width), parents + 1, False
    chain = drafter.parents is None
    parents = np.asarray(tree_lib.chain_parents(drafter.num_nodes) if chain else drafter.parents, np.int32)
    if chain:  # padding rows continue the chain: one mask and one program for every number of nodes
        mask = np.tril(np.ones((width, width), bool))
    else:
        mask = tree_lib.ancestor_mask(parents, width)
    return mask, jnp.asarray(parents) + 1, chain


def active_rows(draft: Draft, live: jax.Array, width: int) -> jax.Array:
    """Rows whose logits are wanted, bool [batch, width]: the last token, real drafts and auxiliaries of live rows."""
    node = jnp.arange(width) - 1  # the last token stands in front of node 0
    wanted = node < draft.count[:, None]
    if draft.auxiliary is not None:
        wanted = wanted | jnp.pad(draft.auxiliary, (1, width - 1 - draft.auxiliary.shape[0]))
    return wanted & live[:, None]


def acceptable(draft: Draft, num_nodes: int) -> jax.Array | int:
    """How many nodes of a draft may be accepted at all: the auxiliary ones stand behind them."""
    return num_nodes if draft.auxiliary is None else num_nodes - draft.auxiliary.sum(dtype=jnp.int32)
