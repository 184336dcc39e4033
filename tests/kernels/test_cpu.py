"""The CPU kernels: right results, bits that depend on the row alone, models in the packed layout, and doing without.

These tests fail, they do not skip, on a machine that has a compiler but whose kernels cannot be used.
"""

import dataclasses
import functools
import json
import os
import re
import shutil
import subprocess
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file
from tiny import TreeDrafter, model_of, numpy_logits, plain, prompts_of, script

import spec_jax
from spec_jax import cache as kv
from spec_jax.exactness import row_blocks
from spec_jax.generation import generate
from spec_jax.kernels import cpu
from spec_jax.kernels.attention import attention
from spec_jax.kernels.masks import chain_ancestors, pack_ancestors
from spec_jax.models.config import LlamaConfig, from_hf_config, param_shapes, tensor_specs
from spec_jax.models.layers import RowBlocks
from spec_jax.models.llama import Llama, init_params
from spec_jax.models.loading import load_model
from spec_jax.models.packing import pack, pack_params, packed_shapes, unpack, unpack_params
from spec_jax.sampling_params import SamplingParams
from spec_jax.tree import ancestor_mask

HAS_COMPILER = bool(os.environ.get("CXX") or any(map(shutil.which, cpu.COMPILERS)))
DTYPES = ("float32", "bfloat16")
KINDS = [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")]
"""dtypes of a product's input and of its result."""
MOST = 64
"""Rows of the largest product, of which smaller ones are parts."""
CAPACITY = 2 * kv.BLOCK


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """The kernels, compiled and registered."""
    if jax.default_backend() != "cpu":
        pytest.skip(f"the default device is a {jax.default_backend()}")
    if not HAS_COMPILER:
        pytest.skip("there is no C++ compiler on this machine")
    switched = cpu.SWITCH in os.environ  # the whole suite may run without them
    if switched:
        monkeypatch.delenv(cpu.SWITCH)
        cpu.unavailable.cache_clear()
    assert cpu.unavailable() is None
    yield
    if switched:
        cpu.unavailable.cache_clear()


@pytest.fixture
def asked_again(monkeypatch):
    """`cpu.unavailable`, which forgets its answer before and after the test."""
    cpu.unavailable.cache_clear()
    yield cpu.unavailable
    cpu.unavailable.cache_clear()


def normal(shape, dtype="float32", seed=0, scale=1.0):
    """Random numbers in a NumPy array: its slices cost no compilation."""
    return (np.random.default_rng(seed).standard_normal(shape, np.float32) * np.float32(scale)).astype(jnp.dtype(dtype))


def without(x, active):
    """x with NaN in the rows that are not active."""
    return np.where(active.reshape(active.shape + (1,) * (x.ndim - active.ndim)), x, np.nan).astype(x.dtype)


def wide(x):
    return np.asarray(x, np.float64)


def assert_same_bits(got, want, message=""):
    """Equal bit for bit, NaNs and zeros too."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.dtype == want.dtype
    kind = {2: np.uint16, 4: np.uint32}[got.dtype.itemsize]
    np.testing.assert_array_equal(got.view(kind), want.view(kind), err_msg=message)


def assert_zeros(x):
    np.testing.assert_array_equal(np.asarray(x, np.float32), 0)


# --- products ---------------------------------------------------------------------------------------------------------

_packed = jax.jit(pack)


def product(x, weight, active=None, bias=None, out=None):
    """x times a plain weight, by the kernel."""
    active = np.ones(len(x), bool) if active is None else active
    return np.asarray(_product(x, _packed(weight), active, bias, weight.shape[1], jnp.dtype(out or x.dtype)))


@functools.partial(jax.jit, static_argnums=(4, 5))
def _product(x, packed, active, bias, outputs, out):
    return cpu.product(x, packed, outputs, active, bias, out)


@pytest.mark.parametrize("dtype, out", KINDS)
@pytest.mark.parametrize("shape", [(1, 1), (5, 17), (33, 7), (191, 48), (193, 33), (400, 100), (576, 16)], ids=str)
def test_products_are_right_and_have_the_same_bits_at_every_row_count(shape, dtype, out):
    x, weight = normal((MOST, shape[0]), dtype, 1), normal(shape, dtype, 2)
    whole = product(x, weight, out=out)
    assert whole.shape == (MOST, shape[1]) and whole.dtype == out
    size = np.abs(wide(x)) @ np.abs(wide(weight))
    error = np.abs(wide(whole) - wide(x) @ wide(weight))
    assert (error <= 1e-6 * size + (2**-8 * np.abs(wide(whole)) if out == "bfloat16" else 0)).all()
    for count in (1, 5, 8, 20):
        assert_same_bits(product(x[:count], weight, out=out), whole[:count], f"the first {count} rows")
        assert_same_bits(product(x[-count:], weight, out=out), whole[-count:], f"the last {count} rows")
    for count in (0, *range(1, 21), 33):
        active = np.random.default_rng(count).permutation(MOST) < count
        got = product(without(x, active), weight, active, out=out)
        assert_same_bits(got[active], whole[active], f"{count} rows among others")


@pytest.mark.parametrize("dtype, out", KINDS)
def test_a_bias_is_added_to_the_float32_sum(dtype, out):
    x, weight, bias = normal((21, 40), dtype, 1), normal((40, 35), dtype, 2), normal(35, out, 3)
    sums = product(x.astype(np.float32), weight.astype(np.float32))  # the same sums, not rounded
    assert_same_bits(product(x, weight, bias=bias, out=out), (sums + bias.astype(np.float32)).astype(bias.dtype))
    assert_same_bits(product(x, weight, out=out), sums.astype(bias.dtype))


def test_bfloat16_results_are_rounded_to_nearest_ties_to_even():
    """Sums of two bfloat16 numbers, half of them ties."""
    coarse, fine = np.meshgrid(np.arange(128, 256), np.arange(-16, 17) / 16)
    x = np.stack([coarse.ravel(), fine.ravel()], 1).astype(jnp.bfloat16)
    x = np.concatenate([x, -x, np.array([[3.38e38, 2e36], [np.inf, 1], [-np.inf, 1], [0, np.nan]], x.dtype)])
    got = product(x, np.ones((2, 1), x.dtype))[:, 0]
    want = x.astype(np.float32).sum(1)
    np.testing.assert_array_equal(wide(got), wide(want.astype(x.dtype)))
    assert np.isinf(wide(got)[-4]) and np.isnan(wide(got)[-1])


@pytest.mark.parametrize("dtype, out", KINDS)
def test_a_nan_stays_in_its_row_and_is_noticed(dtype, out):
    x = normal((9, 40), dtype)
    x[4, 7] = np.nan
    got = np.isnan(product(x, normal((40, 35), dtype, 2), out=out).astype(np.float32))
    assert got[4].all() and got.sum() == 35


def test_numbers_too_small_to_be_normal_are_treated_alike_on_every_thread():
    x, weight = np.full((3, 1), 1e-19, np.float32), np.full((1, 16 * 999), 1e-20, np.float32)
    assert len(np.unique(product(x, weight))) == 1


def test_reading_a_buffer_sums_it():
    for count in (64, 1 << 16, (1 << 16) + 640):
        assert cpu.read(jnp.ones(count)) == count


# --- norms ------------------------------------------------------------------------------------------------------------

_norm = jax.jit(cpu.rms_norm, static_argnums=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner, size", [((), 1), ((), 33), ((), 576), ((3,), 6), ((7,), 80)], ids=str)
def test_norms_are_right_and_have_the_same_bits_at_every_row_count(inner, size, dtype):
    x, weight = normal((MOST, *inner, size), dtype, 1, scale=30), normal(size, dtype, 2)
    whole = np.asarray(_norm(x, weight, 1e-5, np.ones(MOST, bool)))
    assert whole.shape == x.shape and whole.dtype == x.dtype
    want = wide(x) / np.sqrt((wide(x) ** 2).mean(-1, keepdims=True) + 1e-5) * wide(weight)
    np.testing.assert_allclose(wide(whole), want, rtol=1e-6 if dtype == "float32" else 2**-7, atol=1e-30)
    for count in (1, 5):
        assert_same_bits(_norm(x[:count], weight, 1e-5, np.ones(count, bool)), whole[:count])
    for count in (0, 1, 20):
        active = np.random.default_rng(count).permutation(MOST) < count
        got = np.asarray(_norm(without(x, active), weight, 1e-5, active))
        assert_same_bits(got[active], whole[active])


def test_norms_of_zeros_are_zeros_and_of_a_nan_are_nan():
    x = np.zeros((3, 8), np.float32)
    x[1, 2] = np.nan
    got = np.asarray(_norm(x, np.ones(8, np.float32), 1e-5, np.ones(3, bool)))
    assert np.isnan(got[1]).all()
    assert_zeros(got[[0, 2]])


# --- SwiGLU -----------------------------------------------------------------------------------------------------------

_swiglu = jax.jit(cpu.swiglu)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 37, 1536])
def test_swiglu_is_right_and_has_the_same_bits_at_every_row_count(size, dtype):
    x = normal((MOST, 2 * size), dtype, 1, scale=12)
    whole = np.asarray(_swiglu(x, np.ones(MOST, bool)))
    gate, up = wide(x)[:, :size], wide(x)[:, size:]
    np.testing.assert_allclose(wide(whole), gate / (1 + np.exp(-gate)) * up, rtol=1e-5 if dtype == "float32" else 2**-7)
    for count in (0, 1, 20):
        active = np.random.default_rng(count).permutation(MOST) < count
        got = np.asarray(_swiglu(without(x, active), active))
        assert_same_bits(got[active], whole[active])


def test_swiglu_far_from_zero_and_of_a_nan():
    gate = np.array([[-1e4, -104, -88, -87, 0, 88, 1e4, np.nan]], np.float32)
    got = wide(_swiglu(np.concatenate([gate, np.ones_like(gate)], axis=1), np.ones(1, bool)))[0]
    assert (np.abs(got[:3]) < 1e-35).all() and got[4] == 0 and got[5] == 88 and got[6] == 1e4 and np.isnan(got[7])
    assert got[3] == pytest.approx(-87 * np.exp(-87.0), rel=1e-5)


# --- attention --------------------------------------------------------------------------------------------------------

_attention = jax.jit(cpu.attention)


@dataclasses.dataclass
class Flight:
    """Arguments of `cpu.attention`."""

    q: np.ndarray
    k_new: np.ndarray
    v_new: np.ndarray
    k: np.ndarray
    v: np.ndarray
    start: np.ndarray
    ancestors: np.ndarray
    active: np.ndarray
    write: np.ndarray

    def run(self, **changed):
        """The result and the cache, with some arguments changed."""
        return tuple(map(np.asarray, _attention(*vars(dataclasses.replace(self, **changed)).values())))


def flight(start, width, heads, kv_heads, head_dim, dtype="float32", mask=None, capacity=CAPACITY):
    """A flight behind `start` committed slots, a chain unless there is a `mask`; unused slots hold NaN."""
    start, batch = np.asarray(start, np.int32), len(start)
    committed = np.broadcast_to((np.arange(capacity) < start[:, None])[:, None], (batch, kv_heads, capacity))
    k, v = (without(normal((batch, kv_heads, capacity, head_dim), dtype, seed), committed) for seed in (4, 5))
    return Flight(
        q=normal((batch, width, heads, head_dim), dtype, 1),
        k_new=normal((batch, width, kv_heads, head_dim), dtype, 2),
        v_new=normal((batch, width, kv_heads, head_dim), dtype, 3),
        k=k,
        v=v,
        start=start,
        ancestors=chain_ancestors(width) if mask is None else pack_ancestors(np.asarray(mask)),
        active=np.ones((batch, width), bool),
        write=np.ones(batch, bool),
    )


@jax.jit
def _by_xla(q, k_new, v_new, k, v, start, ancestors):
    k, v = (kv.write_rows(slots, new.transpose(0, 2, 1, 3), start) for slots, new in ((k, k_new), (v, v_new)))
    return attention(q, k, v, start, ancestors), k, v


def by_xla(f):
    """What a plain model does with the same flight: write, then attend."""
    return tuple(map(np.asarray, _by_xla(f.q, f.k_new, f.v_new, f.k, f.v, f.start, f.ancestors)))


def by_numpy(f):
    """The attention of a chain in float64, over the cache that the kernel wrote."""
    _, k, v = map(wide, f.run())
    batch, width, heads, head_dim = f.q.shape
    out, per_kv_head = np.zeros(f.q.shape), heads // k.shape[1]
    for b, w, n in np.ndindex(batch, width, heads):
        slots = slice(0, f.start[b] + w + 1)
        scores = k[b, n // per_kv_head, slots] @ wide(f.q)[b, w, n] / np.sqrt(head_dim)
        weights = np.exp(scores - scores.max())
        out[b, w, n] = weights / weights.sum() @ v[b, n // per_kv_head, slots]
    return out


# width, heads, KV heads, head_dim
SHAPES = [
    (1, 4, 4, 16),
    (5, 9, 3, 64),
    (8, 8, 1, 80),
    (3, 3, 1, 6),
    (4, 4, 1, 8),
    (9, 7, 7, 128),
    (2, 14, 2, 96),
    (2, 4, 2, 256),
    (40, 4, 2, 16),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_is_right_at_ragged_lengths_up_to_a_full_cache(shape, dtype):
    f = flight([0, 1, kv.BLOCK - 1, kv.BLOCK, CAPACITY - shape[0], CAPACITY - 1], *shape, dtype)
    got = f.run()[0]
    assert got.dtype == dtype
    np.testing.assert_allclose(wide(got), by_numpy(f), rtol=2**-8 if dtype == "bfloat16" else 0, atol=5e-6)


@pytest.mark.parametrize(
    "dtype, tolerance, shape",
    [("float32", 1e-5, SHAPES[1]), ("float32", 1e-5, SHAPES[3]), ("bfloat16", 0.02, SHAPES[2])],
)
def test_attention_equals_that_of_a_plain_model(dtype, tolerance, shape):
    """In bfloat16 XLA rounds its weights, so the two differ by that much."""
    f = flight([0, 1, kv.BLOCK - 1, kv.BLOCK, CAPACITY - shape[0], CAPACITY - 1], *shape, dtype)
    (got, k, v), (want, want_k, want_v) = f.run(), by_xla(f)
    np.testing.assert_allclose(wide(got), wide(want), atol=tolerance)
    assert_same_bits(k, want_k)
    assert_same_bits(v, want_v)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "parents",
    [(-1, -1, -1, 0, 0, 1, 1, 2, 2), (-1, -1, 1, 1), (-1, 0, 0, -1, 3, 4), tuple(range(-1, 39)), (-1,) * 3 + (2,) * 36],
    ids=["3x2", "second child only", "depths 1 3 1", "long chain", "two words"],
)
def test_a_row_of_a_tree_has_the_bits_of_the_row_of_a_chain(parents, dtype):
    width = len(parents) + 1
    mask = np.asarray(ancestor_mask(np.array(parents), width))
    f = flight([0, 3, 100], width, 6, 2, 16, dtype, mask[None])
    got = f.run()[0]
    if dtype == "float32":
        np.testing.assert_allclose(got, by_xla(f)[0], atol=1e-5)
    for row in {0, *range(1, width, 2), width - 1}:
        line = mask[row].nonzero()[0]
        order = np.concatenate([line, np.setdiff1d(np.arange(width), line)])  # the row and its ancestors in front
        chain = {name: getattr(f, name)[:, order] for name in ("q", "k_new", "v_new")}
        active = np.broadcast_to(np.arange(width) < len(line), (3, width))
        alone = f.run(**chain, ancestors=chain_ancestors(width), active=active)[0]
        assert_same_bits(alone[:, len(line) - 1], got[:, row], f"row {row}")


def test_every_sequence_of_a_batch_may_have_a_tree_of_its_own():
    mask = np.asarray(ancestor_mask(jnp.array([[-1, 0, 1], [-1, -1, 0]]), 4))
    f = flight([5, 9], 4, 4, 2, 16, mask=mask)
    np.testing.assert_allclose(f.run()[0], by_xla(f)[0], atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads, kv_heads, head_dim", [(6, 2, 22), (3, 1, 64)])
def test_attention_has_the_same_bits_at_every_width_batch_and_place(heads, kv_heads, head_dim, dtype):
    count = 20
    f = flight([7, 0, 120], count, heads, kv_heads, head_dim, dtype)
    whole = f.run()
    for width, chosen in ((1, [1]), (3, [2, 0]), (7, [0]), (8, [1, 1, 0, 2])):
        k, v, out, batch = f.k[chosen], f.v[chosen], [], len(chosen)
        for at in range(0, count, width):
            rows = np.minimum(np.arange(at, at + width), count - 1)
            active = np.broadcast_to(np.arange(at, at + width) < count, (batch, width))
            cut = (x[chosen][:, rows] for x in (f.q, f.k_new, f.v_new))
            seen, k, v = Flight(
                *cut, k, v, f.start[chosen] + np.int32(at), chain_ancestors(width), active, np.ones(batch, bool)
            ).run()
            out.append(seen)
        got = np.concatenate(out, 1)[:, :count], k, v
        for x, y in zip(got, whole, strict=True):
            assert_same_bits(x, y[chosen], f"width {width}, sequences {chosen}")


def test_only_active_rows_of_writing_sequences_are_written_and_computed():
    sees_itself = np.eye(6, dtype=bool)[None]  # and the committed slots: no row depends on another one
    f = flight([0, 3, 50, CAPACITY - 2], 6, 4, 2, 16, mask=sees_itself)
    active, write = np.random.default_rng(6).random((4, 6)) < 0.6, np.array([True, False, True, True])
    changed = {name: without(getattr(f, name), active) for name in ("q", "k_new", "v_new")}
    f = dataclasses.replace(f, k=np.nan_to_num(f.k), v=np.nan_to_num(f.v))  # so that a NaN written is seen
    got, *cache = f.run(**changed, active=active, write=write)
    want, *whole_cache = f.run()
    written = active & write[:, None]
    assert_same_bits(got[written], want[written])
    for slots, before, after in zip(cache, (f.k, f.v), whole_cache, strict=True):
        expected = before.copy()
        for b, w in zip(*written.nonzero(), strict=True):
            expected[b, :, f.start[b] + w : f.start[b] + w + 1] = after[b, :, f.start[b] + w : f.start[b] + w + 1]
        assert_same_bits(slots, expected)


def test_where_nothing_is_active_nothing_is_read_or_written():
    f = flight([0, 9], 3, 4, 2, 16)
    _, k, v = f.run(active=np.zeros((2, 3), bool), q=np.full_like(f.q, np.nan))
    assert_same_bits(k, f.k)
    assert_same_bits(v, f.v)


def test_a_full_cache_drops_what_lies_beyond_it():
    f = flight([CAPACITY, CAPACITY - 1, CAPACITY + 5], 3, 4, 2, 16)
    got, k, v = f.run()
    for slots, before, new in ((k, f.k, f.k_new), (v, f.v, f.v_new)):
        expected = before.copy()
        expected[1, :, -1] = new[1, 0]
        assert_same_bits(slots, expected)
    everything = attention(f.q, k, v, np.full(3, CAPACITY, np.int32), jnp.zeros((1, 3, 1), jnp.uint32))
    np.testing.assert_allclose(got, everything, atol=1e-5)


def test_a_row_that_sees_nothing_is_zeros():
    f = flight([0, 2], 2, 4, 2, 16, mask=np.array([[[False, False], [False, True]]]))
    got = f.run()[0]
    assert_zeros(got[0, 0])
    assert np.isfinite(got).all() and (got[1, 0] != 0).all()


def test_donated_slots_are_written_in_place_and_others_are_copied():
    f = flight([5, 100], 4, 4, 2, 16)
    _, want_k, want_v = f.run()
    kept = jnp.asarray(f.k)
    _, k, _ = _attention(*vars(dataclasses.replace(f, k=kept)).values())
    assert_same_bits(kept, f.k)
    assert_same_bits(k, want_k)
    in_place = jax.jit(cpu.attention, donate_argnums=(3, 4))
    k, v = jnp.array(f.k), jnp.array(f.v)
    places = [x.unsafe_buffer_pointer() for x in (k, v)]
    _, k, v = in_place(*vars(dataclasses.replace(f, k=k, v=v)).values())
    assert [x.unsafe_buffer_pointer() for x in (k, v)] == places
    assert_same_bits(k, want_k)
    assert_same_bits(v, want_v)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_in_a_query_or_in_a_slot_that_is_seen_is_noticed(dtype):
    f = flight([10, 20], 3, 4, 2, 16, dtype)

    def nans(name, at):
        x = getattr(f, name).copy()
        x[at] = np.nan
        return np.isnan(f.run(**{name: x})[0].astype(np.float32))

    got = nans("q", (1, 2, 3, 0))
    assert got[1, 2, 3].all() and got.sum() == 16
    for slot in (0, 5, 9):
        got = nans("k", (0, 1, slot, 2))
        assert got[0, :, 2:].all() and got.sum() == got[0, :, 2:].size  # the two heads of KV head 1
    got = nans("v", (0, 1, 5, 2))
    assert got[0, :, 2:, 2].all() and got.sum() == 3 * 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_very_long_rows(dtype):
    f = flight([8190, 5000], 2, 2, 1, 24, dtype, capacity=8192)
    np.testing.assert_allclose(wide(f.run()[0]), by_numpy(f), rtol=2**-8 if dtype == "bfloat16" else 0, atol=2e-6)


def test_the_exponential_is_right_over_its_whole_range():
    """Two slots of scores 0 and s and values 0 and 1: what is seen is exp(s) / (1 + exp(s))."""
    low = [-87.25, -88, -103, -1e4, -1e30, -np.inf, np.nan]
    scores = np.concatenate([np.linspace(0, -87, 4001), low]).astype(np.float32)
    f = flight(np.ones_like(scores, np.int32), 1, 1, 1, 4, capacity=2)
    f = dataclasses.replace(f, **{name: np.zeros_like(getattr(f, name)) for name in ("q", "k_new", "v_new", "k", "v")})
    f.q[..., 0] = 2  # 1 after scaling
    f.k_new[:, 0, 0, 0], f.v_new[...] = scores, 1
    got, want = wide(f.run()[0])[:, 0, 0, 0], np.exp(wide(scores)) / (1 + np.exp(wide(scores)))
    inside = scores >= -87
    np.testing.assert_allclose(got[inside], want[inside], rtol=4e-7)
    assert_zeros(got[scores < -87])
    assert np.isnan(got[-1])


# --- the packed layout ------------------------------------------------------------------------------------------------

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_layers": 1,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}
CONFIGS = {
    "plain": LlamaConfig(**SIZES),
    "biases": LlamaConfig(**SIZES | {"vocab_size": 101}, qkv_bias=True, output_bias=True, mlp_bias=True),
    "tied, qk norm": LlamaConfig(**SIZES | {"num_layers": 2, "head_dim": 6}, qk_norm=True, tie_embeddings=True),
    "odd sizes": LlamaConfig(33, 50, 70, 1, 7, 1, 22, qkv_bias=True),
}


@functools.lru_cache
def twins(name="plain", dtype="float32"):
    """A random model, biases and norms too, and the same one in the packed layout."""

    def draw(path, shape):
        kind = path[-1].key
        x = normal(shape, seed=len(jax.tree_util.keystr(path)) + sum(shape))
        if kind.endswith("norm"):
            x = 1 + x / 8
        elif kind.endswith("bias"):
            x = x / 8
        else:
            x *= (6 if kind == "lm_head" else 1) / shape[kind in ("embedding", "lm_head")] ** 0.5
        return jnp.asarray(x, dtype)

    config = CONFIGS[name]
    is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
    params = jax.tree_util.tree_map_with_path(draw, param_shapes(config), is_leaf=is_shape)
    packed = jax.jit(lambda params: pack_params(dict(params)))(params)
    return model_of(Llama(config, dtype), params), model_of(Llama(config, dtype, packed=True), packed)


@pytest.mark.parametrize("shape", [(1, 1), (7, 16), (5, 33), (3, 47)], ids=str)
def test_a_packed_weight_holds_each_output_in_its_place(shape):
    weight = normal(shape)
    packed = np.asarray(pack(weight))
    assert packed.shape == (-(-shape[1] // cpu.PANEL), shape[0], cpu.PANEL)
    for k in range(shape[0]):
        for o in range(shape[1]):
            assert packed[o // cpu.PANEL, k, o % cpu.PANEL] == weight[k, o]
    assert np.count_nonzero(packed) == weight.size  # the rest of the last panel is zeros
    assert_same_bits(unpack(packed, shape[1]), weight)


@pytest.mark.parametrize("name", CONFIGS)
def test_packing_loses_nothing(name):
    model, twin = twins(name)
    shapes = jax.tree.map(np.shape, twin.params)
    assert shapes == packed_shapes(model.config)
    assert shapes == jax.tree.map(np.shape, jax.eval_shape(lambda: init_params(twin.module)))
    again = jax.jit(unpack_params, static_argnums=1)(twin.params, model.config)
    assert jax.tree.map(np.shape, again) == param_shapes(model.config)
    jax.tree.map(assert_same_bits, again, model.params)


def test_packing_takes_the_plain_parameters_apart():
    model, twin = twins()
    params = dict(model.params)
    jax.tree.map(assert_same_bits, pack_params(params), twin.params)
    assert params == {}


def logits_of(model, tokens, rows=None, active=None):
    """float32 logits [batch, width, vocab] of `tokens` in one pass."""
    rows = rows or row_blocks(None, *tokens.shape, model.module)
    active = np.ones(tokens.shape, bool) if active is None else active
    return np.asarray(_logits(model.module, rows, model.params, jnp.asarray(tokens), active))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _logits(module, rows, params, tokens, active):
    batch, width = tokens.shape
    cache = kv.init_cache(module.config, batch, kv.BLOCK, module.dtype)
    chain = {"depth": np.arange(width, dtype=np.int32), "ancestors": chain_ancestors(width)}
    return module.apply({"params": params}, tokens, cache, **chain, rows=rows, active=active).logits


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_of_a_packed_model_are_those_of_its_plain_twin(name):
    model, twin = twins(name)
    text = np.array(prompts_of(model, [12]), np.int32)
    got, want = logits_of(twin, text)[0], logits_of(model, text, RowBlocks())[0]
    scale = np.abs(want).max()
    np.testing.assert_allclose(got, want, atol=1e-5 * scale)
    np.testing.assert_allclose(got, numpy_logits(model, text[0].tolist()), atol=1e-5 * scale)


def test_bfloat16_logits_of_a_packed_model_are_as_near_the_truth_as_those_of_its_plain_twin():
    model, twin = twins(dtype="bfloat16")
    text = np.array(prompts_of(model, [12]), np.int32)
    want = numpy_logits(model, text[0].tolist())
    packed, xla = (np.abs(logits_of(m, text, RowBlocks())[0] - want).max() / np.abs(want).max() for m in (twin, model))
    assert packed < 0.02 and packed < 2 * xla


def test_rows_that_are_not_wanted_change_no_wanted_logits():
    _, twin = twins("biases")
    tokens = np.array(prompts_of(twin, [6] * 4), np.int32)
    active = np.arange(6) < np.array([6, 1, 0, 3])[:, None]  # as in a step: the last token and the drafts made
    got, whole = logits_of(twin, tokens, active=active), logits_of(twin, tokens)
    assert_same_bits(got[active], whole[active])


def test_the_layout_of_the_weights_decides_how_rows_run():
    _, twin = twins()
    assert row_blocks(None, 1, 8, twin.module) == row_blocks(False, 99, 8, twin.module) == RowBlocks(independent=True)
    tokens = np.array(prompts_of(twin, [5]), np.int32)
    want = logits_of(twin, tokens)
    for rows in (RowBlocks(), RowBlocks(block=32, products=(), tile=32)):
        assert_same_bits(logits_of(twin, tokens, rows=rows), want)


@pytest.mark.parametrize("name, dtype", [("odd sizes", "float32"), ("tied, qk norm", "bfloat16")])
def test_a_packed_model_is_exact(name, dtype):
    report = spec_jax.check_exactness(twins(name, dtype=dtype)[1], tokens=20)
    assert report.level == "E2", report
    assert all(c.passed and c.max_abs_diff == 0.0 for c in report.checks)


def test_greedy_text_of_a_packed_model_is_that_of_its_plain_twin():
    model, twin = twins()
    prompts = prompts_of(model, [5, 1, 17])
    params = SamplingParams(max_tokens=20)
    want = plain(model, prompts, params)
    assert plain(twin, prompts, params) == want
    full = [p + w for p, w in zip(prompts, want, strict=True)]
    result = generate(twin, prompts, None, params, drafter=script(full, 4, wrong=[3, 9, 20], counts={8: 1, 30: 0}))
    assert [s.token_ids for s in result.sequences] == want
    assert result.exactness == "E2" and result.stats.num_accepted_tokens > 0
    tree = (TreeDrafter(), script(full, 6, wrong=[9])[1])
    result = generate(twin, prompts, None, params, drafter=tree)
    assert [s.token_ids for s in result.sequences] == want
    assert result.stats.num_accepted_tokens > 0


# --- where there are no kernels ---------------------------------------------------------------------------------------

TOY = {
    "model_type": "llama",
    "vocab_size": 33,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
}


@pytest.fixture
def folder(tmp_path):
    """A checkpoint of a tiny model."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(TOY))
    specs = tensor_specs(from_hf_config(TOY))
    save_file({name: normal(spec.shape) for name, spec in specs.items()}, path / "model.safetensors")
    return str(path)


def compiler(tmp_path, lines):
    """A compiler that runs these lines of shell script."""
    path = tmp_path / "compiler"
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    path.chmod(0o755)
    return str(path)


FAILS = ["echo 'no disk left' >&2", "exit 1"]
WORKS = [
    'if [ "$1" = --version ]; then echo "version $VERSION"; exit 0; fi',
    'echo run >> "$RUNS"',
    'while [ "$1" != -o ]; do shift; done',
    'echo library > "$2"',
]
"""A stand-in for a compiler, which counts its runs."""


def test_without_a_compiler_models_keep_the_plain_layout(asked_again, monkeypatch, folder):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "no C++ compiler was found (looked for c++, g++, clang++" in asked_again()
    assert not load_model(folder).module.packed  # without a word: nothing is wrong
    with pytest.raises(ValueError, match="cpu_kernels=True cannot be had: no C.. compiler was found"):
        load_model(folder, cpu_kernels=True)


def test_a_compiler_that_fails_is_reported_and_xla_is_used(asked_again, monkeypatch, folder, tmp_path):
    monkeypatch.setenv("CXX", compiler(tmp_path, FAILS))
    with pytest.warns(UserWarning, match="the CPU kernels are not used.*no disk left"):
        model = load_model(folder)
    assert not model.module.packed
    assert np.isfinite(logits_of(model, np.array([[1, 2]], np.int32))).all()
    assert "no disk left" in asked_again()  # remembered: no second warning
    with pytest.raises(ValueError, match="cpu_kernels=True cannot be had: .*no disk left"):
        load_model(folder, cpu_kernels=True)


@pytest.mark.parametrize(
    "lines, reason",
    [
        (["exit 3"], "status 3"),
        ([WORKS[0], "exit 3"], "status 3"),
        (["echo >&2", "exit 4"], "status 4"),
        (["printf 'in file\\377\\nan error: it\\n' >&2", "exit 1"], "an error: it"),
        ([WORKS[0], "exit 0"], "file too short"),
        (None, "No such file"),
    ],
    ids=["fails", "tells its version only", "says nothing", "is not UTF-8", "writes nothing", "is missing"],
)
def test_other_compilers_that_do_not_work(lines, reason, asked_again, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", str(tmp_path / "missing") if lines is None else compiler(tmp_path, lines))
    assert reason in asked_again()


def test_a_compiler_whose_name_cannot_be_read_is_named(asked_again, monkeypatch, folder):
    monkeypatch.setenv("CXX", "'g++")
    with pytest.warns(UserWarning, match="the CPU kernels are not used.*CXX='g..: No closing quotation"):
        assert not load_model(folder).module.packed


def test_the_switch_turns_the_kernels_off(asked_again, monkeypatch, folder):
    monkeypatch.setenv(cpu.SWITCH, "0")
    assert asked_again() == "SPEC_JAX_CPU_KERNELS=0 is set"
    assert not load_model(folder).module.packed
    with pytest.raises(ValueError, match="cpu_kernels=True cannot be had: SPEC_JAX_CPU_KERNELS=0 is set"):
        load_model(folder, cpu_kernels=True)


def test_a_packed_model_without_its_kernels_is_an_error(asked_again, monkeypatch):
    _, twin = twins()
    monkeypatch.setenv(cpu.SWITCH, "0")
    with pytest.raises(ValueError, match="SPEC_JAX_CPU_KERNELS=0 is set; load it with cpu_kernels=False"):
        logits_of(twin, np.zeros((1, 2), np.int32))


def test_another_default_device_has_no_use_for_them(asked_again, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert asked_again() == "the default device is a gpu"


def test_no_folder_can_be_written(asked_again, monkeypatch, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("SPEC_JAX_CACHE", str(file))
    monkeypatch.setattr(tempfile, "tempdir", str(file))
    assert f"neither {file} nor {file} can be written" in asked_again()


def test_the_temporary_folder_takes_the_place_of_a_cache_folder_that_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPEC_JAX_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("RUNS", str(tmp_path / "runs"))
    library = cpu._built([compiler(tmp_path, WORKS)])
    assert library.parent.parent == tmp_path and library.parent.stat().st_mode & 0o077 == 0


def test_the_kernels_are_compiled_once_per_compiler(monkeypatch, tmp_path):
    runs = tmp_path / "runs"
    monkeypatch.setenv("SPEC_JAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("RUNS", str(runs))
    monkeypatch.setenv("VERSION", "1")
    one = cpu._built([compiler(tmp_path, WORKS)])
    assert cpu._built([compiler(tmp_path, WORKS)]) == one
    assert one.read_text() == "library\n" and runs.read_text() == "run\n"
    monkeypatch.setenv("VERSION", "2")
    other = cpu._built([compiler(tmp_path, WORKS)])
    assert other != one and runs.read_text() == "run\nrun\n"
    assert sorted(one.parent.iterdir()) == sorted([one, other])


def test_a_failed_compilation_leaves_nothing_behind(monkeypatch, tmp_path):
    monkeypatch.setenv("SPEC_JAX_CACHE", str(tmp_path / "cache"))
    with pytest.raises(subprocess.CalledProcessError):
        cpu._built([compiler(tmp_path, [WORKS[0], *FAILS])])
    assert list((tmp_path / "cache" / "kernels").iterdir()) == []


def test_a_damaged_library_is_compiled_anew(monkeypatch, tmp_path):
    monkeypatch.setenv("SPEC_JAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("RUNS", str(tmp_path / "runs"))
    cpu._built([compiler(tmp_path, WORKS)])
    with pytest.raises(OSError, match="invalid ELF header|file too short"):
        cpu._loaded([compiler(tmp_path, WORKS)])
    assert (tmp_path / "runs").read_text() == "run\nrun\n"


def test_what_does_not_fit_is_refused_before_it_reads_foreign_memory():
    x, weight, active = jnp.ones((2, 8)), pack(jnp.ones((8, 20))), jnp.ones(2, bool)
    wrong = {
        "weight is float32[2, 8, 16]": lambda: cpu.product(jnp.ones((2, 64)), weight, 20, active),
        "it must be float32[13, 8, 16]": lambda: cpu.product(x, weight, 200, active),
        "it must be float32[2, 8, 16]": lambda: cpu.product(x, weight.astype(jnp.bfloat16), 20, active),
        "x is float16[2, 8]": lambda: cpu.product(x.astype(jnp.float16), weight, 20, active),
        "dtype=bfloat16 must be": lambda: cpu.product(x, weight, 20, active, dtype=jnp.bfloat16),
        "active is bool[3]": lambda: cpu.product(x, weight, 20, jnp.ones(3, bool)),
        "bias is float32[7]": lambda: cpu.product(x, weight, 20, active, bias=jnp.ones(7)),
        "rms_norm: weight is float32[9]": lambda: cpu.rms_norm(x, jnp.ones(9), 1e-5, active),
    }
    for message, call in wrong.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            call()


@pytest.mark.parametrize("value", ["yes", 1, 0])
def test_bad_arguments_are_refused(value, folder):
    with pytest.raises(ValueError, match=f"cpu_kernels={value!r} must be True, False or None"):
        load_model(folder, cpu_kernels=value)


def test_a_checkpoint_is_loaded_in_the_packed_layout(folder):
    model, asked_for = load_model(folder), load_model(folder, cpu_kernels=True)
    assert model.module.packed and asked_for.module.packed
    want = load_model(folder, cpu_kernels=False)
    assert not want.module.packed
    jax.tree.map(assert_same_bits, unpack_params(model.params, model.config), want.params)
