"""Where a text ends: stop tokens inside an accepted run, budgets, the context, and edge values of K.

Guards B10 (running past an end token accepted mid-run), B12 (more tokens than asked for), B15 (overrun near the end of
the context, damaged cache entries) and B57 (K = 0, 1, larger than the budget; K = 0 must never draft).
"""

import dataclasses
import functools

import jax
import pytest
import tiny

from spec_jax.config import SpeculativeConfig, choose_width
from spec_jax.drafting.layer_skip import LayerSkipDrafter
from spec_jax.generation import generate
from spec_jax.sampling_params import SamplingParams

LENGTHS = (2, 6, 11)
BUDGET = 20


@functools.lru_cache
def prompts():
    return tiny.prompts_of(tiny.tiny(), LENGTHS, seed=3)


@functools.lru_cache
def expected():
    return tiny.plain(tiny.tiny(), prompts(), {"max_tokens": BUDGET})


@functools.lru_cache
def texts():
    return [p + o for p, o in zip(prompts(), tiny.plain(tiny.tiny(), prompts(), {"max_tokens": 64}), strict=True)]


def oracle(k):
    """A script that is right everywhere."""
    return tiny.script(texts(), k)


def cut(output, stop):
    """`output` up to and including its first token in `stop`."""
    end = next((i for i, t in enumerate(output) if t in stop), None)
    return (output, "length") if end is None else (output[: end + 1], "stop")


def check(result, wanted):
    """Every sequence equals (token ids, finish reason), and its counts describe exactly these tokens."""
    for sequence, (ids, reason) in zip(result.sequences, wanted, strict=True):
        assert sequence.token_ids == ids
        assert sequence.finish_reason == reason
        assert sequence.stats.num_emitted_tokens == len(ids) == len(sequence.accepted)
        assert sequence.stats.num_accepted_tokens == sum(sequence.accepted)


def draft_model(k):
    return {"method": "draft_model", "num_speculative_tokens": k, "model": tiny.tiny()}


METHODS = {
    "plain": lambda: (None, None),
    "script 1": lambda: (None, oracle(1)),
    "script 7": lambda: (None, oracle(7)),
    "ngram": lambda: ({"method": "ngram", "num_speculative_tokens": 4}, None),
    "layer_skip": lambda: ({"method": "layer_skip", "num_speculative_tokens": 4, "exit_layer": 1}, None),
    "draft_model": lambda: (draft_model(4), None),
    "jacobi": lambda: ({"method": "jacobi", "num_speculative_tokens": 4}, None),
    "recycling": lambda: ({"method": "recycling"}, None),
    "lookahead": lambda: ({"method": "lookahead"}, None),
}
LEARNING = [pytest.param(name, marks=pytest.mark.slow) for name in ("jacobi", "recycling", "lookahead")]
"""Drafters that learn from the target's logits."""


def run(name, sampling, model=None, given=None):
    config, drafter = METHODS[name]()
    return generate(model or tiny.tiny(), given or prompts(), config, sampling, drafter=drafter)


# --- stop tokens ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", range(9))
@pytest.mark.parametrize("name", ["script 7", "script 1", "draft_model"])
def test_a_stop_token_ends_the_row_wherever_it_stands_in_a_run(name, index):
    """K = 7, all right: offsets 0..6 are accepted drafts, 7 is the bonus token, 8 opens the next round."""
    stop = expected()[1][index]
    sampling = {"max_tokens": BUDGET, "stop_token_ids": [stop]}
    wanted = [cut(o, {stop}) for o in expected()]
    check(run(name, sampling), wanted)
    assert wanted[1][1] == "stop" and len(wanted[1][0]) <= index + 1


@pytest.mark.parametrize("name", ["plain", "script 7", "ngram", "layer_skip", *LEARNING])
def test_the_models_own_end_tokens_stop_unless_ignored(name):
    ends = (expected()[0][3], expected()[2][9])
    model = dataclasses.replace(tiny.tiny(), eos_token_ids=ends)
    check(run(name, {"max_tokens": BUDGET}, model), [cut(o, set(ends)) for o in expected()])
    ignoring = {"max_tokens": BUDGET, "ignore_eos": True}
    check(run(name, ignoring, model), [(o, "length") for o in expected()])
    both = {"max_tokens": BUDGET, "stop_token_ids": [expected()[1][5]]}
    check(run(name, both, model), [cut(o, {*ends, expected()[1][5]}) for o in expected()])
    only_asked = {**both, "ignore_eos": True}
    check(run(name, only_asked, model), [cut(o, {expected()[1][5]}) for o in expected()])


@pytest.mark.parametrize("name", ["plain", "script 7"])
def test_stop_tokens_are_per_row(name):
    rows = [
        {"max_tokens": BUDGET, "stop_token_ids": [expected()[0][4]]},
        {"max_tokens": BUDGET},
        {"max_tokens": BUDGET, "stop_token_ids": [expected()[2][0], expected()[2][1], 1, 2]},
    ]
    check(run(name, rows), [cut(o, set(r.get("stop_token_ids", ()))) for o, r in zip(expected(), rows, strict=True)])


def test_a_stop_token_in_the_prompt_does_not_stop():
    outputs = expected()
    stop = next(t for p in prompts() for t in p if all(t not in o for o in outputs))
    check(run("script 7", {"max_tokens": BUDGET, "stop_token_ids": [stop]}), [(o, "length") for o in outputs])


def test_a_stop_token_that_is_also_the_last_allowed_one_counts_as_stop():
    stop = expected()[1][6]
    assert stop not in expected()[1][:6]
    wanted = [cut(o[:7], {stop}) for o in expected()]
    assert wanted[1] == (expected()[1][:7], "stop")
    check(run("script 7", {"max_tokens": 7, "stop_token_ids": [stop]}), wanted)


# --- budgets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*list(METHODS)[:-3], *LEARNING])
def test_never_more_tokens_than_asked_for(name):
    for budget in range(10):
        check(run(name, {"max_tokens": budget}), [(o[:budget], "length") for o in expected()])


@pytest.mark.parametrize("name", ["plain", "script 7", "draft_model"])
@pytest.mark.parametrize("budgets", [(1, 9, 20), (20, 1, 8), (7, 8, 9)])
def test_budgets_are_per_row(name, budgets):
    sampling = [{"max_tokens": b} for b in budgets]
    check(run(name, sampling), [(o[:b], "length") for o, b in zip(expected(), budgets, strict=True)])


def test_a_budget_of_zero_runs_no_model_and_leaves_the_others_alone():
    broken = dataclasses.replace(tiny.tiny(), params=None)
    result = generate(broken, prompts(), {"method": "ngram"}, {"max_tokens": 0})
    check(result, [([], "length")] * 3)
    assert result.stats.mean_acceptance_length is None
    given = [*prompts(), [5]]
    mixed = [{"max_tokens": b} for b in (BUDGET, BUDGET, BUDGET, 0)]
    result = generate(tiny.tiny(), given, None, mixed, drafter=oracle(7))
    check(result, [(o, "length") for o in expected()] + [([], "length")])


# --- context ----------------------------------------------------------------------------------------------------------


@functools.lru_cache
def context_texts():
    """Prompts of 26..32 tokens and what plain decoding makes of them without a limit."""
    given = tiny.prompts_of(tiny.tiny(), range(26, 33), seed=5)
    outputs = [o for i in range(0, 7, 3) for o in tiny.plain(tiny.tiny(), pad(given[i : i + 3]), {"max_tokens": 20})]
    return given, outputs[:7]


def pad(group):
    """Three prompts, so that every call shares its programs."""
    return (group * 3)[:3]


@pytest.mark.parametrize("name", ["plain", "script 7", "ngram", "layer_skip", "draft_model", *LEARNING])
def test_prompt_and_output_never_exceed_the_context(name):
    model = dataclasses.replace(tiny.tiny(), max_model_len=32)
    given, outputs = context_texts()
    for first in range(0, 7, 3):
        group, wanted = pad(given[first : first + 3]), pad(outputs[first : first + 3])
        config, drafter = METHODS[name]()
        if drafter:
            drafter = tiny.script([p + o for p, o in zip(group, wanted, strict=True)], 7)
        if len(given[first]) == 32:
            check(generate(model, group, config, {"max_tokens": 50}, drafter=drafter), [([], "context")] * 3)
            continue
        result = generate(model, group, config, {"max_tokens": 50}, drafter=drafter)
        check(result, [(o[: 32 - len(p)], "context") for p, o in zip(group, wanted, strict=True)])


def test_a_row_that_ends_exactly_at_the_context_by_its_budget_reports_length():
    model = dataclasses.replace(tiny.tiny(), max_model_len=32)
    given, outputs = context_texts()
    sampling = [{"max_tokens": b} for b in (6, 6, 4)]  # prompts of 26, 27, 28 tokens
    result = generate(model, given[:3], None, sampling)
    check(result, [(outputs[0][:6], "length"), (outputs[1][:5], "context"), (outputs[2][:4], "length")])


def test_a_prompt_longer_than_the_context_is_refused():
    model = dataclasses.replace(tiny.tiny(), max_model_len=32)
    with pytest.raises(ValueError, match="prompt 1 has 33 tokens.*context of 32"):
        generate(model, [[1], [1] * 33], None, {"max_tokens": 4})


@functools.lru_cache
def near_the_end(limit):
    """A model of this context, prompts that end shortly before it, and the text by an uncached recompute."""
    model = dataclasses.replace(tiny.tiny(), max_model_len=limit)
    given = tiny.prompts_of(model, (limit - 6, limit - 3, limit - 1), seed=8)
    return model, given, [p + tiny.numpy_greedy(model, p, limit - len(p)) for p in given]


@pytest.mark.parametrize("name", ["script", "layer_skip"])
@pytest.mark.parametrize("limit", [32, 504, 512])
def test_every_live_cache_entry_at_the_limit_is_that_of_plain_decoding(name, limit):
    """The cache has 512 slots: at 504 the last flights just fit, at 512 they reach beyond its end."""
    model, given, wanted = near_the_end(limit)
    script = tiny.script(wanted, 7, [limit - 4], size=600)
    pairs = {"script": script, "layer_skip": (LayerSkipDrafter(4, (0,)), ())}
    states = []
    for drafter, params in (pairs[name], (tiny.plain_drafter(), ())):
        decoder = tiny.decoder_of(model, drafter, 3)
        state = tiny.start(decoder, model, params, given, 50, capacity=512)
        states.append(tiny.advance(decoder, model, params, state))
    for state in states:
        assert state.length.tolist() == [limit] * 3
        assert state.tokens[:, :limit].tolist() == wanted
    for row in range(3):
        tiny.assert_same_cache(*(s.cache for s in states), row, limit - 1)


# --- edge values of K -------------------------------------------------------------------------------------------------


class Forbidden(tiny.ScriptDrafter):
    """A drafter that must not be asked."""

    def propose(self, params, state, view):
        raise AssertionError("propose was called")


def test_k_zero_never_calls_the_drafter():
    _, params = oracle(4)
    for k in (0, 4):
        decoder = tiny.decoder_of(tiny.tiny(), Forbidden(k), 3)
        state = tiny.start(tiny.decoder_of(tiny.tiny(), tiny.plain_drafter(), 3), tiny.tiny(), (), prompts(), BUDGET)
        if k == 0:
            jax.eval_shape(decoder.run, tiny.tiny().params, params, state, 1)
            continue
        with pytest.raises(AssertionError, match="propose was called"):
            jax.eval_shape(decoder.run, tiny.tiny().params, params, state, 1)


@pytest.mark.parametrize("method", ["ngram", "layer_skip", "draft_model", "jacobi", "recycling", "lookahead"])
def test_k_zero_of_every_method_is_plain_decoding(method):
    options = {"model": tiny.tiny()} if method == "draft_model" else {}
    config = {"method": method, "num_speculative_tokens": 0, **options}
    result = generate(tiny.tiny(), prompts(), config, {"max_tokens": BUDGET})
    check(result, [(o, "length") for o in expected()])
    assert result.stats.num_steps == 3 * BUDGET
    assert result.stats.num_drafts == result.stats.num_draft_tokens == result.stats.num_accepted_tokens == 0


@pytest.mark.parametrize("k", [16, pytest.param(2, marks=pytest.mark.slow)])
def test_other_values_of_k(k):
    """16 is larger than the budget and than the default width; the text is that of width 8."""
    text, wrong = texts()[1], [LENGTHS[1] + 2]
    for budget in (1, 5, 15):
        result = generate(
            tiny.tiny(), [prompts()[1]], None, {"max_tokens": budget}, drafter=tiny.script([text], k, wrong)
        )
        check(result, [(expected()[1][:budget], "length")])
        assert result.verify_width == (8 if k == 2 else 32)
    assert result.stats.draft_acceptance_rate > 0.5


@pytest.mark.parametrize("k", [-1, 1.5, "4", True, float("nan")])
def test_k_must_be_a_natural_number(k):
    with pytest.raises(ValueError, match="num_speculative_tokens="):
        SpeculativeConfig(method="ngram", num_speculative_tokens=k)
    with pytest.raises(ValueError, match="num_speculative_tokens="):
        generate(tiny.tiny(), prompts(), {"method": "ngram", "num_speculative_tokens": k})


def test_the_width_holds_the_drafts_and_the_last_token():
    assert [choose_width(k, None) for k in (0, 1, 7, 8, 15, 16, 31)] == [8, 8, 8, 16, 16, 32, 32]
    with pytest.raises(ValueError, match="verify_width=4 cannot hold 4 draft tokens"):
        choose_width(4, 4)
    with pytest.raises(ValueError, match="verify_width=4 cannot hold 4 draft tokens"):
        generate(tiny.tiny(), prompts(), {"method": "ngram", "num_speculative_tokens": 4}, verify_width=4)


@pytest.mark.parametrize("budget", [2**31 - 1, 2**31, 10**12])
def test_a_budget_beyond_32_bits_runs_to_the_end_of_the_context(budget):
    model = dataclasses.replace(tiny.tiny(), max_model_len=64)
    sequence = generate(model, [[1, 2, 3]], None, SamplingParams(max_tokens=budget)).sequences[0]
    assert (len(sequence.token_ids), sequence.finish_reason) == (61, "context")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", ["coupled", "standard", "block", "recursive"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_numbers_are_an_error_not_a_text(value, rule, temperature):
    """One damaged row of the head, and a damaged norm; sampled rows must not take it for having no token left."""
    model = tiny.tiny()
    head = model.params["lm_head"].at[40].set(value)
    for broken in (dict(model.params, lm_head=head), dict(model.params, final_norm=model.params["final_norm"] * value)):
        damaged = dataclasses.replace(model, params=broken)
        config = {"method": "ngram", "num_speculative_tokens": 4, "rejection_sample_method": rule}
        with pytest.raises(ValueError, match="not numbers"):
            # Three rows: under `coupled` the program of the tests above.
            params = SamplingParams(max_tokens=4, temperature=temperature, top_k=9)
            generate(damaged, [[1, 2, 1, 2], [5], [1, 1]], config, params)


@pytest.mark.parametrize("prompts", [[1, 2, 3], [{"role": "user", "content": "hi"}]], ids=["ids", "messages"])
def test_a_single_prompt_outside_a_list_gets_the_fix_named(prompts):
    with pytest.raises(ValueError, match="wrap it in a list"):
        generate(tiny.tiny(), prompts)
