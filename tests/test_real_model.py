"""The default model, for real: bit-identical text and logits across drafters, batch and bucket, in both dtypes.

The whole matrix (K in 1, 3, 4, 7 and batch 1, 3, 8) is experiments/exactness.py; its figures are in the README.
"""

import pytest
from tiny import experiment

import spec_jax

PROMPT = [[{"role": "user", "content": "Name the four seasons, one per line."}]]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_text_and_logits_are_bit_identical_across_drafters_and_batch(dtype):
    exactness = experiment("exactness")
    target = spec_jax.load_model("smollm2-135m-instruct", dtype=dtype)
    lines = exactness.run_matrix(target, quick=True, exact=True, max_tokens=16, report=lambda line: None)
    assert len(lines) == 5
    assert [line for line in lines if line["text"] != "equal" or line["logits"] != "equal"] == []
    accepted = {line["drafter"]: line["mean_acceptance_length"] for line in lines}
    assert accepted["draft_model self"] > 4 and accepted["ngram"] > 1


@pytest.mark.slow
def test_the_default_call_answers_stops_and_is_exact():
    target = spec_jax.load_model("smollm2-135m-instruct")
    params = spec_jax.SamplingParams(max_tokens=60)
    plain = spec_jax.generate(target, PROMPT, None, params)
    drafted = spec_jax.generate(target, PROMPT, {"method": "ngram"}, params)
    sequence = plain.sequences[0]
    assert sequence.token_ids == drafted.sequences[0].token_ids
    assert plain.exactness == drafted.exactness == "E2"
    assert sequence.finish_reason == "stop" and sequence.token_ids[-1] in target.eos_token_ids
    assert "Winter" in sequence.text and "<|im_end|>" not in sequence.text
