"""Bad options give one error that names the value and what is allowed; nothing is dropped in silence."""

import numpy as np
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
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 1}, "max_tree_depth=1 must be an integer from 2 to 64"),
        ({"method": "suffix", "suffix_decoding_max_spec_factor": 0}, "max_spec_factor=0 must be a number above 0"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 1.5}, "token_prob=1.5 must be a number from 0 to 1"),
        ({"method": "ngram", "suffix_decoding_max_tree_depth": 9}, "belongs to method='suffix'"),
        ({"method": "suffix", "draft_sample_method": "probabilistic"}, "proposes deterministically"),
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


PATHS = [[0], [1], [0, 0]]
TREE = {"method": "layer_skip", "speculative_token_tree": PATHS}
EAGLE2 = {"method": "layer_skip", "speculative_token_tree": "eagle2"}
OPT_TREE = {"method": "layer_skip", "speculative_token_tree": "opt_tree"}
SAMPLED = {"draft_sample_method": "probabilistic"}


@pytest.mark.parametrize(
    "config, message",
    [
        ({"method": "ngram", "speculative_token_tree": PATHS}, "method='ngram' drafts chains"),
        ({"method": "none", "speculative_token_tree": "eagle2"}, "method='none' drafts chains"),
        (TREE | {"num_speculative_tokens": 4}, "num_speculative_tokens=4, but speculative_token_tree has 3 nodes"),
        (TREE | {"num_speculative_tokens": 0}, "num_speculative_tokens=0, but"),
        (TREE | {"verify_width": "auto"}, "verify_width='auto' chooses how much of a chain"),
        (TREE | {"rejection_sample_method": "standard"}, "'standard' verifies chains.*one of coupled, recursive"),
        (TREE | {"rejection_sample_method": "block"}, "'block' verifies chains"),
        (TREE | {"tree_top_k": 3}, "tree_top_k belongs to a dynamic tree"),
        (TREE | {"tree_threshold": 0.2}, "tree_threshold belongs to a dynamic tree"),
        ({"method": "layer_skip", "tree_depth": 3}, "tree_depth belongs to a dynamic tree"),
        (TREE | {"speculative_token_tree": [[0], [2]]}, r"speculative_token_tree: .*\(2,\)"),
        (TREE | {"speculative_token_tree": []}, "speculative_token_tree: "),
        (TREE | {"speculative_token_tree": "egale2"}, "did you mean 'eagle2'"),
        (TREE | {"speculative_token_tree": "[(0,), (0"}, "speculative_token_tree: .*no list of paths"),
        (EAGLE2 | SAMPLED, "'probabilistic' does not go with speculative_token_tree='eagle2'"),
        (EAGLE2 | {"tree_threshold": 0.5}, "belongs to speculative_token_tree='opt_tree', not 'eagle2'"),
        (EAGLE2 | {"tree_top_k": 0}, "tree_top_k=0 must be an integer from 1 to 64"),
        (EAGLE2 | {"tree_depth": 1.0}, "tree_depth=1.0 must be an integer from 1 to 64"),
        (EAGLE2 | {"tree_top_k": 2, "tree_depth": 3, "num_speculative_tokens": 11}, "more than the 10 candidates"),
        (EAGLE2 | {"num_speculative_tokens": 2.5}, "num_speculative_tokens=2.5"),
        (EAGLE2 | {"tree_top_k": 10**9}, "tree_top_k=1000000000 must be an integer from 1 to 64"),
        (EAGLE2 | {"tree_top_k": 64, "num_speculative_tokens": 3000}, "=3000 is more than the 1024 nodes"),
        (TREE | {"speculative_token_tree": [[0]], "num_speculative_tokens": True}, "num_speculative_tokens=True, but"),
        (TREE | {"rejection_sample_method": "kseq"}, "'kseq' judges siblings drawn independently"),
        (OPT_TREE | {"tree_threshold": 1}, "tree_threshold=1 must be a number from 0 to below 1"),
        (OPT_TREE | {"tree_threshold": float("nan")}, "tree_threshold=nan"),
        (TREE | {"draft_with_replacement": True}, "siblings that are sampled"),
        (TREE | SAMPLED | {"draft_with_replacement": 1}, "draft_with_replacement=1 must be True or False"),
        (TREE | SAMPLED | {"draft_with_replacement": True, "rejection_sample_method": "coupled"}, "another rule"),
        ({"method": "layer_skip", "draft_with_replacement": True, **SAMPLED}, "siblings that are sampled"),
    ],
    ids=str,
)
def test_bad_trees_are_named(config, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        parse_speculative_config(config)


def test_forms_and_defaults_of_trees():
    tree = parse_speculative_config(TREE)
    assert tree.num_speculative_tokens == 3 and tree.rule == "coupled"
    assert tree.speculative_token_tree == ((0,), (1,), (0, 0))
    assert tree == parse_speculative_config(TREE | {"speculative_token_tree": "[(0, 0), (1,), (0,)]"})
    star = parse_speculative_config(TREE | {"speculative_token_tree": np.array([[0], [1]])})
    assert star == parse_speculative_config(TREE | {"speculative_token_tree": [[0], [1]]})
    drawn = TREE | SAMPLED | {"draft_with_replacement": np.bool_(True), "rejection_sample_method": "kseq"}
    assert parse_speculative_config(drawn).draft_with_replacement is True
    assert hash(tree) == hash(parse_speculative_config(TREE | {"num_speculative_tokens": 3}))
    assert parse_speculative_config(TREE | SAMPLED).rule == "recursive"
    eagle2, opt_tree = parse_speculative_config(EAGLE2), parse_speculative_config(OPT_TREE)
    assert (eagle2.num_speculative_tokens, eagle2.tree_top_k, eagle2.tree_depth) == (24, 4, 5)
    assert (opt_tree.tree_top_k, opt_tree.tree_depth, opt_tree.tree_threshold) == (4, 8, 0.5)
    assert eagle2.tree_threshold is None and eagle2.rule == opt_tree.rule == "coupled"
    assert parse_speculative_config(EAGLE2 | {"tree_top_k": 2, "tree_depth": 2}).num_speculative_tokens == 6
    assert parse_speculative_config(EAGLE2 | {"num_speculative_tokens": 0}).num_speculative_tokens == 0


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
