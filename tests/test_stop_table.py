"""Where a text ends, cell by cell: stop position x budget x run length x kind of stop.

Every cell is worked out in plain Python from the full text. Guards B10, B12 and B13: a stop inside an accepted run is
missed, or cuts the text but not the ids, the log-probs, the counts or the cache.
"""

import dataclasses
import functools
import itertools

import numpy as np
import pytest
import tiny

from spec_jax.generation import generate

LONGEST = 14
RUNS = (0, 1, 3, 7)
"""Draft tokens per step, all right: a step emits one token more."""
PROMPTS = ([40, 3, 24], [55, 49])
"""The first text runs through letters and parts of characters, the second through pairs of letters."""
LOGPROBS = 2


@functools.lru_cache
def model():
    """Token i is followed by i + 1, so that every position of a text is a token of its own."""
    table = np.full((97, 97), 1e-4)
    for i in range(97):
        table[i, (i + 1) % 97] = 1
    return tiny.with_text(tiny.markov(table / table.sum(1, keepdims=True)))


def full_text(row):
    return [(PROMPTS[row][-1] + 1 + i) % 97 for i in range(LONGEST)]


def stop_of(kind, position, row):
    """The options that stop row `row` at `position`, as (ids, strings)."""
    ids, decode = full_text(row), model().tokenizer.decode
    before = decode(ids[: max(position - 1, 0)])
    string = decode(ids[: position + 1])[len(before) :]
    if kind == "inside":  # ends one character before its last token does
        string = string[:-1] or string
    if kind == "long":  # longer than a run of most drafters
        string = decode(ids[: position + 1])[-9:]
    strings = (
        [] if kind in ("id", "eos") or not string or "\ufffd" in string else [string]
    )  # half a character is no text
    if kind == "long":
        strings = ["never", *strings]
    return ([ids[position]] if kind in ("id", "eos", "both") else []), strings


def expected(ids, budget, stop_ids, strings):
    """(ids, text, reason), token by token."""
    decode = model().tokenizer.decode
    for count in range(1, budget + 1):
        if ids[count - 1] in stop_ids:
            return ids[:count], decode(ids[: count - 1]), "stop"
        ends = [decode(ids[:count]).find(s) for s in strings]
        if any(e >= 0 for e in ends):
            return ids[:count], decode(ids[:count])[: min(e for e in ends if e >= 0)], "stop"
    return ids[:budget], decode(ids[:budget]), "length"


def cells_of(kind):
    """(row, budget, stop ids, stop strings) of every cell."""
    return [
        (row, budget, *stop_of(kind, position, row))
        for row in range(len(PROMPTS))
        for position in range(10)
        for budget in sorted({1, max(position, 1), position + 1, position + 2, LONGEST})
    ]


def run(kind, cells, k):
    """All cells as the rows of one batch. An end-of-text id belongs to the model, so there cells share it."""
    target, eos = model(), kind == "eos"
    if eos:
        target = dataclasses.replace(target, eos_token_ids=tuple(cells[0][2]))
    sampling = [
        {"max_tokens": budget, "stop": strings, "logprobs": LOGPROBS, "stop_token_ids": () if eos else stop_ids}
        for _, budget, stop_ids, strings in cells
    ]
    prompts = [list(PROMPTS[cell[0]]) for cell in cells]
    drafter = None
    if k:
        drafter = tiny.script([p + full_text(cell[0]) for p, cell in zip(prompts, cells, strict=True)], k)
    return generate(target, prompts, None, sampling, drafter=drafter, exact=False, max_batch_size=100)


@pytest.mark.parametrize("k", [pytest.param(k, marks=pytest.mark.slow) if k in (1, 3) else k for k in RUNS])
@pytest.mark.parametrize("kind", ["id", "eos", "string", "inside", "long", "both"])
def test_every_cell_of_the_table(kind, k):
    cells = cells_of(kind)
    groups = [cells]
    if kind == "eos":
        groups = [list(group) for _, group in itertools.groupby(cells, key=lambda cell: cell[2])]
    stopped = 0
    for group in groups:
        result = run(kind, group + group[:1] * (len(cells) - len(group)), k)  # one batch size, one program
        lengths = np.asarray(result.session._state.cache.length)
        for place, (cell, sequence) in enumerate(zip(group, result.sequences[: len(group)], strict=True)):
            row, budget, stop_ids, strings = cell
            ids, text, reason = expected(full_text(row), budget, stop_ids, strings)
            assert sequence.token_ids == ids, cell
            assert sequence.text == text, cell
            assert sequence.finish_reason == reason, cell
            assert len(sequence.logprobs) == len(sequence.accepted) == len(ids), cell
            assert [next(iter(entry)) for entry in sequence.logprobs] == ids, cell
            assert sequence.stats.num_emitted_tokens == len(ids), cell
            assert sequence.stats.num_accepted_tokens == sum(sequence.accepted), cell
            assert sequence.stats.num_steps == -(-len(ids) // (k + 1)), cell
            assert lengths[place] == len(PROMPTS[row]) + len(ids) - 1, cell
            stopped += reason == "stop"
    assert len(cells) > 80 and stopped > len(cells) / 5
