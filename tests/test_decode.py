"""Contract of every drafter: greedy text is the target's own, and the accept pattern is the chosen one.

Guards B01 (wide verification changes the text), B02 (mask on a non-empty cache), and dead drafters: lossless output
hides a drafter that never gets anything accepted, so acceptance itself is asserted.
"""

import functools

import numpy as np
import pytest
import tiny

from spec_jax.generation import generate

LENGTHS = (1, 5, 20)
BUDGET = 24
SAMPLING = {"max_tokens": BUDGET}


@functools.lru_cache
def prompts():
    return tiny.prompts_of(tiny.tiny(), LENGTHS)


@functools.lru_cache
def expected():
    """Plain greedy text of every prompt, from the library's own plain decoding."""
    return tiny.plain(tiny.tiny(), prompts(), SAMPLING)


@functools.lru_cache
def texts():
    return [p + o for p, o in zip(prompts(), expected(), strict=True)]


@functools.lru_cache
def near():
    """A draft model that is right now and then."""
    return tiny.perturbed(tiny.tiny(), 0.02)


def emitted(result):
    return [s.token_ids for s in result.sequences]


def corruption(pattern, k):
    """Absolute positions that SCRIPT gets wrong, per row."""
    if pattern == "none":
        return ()
    if pattern == "all":
        return "all"
    first = {"every third": 1, "alternating": 0, "last of a round": k - 1}[pattern]
    stride = {"every third": 3, "alternating": 2, "last of a round": k}[pattern]
    return [list(range(n + first, 300, stride)) for n in LENGTHS]


def model_config(model, k):
    return {"method": "draft_model", "num_speculative_tokens": k, "model": model}


def ngram(k):
    return {"method": "ngram", "num_speculative_tokens": k}


def layer_skip(k, **options):
    return {"method": "layer_skip", "num_speculative_tokens": k, **options}


CONFIGS = {
    "ngram 4": lambda: ngram(4),
    "layer_skip first layer": lambda: layer_skip(4, exit_layer=1),
    "layer_skip second layer": lambda: layer_skip(4, draft_layers=[1]),
    "draft_model oracle": lambda: model_config(tiny.tiny(), 4),
    "draft_model near": lambda: model_config(near(), 4),
    "draft_model random": lambda: model_config(tiny.tiny(1), 4),
}


def test_plain_decoding_equals_recomputing_the_whole_sequence():
    model = tiny.tiny()
    reference = [tiny.numpy_greedy(model, p, BUDGET) for p in prompts()]
    assert expected() == reference
    tops = np.sort(tiny.numpy_logits(model, texts()[2]), axis=-1)[:, -2:]
    assert np.diff(tops)[-BUDGET - 1 : -1].min() > 1e-3  # the reference itself is not a matter of rounding


def test_plain_decoding_of_one_row_equals_the_batch():
    for prompt, text in zip(prompts(), expected(), strict=True):
        assert tiny.plain(tiny.tiny(), [prompt], SAMPLING) == [text]


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_text_does_not_depend_on_the_drafter(name):
    result = generate(tiny.tiny(), prompts(), CONFIGS[name](), SAMPLING)
    assert emitted(result) == expected()
    assert [s.finish_reason for s in result.sequences] == ["length"] * 3
    assert result.exactness == "E2"


@pytest.mark.parametrize("name", ["ngram 4", "layer_skip first layer", "layer_skip second layer", "draft_model near"])
def test_no_drafter_is_dead(name):
    model, text = tiny.tiny(), [*prompts()]
    text[1] = [3, 1, 4, 1, 5] * 4  # something to look up; the model drafters do not need it
    result = generate(model, text, CONFIGS[name](), {"max_tokens": 64})
    assert emitted(result) == tiny.plain(model, text, {"max_tokens": 64})
    assert 0 < result.stats.num_accepted_tokens < result.stats.num_draft_tokens


@pytest.mark.parametrize("pattern", ["none", "every third", "alternating", "last of a round", "all"])
@pytest.mark.parametrize("k", [1, 4, 7])
def test_scripted_text_and_accept_counts(k, pattern):
    """Every row's accept counts are those that follow from which proposals are wrong, whatever its batch mates do."""
    wrong = corruption(pattern, k)
    result = generate(tiny.tiny(), prompts(), None, SAMPLING, drafter=tiny.script(texts(), k, wrong))
    assert emitted(result) == expected()
    for row, sequence in enumerate(result.sequences):
        bad = range(300) if wrong == "all" else set(wrong[row] if wrong else ())
        counts, flags, drafted = simulate(LENGTHS[row], LENGTHS[row] + BUDGET, k, bad)
        assert sequence.accepted == flags
        assert sequence.stats.num_steps == len(counts)
        assert sequence.stats.num_draft_tokens == drafted
        assert sequence.stats.num_accepted_tokens == sum(counts)
    if pattern == "none":
        assert result.stats.draft_acceptance_rate == 1
    if pattern == "all":
        assert result.stats.num_accepted_tokens == 0


def simulate(length, limit, k, bad):
    """Accept counts per step, accepted flags per token and tokens drafted, when the positions in `bad` are wrong."""
    counts, flags, drafted = [], [], 0
    while length < limit:
        proposed = min(k, limit - length - 1)
        n = next((i for i in range(proposed) if length + i in bad), proposed)
        counts.append(n)
        flags += [True] * n + [False]
        drafted += proposed
        length += n + 1
    return counts, flags, drafted


def test_no_pattern_depends_on_luck():
    """ANTI is wrong everywhere: its corrupted text differs from the true one at every position."""
    _, params = tiny.script(texts(), 4, "all")
    for row, text in enumerate(texts()):
        assert (np.asarray(params["text"])[row, : len(text)] != text).all()


@pytest.mark.parametrize("kind", ["draft_model oracle", "layer_skip all layers"])
def test_oracle_emits_k_plus_one_tokens_in_every_round(kind):
    k, rounds = 4, 5
    config = model_config(tiny.tiny(), k) if kind == "draft_model oracle" else layer_skip(k, exit_layer=2)
    budget = {"max_tokens": rounds * (k + 1)}
    result = generate(tiny.tiny(), prompts(), config, budget)
    assert emitted(result) == tiny.plain(tiny.tiny(), prompts(), budget)
    for sequence in result.sequences:
        assert sequence.stats.num_steps == rounds
        assert sequence.stats.num_accepted_tokens == sequence.stats.num_draft_tokens == rounds * k
        assert sequence.accepted == ([True] * k + [False]) * rounds


def test_one_row_equals_the_batch():
    """A flight of one row runs the same products as a flight of three."""
    prompt, text = prompts()[1], texts()[1]
    result = generate(tiny.tiny(), [prompt], None, SAMPLING, drafter=tiny.script([text], 4, [8, 9, 15]))
    assert emitted(result) == [expected()[1]]
    assert 0 < result.stats.num_accepted_tokens < result.stats.num_draft_tokens


def test_proposals_outside_the_vocabulary_are_refused_like_any_wrong_one():
    drafter, params = tiny.script(texts(), 4)
    right = params["text"]
    outside = right.at[:, ::3].set(97).at[:, 1::7].set(-1).at[:, 2::11].set(2**31 - 1)
    result = generate(tiny.tiny(), prompts(), None, SAMPLING, drafter=(drafter, {**params, "text": outside}))
    assert emitted(result) == expected()
    wrong = {**params, "text": (right + (outside != right)) % 97}
    twin = generate(tiny.tiny(), prompts(), None, SAMPLING, drafter=(drafter, wrong))
    assert [s.accepted for s in result.sequences] == [s.accepted for s in twin.sequences]
    assert 0 < result.stats.num_accepted_tokens < result.stats.num_draft_tokens


def test_the_cache_holds_what_plain_decoding_put_there():
    """After partly accepted runs every committed slot has the bits of the plain run (rollback is exact)."""
    model = tiny.tiny()
    states = {}
    for name, (drafter, params) in {
        "plain": (tiny.plain_drafter(), ()),
        "script": tiny.script(texts(), 4, corruption("every third", 4)),
    }.items():
        decoder = tiny.decoder_of(model, drafter, 3)
        states[name] = tiny.advance(decoder, model, params, tiny.start(decoder, model, params, prompts(), BUDGET))
    assert (states["plain"].tokens == states["script"].tokens).all()
    for row, text in enumerate(texts()):
        tiny.assert_same_cache(states["plain"].cache, states["script"].cache, row, len(text) - 1)


def test_wrong_drafts_are_wrong_only_where_asked():
    """The corrupted script disagrees with the true text exactly at the corrupted positions."""
    _, params = tiny.script([texts()[2]], 4, [22, 25])
    differs = np.flatnonzero(np.asarray(params["text"])[0, : len(texts()[2])] != texts()[2])
    assert differs.tolist() == [22, 25]
