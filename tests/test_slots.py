"""Slots: prompts that wait for one, refill, samples and prompts that share a prefill, and what no refill may change.

Guards B34 (the old request's state in the new one's row), B19 and B24 (a row depends on its own prompt and parameters
only), and holds the forward rows of many prompts to those of perfectly packed batches.
"""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from spec_jax.compilation import program_count
from spec_jax.drafting.base import BaseDrafter, Draft
from spec_jax.generation import generate

SLOTS, K = 4, 4


@functools.lru_cache
def model():
    return tiny.with_text(tiny.tiny())


@functools.lru_cache
def requests(count=30):
    """Prompts of 1 to 90 tokens with ragged budgets, greedy and sampled rows, and stops of every kind."""
    rng = np.random.default_rng(7)
    prompts = tiny.prompts_of(model(), rng.integers(1, 90, count), seed=9)
    params = [
        {
            "max_tokens": int(rng.integers(1, 40)),
            "temperature": float(rng.choice([0.0, 0.9])),
            "seed": int(rng.integers(0, 1000)),
            "stop_token_ids": rng.integers(0, 97, 2).tolist(),
            "stop": [str(rng.choice(list("abcdefghijk")))] if rng.random() < 0.4 else [],
            "logprobs": 1,
        }
        for _ in range(count)
    ]
    return prompts, params


@functools.lru_cache
def alone():
    """Every request by itself."""
    return [generate(model(), [p], None, [s], exact=True).sequences[0] for p, s in zip(*requests(), strict=True)]


METHODS = {
    "plain": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": K},
    "draft_model": {"method": "draft_model", "num_speculative_tokens": K, "model": tiny.perturbed(tiny.tiny(), 0.05)},
    "jacobi": {"method": "jacobi", "num_speculative_tokens": K},
    "recycling": {"method": "recycling"},
    "lookahead": {"method": "lookahead"},
}
TREES = ("recycling", "lookahead")


@pytest.mark.parametrize(
    "method", ["plain", *(pytest.param(name, marks=pytest.mark.slow) for name in METHODS if name != "plain")]
)
def test_a_request_in_a_used_slot_is_the_request_alone(method):
    """More prompts than slots: order, text, reasons and log-probs are those of each prompt by itself."""
    prompts, params = requests()
    result = generate(model(), prompts, METHODS[method], params, max_batch_size=SLOTS)
    assert result.exactness == ("E0" if method in TREES else "E2")
    for number, (ours, lone) in enumerate(zip(result.sequences, alone(), strict=True)):
        assert ours.prompt_index == number
        assert (ours.token_ids, ours.text, ours.finish_reason) == (lone.token_ids, lone.text, lone.finish_reason), (
            number
        )
        assert ours.logprobs == lone.logprobs or method in TREES
    assert {s.finish_reason for s in result.sequences} == {"stop", "length"}


def test_the_statistics_of_a_request_do_not_depend_on_its_neighbours():
    prompts, params = requests()
    config = METHODS["draft_model"]
    together = generate(model(), prompts[:9], config, params[:9], max_batch_size=SLOTS)
    for ours, prompt, p in zip(together.sequences, prompts, params, strict=False):
        # In front of copies of itself, which is the same program.
        assert ours.stats == generate(model(), [prompt] * SLOTS, config, [p] * SLOTS).sequences[0].stats


@dataclasses.dataclass(frozen=True)
class Remembering(BaseDrafter):
    """Keeps every token it was fed, and proposes the newest two: a leak would show in `texts`."""

    num_nodes: int = 2

    def init(self, params, target, batch, capacity):
        return {"text": jnp.full((batch, capacity), -1, jnp.int32)}

    def commit(self, params, state, seen):
        at = jnp.where(jnp.arange(seen.tokens.shape[1]) < seen.count[:, None], seen.start[:, None], 10**6)
        at = at + jnp.arange(seen.tokens.shape[1])
        rows = jnp.arange(at.shape[0])[:, None]
        return {"text": state["text"].at[rows, at].set(seen.tokens, mode="drop")}

    def propose(self, params, state, view):
        return Draft(state["text"][:, :2], jnp.full(view.length.shape, 2, jnp.int32)), state


def test_the_drafters_state_in_a_used_slot_is_that_of_the_new_request_alone():
    prompts, params = requests()
    drafter = (Remembering(), ())
    result = generate(model(), prompts[:9], None, params[:9], drafter=drafter, max_batch_size=2)
    state = result.session._call
    assert state is not None and not result.session.cached  # the slots went to others
    for ours, lone in zip(result.sequences, alone(), strict=False):
        assert ours.token_ids == lone.token_ids
    single = generate(model(), prompts[3:5], None, params[3:5], drafter=drafter)
    for row, sequence in enumerate(single.sequences):
        slot = single.session._slot_of[row]
        text = prompts[3 + row] + sequence.token_ids
        kept = np.asarray(single.session._state.drafter["text"])[slot]
        assert kept[: len(text) - 1].tolist() == text[:-1]


@pytest.mark.slow
def test_many_prompts_pack_the_slots():
    """480 prompts in one call: the forward rows stay within 10 % of batches without one idle row."""
    rng = np.random.default_rng(1)
    prompts = tiny.prompts_of(model(), rng.integers(1, 60, 480), seed=5)
    params = [{"max_tokens": int(b), "seed": 1} for b in rng.integers(4, 48, 480)]
    result = generate(model(), prompts, METHODS["ngram"], params, max_batch_size=16, exact=None)
    assert result.exactness == "E1"
    width, chunk = result.verify_width, 64
    steps = sum(s.stats.num_steps for s in result.sequences)
    perfect = steps * width + sum(-(-(len(p) - 1) // chunk) * chunk for p in prompts)
    assert perfect <= result.stats.num_forward_rows < 1.1 * perfect
    assert [len(s.token_ids) for s in result.sequences] == [p["max_tokens"] for p in params]
    some = range(0, 480, 37)
    lone = generate(model(), [prompts[i] for i in some], None, [params[i] for i in some], exact=True)
    assert [result.sequences[i].token_ids for i in some] == [s.token_ids for s in lone.sequences]


def test_samples_of_one_prompt_are_prefilled_once():
    prompts = tiny.prompts_of(model(), [70, 80], seed=3)
    options = {"n": 5, "temperature": 1.0, "seed": 4, "max_tokens": 6}
    result = generate(model(), prompts, None, options, max_batch_size=3)
    cached = [s.stats.num_cached_tokens for s in result.sequences]
    assert [c for c in cached if c] == [69] * 4 + [79] * 4
    lone = generate(model(), prompts[:1], None, {**options, "n": 2}, exact=True)
    assert [s.token_ids for s in lone.sequences] == [s.token_ids for s in result.sequences[:2]]
    assert len({tuple(s.token_ids) for s in result.sequences}) > 5


@pytest.mark.parametrize("method", ["plain", "draft_model"])
def test_prompts_that_begin_alike_share_the_beginning(method):
    """Two groups under one common beginning, in mixed order, and a prompt that shares nothing."""
    chunk = 32
    common, a, b = (tiny.prompts_of(model(), [n], seed=n)[0] for n in (65, 40, 33))
    tails = tiny.prompts_of(model(), [1, 7, 40, 3, 12, 5], seed=8)
    prompts = [common + a + tails[0], common + b + tails[1], common + a + tails[2], tails[3], common + b + tails[4],
               common + tails[5], common + a + tails[0]]  # fmt: skip
    result = generate(model(), prompts, METHODS[method], {"max_tokens": 12, "logprobs": 1}, max_batch_size=SLOTS)
    lone = [generate(model(), [p], None, {"max_tokens": 12, "logprobs": 1}, exact=True).sequences[0] for p in prompts]
    assert [s.token_ids for s in result.sequences] == [s.token_ids for s in lone]
    assert [s.logprobs for s in result.sequences] == [s.logprobs for s in lone]
    cached = [s.stats.num_cached_tokens for s in result.sequences]
    assert result.exactness == "E2" and all(c % chunk == 0 for c in cached)
    assert cached == [0, 64, 96, 0, 96, 64, 96]


def test_the_slots_compile_nothing_new_for_more_prompts():
    prompts, params = requests()
    generate(model(), prompts[:6], METHODS["draft_model"], params[:6], max_batch_size=SLOTS)
    kept = program_count()
    generate(model(), prompts, METHODS["draft_model"], params, max_batch_size=SLOTS)
    assert program_count() == kept


@dataclasses.dataclass(frozen=True)
class Shared(Remembering):
    """State without a batch axis."""

    def init(self, params, target, batch, capacity):
        return {"text": jnp.zeros((3, capacity), jnp.int32)}


def test_a_drafter_whose_state_cannot_be_put_into_a_slot_is_named():
    with pytest.raises(ValueError, match="Shared has state whose leading axis is not the batch"):
        generate(model(), [[1], [2]], None, {"max_tokens": 3}, drafter=(Shared(), ()))


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "4"])
def test_the_batch_size_is_a_positive_integer(size):
    with pytest.raises(ValueError, match="max_batch_size="):
        generate(model(), [[1]], max_batch_size=size)


def test_progress_counts_the_sequences_on_stderr_only(capsys):
    prompts, params = requests()
    want = generate(model(), prompts[:9], None, params[:9], max_batch_size=SLOTS).sequences
    assert capsys.readouterr() == ("", "")
    shown = generate(model(), prompts[:9], None, params[:9], max_batch_size=SLOTS, progress=True)
    assert shown.sequences == want
    out, err = capsys.readouterr()
    tokens = sum(len(s.token_ids) for s in want)
    assert out == "" and "9/9" in err and f"{tokens} tokens" in err
    with pytest.raises(ValueError, match="progress='yes'"):
        generate(model(), prompts[:1], progress="yes")
