"""The CPU kernels that choose tokens: laws, cuts and choices against NumPy and against JAX's own noise."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from test_cpu import kernels  # noqa: F401  (the fixture is used by all tests here)
from test_sampling import numpy_process

from spec_jax.generation import generate
from spec_jax.kernels import cpu
from spec_jax.rows import over_rows
from spec_jax.sampling import SamplingState, best_token, choose_tokens
from spec_jax.sampling_params import SamplingParams

SIZES = [1, 2, 15, 17, 255, 256, 257, 1000, 49152]
FILTERS = [
    {"top_k": 1}, {"top_k": 7}, {"top_k": 200}, {"top_k": 10**6}, {"top_p": 0.1}, {"top_p": 0.9}, {"top_p": 0.999},
    {"min_p": 0.2}, {"min_p": 1.0}, {"top_k": 9, "top_p": 0.5, "min_p": 0.01}, {"top_k": 300, "top_p": 0.7},
]  # fmt: skip


def rows_of(size, count=6, seed=0, spread=3.0):
    """Scores of normal law, a tenth of them -inf, but never the first."""
    rng = np.random.default_rng(seed + size)
    scores = rng.normal(size=(count, size)) * spread
    scores[rng.random((count, size)) < 0.1] = -np.inf
    scores[:, 0] = 1.0
    return scores.astype(np.float32)


def state_of(batch, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    def of(x, kind):
        return jnp.broadcast_to(jnp.asarray(x, kind), (batch,))

    keys = jax.vmap(jax.random.key)(jnp.arange(batch) + 100)
    filters = of(temperature, "float32"), of(top_k, "int32"), of(top_p, "float32"), of(min_p, "float32")
    return SamplingState(*filters, keys, jnp.full((batch, 1), -1, jnp.int32))


_laws = jax.jit(cpu.laws, static_argnums=4)
_choice = jax.jit(cpu.choice, static_argnums=5)
_choose = jax.jit(choose_tokens, static_argnums=3)
_cuts = jax.jit(cpu.cuts, static_argnums=6)


def everything(scores, temperature=1.0, index=None, **options):
    """What all three kernels say of rows of scores."""
    index = np.arange(len(scores), dtype=np.int32) if index is None else np.asarray(index, np.int32)
    s = state_of(len(scores), temperature, **options)
    of = np.maximum(index, 0)
    cut = _cuts(scores, index, s.temperature[of], s.top_k[of], s.top_p[of], s.min_p[of], scores.shape[1])
    keys = jax.random.key_data(s.key)[of]
    found = cut, *_laws(scores, index, s.temperature[of], cut, scores.shape[1])
    return [np.asarray(x) for x in (*found, *_choice(scores, index, s.temperature[of], cut, keys, scores.shape[1]))]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("size", SIZES)
def test_the_sum_of_a_law_is_numpys(size, temperature):
    scores = rows_of(size)
    cut = np.float32([-np.inf, -np.inf, 0, 0.5, 1.0, -np.inf])
    index = np.arange(6, dtype=np.int32)
    peak, total, best, lead, broken = _laws(scores, index, np.full(6, temperature, np.float32), cut, size)
    np.testing.assert_array_equal(peak, scores.max(1))
    total = np.asarray(peak, np.float64) / temperature + np.asarray(total)
    kept = np.where(scores >= cut[:, None], scores.astype(np.float64) / temperature, -np.inf)
    np.testing.assert_allclose(total, np.log(np.exp(kept).sum(1)), rtol=1e-6, atol=2e-6)
    assert not np.asarray(broken).any()


@pytest.mark.parametrize("options", FILTERS, ids=str)
@pytest.mark.parametrize("size", [50, 257, 3000])
def test_cuts_equal_the_sorting_reference(size, options):
    defaults = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    for temperature in (0.3, 1.0, 1.7, 300.0):
        for spread in (0.1, 4.0):
            scores = rows_of(size, spread=spread)
            cut = everything(scores, temperature, **options)[0]
            want = [np.isfinite(numpy_process(row, temperature, **defaults | options)) for row in scores]
            np.testing.assert_array_equal((scores >= cut[:, None]) & np.isfinite(scores), want)


def test_ties_at_a_cut_are_all_kept():
    scores = np.float32([[2.0, 1.0, 1.0, 1.0, 0.0]])
    assert everything(scores, top_k=2)[0] == 1.0
    assert everything(scores, top_p=0.5)[0] == 1.0
    flat = np.zeros((1, 5000), np.float32)
    assert everything(flat, top_k=3)[0] == 0.0
    assert everything(flat, top_p=0.3)[0] == 0.0


def test_cuts_among_many_equal_scores_and_very_different_ones():
    rng = np.random.default_rng(0)
    few = rng.integers(0, 3, (1, 20_000)).astype(np.float32)
    shares = [np.mean(few >= level) for level in (0, 1, 2)]
    for k in (1, 5000, 19_000):
        assert everything(few, top_k=k)[0] == max(level for level in (0, 1, 2) if shares[level] * few.size >= k)
    for share in (0.1, 0.7, 0.95):
        masses = [np.exp(few[few >= level]).sum() / np.exp(few).sum() for level in (0, 1, 2)]
        assert everything(few, top_p=share)[0] == max(level for level in (0, 1, 2) if masses[level] >= share)
    far = np.linspace(-3.3e38, 3.3e38, 5000, dtype=np.float32)[None]
    for k in (1, 10, 2500, 4999):
        assert everything(far, top_k=k)[0] == far[0, -k]
    assert everything(far, top_p=0.5)[0] == far[0, -1]
    near = np.nextafter(np.float32(1), np.float32(2)) * np.ones((1, 5000), np.float32)
    near[0, ::2] = 1
    assert everything(near, top_k=2000)[0] == near.max() and everything(near, top_k=2600)[0] == 1
    assert everything(near, top_p=0.4)[0] == near.max() and everything(near, top_p=0.6)[0] == 1


@pytest.mark.parametrize("scale", [1.0, 100.0, 3e38])
def test_finite_scores_are_never_broken(scale):
    """Also where a quotient by the temperature, or a difference, would overflow."""
    scores = np.float32([[1, 1, -1, 0, 0.99], [-1, -1, -1, -1, -1]]) * np.float32(scale)
    for temperature in (1e-30, 0.3, 1.0, 1e30):
        _, _, total, _, _, broken, token, gap = everything(scores, temperature)
        assert not broken.any() and np.isfinite(total).all() and np.isfinite(gap).all() and (token >= 0).all()


@pytest.mark.parametrize("by_kernels", [True, False])
def test_equal_scores_share_the_law_at_every_temperature(by_kernels):
    scores = np.broadcast_to(np.float32([19.3, 19.3, 4, 19.3]), (3000, 1, 4))
    for temperature in (1.0, 1e-4, 1e-7, 1e-30):
        state = state_of(3000, temperature).with_kernels(by_kernels)
        tokens, _ = _choose(scores, jnp.ones((3000, 1), jnp.int32), state, 4)
        counts = np.bincount(np.asarray(tokens)[:, 0], minlength=4)
        assert abs(counts[[0, 1, 3]] - 1000).max() < 130 and counts[2] < 20


def test_rows_of_bfloat16_and_rows_shorter_than_the_vocabulary_are_chosen_from_too():
    """As a drafter of one's own may hand them over."""
    scores = jnp.asarray(rows_of(40)[:, None], jnp.bfloat16)
    state, ones = state_of(6, 0.7, top_k=8), jnp.ones((6, 1), jnp.int32)
    want, _ = _choose(scores, ones, state, 50)
    got, _ = _choose(scores, ones, state.with_kernels(True), 50)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("options", [{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.5])
@pytest.mark.parametrize("size", SIZES)
def test_a_choice_is_the_one_that_jax_makes(size, temperature, options):
    """With the same noise, so that a seed means the same with and without the kernels."""
    scores = rows_of(size, count=24)[:, None]
    state = state_of(24, temperature, **options)
    positions = jnp.arange(24)[:, None] * 7
    want, want_gap = _choose(scores, positions, state, size)
    got, gap = _choose(scores, positions, state.with_kernels(True), size)
    clear = np.asarray(want_gap) > 1e-4
    assert clear.mean() > 0.9
    np.testing.assert_array_equal(np.asarray(got)[clear], np.asarray(want)[clear])
    np.testing.assert_allclose(gap, want_gap, rtol=1e-4, atol=2e-5)


def test_noise_is_jaxs():
    """Choices among equal scores are the noise's own."""
    size, count = 700, 400
    keys = jax.random.split(jax.random.key(5), count)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, (size,), jnp.float32))(keys)
    want, lead = jax.vmap(best_token)(noise)
    one, index = np.ones(count, np.float32), np.arange(count, dtype=np.int32)
    got, gap = _choice(np.zeros((count, size), np.float32), index, one, -np.inf * one, jax.random.key_data(keys), size)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_allclose(gap, lead, atol=1e-5)


def test_greedy_choices_are_the_first_of_the_largest_and_lead_the_next():
    for size in SIZES:
        scores = np.round(rows_of(size, count=10) * 2)  # many ties
        want, lead = jax.vmap(best_token)(scores)
        _, _, total, best, gap, broken, token, token_gap = everything(scores, 0.0, top_k=1, top_p=0.1)
        for found, found_gap in ((best, gap), (token, token_gap)):
            np.testing.assert_array_equal(found, want)
            np.testing.assert_array_equal(found_gap, lead)
        assert not total.any() and not broken.any()


def test_bits_depend_on_the_row_alone():
    scores = rows_of(5000, count=9)
    options = {"temperature": 0.8, "top_p": 0.9}
    whole = everything(scores, **options)
    for index in ([3], [8, 0, 3], [5, -1, -1, 2, 5]):
        some = everything(scores, index=index, **options)
        for got, want in zip(some, whole, strict=True):
            there = np.array(index) >= 0
            np.testing.assert_array_equal(got[there], want[np.array(index)[there]])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_a_token_and_broken_rows(temperature):
    scores = rows_of(300)
    scores[0], scores[1, 7], scores[2, 299], scores[3, 0] = -np.inf, np.nan, np.inf, -np.nan
    _, _, total, best, _, broken, token, gap = everything(scores, temperature)
    assert broken.tolist() == [False, True, True, True, False, False]
    assert token[:4].tolist() == [-1, 0, 0, 0] and (token[4:] >= 0).all()
    assert gap[0] == np.inf and np.isnan(gap[1:4]).all()
    assert total[0] == np.inf if temperature else best[0] == -1
    scores[3, 1:] = np.nan
    for options in (*FILTERS, {"top_k": 299}, {"top_k": 299, "top_p": 0.5}):
        *_, broken, token, _ = everything(scores, temperature, **options)
        assert broken.tolist() == [False, True, True, True, False, False] and token[:4].tolist() == [-1, 0, 0, 0]


def test_what_lies_beyond_the_vocabulary_is_not_read():
    scores = rows_of(300)
    padded = np.pad(scores, ((0, 0), (0, 33)), constant_values=np.nan)
    index, one = np.arange(6, dtype=np.int32), np.ones(6, np.float32)
    keys = jax.random.key_data(state_of(6).key)
    for kernel, extra in ((_laws, ()), (_choice, (keys,))):
        found = kernel(padded, index, one, -np.inf * one, *extra, 300)
        for got, want in zip(found, kernel(scores, index, one, -np.inf * one, *extra, 300), strict=True):
            np.testing.assert_array_equal(got, want)


def test_rows_that_are_not_there_are_none():
    scores = rows_of(20)
    _, _, total, _, _, broken, token, gap = everything(scores, index=[6, 100, -1, 0])
    assert token[:3].tolist() == [-1] * 3 and token[3] >= 0 and np.isinf(gap[:3]).all()
    assert not total[:3].any() and not broken.any()


def test_what_does_not_fit_is_refused():
    scores, index, one = np.ones((2, 8), np.float32), np.zeros(3, np.int32), np.ones(3, np.float32)
    keys = np.zeros((3, 2), np.uint32)
    wrong = {
        "laws: scores is float32[2, 8], it must be float32[2, 9]": lambda: cpu.laws(scores, index, one, one, 9),
        "laws: cut is float32[3], it must": lambda: cpu.laws(scores, index[:2], one[:2], one, 8),
        "laws: index is float32[3]": lambda: cpu.laws(scores, one, one, one, 8),
        "choice: keys is uint32[3, 2], it must be uint32[2, 2]": lambda: cpu.choice(
            scores, index[:2], one[:2], one[:2], keys, 8
        ),
        "cuts: top_k is float32[3], it must be int32[3]": lambda: cpu.cuts(scores, index, one, one, one, one, 8),
        "cuts: scores is float64[2, 8]": lambda: cpu.cuts(scores.astype("float64"), index, one, index, one, one, 8),
    }
    for message, call in wrong.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            call()


def test_other_noise_than_theirs_is_left_to_jax():
    state = state_of(2)
    assert state.with_kernels(True).kernels and not state.with_kernels(False).kernels
    with jax.threefry_partitionable(False):
        assert not state.with_kernels(True).kernels
    other = dataclasses.replace(state, key=jax.vmap(lambda seed: jax.random.key(seed, impl="rbg"))(jnp.arange(2)))
    assert not other.with_kernels(True).kernels


def test_side_by_side_they_are_run_one_after_another():
    """As a trace for an accelerator does, which nobody runs."""
    scores = jnp.asarray(rows_of(40))
    state = state_of(6, 1.0).with_kernels(True)

    def one(row, column, logits):
        key = jax.random.key_data(state.key[row])[None]
        cut = jnp.full(1, -jnp.inf, jnp.float32)
        return cpu.choice(logits[None], jnp.zeros(1, jnp.int32), state.temperature[:1], cut, key, 40)[0][0]

    want = over_rows(one, scores[:, None], jnp.arange(6), jnp.zeros(6, jnp.int32))
    np.testing.assert_array_equal(jax.vmap(one, (0, None, 0))(jnp.arange(6), 0, scores), want)


OPTIONS = [
    {},
    {"top_p": 0.9},
    {"top_k": 5, "min_p": 0.05},
    {"presence_penalty": 0.7, "top_p": 0.8},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.2},
]


def test_sampled_text_of_a_packed_model_is_that_of_its_plain_twin_with_and_without_drafts():
    """Options that depend on the text among them, and rows without any beside them."""
    model = tiny.packed(tiny.tiny())
    prompts = [[5, 1, 17, 5, 1, 17, 5]] * len(OPTIONS)
    params = [SamplingParams(temperature=0.5, max_tokens=16, seed=3, ignore_eos=True, **o) for o in OPTIONS]
    config = {"method": "layer_skip", "exit_layer": 1, "num_speculative_tokens": 3}

    def text(model, config):
        result = generate(model, prompts, config, params)
        return [s.token_ids for s in result.sequences], result.stats

    want, _ = text(tiny.tiny(), None)
    plain, _ = text(model, None)
    drafted, stats = text(model, config)
    assert plain == want
    assert drafted == plain and stats.num_accepted_tokens > 0
    alone = [generate(model, [prompts[0]], config, p).sequences[0].token_ids for p in (params[0], params[3])]
    assert alone == [plain[0], plain[3]]
