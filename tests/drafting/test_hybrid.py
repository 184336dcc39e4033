"""Hybrids and cascades: who drafts when, and that neither part is led astray by what the other one drafted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from spec_jax.config import SpeculativeConfig
from spec_jax.drafting.base import Seen
from spec_jax.drafting.cascade import CascadeDrafter
from spec_jax.drafting.draft_model import DraftModelDrafter
from spec_jax.drafting.hybrid import HybridDrafter
from spec_jax.drafting.registry import build_drafter
from spec_jax.generation import generate
from spec_jax.models.layers import RowBlocks

PROMPTS = [[7], [0, 9, 0, 9], [4, 5, 6, 7] * 4]
BUDGET, K = 40, 4
TREE = [[0], [1], [0, 0], [0, 1], [0, 0, 0]]


def model():
    return tiny.tiny()


def scripted(wrong):
    """A first drafter that proposes at every third position, with errors, and the texts it knows."""
    plain = tiny.plain(model(), PROMPTS, {"max_tokens": BUDGET})
    texts = [prompt + text for prompt, text in zip(PROMPTS, plain, strict=True)]
    counts = {position: K if position % 3 == 0 else 0 for position in range(300)}
    return texts, tiny.script(texts, K, wrong, counts=counts)


@pytest.mark.parametrize(
    "wrong",
    [pytest.param("all", marks=pytest.mark.slow), tuple(range(0, 300, 5))],
    ids=["always wrong", "sometimes wrong"],
)
@pytest.mark.parametrize("tree", [pytest.param(None, marks=pytest.mark.slow), TREE], ids=["chain", "tree"])
def test_a_part_goes_on_rightly_behind_drafts_of_the_other(wrong, tree):
    """The second drafter is the target itself: whatever it drafts is right, unless its cache holds foreign drafts."""
    texts, (first, script) = scripted(wrong)
    options = {"speculative_token_tree": tree} if tree else {"num_speculative_tokens": K}
    config = SpeculativeConfig(method="draft_model", model=model(), **options)
    second, params = build_drafter(config, model(), RowBlocks())
    result = generate(model(), PROMPTS, None, {"max_tokens": BUDGET}, drafter=(
        HybridDrafter(first, second, threshold=0.0), (script, params)))  # fmt: skip
    deepest = max(map(len, tree)) if tree else K
    is_wrong = [wrong == "all" or p in wrong for p in range(300)]
    for prompt, text, sequence in zip(PROMPTS, texts, result.sequences, strict=True):
        assert prompt + sequence.token_ids == text
        at, steps = len(prompt), 0
        while at < len(text):
            if at % 3 == 0:
                run = next(i for i in range(K + 1) if i == K or is_wrong[at + i])
            else:
                run = deepest
            at, steps = min(at + run + 1, len(text)), steps + 1
        assert sequence.stats.num_steps == steps


@pytest.mark.parametrize("second", [
    {"method": "draft_model", "num_speculative_tokens": 3},
    {"method": "draft_model", "speculative_token_tree": TREE},
    {"method": "layer_skip", "exit_layer": 1},
], ids=str)  # fmt: skip
@pytest.mark.slow
def test_text_is_plain_decodings(second):
    near = tiny.perturbed(model(), 0.1)
    second = second | ({"model": near} if second["method"] == "draft_model" else {})
    for temperature in (0.0, 0.8):
        sampling = {"max_tokens": BUDGET, "temperature": temperature, "seed": 3}
        want = generate(model(), PROMPTS, None, sampling, exact=True)
        config = {"method": "hybrid", "drafters": [{"method": "ngram"}, second]}
        result = generate(model(), PROMPTS, config, sampling, exact=True)
        assert [s.token_ids for s in result.sequences] == [s.token_ids for s in want.sequences]
        assert result.stats.num_accepted_tokens > 0


@pytest.mark.slow
def test_the_second_drafts_where_the_first_expects_less():
    """A threshold of 0 takes every proposal of the first, one out of reach none; between them something of both."""
    near = tiny.perturbed(model(), 0.1)
    parts = [{"method": "ngram"}, {"method": "draft_model", "model": near, "num_speculative_tokens": 2}]
    drafted = {}
    for threshold in (0.0, 1.0, 99.0, None):
        config = {"method": "hybrid", "drafters": parts, "hybrid_threshold": threshold}
        stats = generate(model(), PROMPTS, config, {"max_tokens": BUDGET}).stats
        drafted[threshold] = stats.num_draft_tokens / stats.num_drafts
    alone = generate(model(), PROMPTS, parts[1], {"max_tokens": BUDGET}).stats
    assert drafted[99.0] == alone.num_draft_tokens / alone.num_drafts
    assert drafted[99.0] < drafted[1.0] < drafted[0.0]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.slow
def test_a_cascade_proposes_what_its_model_proposes_alone(temperature):
    near = tiny.perturbed(model(), 0.1)
    sampling = {"max_tokens": BUDGET, "temperature": temperature, "seed": 3}
    alone = {"method": "draft_model", "model": near, "num_speculative_tokens": 6}
    found = [
        generate(model(), PROMPTS, config, sampling, exact=True)
        for config in (alone, {**alone, "method": "cascade", "drafters": [{"method": "ngram"}]})
    ]
    for a, b in zip(*(r.sequences for r in found), strict=True):
        assert a.token_ids == b.token_ids
        assert a.stats == b.stats


@pytest.mark.slow
def test_a_cascade_takes_fewer_passes_of_its_model(monkeypatch):
    """Where the inner drafter knows what the model will say, one pass drafts everything."""
    text = PROMPTS[0] + tiny.plain(model(), PROMPTS[:1], {"max_tokens": BUDGET})[0]
    config = SpeculativeConfig(method="cascade", model=model(), drafters=[{"method": "ngram"}])
    drafter, (weights, _) = build_drafter(config, model(), RowBlocks())
    passes, forward = [], DraftModelDrafter.forward

    def counted(self, *arguments, **options):
        jax.debug.callback(lambda: passes.append(1))
        return forward(self, *arguments, **options)

    monkeypatch.setattr(DraftModelDrafter, "forward", counted)
    found = []
    for wrong in ((), "all"):
        passes.clear()
        inner, params = tiny.script([text], 6, wrong)
        pair = CascadeDrafter(drafter.model, inner), (weights, params)
        result = generate(model(), PROMPTS[:1], None, {"max_tokens": BUDGET}, drafter=pair)
        jax.effects_barrier()
        found.append((len(passes), result.sequences[0]))
    (few, ours), (many, theirs) = found
    assert ours.token_ids == theirs.token_ids and ours.stats == theirs.stats
    assert 0 < few < many / 2


@pytest.mark.parametrize("config, words", [
    ({"method": "hybrid"}, "a list of 2 configurations"),
    ({"method": "hybrid", "drafters": [{"method": "ngram"}]}, "a list of 2 configurations"),
    ({"method": "ngram", "drafters": [{"method": "ngram"}]}, "belongs to method='hybrid' and method='cascade'"),
    ({"method": "hybrid", "drafters": [{"method": "layer_skip"}, {"method": "ngram"}]}, "must copy chains"),
    ({"method": "hybrid", "drafters": [{"method": "ngram"}, {"method": "none"}]}, "cannot have method='none'"),
    ({"method": "hybrid", "num_speculative_tokens": 2, "drafters": [{"method": "ngram"}, {"method": "layer_skip"}]},
     "give it in drafters"),
    ({"method": "hybrid", "drafters": [{"method": "ngram", "verify_width": 8}, {"method": "layer_skip"}]},
     "given once"),
    ({"method": "hybrid", "hybrid_threshold": -1, "drafters": [{"method": "ngram"}, {"method": "layer_skip"}]},
     "hybrid_threshold=-1"),
    ({"method": "cascade", "drafters": [{"method": "ngram"}]}, "needs 'model'"),
    ({"method": "ngram", "hybrid_threshold": 1.0}, "belongs to method='hybrid'"),
    *(({"method": "hybrid", "drafters": [{"method": "ngram"}, {"method": "layer_skip", **part}]}, words)
      for part, words in (
        ({"assistant_confidence_threshold": 0.4}, "is given once, beside"),
        ({"num_assistant_tokens_schedule": "heuristic"}, "is given once, beside"),
        ({"num_speculative_tokens_per_batch_size": [[1, 2, 1]]}, "is given once, beside"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens=0 does not go"))),
    ({"method": "hybrid", "drafters": [{"method": "ngram"}, {"method": "lookahead"}]}, "cannot have method='lookahea"),
    ({"method": "hybrid", "draft_sample_method": "nonsense",
      "drafters": [{"method": "ngram"}, {"method": "layer_skip"}]}, "draft_sample_method='nonsense'"),
    ({"method": "hybrid", "draft_sample_method": "probabilistic",
      "drafters": [{"method": "ngram"}, {"method": "layer_skip"}]}, "give it there"),
    ({"method": "hybrid", "rejection_sample_method": "standard",
      "drafters": [{"method": "ngram"}, {"method": "recycling"}]}, "verifies chains"),
    ({"method": "lookahead", "lookahead_pool_from_prompt": 0}, "must be True or False"),
])  # fmt: skip
def test_bad_configurations_are_refused(config, words):
    with pytest.raises(ValueError, match=words):
        SpeculativeConfig(**config)


def test_what_is_expected_of_the_second_is_what_its_verified_drafts_have_reached():
    """Drafts that a policy left out, or cut short, are no failures."""
    second = {"method": "draft_model", "model": model(), "num_speculative_tokens": 6}  # always right
    config = {"method": "hybrid", "drafters": [{"method": "ngram"}, second], "hybrid_threshold": 99.0}
    drafter, params = build_drafter(SpeculativeConfig(**config), model(), RowBlocks())
    state = drafter.init(params, None, 3, 128)
    before = float(state.expected[0])
    one = jnp.ones((3, 7), jnp.int32)
    seen = Seen(
        one,
        one,
        jnp.zeros(3, jnp.int32),
        jnp.array([1, 2, 3]),
        {},
        None,
        jnp.zeros_like(one),
        False,
        drafted=jnp.array([0, 1, 6]),
    )
    after = np.asarray(drafter.commit(params, state, seen).expected)
    assert after[0] == before and after[1] == before  # nothing was drafted; all of one token was right
    assert after[2] != before  # two of six


@pytest.mark.slow
def test_a_hybrid_of_sampled_drafts_keeps_the_first_ones_one_hot():
    near = tiny.perturbed(model(), 0.1)
    second = {"method": "draft_model", "model": near, "draft_sample_method": "probabilistic"}
    config = SpeculativeConfig(method="hybrid", drafters=[{"method": "ngram"}, second])
    assert config.rule == "standard" and config.draft_sample_method == "probabilistic"
    want = tiny.plain(model(), PROMPTS, {"max_tokens": BUDGET})
    result = generate(model(), PROMPTS, config, {"max_tokens": BUDGET})
    assert [s.token_ids for s in result.sequences] == want  # greedy rows under `standard`
    assert np.mean(np.concatenate([s.accepted for s in result.sequences])) > 0.1
