"""Attention against a plain NumPy softmax: ragged lengths, odd sizes, trees, unused slots, and canonical tiles."""

import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.cache import BLOCK
from spec_jax.kernels.attention import attention, chain_ancestors, pack_ancestors
from spec_jax.tree import ancestor_mask, depths


def numpy_attention(q, k, v, start, mask):
    batch, width, heads, head_dim = q.shape
    group = heads // k.shape[1]
    out = np.zeros(q.shape)
    for b in range(batch):
        for w in range(width):
            flight = [start[b] + j for j in range(width) if mask[b, w, j]]
            slots = [*range(start[b]), *flight]
            for n in range(heads):
                scores = k[b, n // group, slots].astype(np.float64) @ q[b, w, n].astype(np.float64) / np.sqrt(head_dim)
                weights = np.exp(scores - scores.max())
                out[b, w, n] = weights / weights.sum() @ v[b, n // group, slots].astype(np.float64)
    return out


def inputs(batch, width, heads, kv_heads, head_dim, blocks, seed=0):
    rng = np.random.default_rng(seed)
    shape = (batch, kv_heads, blocks * BLOCK, head_dim)
    q = rng.normal(size=(batch, width, heads, head_dim)).astype(np.float32)
    return q, rng.normal(size=shape).astype(np.float32), rng.normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("tile_rows", [None, 32])
@pytest.mark.parametrize(
    "width, heads, kv_heads, head_dim",
    [(1, 4, 4, 16), (5, 9, 3, 64), (8, 8, 1, 80), (3, 32, 1, 16), (9, 7, 7, 128), (40, 4, 2, 16)],
)
def test_equals_numpy_at_ragged_lengths_and_ignores_unused_slots(width, heads, kv_heads, head_dim, tile_rows):
    start = np.array([0, 1, BLOCK - width, BLOCK - 1, BLOCK, 2 * BLOCK - width], np.int32)
    q, k, v = inputs(len(start), width, heads, kv_heads, head_dim, blocks=2)
    mask = np.broadcast_to(np.tril(np.ones((width, width), bool)), (len(start), width, width))
    want = numpy_attention(q, k, v, start, mask)
    for b, s in enumerate(start):  # whatever lies beyond the rows in flight must not leak
        k[b, :, s + width :] = np.nan
        v[b, :, s + width :] = np.nan
    got = attention(*map(jnp.asarray, (q, k, v, start)), jnp.asarray(chain_ancestors(width)), tile_rows=tile_rows)
    np.testing.assert_allclose(np.asarray(got), want, atol=1e-5)


@pytest.mark.parametrize("tile_rows", [None, 32])
@pytest.mark.parametrize(
    "parents",
    [(-1, 0, 1, 2), (-1, -1, -1, 0, 0, 1, 1, 2, 2), (-1, -1, 1, 1), (-1, 0, 0, -1, 3, 4), (-1,), tuple(range(-1, 39))],
    ids=["chain", "3x2", "second child only", "depths 1 3 1", "one node", "long chain"],
)
def test_trees_see_their_ancestors_only(parents, tile_rows):
    width = len(parents) + 1
    mask = ancestor_mask(np.array(parents), width)
    for node, parent in enumerate(parents):  # an independent walk to the root
        row, line = node + 1, {node + 1, 0}
        while parent >= 0:
            line.add(parent + 1)
            parent = parents[parent]
        assert set(mask[row].nonzero()[0].tolist()) == line
        assert depths(mask)[row] == len(line) - 1
    start = np.array([3, 100], np.int32)
    q, k, v = inputs(2, width, 6, 2, 16, blocks=2)
    want = numpy_attention(q, k, v, start, np.broadcast_to(mask, (2, width, width)))
    packed = jnp.asarray(pack_ancestors(mask[None]))
    got = attention(*map(jnp.asarray, (q, k, v, start)), packed, tile_rows=tile_rows)
    np.testing.assert_allclose(np.asarray(got), want, atol=1e-5)


def test_rows_of_different_trees_in_one_batch():
    parents = np.array([[-1, 0, 1], [-1, -1, 0]])
    mask = np.asarray(ancestor_mask(jnp.asarray(parents), 4))
    q, k, v = inputs(2, 4, 4, 2, 16, blocks=1)
    start = np.array([5, 9], np.int32)
    got = attention(*map(jnp.asarray, (q, k, v, start)), pack_ancestors(jnp.asarray(mask)), tile_rows=32)
    np.testing.assert_allclose(np.asarray(got), numpy_attention(q, k, v, start, mask), atol=1e-5)


def test_unsupported_shapes_raise_and_name_themselves():
    q, k, v = inputs(1, 2, 4, 3, 16, blocks=1)
    with pytest.raises(ValueError, match="heads=4"):
        attention(*map(jnp.asarray, (q, k, v)), jnp.zeros(1, jnp.int32), jnp.asarray(chain_ancestors(2)))
    q, k, v = inputs(1, 2, 4, 2, 16, blocks=1)
    with pytest.raises(ValueError, match="capacity 100"):
        attention(
            jnp.asarray(q), k[:, :, :100], v[:, :, :100], jnp.zeros(1, jnp.int32), jnp.asarray(chain_ancestors(2))
        )
