"""Rows are independent: a row's text depends on its own prompt, parameters and seed, never on its batch mates.

Guards B08 (padding rows and unset options), B19 (ragged accept counts), B24 (seeds), B25 (temperature 0, exact ties,
mixed batches) and B34 (state that leaks from one call into the next).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from spec_jax.filters import process
from spec_jax.generation import generate
from spec_jax.sampling import mask_padding
from spec_jax.sampling_params import SamplingParams

BUDGET = 20
LENGTHS8 = (1, 2, 3, 5, 8, 13, 17, 20)


@functools.lru_cache
def prompts8():
    return tiny.prompts_of(tiny.tiny(), LENGTHS8, seed=11)


def prompts3():
    return [prompts8()[i] for i in (0, 3, 7)]


@functools.lru_cache
def texts8():
    outputs = [o for p in prompts8() for o in tiny.plain(tiny.tiny(), [p], {"max_tokens": BUDGET})]
    return [p + o for p, o in zip(prompts8(), outputs, strict=True)]


def emitted(result):
    return [s.token_ids for s in result.sequences]


# --- ragged batches ---------------------------------------------------------------------------------------------------


def wrong8():
    """Row r accepts min(r, 4) tokens per round: its first wrong proposal stands r positions behind the last token."""
    return [list(range(n + r, 300, r + 1)) for r, n in enumerate(LENGTHS8[:4])] + [[]] * 4


def run8(order):
    texts, wrong = [texts8()[i] for i in order], [wrong8()[i] for i in order]
    drafter = tiny.script(texts, 4, wrong)
    return generate(
        tiny.tiny(), [prompts8()[i] for i in order], None, {"max_tokens": BUDGET}, exact=True, drafter=drafter
    )


def test_every_row_of_a_ragged_batch_equals_itself_alone():
    """Text, accept flags and counts; so the slowest row does not decide how much the others keep."""
    together = run8(range(8)).sequences
    for row, sequence in enumerate(together):
        drafter = tiny.script([texts8()[row]], 4, [wrong8()[row]])
        [alone] = generate(tiny.tiny(), [prompts8()[row]], None, {"max_tokens": BUDGET}, drafter=drafter).sequences
        assert sequence.token_ids == alone.token_ids == texts8()[row][LENGTHS8[row] :]
        assert sequence.accepted == alone.accepted
        assert sequence.stats == alone.stats
        first = min(row, 4)
        assert sequence.accepted[: first + 1] == [True] * first + [False]
    assert len({s.stats.num_steps for s in together}) >= 4  # the rows really move at different speeds


def test_the_order_of_rows_does_not_matter():
    straight = run8(range(8)).sequences
    order = (5, 0, 7, 2, 6, 1, 4, 3)
    for place, sequence in zip(order, run8(order).sequences, strict=True):
        assert sequence.token_ids == straight[place].token_ids
        assert sequence.stats == straight[place].stats


@pytest.mark.parametrize("size", [1, 2, 3])
def test_more_prompts_than_fit_keep_their_order(size):
    result = generate(tiny.tiny(), prompts8(), None, {"max_tokens": BUDGET}, max_batch_size=size)
    assert [p + o for p, o in zip(prompts8(), emitted(result), strict=True)] == texts8()
    assert [s.prompt_index for s in result.sequences] == list(range(8))
    assert result.stats.num_emitted_tokens == 8 * BUDGET


# --- seeds ------------------------------------------------------------------------------------------------------------


def draft_model():
    return {"method": "draft_model", "num_speculative_tokens": 4, "model": tiny.tiny()}


METHODS = {
    "plain": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 4},
    "layer_skip": {"method": "layer_skip", "num_speculative_tokens": 4, "exit_layer": 1},
    "draft_model": draft_model,
}
FILTERS = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 12, "top_p": 0.9},
    {"temperature": 1.0, "top_p": 0.8, "min_p": 0.02},
]


def sampled(name, rows, given=None):
    config = METHODS[name]
    return generate(tiny.tiny(), given or prompts3(), config() if callable(config) else config, rows)


def rows_of(options, seeds):
    return [{"max_tokens": BUDGET, "seed": s, **options} for s in seeds]


@pytest.mark.parametrize("options", FILTERS, ids=["plain", "top_k+top_p", "top_p+min_p"])
def test_same_seed_same_text_whatever_the_drafter(options):
    rows = rows_of(options, (1, 2**40 + 3, 2**64 - 1))
    reference = emitted(sampled("plain", rows))
    assert reference != emitted(generate(tiny.tiny(), prompts3(), None, {"max_tokens": BUDGET}))
    for name in METHODS:
        assert emitted(sampled(name, rows)) == reference
    texts = [p + o for p, o in zip(prompts3(), reference, strict=True)]
    for k, wrong in ((1, ()), (4, [list(range(n + 2, 60, 3)) for n in map(len, prompts3())]), (7, "all"), (7, ())):
        result = generate(tiny.tiny(), prompts3(), None, rows, drafter=tiny.script(texts, k, wrong))
        assert emitted(result) == reference
        if not wrong:  # under the coupled rule the right guess is always accepted, sampled or not
            assert result.stats.draft_acceptance_rate == 1
    alone = [sampled("plain", [r], [p]).sequences[0].token_ids for r, p in zip(rows, prompts3(), strict=True)]
    assert alone == reference


def test_an_oracle_draft_model_is_always_accepted_when_sampling():
    """Drafter and target share the noise of a position, so equal distributions pick equal tokens."""
    result = sampled("draft_model", rows_of({"temperature": 1.0, "top_p": 0.9}, (5, 6, 7)))
    assert result.stats.draft_acceptance_rate == 1
    assert result.stats.num_steps == 3 * BUDGET // 5


def test_a_seeded_row_does_not_depend_on_its_batch_mates_or_its_place():
    prompt = prompts8()[4]
    mine = {"temperature": 1.0, "max_tokens": BUDGET, "seed": 42}
    others = [{"temperature": 1.0, "max_tokens": 9, "seed": 7}, {"temperature": 0.8, "max_tokens": BUDGET}]
    [alone] = emitted(sampled("plain", [mine], [prompt]))
    for place in range(3):
        rows = [*others[:place], mine, *others[place:]]
        given = [prompts8()[6]] * 3
        given[place] = prompt
        assert emitted(sampled("plain", rows, given))[place] == alone


def test_equal_prompts_with_equal_seeds_give_equal_text():
    row = {"temperature": 1.0, "max_tokens": BUDGET, "seed": 3}
    a, b, c = emitted(sampled("ngram", [row, {**row, "seed": 4}, row], [prompts8()[5]] * 3))
    assert a == c != b


def test_unseeded_rows_differ_and_report_seeds_that_reproduce_them():
    free = {"temperature": 1.0, "max_tokens": 2 * BUDGET}  # one pair in 4000 agrees in 20 tokens
    first = sampled("plain", free, [prompts8()[5]] * 3).sequences
    second = sampled("plain", free, [prompts8()[5]] * 3).sequences
    assert len({tuple(s.token_ids) for s in (*first, *second)}) == 6
    again = sampled("plain", [{**free, "seed": s.seed} for s in first], [prompts8()[5]] * 3)
    assert emitted(again) == [s.token_ids for s in first]


def test_samples_of_one_prompt_differ_and_come_prompt_major():
    params = SamplingParams(temperature=1.0, max_tokens=BUDGET, seed=9, n=3)
    result = generate(tiny.tiny(), prompts8()[4:6], None, params, max_batch_size=3)
    assert [s.prompt_index for s in result.sequences] == [0, 0, 0, 1, 1, 1]
    assert len({tuple(s.token_ids) for s in result.sequences}) == 6
    assert result.sequences[0].seed == result.sequences[3].seed == 9
    assert [s.seed for s in result.sequences[:3]] == [s.seed for s in result.sequences[3:]]
    rows = [{"temperature": 1.0, "max_tokens": BUDGET, "seed": s.seed} for s in result.sequences[:3]]
    assert emitted(sampled("plain", rows, [prompts8()[4]] * 3)) == [s.token_ids for s in result.sequences[:3]]


def test_the_seed_does_not_matter_at_temperature_zero():
    results = [emitted(sampled("plain", rows_of({}, seeds))) for seeds in ((0, 1, 2), (None, 5, 2**64 - 1))]
    assert results[0] == results[1] == [texts8()[i][LENGTHS8[i] :] for i in (0, 3, 7)]


# --- greedy -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{"top_p": 0.5}, {"top_k": 5}, {"min_p": 0.1}, {"top_p": 0.5, "top_k": 5, "seed": 1}]
)
def test_temperature_zero_is_greedy_whatever_else_is_set(options):
    expected = [texts8()[i][LENGTHS8[i] :] for i in (0, 3, 7)]
    for name in ("plain", "ngram"):
        assert emitted(sampled(name, {"max_tokens": BUDGET, **options})) == expected


def test_a_filter_without_a_temperature_stays_greedy_as_documented():
    assert SamplingParams(top_k=50).temperature == 0.0


@pytest.mark.parametrize("temperature", [1e-4, 1e-30])
def test_tiny_temperatures_approach_greedy(temperature):
    expected = [texts8()[i][LENGTHS8[i] :] for i in (0, 3, 7)]
    assert emitted(sampled("plain", {"max_tokens": BUDGET, "temperature": temperature, "seed": 1})) == expected


@pytest.mark.parametrize("temperature", [1.2e-38, 1e-300, 1e39, -1.0, float("inf"), float("nan"), "1", None, True])
def test_temperatures_that_float32_cannot_divide_by_are_refused(temperature):
    with pytest.raises(ValueError, match="temperature=.* is not allowed; it must be 0 .greedy. or between"):
        SamplingParams(temperature=temperature)


@pytest.mark.parametrize("temperature", [1e-30, 1e30])
def test_extreme_temperatures_keep_the_vocabulary_and_only_it(temperature):
    """Neither padding's -inf divided by a huge number nor a logit divided by a tiny one may become NaN or inf."""
    logits = jnp.asarray(np.random.default_rng(0).normal(size=97) * 50, jnp.float32)
    scores = np.asarray(jax.jit(process)(mask_padding(logits, 90), temperature, 0, 1.0, 0.0))
    assert np.isfinite(scores[:90]).all() and (scores[90:] == -np.inf).all()
    assert scores.argmax() == logits[:90].argmax()


def test_a_top_k_beyond_every_integer_type_keeps_all():
    rows = rows_of({"temperature": 1.0, "top_k": 2**40}, (1, 2, 3))
    assert emitted(sampled("plain", rows)) == emitted(sampled("plain", rows_of({"temperature": 1.0}, (1, 2, 3))))


@pytest.mark.parametrize(
    "options", [{"top_k": 1}, {"top_p": 1e-6}, {"top_p": 1e-44}, {"top_p": 1e-300}, {"min_p": 1.0}]
)
def test_a_filter_that_leaves_one_token_is_greedy(options):
    expected = [texts8()[i][LENGTHS8[i] :] for i in (0, 3, 7)]
    assert emitted(sampled("plain", {"max_tokens": BUDGET, "temperature": 1.0, "seed": 1, **options})) == expected


@pytest.mark.parametrize("name", METHODS)
def test_greedy_and_sampled_rows_share_a_batch_unchanged(name):
    """The middle row is greedy; a filler row is what pads the second group."""
    rows = [
        {"temperature": 0.7, "top_k": 5, "max_tokens": BUDGET, "seed": 1},
        {"max_tokens": BUDGET},
        {"temperature": 1.5, "top_p": 0.9, "max_tokens": 7, "seed": 2},
    ]
    reference = [emitted(sampled("plain", [r], [p]))[0] for r, p in zip(rows, prompts3(), strict=True)]
    assert reference[1] == texts8()[3][LENGTHS8[3] :]
    assert emitted(sampled(name, rows)) == reference


def test_rows_that_pad_the_last_group_change_nothing():
    rows = [{"temperature": t, "max_tokens": BUDGET, "seed": 3} for t in (1.0, 0.0, 0.7, 1.3)]
    given = [prompts8()[i] for i in (1, 2, 6, 7)]
    reference = [emitted(sampled("plain", [r], [p]))[0] for r, p in zip(rows, given, strict=True)]
    assert emitted(generate(tiny.tiny(), given, None, rows, max_batch_size=3)) == reference


def test_exact_ties_go_to_the_lowest_id_in_every_path():
    """Every token is followed by two equally likely ones; plain, verified and bonus tokens must choose alike."""
    table = np.full((8, 8), 0.02)
    for token in range(8):
        table[token, [(token + 3) % 8, (token + 5) % 8]] = 0.44
    model = tiny.markov(table)
    given = [[0], [1, 5], [2, 2, 2]]

    def lowest(token):
        return min((token + 3) % 8, (token + 5) % 8)

    expected = []
    for prompt in given:
        text = [*prompt]
        while len(text) < len(prompt) + BUDGET:
            text.append(lowest(text[-1]))
        expected.append(text)
    other = [[*p, *(t ^ 1 for t in text[len(p) :])] for p, text in zip(given, expected, strict=True)]
    assert [p + o for p, o in zip(given, tiny.plain(model, given, {"max_tokens": BUDGET}), strict=True)] == expected
    for texts, wrong in ((expected, ()), (expected, [3, 6, 7, 12]), (other, ())):
        result = generate(model, given, None, {"max_tokens": BUDGET}, drafter=tiny.script(texts, 4, wrong, vocab=8))
        assert [p + o for p, o in zip(given, emitted(result), strict=True)] == expected
        assert result.stats.near_ties == 3 * BUDGET


# --- calls ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ngram", "layer_skip", "draft_model"])
def test_nothing_leaks_from_one_call_into_the_next(name):
    """A long repetitive call in between changes neither text nor counts of a short one."""
    short = {"max_tokens": 9}
    fresh = sampled(name, short)
    long = sampled(name, {"max_tokens": 80}, [[5, 6, 7] * 8, prompts8()[3] * 4, prompts8()[7]])
    again = sampled(name, short)
    assert len(long.sequences[0].token_ids) == 80
    assert [(s.token_ids, s.accepted, s.stats) for s in again.sequences] == [
        (s.token_ids, s.accepted, s.stats) for s in fresh.sequences
    ]
