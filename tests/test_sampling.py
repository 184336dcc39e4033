"""Processors against NumPy, ties at every cut, padded vocabularies, and noise keyed by seed and position only."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.filters import HEAD, process
from spec_jax.sampling import ACCEPT, BLOCK, DRAFT, NO_TOKEN, TARGET, best_token, gumbel, mask_padding

VOCAB = 50


def numpy_process(logits, temperature, top_k, top_p, min_p):
    """The same filters by sorting, for rows without ties."""
    x = (logits.astype(np.float64) - logits.max()) / temperature
    x = np.where(x >= x.max() + np.log(min_p) if min_p > 0 else True, x, -np.inf)
    if top_k > 0:
        x = np.where(x >= np.sort(x)[::-1][min(top_k, len(x)) - 1], x, -np.inf)
    if top_p < 1:
        order = np.argsort(-x)
        mass = np.exp(x - x.max())
        total = np.cumsum(mass[order]) / mass.sum()
        keep = order[: int(np.searchsorted(total, top_p)) + 1]
        x = np.where(np.isin(np.arange(len(x)), keep), x, -np.inf)
    return x


@functools.partial(jax.jit, static_argnums=5)
def processed(logits, temperature, top_k, top_p, min_p, vocab_size):
    return process(mask_padding(logits, vocab_size), temperature, top_k, top_p, min_p)


def run(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, vocab_size=None):
    arguments = np.float32(temperature), np.int32(top_k), np.float32(top_p), np.float32(min_p)
    return np.asarray(processed(np.asarray(logits, np.float32), *arguments, vocab_size or len(logits)))


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize(
    "options",
    [{}, {"top_k": 1}, {"top_k": 7}, {"top_k": 1000}, {"top_p": 0.1}, {"top_p": 0.9}, {"min_p": 0.2},
     {"top_k": 9, "top_p": 0.5, "min_p": 0.01}, {"top_k": 9, "min_p": 0.5}, {"top_p": 0.99, "min_p": 0.5},
     {"top_k": 3, "top_p": 0.99}],
    ids=str,
)  # fmt: skip
def test_filters_equal_the_sorting_reference(temperature, options):
    for seed in range(5):
        logits = np.random.default_rng(seed).normal(size=VOCAB) * 3
        logits = logits.astype(np.float32)
        want = numpy_process(logits, temperature, **{"top_k": 0, "top_p": 1.0, "min_p": 0.0} | options)
        got = run(logits, temperature, **options)
        np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want))
        np.testing.assert_allclose(got[np.isfinite(got)], want[np.isfinite(want)], rtol=1e-5)


@pytest.mark.parametrize("spread", [0.1, 4.0], ids=["flat", "peaked"])
@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 50},
        {"top_k": HEAD},
        {"top_k": HEAD + 1},
        {"top_p": 0.05},
        {"top_p": 0.9},
        {"top_k": 300, "top_p": 0.7},
    ],
    ids=str,
)
def test_cuts_behind_the_best_scores_are_found_too(options, spread):
    logits = (np.random.default_rng(3).normal(size=1000) * spread).astype(np.float32)
    want = numpy_process(logits, 1.0, **{"top_k": 0, "top_p": 1.0, "min_p": 0.0} | options)
    np.testing.assert_array_equal(np.isfinite(run(logits, **options)), np.isfinite(want))


def test_ties_at_a_cut_are_all_kept():
    logits = np.array([2.0, 1.0, 1.0, 1.0, 0.0])
    assert np.isfinite(run(logits, top_k=2)).tolist() == [True, True, True, True, False]
    assert np.isfinite(run(logits, top_p=0.5)).tolist() == [True, True, True, True, False]
    assert np.isfinite(run(np.zeros(4), top_k=1)).all()


def test_the_likeliest_token_survives_every_filter():
    logits = np.random.default_rng(0).normal(size=VOCAB)
    for options in ({"top_p": 1e-6}, {"top_k": 1}, {"min_p": 1.0}):
        assert np.isfinite(run(logits, **options)).nonzero()[0].tolist() == [int(logits.argmax())]


def test_negative_and_infinite_logits_are_ordered():
    logits = np.array([-np.inf, -3.0, -1.0, -2.0, -np.inf])
    assert np.isfinite(run(logits, top_k=2)).tolist() == [False, False, True, True, False]
    assert np.isfinite(run(logits, top_p=0.99)).tolist() == [False, True, True, True, False]


def test_padded_rows_of_the_vocabulary_are_cut_before_the_filters_see_them():
    logits = np.concatenate([np.random.default_rng(1).normal(size=VOCAB), np.full(6, 99.0)])
    got = run(logits, top_k=3, vocab_size=VOCAB)
    assert not np.isfinite(got[VOCAB:]).any()
    np.testing.assert_array_equal(got[:VOCAB], run(logits[:VOCAB], top_k=3))


def test_noise_differs_by_seed_position_and_purpose_and_repeats_otherwise():
    keys = [jax.random.key(0), jax.random.key(1)]
    draws = {
        (s, position, purpose): np.asarray(gumbel(keys[s], jnp.int32(position), purpose, 16)).tobytes()
        for s in (0, 1)
        for position in (0, 1, 2)
        for purpose in (ACCEPT, TARGET, DRAFT)
    }
    assert len(set(draws.values())) == len(draws)
    assert np.asarray(gumbel(keys[1], jnp.int32(2), DRAFT, 16)).tobytes() == draws[1, 2, DRAFT]


@pytest.mark.parametrize("size", [1, 2, 5, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7])
def test_the_best_token_is_the_first_of_the_largest_and_leads_the_next(size):
    rng = np.random.default_rng(size)
    choose = jax.jit(best_token)
    for scores in (
        *rng.integers(0, 4, (8, size)).astype(np.float32),  # ties within and across blocks
        *rng.standard_normal((8, size)).astype(np.float32),
        np.where(rng.random(size) < 0.9, -np.inf, 1.0).astype(np.float32),
        np.full(size, -np.inf, np.float32),
    ):
        token, lead = choose(scores)
        order = np.argsort(-scores, kind="stable")
        if scores.max() == -np.inf:
            assert token == NO_TOKEN
            continue
        assert token == order[0]
        left = scores[order[1]] if size > 1 else -np.inf
        assert lead == (np.inf if left == -np.inf else scores[order[0]] - left)


@pytest.mark.parametrize("predicate", [[True, False, True], [False] * 3, [True] * 3], ids=str)
@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 0)], ids=str)
def test_cond_of_rows_side_by_side_is_cond_of_every_row(predicate, axes):
    """Whatever varies from row to row: the condition, what it chooses from, or both."""
    from spec_jax.rows import cond

    predicate, x = jnp.array(predicate), jnp.arange(6.0).reshape(3, 2)
    given = [value if axis == 0 else value[0] for value, axis in zip((predicate, x), axes, strict=True)]

    def one(predicate, x):
        return cond(predicate, lambda x: (x + 1, x.sum()), lambda x: (x * 2, x.max()), x)

    got = jax.jit(jax.vmap(one, axes))(*given)
    for row in range(3):
        at = [value[row] if axis == 0 else value for value, axis in zip(given, axes, strict=True)]
        want = (at[1] + 1, at[1].sum()) if at[0] else (at[1] * 2, at[1].max())
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a[row], b)
