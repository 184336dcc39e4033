"""Draft lengths by rule: what is drafted in every step is what a plain Python version of the rule says."""

import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from spec_jax.config import SpeculativeConfig
from spec_jax.draft_policies import HeuristicSchedule
from spec_jax.generation import generate

PROMPTS = [[7], [0, 9, 0, 9], [4, 5, 6, 7] * 4]
BUDGET, K = 40, 6
PACKED = pytest.mark.parametrize("packed", [pytest.param(False, marks=pytest.mark.slow), True], ids=["XLA", "packed"])


def model(packed=False):
    return tiny.packed(tiny.tiny()) if packed else tiny.tiny()


def texts(prompts=PROMPTS, budget=BUDGET):
    plain = tiny.plain(model(), prompts, {"max_tokens": budget})
    return [prompt + text for prompt, text in zip(prompts, plain, strict=True)]


def test_the_schedule_is_hugging_faces():
    """`hf_heuristic_trace` of golden_vectors.json: accepted, drafted, and the length that follows; it begins at 20."""
    policy = HeuristicSchedule((64,), start=20, most=63)
    seen, one, live = policy.init(1), jnp.zeros(1, jnp.int32), jnp.ones(1, bool)
    for accepted, drafted, after in ((20, 20, 22), (3, 22, 21), (21, 21, 23), (0, 23, 22), (5, 5, 24)):
        seen = policy.observe(seen, one, jnp.array([drafted]), jnp.array([accepted]), live)
        assert policy.choose(seen, one, jnp.array([63]), live, 63).tolist() == [after]
    seen = policy.observe(seen, one, jnp.array([0]), jnp.array([0]), live)  # nothing drafted, nothing learnt
    assert policy.choose(seen, one, jnp.array([63]), live, 63).tolist() == [24]
    assert policy.choose(seen, one, jnp.array([63]), ~live, 63).tolist() == [0]


def scheduled(text, at, wrong, n):
    """(steps, drafts, drafted, accepted, n) of one request under the heuristic."""
    steps = drafts = drafted = accepted = 0
    while at < len(text):
        count = min(n, K, len(text) - at - 1)
        run = next((i for i in range(count) if at + i in wrong), count)
        if count:
            n = min(n + 2, K) if run == count else max(n - 1, 1)
        steps, drafts, drafted, accepted = steps + 1, drafts + (count > 0), drafted + count, accepted + run
        at += run + 1
    return (steps, drafts, drafted, accepted), n


@PACKED
@pytest.mark.parametrize("schedule", ["heuristic", "heuristic_transient"])
def test_every_row_follows_the_schedule(schedule, packed):
    """One slot: `heuristic` goes on from the length of the request before, `heuristic_transient` begins anew."""
    wrong, n = {p for p in range(300) if p % 3 == 0 or p % 7 == 2}, K
    prompt = PROMPTS[1]
    (text,) = texts([prompt])
    drafter, config = tiny.script([text], K, sorted(wrong)), {"num_assistant_tokens_schedule": schedule}
    sampling = {"max_tokens": BUDGET}
    result = generate(model(packed), [prompt] * 3, config, sampling, max_batch_size=1, drafter=drafter)
    for sequence in result.sequences:
        assert prompt + sequence.token_ids == text
        want, after = scheduled(text, len(prompt), wrong, n)
        stats = sequence.stats
        assert (stats.num_steps, stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == want
        n = after if schedule == "heuristic" else K
    lengths = [s.stats.num_draft_tokens for s in result.sequences]
    assert (len(set(lengths)) == 1) == (schedule == "heuristic_transient")


def test_a_table_says_how_far_so_many_rows_draft():
    """Budgets end one after another: three rows draft nothing, two draft one token, the last one as many as it may."""
    budgets = [8, 20, 40]
    whole = [t[: len(p) + b] for t, p, b in zip(texts(), PROMPTS, budgets, strict=True)]
    config = {"method": "oracle", "oracle_texts": texts(), "oracle_acceptance": 1.0, "num_speculative_tokens": K,
              "num_speculative_tokens_per_batch_size": [[1, 1, K], [2, 2, 1]]}  # fmt: skip
    result = generate(model(), PROMPTS, config, [{"max_tokens": b} for b in budgets])
    at, drafted = [len(p) for p in PROMPTS], [0, 0, 0]
    while any(a < len(t) for a, t in zip(at, whole, strict=True)):
        live = [a < len(t) for a, t in zip(at, whole, strict=True)]
        length = {1: K, 2: 1}.get(sum(live), 0)
        for row in (r for r in range(3) if live[r]):
            count = min(length, len(whole[row]) - at[row] - 1)
            drafted[row] += count
            at[row] += count + 1
    assert [s.stats.num_draft_tokens for s in result.sequences] == drafted
    assert [p + s.token_ids for p, s in zip(PROMPTS, result.sequences, strict=True)] == whole
    assert drafted[0] == 0 < drafted[1] < drafted[2]


def stopped(draft_model, text, at, options):
    """(drafts, drafted, accepted) of a greedy request whose draft model stops when it is unsure."""
    drafts = drafted = accepted = 0
    while at < len(text):
        so_far, survival, proposal = text[:at], 1.0, []
        while len(proposal) < K:
            logits = tiny.numpy_logits(draft_model, so_far + proposal)[-1, : draft_model.vocab_size]
            token = int(logits.argmax())
            confidence = np.exp(logits[token] - np.log(np.exp(logits - logits.max()).sum()) - logits.max())
            survival *= confidence
            proposal.append(token)
            if confidence < options.get("assistant_confidence_threshold", 0):
                break
            if 1 - survival > options.get("draft_survival_threshold", 1):
                break
        proposal = proposal[: len(text) - at - 1]
        run = next((i for i, t in enumerate(proposal) if t != text[at + i]), len(proposal))
        drafts, drafted, accepted = drafts + bool(proposal), drafted + len(proposal), accepted + run
        at += run + 1
    return drafts, drafted, accepted


@pytest.mark.parametrize("options", [
    {"assistant_confidence_threshold": 0.6},
    pytest.param({"draft_survival_threshold": 0.5}, marks=pytest.mark.slow),
], ids=str)  # fmt: skip
def test_a_model_stops_where_it_is_unsure(options):
    near = tiny.perturbed(model(), 0.1)
    config = {"method": "draft_model", "model": near, "num_speculative_tokens": K, **options}
    result = generate(model(), PROMPTS, config, {"max_tokens": BUDGET})
    for prompt, text, sequence in zip(PROMPTS, texts(), result.sequences, strict=True):
        assert prompt + sequence.token_ids == text
        stats = sequence.stats
        want = stopped(near, text, len(prompt), options)
        assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == want
    free = generate(model(), PROMPTS, {**config, **dict.fromkeys(options)}, {"max_tokens": BUDGET}).stats
    assert result.stats.num_draft_tokens < free.num_draft_tokens
    assert result.stats.draft_acceptance_rate > free.draft_acceptance_rate


@pytest.mark.slow
@pytest.mark.parametrize("second", [
    {"method": "layer_skip", "exit_layer": 1},
    {"method": "draft_model"},
    {"method": "hybrid"},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("more", [
    {"assistant_confidence_threshold": 0.5},
    {"draft_survival_threshold": 0.3},
    {"num_assistant_tokens_schedule": "heuristic"},
    {"verify_width": "auto", "assistant_confidence_threshold": 0.5},
    {"num_assistant_tokens_schedule": "heuristic", "assistant_confidence_threshold": 0.4},
], ids=str)  # fmt: skip
def test_text_is_plain_decodings(second, more):
    near = tiny.packed(tiny.perturbed(tiny.tiny(), 0.1))
    config = dict(second)
    if config["method"] == "draft_model":
        config["model"] = near
    if config["method"] == "hybrid":
        config["drafters"] = [{"method": "ngram"}, {"method": "draft_model", "model": near}]
    for temperature in (0.0, 0.8):
        sampling = {"max_tokens": BUDGET, "temperature": temperature, "seed": 5, "logprobs": 1}
        want = generate(model(True), PROMPTS, None, sampling, exact=True).sequences
        result = generate(model(True), PROMPTS, config | more, sampling, exact=True)
        assert [(s.token_ids, s.logprobs) for s in result.sequences] == [(s.token_ids, s.logprobs) for s in want]
        assert result.stats.num_accepted_tokens > 0


@pytest.mark.parametrize("config, words", [
    ({"method": "ngram", "num_assistant_tokens_schedule": "linear"}, "must be one of constant"),
    ({"method": "ngram", "num_assistant_tokens_schedule": "heuristic", "verify_width": "auto"}, "give one of them"),
    ({"method": "recycling", "num_assistant_tokens_schedule": "heuristic"}, "drafts a tree"),
    ({"method": "rest", "datastore": "x", "num_assistant_tokens_schedule": "heuristic"}, "give rest_use_tree=False"),
    ({"method": "rest", "datastore": "x", "num_speculative_tokens": 1100}, "is more than 1024"),
    ({"method": "layer_skip", "num_assistant_tokens_schedule": "heuristic", "draft_sample_method": "probabilistic"},
     "use 'heuristic_transient'"),
    ({"method": "ngram", "num_speculative_tokens_per_batch_size": [[2, 1, 3]]}, "lowest <= highest"),
    ({"method": "ngram", "num_speculative_tokens_per_batch_size": [[1, 2, 9]]}, "num_speculative_tokens=5"),
    ({"method": "ngram", "num_speculative_tokens_per_batch_size": [[1, 4, 3], [4, 8, 1]]}, "says twice"),
    ({"method": "ngram", "assistant_confidence_threshold": 0.4}, "stops a model that drafts a chain"),
    ({"method": "layer_skip", "assistant_confidence_threshold": 1.4}, "from 0 to 1"),
    ({"method": "layer_skip", "assistant_confidence_threshold": 0.4, "draft_survival_threshold": 0.4}, "not both"),
    ({"method": "layer_skip", "assistant_confidence_threshold": 0.4, "draft_sample_method": "probabilistic",
      "verify_width": "auto"}, "changes the law"),
    ({"method": "layer_skip", "assistant_confidence_threshold": 0.4, "draft_sample_method": "probabilistic",
      "rejection_sample_method": "block"}, "use 'standard'"),
])  # fmt: skip
def test_bad_combinations_are_refused(config, words):
    with pytest.raises(ValueError, match=words):
        SpeculativeConfig(**config)


def test_lengths_that_no_drafter_makes_are_refused():
    script = tiny.script([[5, 6, 7, 8]], 3)
    table = {"num_speculative_tokens_per_batch_size": [[1, 8, 50]]}
    with pytest.raises(ValueError, match="asks for 50 draft tokens, but the drafter makes 3"):
        generate(model(), [[5, 6]], table, {"max_tokens": 2}, drafter=script)
    for config in (table, {"num_assistant_tokens_schedule": "heuristic"}):
        with pytest.raises(ValueError, match="method='none' makes none"):
            generate(model(), [[5, 6]], {"method": "none", **config}, {"max_tokens": 2})
    tree = tiny.TreeDrafter(), script[1]
    with pytest.raises(ValueError, match="TreeDrafter drafts trees"):
        generate(model(), [[5, 6]], {"num_assistant_tokens_schedule": "heuristic"}, {"max_tokens": 2}, drafter=tree)
