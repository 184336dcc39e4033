"""The default model, for real: bit-identical text and logits across drafters, batch and bucket.

The whole matrix (K in 1, 3, 4, 7 and batch 1, 3, 8) is experiments/exactness.py; its figures are in the README. The
same in bfloat16 is in test_real_model_bfloat16.py: a file runs in one process, and each takes minutes to compile.
"""

import pytest
from tiny import experiment

import spec_jax

PROMPT = [[{"role": "user", "content": "Name the four seasons, one per line."}]]


@pytest.mark.slow
def test_text_and_logits_are_bit_identical_across_drafters_and_batch():
    check_matrix("float32")


def check_matrix(dtype):
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


EVERYTHING = {
    "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1, "logit_bias": {28: -2.0},
    "bad_words": ["the", "season"], "min_tokens": 2, "stop": ["Autumn", "\n\n"], "logprobs": 2,
}  # fmt: skip


@pytest.mark.slow
def test_options_slots_sessions_and_streams_are_exact_too():
    """Three prompts in two slots with every kind of option, a stream and a second turn: always plain decoding."""
    target = spec_jax.load_model("smollm2-135m-instruct")
    # All layers draft: every draft is right, options and all, and runs end anywhere in the text.
    config = {"method": "layer_skip", "exit_layer": target.config.num_layers, "num_speculative_tokens": 3}
    # Longer than a prefill chunk, so that the third prompt finds the chunk that it shares with the first.
    long = [{"role": "system", "content": "You answer with care. " * 12}, *PROMPT[0]]
    prompts = [long, [{"role": "user", "content": "Count from one to nine in words."}], long]
    params = [{**EVERYTHING, "max_tokens": 24, "temperature": t, "seed": 5, "top_p": 0.9} for t in (0.0, 0.7, 1.2)]
    plain = spec_jax.generate(target, prompts, None, params, max_batch_size=2)
    drafted = spec_jax.generate(target, prompts, config, params, max_batch_size=2)
    assert plain.exactness == drafted.exactness == "E2" and drafted.stats.num_accepted_tokens > 0

    def seen(result):
        return [(s.token_ids, s.text, s.finish_reason, s.logprobs) for s in result.sequences]

    assert seen(plain) == seen(drafted)
    assert drafted.sequences[2].stats.num_cached_tokens > 0  # the prompt of the first
    flow = spec_jax.stream(target, prompts[0], config, params[0])
    assert "".join(flow) == plain.sequences[0].text
    assert seen(flow.result) == seen(plain)[:1]
    more = [{"role": "user", "content": "Now backwards."}]
    again = flow.result.session.generate(more, params[1])
    talk = [*prompts[0], {"role": "assistant", "content": plain.sequences[0].text}, *more]
    assert seen(again) == seen(spec_jax.generate(target, [talk], config, params[1]))
    assert again.stats.num_cached_tokens > 0
