"""Lossy rules: what they keep, that they are called lossy everywhere, and where they are lossless."""

import json
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from test_rounds import BINARY
from test_verify import run_rule, sampling_state

from spec_jax import cli, rule_names
from spec_jax.config import SpeculativeConfig
from spec_jax.drafting.base import Draft, DraftProbs
from spec_jax.generation import generate, make_decoder
from spec_jax.rules.lossy import relaxed_threshold, typical_threshold
from spec_jax.sampling_params import SamplingParams
from spec_jax.verify import verify

GOLDEN = json.loads((pathlib.Path(__file__).parent / "goldens" / "verification.json").read_text())


def test_the_typical_threshold_is_the_golden_value():
    case = GOLDEN["typical_acceptance"]
    with jax.enable_x64(True):
        p = jnp.asarray(case["p"], jnp.float64)
        assert float(typical_threshold(p, case["eps"], case["delta"])) == pytest.approx(case["threshold"], abs=1e-12)
        # Without the cap it is the entropy's part.
        entropy = -math.log(float(typical_threshold(p, 1.0, 1.0)))
    assert entropy == pytest.approx(case["entropy(eps1e-5)"], abs=1e-12)


@pytest.mark.parametrize("top_k, delta, want", [(3, 0.6, 0.2), (3, 0.25, 0.25), (2, 0.6, 0.3), (9, 1.0, 0.0)])
def test_the_relaxed_threshold(top_k, delta, want):
    p = jnp.array([0.3, 0.5, 0.0, 0.2])
    assert float(relaxed_threshold(p, top_k, delta)) == pytest.approx(want)


def reference_path(logits, tokens, parents, accepts):
    """The longest path of accepted nodes, the likeliest of these: (nodes, ...), in plain Python."""
    logs = np.asarray(jax.nn.log_softmax(logits))
    found = {(): 0.0}
    for node, parent in enumerate(parents):  # parents stand in front
        path = next((path for path in found if (path[-1] if path else -1) == parent), None)
        if path is not None and accepts(np.exp(logs[parent + 1]), tokens[node]):
            found[(*path, node)] = found[path] + logs[parent + 1][tokens[node]]
    return max(found, key=lambda path: (len(path), found[path]))


@pytest.mark.parametrize("rule, options", [("lossy_typical", (0.09, 0.3)), ("lossy_relaxed", (3, 0.2))])
def test_the_longest_path_is_kept_and_the_likeliest_of_these(rule, options):
    batch, vocab, rng = 24, 5, np.random.default_rng(0)
    parents = np.array(BINARY)
    logits = rng.normal(size=(batch, 7, vocab)).astype(np.float32) * 1.5
    tokens = rng.integers(0, vocab, (batch, 6))
    depth = jnp.broadcast_to(jnp.array([0, 1, 1, 2, 2, 2, 2]), (batch, 7))
    row_parents = jnp.broadcast_to(jnp.asarray(parents + 1), (batch, 6))
    draft = Draft(jnp.asarray(tokens, jnp.int32), jnp.full(batch, 6, jnp.int32))
    state, ones = sampling_state(batch), jnp.ones(batch, jnp.int32)
    verdict = verify(rule, jnp.asarray(logits), draft, row_parents, depth, False, ones, state, vocab, options=options)

    def accepts(p, token):
        if rule == "lossy_typical":
            return p[token] > min(options[0], options[1] * math.exp((p * np.log(p + 1e-5)).sum()))
        return p[token] >= max(np.sort(p)[-options[0]], p.max() - options[1])

    lengths = []
    for row in range(batch):
        want = reference_path(logits[row], tokens[row], parents, accepts)
        lengths.append(len(want))
        assert int(verdict.num_accepted[row]) == len(want)
        assert verdict.path[row, 1 : len(want) + 1].tolist() == [node + 1 for node in want]
    assert set(lengths) == {0, 1, 2}


@pytest.mark.parametrize("lenience", [1.0, 0.5, 0.3])
def test_lenience_accepts_as_often_as_leviathan_says_and_stays_within_its_bound(lenience):
    """alpha_l = sum(min(p / l, q)) and P(x) <= p(x) / l, appendix A.5 of https://arxiv.org/abs/2211.17192."""
    p, q, samples = np.array([0.3, 0.4, 0.3]), np.array([0.6, 0.3, 0.1]), 20_000
    tokens = np.random.default_rng(1).choice(3, size=(samples, 1), p=q)
    probs = jnp.broadcast_to(jnp.asarray(q, jnp.float32), (samples, 1, 3))
    draft = Draft(jnp.asarray(tokens, jnp.int32), jnp.ones(samples, jnp.int32), DraftProbs(probs))
    logits = jnp.broadcast_to(jnp.log(jnp.asarray(p, jnp.float32)), (samples, 2, 3))
    ones = jnp.ones(samples, jnp.int32)
    verdict = run_rule("lossy_lenience", logits, draft, sampling_state(samples), ones, 3, (lenience,))
    assert float(verdict.num_accepted.mean()) == pytest.approx(np.minimum(p / lenience, q).sum(), abs=0.015)
    law = np.bincount(np.asarray(verdict.tokens[:, 0]), minlength=3) / samples
    assert (law <= p / lenience + 0.015).all()
    if lenience == 1:
        np.testing.assert_allclose(law, p, atol=0.015)


@pytest.mark.parametrize("lenience, want", [(1.0, 0), (0.6, 1), (0.2, 2)])
def test_at_temperature_0_lenience_keeps_what_is_near_the_maximum(lenience, want):
    logits = jnp.log(jnp.array([[[0.5, 0.35, 0.15], [0.7, 0.2, 0.1], [0.2, 0.3, 0.5]]]))
    draft = Draft(jnp.array([[1, 1]], jnp.int32), jnp.array([2], jnp.int32))
    one = jnp.ones(1, jnp.int32)
    verdict = run_rule("lossy_lenience", logits, draft, sampling_state(1, temperature=0.0), one, 3, (lenience,))
    assert int(verdict.num_accepted[0]) == want
    assert int(verdict.tokens[0, want]) == [0, 0, 2][want]


@pytest.mark.parametrize("rule", ["lossy_typical", "lossy_relaxed"])
def test_greedy_text_is_plain_decoding_s(rule):
    model = tiny.tiny()
    prompts = tiny.prompts_of(model, (5, 9))
    text = tiny.plain(model, prompts, {"max_tokens": 12})
    script = tiny.script([p + t for p, t in zip(prompts, text, strict=True)], 3, wrong=[8, 12])
    result = generate(model, prompts, {"rejection_sample_method": rule}, {"max_tokens": 12}, drafter=script)
    assert [s.token_ids for s in result.sequences] == text
    assert result.stats.num_accepted_tokens > 0


def test_a_result_is_called_lossy(capsys):
    model = tiny.tiny()
    result = generate(
        model,
        [[1, 2, 3, 1, 2]],
        {"method": "ngram", "rejection_sample_method": "typical"},
        SamplingParams(max_tokens=4, temperature=1.0, seed=0),
    )
    assert result.exactness == "lossy"
    with pytest.raises(SystemExit):
        cli.main(["generate", "--help"])
    assert "The lossy ones change the output" in " ".join(capsys.readouterr().out.split())


def test_names_and_options():
    assert all(name.startswith("lossy_") for name in rule_names.LOSSY)
    config = SpeculativeConfig(method="ngram", rejection_sample_method="typical", posterior_alpha=0.5)
    assert config.rule == "lossy_typical" and config.rule_options == (0.09, 0.5)
    assert SpeculativeConfig(method="ngram").rule_options == ()
    decoder = make_decoder(tiny.tiny(), rejection_sample_method="lenience", rule_options={"lenience": 0.25})[0].__self__
    assert (decoder.rule, decoder.rule_options) == ("lossy_lenience", (0.25,))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"posterior_alpha": 0.5}, "posterior_alpha belongs to rejection_sample_method='lossy_typical'"),
        (
            {"rejection_sample_method": "lossy_typical", "posterior_alpha": 2},
            "posterior_alpha=2 must be a number betwe",
        ),
        ({"rejection_sample_method": "lossy_lenience", "lenience": 0}, "lenience=0 would accept every draft"),
        ({"rejection_sample_method": "lossy_relaxed", "relaxed_top_k": 0.5}, "relaxed_top_k=0.5 must be an integer"),
        ({"rejection_sample_method": "relaxd"}, "did you mean"),
    ],
)
def test_bad_options_are_one_clear_error(options, message):
    with pytest.raises(ValueError, match=message):
        SpeculativeConfig(method="ngram", **options)
