"""Programs are compiled once per shape, and the loop runs on the device alone.

Guards B55: recompilation on every call, a value frozen into the compiled function, a host round trip per round.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from spec_jax.compilation import compiled, program_count
from spec_jax.config import SpeculativeConfig, choose_width
from spec_jax.drafting.registry import build_drafter
from spec_jax.generation import capacity_for, generate
from spec_jax.models.layers import RowBlocks

LENGTHS = (2, 6, 11)
K = 4
BASE = {"max_tokens": 20}


@functools.lru_cache
def prompts(seed=3, lengths=LENGTHS):
    return tiny.prompts_of(tiny.tiny(), lengths, seed=seed)


CONFIGS = {
    "plain": lambda: {},
    "script": lambda: {"drafter": tiny.script([[1]] * 3, K)},
    "ngram": lambda: {"speculative_config": {"method": "ngram", "num_speculative_tokens": K}},
    "layer_skip": lambda: {
        "speculative_config": {"method": "layer_skip", "num_speculative_tokens": K, "exit_layer": 1}
    },
    "draft_model": lambda: {
        "speculative_config": {"method": "draft_model", "num_speculative_tokens": K, "model": tiny.tiny()}
    },
}

OTHER_CALLS = {
    "the same again": (prompts, BASE, {}),
    "other prompts": (lambda: prompts(4), BASE, {}),
    "other lengths in the bucket": (lambda: prompts(5, (40, 1, 23)), BASE, {}),
    "another budget in the bucket": (prompts, {"max_tokens": 37}, {}),
    "budgets per row": (prompts, [{"max_tokens": b} for b in (1, 17, 60)], {}),
    "a seed": (prompts, {**BASE, "seed": 12}, {}),
    "a temperature": (prompts, {**BASE, "temperature": 0.7, "seed": 1}, {}),
    "filters": (prompts, {**BASE, "temperature": 1.1, "top_k": 5, "top_p": 0.9, "min_p": 0.01, "seed": 2}, {}),
    "mixed rows": (prompts, [BASE, {**BASE, "temperature": 1.0}, {**BASE, "stop_token_ids": [3]}], {}),
    "stop ids": (prompts, {**BASE, "stop_token_ids": [7, 8, 9, 10]}, {}),
    "more prompts than rows": (lambda: prompts(6, (1, 2, 3, 4, 5)), BASE, {"max_batch_size": 3}),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_calls_of_one_shape_compile_nothing_new(name):
    options = CONFIGS[name]()
    generate(tiny.tiny(), prompts(), sampling=BASE, **options)
    kept = program_count()
    for what, (given, sampling, more) in OTHER_CALLS.items():
        if "drafter" in options and more:
            continue  # a script belongs to its rows
        result = generate(tiny.tiny(), given(), sampling=sampling, **options, **more)
        assert program_count() == kept, what
        assert result.stats.compile_seconds == 0, what


def test_another_model_of_the_same_shape_compiles_nothing_new():
    """Weights are arguments, not constants: the second model's text is its own."""
    generate(tiny.tiny(), prompts(), sampling=BASE)
    kept = program_count()
    other = tiny.tiny(1)
    assert tiny.plain(other, prompts(), BASE) == [tiny.numpy_greedy(other, p, 20) for p in prompts()]
    assert program_count() == kept


def test_decoders_equal_by_value_share_their_programs():
    """`generate` and a decoder built by hand from the same parts are one and the same."""
    drafter, params = tiny.script([[1]] * 3, K)
    generate(tiny.tiny(), prompts(), sampling=BASE, drafter=(drafter, params))
    kept = program_count()
    decoder, twin = tiny.decoder_of(tiny.tiny(), tiny.ScriptDrafter(K), 3), tiny.decoder_of(tiny.tiny(), drafter, 3)
    assert decoder == twin and hash(decoder) == hash(twin)
    state = tiny.start(decoder, tiny.tiny(), params, prompts(), 20)
    kept = program_count()  # `start` prefills all prompts in one program, `generate` one by one
    tiny.advance(decoder, tiny.tiny(), params, state)
    assert program_count() == kept


def test_another_bucket_compiles_once_and_gives_the_same_text():
    """Nothing of the first shape is frozen: in a larger cache, and past the end of the smaller, the text is right."""
    given = prompts(7, (2, 500, 300))
    [short] = tiny.plain(tiny.tiny(), [given[0]], {"max_tokens": 20})
    before = program_count()
    model = dataclasses.replace(tiny.tiny(), max_model_len=1000)
    result = generate(model, given, sampling={"max_tokens": 40})
    assert result.stats.compile_seconds > 0 and program_count() == before + 3  # prefill, fill, run
    kept = program_count()
    outputs = [s.token_ids for s in result.sequences]
    assert outputs[0][:20] == short
    for prompt, output in zip(given, outputs, strict=True):
        logits = tiny.numpy_logits(model, prompt + output)[len(prompt) - 1 : -1]
        assert output == logits.argmax(axis=-1).tolist()
    generate(model, prompts(8, (900, 1, 1)), sampling={"max_tokens": 20})
    assert program_count() == kept


def test_buckets_are_powers_of_two_of_kv_blocks_that_hold_the_flight():
    for longest, width, slots in [(1, 8, 512), (504, 8, 512), (505, 8, 1024), (1016, 8, 1024), (1009, 16, 2048)]:
        assert capacity_for(longest, width) == slots >= longest + width


@pytest.mark.slow
@pytest.mark.parametrize("method", ["recycling", "jacobi", "lookahead"])
def test_drafters_that_learn_from_logits_need_no_host(method):
    """Their state can be donated as it is made, and no step calls back."""
    model = tiny.tiny()
    drafter, _ = build_drafter(SpeculativeConfig(method=method), model, RowBlocks())
    jax.block_until_ready(jax.jit(lambda s: s, donate_argnums=0)(drafter.init((), None, 3, 512)))
    decoder = tiny.decoder_of(model, drafter, 3, choose_width(drafter.num_nodes, None))
    state = tiny.start(decoder, model, (), prompts(), 20)
    program, _ = compiled(decoder, "run", model.params, (), state, jnp.int32(1000), jnp.int32(1))
    assert not any(word in program.as_text() for word in ("infeed", "outfeed", "callback"))


def test_the_loop_runs_without_host_transfers():
    """Under a guard that forbids every transfer the whole decode runs; the guard does see transfers."""
    model, (drafter, params) = tiny.tiny(), tiny.script([[1]] * 3, K)
    decoder = tiny.decoder_of(model, drafter, 3)
    state = tiny.start(decoder, model, params, prompts(), 20)
    limits = jnp.int32(1000), jnp.int32(1)
    program, _ = compiled(decoder, "run", model.params, params, state, *limits)
    assert not any(word in program.as_text() for word in ("infeed", "outfeed", "callback"))
    jax.block_until_ready((state, limits))
    with jax.transfer_guard("disallow"):
        done = jax.block_until_ready(program(model.params, params, state, *limits))
        with pytest.raises(Exception, match="[Dd]isallowed host-to-device"):
            jnp.add(done.length, np.ones(3, np.int32))
    assert not done.live.any()
    assert done.length.tolist() == [n + 20 for n in LENGTHS]
