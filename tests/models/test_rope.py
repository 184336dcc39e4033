"""Rotary tables against formulas written independently, pair by pair in Python floats (known bug: scaling dropped)."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.models.rope import RopeConfig, inverse_frequencies, rope_from_hf, rope_table, rotate

HEAD_DIM, THETA, FACTOR, ORIGINAL = 16, 10000.0, 8.0, 16
POSITIONS = np.arange(201)


def wavelength(pair: int) -> float:
    return 2 * math.pi * THETA ** (2 * pair / HEAD_DIM)


def plain(pair: int) -> float:
    return 2 * math.pi / wavelength(pair)


def llama3(pair: int) -> float:
    if wavelength(pair) < ORIGINAL / 4:
        return plain(pair)
    if wavelength(pair) > ORIGINAL / 1:
        return plain(pair) / FACTOR
    smooth = (ORIGINAL / wavelength(pair) - 1) / (4 - 1)
    return (1 - smooth) * plain(pair) / FACTOR + smooth * plain(pair)


def yarn(pair: int, fast: float = 32.0, slow: float = 1.0) -> float:
    def correction(rotations):
        return HEAD_DIM * math.log(ORIGINAL / (rotations * 2 * math.pi)) / (2 * math.log(THETA))

    low, high = max(math.floor(correction(fast)), 0), min(math.ceil(correction(slow)), HEAD_DIM - 1)
    if low == high:
        high += 0.001
    interpolated = min(max((pair - low) / (high - low), 0), 1)
    return interpolated * plain(pair) / FACTOR + (1 - interpolated) * plain(pair)


CASES = {
    "default": ({}, plain, 1.0),
    "linear": ({"type": "linear", "factor": FACTOR}, lambda pair: plain(pair) / FACTOR, 1.0),
    "llama3": (
        {
            "rope_type": "llama3",
            "factor": FACTOR,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": ORIGINAL,
        },
        llama3,
        1.0,
    ),
    "yarn": (
        {"rope_type": "yarn", "factor": FACTOR, "original_max_position_embeddings": ORIGINAL},
        yarn,
        0.1 * math.log(FACTOR) + 1,
    ),
    "yarn-attention-factor": (
        {"rope_type": "yarn", "factor": FACTOR, "original_max_position_embeddings": ORIGINAL, "attention_factor": 1.5},
        yarn,
        1.5,
    ),
    "yarn-betas": (
        {
            "rope_type": "yarn",
            "factor": FACTOR,
            "original_max_position_embeddings": ORIGINAL,
            "beta_fast": 4.0,
            "beta_slow": 0.25,
            "mscale": 1.0,
            "mscale_all_dim": 0.5,
        },
        lambda pair: yarn(pair, 4.0, 0.25),
        (0.1 * math.log(FACTOR) + 1) / (0.05 * math.log(FACTOR) + 1),
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_tables(case, key):
    scaling, frequency, factor = CASES[case]
    rope = rope_from_hf({"rope_theta": THETA, key: scaling, "max_position_embeddings": 256})
    cos, sin = rope_table(rope, HEAD_DIM, jnp.asarray(POSITIONS))
    angles = np.array([[position * frequency(pair) for pair in range(HEAD_DIM // 2)] for position in POSITIONS])
    assert cos.shape == sin.shape == (201, HEAD_DIM // 2) and cos.dtype == jnp.float32
    np.testing.assert_allclose(cos, np.cos(angles) * factor, atol=5e-5)
    np.testing.assert_allclose(sin, np.sin(angles) * factor, atol=5e-5)


def test_the_cases_differ():
    """Power: each formula is told apart from the others by more than the tolerance."""
    tables = [np.array([frequency(pair) for pair in range(HEAD_DIM // 2)]) for _, frequency, _ in CASES.values()]
    names = list(CASES)
    for i, first in enumerate(tables):
        for j, second in enumerate(tables[:i]):
            if {names[i], names[j]} != {"yarn", "yarn-attention-factor"}:
                assert np.abs(np.cos(200 * first) - np.cos(200 * second)).max() > 1e-2, (names[i], names[j])


def test_frequency_divisors_state_the_same_as_llama3():
    scaling, frequency, _ = CASES["llama3"]
    divisors = tuple(plain(pair) / frequency(pair) for pair in range(HEAD_DIM // 2))
    ours, factor = inverse_frequencies(RopeConfig(theta=THETA, frequency_divisors=divisors), HEAD_DIM)
    theirs, _ = inverse_frequencies(rope_from_hf({"rope_theta": THETA, "rope_scaling": scaling}), HEAD_DIM)
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    assert factor == 1.0


@pytest.mark.parametrize("name", ["dynamic", "longrope", "su", "mrope"])
def test_unknown_type_is_named(name):
    with pytest.raises(ValueError, match=f"'{name}'.*default, linear, llama3, yarn"):
        rope_from_hf({"rope_scaling": {"rope_type": name, "factor": 2.0}})


def test_missing_factor_is_named():
    with pytest.raises(ValueError, match="'linear'.*'factor'"):
        rope_from_hf({"rope_scaling": {"rope_type": "linear"}})


@pytest.mark.parametrize("factor", [None, "x", [2.0], float("inf"), 0.5])
def test_factors_that_are_none(factor):
    with pytest.raises(ValueError, match="factor"):
        rope_from_hf({"rope_scaling": {"rope_type": "linear", "factor": factor}})


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"rope_type": "llama3", "low_freq_factor": 4.0}, "low_freq_factor=4.0 must be below high_freq_factor=4.0"),
        ({"rope_type": "llama3", "original_max_position": 0}, "original_max_position_embeddings=0"),
        ({"rope_type": "yarn", "beta_slow": 0.0}, "beta_slow=0.0"),
        ({"rope_type": "yarn", "theta": 1.0}, "rope_theta=1.0"),
        ({"theta": float("inf")}, "rope_theta=inf"),
    ],
)
def test_numbers_without_a_frequency_are_refused(changes, named):
    with pytest.raises(ValueError, match=named):
        RopeConfig(**{"factor": 2.0} | changes)


def test_rotation_pairs_the_two_halves():
    x = np.zeros((1, 1, 4), np.float32)
    x[0, 0, 0] = 1
    angle = np.array([[0.3, 0.7]], np.float32)
    out = np.asarray(rotate(jnp.asarray(x), jnp.cos(angle), jnp.sin(angle)))[0, 0]
    np.testing.assert_allclose(out, [math.cos(0.3), 0, math.sin(0.3), 0], atol=1e-6)
