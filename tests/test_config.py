"""Bad options give one error that names the value and what is allowed; nothing is dropped in silence."""

import pytest

from spec_jax.config import SpeculativeConfig, auto_widths, choose_width, parse_speculative_config


@pytest.mark.parametrize(
    "config, message",
    [
        ({"method": "ngrm"}, "did you mean 'ngram'"),
        ({"num_speculative_tokens": 3}, "no 'method'"),
        ({"method": "ngram", "num_speculativ_tokens": 3}, "did you mean 'num_speculative_tokens'"),
        ({"method": "ngram", "num_speculative_tokens": -1}, "num_speculative_tokens=-1"),
        ({"method": "ngram", "num_speculative_tokens": 2.0}, "num_speculative_tokens=2.0"),
        ({"method": "none", "num_speculative_tokens": 2}, "needs a method"),
        ({"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 2}, "min <= max"),
        ({"method": "ngram", "prompt_lookup_max": 0}, "prompt_lookup_max=0"),
        ({"method": "ngram", "model": "x"}, "model belongs to method='draft_model'"),
        ({"method": "ngram", "draft_sample_method": "probabilistic"}, "proposes deterministically"),
        ({"method": "draft_model"}, "needs 'model'"),
        ({"method": "layer_skip", "exit_layer": 0}, "exit_layer=0"),
        ({"method": "layer_skip", "exit_layer": 1, "draft_layers": [0]}, "not both"),
        ({"method": "layer_skip", "draft_layers": [2, 1]}, "ascending"),
        ({"method": "layer_skip", "draft_layers": []}, "draft_layers"),
        ({"method": "ngram", "rejection_sample_method": "blocks"}, "rejection_sample_method='blocks'"),
        ({"method": "ngram", "verify_width": 0}, "verify_width=0"),
        ("{not json", "is not JSON"),
        (["ngram"], "must be a dict"),
    ],
    ids=str,
)
def test_bad_speculative_configs_are_named(config, message):
    with pytest.raises(ValueError, match=message):
        parse_speculative_config(config)


def test_forms_and_defaults():
    assert parse_speculative_config(None).method == "none"
    config = parse_speculative_config('{"method": "ngram"}')
    assert config == parse_speculative_config({"method": "ngram"}) == SpeculativeConfig(method="ngram")
    assert (config.num_speculative_tokens, config.prompt_lookup_max, config.prompt_lookup_min) == (5, 3, 1)
    assert config.rule == "coupled"
    assert parse_speculative_config({"method": "layer_skip", "draft_sample_method": "probabilistic"}).rule == "standard"
    assert parse_speculative_config({"method": "ngram", "prompt_lookup_min": 4}).prompt_lookup_max == 4


@pytest.mark.parametrize(
    "nodes, asked, width", [(0, None, 8), (7, None, 8), (8, None, 16), (31, None, 32), (200, None, 201), (3, 4, 4)]
)
def test_the_default_width_holds_the_drafts_and_the_last_token(nodes, asked, width):
    assert choose_width(nodes, asked) == width


def test_widths_that_cannot_hold_the_drafts_are_refused():
    with pytest.raises(ValueError, match="verify_width=4 cannot hold 4"):
        choose_width(4, 4)
    assert (choose_width(4, "auto"), auto_widths(5), auto_widths(8), auto_widths(16)) == (
        5,
        (1, 4, 5),
        (1, 4, 8),
        (1, 4, 8, 16),
    )
