"""Every implementation of verification attention against a plain NumPy softmax, and against itself in other company."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

from spec_jax import devices
from spec_jax.cache import BLOCK
from spec_jax.kernels import block_sizes
from spec_jax.kernels.attention import attention
from spec_jax.kernels.masks import chain_ancestors, flag_committed, pack_ancestors
from spec_jax.tree import ancestor_mask, depths

IMPLEMENTATIONS = {
    "reference": {"implementation": "reference"},
    "reference tiles": {"implementation": "reference", "tile_rows": 32},
    "mosaic_tpu": {"implementation": "mosaic_tpu", "block": BLOCK, "interpret": True},
}
RACES = {"mosaic_tpu": pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2)}
if hasattr(plgpu, "InterpretGPUParams"):  # 2026-11-30: jax 0.10 can compile the GPU kernel, not interpret it
    RACES["mosaic_gpu"] = plgpu.InterpretGPUParams(detect_races=True)
    # Every test of it looks for races, which costs nothing more.
    IMPLEMENTATIONS["mosaic_gpu"] = {"implementation": "mosaic_gpu", "split": BLOCK, "interpret": RACES["mosaic_gpu"]}
KERNELS = [name for name in IMPLEMENTATIONS if name.startswith("mosaic")]
every_kernel = pytest.mark.parametrize("name", KERNELS)


def implementations(*fast):
    """All of them, slow where a kernel is interpreted, for seconds per call, and not named."""
    return pytest.mark.parametrize(
        "options",
        [
            pytest.param(options, id=name, marks=pytest.mark.slow if name in set(KERNELS) - set(fast) else ())
            for name, options in IMPLEMENTATIONS.items()
        ],
    )


def numpy_attention(q, k, v, start, mask, window=None, soft_cap=None, scale=None):
    """Row by row over the slots it sees; mask bool [batch, width, width]."""
    batch, width, heads, head_dim = q.shape
    group = heads // k.shape[1]
    out = np.zeros(q.shape)
    for b, w in np.ndindex(batch, width):
        position = start[b] + mask[b, w].sum() - 1
        first = 0 if window is None else max(position - window + 1, 0)
        slots = [*range(first, start[b]), *(start[b] + j for j in range(width) if mask[b, w, j])]
        for n in range(heads):
            keys, values = (x[b, n // group, slots].astype(np.float64) for x in (k, v))
            scores = keys @ q[b, w, n].astype(np.float64) * (head_dim**-0.5 if scale is None else scale)
            if soft_cap is not None:
                scores = soft_cap * np.tanh(scores / soft_cap)
            weights = np.exp(scores - scores.max())
            out[b, w, n] = weights / weights.sum() @ values
    return out


def inputs(batch, width, heads, kv_heads, head_dim, blocks, seed=0):
    rng = np.random.default_rng(seed)
    shape = (batch, kv_heads, blocks * BLOCK, head_dim)
    q = rng.normal(size=(batch, width, heads, head_dim)).astype(np.float32)
    return q, rng.normal(size=shape).astype(np.float32), rng.normal(size=shape).astype(np.float32)


def chain(batch, width):
    return np.broadcast_to(np.tril(np.ones((width, width), bool)), (batch, width, width))


def poison(k, v, start, width):
    """Whatever lies beyond the rows in flight must not leak."""
    for b, s in enumerate(start):
        k[b, :, s + width :] = np.nan
        v[b, :, s + width :] = np.nan


@functools.cache
def compiled(**options):
    return jax.jit(functools.partial(attention, **options))


def run(q, k, v, start, ancestors, dtype=jnp.float32, **options):
    q, k, v = (jnp.asarray(x).astype(dtype) for x in (q, k, v))
    out = compiled(**options)(q, k, v, jnp.asarray(start), jnp.asarray(ancestors))
    return np.asarray(out.astype(jnp.float32))


SHAPES = [  # width, heads, kv_heads, head_dim
    *[(5, 9, 3, 64), (1, 4, 4, 64), (8, 8, 1, 80), (3, 32, 1, 96), (2, 16, 1, 256), (9, 7, 7, 128), (4, 8, 2, 16)],
    *[(40, 4, 2, 16), (6, 14, 2, 32)],
]


@pytest.mark.parametrize(
    "width, heads, kv_heads, head_dim, options",
    [
        pytest.param(
            *shape,
            options,
            id=f"{name}-{shape}",
            marks=pytest.mark.slow if name == "mosaic_gpu" or name in KERNELS and i else (),
        )
        for name, options in IMPLEMENTATIONS.items()
        for i, shape in enumerate(SHAPES)
        # Interpreted, 7 sequences of 4 KV heads take a minute; 256 in float32 is more than a GPU's shared memory.
        if not (name == "mosaic_gpu" and (shape[2] > 3 or shape[3] == 256 or shape[0] == 40))
    ],
)
def test_equals_numpy_at_ragged_lengths_and_ignores_unused_slots(width, heads, kv_heads, head_dim, options):
    start = np.array([0, 1, BLOCK - width, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - width], np.int32)
    q, k, v = inputs(len(start), width, heads, kv_heads, head_dim, blocks=2)
    want = numpy_attention(q, k, v, start, chain(len(start), width))
    poison(k, v, start, width)
    np.testing.assert_allclose(run(q, k, v, start, chain_ancestors(width), **options), want, atol=1e-5)


@implementations()
def test_bfloat16_is_as_near_as_its_storage_allows(options):
    start = np.array([5, 2 * BLOCK - 9], np.int32)
    q, k, v = (np.asarray(jnp.asarray(x).astype(jnp.bfloat16), np.float32) for x in inputs(2, 4, 8, 2, 64, blocks=2))
    want = numpy_attention(q, k, v, start, chain(2, 4))
    got = run(q, k, v, start, chain_ancestors(4), jnp.bfloat16, **options)
    np.testing.assert_allclose(got, want, atol=4e-3, rtol=2**-8)


@implementations("mosaic_tpu")
@pytest.mark.parametrize(
    "window, soft_cap, scale", [(5, None, None), (130, None, 0.3), (None, 2.0, None), (9, 1.5, 1.0)]
)
def test_windows_soft_caps_and_scales(window, soft_cap, scale, options):
    """A window ends inside a block, or further back than the row is long; a soft cap bends every score."""
    start = np.array([0, 3, BLOCK + 7, 3 * BLOCK - 5], np.int32)
    q, k, v = inputs(len(start), 5, 6, 2, 32, blocks=3)
    want = numpy_attention(q, k, v, start, chain(len(start), 5), window, soft_cap, scale)
    poison(k, v, start, 5)
    got = run(q, k, v, start, chain_ancestors(5), window=window, soft_cap=soft_cap, scale=scale, **options)
    np.testing.assert_allclose(got, want, atol=1e-5)


@implementations()
@pytest.mark.parametrize(
    "parents",
    [(-1, 0, 1, 2), (-1, -1, -1, 0, 0, 1, 1, 2, 2), (-1, -1, 1, 1), (-1, 0, 0, -1, 3, 4), (-1,), tuple(range(-1, 39))],
    ids=["chain", "3x2", "second child only", "depths 1 3 1", "one node", "long chain"],
)
def test_trees_see_their_ancestors_only(parents, options):
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
    masks = np.broadcast_to(mask, (2, width, width))
    want = numpy_attention(q, k, v, start, masks)
    np.testing.assert_allclose(run(q, k, v, start, pack_ancestors(mask[None]), **options), want, atol=1e-5)


@pytest.mark.parametrize(
    "name, start",
    [("mosaic_tpu", 2 * BLOCK)] + [pytest.param("mosaic_gpu", 193, marks=pytest.mark.slow)] * ("mosaic_gpu" in KERNELS),
)
def test_a_window_begins_inside_a_committed_block_for_some_rows_only(name, start):
    """The first rows still see all of that block, the last ones not: it needs a mask."""
    width, window = 5, 130
    lowest, block = start - window + 1, BLOCK if name == "mosaic_tpu" else 64
    assert lowest <= -(-lowest // block) * block < lowest + width - 1
    q, k, v = inputs(1, width, 4, 2, 32, blocks=3)
    start = np.array([start], np.int32)
    want = numpy_attention(q, k, v, start, chain(1, width), window)
    got = run(q, k, v, start, chain_ancestors(width), window=window, **IMPLEMENTATIONS[name])
    np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("name", ["reference", "mosaic_tpu"])
def test_float32_is_multiplied_in_full(name):
    """A CPU does so anyway; accelerators only where they are told."""
    q, k, v = (jnp.asarray(x) for x in inputs(1, 2, 2, 2, 16, blocks=1))
    function = functools.partial(attention, **IMPLEMENTATIONS[name])
    text = str(jax.make_jaxpr(function)(q, k, v, jnp.zeros(1, jnp.int32), jnp.asarray(chain_ancestors(2))))
    products = text.count("dot_general[")
    assert products >= 2 and text.count("precision=(Precision.HIGHEST, Precision.HIGHEST)") == products


@implementations()
def test_a_window_ends_by_depth_in_a_tree(options):
    mask = ancestor_mask(np.array((-1, -1, -1, 0, 0, 1, 1, 2, 2)), 10)
    start = np.array([3, 100], np.int32)
    q, k, v = inputs(2, 10, 6, 2, 16, blocks=2)
    want = numpy_attention(q, k, v, start, np.broadcast_to(mask, (2, 10, 10)), window=10)
    got = run(q, k, v, start, pack_ancestors(mask[None]), window=10, **options)
    np.testing.assert_allclose(got, want, atol=1e-5)


@implementations("mosaic_tpu")
def test_rows_of_different_trees_in_one_batch(options):
    parents = np.array([[-1, 0, 1], [-1, -1, 0]])
    mask = np.asarray(ancestor_mask(jnp.asarray(parents), 4))
    q, k, v = inputs(2, 4, 4, 2, 16, blocks=1)
    start = np.array([5, 9], np.int32)
    got = run(q, k, v, start, pack_ancestors(mask), **options)
    np.testing.assert_allclose(got, numpy_attention(q, k, v, start, mask), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, dtype",
    [
        (name, dtype)
        for name in KERNELS
        for dtype in (jnp.float32, jnp.bfloat16)
        # The interpreter multiplies for wgmma with a product of this CPU, whose rows differ in the last bit by place.
        if (name, dtype) != ("mosaic_gpu", jnp.float32)
    ],
)
def test_a_kernel_gives_a_row_the_same_bits_in_any_company(dtype, name):
    """Wherever it stands in the tile, at every width up to the tile, in any batch, cache and number of steps' heads."""
    options = {**IMPLEMENTATIONS[name], "tile_rows": 32}
    length, group = 150, 4  # the row that comes after 150 tokens
    q, k, v = inputs(1, 8, 2 * group, 2, 64, blocks=2)
    want = None
    for width in (1, 2, 5, 8):
        for place in range(width):  # rows in front of it are in flight instead of committed
            start = np.array([length - place], np.int32)
            rows = np.concatenate([q[:, 8 - place :], q[:, :1], q[:, 1 : width - place]], axis=1)
            got = run(rows, k, v, start, chain_ancestors(width), dtype, **options)[0, place]
            want = got if want is None else want
            np.testing.assert_array_equal(got, want, err_msg=f"width {width}, place {place}")
    many = [np.concatenate([np.flip(x, 1), x, x + 1]) for x in (q[:, :3], k, v)]
    many[0][1], many[1][1], many[2][1] = q[0, :3], k[0], v[0]
    got = run(*many, np.array([3, length, 9], np.int32), chain_ancestors(3), dtype, **options)[1, 0]
    np.testing.assert_array_equal(got, want)
    longer = [np.pad(x, ((0, 0), (0, 0), (0, 3 * BLOCK), (0, 0)), constant_values=np.nan) for x in (k, v)]
    got = run(q[:, :1], *longer, np.array([length], np.int32), chain_ancestors(1), dtype, **options)[0, 0]
    np.testing.assert_array_equal(got, want)


@pytest.mark.slow
@every_kernel
def test_a_row_of_a_tree_in_depth_order_has_the_bits_of_the_chain(name):
    """Rows that it does not see weigh nothing, so only the order of those that it sees could make a difference."""
    options = {**IMPLEMENTATIONS[name], "tile_rows": 32}
    q, k, v = inputs(1, 5, 4, 2, 32, blocks=2)
    start = np.array([70], np.int32)
    mask = ancestor_mask(np.array([-1, 0, 1, -1]), 5)
    tree = run(q, k, v, start, pack_ancestors(mask[None]), **options)
    line = run(q[:, :4], k, v, start, chain_ancestors(4), **options)
    np.testing.assert_array_equal(tree[:, :4], line)


def test_a_row_of_a_tree_is_within_a_rounding_of_the_chain():
    """Not always the same bits: siblings in between move its ancestors to other terms of the same sums."""
    parents = (-1, -1, -1, 0, 0, 1, 1, 2, 2)
    width, start = len(parents) + 1, np.array([67], np.int32)
    mask = ancestor_mask(np.array(parents), width)
    q, k, v = inputs(1, width, 8, 2, 64, blocks=2)
    tree = run(q, k, v, start, pack_ancestors(mask[None]), **IMPLEMENTATIONS["reference tiles"])
    different = []
    for row in range(width):
        path = mask[row].nonzero()[0]
        at, end = 67 + path, slice(67, 67 + len(path))
        line_k, line_v = k.copy(), v.copy()
        line_k[:, :, end], line_v[:, :, end] = k[:, :, at], v[:, :, at]
        line = run(q[:, path], line_k, line_v, start, chain_ancestors(len(path)), **IMPLEMENTATIONS["reference tiles"])
        np.testing.assert_allclose(tree[:, row], line[:, -1], rtol=0, atol=2e-7)
        different.append(not np.array_equal(tree[:, row], line[:, -1]))
    assert not any(different[:2]) and any(different)


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(2 * BLOCK, id="two thirds of a cache"),
        pytest.param(None, id="more than the cache", marks=pytest.mark.slow),
    ],
)
def test_a_block_may_reach_beyond_the_cache(block):
    start = np.array([3, 3 * BLOCK - 4, 2 * BLOCK + 1], np.int32)
    q, k, v = inputs(3, 4, 4, 2, 16, blocks=3)
    want = numpy_attention(q, k, v, start, chain(3, 4))
    options = {**IMPLEMENTATIONS["mosaic_tpu"], "block": block}
    np.testing.assert_allclose(run(q, k, v, start, chain_ancestors(4), **options), want, atol=1e-5)


def test_rows_in_flight_beyond_the_cache_are_not_seen():
    """No decoder makes any; the kernel's last block holds something there all the same."""
    start = np.array([3 * BLOCK - 2], np.int32)
    q, k, v = inputs(1, 4, 4, 2, 16, blocks=3)
    want = run(q, k, v, start, chain_ancestors(4), implementation="reference")
    got = run(q, k, v, start, chain_ancestors(4), **{**IMPLEMENTATIONS["mosaic_tpu"], "block": 2 * BLOCK})
    np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize(
    "rows",
    [pytest.param(16, id="five tokens"), pytest.param(2, id="less than a token's group", marks=pytest.mark.slow)],
)
def test_a_flight_longer_than_a_tile_takes_several(rows):
    start = np.array([0, 100], np.int32)
    q, k, v = inputs(2, 11, 6, 2, 16, blocks=1)
    want = numpy_attention(q, k, v, start, chain(2, 11))
    got = run(q, k, v, start, chain_ancestors(11), **IMPLEMENTATIONS["mosaic_tpu"], tile_rows=rows)
    np.testing.assert_allclose(got, want, atol=1e-5)


@every_kernel
def test_a_kernel_has_no_race_and_reads_nothing_uninitialised(name):
    """For a GPU two splits of one row, and two of its stages."""
    start = np.array([60, 130], np.int32)
    q, k, v = inputs(2, 3, 4, 2, 16, blocks=2)
    got = run(q, k, v, start, chain_ancestors(3), **{**IMPLEMENTATIONS[name], "interpret": RACES[name]})
    np.testing.assert_allclose(got, numpy_attention(q, k, v, start, chain(2, 3)), atol=1e-5)


@pytest.mark.slow
@pytest.mark.skipif("mosaic_gpu" not in KERNELS, reason="this jax cannot interpret the GPU kernel")
@pytest.mark.parametrize(
    "width, heads, kv_heads, head_dim, window",
    [(33, 6, 2, 64, None), (33, 6, 2, 64, 50), (2, 16, 1, 256, None), (140, 2, 1, 64, None)],
    ids=["two warpgroups", "two warpgroups, window", "chunks of columns", "two tiles"],
)
def test_the_gpu_kernel_in_bfloat16(width, heads, kv_heads, head_dim, window):
    start = np.array([0, 64, 3 * BLOCK - width], np.int32)
    q, k, v = inputs(3, width, heads, kv_heads, head_dim, blocks=3)
    q, k, v = (np.array(jnp.asarray(x, jnp.bfloat16), np.float32) for x in (q, k, v))
    want = numpy_attention(q, k, v, start, chain(3, width), window)
    poison(k, v, start, width)
    got = run(q, k, v, start, chain_ancestors(width), jnp.bfloat16, window=window, **IMPLEMENTATIONS["mosaic_gpu"])
    np.testing.assert_allclose(got, want, atol=4e-3, rtol=2**-8)


def test_bit_zero_stands_for_the_committed_slots():
    for width in (1, 30, 31, 32, 40, 64):
        mask = np.random.default_rng(width).random((2, width, width)) < 0.5
        got = np.asarray(flag_committed(jnp.asarray(pack_ancestors(mask)), width))
        want = np.concatenate([np.ones((2, width, 1), bool), mask], axis=2)
        assert got.shape[-1] == -(-(width + 1) // 32)
        bits = (got[..., None] >> np.arange(32, dtype=np.uint32)) & 1
        np.testing.assert_array_equal(bits.reshape(2, width, -1)[..., : width + 1], want)


def test_without_a_name_the_device_decides():
    """On this CPU that is the reference, to the bit."""
    start = np.array([5], np.int32)
    q, k, v = inputs(1, 3, 4, 2, 16, blocks=1)
    operands = (*map(jnp.asarray, (q, k, v, start)), jnp.asarray(chain_ancestors(3)))
    want = attention(*operands, implementation="reference")
    np.testing.assert_array_equal(np.asarray(attention(*operands)), np.asarray(want))


def test_sizes_that_do_not_fit_are_refused():
    q, k, v = (jnp.asarray(x) for x in inputs(1, 2, 6, 4, 16, blocks=1))
    start, ancestors = jnp.zeros(1, jnp.int32), jnp.asarray(chain_ancestors(2))
    with pytest.raises(ValueError, match="heads=6 must be a multiple of kv_heads=4"):
        attention(q, k, v, start, ancestors)
    q = q[:, :, :4]
    with pytest.raises(ValueError, match="capacity 100 must be a multiple of 128"):
        attention(q, k[:, :, :100], v[:, :, :100], start, ancestors)
    with pytest.raises(ValueError, match=r"must be \[1, kv_heads, capacity, 16\]"):
        attention(q, k, v[..., :8], start, ancestors)
    with pytest.raises(ValueError, match="must all be float32 or all bfloat16, got float32, bfloat16"):
        attention(q, k.astype(jnp.bfloat16), v, start, ancestors)
    with pytest.raises(ValueError, match=r"ancestors \(1, 3, 1\) must be"):
        attention(q, k, v, start, jnp.asarray(chain_ancestors(3)))
    with pytest.raises(ValueError, match="window=1 must be at least the 2 rows in flight"):
        attention(q, k, v, start, ancestors, window=1)
    with pytest.raises(ValueError, match="scale=-1.0 must be above 0"):
        attention(q, k, v, start, ancestors, scale=-1.0)
    with pytest.raises(ValueError, match="soft_cap=0.0 must be above 0"):
        attention(q, k, v, start, ancestors, soft_cap=0.0)
    with pytest.raises(ValueError, match="'triton' must be one of reference, mosaic_tpu, mosaic_gpu"):
        attention(q, k, v, start, ancestors, implementation="triton")
    for name, needed in (("mosaic_gpu", "a Hopper GPU"), ("mosaic_tpu", "a TPU")):
        with pytest.raises(ValueError, match=f"'{name}' needs {needed}.* the device is 'cpu'"):
            attention(q, k, v, start, ancestors, implementation=name)
    with pytest.raises(ValueError, match="interpret=True is not known for the GPU kernel"):
        attention(q, k, v, start, ancestors, implementation="mosaic_gpu", interpret=True)
    with pytest.raises(ValueError, match="tile_rows=-5 must be at least 1"):
        attention(q, k, v, start, ancestors, tile_rows=-5)
    with pytest.raises(ValueError, match="block=128 belongs to a kernel"):
        attention(q, k, v, start, ancestors, block=128)
    with pytest.raises(ValueError, match="split=128 belongs to the GPU kernel; mosaic_tpu"):
        attention(q, k, v, start, ancestors, split=128, implementation="mosaic_tpu", interpret=True)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"tile_rows": 512}, "tile_rows=512 must be from 1 to 256"),
        ({"tile_rows": 0}, "tile_rows=0 must be from 1 to 256"),
        ({"block": 16384}, "block=16384 must be at most 8192 for head_dim=128"),
        ({"block": 100}, "block=100 must be a multiple of 128"),
        ({"heads": 3}, "heads=3 of a step must divide the 8 KV heads"),
    ],
)
def test_block_sizes_that_the_kernel_cannot_take_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        block_sizes.tpu_sizes((1, 2, 32, 128), (1, 8, 1024, 128), jnp.bfloat16, **given)


@pytest.mark.parametrize(
    "shape, dtype, given, message",
    [
        ((2, 32, 8, 128), jnp.bfloat16, {"tile_rows": 200}, "tiles of 200 rows .* must be from 1 to 128"),
        ((2, 32, 8, 128), jnp.float32, {"tile_rows": 65}, "must be from 1 to 64 for head_dim=128 in float32"),
        ((2, 96, 1, 64), jnp.float32, {}, "tiles of 96 rows .* the query heads per KV head.* must be from 1 to 64"),
        ((2, 32, 8, 128), jnp.bfloat16, {"block": 32}, "block=32 must be 64 or 128"),
        ((2, 32, 8, 128), jnp.bfloat16, {"split": 100}, "split=100 must be a multiple of block=64"),
        ((2, 32, 8, 100), jnp.bfloat16, {}, "head_dim=100 must be a multiple of 16"),
        ((2, 32, 8, 160), jnp.bfloat16, {}, "head_dim=160 must be a multiple of 16 up to 128, or 256"),
        ((2, 32, 8, 256), jnp.float32, {}, "head_dim=256 in float32 with block=64 does not fit the shared memory"),
        ((2, 32, 8, 256), jnp.bfloat16, {"block": 128}, "with block=128 does not fit the shared memory"),
    ],
)
def test_block_sizes_that_a_gpu_cannot_take_are_refused(shape, dtype, given, message):
    width, heads, kv_heads, head_dim = shape
    q_shape, kv_shape = (1, width, heads, head_dim), (1, kv_heads, 1024, head_dim)
    with pytest.raises(ValueError, match=message):
        block_sizes.gpu_sizes(q_shape, kv_shape, dtype, **given)
    assert block_sizes.fits_gpu(q_shape, kv_shape, dtype) == bool(given)


@pytest.mark.parametrize("kind", [None, "TPU v4", "TPU v6 lite", "TPU7x"])
def test_block_sizes_depend_on_neither_batch_nor_capacity(kind):
    """Nor does the KV block on the width: it decides about bits."""
    sizes = {
        block_sizes.tpu_sizes((b, 8, 32, 128), (b, 8, c, 128), jnp.bfloat16, kind=kind)
        for b in (1, 64)
        for c in (512, 65536)
    }
    assert len(sizes) == 1
    blocks = {
        block_sizes.tpu_sizes((1, w, 32, 128), (1, 8, 512, 128), jnp.bfloat16, kind=kind).block for w in (1, 8, 64)
    }
    assert len(blocks) == 1


def test_a_given_block_comes_before_the_devices_and_that_before_the_usual_one():
    def block(head_dim=128, dtype=jnp.bfloat16, **given):
        return block_sizes.tpu_sizes((1, 8, 32, head_dim), (1, 8, 4096, head_dim), dtype, **given).block

    assert block_sizes.TPU_BLOCKS["TPU v6 lite", 128, "bfloat16"] == block(kind="TPU v6 lite") != block_sizes.TPU.block
    assert block(kind="TPU v6 lite", block=512) == 512
    usual = [{}, {"kind": "TPU v4"}, {"kind": "cpu"}, {"kind": "TPU v6 lite", "dtype": jnp.float32}]
    assert {block(**given) for given in usual} == {block(kind="TPU v6 lite", head_dim=96)} == {block_sizes.TPU.block}
    for (kind, head_dim, _), found in block_sizes.TPU_BLOCKS.items():
        assert found % BLOCK == 0 and found != block_sizes.TPU.block
        known = devices.known_device(kind)
        assert known is not None and known.title.startswith("TPU") and head_dim in (64, 128)
