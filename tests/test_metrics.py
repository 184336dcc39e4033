"""Acceptance numbers: known accept patterns give exactly the numbers of the definitions.

Guards B54: the bonus token counted as accepted, averages of ratios, counts that run past a stop, division by zero.
"""

import functools

import pytest
import tiny

from spec_jax.generation import generate
from spec_jax.metrics import total
from spec_jax.results import stats_of

K = 4
LENGTHS = (2, 6, 11)
BUDGET = 20


@functools.lru_cache
def prompts():
    return tiny.prompts_of(tiny.tiny(), LENGTHS, seed=3)


@functools.lru_cache
def expected():
    return tiny.plain(tiny.tiny(), prompts(), {"max_tokens": 64})


def texts():
    return [p + o for p, o in zip(prompts(), expected(), strict=True)]


def wrong_for(length, accepts):
    """The positions to get wrong so that successive rounds behind `length` accept these counts."""
    positions = []
    for n in accepts:
        if n < K:
            positions.append(length + n)
        length += n + 1
    return positions


def run(accepts, sampling, counts=None):
    wrong = [wrong_for(n, row) for n, row in zip(LENGTHS, accepts, strict=True)]
    return generate(tiny.tiny(), prompts(), None, sampling, drafter=tiny.script(texts(), K, wrong, counts=counts))


def stats_of_row(state, row):
    new = slice(LENGTHS[row], int(state.length[row]))
    return stats_of(state.trace.drafted[row, new].tolist(), state.trace.accepted[row, new].tolist(), K)


def test_the_definitions_on_a_known_pattern():
    """Accepts 4, 0, 2, 1 in four rounds, read from the state in front of the fifth; the mates accept none and all."""
    model = tiny.tiny()
    pattern = [(4, 0, 2, 1), (0, 0, 0, 0), (4, 4, 4, 4)]
    drafter, params = tiny.script(texts(), K, [wrong_for(n, row) for n, row in zip(LENGTHS, pattern, strict=True)])
    decoder = tiny.decoder_of(model, drafter, 3)
    state = tiny.start(decoder, model, params, prompts(), 64)
    for steps in range(1, 5):
        state = tiny.advance(decoder, model, params, state, 1)
        rows = [stats_of_row(state, row) for row in range(3)]
        for row, accepts in zip(rows, pattern, strict=True):
            assert row.num_steps == row.num_drafts == steps
            assert row.num_draft_tokens == K * steps
            assert row.num_accepted_tokens == sum(accepts[:steps])
            assert row.acceptance_histogram == tuple(accepts[:steps].count(n) for n in range(K + 1))
    assert state.length.tolist() == [n + emitted for n, emitted in zip(LENGTHS, (11, 4, 20), strict=True)]
    row = rows[0]
    assert row.num_emitted_tokens == 11
    assert (row.num_draft_tokens, row.num_accepted_tokens) == (16, 7)
    assert row.draft_acceptance_rate == 7 / 16
    assert row.mean_acceptance_length == 11 / 4
    assert row.per_position_acceptance_rate == [3 / 4, 2 / 4, 1 / 4, 1 / 4]


def test_every_ratio_follows_from_the_flags_of_the_tokens():
    """The stats of a run agree with what its accepted flags say, row by row and in total."""
    result = run([(4, 0, 2, 1), (0,) * 8, (3, 3, 1)], {"max_tokens": BUDGET})
    for sequence in result.sequences:
        runs, length = [], 0
        for flag in sequence.accepted:
            length = length + 1 if flag else (runs.append(length), 0)[1]
        stats = sequence.stats
        assert stats.num_steps == len(runs)
        assert stats.num_accepted_tokens == sum(runs) == sum(sequence.accepted)
        assert stats.num_emitted_tokens == len(sequence.token_ids) == sum(runs) + stats.num_steps
        rates = stats.per_position_acceptance_rate
        assert rates == sorted(rates, reverse=True) and len(rates) == K
        assert sum(rates) * stats.num_drafts == pytest.approx(stats.num_accepted_tokens)
        assert stats.mean_acceptance_length == 1 + stats.num_accepted_tokens / stats.num_drafts
        assert sum(stats.acceptance_histogram) == stats.num_drafts <= stats.num_steps


def test_totals_are_sums_of_counts_not_means_of_ratios():
    result = run([(4, 4, 4, 4), (0,) * 20, (1,) * 10], [{"max_tokens": b} for b in (20, 3, 9)])
    rows = [s.stats for s in result.sequences]
    for name in ("num_steps", "num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_emitted_tokens"):
        assert getattr(result.stats, name) == sum(getattr(r, name) for r in rows)
    assert result.stats.acceptance_histogram == tuple(
        map(sum, zip(*(r.acceptance_histogram for r in rows), strict=True))
    )
    drafted, accepted = result.stats.num_draft_tokens, result.stats.num_accepted_tokens
    assert result.stats.draft_acceptance_rate == accepted / drafted
    mean_of_ratios = sum(r.draft_acceptance_rate for r in rows) / 3
    assert result.stats.draft_acceptance_rate != pytest.approx(mean_of_ratios, rel=0.05)
    assert total([]).mean_acceptance_length is None


def test_nothing_drafted_means_none_not_zero():
    for result in (
        generate(tiny.tiny(), prompts(), None, {"max_tokens": 6}),
        run([()] * 3, {"max_tokens": 1}),  # the only token is verification's own
        run([()] * 3, {"max_tokens": 0}),
    ):
        for stats in (result.stats, *(s.stats for s in result.sequences)):
            assert stats.num_drafts == stats.num_draft_tokens == stats.num_accepted_tokens == 0
            assert stats.mean_acceptance_length is None
            assert stats.draft_acceptance_rate is None
            assert stats.per_position_acceptance_rate is None
            assert stats.to_dict()["mean_acceptance_length"] is None
    assert [s.stats.num_steps for s in run([()] * 3, {"max_tokens": 1}).sequences] == [1, 1, 1]


def test_a_step_without_a_draft_is_no_draft():
    """Rounds in which the drafter has nothing to say count as steps only."""
    quiet = {n: 0 for n in range(300) if n % 2}
    result = run([()] * 3, {"max_tokens": BUDGET}, counts=quiet)
    for length, sequence in zip(LENGTHS, result.sequences, strict=True):
        steps = drafts = 0
        end = length + BUDGET
        while length < end:
            proposed = 0 if length % 2 else min(K, end - length - 1)
            steps, drafts, length = steps + 1, drafts + (proposed > 0), length + proposed + 1
        assert (sequence.stats.num_steps, sequence.stats.num_drafts) == (steps, drafts)
        assert drafts < steps


@pytest.mark.parametrize("index", range(11))
def test_counts_end_where_the_text_ends(index):
    """A stop token at every offset of two runs: counts describe the returned tokens and nothing behind them."""
    stop = expected()[0][index]
    end = expected()[0].index(stop) + 1
    result = run([()] * 3, {"max_tokens": BUDGET, "stop_token_ids": [stop]})
    row = result.sequences[0]
    assert row.token_ids == expected()[0][:end]
    assert row.finish_reason == "stop"
    assert row.stats.num_emitted_tokens == end
    assert row.stats.num_steps == -(-end // (K + 1))
    assert row.stats.num_accepted_tokens == sum(row.accepted) == end - end // (K + 1)
    assert sum(n * c for n, c in enumerate(row.stats.acceptance_histogram)) == row.stats.num_accepted_tokens
