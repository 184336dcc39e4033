"""Self-speculation: drafts are those of the chosen layers, and the target's cache survives being drafted on.

Guards B32 for a drafter that writes to the target's own cache, and B48 (a wrong choice of layers fails clearly).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from spec_jax.config import SpeculativeConfig
from spec_jax.drafting.base import TargetView, View
from spec_jax.drafting.layer_skip import LayerSkipDrafter
from spec_jax.drafting.registry import build_drafter, skip_layers
from spec_jax.exactness import row_blocks
from spec_jax.generation import generate
from spec_jax.models.layers import RowBlocks

K, BUDGET = 4, 20
LENGTHS = (1, 6, 14)


@functools.lru_cache
def deep():
    """Five layers, so that sets with gaps can be chosen; run eagerly layer by layer, not through `generate`."""
    return tiny.tiny(3, layers=5, hidden=16, heads=2, kv_heads=1)


@functools.lru_cache
def prompts():
    return tiny.prompts_of(tiny.tiny(), LENGTHS, seed=21)


def layer_skip(**options):
    return {"method": "layer_skip", "num_speculative_tokens": K, **options}


def emitted(result):
    return [s.token_ids for s in result.sequences]


# --- the choice of layers ---------------------------------------------------------------------------------------------


def test_layers_follow_from_the_config():
    def layers(num_layers=9, **options):
        return skip_layers(SpeculativeConfig(**layer_skip(**options)), num_layers)

    assert layers() == (0, 1, 2)  # a third
    assert layers(num_layers=2) == (0,)
    assert layers(exit_layer=9) == tuple(range(9))
    assert layers(draft_layers=[0, 4, 8]) == (0, 4, 8)


@pytest.mark.parametrize(
    "options, match",
    [
        ({"exit_layer": 0}, "exit_layer=0 must be a positive integer"),
        ({"exit_layer": 1.5}, "exit_layer=1.5 must be a positive integer"),
        ({"exit_layer": 6}, "exit_layer=6 is beyond the target's 5 layers"),
        ({"draft_layers": [5]}, "names layer 5, but the target has layers 0..4"),
        ({"draft_layers": []}, "draft_layers=.. must be a list of different layer ids"),
        ({"draft_layers": [2, 1]}, "ascending order"),
        ({"draft_layers": [1, 1]}, "different layer ids"),
        ({"draft_layers": [-1]}, "draft_layers=.-1. must be"),
        ({"draft_layers": [True]}, "draft_layers=.True. must be"),
        ({"exit_layer": 1, "draft_layers": [0]}, "not both"),
    ],
)
def test_a_wrong_choice_of_layers_is_refused(options, match):
    with pytest.raises(ValueError, match=match):
        build_drafter(SpeculativeConfig(**layer_skip(**options)), deep(), RowBlocks())
    with pytest.raises(ValueError, match=match):
        generate(deep(), [[1]], layer_skip(**options))


def test_layer_options_belong_to_layer_skip_only():
    for options in ({"exit_layer": 1}, {"draft_layers": (0,)}):
        with pytest.raises(ValueError, match="belongs to method='layer_skip'"):
            SpeculativeConfig(method="ngram", **options)


# --- what is drafted --------------------------------------------------------------------------------------------------


def proposals_of(layers, texts):
    """The drafts of `layers` of the deep model behind `texts`, on a cache that the whole target has filled."""
    model, drafter = deep(), LayerSkipDrafter(K, layers)
    decoder = tiny.decoder_of(model, tiny.plain_drafter(), len(texts))
    lengths = jnp.asarray([len(t) for t in texts], jnp.int32)
    tokens = np.zeros((len(texts), 128), np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    sampling = tiny.greedy_state(len(texts))
    state = _init(decoder)(model.params, (), jnp.asarray(tokens), lengths, lengths + 9, lengths, sampling)
    target = TargetView(model.params, model.module, row_blocks(None, len(texts), 8), model.vocab_size)
    last = state.tokens[jnp.arange(len(texts)), lengths - 1]
    view = View(state.tokens, lengths, last, lengths * 0 + 9, state.live, state.cache, sampling, target, rule="coupled")
    draft, _ = _propose(drafter)((), (), view)
    return draft, state


@functools.lru_cache
def _propose(drafter):
    return jax.jit(drafter.propose)


@functools.lru_cache
def _init(decoder):
    return jax.jit(decoder.init)


@pytest.mark.parametrize(
    "layers", [(0, 1, 2), (1, 3), *(pytest.param(x, marks=pytest.mark.slow) for x in ((0,), (0, 4)))]
)
def test_drafts_are_those_of_a_model_made_of_these_layers(layers):
    """With a one-token text nothing is committed yet, so the draft is the free run of the truncated model."""
    texts = [[5], [17], [60]]
    draft, _ = proposals_of(layers, texts)
    truncated = tiny.truncated(deep(), layers)
    assert draft.count.tolist() == [K] * 3
    assert draft.tokens.tolist() == [tiny.numpy_greedy(truncated, t, K) for t in texts]


def test_drafting_leaves_committed_slots_and_layers_that_did_not_run_alone():
    texts = tiny.prompts_of(deep(), (3, 8, 12), seed=2)
    draft, state = proposals_of((1, 3), texts)
    assert draft.target_cache.length.tolist() == state.cache.length.tolist() == [2, 7, 11]
    for row, text in enumerate(texts):
        tiny.assert_same_cache(draft.target_cache, state.cache, row, len(text) - 1)
    for layer in range(5):
        for ours, theirs in ((draft.target_cache.k, state.cache.k), (draft.target_cache.v, state.cache.v)):
            same = bool((ours[layer] == theirs[layer]).all())
            assert same == (layer not in (1, 3))


def test_a_prefix_of_layers_drafts_on_the_targets_own_cache():
    """A prefix computes the same K/V as the whole target, so here too the draft is the truncated model's own text."""
    texts = tiny.prompts_of(deep(), (3, 8, 12), seed=2)
    draft, _ = proposals_of((0, 1, 2), texts)
    truncated = tiny.truncated(deep(), (0, 1, 2))
    assert draft.tokens.tolist() == [tiny.numpy_greedy(truncated, t, K) for t in texts]


# --- in the loop ------------------------------------------------------------------------------------------------------


def test_all_layers_are_the_oracle():
    for options in ({"temperature": 0.0}, {"temperature": 1.0, "top_k": 20, "seed": 3}):
        sampling = {"max_tokens": BUDGET, **options}
        result = generate(tiny.tiny(), prompts(), layer_skip(exit_layer=2), sampling)
        assert emitted(result) == tiny.plain(tiny.tiny(), prompts(), sampling)
        assert result.stats.num_accepted_tokens == result.stats.num_draft_tokens == 3 * 16
        assert result.stats.num_steps == 3 * 4


@pytest.mark.parametrize("layers", [(0,), pytest.param((1,), marks=pytest.mark.slow)])
def test_after_every_round_the_cache_is_that_of_plain_decoding(layers):
    model, drafter = tiny.tiny(), LayerSkipDrafter(K, layers)
    plain = tiny.decoder_of(model, tiny.plain_drafter(), 3)
    done = tiny.advance(plain, model, (), tiny.start(plain, model, (), prompts(), BUDGET))
    decoder = tiny.decoder_of(model, drafter, 3)
    state = tiny.start(decoder, model, (), prompts(), BUDGET)
    steps, accepted = 0, set()
    while bool(state.live.any()):
        before = np.asarray(state.length)
        state = tiny.advance(decoder, model, (), state, 1)
        lengths = np.asarray(state.length)
        accepted |= set((lengths - before - 1).tolist())
        assert (state.cache.length == state.length - 1).all()
        for row, length in enumerate(lengths.tolist()):
            np.testing.assert_array_equal(np.asarray(state.tokens)[row, :length], np.asarray(done.tokens)[row, :length])
            tiny.assert_same_cache(state.cache, done.cache, row, length - 1)
        steps += 1
    assert steps <= BUDGET and 0 in accepted


# --- exit states ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True], ids=["XLA", "packed"])
def test_verification_from_exit_states_has_the_bits_of_all_layers(packed):
    """Ids and log-probs are those of plain decoding, with and without them, and under a policy that skips proposals."""
    model = tiny.packed(tiny.tiny()) if packed else tiny.tiny()
    sampling = {"max_tokens": BUDGET, "logprobs": 1, "temperature": 0.7, "seed": 1}
    want = generate(model, prompts(), None, sampling, exact=True).sequences
    runs = [
        generate(model, prompts(), layer_skip(exit_layer=1), sampling, exact=True),
        generate(model, prompts(), None, sampling, exact=True, drafter=(LayerSkipDrafter(K, (0,), reuse=False), ())),
    ]
    if packed:
        runs.append(generate(model, prompts(), layer_skip(exit_layer=1, verify_width="auto"), sampling, exact=True))
    for run in runs:
        assert [(s.token_ids, s.logprobs) for s in run.sequences] == [(s.token_ids, s.logprobs) for s in want]
        assert run.stats.num_accepted_tokens > 0


@pytest.mark.slow
def test_verification_really_goes_on_from_them(monkeypatch):
    """Wrong exit states change the text, which nothing else would; below E2 at E1 they are not used."""

    class Wrong(LayerSkipDrafter):
        def propose(self, params, state, view):
            draft, state = super().propose(params, state, view)
            used = draft.exit is not None
            broken = draft.exit.replace(hidden=jnp.roll(draft.exit.hidden, 1, axis=-1)) if used else None
            return draft.replace(exit=broken), state

    sampling = {"max_tokens": BUDGET}
    want = tiny.plain(tiny.tiny(), prompts(), sampling)
    found = [
        emitted(
            generate(tiny.tiny(), prompts(), None, sampling, exact=True, drafter=(Wrong(K, layers, reuse=reuse), ()))
        )
        for layers, reuse in (((0,), True), ((0,), False), ((1,), True))
    ]
    assert found[0] != want and found[1] == found[2] == want
    assert TargetView({}, tiny.tiny().module, RowBlocks(block=32), 97).reusable is False  # E1
