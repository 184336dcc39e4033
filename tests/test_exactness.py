"""The exactness ladder on tiny models: equal logit bits and text across drafters, K, width, batch and bucket.

The same on the real model is in test_real_model.py.
"""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from tiny import experiment, plain, prompts_of, script, tiny

from spec_jax import exactness
from spec_jax.drafting.base import NoDrafter
from spec_jax.generation import generate
from spec_jax.models.layers import RowBlocks
from spec_jax.sampling_params import SamplingParams

SLOW = pytest.mark.slow


@SLOW  # every check is a program; in the fast tests `doctor` runs all of them on a packed model
@pytest.mark.parametrize(
    "shape",
    [
        # 768: no count agrees
        {"layers": 1, "hidden": 768, "heads": 3, "kv_heads": 1, "head_dim": 32, "vocab": 1003},
        {"layers": 1, "hidden": 160, "heads": 6, "kv_heads": 2, "head_dim": 80, "vocab": 517},
        {"dtype": "bfloat16"},
    ],
    ids=["one KV head", "head_dim 80", "bfloat16"],
)
def test_every_check_holds_on_this_device(shape):
    report = exactness.check_exactness(tiny(**shape), tokens=20)
    assert report.level == "E2", report
    assert all(c.passed and c.max_abs_diff == 0.0 for c in report.checks)
    assert {c.level for c in report.checks} == {"E1", "E2"}


@SLOW
def test_power_row_counts_that_follow_the_width_are_found(monkeypatch):
    model = tiny(hidden=288, heads=9, kv_heads=3, head_dim=32, layers=1)
    monkeypatch.setattr(exactness, "row_blocks", lambda exact, batch, width, module: RowBlocks(block=32))
    report = exactness.check_exactness(model, tokens=16)
    assert report.level != "E2"


@SLOW
def test_power_dead_logits_do_not_count_as_equal():
    model = tiny(layers=1)
    dead = dataclasses.replace(model, params=jax.tree.map(lambda x: x * jnp.nan, model.params))
    assert exactness.check_exactness(dead, tokens=16).level == "E0"


@pytest.mark.parametrize("exact, batch, level", [(True, 8, "E2"), (None, 3, "E2"), (None, 8, "E1"), (False, 1, "E0")])
def test_the_level_reported_is_the_one_asked_for(exact, batch, level):
    rows = exactness.row_blocks(exact, batch, 8)
    assert exactness.level_of(rows, exact, tree=False) == level


def test_text_is_the_same_whatever_the_width_the_batch_and_the_bucket():
    model = tiny()
    prompts = prompts_of(model, [5, 1, 17])
    params = SamplingParams(max_tokens=20)
    want = plain(model, prompts, params, exact=True)
    assert plain(model, prompts, params, exact=True, verify_width=16) == want
    assert plain(model, prompts, SamplingParams(max_tokens=150), exact=True, max_batch_size=1)[0][:20] == want[0]
    full = [p + w for p, w in zip(prompts, want, strict=True)]
    for k in (1, 7):
        got = generate(model, prompts, None, params, exact=True, drafter=script(full, k, wrong=[3, 9, 20]))
        assert [s.token_ids for s in got.sequences] == want
        assert got.exactness == "E2" and got.stats.num_accepted_tokens > 0


@SLOW
def test_below_the_row_block_plain_and_speculative_runs_still_have_the_same_bits():
    """E1: batch 8 and width 8 exceed one block of 32 rows, so only runs of this very shape are promised to agree."""
    record = experiment("exactness").record
    model = tiny(hidden=288, heads=9, kv_heads=3, head_dim=32, layers=1)
    prompts = prompts_of(model, [3, 30, 1, 7, 12, 5, 9, 20])
    rows = exactness.row_blocks(None, 8, 8, model.module)  # what `generate` would ask for
    assert exactness.level_of(rows, None, tree=False) == "E1"
    text, sums, _ = record(model, prompts, NoDrafter(), (), None, 256, 16)
    assert len(set(map(tuple, sums))) == 8
    drafter, params = script([p + t for p, t in zip(prompts, text, strict=True)], 7, wrong=[9, 14, 33])
    again, sums_again, length = record(model, prompts, drafter, params, None, 256, 16)
    assert (again, sums_again) == (text, sums) and length > 3


def test_near_ties_are_counted_at_the_emitted_tokens():
    model = tiny()
    tied = dict(model.params)
    tied["lm_head"] = jnp.concatenate([tied["lm_head"][:48], tied["lm_head"][:49]])  # ids 48.. repeat ids 0..48
    model = dataclasses.replace(model, params=tied)
    result = generate(model, [[1, 2, 3]], {"method": "ngram"}, SamplingParams(max_tokens=12))
    ties = [t < 48 for t in result.sequences[0].token_ids]  # an exact tie goes to the lower id
    assert result.stats.near_ties == 12 and all(ties)
    assert generate(tiny(), [[1, 2, 3]], {"method": "ngram"}, SamplingParams(max_tokens=12)).stats.near_ties == 0


def test_bad_values_are_refused():
    with pytest.raises(ValueError, match="exact='yes'"):
        exactness.row_blocks("yes", 1, 8)
    with pytest.raises(ValueError, match="tokens=3"):
        exactness.check_exactness(tiny(), tokens=3)
