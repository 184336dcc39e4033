"""Canonical row blocks: a row's product and norm have the same bits whatever the number of rows, at odd sizes too."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.exactness import agreeing_counts, row_blocks
from spec_jax.models.layers import RowBlocks, by_rows, linear, rms_norm, unembed

ROWS = (1, 2, 3, 4, 5, 7, 9, 17, 31, 40, 72)
FEW = (1, 3, 5, 9, 31, 72)
"""One of each kind: below every count, between two of them, nearly a block, and several blocks."""


def products_of(shape, dtype):
    """The measured row counts of one shape, as `row_blocks` would give them for a model that has it."""
    return tuple(((kind, *shape), agreeing_counts(kind, *shape, dtype)) for kind in ("linear", "unembed"))


SHAPES = [(33, 7), (128, 4), (32, 1), (260, 100), (960, 320), (768, 192), (576, 2052), (1536, 576)]


@pytest.mark.parametrize(
    "shape, dtype, counts",
    [
        # Every product compiles at every count: half a minute for all of them.
        *((shape, "float32", FEW) for shape in SHAPES if shape != (576, 2052)),
        *((shape, "bfloat16", FEW) for shape in ((33, 7), (260, 100), (960, 320))),
        *(pytest.param(shape, dtype, ROWS, marks=pytest.mark.slow)
          for shape in SHAPES for dtype in ("float32", "bfloat16")),
    ],
    ids=str,
)  # fmt: skip
def test_products_have_the_same_bits_at_every_row_count(shape, dtype, counts):
    rng = np.random.default_rng(0)
    rows = dataclasses.replace(row_blocks(True, 1, 8), products=products_of(shape, dtype))
    # NumPy's arrays: their slices cost no compilation.
    weight = (rng.normal(size=shape) / shape[0] ** 0.5).astype(jnp.dtype(dtype))
    x = rng.normal(size=(max(ROWS), shape[0])).astype(jnp.dtype(dtype))
    for product, matrix in ((linear, weight), (unembed, np.ascontiguousarray(weight.T))):
        run = jax.jit(lambda x, m, product=product: product(x, m, rows))
        whole = np.asarray(run(x[:32], matrix), np.float32)
        np.testing.assert_allclose(whole, np.asarray(x[:32], np.float64) @ np.asarray(weight, np.float64), atol=0.05)
        for count in counts:
            got = np.asarray(run(x[:count], matrix), np.float32)
            np.testing.assert_array_equal(got[:32], whole[: min(count, 32)], err_msg=f"{product.__name__} {count} rows")


def test_norms_have_the_same_bits_at_every_row_count():
    rows = row_blocks(True, 1, 8)
    x = np.random.default_rng(0).normal(size=(72, 100)).astype(np.float32)
    run = jax.jit(lambda x: rms_norm(x, jnp.ones(100), 1e-5, rows))
    whole = np.asarray(run(x[:32]))
    for count in ROWS:
        np.testing.assert_array_equal(np.asarray(run(x[:count]))[:32], whole[: min(count, 32)])


def test_norms_and_products_run_at_canonical_row_counts():
    seen = []

    def spy(x):
        seen.append(x.shape[0])
        return x

    x = jnp.arange(70.0)[:, None]
    for count in (1, 5, 32, 70):
        np.testing.assert_array_equal(
            np.asarray(by_rows(spy, x[:count], row_blocks(True, 1, 8), at_least=4)), x[:count]
        )
    assert set(seen) == {4, 5, 32}


def test_a_product_runs_at_the_smallest_count_that_was_measured_to_agree():
    rows = RowBlocks(block=32, products=((("linear", 8, 9), (8, 16)),), tile=32)
    assert [rows.product_rows("linear", 8, 9, count) for count in (1, 8, 9, 17, 32)] == [8, 8, 16, 32, 32]
    assert rows.product_rows("unembed", 8, 9, 1) == 32  # never measured: a whole block
    assert RowBlocks(block=64).product_rows("linear", 8, 9, 3) == 3
