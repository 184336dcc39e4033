"""Four minimal drafters that use what later families need, without a change to the loop or the rules.

Target features (EAGLE, Medusa, MTP, DFlash), auxiliary rows (lookahead), the shared target cache (layer skip) and mixed
laws (hybrids). Each checks what it was given against an independent computation, and text must equal plain decoding.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from tiny import (
    TreeDrafter,
    advance,
    decoder_of,
    markov,
    numpy_logits,
    plain,
    prompts_of,
    random_table,
    script,
    start,
    tiny,
)

from spec_jax.decode import Decoder
from spec_jax.drafting.base import BaseDrafter, Draft, Drafter, DraftProbs, Needs, NoDrafter
from spec_jax.exactness import row_blocks
from spec_jax.generation import generate
from spec_jax.models.llama import FINAL_NORM
from spec_jax.sampling_params import SamplingParams

PROMPT_LENGTHS = (5, 1, 40)


@dataclasses.dataclass(frozen=True)
class FeatureDrafter(BaseDrafter):
    """A Medusa-like head: the target's own head on the last final-norm feature guesses the token after the next one.

    With that feature the head gives the newest committed token again, which is what the test compares: whether the
    feature belongs to the right position after a prefill, a partial and a full acceptance.
    """

    num_nodes: int = 2
    needs = Needs(features=(0, FINAL_NORM), prefill_logits=True)

    def init(self, params, target, batch, capacity):
        embed = target.module.config.hidden_size
        return {
            "final": jnp.zeros((batch, embed)),
            "first": jnp.zeros((batch, embed)),
            "seen": jnp.zeros(batch, jnp.int32),
            "logit_error": jnp.zeros(batch),
            "next": jnp.zeros(batch, jnp.int32),
        }

    def commit(self, params, state, seen):
        index = jnp.arange(seen.count.shape[0])
        at = jnp.maximum(seen.count - 1, 0)
        some = seen.count > 0
        final, first = seen.features[FINAL_NORM], seen.features[0]
        head = final[index, at] @ params["head"].T
        given = seen.logits[index, at if seen.prefill else seen.path[index, at]]
        return {
            "final": jnp.where(some[:, None], final[index, at], state["final"]),
            "first": jnp.where(some[:, None], first[index, at], state["first"]),
            "seen": state["seen"] + seen.count,
            "logit_error": jnp.maximum(state["logit_error"], jnp.where(some, jnp.abs(head - given).max(-1), 0.0)),
            "next": jnp.where(some, seen.next_tokens[index, at], state["next"]),
        }

    def propose(self, params, state, view):
        guess = params["text"][jnp.arange(view.length.shape[0])[:, None], view.length[:, None] + jnp.arange(2)]
        return Draft(guess, jnp.where(state["seen"] > 0, 2, 0)), state


def test_features_belong_to_the_last_position_the_target_has_seen():
    model = tiny()
    prompts = prompts_of(model, PROMPT_LENGTHS)
    want = plain(model, prompts, SamplingParams(max_tokens=20))
    text = script([p + w for p, w in zip(prompts, want, strict=True)], 2, wrong=[7, 8, 13, 45])[1]["text"]
    drafter, params = FeatureDrafter(), {"head": model.params["lm_head"], "text": text}
    assert isinstance(drafter, Drafter)
    decoder = decoder_of(model, drafter, 3)
    state = start(decoder, model, params, prompts, 20)
    counts = []
    for _ in range(8):
        check_features(model, state)
        before = np.asarray(state.length)
        state = advance(decoder, model, params, state, 1)
        counts.extend((np.asarray(state.length) - before).tolist())
    assert {1, 2, 3} <= set(counts), "the script should give refusals, partial and full acceptances"


def check_features(model, state):
    d = state.drafter
    for row, length in enumerate(np.asarray(state.length)):
        if length == 1:
            assert int(d["seen"][row]) == 0  # an empty prefill: nothing seen, so nothing may be proposed
            continue
        text = np.asarray(state.tokens[row, :length]).tolist()
        truth = numpy_logits(model, text[:-1])[-1]
        ours = np.asarray(d["final"][row] @ model.params["lm_head"].T)
        np.testing.assert_allclose(ours, truth, atol=1e-4)
        assert int(d["seen"][row]) == length - 1
        assert int(d["next"][row]) == text[-1]
        assert float(d["logit_error"][row]) < 1e-4


@dataclasses.dataclass(frozen=True)
class WindowDrafter(BaseDrafter):
    """Two draft tokens and three auxiliary rows behind them: a lookahead window that is read and never accepted."""

    num_nodes: int = 5
    parents: tuple = (-1, 0, -1, 2, 3)
    needs = Needs()

    def init(self, params, target, batch, capacity):
        return {"window": jnp.zeros((batch, 3), jnp.int32), "read": jnp.zeros((batch, 3), jnp.int32)}

    def commit(self, params, state, seen):
        if seen.prefill:
            return state
        return state | {"read": jnp.argmax(seen.logits[:, 3:6], axis=-1).astype(jnp.int32)}

    def propose(self, params, state, view):
        at = view.length[:, None] + jnp.arange(2)
        good = params["text"][jnp.arange(view.length.shape[0])[:, None], at]
        # The window holds the true continuation too: if an auxiliary row could be accepted, it would be.
        window = params["text"][jnp.arange(view.length.shape[0])[:, None], view.length[:, None] + jnp.arange(3)]
        auxiliary = jnp.array([False, False, True, True, True])
        draft = Draft(jnp.concatenate([good, window], axis=1), jnp.full(view.length.shape, 5), auxiliary=auxiliary)
        return draft, state | {"window": window}


def test_auxiliary_rows_ride_along_and_are_never_accepted():
    model = tiny()
    prompts = prompts_of(model, PROMPT_LENGTHS)
    want = plain(model, prompts, SamplingParams(max_tokens=20))
    full = [p + w for p, w in zip(prompts, want, strict=True)]
    text = script(full, 2)[1]["text"]
    result = generate(model, prompts, None, SamplingParams(max_tokens=20), drafter=(WindowDrafter(), {"text": text}))
    assert [s.token_ids for s in result.sequences] == want
    assert result.stats.num_draft_tokens <= 2 * result.stats.num_drafts
    assert result.stats.mean_acceptance_length > 2.5
    assert sum(result.stats.acceptance_histogram[3:]) == 0

    decoder, params = decoder_of(model, WindowDrafter(), 3), {"text": text}
    state = advance(decoder, model, params, start(decoder, model, params, prompts, 20), 1)
    for row, prompt in enumerate(prompts):  # the logits of the window are those of its own path
        window = np.asarray(state.drafter["window"][row]).tolist()
        truth = numpy_logits(model, prompt + window)[len(prompt) :].argmax(-1)
        assert np.asarray(state.drafter["read"][row]).tolist() == truth.tolist()


@dataclasses.dataclass(frozen=True)
class CacheWriter(BaseDrafter):
    """Scribbles over the target's cache beyond `length` and reads the committed slots, as self-speculation does."""

    num_nodes: int = 2

    def propose(self, params, state, view):
        cache = view.cache
        beyond = jnp.arange(cache.capacity)[None, None, :, None] >= cache.length[:, None, None, None]
        scribbled = cache.replace(
            k=tuple(jnp.where(beyond, 1e4, k) for k in cache.k), v=tuple(jnp.where(beyond, 1e4, v) for v in cache.v)
        )
        guess = params["text"][jnp.arange(view.length.shape[0])[:, None], view.length[:, None] + jnp.arange(2)]
        return Draft(guess, jnp.full(view.length.shape, 2), target_cache=scribbled), state


def test_what_a_drafter_writes_beyond_the_length_of_the_shared_cache_changes_nothing():
    model = tiny()
    prompts = prompts_of(model, PROMPT_LENGTHS)
    want = plain(model, prompts, SamplingParams(max_tokens=20))
    text = script([p + w for p, w in zip(prompts, want, strict=True)], 2, wrong=[8, 12, 44])[1]["text"]
    result = generate(model, prompts, None, SamplingParams(max_tokens=20), drafter=(CacheWriter(), {"text": text}))
    assert [s.token_ids for s in result.sequences] == want
    assert result.stats.num_accepted_tokens > 0


@dataclasses.dataclass(frozen=True)
class HybridDrafter(BaseDrafter):
    """Even rows propose a fixed token (a point mass), odd rows sample from a sparse law; two nodes each."""

    num_nodes: int = 2

    def propose(self, params, state, view):
        from spec_jax.sampling import choose_tokens

        batch, ids = view.length.shape[0], params["ids"]
        position = view.length[:, None] + jnp.arange(2)
        logits = jnp.broadcast_to(jnp.log(params["probs"]), (batch, 2, ids.shape[0]))
        sampling = view.sampling.replace(temperature=jnp.ones(batch), top_k=jnp.zeros(batch, jnp.int32))
        picked, _ = choose_tokens(logits, position, sampling, ids.shape[0], view.draft_purpose)
        one_hot = jnp.broadcast_to((jnp.arange(batch) % 2 == 0)[:, None], (batch, 2))
        tokens = jnp.where(one_hot, params["fixed"], ids[picked])
        q = DraftProbs(
            jnp.broadcast_to(params["probs"], (batch, 2, ids.shape[0])),
            jnp.broadcast_to(ids, (batch, 2, ids.shape[0])),
            one_hot,
        )
        return Draft(tokens, jnp.full(batch, 2, jnp.int32), q), state


@pytest.mark.slow
def test_mixed_one_hot_and_sparse_laws_keep_the_targets_law():
    table = random_table(5, seed=3)
    model = markov(table)
    params = {"ids": jnp.array([3, 0, 4]), "probs": jnp.array([0.5, 0.3, 0.2]), "fixed": jnp.int32(2)}
    counts = np.zeros((2, 125))
    result = generate(
        model,
        [[1]],
        {"rejection_sample_method": "standard"},
        SamplingParams(temperature=1.0, max_tokens=3, n=8000, seed=5),
        drafter=(HybridDrafter(), params),
        max_batch_size=2000,
    )
    for row, sequence in enumerate(result.sequences):
        a, b, c = sequence.token_ids
        counts[row % 2, a * 25 + b * 5 + c] += 1
    law = np.array([table[1, a] * table[a, b] * table[b, c] for a in range(5) for b in range(5) for c in range(5)])
    common = law > 5 / 4000
    for kind in counts:
        observed = np.append(kind[common], kind[~common].sum())
        expected = np.append(law[common], law[~common].sum()) * kind.sum()
        assert stats.chisquare(observed, expected * observed.sum() / expected.sum()).pvalue > 1e-4
    assert 0 < result.stats.draft_acceptance_rate < 1


# Fixed trees are in test_contract.py too.
@pytest.mark.parametrize("dynamic", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_tree_of_drafts_moves_the_accepted_path_and_equals_plain_decoding(dynamic):
    """The right continuation lies on a branch whose rows are not contiguous: the path's K/V must be gathered."""
    model = tiny()
    prompts = prompts_of(model, PROMPT_LENGTHS)
    want = plain(model, prompts, SamplingParams(max_tokens=20))
    text = script([p + w for p, w in zip(prompts, want, strict=True)], 3)[1]["text"]
    drafter = TreeDrafter(parents=None if dynamic else TreeDrafter.parents, dynamic_tree=dynamic)
    result = generate(model, prompts, None, SamplingParams(max_tokens=20), drafter=(drafter, {"text": text}))
    assert [s.token_ids for s in result.sequences] == want
    assert result.exactness == "E0"
    assert result.stats.mean_acceptance_length > 3.5
    decoder = decoder_of(model, drafter, 3)
    state = start(decoder, model, {"text": text}, prompts, 20)
    state = advance(decoder, model, {"text": text}, state, 3)
    texts = [t[:n].tolist() for t, n in zip(np.asarray(state.tokens), np.asarray(state.length), strict=True)]
    fresh = start(decoder_of(model, NoDrafter(), 3), model, (), texts, 1)
    for ours, theirs in zip(state.cache.k + state.cache.v, fresh.cache.k + fresh.cache.v, strict=True):
        for row, length in enumerate(np.asarray(state.length) - 1):
            np.testing.assert_allclose(
                np.asarray(ours)[row, :, :length], np.asarray(theirs)[row, :, :length], atol=1e-5
            )


def test_a_drafter_whose_shape_does_not_fit_is_refused():
    model = tiny()
    rows = row_blocks(True, 1, 8)
    with pytest.raises(ValueError, match="width=4"):
        Decoder(model.module, WindowDrafter(), 97, 4, "coupled", rows, 32)
    with pytest.raises(ValueError, match="parents"):
        Decoder(model.module, WindowDrafter(parents=(-1, 0)), 97, 8, "coupled", rows, 32)
    with pytest.raises(ValueError, match=r"parents\[1\]=2"):
        Decoder(model.module, WindowDrafter(parents=(-1, 2, 0, 0, 0)), 97, 8, "coupled", rows, 32)
    with pytest.raises(ValueError, match="not both"):
        generate(model, [[1]], {"method": "ngram"}, drafter=(NoDrafter(), ()))


@dataclasses.dataclass(frozen=True)
class Misshapen(BaseDrafter):
    num_nodes: int = 3

    def propose(self, params, state, view):
        return Draft(jnp.zeros(3, jnp.int32), jnp.zeros(view.length.shape, jnp.int32)), state


class Unhashable(Misshapen):
    __hash__ = None


@pytest.mark.parametrize(
    "drafter, message",
    [
        ((Misshapen(), ()), r"Draft.tokens int32\[3\]; it must be int32\[1, 3\]"),
        ((Misshapen, ()), "not the class Misshapen"),
        ((Unhashable(), ()), "Unhashable is not hashable"),
        (Misshapen(), "must be a pair"),
    ],
    ids=["shape", "class", "hash", "no params"],
)
def test_a_drafter_that_breaks_the_protocol_is_named(drafter, message):
    with pytest.raises(ValueError, match=message):
        generate(tiny(), [[1]], drafter=drafter)
