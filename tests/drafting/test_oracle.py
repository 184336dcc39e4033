"""The synthetic drafter: the acceptance that was asked for, and the remark that it is synthetic."""

import numpy as np
import pytest
import tiny

from spec_jax.generation import generate


@pytest.mark.parametrize("rate", [0.6, *(pytest.param(r, marks=pytest.mark.slow) for r in (0.0, 1.0))])
def test_the_acceptance_rate_is_the_one_asked_for(rate):
    model, sampling, prompts = tiny.tiny(), {"max_tokens": 120}, [[7], [0, 9, 0, 9], [4, 5, 6, 7] * 4]
    plain = tiny.plain(model, prompts, sampling)
    texts = [prompt + text for prompt, text in zip(prompts, plain, strict=True)]
    config = {"method": "oracle", "num_speculative_tokens": 4, "oracle_texts": texts, "oracle_acceptance": rate}
    result = generate(model, prompts, config, sampling)
    assert [s.token_ids for s in result.sequences] == plain
    stats = result.stats
    tried = sum(min(n + 1, 4) * count for n, count in enumerate(stats.acceptance_histogram))
    assert stats.num_accepted_tokens / tried == pytest.approx(rate, abs=0.0 if rate in (0, 1) else 0.12)
    assert stats.remark == f"synthetic: drafts replay recorded texts, {rate:.0%} of their tokens right"


@pytest.mark.slow
def test_a_text_that_was_not_recorded_has_no_drafts_and_others_have():
    model, sampling, prompts = tiny.tiny(), {"max_tokens": 20}, [[7], [0, 9, 0, 9]]
    plain = tiny.plain(model, prompts, sampling)
    config = {"method": "oracle", "oracle_texts": [prompts[1] + plain[1]], "oracle_acceptance": 1.0}
    result = generate(model, prompts, config, sampling)
    assert [s.token_ids for s in result.sequences] == plain
    assert [s.stats.num_drafts > 0 for s in result.sequences] == [False, True]
    assert np.mean(result.sequences[1].accepted) > 0.8
