"""Rules inside `generate`: greedy text, and sampled texts that depend on their own seed only."""

import pytest
import tiny

import spec_jax
from spec_jax.kernels import cpu

needs_kernels = pytest.mark.skipif(cpu.unavailable() is not None, reason="needs the CPU kernels")


def generated(rule, method, seeds, temperature, **config):
    """Of a tiny model, with drafts from its own first layer: token ids and tokens per step."""
    target = tiny.with_text(tiny.tiny(layers=2))
    options = {"method": method, "rejection_sample_method": rule, **config}
    params = [
        spec_jax.SamplingParams(temperature=temperature, max_tokens=24, seed=seed, ignore_eos=True) for seed in seeds
    ]
    result = spec_jax.generate(target, ["abc abd"] * len(seeds), options, params)
    return [s.token_ids for s in result.sequences], result.stats


@pytest.mark.parametrize("method", ["ngram", pytest.param("layer_skip", marks=pytest.mark.slow)])
def test_greedy_text_is_plain_decodings(method):
    extra = {"draft_sample_method": "probabilistic", "exit_layer": 1} if method == "layer_skip" else {}
    got, stats = generated("block", method, [1, 2], 0.0, num_speculative_tokens=3, **extra)
    want, _ = generated(None, "none", [1, 2], 0.0)
    assert got == want and stats.num_drafts > 0


@pytest.mark.slow
def test_a_sampled_text_depends_on_its_own_seed_only():
    config = {"num_speculative_tokens": 3, "draft_sample_method": "probabilistic", "exit_layer": 1}
    together, stats = generated("block", "layer_skip", [1, 2, 3], 1.0, **config)
    alone, _ = generated("block", "layer_skip", [2], 1.0, **config)
    assert together[1] == alone[0] and together[0] != together[1]
    assert stats.num_accepted_tokens > 0


TREE = {"speculative_token_tree": [[0], [1], [0, 0], [1, 0]]}


@pytest.mark.parametrize("is_packed", [False, pytest.param(True, marks=[pytest.mark.slow, needs_kernels])])
@pytest.mark.parametrize(
    "rule, draft",
    [
        pytest.param("standard", {"num_speculative_tokens": 3}, marks=pytest.mark.slow),
        pytest.param("block", {"num_speculative_tokens": 3}, marks=pytest.mark.slow),
        pytest.param("recursive", TREE, marks=pytest.mark.slow),
        pytest.param("traversal", TREE, marks=pytest.mark.slow),
        pytest.param("kseq", TREE | {"draft_with_replacement": True}, marks=pytest.mark.slow),
    ],
)
def test_filters_that_leave_one_token_leave_the_greedy_text(rule, draft, is_packed):
    """At many temperatures, since a score on the edge of a filter must be on the same side wherever it is computed."""
    model = tiny.packed(tiny.tiny()) if is_packed else tiny.tiny()
    filters = [{"top_k": 1}, {"top_p": 1e-3}, {"min_p": 1.0}]
    params = [
        spec_jax.SamplingParams(temperature=t, max_tokens=12, seed=0, ignore_eos=True, **f)
        for t in (0.3, 0.6, 0.7, 0.73, 0.8, 0.9)
        for f in filters
    ]
    prompt = [5, 1, 17, 5]
    (greedy,) = tiny.plain(model, [prompt], {"max_tokens": 12})
    config = {"method": "layer_skip", "exit_layer": 1, "draft_sample_method": "probabilistic", **draft}
    result = spec_jax.generate(model, [prompt] * len(params), config | {"rejection_sample_method": rule}, params)
    assert [s.token_ids for s in result.sequences] == [greedy] * len(params)
    counts = {s.stats.num_accepted_tokens for s in result.sequences}
    assert len(counts) == 1 and counts != {0}  # drafts have the same one token
