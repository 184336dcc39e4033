"""The law of whole outputs behind drafted trees, against the closed form of a Markov model (see test_law.py).

Guards B06: sampling with a tree, whose siblings are drawn with or without replacement, or are the likeliest tokens.
"""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from test_law import DRAFT_TABLE, FIRST, OPTIONS, TARGET_TABLE, WIDTH, chi_square, models, outputs_law
from test_law import processed as processed_table
from tiny import greedy_state

from spec_jax import sampling
from spec_jax.drafting import children
from spec_jax.drafting.base import TargetView, View
from spec_jax.drafting.children import Choice, choose_children
from spec_jax.generation import generate
from spec_jax.models.layers import RowBlocks
from spec_jax.sampling_params import SamplingParams

SLOW = pytest.mark.slow
SAMPLES, BATCH = 8000, 4000
BRANCHES = [[0], [1], [1, 0]]
DRAWN = {"draft_sample_method": "probabilistic", "speculative_token_tree": BRANCHES}
CONFIGS = {
    "without replacement": DRAWN,
    "with replacement": DRAWN | {"draft_with_replacement": True},
    "eagle2": {
        "speculative_token_tree": "eagle2",
        "tree_top_k": 2,
        "tree_depth": 2,
        "num_speculative_tokens": 3,
        "rejection_sample_method": "recursive",
    },
}


def sample(config, options, rows=None):
    target, draft = models()
    params = SamplingParams(max_tokens=3, n=SAMPLES, seed=7, **options)
    config = {"method": "draft_model", "model": draft, **config}
    prompts = [[FIRST]] if rows is None else [[FIRST]] * (1 + len(rows))
    sampling = params if rows is None else [*rows, params]
    return generate(target, prompts, config, sampling, verify_width=WIDTH, max_batch_size=BATCH)


@SLOW
@pytest.mark.parametrize(
    "name, options",
    [
        ("without replacement", OPTIONS[5]),
        ("with replacement", OPTIONS[3]),
        ("eagle2", OPTIONS[0]),
    ],
    ids=str,
)
def test_drafted_trees_keep_the_law(name, options):
    result = sample(CONFIGS[name], options)
    assert chi_square(result.sequences, outputs_law(processed_table(TARGET_TABLE, **options))) > 1e-4
    assert 0 < result.stats.draft_acceptance_rate < 1


@SLOW
def test_acceptance_is_what_two_distinct_draws_give_and_greedy_rows_are_greedy():
    """Keeping fewer would be lossless too, and would hide a broken drafter."""
    result = sample(CONFIGS["without replacement"], OPTIONS[1], [SamplingParams(max_tokens=3)])
    best = [int(TARGET_TABLE[FIRST].argmax())]
    while len(best) < 3:
        best.append(int(TARGET_TABLE[best[-1]].argmax()))
    greedy = result.sequences[0]
    assert greedy.token_ids == best
    assert greedy.accepted[0] == (best[0] in np.argsort(-DRAFT_TABLE[FIRST])[:2]) == 1
    sampled = result.sequences[1:]
    assert chi_square(sampled, outputs_law(TARGET_TABLE)) > 1e-4
    p, q = TARGET_TABLE[FIRST], DRAFT_TABLE[FIRST]
    left = np.maximum(p - q, 0) / np.maximum(p - q, 0).sum()
    expected = 0.0
    for x in range(len(p)):
        first, rest = min(1.0, p[x] / q[x]), np.where(np.arange(len(q)) == x, 0, q)
        expected += q[x] * (first + (1 - first) * np.minimum(left, rest / rest.sum()).sum())
    assert sum(s.accepted[0] for s in sampled) / SAMPLES == pytest.approx(expected, abs=0.015)


@SLOW
def test_power_noise_that_rows_share_is_found(monkeypatch):
    """Each child would be drawn by the race that its parent has won."""
    shared = {"noise_key": lambda key, row, purpose: sampling.noise_key(key, 0, purpose)}
    monkeypatch.setattr(children, "sampling_lib", SimpleNamespace(**vars(sampling) | shared))
    result = sample(DRAWN | {"speculative_token_tree": [[0], [1], [0, 0]]}, OPTIONS[1])  # a program of its own
    assert chi_square(result.sequences, outputs_law(TARGET_TABLE)) < 1e-4


# --- what is drawn, without a model -----------------------------------------------------------------------------------


def children_of(law, count, temperature=1.0, samples=20_000, **choice):
    """Children [samples, rows, count] of two rows in flight with the same law, by as many sequences."""
    state = greedy_state(samples).replace(
        temperature=jnp.broadcast_to(jnp.asarray(temperature), samples),
        key=jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(3), jnp.arange(samples)),
    )
    ones = jnp.ones(samples, jnp.int32)
    view = View(
        tokens=ones[:, None], length=ones, last=ones, room=ones, live=ones > 0, cache=None, sampling=state,
        target=TargetView(None, None, RowBlocks(), len(law)), rule="recursive",
    )  # fmt: skip
    logits = jnp.broadcast_to(jnp.log(jnp.asarray(law, jnp.float32)), (samples, 3, len(law)))
    tokens, rows = jnp.zeros((samples, 3), jnp.int32), jnp.array([0, 2])
    wanted = jnp.ones((samples, 2), bool).at[0, 1].set(False)

    @jax.jit
    def run():
        whole = Choice(count, len(law), **choice)
        return choose_children(whole, logits, view, tokens, jnp.eye(3) > 0, tokens[:, 1:], rows, wanted, jnp.int32(0))

    return run()


LAW = np.array([0.45, 0.3, 0.0, 0.2, 0.05])


def p_value(pairs, expected):
    """Of ordered pairs [n, 2] against their law [5, 5]."""
    counts = np.bincount(pairs @ [5, 1], minlength=25).reshape(5, 5)
    assert counts[expected == 0].sum() == 0
    return stats.chisquare(counts[expected > 0], expected[expected > 0] * len(pairs)).pvalue


def test_siblings_are_drawn_one_after_another_from_what_is_left():
    found = children_of(LAW, 5, draw=True)
    tokens = np.asarray(found.tokens)[1:]
    assert (tokens[:, :, 4] == -1).all(), "a law of four tokens has no fifth"
    assert (np.sort(tokens[:, :, :4], axis=-1) == [0, 1, 3, 4]).all()
    left = LAW[None] * (1 - np.eye(5))
    expected = LAW[:, None] * left / left.sum(1, keepdims=True)
    assert p_value(tokens[:, 0, :2], expected) > 1e-4
    assert p_value(tokens[:, :, 0], np.outer(LAW, LAW)) > 1e-4, "two rows are independent of each other"
    np.testing.assert_allclose(found.law[1:], np.broadcast_to(LAW, (len(tokens), 2, 5)), atol=1e-6)
    assert (np.asarray(found.tokens)[0, 1] == -1).all(), "what is not wanted is no child"


def test_siblings_drawn_with_replacement_are_independent():
    tokens = np.asarray(children_of(LAW, 2, draw=True, replacement=True).tokens)[1:]
    assert p_value(tokens[:, 0], np.outer(LAW, LAW)) > 1e-4
    assert p_value(tokens[:, :, 0], np.outer(LAW, LAW)) > 1e-4


def test_likeliest_children_come_in_order_with_their_log_probabilities():
    """At a temperature by the law that it leaves."""
    found = children_of(LAW, 3, (0.0, 0.0, 2.0), samples=3, grade=True)
    assert found.tokens[1:].tolist() == [[[0, 1, 3]] * 2] * 2
    for row, law in ((1, LAW), (2, LAW**0.5)):
        np.testing.assert_allclose(found.log_probs[row, 0], np.log((law / law.sum())[[0, 1, 3]]), atol=1e-5)
